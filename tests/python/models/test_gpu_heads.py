"""A draft head on a GPU computes what its published form says: against the host's kernels, in f32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headzoo
import modelzoo
import reference_heads
from modelrun import Driver, random_tokens
from reference_heads import Sizes
from specrs import LLM, SamplingParams, device
from specrs import _specrs as core
from specrs.models import Eagle3Head, LlamaModel, Ops, Placement, ops_for
from specrs.models.pairs import cuda_ops

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

SHAPE = (4, 4, 16)


def passes(target_at: Path, head_at: Path, ops: Ops, kv_dtype: torch.dtype) -> torch.Tensor:
    """Logits of a head over a row of 40 tokens, of which the first 17 are written without queries, and of a draft step
    behind them."""
    target = LlamaModel.load(target_at, ops)
    head = Eagle3Head.load(head_at, ops, target)
    driver = Driver(target, head, kv_dtype=kv_dtype, shape=SHAPE)
    assert driver.draft_kv is not None
    tokens, seq = random_tokens(41, seed=1), driver.new()
    _, aux = driver.extend([seq], [0], [tokens[:40]], aux=True)
    assert aux is not None
    driver.head_write(seq, 0, tokens[1:18], aux[:17])
    logits, hidden = driver.head_extend(seq, 17, tokens[18:], aux[17:])
    beams = core.DraftBeams(1, driver.shape, head.d2t, target.config.vocab_size)
    beams.start(torch.linspace(0.0, 1.0, head.vocab_size)[None])  # the same branches wherever it runs
    with driver.pool.reserve([(seq, 40 + driver.reserve)]):
        plan = driver.planner.draft([seq], [40], 0, beams, "ancestors")
        drafted = torch.from_dlpack(beams.tokens).clone()
        stepped, _ = head.step(drafted, hidden[-1:].expand(len(drafted), -1), plan, driver.draft_kv)
    return torch.cat((logits, stepped)).float().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=str)
def test_logits_of_a_head_are_those_of_the_cpu(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    target = modelzoo.write_target(tmp_path / "target", "Qwen3ForCausalLM", head_dim=64, dtype=dtype, vocab_size=304)
    head = modelzoo.write_eagle3(tmp_path / "head", target, head_dim=64, dtype=dtype, draft_vocab_size=120, **options)
    want = passes(target, head, ops_for(), torch.float32)
    there = Placement(torch.device("cuda", torch.cuda.current_device()), dtype, dtype, torch.float32)
    got = passes(target, head, cuda_ops(there, core.TreeShape(*SHAPE)), dtype)
    error = (got - want).abs().max() / want.std()
    assert error < (0.25 if dtype == torch.bfloat16 else 0.05), error
    if options:  # a pass without the norms does not come so near
        weights = modelzoo.read_weights(head)
        modelzoo.write_weights(head, {n: w.fill_(1.0) if "self_attn.q_norm" in n else w for n, w in weights.items()})
        assert (passes(target, head, ops_for(), torch.float32) - want).abs().max() / want.std() > 2 * error


SIZES = Sizes(hidden=64, heads=4, kv_heads=2, head_dim=64, inner=96, vocab=304, draft_vocab=120)
# Of each form what it adds, a trainer that writes it, and the tensors or the key without which logits are others.
FORMS: dict[str, tuple[str, Sizes, str]] = {
    "norm_before_fc": ("NVIDIA", replace(SIZES, norm_before_fc=True), "input_norm"),
    "fc_norm": ("SpecForge", replace(SIZES, fc_norm=True, norm_output=True), "fc_norm.1"),
    "norm_output": ("SpecForge", replace(SIZES, fc_norm=True, norm_output=True), "norm_output"),
    "3 layers": ("speculators", replace(SIZES, layers=3, qk_norm=True, norm_before_residual=True), "layers.2.mlp.down"),
    "2 layers": (
        "DeepSpec", replace(SIZES, layers=2, qk_norm=True, norm_output=True, streams=(0, 1, 2, 4, 5)), "layers.1.self",
    ),
}  # fmt: skip
LAYERS = 6


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root of the mean square of the errors, by the deviation of what is wanted."""
    return float((got - want).square().mean().sqrt() / want.std())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_logits_of_other_forms_are_those_of_the_cpu(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    form, sizes, part = FORMS[name]
    target = modelzoo.write_target(
        tmp_path / "target", num_hidden_layers=LAYERS, head_dim=64, dtype=dtype, vocab_size=304
    )
    head = tmp_path / "head"
    weights = reference_heads.random_head(sizes, 1)
    for norm in [each for each in weights if each.endswith("q_norm")]:
        weights[norm] /= 4  # scores that rounding does not turn
    headzoo.save_head(head, form, sizes, LAYERS, {each: weight.to(dtype) for each, weight in weights.items()})
    want = passes(target, head, ops_for(), torch.float32)
    there = Placement(torch.device("cuda", torch.cuda.current_device()), dtype, dtype, torch.float32)
    got = passes(target, head, cuda_ops(there, core.TreeShape(*SHAPE)), dtype)
    error = off(got, want)
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02), error
    if part == "norm_output":
        modelzoo.edit_config(head, norm_output=False)
    else:
        stored = modelzoo.read_weights(head)
        assert any(each.startswith(part) for each in stored)
        modelzoo.write_weights(head, {n: w.fill_(1.0) if n.startswith(part) else w for n, w in stored.items()})
    other = passes(target, head, ops_for(), torch.float32)
    assert off(other, want) > 3 * error, "a pass without this part does not come so near"


@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
@pytest.mark.parametrize("name", [name for name in FORMS if name != "norm_output"])
def test_tokens_with_other_forms_are_those_of_plain_decoding(tmp_path: Path, name: str, graphs: Any) -> None:
    """Prompts beyond a chunk, so that passes write keys and values alone, and beginnings that requests share."""
    form, sizes, _ = FORMS[name]
    sizes = replace(sizes, vocab=16, draft_vocab=None)
    options: dict[str, Any] = {"vocab_size": 16, "eos_token_id": None, "bos_token_id": None}
    target = modelzoo.write_target(
        tmp_path / "target", num_hidden_layers=LAYERS, head_dim=64, dtype=torch.bfloat16, **options
    )
    weights = headzoo.agree(target, sizes, reference_heads.random_head(sizes, 1))
    stored = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    headzoo.save_head(tmp_path / "head", form, sizes, LAYERS, stored)
    prompts = [random_tokens(n, seed=1, vocab=16) for n in (3, 17, 70, 90)]
    params = [SamplingParams(max_tokens=60, temperature=0.8 * (i % 2), seed=i) for i in range(4)]
    common: dict[str, Any] = {"device": "cuda", "max_context_len": 256, "prefill_chunk": 32, "graphs": graphs}
    with LLM(target, **common, speculative=False) as llm:
        want = [out.token_ids for out in llm.generate(prompts, params)]
    for tree in ((4, 3, 12), (1, 4, 5)):
        with LLM(target, tmp_path / "head", tree=tree, **common) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                assert [out.token_ids for out in outputs] == want
                accepted = sum(i * rounds for out in outputs for i, rounds in enumerate(out.accepted_drafts))
                assert accepted > 8, "the head drafts what its target chooses"
            llm.audit()
