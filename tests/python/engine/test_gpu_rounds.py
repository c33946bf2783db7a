"""Traces of rounds that a GPU drafts and accepts by itself, with the next ones in flight: as `test_rounds` has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from modelzoo import Pair, agree, write_eagle3, write_target
from rounds_world import check, streamed
from specrs import LLM, SamplingParams, device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("rounds")
    sizes = {"vocab_size": 16, "eos_token_id": 3, "bos_token_id": None, "max_position_embeddings": 1024}
    target = write_target(root / "target", dtype=torch.bfloat16, head_dim=64, **sizes)
    draft = write_eagle3(root / "draft", target, draft_vocab_size=16, dtype=torch.bfloat16, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


pytestmark = pytest.mark.usefixtures("no_fault_is_left")


@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
@pytest.mark.parametrize("options", [
    {"tree": (1, 4, 5)}, {"tree": (4, 3, 12)}, {"tree": (4, 3, 12), "drafters": ["head", "suffix"]}, {},
    {"speculative": False},
], ids=["chain", "tree", "sources", "adaptive", "plain"])  # fmt: skip
def test_traced_and_untraced_requests_share_a_batch(pair: Pair, graphs: Any, options: dict[str, Any]) -> None:
    prompts = [[4, 5], [6], [7, 8, 9] * 8, [10]]
    params = [SamplingParams(max_tokens=60 + i, temperature=0.5 * (i % 2), seed=i, ignore_eos=True) for i in range(4)]
    seen = []
    for traced in ((), (1, 2), (0, 1, 2, 3)):
        with LLM(pair.target, pair.draft, device="cuda", graphs=graphs, max_context_len=256, **options) as llm:
            mixed = [replace(one, trace=i in traced) for i, one in enumerate(params)]
            events, outputs = streamed(llm, prompts, mixed)
            for i in range(4):
                if i in traced:
                    check(events[i], outputs[i], prompts[i])
                else:
                    assert all(event.rounds == () for event in events[i])
            seen.append([one.token_ids for one in outputs])
    assert seen[0] == seen[1] == seen[2]
