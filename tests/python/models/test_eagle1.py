"""EAGLE-1 and EAGLE-2 heads against a plain re-computation, in the engine, and heads that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import modelzoo
from modelrun import Driver, random_tokens
from specrs import LLM, ConfigError, SamplingParams
from specrs import _specrs as core
from specrs.models import (
    DraftMismatchError,
    Eagle3Head,
    LlamaModel,
    ModelFileError,
    UnsupportedModelError,
    check_draft,
    ops_for,
    torch_ops,
)
from specrs.models.cuda import why_not
from specrs.models.head_config import Eagle1Config

OPS: dict[str, Any] = {"torch": torch_ops, "host": ops_for}


class TeacherForced:
    """The published forward of a head over a whole row at once, in f64."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.w = {k: v.double() for k, v in modelzoo.read_weights(directory).items()}
        big = modelzoo.read_weights(target)
        self.embedding = self.w.get("embed_tokens.weight", big["model.embed_tokens.weight"].double())
        self.lm_head = big.get("lm_head.weight", big["model.embed_tokens.weight"]).double()

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.w[f"{name}.weight"]

    def run(self, tokens: list[int], feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens[i] is the token after position i, feature[i] is of position i; (logits, hidden) of every position."""
        n = len(tokens)
        stream = self.linear("fc", torch.cat((self.embedding[tokens], feature), -1))
        q, k, v = (self.linear(f"layers.0.self_attn.{p}_proj", stream).view(n, -1, 32) for p in "qkv")
        if "layers.0.self_attn.q_norm.weight" in self.w:  # norm of each head
            q, k = (self.norm(f"layers.0.self_attn.{name}_norm", t) for name, t in (("q", q), ("k", k)))
        angle = torch.arange(n)[:, None] / 10000.0 ** (torch.arange(0, 32, 2) / 32)[None]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def turn(t: torch.Tensor) -> torch.Tensor:
            return torch.cat((t[..., :16] * cos - t[..., 16:] * sin, t[..., 16:] * cos + t[..., :16] * sin), dim=-1)

        k, v = (t.repeat_interleave(2, dim=1) for t in (turn(k), v))
        scores = torch.einsum("qhd,khd->hqk", turn(q), k) / 32**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        stream = stream + self.linear("layers.0.self_attn.o_proj", mixed)
        y = self.norm("layers.0.post_attention_layernorm", stream)
        gate, up = (self.linear(f"layers.0.mlp.{p}_proj", y) for p in ("gate", "up"))
        stream = stream + self.linear("layers.0.mlp.down_proj", torch.nn.functional.silu(gate) * up)
        return stream @ self.lm_head.T, stream


def build(directory: Path, ops: Any, **options: Any) -> tuple[LlamaModel, Eagle3Head, TeacherForced]:
    place = modelzoo.write_target(directory / "target")
    head = modelzoo.write_eagle1(directory / "head", place, **options)
    target = LlamaModel.load(place, ops)
    return target, Eagle3Head.load(head, ops, target), TeacherForced(head, place)


@pytest.mark.parametrize("ops", OPS)
def test_the_feature_is_the_last_hidden_state(tmp_path: Path, ops: str) -> None:
    """Behind the last norm, of every row, whichever logits are wanted; and logits are the same bits with it."""
    from transformers import AutoModelForCausalLM

    target, _, _ = build(tmp_path, OPS[ops]())
    tokens = random_tokens(40, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    with torch.no_grad():
        want = reference.model(torch.tensor([tokens])).last_hidden_state[0]
    driver = Driver(target, max_batch=6)
    for rows in (None, torch.tensor([39, 7]), torch.empty(0, dtype=torch.int64)):
        plain, _ = driver.extend([driver.new()], [0], [tokens], logit_rows=rows)
        logits, features = driver.extend([driver.new()], [0], [tokens], logit_rows=rows, aux=True)
        assert features is not None
        torch.testing.assert_close(features, want, rtol=1e-4, atol=1e-4)
        if ops == "host":
            assert torch.equal(logits, plain)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"own_embedding": False},
        {"qkv_bias": True, "architectures": ["Qwen2ForCausalLM"]},
        {"qk_norm": True},
    ],
    ids=["published", "no-bias", "lent-embedding", "qwen", "qk-norm"],
)
@pytest.mark.parametrize("ops", OPS)
def test_the_head_equals_its_published_forward(tmp_path: Path, ops: str, options: dict[str, Any]) -> None:
    target, head, reference = build(tmp_path, OPS[ops](), **options)
    driver = Driver(target, head)
    tokens, seq = random_tokens(30, seed=5), driver.new()
    _, features = driver.extend([seq], [0], [tokens], aux=True)
    assert features is not None
    after = [*tokens[1:], 17]
    want, hidden_want = reference.run(after, features.double())
    # In chunks, of which one writes keys and values alone.
    first, _ = driver.head_extend(seq, 0, after[:11], features[:11])
    driver.head_write(seq, 11, after[11:20], features[11:20])
    last, hidden = driver.head_extend(seq, 20, after[20:], features[20:], torch.tensor([9, 3]))
    torch.testing.assert_close(first.double(), want[:11], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(last.double(), want[[29, 23]], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(hidden.double(), hidden_want[[29, 23]], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("ops", OPS)
def test_draft_steps_continue_their_own_hidden_states(tmp_path: Path, ops: str, qk_norm: bool) -> None:
    target, head, reference = build(tmp_path, OPS[ops](), qk_norm=qk_norm)
    driver = Driver(target, head, shape=(1, 4, 5))
    tokens, seq = random_tokens(12, seed=5), driver.new()
    _, features = driver.extend([seq], [0], [tokens], aux=True)
    assert features is not None and driver.draft_kv is not None
    chain, feature = [*tokens[1:], 17], features.double()
    logits, hidden = driver.head_extend(seq, 0, chain, features)
    logits, hidden = logits[-1:], hidden[-1:]
    beams = core.DraftBeams(1, driver.shape, None, 300)
    with driver.pool.reserve([(seq, 12 + driver.reserve)]):
        beams.start(logits)
        for step in range(3):
            want, hidden_want = reference.run(chain, feature)
            torch.testing.assert_close(logits.double(), want[-1:], rtol=1e-4, atol=1e-3)
            plan = driver.planner.draft([seq], [12], step, beams, "ancestors")
            chosen = torch.from_dlpack(beams.tokens)
            logits, hidden = head.step(chosen, hidden.clone(), plan, driver.draft_kv)
            chain, feature = [*chain, int(chosen[0])], torch.cat((feature, hidden_want[-1:]))
            beams.advance(logits)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("tree", [(1, 4, 5), (3, 3, 12), None], ids=str)
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, architecture: str, tree: Any, sampled: bool) -> None:
    small: dict[str, Any] = {"vocab_size": 8, "eos_token_id": None}
    if architecture.startswith("Gemma"):
        small |= {"tie_word_embeddings": True, "sliding_window": 200}
    target = modelzoo.write_target(tmp_path / "target", architecture, **small)
    draft = modelzoo.write_eagle1(tmp_path / "draft", target)
    prompts = [random_tokens(n, seed=n, vocab=8) for n in (3, 17, 30)]
    sampling = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2} if sampled else {"temperature": 0.0}
    params = [SamplingParams(max_tokens=50, seed=i, **sampling) for i in range(3)]
    options: dict[str, Any] = {"device": "cpu", "max_context_len": 100, "page_size": 4}
    with LLM(target, speculative=False, **options) as llm:
        want = [out.token_ids for out in llm.generate(prompts, params)]
    with LLM(target, draft, tree=tree, prefill_chunk=7, **options) as llm:
        assert llm.speculative
        outputs = llm.generate(prompts, params)
        assert [out.token_ids for out in outputs] == want
        llm.audit()
        if tree is not None:
            assert any(sum(out.accepted_lengths[2:]) for out in outputs), "nothing was accepted: this says nothing"


def test_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    place = modelzoo.write_target(tmp_path / "target")
    target = LlamaModel.load(place, torch_ops())

    def refused(kind: type[ConfigError], match: str, **changes: Any) -> None:
        head = modelzoo.write_eagle1(tmp_path / "head", place)
        modelzoo.edit_config(head, **changes)
        with pytest.raises(kind, match=match):
            Eagle3Head.load(head, torch_ops(), target)
        with pytest.raises(kind, match=match):
            check_draft(head, target.config)

    refused(DraftMismatchError, "hidden_size = 32", hidden_size=32)
    refused(DraftMismatchError, "vocab_size = 301", vocab_size=301)
    refused(UnsupportedModelError, "num_hidden_layers = 2", num_hidden_layers=2)
    refused(ModelFileError, "q_proj", head_dim=16)
    refused(UnsupportedModelError, "only silu", hidden_act="gelu")

    head = modelzoo.write_eagle1(tmp_path / "head", place)
    whole = modelzoo.read_weights(head)
    save_file({**whole, "lm_head.weight": torch.zeros(300, 64)}, head / "model.safetensors")
    assert Eagle3Head.load(head, torch_ops(), target).lm_head is target.lm_head  # a copy of it is not looked at
    save_file({**whole, "layers.0.input_layernorm.weight": torch.ones(64)}, head / "model.safetensors")
    with pytest.raises(ModelFileError, match="no use for it"):
        Eagle3Head.load(head, torch_ops(), target)
    save_file({**whole, "fc.weight": whole["fc.weight"][:, :64].contiguous()}, head / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"fc.weight: shape \[64, 64\], but config.json calls for \[64, 128\]"):
        Eagle3Head.load(head, torch_ops(), target)
    with pytest.raises(UnsupportedModelError, match="a model, no draft head"):
        Eagle3Head.load(place, torch_ops(), target)


def test_a_gpu_runs_such_a_head_of_its_sizes(tmp_path: Path) -> None:
    place = modelzoo.write_target(tmp_path / "target", vocab_size=304)
    for head_dim, why in ((64, None), (32, "head_dim = 32")):
        head = modelzoo.write_eagle1(tmp_path / f"head{head_dim}", place, head_dim=head_dim)
        config, _ = check_draft(head, LlamaModel.load(place, torch_ops()).config)
        assert isinstance(config, Eagle1Config)
        found = why_not(config)
        assert found is None if why is None else found is not None and why in found


def test_the_last_hidden_state_stands_alone(tmp_path: Path) -> None:
    target = LlamaModel.load(modelzoo.write_target(tmp_path), torch_ops())
    target.set_aux_layers((4,))
    for layers in ((4, 1), (1, 4), (4, 4), (5,)):
        with pytest.raises(UnsupportedModelError, match="alone is the last hidden state"):
            target.set_aux_layers(layers)
