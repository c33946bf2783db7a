"""The bench that reads Nsight Compute's lists: which launches belong to which case, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu import ncu

NAMES = ("ID", "Kernel Name", "Block Size", "Grid Size", *ncu.METRICS)
SPIN = {"Kernel Name": "at::cuda::(anonymous namespace)::spin_kernel(long)"}


def listed(*launches: dict[str, Any]) -> str:
    """What ncu prints of launches: notes of its own around a table, every field in quotes."""
    rows = [NAMES, ["unit"] * len(NAMES)]
    rows += [[launch.get(name, "0") for name in NAMES] for launch in launches]
    table = ["".join(f'"{field}",' for field in row)[:-1] for row in rows]
    return "\n".join(["==PROF== Connected to process 7", *table, "==PROF== Disconnected from process 7", ""])


def launch(name: str, us: float, grid: str = "(8, 1, 1)", **stalls: float) -> dict[str, Any]:
    counters = {
        "gpu__time_duration.sum": f"{us * 1e3:,.0f}",
        ncu.COUNTERS["dram_pct"]: "12.345",
        ncu.COUNTERS["tensor_pct"]: "n/a",
        ncu.CYCLES: "20,000",
        ncu.BUSY_CYCLES: "5,000",
    }
    stalls_ = {ncu.STALL.format(reason): str(value) for reason, value in stalls.items()}
    return {"Kernel Name": name, "Block Size": "(256, 1, 1)", "Grid Size": grid, **counters, **stalls_}


def test_launches_behind_a_spin_are_a_case_and_those_of_one_grid_one_row() -> None:
    first = [launch("plan, native", 4.0), launch("merge", 2.0), launch("plan, native", 1200.0, wait=1)]
    other = [launch("plan, native", 3.0, grid="(64, 1, 1)")]
    found = list(ncu.by_case(ncu.launches_of(listed(launch("before", 1.0), SPIN, *first, SPIN, SPIN, *other))))
    assert [len(case) for case in found] == [3, 0, 1]
    rows = ncu.kernels_of(found[0])
    assert [(row["kernel"], row["launches"], row["us"]) for row in rows] == [
        ("plan, native", 2, 602.0),
        ("merge", 1, 2.0),
    ]
    assert (rows[0]["grid"], rows[0]["block"]) == ("(8, 1, 1)", "(256, 1, 1)")
    assert ncu.kernels_of(found[2])[0]["grid"] == "(64, 1, 1)"


def test_stalls_are_shares_of_what_a_warp_waits_and_what_ncu_has_not_is_none() -> None:
    [[one]] = ncu.by_case(
        ncu.launches_of(listed(SPIN, launch("k", 5.0, long_scoreboard=6, selected=1, wait=2.7, drain=0.3)))
    )
    [row] = ncu.kernels_of([one])
    assert (
        row["stalls"] == {"long_scoreboard": 0.6, "wait": 0.27, "selected": 0.1}
        and next(iter(row["stalls"])) == "long_scoreboard"
    )
    assert row["dram_pct"] == 12.35 and row["tensor_pct"] is None and row["busy_sms_pct"] == 25.0
    del one[ncu.CYCLES], one[ncu.COUNTERS["us"]]
    [row] = ncu.kernels_of([one])
    assert row["us"] is None and row["busy_sms_pct"] is None


def test_lists_without_a_launch_have_no_case() -> None:
    assert ncu.launches_of("==ERROR== no counters\n") == [] and list(ncu.by_case([])) == []
    assert list(ncu.by_case(ncu.launches_of(listed()))) == []


def test_files_of_a_group_that_was_stopped_give_the_cases_that_were_seen(tmp_path: Path) -> None:
    told = [{"goals": "4", "case": "one"}, {"goals": "9", "case": "two"}]
    (tmp_path / "metadata.cases").write_text("a warning\n" + "".join(json.dumps(case) + "\n" for case in told))
    (tmp_path / "metadata.csv").write_text(listed(SPIN, launch("tree_build", 8.0)))
    [case] = ncu.read("metadata", tmp_path)
    assert (case["goals"], case["case"], case["caches"]) == ("4", "one", "kept")
    assert [row["kernel"] for row in case["kernels"]] == ["tree_build"]
    (tmp_path / "metadata.csv").unlink()
    assert ncu.read("metadata", tmp_path) == []


def test_a_group_under_ncu_writes_its_files_and_says_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "ncu"
    stand_in.write_text(
        "#!/bin/sh\necho '{}'; echo \"$@\" > " + str(tmp_path / "told") + "; echo lost >&2; exit $CODE\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for code, why in (("0", None), ("3", "lost")):
        monkeypatch.setenv("CODE", code)
        assert ncu.profile("metadata", 2, 30.0, tmp_path) == why
    told = (tmp_path / "told").read_text()
    assert "--cache-control none" in told and "--clock-control none" in told and told.endswith("metadata 2\n")
    assert (tmp_path / "metadata.cases").read_text() == "{}\n"
    stand_in.write_text("#!/bin/sh\nexec sleep 60\n")
    assert ncu.profile("attention", 2, 0.2, tmp_path) == "stopped after 0 s"
