"""The bench that holds sglang's engine beside specrs: what it counts, on figures and arrays that are given."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu import peer_engine
from gpu.peer_sglang import bundle, worker
from specrs.measuring.floors import Reads

STAND_INS = Path(bundle.__file__).with_name("stand_ins.py")


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(("chain", "path"), [(False, [0, 2, 4]), (True, [0, 1, 2])])
def test_a_path_of_given_length_overwrites_what_verification_found(chain: bool, path: list[int]) -> None:
    # Three seats of trees of 6 nodes, two of them live; three tokens are accepted.
    trees = SimpleNamespace(offsets=i32(0, 6, 12, 12), tokens=torch.arange(100, 118, dtype=torch.int32))
    found: dict[str, Any] = {name: torch.full((15,), -7, dtype=torch.int32) for name in ("paths", "rows", "tokens")}
    accepts = SimpleNamespace(**found, offsets=i32(9, 9, 9, 9), roots=i32(9, 9, 9), new_lens=i32(9, 9, 9))
    given = {"trees": trees, "accepts": accepts, "lens": i32(10, 20, 0), "live": i32(2), "max_nodes": 6}
    overwrite = peer_engine._overwriting(given, 3, chain)
    assert accepts.offsets.tolist() == [9, 9, 9, 9]  # nothing is written before it is called
    for _ in range(2):
        overwrite()
        assert accepts.offsets.tolist() == [0, 3, 6, 6] and accepts.new_lens.tolist() == [13, 23, 0]
        assert accepts.paths[:6].tolist() == path * 2
        assert accepts.rows[:6].tolist() == path + [6 + n for n in path]
        assert accepts.tokens[:6].tolist() == [100 + row for row in accepts.rows[:6].tolist()]
        assert accepts.roots[:2].tolist() == accepts.tokens[2:6:3].tolist()
        assert accepts.rows.max() < 18 and (accepts.rows[9:] == -7).all()


def test_greedy_verification_is_overwritten_only_within_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def verify(**given: Any) -> None:
        calls.append(given["max_path"])

    monkeypatch.setattr(peer_engine.core, "_device_verify_greedy", verify)
    trees = SimpleNamespace(offsets=i32(0, 8), tokens=torch.arange(8, dtype=torch.int32))
    accepts = SimpleNamespace(
        offsets=i32(0, 1), paths=i32(*[0] * 5), rows=i32(*[0] * 5), tokens=i32(*[0] * 5), roots=i32(0), new_lens=i32(0)
    )
    given: dict[str, Any] = {"trees": trees, "accepts": accepts, "lens": i32(5), "live": i32(1), "max_nodes": 8}
    with peer_engine.accepting(4, True):
        peer_engine.core._device_verify_greedy(**given, max_path=1)
        assert accepts.offsets.tolist() == [0, 1]  # a plain round
        peer_engine.core._device_verify_greedy(**given, max_path=5)
        assert accepts.offsets.tolist() == [0, 4] and accepts.new_lens.tolist() == [9]
    assert calls == [1, 5] and peer_engine.core._device_verify_greedy is verify


def test_steps_of_the_full_batch_that_are_neighbours_count() -> None:
    lines = ["1.0 1 4 0 0", "1.1 2 3 9 1"]  # a prompt, and a step of three requests
    lines += [f"{2 + i / 100:.2f} 2 4 12 1" for i in range(8)]  # the first eight do not count
    lines += ["3.00 2 4 12 1", "3.02 2 4 8 1", "3.03 1 1 0 0", "3.50 2 4 12 1", "3.54 2 4 12 1"]
    lines += ["9.0 2 4 12 1", "9.1 2"]
    ms, drafts, graphs = worker.steps_of("\n".join(lines), 0.5, 5.0, 4)
    assert ms == pytest.approx([20.0, 40.0]) and drafts == [12, 8, 12, 12] and graphs
    assert "error" in worker.figures(ms, drafts, graphs, 4)
    found = worker.figures([float(n) for n in range(1, 12)], drafts, graphs, 4)
    assert (found["ms"], found["p10"], found["p90"], found["rounds"]) == (6.0, 2.0, 10.0, 11)
    assert found["tokens_a_round"] == 3.75


def test_the_fastest_backend_of_a_cell_counts_and_specrs_by_the_median_of_its_turns() -> None:
    def ours(ms: float) -> dict[str, Any]:
        rows = [{"kind": kind, "batch": 1, "context": 1024, "step_ms": ms} for kind in ("tree", "plain")]
        return {"part": "specrs", "rows": [*rows, {"kind": "chain", "batch": 1, "context": 1024, "error": "none"}]}

    def theirs(part: str, ms: float) -> dict[str, Any]:
        return {"part": part, "rows": [{"version": "0.5.14"}, {"batch": 1, "context": 1024, "ms": ms}]}

    parts = [ours(5.0), theirs("plain:fa3", 6.5), theirs("plain:triton", 6.0), theirs("tree:fa3", 12.0), ours(7.0)]
    # A pass reads 10 bytes of weights and 1 of each token, the head's 2 and none; a tree has six passes of the head.
    reads = Reads(target_weights=10, target_kv=1, head_weights=2, fusion=1, head_kv=0)
    assert peer_engine.table(parts, reads) == [
        {"kind": "plain", "batch": 1, "context": 1024, "specrs_ms": 6.0, "sglang_ms": 6.0, "backend": "triton",
         "ratio": 1.0, "goal": 1.1, "read_bytes": 1034},
        {"kind": "tree", "batch": 1, "context": 1024, "specrs_ms": 6.0, "sglang_ms": 12.0, "backend": "fa3",
         "ratio": 2.0, "goal": 1.5, "read_bytes": 1047},
    ]  # fmt: skip


def test_what_a_process_tells_and_that_it_failed(tmp_path: Path) -> None:
    log, mark = tmp_path / "log", worker.MARK
    told = f"print('noise'); print({mark!r} + '{{\"ms\": 1}}', flush=True)"
    run = [sys.executable, "-c", told]
    assert list(peer_engine.run(run, {}, log, time.time() + 60)) == [{"ms": 1}]
    run[-1] += "; raise SystemExit('out of luck')"
    first, last = peer_engine.run(run, {}, log, time.time() + 60)
    assert first == {"ms": 1} and last["error"].startswith("exit 1") and "out of luck" in last["error"]
    run[-1] = f"{told}; import time; time.sleep(60)"
    first, last = peer_engine.run(run, {}, log, time.time() + 1)
    assert first == {"ms": 1} and last["error"].startswith("exit -9")


def test_options_name_the_shapes_that_both_engines_run(tmp_path: Path) -> None:
    for kind, tree in peer_engine.KINDS.items():
        root = tmp_path / kind
        root.mkdir()
        found = worker.options(kind, "fa3", [16, 1], root)
        assert found["cuda_graph_bs_decode"] == [1, 16] and (root / "target" / "config.json").exists()
        asked = tuple(found.get(f"speculative_{name}") for name in ("eagle_topk", "num_steps", "num_draft_tokens"))
        assert asked == (tree or (None, None, None))


def test_a_change_to_a_peers_text_fails_where_the_text_is_another() -> None:
    assert bundle.replace_once("a b c", "b", "x") == "a x c"
    for text in ("a c", "b b"):
        with pytest.raises(ValueError, match="times, not once"):
            bundle.replace_once(text, "b", "x")


def test_files_of_the_bundle(tmp_path: Path) -> None:
    kept = ("sglang/__init__.py", "sglang/srt/models/llama.py", "sglang/srt/models/registry.py")
    left = ("sglang/srt/models/gpt2.py", "sglang/test/run.py", "sglang/srt/grpc/_core.so", "tools/x.py")
    assert all(map(bundle.of_sglang, kept)) and not any(map(bundle.of_sglang, left))
    assert bundle.of_kernel("sgl_kernel/sm90/common_ops.abi3.so")
    assert not bundle.of_kernel("sgl_kernel/flash_ops.abi3.so")
    wheel = tmp_path / "some_package-2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        for name in ("some_package/a.py", "some_package/b.py", "some_package-2.0.data/scripts/run"):
            z.writestr(name, "")
    assert bundle.download("some-package==2.0", tmp_path) == bundle.download("some-package", tmp_path) == wheel
    bundle.unpack(wheel, tmp_path / "site", lambda name: not name.endswith("b.py"))
    assert [p.name for p in (tmp_path / "site").rglob("*") if p.is_file()] == ["a.py"]


def test_stand_ins_are_there_for_what_is_absent_and_for_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_bytes(STAND_INS.read_bytes())
    code = """
import opentelemetry.trace as trace
from openai_harmony import Author

@trace.tracer.start_as_current_span("name")
def a(): return 1

@trace.traced
def b(): return 2

class C(Author): pass
assert b() == 2 and Author | None and trace.x.y()[0]
try:
    import no_such_package
except ModuleNotFoundError:
    print("absent")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "absent\n", done.stderr


def test_a_tree_reads_the_target_once_and_the_head_in_each_step() -> None:
    reads = peer_engine.reads_of(32)
    assert 15.0e9 < reads.plain(1, 0) < 15.1e9 and 0.6e9 < reads.head_weights < 0.8e9
