"""A draft head on a GPU computes what its published form says: against the host's kernels, in f32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo
from modelrun import Driver, random_tokens
from specrs import _specrs as core
from specrs import device
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
