"""`specrs bench` on a GPU: rounds, floors and classes of kernels of a shape cut to two layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specrs import device
from specrs.cli import main

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)


def test_rounds_and_kernels_of_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "--shape", "llama-3.2-1b", "--layers", "2", "--device", "cuda", "--batch", "1,2"]
    argv += ["--context", "128", "--rounds", "6", "--kernels", "--json", str(tmp_path / "b.json")]
    assert main(argv) == 0
    assert "tokens identical" in capsys.readouterr().out
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["device"].startswith("cuda:") and found["driver"] and found["bytes_per_second"] > 1e11
    for row in found["cases"]:
        assert row["error"] is None and row["same_tokens"] and row["in_turns"]
        for kind in ("plain", "tree"):  # how long, only a GPU that no other test shares can tell
            told = row[kind]
            assert told["ms"] > 0 < told["period_ms"]
            assert 0 < told["of_floor"] == pytest.approx(told["floor_ms"] / told["ms"], rel=1e-3)
        assert set(row["memory"]) == {"weights", "kv_per_request", "other"} and row["memory"]["other"] > 0
    assert [one["batch"] for one in found["kernels"]] == [1, 2]
    for one in found["kernels"]:
        for kind in ("plain", "tree"):
            told = one[kind]
            assert told["rounds"] > 0 and told["unknown_share"] < 0.05, told["unknown_us"]
            assert told["classes"]["products"]["us"] > told["classes"]["attention"]["us"] > 0
        assert one["tree"]["classes"]["selection"]["us"] > 0 == one["plain"]["classes"]["selection"]["us"]
