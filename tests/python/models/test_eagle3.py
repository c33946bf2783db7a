"""The EAGLE-3 head against a plain re-computation, and heads that do not fit their target."""

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
    Ops,
    ops_for,
    torch_ops,
)
from specrs.models.layer import Workspace

OPS: dict[str, Any] = {"torch": torch_ops, "host": ops_for}


class TeacherForced:
    """The published forward of a head over a whole row at once, in f64, without cache, plan or fused weights."""

    def __init__(self, directory: Path, embedding: torch.Tensor) -> None:
        self.w = {k: v.double() for k, v in modelzoo.read_weights(directory).items() if v.is_floating_point()}
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.w[name]

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        return aux.double() @ self.w["fc.weight"].T

    def run(
        self, tokens: list[int], hidden: torch.Tensor, norm_first: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens[i] is the token after position i, hidden[i] the feature at i; (logits, hidden) of every position."""
        n, w = len(tokens), self.w
        normed = self.norm("midlayer.hidden_norm.weight", hidden)
        x = torch.cat((self.norm("midlayer.input_layernorm.weight", self.embedding[tokens]), normed), dim=-1)
        q, k, v = ((x @ w[f"midlayer.self_attn.{p}_proj.weight"].T).view(n, -1, 32) for p in "qkv")
        if "midlayer.self_attn.q_norm.weight" in w:  # norm of each head
            q, k = (self.norm(f"midlayer.self_attn.{name}_norm.weight", t) for name, t in (("q", q), ("k", k)))
        angle = torch.arange(n)[:, None] / 10000.0 ** (torch.arange(0, 32, 2) / 32)[None]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def turn(t: torch.Tensor) -> torch.Tensor:
            return torch.cat((t[..., :16] * cos - t[..., 16:] * sin, t[..., 16:] * cos + t[..., :16] * sin), dim=-1)

        k, v = (t.repeat_interleave(2, dim=1) for t in (turn(k), v))
        scores = torch.einsum("qhd,khd->hqk", turn(q), k) / 32**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        stream = (normed if norm_first else hidden) + mixed @ w["midlayer.self_attn.o_proj.weight"].T
        y = self.norm("midlayer.post_attention_layernorm.weight", stream)
        gate, up = (y @ w[f"midlayer.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        stream = stream + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
        return self.norm("norm.weight", stream) @ w["lm_head.weight"].T, stream


def build(directory: Path, ops: Ops, **options: Any) -> tuple[LlamaModel, Eagle3Head, TeacherForced]:
    target = LlamaModel.load(modelzoo.write_target(directory / "target"), ops)
    head_directory = modelzoo.write_eagle3(directory / "head", directory / "target", **options)
    head = Eagle3Head.load(head_directory, ops, target)
    return (
        target,
        head,
        TeacherForced(head_directory, modelzoo.read_weights(directory / "target")["model.embed_tokens.weight"]),
    )


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"own_embedding": True},
        {"norm_before_residual": True},
        {"draft_vocab_size": None},
        {"aux_layers": (0, 3)},
        {"qk_norm": True},
        {"qk_norm": True, "norm_before_residual": True},
    ],
    ids=str,
)
def test_extend_equals_teacher_forcing(tmp_path: Path, ops: str, options: dict[str, Any]) -> None:
    target, head, reference = build(tmp_path, OPS[ops](), **options)
    driver = Driver(target, head)
    tokens = random_tokens(41, seed=1)
    seq = driver.new()
    _, aux = driver.extend([seq], [0], [tokens[:40]], aux=True)
    assert aux is not None and aux.shape == (40, head.config.aux_size)
    want = reference.run(tokens[1:], reference.fuse(aux), norm_first=options.get("norm_before_residual", False))
    parts = [driver.head_extend(seq, s, tokens[s + 1 : e + 1], aux[s:e]) for s, e in ((0, 17), (17, 18), (18, 40))]
    for got, wanted in zip((torch.cat(p) for p in zip(*parts, strict=True)), want, strict=True):
        close(got, wanted)
    chosen, hidden = driver.head_extend(seq, 30, tokens[31:], aux[30:], torch.tensor([9, 2]))
    close(chosen, want[0][[39, 32]])
    close(hidden, want[1][[39, 32]])


@pytest.mark.parametrize("layers", [1, 40])
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0."])
def test_a_head_named_as_a_model_is_what_its_file_says(tmp_path: Path, layers: int, prefix: str) -> None:
    """The paper's authors publish their heads so; one of them has the number of its target's layers."""
    target, want, _ = build(tmp_path, ops_for(), own_embedding=True)
    place = tmp_path / "head"
    modelzoo.edit_config(place, architectures=["LlamaForCausalLM"], num_hidden_layers=layers)
    weights = modelzoo.read_weights(place)
    save_file({name.replace("midlayer.", prefix): w for name, w in weights.items()}, place / "model.safetensors")
    head = Eagle3Head.load(place, ops_for(), target)
    assert head.config == want.config and head.aux_layers == want.aux_layers
    two = {name.replace("midlayer.", f"layers.{i}."): w.clone() for i in (0, 1) for name, w in weights.items()}
    save_file(two, place / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"num_hidden_layers = {layers}: the file has 2"):
        Eagle3Head.load(place, ops_for(), target)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"qk_norm": True}], ids=str)
def test_write_leaves_what_extend_does(tmp_path: Path, ops: str, options: dict[str, Any]) -> None:
    """Keys and values of rows without logits: the same bits as a whole pass writes (of torch: nearly so)."""
    target, head, _ = build(tmp_path, OPS[ops](), **options)
    tokens = random_tokens(41, seed=5)
    whole, part = Driver(target, head), Driver(target, head)
    seqs = whole.new(), part.new()
    _, aux = whole.extend([seqs[0]], [0], [tokens[:40]], aux=True)
    part.extend([seqs[1]], [0], [tokens[:40]])
    assert aux is not None and whole.draft_kv is not None and part.draft_kv is not None
    want = whole.head_extend(seqs[0], 0, tokens[1:], aux, torch.tensor([39]))
    for start, end in ((0, 1), (1, 24), (24, 39)):
        rows = part.head_write(seqs[1], start, tokens[start + 1 : end + 1], aux[start:end])
        assert rows.shape == (end - start, 2 * head.config.kv_size) and rows.isfinite().all()
    got = part.head_extend(seqs[1], 39, tokens[40:], aux[39:])
    assert part.draft_kv.tensor.any()
    if ops == "torch":
        torch.testing.assert_close(part.draft_kv.tensor, whole.draft_kv.tensor)
        torch.testing.assert_close(got, want)
    else:
        assert torch.equal(part.draft_kv.tensor, whole.draft_kv.tensor)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("shape", [(1, 5, 6), (4, 4, 16)], ids=["chain", "tree"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_draft_steps_equal_teacher_forcing(
    tmp_path: Path, ops: str, page_size: int, shape: tuple[int, int, int], qk_norm: bool
) -> None:
    """Every beam of every step, against a pass over its whole path whose features are the head's own."""
    target, head, reference = build(tmp_path, OPS[ops](), qk_norm=qk_norm)
    driver = Driver(target, head, page_size=page_size, shape=shape)
    tokens = random_tokens(23, seed=2)
    length = len(tokens) - 1  # the last token is the root, not yet in the KV
    seq = driver.new()
    _, aux = driver.extend([seq], [0], [tokens[:length]], aux=True)
    assert aux is not None and driver.draft_kv is not None
    last = torch.tensor([length - 1])
    logits, hidden = driver.head_extend(seq, 0, tokens[1:], aux, last)
    fused = reference.fuse(aux)

    beams = core.DraftBeams(1, driver.shape, head.d2t, target.config.vocab_size)
    beams.start(logits)
    paths: list[tuple[list[int], torch.Tensor]] = [([], fused)]  # (draft tokens, features) of each beam so far
    with driver.pool.reserve([(seq, length + driver.reserve)]):
        for step in range(driver.shape.steps - 1):
            parents = torch.from_dlpack(beams.parents).tolist()
            drafted = torch.from_dlpack(beams.tokens).tolist()
            grown = []
            for parent, token in zip(parents, drafted, strict=True):
                path, features = paths[parent]
                _, states = reference.run([*tokens[1:], *path], features)
                grown.append(([*path, token], torch.cat((features, states[-1:]))))
            paths = grown
            plan = driver.planner.draft([seq], [length], step, beams, "ancestors")
            inputs = hidden.index_select(0, torch.tensor(parents))
            logits, hidden = head.step(torch.tensor(drafted), inputs, plan, driver.draft_kv)
            for row, (path, features) in enumerate(paths):
                want_logits, want_hidden = reference.run([*tokens[1:], *path], features)
                close(logits[row], want_logits[-1])
                close(hidden[row], want_hidden[-1])
            beams.advance(logits)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_with_a_head_of_qwen3s_layer_are_those_of_plain_decoding(tmp_path: Path, temperature: float) -> None:
    target = modelzoo.write_target(tmp_path / "target", "Qwen3ForCausalLM", vocab_size=12, eos_token_id=None)
    draft = modelzoo.write_eagle3(tmp_path / "draft", target, draft_vocab_size=None, own_embedding=True, qk_norm=True)
    modelzoo.agree(target, draft)
    prompts = [random_tokens(n, seed=n, vocab=12) for n in (3, 17, 30)]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=4)
    with LLM(target) as llm:
        want = [out.token_ids for out in llm.generate(prompts, params)]
    for tree, options in (((3, 3, 8), {}), ((1, 4, 5), {"page_size": 4, "max_batch": 2})):
        with LLM(target, draft, tree=tree, **options) as llm:
            outputs = llm.generate(prompts, params)
            llm.audit()
        assert [out.token_ids for out in outputs] == want
        assert any(out.mean_accepted > 1.2 for out in outputs), "the head drafts what its target chooses"


def test_a_norm_of_queries_alone_is_refused(tmp_path: Path) -> None:
    target, _, _ = build(tmp_path, torch_ops(), qk_norm=True)
    directory = tmp_path / "head"
    whole = modelzoo.read_weights(directory)
    for lacks in ("q_norm", "k_norm"):
        save_file({n: w for n, w in whole.items() if lacks not in n}, directory / "model.safetensors")
        with pytest.raises(ModelFileError, match=f"{lacks}.weight: missing"):
            Eagle3Head.load(directory, torch_ops(), target)


def test_ids_map_to_the_target(tmp_path: Path) -> None:
    _, head, _ = build(tmp_path, torch_ops())
    assert head.d2t is not None and head.vocab_size == 120
    weights = modelzoo.read_weights(tmp_path / "head")
    assert weights["t2d"].nonzero().flatten().tolist() == head.target_ids.tolist()
    target = LlamaModel.load(tmp_path / "target", torch_ops())
    whole = Eagle3Head.load(
        modelzoo.write_eagle3(tmp_path / "whole", tmp_path / "target", draft_vocab_size=None), torch_ops(), target
    )
    assert whole.d2t is None and whole.target_ids.tolist() == list(range(300))
    assert target.aux_layers == whole.aux_layers == (1, 2, 3)


@pytest.mark.parametrize("style", ["model.", "layers.0."])
def test_other_published_names(tmp_path: Path, style: str) -> None:
    target, head, _ = build(tmp_path, torch_ops())
    weights = modelzoo.read_weights(tmp_path / "head")
    if style == "model.":
        renamed = {f"model.{name}": value for name, value in weights.items()}
    else:
        renamed = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    save_file(renamed, tmp_path / "head" / "model.safetensors")
    again = Eagle3Head.load(tmp_path / "head", torch_ops(), target)
    assert torch.equal(again.target_ids, head.target_ids)


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    weights = {**modelzoo.read_weights(directory), **{k.replace("__", "."): v for k, v in changes.items()}}
    save_file({name: value for name, value in weights.items() if value is not None}, directory / "model.safetensors")


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    target, _, _ = build(tmp_path, torch_ops())
    directory = tmp_path / "head"
    whole = modelzoo.read_weights(directory)
    target.set_aux_layers((0,))

    def refused(kind: type[ConfigError], match: str) -> Any:
        with pytest.raises(kind, match=match) as caught:
            Eagle3Head.load(directory, torch_ops(), target)
        save_file(whole, directory / "model.safetensors")
        assert target.aux_layers == (0,), "a refused head must leave its target alone"
        return caught.value

    d2t = whole["d2t"].clone()
    d2t[7] = 300 - 7
    edit(directory, d2t=d2t)
    error = refused(DraftMismatchError, r"target id 300.*0\.\.300")
    assert error.what == "d2t"
    d2t[7] = -8
    edit(directory, d2t=d2t)
    refused(DraftMismatchError, "target id -1")
    d2t[7] = d2t[6] - 1  # draft ids 6 and 7 both mean the same token
    edit(directory, d2t=d2t)
    refused(DraftMismatchError, "for draft ids 6 and 7")
    edit(directory, t2d=~whole["t2d"])
    refused(DraftMismatchError, "t2d")
    edit(directory, d2t=None, t2d=None)
    refused(DraftMismatchError, "draft_vocab_size = 120 .*no|none")
    edit(directory, lm_head__weight=whole["lm_head.weight"][:100].contiguous())
    refused(DraftMismatchError, "lm_head.weight with 100 rows")
    edit(directory, lm_head__weight=None)
    refused(ModelFileError, "lm_head.weight: missing")
    edit(directory, fc__weight=whole["fc.weight"][:, :128].contiguous())
    refused(DraftMismatchError, "128 .*3 aux layers x hidden_size 64")
    edit(directory, midlayer__self_attn__q_proj__weight=whole["midlayer.self_attn.q_proj.weight"][:, :64].contiguous())
    refused(ModelFileError, r"\[128, 64\], but config.json calls for \[128, 128\]")

    for changes, match in (
        ({"head_dim": 16}, "q_proj"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"aux layer = 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "2 aux layers"),
        ({"draft_vocab_size": 119}, "lm_head.weight with 120 rows"),
        ({"vocab_size": 299}, "vocab_size = 299"),
        ({"target_hidden_size": 128}, "hidden size of features = 128"),
    ):
        before = (directory / "config.json").read_text(encoding="utf-8")
        modelzoo.edit_config(directory, **changes)
        refused(ConfigError, match)
        (directory / "config.json").write_text(before, encoding="utf-8")


def test_a_narrower_head_needs_its_own_embedding(tmp_path: Path) -> None:
    target = LlamaModel.load(modelzoo.write_target(tmp_path / "target"), torch_ops())
    narrow = {"hidden_size": 48, "target_hidden_size": 64}
    with pytest.raises(DraftMismatchError, match="hidden_size = 48"):
        Eagle3Head.load(modelzoo.write_eagle3(tmp_path / "a", tmp_path / "target", **narrow), torch_ops(), target)
    head = Eagle3Head.load(
        modelzoo.write_eagle3(tmp_path / "b", tmp_path / "target", own_embedding=True, **narrow), torch_ops(), target
    )
    driver = Driver(target, head)
    seq = driver.new()
    _, aux = driver.extend([seq], [0], [[5, 6, 7]], aux=True)
    assert aux is not None
    logits, hidden = driver.head_extend(seq, 0, [6, 7, 8], aux)
    assert (logits.shape, hidden.shape) == ((3, 120), (3, 48))


def test_calls_that_do_not_fit_the_plan(tmp_path: Path) -> None:
    target, head, _ = build(tmp_path, torch_ops())
    driver = Driver(target, head)
    seq = driver.new()
    _, aux = driver.extend([seq], [0], [[5, 6, 7]], aux=True)
    assert aux is not None and driver.draft_kv is not None
    plan = driver.planner.extend([seq], [0], [3])
    layers, want = driver.by_layer(aux), r": must be \[\(3, 64\), \(3, 64\), \(3, 64\)\]"
    for wrong in (layers[:1], [a[:2] for a in layers], [a[:, :32] for a in layers]):
        for run in (head.extend, head.write):
            with pytest.raises(ConfigError, match=want):
                run(torch.tensor([6, 7, 8]), wrong, plan, driver.draft_kv)
    with pytest.raises(ConfigError, match=r"hidden = \[2, 64\]: must be \[3, 64\]"):
        head.step(torch.tensor([6, 7, 8]), aux[:2, :64], plan, driver.draft_kv)
    with pytest.raises(ConfigError, match="token = 300"):
        head.extend(torch.tensor([6, 7, 300]), layers, plan, driver.draft_kv)
    with pytest.raises(ConfigError, match="token = 300"):
        head.write(torch.tensor([6, 7, 300]), layers, plan, driver.draft_kv)


def test_no_scratch_memory_of_a_model_moves_once_it_is_reserved() -> None:
    """Captured passes have its addresses: one block that were left out would be freed under them."""
    with LLM() as llm:
        executor: Any = llm._runner.executor
        target, head = executor.target, executor.drafts.head
        target.reserve(64, 32)
        head.reserve(64, 8, 32)
        for model in (target, head):
            blocks = [each for each in vars(model).values() if isinstance(each, Workspace)]
            assert len(blocks) > 3
            for each in blocks:
                with pytest.raises(RuntimeError, match="memory is reserved for"):
                    each.rows(1000)
