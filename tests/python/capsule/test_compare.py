"""The comparison of two replays by hand: the first difference, and what one run alone wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrs.capsule.log import Guard, Run, Segment, compare


def line(values: list[Any], array: str = "x", **more: Any) -> Segment:
    flat = np.array([0 if v is None else v for v in values], dtype=more.pop("dtype", np.int32))
    written = np.array([v is not None for v in values], dtype=np.bool_)
    return Segment("p", array, more.pop("shape", (len(flat),)), flat, written, lambda at: f"owner {at}", **more)


@pytest.mark.parametrize(
    ("a", "b", "index", "values"),
    [([1, 2, 3], [1, 2, 3], None, None), ([1, 2, 3], [1, 5, 3], (1,), (2, 5)),
     ([1, None, 3], [1, 0, 3], (1,), (None, 0)), ([1, 2], [1, 2, 3], (2,), (None, 3)),
     ([1, 2, 3], [1, 2], (2,), (3, None)), ([1, None], [1], None, None),
     ([], [], None, None), ([], [4], (0,), (None, 4))],
)  # fmt: skip
def test_first_difference(a: list[Any], b: list[Any], index: Any, values: Any) -> None:
    found = compare(Run("a", [line([7]), line(a, "y")]), Run("b", [line([7]), line(b, "y")]))
    if index is None:
        assert found.first is None and found.arrays == 2 and found.writes == 1 + sum(v is not None for v in a)
    else:
        assert found.first is not None
        assert (found.first.array, found.first.index, found.first.values) == ("y", index, values)
        assert found.first.owner == f"owner {index[0]}" and found.arrays == 1


def test_arrays_of_one_run_alone() -> None:
    x, y = line([1, 2]), line([None, 9], "y")
    first = compare(Run("a", [x, y]), Run("b", [x])).first
    assert first is not None and (first.array, first.index, first.values) == ("y", (1,), (9, None))
    first = compare(Run("a", [x]), Run("b", [x, y])).first
    assert first is not None and (first.array, first.index, first.values) == ("y", (1,), (None, 9))
    assert compare(Run("a", [x, line([None], "y")]), Run("b", [x])).first is None
    shared = compare(Run("a", [line([1], across=True), y]), Run("b", [line([1], across=True)]), across=True)
    assert (shared.first, shared.skipped, shared.arrays) == (None, ("y",), 1)


def test_tables_of_other_widths_are_compared_by_row_and_column() -> None:
    a = line([1, 2, 3, 4], shape=(2, 2))
    b = line([1, 2, None, 3, 4, None], shape=(2, 3))
    assert compare(Run("a", [a]), Run("b", [b])).first is None
    c = line([1, 2, None, 3, 5, None], shape=(2, 3))
    first = compare(Run("a", [a]), Run("b", [c])).first
    assert first is not None and (first.index, first.values, first.owner) == ((1, 1), (4, 5), "owner 3")


def test_tolerance_holds_across_formats_alone() -> None:
    a, b = (line([1.0, x, float("nan")], dtype=np.float32, across=True, tolerance=1e-5) for x in (2.0, 2.000005))
    found = compare(Run("a", [a]), Run("b", [b]), across=True)
    assert found.first is None and found.largest == pytest.approx(5e-6, rel=0.1)
    first = compare(Run("a", [a]), Run("b", [b])).first
    assert first is not None and first.index == (1,)
    far = line([1.0, 2.00002, 0.0], dtype=np.float32, across=True, tolerance=1e-5)
    first = compare(Run("a", [a]), Run("b", [far]), across=True).first
    assert first is not None and first.index == (1,)


def test_a_stopped_run_diverges_at_what_it_did_not_write() -> None:
    guard = Guard("p", "y: need 3 elements, have 1", "ConfigError (Capacity)", "y", 1)
    a, b = Run("a", [line([1]), line([4, 5, 6], "y")]), Run("b", [line([1])], guard)
    found = compare(a, b)
    assert found.first is not None and (found.first.index, found.first.values) == ((0,), (4, None))
    assert found.beyond is not None and (found.beyond.index, found.beyond.values) == ((1,), (5, None))
