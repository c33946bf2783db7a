"""Heads that draft all levels in one pass, in engines: tokens are those of plain decoding, and trees the best that a
block says."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import blockzoo
import modelzoo
import reference_blocks
from blocks_world import FORMS, LAYERS, SMALL, pair_of
from drafts_world import Seen, Watched
from exact_world import SAMPLED, check, plain, requests
from modelrun import Driver
from modelzoo import Pair
from reference_blocks import Block
from specrs import LLM, ConfigError, SamplingParams, StructuredOutputs
from specrs.capsule.replay import replay
from specrs.engine.config import BlockEngineConfig
from specrs.engine.drafting.chooser import Kind, TreePolicy
from specrs.engine.drafting.costs import Costs, PassCost
from specrs.models import LlamaModel, ModelConfig, check_draft, torch_ops
from specrs.models.acceptance import UNKNOWN
from specrs.models.cuda import why_not

HEATS: dict[str, dict[str, Any]] = {
    "greedy": {}, "cool": SAMPLED, "hot": {"temperature": 1.2, "frequency_penalty": 0.3},
}  # fmt: skip


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(tmp_path_factory.mktemp("blocks"), request.param)


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(tmp_path_factory.mktemp("dflash"), "DFlash")


@pytest.mark.parametrize("heat", HEATS)
def test_every_tree_gives_the_plain_tokens(pair: Pair, heat: str) -> None:
    prompts, params = requests(8, seed=3, **HEATS[heat])
    want = plain(pair, prompts, params)
    accepted = 0
    trees: list[tuple[Any, int, int]] = [(None, 8, 16), ((1, 5, 6), 3, 1), ((3, 4, 12), 4, 4), ((8, 15, 40), 1, 64),
                                         ((2, 1, 2), 5, 4)]  # fmt: skip
    for tree, batch, page in trees:
        llm = LLM(pair.target, pair.draft, tree=tree, max_batch=batch, page_size=page, prefill_chunk=11)
        for out in check(llm, prompts, params, want):
            accepted += sum(n * count for n, count in enumerate(out.accepted_drafts))
            assert out.draft_error is None
    assert accepted > 0, "drafts must have been accepted for this to mean anything"


def test_other_options_give_the_plain_tokens(pair: Pair) -> None:
    """Other sources beside the head, a warm prefix cache, bf16 KV, and a pool too small for all."""
    prompts, params = requests(8, seed=11, **SAMPLED)
    want = plain(pair, prompts, params)
    options: list[dict[str, Any]] = [
        {"drafters": ["suffix", "recycling", "head"]}, {"drafters": ["suffix", "head"], "tree": (3, 4, 12)},
        {"tree": (2, 3, 8), "max_batch": 2, "page_size": 4}, {"page_size": 4, "num_pages": 44},
        {"tree": (2, 4, 8), "page_size": 4, "num_pages": 44}, {"prefix_cache": False},
    ]  # fmt: skip
    for option in options:
        llm = LLM(pair.target, pair.draft, **option)
        check(llm, prompts, params, want)
        again = check(llm, prompts, params, want)
        assert "max_batch" not in option or sum(o.usage.cached_tokens for o in again) > 150


def test_the_cost_model_picks_from_a_block(pair: Pair) -> None:
    """Where a block is cheap, all that is likely is verified, and where verifying is dear, only the likeliest."""
    prompts, params = requests(6, seed=4, **SAMPLED)
    want, proposed = plain(pair, prompts, params), []
    for row in (0.01, 0.5):
        llm = LLM(pair.target, pair.draft, max_batch=3)
        free, one = PassCost([1], [0.0]), PassCost([1], [0.05])
        costs = Costs(PassCost([1, 65], [1.0, 1.0 + 64 * row]), free, one, free)
        assert llm._parts is not None
        llm._parts[0].drafting.price(TreePolicy(costs, [Kind.of(one, 17) for one in UNKNOWN]))
        outputs = check(llm, prompts, params, want)
        proposed.append(sum(out.proposed for out in outputs) / sum(out.rounds for out in outputs))
    assert proposed[0] > max(1, 2 * proposed[1])


def test_a_grammar_gives_the_plain_tokens(tmp_path: Path) -> None:
    target = modelzoo.write_target(tmp_path / "target", tokenizer=True)
    b = replace(SMALL, vocab=300)
    blockzoo.write_block(tmp_path / "head", "DFlash", b, LAYERS)
    form = StructuredOutputs(regex="[a-c]{4,30}")
    params = [SamplingParams(max_tokens=24, seed=i, temperature=i % 2, structured_outputs=form) for i in range(4)]
    prompts = [[5 + i, 9, 30] for i in range(4)]
    want = [
        LLM(target, speculative=False).generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)
    ]
    for tree in (None, (4, 4, 16)):
        check(LLM(target, tmp_path / "head", tree=tree), prompts, params, want)


def test_blocks_end_where_the_context_does(pair: Pair) -> None:
    """Blocks are shorter there, and the last position has none."""
    prompts = [[1, 2, 3] * 5, [4] * 37]
    params = [SamplingParams(max_tokens=60, ignore_eos=True) for _ in prompts]
    want = plain(pair, prompts, params, max_context_len=40)
    for tree in ((3, 5, 16), None):
        outputs = check(LLM(pair.target, pair.draft, tree=tree, max_context_len=40, page_size=4), prompts, params, want)
        assert [len(out.token_ids) for out in outputs] == [25, 3]


def best_tree(levels: torch.Tensor, width: int, nodes: int) -> dict[tuple[int, ...], float]:
    """The paths of the best tree by cumulative log-probability, of all there are."""
    each = [list(zip(*(x.tolist() for x in level.topk(width)), strict=True)) for level in levels]
    paths: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(1, len(each) + 1):
        for steps in itertools.product(*each[:depth]):
            paths[tuple(int(token) for _, token in steps)] = sum(p for p, _ in steps)
    return dict(heapq.nlargest(nodes, paths.items(), key=lambda path: path[1]))


def paths_of(seen: Seen) -> list[tuple[int, ...]]:
    """The tokens from below the root down to each node."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(seen.tree.parents[1:], seen.tree.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def watched_rounds(pair: Pair, tree: tuple[int, int, int], temperature: float) -> list[Seen]:
    watched = Watched(LLM(pair.target, pair.draft, tree=tree))
    for i in range(3):
        watched.add([7, 2, i, 5 + i], 14, temperature=temperature, seed=i)
    watched.finish()
    return watched.rounds


def levels_of(pair: Pair, name: str, seen: Seen, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and rows of a round's block by the restatement, over features of one pass over the whole text."""
    form, b = FORMS[name]
    model = LlamaModel.load(pair.target, torch_ops())
    model.set_aux_layers(b.streams)
    driver = Driver(model, max_context=128)
    _, features = driver.extend([driver.new()], [0], [seen.tokens[:-1]], aux=True)
    assert features is not None
    read, weights = modelzoo.read_weights(pair.target), weights_of(pair, form, b)
    tables = read["model.embed_tokens.weight"], read["lm_head.weight"]
    logits, rows = reference_blocks.logits_of(b, weights, *tables, features, seen.tokens[-1])
    levels = min(seen.depth, most, b.depth)
    return reference_blocks.chosen_from(b, logits[:levels]), rows[:levels]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_round_verifies_the_best_tree_of_its_block(dflash: Pair, temperature: float) -> None:
    heat, compared = 1 / temperature if temperature else 1.0, 0
    for seen in watched_rounds(dflash, (3, 4, 9), temperature):
        logits, _ = levels_of(dflash, "DFlash", seen, 4)
        want, paths = best_tree((logits * heat).log_softmax(-1), 3, 9), paths_of(seen)
        assert len(paths) == len(want)
        for path, score in zip(paths, seen.tree.scores, strict=True):
            assert path not in want or score == pytest.approx(want[path], abs=2e-4)
        missed = set(want) - set(paths)
        assert all(want[path] < min(seen.tree.scores) + 1e-3 for path in missed), "only near ties may differ"
        compared += len(logits) > 0
    assert compared > 8


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["DSpark", "DSpark of DeepSpec", "Domino", "DFlash2"])
def test_a_round_verifies_nearly_the_best_tree_where_levels_depend_on_the_path(
    tmp_path: Path, name: str, temperature: float
) -> None:
    """Against all paths of three levels: each score is its path's, and the tree's yield is nearly the best tree's."""
    pair, (form, b) = pair_of(tmp_path, name), FORMS[name]
    weights, heat = weights_of(pair, form, b), 1 / temperature if temperature else 1.0
    got, most, table = 0.0, 0.0, modelzoo.read_weights(pair.target)["model.embed_tokens.weight"]
    for seen in watched_rounds(pair, (8, 3, 9), temperature):
        logits, rows = levels_of(pair, name, seen, 3)
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        for level in range(len(logits)):
            for path in [path for path in scores if len(path) == level]:
                bias = reference_blocks.biases_of(b, weights, rows, [seen.tokens[-1], *path], table)
                each = ((logits[level] + bias) * heat).log_softmax(-1).tolist()
                scores |= {(*path, token): scores[path] + p for token, p in enumerate(each)}
        for path, score in zip(paths_of(seen), seen.tree.scores, strict=True):
            assert score == pytest.approx(scores[path], abs=1e-3)
        got += sum(math.exp(score) for score in seen.tree.scores)
        most += sum(map(math.exp, heapq.nlargest(len(seen.tree.scores), scores.values())))
    assert got > 0.98 * most > 10


def weights_of(pair: Pair, form: str, b: Block) -> dict[str, torch.Tensor]:
    """A head's weights as stored, by the names of the restatement."""
    stored, ours = modelzoo.read_weights(pair.draft), list(reference_blocks.random_block(b, 1))
    names = blockzoo.tensors_of(form, b, {name: torch.tensor([i]) for i, name in enumerate(ours)})
    return {ours[int(at)]: stored[name] for name, at in names.items()}


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("DFlash", "layers.1.mlp.down_proj.weight"), ("DFlash", "layers.1.self_attn.v_proj.weight"),
     ("DFlash", "norm.weight"), ("P-EAGLE", "layers.1.mlp.down_proj.weight"), ("P-EAGLE", "mask_hidden"),
     ("DSpark", "logit_head.markov_head.markov_w2.weight"), ("DFlash2", "layers.0.mlp_conv.base_kernel"),
     ("DFlash2", "candidate_selector.predecessor_codebook")],
)  # fmt: skip
@pytest.mark.parametrize("tree", [None, (3, 4, 9)])
def test_a_head_that_gives_nan_costs_its_drafts_alone(tmp_path: Path, name: str, tensor: str, tree: Any) -> None:
    pair = pair_of(tmp_path, name)
    prompts, params = requests(4, seed=2)
    want = plain(pair, prompts, params)
    tensors = modelzoo.read_weights(pair.draft)
    tensors[tensor][0] = float("nan")
    save_file(tensors, pair.draft / "model.safetensors")
    outputs = check(LLM(pair.target, pair.draft, tree=tree), prompts, params, want)
    assert tree is None or any(out.draft_error is not None for out in outputs)
    assert sum(out.proposed for out in outputs) == 0


def test_a_temperature_near_0_loses_no_drafts(dflash: Pair) -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, seed=1) for t in (1e-30, 1e-4)]
    for out in check(LLM(dflash.target, dflash.draft, tree=(3, 4, 9)), prompts, params, plain(dflash, prompts, params)):
        assert out.draft_error is None and out.proposed > 0


def test_a_head_that_scores_all_tokens_alike_changes_nothing(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, "DSpark of speculators")
    tensors = modelzoo.read_weights(pair.draft)
    tensors |= {name: torch.zeros_like(tensors[name]) for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    save_file(tensors, pair.draft / "model.safetensors")
    prompts, params = requests(4, seed=2)
    check(LLM(pair.target, pair.draft, tree=(4, 4, 20)), prompts, params, plain(pair, prompts, params))


def test_a_recorded_round_replays(dflash: Pair, tmp_path: Path) -> None:
    llm = LLM(dflash.target, dflash.draft, tree=(3, 4, 9), page_size=4)
    with llm.recording(tmp_path / "round.capsule", round=2) as recorder:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=12, ignore_eos=True))
    assert recorder.capsule is not None and recorder.capsule.kind == "speculative"
    run = replay(recorder.capsule)
    assert run.guard is None and {"verify", "commit", "draft extend"} <= {part.phase for part in run.segments}
    assert recorder.capsule.trees and not recorder.capsule.steps, "a block has no draft steps"


def test_sizes_follow_from_the_block(dflash: Pair, tmp_path: Path) -> None:
    wide = pair_of(tmp_path, "JetSpec")
    for pair, tree, shape, nodes, deepest in (
        (dflash, None, (1, 16, 17), 17, 5), (dflash, (3, 4, 12), (1, 11, 12), 12, 4),
        (dflash, (2, 1, 2), (1, 5, 6), 2, 1), (wide, None, (1, 16, 17), 17, 15),
        (wide, (4, 20, 10), (1, 20, 21), 10, 9),
    ):  # fmt: skip
        config = LLM(pair.target, pair.draft, tree=tree).config
        assert isinstance(config, BlockEngineConfig)
        s = config.shape
        assert ((s.topk, s.steps, s.draft_tokens), config.nodes, config.deepest) == (shape, nodes, deepest), tree
    assert LLM(dflash.target, dflash.draft, drafters=["head", "suffix"]).config.deepest == 32


def test_a_gpu_takes_a_block_whose_products_it_takes(tmp_path: Path) -> None:
    big = replace(SMALL, vocab=304, heads=4, kv_heads=2, head_dim=64, inner=96, rank=16)
    target = ModelConfig.from_directory(modelzoo.write_target(tmp_path / "target", head_dim=64, vocab_size=304))
    for name, b, why in (
        ("DFlash", big, None), ("DSpark", replace(big, markov="vanilla"), None),
        ("DSpark", replace(big, markov="vanilla", rank=12), "a matrix of 12 rows or columns"),
        ("Domino", replace(big, free=1, state=9), "a matrix of 9 rows or columns"),
        ("DFlash", replace(big, head_dim=10), "head_dim = 10"),
        ("DFlash2", replace(big, taps=2, candidates=8), None),
        ("DFlash2", replace(big, taps=2, candidates=33), "selector_top_k = 33: a GPU lists at most 32 tokens"),
        ("DFlash2", replace(big, taps=1, group=64, candidates=8), "a matrix of 2 rows or columns"),
    ):  # fmt: skip
        blockzoo.write_block(tmp_path / "head", name, b, LAYERS)
        found = why_not(check_draft(tmp_path / "head", target)[0])
        assert found is None if why is None else found is not None and found.startswith(why)


def test_what_cannot_run_a_block_says_so(dflash: Pair, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"attention_backend = 'flash_attention': attends causally, and a block of a DFl"
    ):
        LLM(dflash.target, dflash.draft, attention_backend="flash_attention")
    for name in ("JetSpec", "P-EAGLE"):
        causal = pair_of(tmp_path / name, name)
        prompts, params = requests(3, seed=5)
        want = plain(causal, prompts, params, attention_backend="flash_attention")
        for tree in (None, (3, 4, 9)):
            llm = LLM(causal.target, causal.draft, tree=tree, attention_backend="flash_attention")
            check(llm, prompts, params, want)
