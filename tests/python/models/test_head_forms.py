"""EAGLE-3 heads in every form that trainers write, against a restatement of each (`reference_heads`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headzoo
import modelzoo
import reference_heads
from modelrun import Driver, random_tokens
from reference_heads import Sizes
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs.engine.devices.memory_plan import Head, head_elements
from specrs.models import HOST, Eagle3Config, Eagle3Head, LlamaModel, Ops, check_draft, ops_for, torch_ops
from specrs.models.host_memory import head_bytes
from specrs.models.layer import Workspace

OPS: dict[str, Any] = {"torch": torch_ops, "host": ops_for}
TARGET_LAYERS = 6
FORMS: dict[str, tuple[str, Sizes]] = {
    "speculators": ("speculators", Sizes(qk_norm=True, eps=1e-6)),
    "speculators, norms": (
        "speculators llama",
        Sizes(norm_before_residual=True, norm_before_fc=True, streams=(1, 5), theta=5e5),
    ),
    "speculators, layers": ("speculators", Sizes(qk_norm=True, layers=3, norm_before_residual=True)),
    "speculators, 32 heads": ("speculators", Sizes(heads=32, kv_heads=4, eps=1e-6)),
    "SpecForge": ("SpecForge", Sizes(streams=(4, 1, 2), draft_vocab=None)),
    "EAGLE-3.1": ("SpecForge", Sizes(fc_norm=True, norm_output=True)),
    "SpecForge, layers": ("SpecForge", Sizes(layers=2, later_norm="hidden_norm", norm_output=True)),
    "AngelSlim": ("AngelSlim", Sizes(hidden=64, own_embedding=False)),
    "AngelSlim, layers": ("AngelSlim", Sizes(streams=(0, 4, 5))),
    "NVIDIA": ("NVIDIA", Sizes(norm_before_fc=True, biases=True)),
    "DeepSpec": ("DeepSpec", Sizes(streams=(0, 1, 2, 4, 5), qk_norm=True, draft_vocab=None)),
    "DeepSpec, all": (
        "DeepSpec",
        Sizes(streams=(0, 1, 2, 4, 5), qk_norm=True, layers=2, fc_norm=True, norm_output=True, biases=True),
    ),
    "sglang, older names": ("sglang", Sizes(fc_norm=True)),
    "P-EAGLE": ("P-EAGLE", Sizes(layers=4, mask=5)),
    "P-EAGLE of speculators": ("P-EAGLE of speculators", Sizes(layers=2, mask=0, qk_norm=True, eps=1e-6, levels=7)),
    "P-EAGLE for vLLM": ("P-EAGLE for vLLM", Sizes(mask=299, fc_norm=True, norm_output=True, levels=2)),
}


def build(directory: Path, ops: Ops, name: str) -> tuple[Driver, Eagle3Head, Any]:
    """A driver of target and head, the head, and the restatement as functions: of features, and of a row."""
    form, sizes = FORMS[name]
    target = LlamaModel.load(modelzoo.write_target(directory / "target", num_hidden_layers=TARGET_LAYERS), ops)
    weights = headzoo.write_head(directory / "head", form, sizes, TARGET_LAYERS)
    head = Eagle3Head.load(directory / "head", ops, target)
    table = modelzoo.read_weights(directory / "target")["model.embed_tokens.weight"]

    def run(tokens: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_heads.logits_of(sizes, weights, table, tokens, features)

    run.fuse = lambda aux: reference_heads.fuse(sizes, weights, aux)  # type: ignore[attr-defined]
    return Driver(target, head), head, run


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("name", FORMS)
def test_the_configuration_says_what_was_trained(tmp_path: Path, name: str) -> None:
    form, sizes = FORMS[name]
    target = modelzoo.write_target(tmp_path / "target", num_hidden_layers=TARGET_LAYERS)
    headzoo.write_head(tmp_path / "head", form, sizes, TARGET_LAYERS)
    config = Eagle3Config.from_directory(tmp_path / "head")
    assert config.aux_layers_for(modelzoo.ModelConfig.from_directory(target)) == sizes.streams
    assert config.num_layers == sizes.layers
    noted = ["norm_output"] if form == "SpecForge" and sizes.norm_output else []
    assert [note.split(":")[0] for note in config.notes] == noted
    for what in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(config, what) == getattr(sizes, what), what


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", FORMS)
def test_rows_of_the_target_give_the_trained_logits(tmp_path: Path, ops: str, name: str) -> None:
    """In chunks, of which some write keys and values alone."""
    driver, _, reference = build(tmp_path, OPS[ops](), name)
    tokens, seq = random_tokens(41, seed=1), driver.new()
    _, aux = driver.extend([seq], [0], [tokens[:40]], aux=True)
    assert aux is not None
    want = reference(tokens[1:], reference.fuse(aux))
    driver.head_write(seq, 0, tokens[1:8], aux[:7])
    driver.head_write(seq, 7, tokens[8:9], aux[7:8])
    parts = [driver.head_extend(seq, s, tokens[s + 1 : e + 1], aux[s:e]) for s, e in ((8, 25), (25, 26), (26, 40))]
    for got, wanted in zip((torch.cat(part) for part in zip(*parts, strict=True)), want, strict=True):
        close(got, wanted[8:])
    chosen, passed = driver.head_extend(seq, 30, tokens[31:], aux[30:], torch.tensor([9, 2]))
    close(chosen, want[0][[39, 32]])
    close(passed, want[1][[39, 32]])


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", [name for name in FORMS if name != "SpecForge"])
def test_draft_steps_give_the_trained_logits(tmp_path: Path, ops: str, name: str) -> None:
    """Every beam of every step of a tree, against a pass over its whole path whose features are the head's own."""
    driver, head, reference = build(tmp_path, OPS[ops](), name)
    tokens, seq = random_tokens(23, seed=2), driver.new()
    length = len(tokens) - 1  # the last token is the root, not yet in the KV
    _, aux = driver.extend([seq], [0], [tokens[:length]], aux=True)
    assert aux is not None and driver.draft_kv is not None
    logits, passed = driver.head_extend(seq, 0, tokens[1:], aux, torch.tensor([length - 1]))
    beams = core.DraftBeams(1, driver.shape, head.d2t, driver.target.config.vocab_size)
    beams.start(logits)
    paths: list[tuple[list[int], torch.Tensor]] = [([], reference.fuse(aux))]  # draft tokens and features of each beam
    with driver.pool.reserve([(seq, length + driver.reserve)]):
        for step in range(driver.shape.steps - 1):
            parents = torch.from_dlpack(beams.parents).tolist()
            drafted = torch.from_dlpack(beams.tokens).tolist()
            grown = []
            for parent, token in zip(parents, drafted, strict=True):
                path, features = paths[parent]
                _, states = reference([*tokens[1:], *path], features)
                grown.append(([*path, token], torch.cat((features, states[-1:]))))
            paths = grown
            plan = driver.planner.draft([seq], [length], step, beams, "ancestors")
            inputs = passed.index_select(0, torch.tensor(parents))
            logits, passed = head.step(torch.tensor(drafted), inputs, plan, driver.draft_kv)
            for row, (path, features) in enumerate(paths):
                want_logits, want_passed = reference([*tokens[1:], *path], features)
                close(logits[row], want_logits[-1])
                close(passed[row], want_passed[-1])
            beams.advance(logits)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", [name for name in FORMS if "P-EAGLE" in name])
def test_masked_rows_give_the_trained_logits(tmp_path: Path, ops: str, name: str) -> None:
    """The levels behind the first, in one pass, against a pass over text and masks."""
    driver, head, reference = build(tmp_path, OPS[ops](), name)
    sizes, tokens, seq = FORMS[name][1], random_tokens(23, seed=2), driver.new()
    assert isinstance(head.config, Eagle3Config) and sizes.mask is not None and driver.draft_kv is not None
    assert (head.config.mask_token, head.config.levels) == (sizes.mask, sizes.levels)
    length, behind = len(tokens) - 1, sizes.levels - 1
    _, aux = driver.extend([seq], [0], [tokens[:length]], aux=True)
    assert aux is not None
    first, _ = driver.head_extend(seq, 0, tokens[1:], aux, torch.tensor([length - 1]))
    hidden = modelzoo.read_weights(tmp_path / "head")["mask_hidden"].view(1, -1)
    features = reference.fuse(torch.cat((aux.double(), hidden.double().expand(behind, -1))))
    want, _ = reference([*tokens[1:], *[sizes.mask] * behind], features)
    close(first, want[length - 1 : length])
    for _ in range(2):
        with driver.pool.reserve([(seq, length + behind)]):
            got = head.masked(driver.planner.extend([seq], [length], [behind]), driver.draft_kv)
        close(got, want[length:])


@pytest.mark.parametrize("name", ["speculators, layers", "SpecForge, layers", "EAGLE-3.1", "NVIDIA"])
def test_write_leaves_the_bits_that_extend_does(tmp_path: Path, name: str) -> None:
    whole, head, _ = build(tmp_path, ops_for(), name)
    part = Driver(whole.target, head)
    tokens = random_tokens(41, seed=5)
    seqs = whole.new(), part.new()
    _, aux = whole.extend([seqs[0]], [0], [tokens[:40]], aux=True)
    part.extend([seqs[1]], [0], [tokens[:40]])
    assert aux is not None and whole.draft_kv is not None and part.draft_kv is not None
    assert whole.draft_kv.tensor.shape[0] == head.config.num_layers
    want = whole.head_extend(seqs[0], 0, tokens[1:], aux, torch.tensor([39]))
    for start, end in ((0, 1), (1, 24), (24, 39)):
        rows = part.head_write(seqs[1], start, tokens[start + 1 : end + 1], aux[start:end])
        assert rows.shape == (end - start, 2 * head.config.kv_size) and rows.isfinite().all()
    got = part.head_extend(seqs[1], 39, tokens[40:], aux[39:])
    assert torch.equal(part.draft_kv.tensor, whole.draft_kv.tensor) and all(
        layer.any() for layer in part.draft_kv.tensor
    )
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", FORMS)
def test_memory_of_a_head_is_counted(tmp_path: Path, name: str) -> None:
    """Scratch memory, and bytes of weights; both are planned by configuration and headers alone."""
    driver, head, _ = build(tmp_path, ops_for(), name)
    planned = Head(*check_draft(tmp_path / "head", driver.target.config))
    assert planned.config == head.config
    head.reserve(64, 64, 16)
    blocks = [each for each in vars(head).values() if isinstance(each, Workspace)]
    wide = [row for block in blocks for at, row in block.rows(16).items() if at != "logits"]
    steps = [row for at, row in head._step_work.rows(16).items() if at != "logits"]
    have = 64 * sum(row.shape[1] for row in wide) - 48 * sum(row.shape[1] for row in steps)
    assert have <= head_elements(planned, 64, 16) < 1.3 * have
    packed = 4 * sum(product.out_features * product.in_features for _, product in head.products())
    shapes = {n: shape for n, shape in planned.shapes.items() if n not in ("d2t", "t2d")}
    vectors = 4 * sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    table = 0 if head.embedding is driver.target.embedding else head.embedding.table.nbytes  # type: ignore[attr-defined]
    ids = 8 * (FORMS[name][1].draft_vocab or 0)
    vectors += 4 * head.config.hidden_size if "mask_hidden" in shapes else 0
    assert head_bytes(head.config, tmp_path / "head", HOST) == packed + vectors + table + ids


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["speculators, layers", "EAGLE-3.1", "NVIDIA", "DeepSpec, all", "P-EAGLE"])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, name: str, temperature: float) -> None:
    form, sizes = FORMS[name]
    sizes = Sizes(**{**vars(sizes), "hidden": 64, "vocab": 12, "draft_vocab": None})
    target = modelzoo.write_target(
        tmp_path / "target", num_hidden_layers=TARGET_LAYERS, vocab_size=12, eos_token_id=None
    )
    weights = headzoo.agree(target, sizes, reference_heads.random_head(sizes, 1))
    headzoo.save_head(tmp_path / "head", form, sizes, TARGET_LAYERS, weights)
    prompts = [random_tokens(n, seed=n, vocab=12) for n in (3, 17, 30)]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=4)
    with LLM(target) as llm:
        want = [out.token_ids for out in llm.generate(prompts, params)]
    for tree, options in (((3, 3, 8), {}), ((1, 4, 5), {"page_size": 4, "max_batch": 2, "prefill_chunk": 7})):
        with LLM(target, tmp_path / "head", tree=tree, **options) as llm:
            outputs = llm.generate(prompts, params)
            llm.audit()
        assert [out.token_ids for out in outputs] == want
        accepted = sum(i * rounds for out in outputs for i, rounds in enumerate(out.accepted_drafts))
        assert accepted > (4 if name == "P-EAGLE" else 8), "the head drafts what its target chooses"
