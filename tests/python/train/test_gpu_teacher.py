"""What a head learns on a GPU is what it learns on the CPU, as near as bf16 comes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import modelzoo
from modelrun import random_tokens
from specrs import _specrs as core
from specrs import device
from specrs.models import ModelConfig, Placement, ops_for
from specrs.models.pairs import cuda_ops
from specrs.train.block import BlockHead
from specrs.train.eagle3 import Eagle3
from specrs.train.heads import Head, HeadSizes
from specrs.train.rows import anchors_of, pack
from specrs.train.teacher import Teacher

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

VOCAB, DRAFTED, LEVELS = 304, 120, 4


@pytest.mark.parametrize("form", ["EAGLE-3", "DSpark", "DFlash"])
def test_a_lesson_and_its_loss_are_those_of_the_cpu(tmp_path: Path, form: str) -> None:
    """Pieces of 1 to 70 tokens, more of them than one pass has rows for."""
    at = modelzoo.write_target(tmp_path, num_hidden_layers=6, head_dim=64, vocab_size=VOCAB, dtype=torch.bfloat16)
    config = ModelConfig.from_directory(at)
    docs = [np.array(random_tokens(1 + n % 70, seed=n, vocab=VOCAB), dtype=np.int32) for n in range(300)]
    rows = pack(docs, 48, np.random.default_rng(0))
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFTED].sort().values
    drafts = torch.full((VOCAB,), -1)
    drafts[ids] = torch.arange(DRAFTED)
    there = torch.device("cuda", torch.cuda.current_device())
    place = Placement(there, torch.bfloat16, torch.bfloat16, torch.float32)
    anchors = anchors_of(rows, 4, [0])
    host = Teacher(at, ops_for(), 48).lesson(rows, anchors, ids, drafts, 0.5)
    teacher = Teacher(at, cuda_ops(place, core.TreeShape(1, 1, 2)), 48)
    found = teacher.lesson(rows, anchors, ids.to(there), drafts.to(there), 0.5)
    device.check()
    assert torch.equal(found.pieces.cpu(), host.pieces)
    for name, most in (("features", 0.05), ("embeds", 1e-6), ("wanted", 0.5)):
        got, want = getattr(found, name).float().cpu(), getattr(host, name)
        error = float((got - want).square().mean().sqrt() / want.std())
        assert error < most, (name, error)
    assert (found.best.cpu() == host.best).float().mean() > 0.9
    sizes = HeadSizes.of(config, DRAFTED, 64, 1)
    head: Head = Eagle3(sizes, 48, levels=LEVELS)
    if form != "EAGLE-3":
        head = BlockHead(sizes, 48, 0, LEVELS, 16 if form == "DSpark" else 0)
    head.begin_at(at, config, ids)
    on_host = replace(host, wanted=found.wanted.float().cpu(), best=found.best.cpu())
    with torch.no_grad():
        want = head.scores(on_host)
        head.to(there)
        with torch.autocast("cuda", torch.bfloat16):
            got = head.scores(found).cpu()
    assert torch.equal(got[:, [1, 3]], want[:, [1, 3]])
    torch.testing.assert_close(got[:, 0], want[:, 0], rtol=0.02, atol=0)
