"""Recorded rounds replayed with a GPU's decisions: the host's writes, and a difference found where it was put."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo import Pair, write_eagle3, write_target
from specrs import LLM, SamplingParams, device
from specrs import _specrs as core

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from specrs.capsule import Capsule, dumps, loads, save
from specrs.capsule import on_device as replaying
from specrs.capsule.compare import Result, replay_device
from specrs.capsule.on_device import OnDevice
from specrs.cli import main

FORMATS = ["native", "flashinfer", "triton", "flash_attention"]

# Replays have a fault record of their own: whatever they meet, the device's stays empty.
pytestmark = pytest.mark.usefixtures("no_fault_is_left")


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair that a GPU runs."""
    root = tmp_path_factory.mktemp("gpu")
    sizes = {"head_dim": 64, "vocab_size": 8, "eos_token_id": None, "bos_token_id": None}
    target = write_target(root / "target", dtype=torch.bfloat16, max_position_embeddings=256, **sizes)
    return Pair(target, write_eagle3(root / "draft", target, draft_vocab_size=8, dtype=torch.bfloat16, head_dim=64))


def record(pair: Pair, round: int = 2, **options: Any) -> Capsule:
    """Three requests of different lengths; the first two share the pages of five tokens."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4], [3]]
    with LLM(pair.target, pair.draft, max_context_len=64, **{"device": "cpu"} | options) as llm:
        llm.generate([prompts[0]], SamplingParams(max_tokens=2))  # leaves its pages in the cache
        with llm.recording(round=round) as recorder:
            llm.generate(prompts, SamplingParams(max_tokens=12, temperature=1.0, seed=5))
    assert recorder.capsule is not None
    return loads(dumps(recorder.capsule))


def agrees(result: Result) -> None:
    assert result.equal, "\n".join(result.lines())
    assert result.found.writes > 300


@pytest.mark.parametrize("tree", [(1, 3, 4), (2, 2, 4), (4, 3, 9), (3, 5, 20)])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_the_device_writes_what_the_host_writes(tiny: Pair, tree: tuple[int, int, int], page: int) -> None:
    rng = random.Random(f"{tree} {page}")
    c = record(tiny, tree=tree, page_size=page, draft_attention=rng.choice(["ancestors", "lane"]))
    for format in FORMATS:
        result = replay_device(c, "cuda", format=format)
        agrees(result)
        assert {s.phase for s in result.runs[1].segments} >= {"reserve", "trees", "verify", "accept", "commit"}
        assert set(result.found.skipped) <= {"arrays of the write before"}


@pytest.mark.parametrize("page", [2, 4, 16])
def test_holey_rounds(tiny: Pair, page: int) -> None:
    tree = {"tree": (3, 4, 9), "page_size": page}
    agrees(replay_device(record(tiny, attention_backend="flash_attention", draft_layout="holey", **tree), "cuda"))
    dense = record(tiny, draft_attention="lane", **tree)
    agrees(replay_device(dense, "cuda", format="flash_attention", layout="holey"))


def test_plain_rounds(tiny: Pair) -> None:
    with LLM(tiny.target, max_context_len=64, page_size=4, device="cpu") as llm, llm.recording(round=2) as recorder:
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=6))
    assert recorder.capsule is not None and recorder.capsule.kind == "plain"
    for format in FORMATS:
        result = replay_device(recorder.capsule, "cuda", format=format)
        assert result.equal, "\n".join(result.lines())


def test_arrays_too_large_to_be_static(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from specrs.capsule import replay as host

    c = record(tiny, tree=(2, 2, 4), page_size=4)
    for module in (host, replaying):
        monkeypatch.setattr(module, "MAX_BYTES", 100)
    for format in FORMATS:
        agrees(replay_device(c, "cuda", format=format))


def test_a_round_of_an_engine_on_the_gpu(on_gpu: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tree, page in (((4, 3, 9), 4), ((1, 6, 7), 1), ((8, 4, 32), 16)):
        for round in (1, 3):
            c = record(on_gpu, round, tree=tree, page_size=page, device="cuda")
            assert c.kind == "speculative" and c.format == "native"
            agrees(replay_device(c, "cuda:0"))
    path = tmp_path / "gpu.capsule"
    save(c, path)
    assert main(["replay", str(path), "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "native on cuda:0: " in out and "NO DIVERGENCE: " in out


# -- differences ------------------------------------------------------------------------------------------------------


@pytest.fixture
def capsule(tiny: Pair) -> Capsule:
    return record(tiny, tree=(4, 3, 9), page_size=4)


def plant(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    """Let `change` have what a method of the replay returns, and return something else."""
    method = getattr(OnDevice, name)
    monkeypatch.setattr(OnDevice, name, lambda self, *args: change(self, args, method(self, *args)))


def test_a_table_of_another_page_is_the_first_divergent_write(
    capsule: Capsule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a table changed after it was compared, the first plan that reads it diverges."""

    def another_page(self: Any, args: Any, tables: Any) -> Any:
        row = self.seqs[1].row
        self.table[row, capsule.rows[1].committed // 4] = self.world.pages[0][0]
        return tables

    plant(monkeypatch, "_tables", another_page)
    path = tmp_path / "r.capsule"
    save(capsule, path)
    assert main(["replay", str(path), "--device", "cuda", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["equal"] is False and told["first"]["phase"] == "draft step 0"
    assert told["first"]["array"] == "plan.out_slots" and "request 1" in told["first"]["owner"]
    host, other = told["first"]["values"]
    assert host != other and other // 4 == capsule.rows[0].pages[0]
    assert told["runs"][1]["guard"]["phase"] == "draft step 0"  # the audit: the page is another request's
    assert main(["replay", str(path), "--device", "cuda"]) == 1
    assert "FIRST DIVERGENT WRITE" in capsys.readouterr().out


def test_a_length_that_is_off_by_one(capsule: Capsule, monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(self: Any, args: Any, operands: Any) -> Any:
        if args[0] == "verify":
            operands["lens"][2] += 1
        return operands

    plant(monkeypatch, "_operands", longer)
    first = replay_device(capsule, "cuda").found.first
    assert first is not None and first.phase == "verify" and first.array == "plan.prefix_lens"
    assert first.index == (2,) and first.values == (capsule.rows[2].committed, capsule.rows[2].committed + 1)


def test_what_a_kernel_skips_ends_the_run(capsule: Capsule, monkeypatch: pytest.MonkeyPatch) -> None:
    def outside(self: Any, args: Any, operands: Any) -> Any:
        operands["lens"][0] = 10_000
        return operands

    plant(monkeypatch, "_operands", outside)
    result = replay_device(capsule, "cuda", format="flashinfer")
    guard = result.runs[1].guard
    assert not result.equal and guard is not None
    assert guard.phase == "draft step 0" and guard.kind.startswith("OutOfBoundsError")
    assert "committed lengths" in guard.error and "10000" in guard.error


def test_a_path_and_a_tree(capsule: Capsule, monkeypatch: pytest.MonkeyPatch) -> None:
    better = replaying.Candidates.of

    def worse(c: Capsule) -> Any:
        found = better(c)
        found.scores[0, found.scores[0].argmax()] = -50.0
        return found

    with monkeypatch.context() as m:
        m.setattr(replaying.Candidates, "of", worse)
        first = replay_device(capsule, "cuda").found.first
        assert first is not None and first.phase == "trees"
    original = core._device_verify_greedy

    def other_logits(*, logits: torch.Tensor, **others: Any) -> None:
        logits[0] = logits[0].flip(0)
        original(logits=logits, **others)

    monkeypatch.setattr(core, "_device_verify_greedy", other_logits)
    first = replay_device(capsule, "cuda").found.first
    assert first is not None and first.phase == "accept"


def test_a_device_that_is_not_there(capsule: Capsule, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.capsule"
    save(capsule, path)
    assert main(["replay", str(path), "--device", "cuda:77"]) == 2
    assert "there are " in capsys.readouterr().err
