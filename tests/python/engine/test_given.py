"""What the host gives a GPU: inputs of rounds, and passes of the head, on a machine without one."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specrs import _specrs as core
from specrs.engine.devices import memory as memories
from specrs.engine.devices.cuda_drafts import CudaDrafts, in_passes
from specrs.engine.devices.given import Given, Seat
from specrs.engine.devices.head_inputs import Entries
from specrs.engine.devices.memory import STOPS, Fields, given_layout


def given_of(batch: int, monkeypatch: pytest.MonkeyPatch, **trees_of: int) -> Given:
    """Inputs in memory that is not pinned."""
    plain = SimpleNamespace(zeros=lambda *size, pin_memory, **options: torch.zeros(*size, **options), int32=torch.int32)
    monkeypatch.setattr(memories, "torch", plain)
    given, trees = given_layout(batch), Fields(tree_offsets=batch + 1, **trees_of)
    arrays = {
        "given": torch.zeros(given.words, dtype=torch.int32),
        "host trees": torch.zeros(trees.words, dtype=torch.int32),
    }
    memory: Any = SimpleNamespace(given_layout=given, trees_layout=trees, batch=batch, arrays=arrays)
    return Given(memory, SimpleNamespace(nothing=9), core.TreeShape(2, 3, 11))  # type: ignore[arg-type]


def test_each_field_of_a_seat_is_where_kernels_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_of(4, monkeypatch)
    seat = partial(Seat, length=70, limit=90)
    for _ in range(2):  # what the first launch left does not show in the next one
        given.set_requests([seat(row, root=row + 5, depth=3) for row in (3, 2, 1, 0)], 12)
        given.set_requests([Seat(7, 70, 11, 2, 90, 4, [8, 9]), Seat(5, 71, 12, 0, 91, 0, list(range(STOPS + 3)))], 12)
    assert given.live == 2
    found = {name: array.tolist() for name, array in given.inputs.host.items()}
    assert {name: found[name] for name in ("rows", "lens", "roots", "depths", "limits", "first_pages")} == {
        "rows": [7, 5, -1, -1], "lens": [70, 71, 0, 0], "roots": [11, 12, 0, 0], "depths": [2, 0, 0, 0],
        "limits": [90, 91, 0, 0], "first_pages": [4, 0, 0, 0],
    }  # fmt: skip
    assert {name: found[name] for name in ("caps", "nodes", "stop_counts", "done", "root_from", "root_to")} == {
        "caps": [3, 0, 0, 0], "nodes": [12, 12, 0, 0], "stop_counts": [2, STOPS, 0, 0], "done": [0] * 4,
        "root_from": [7, 9, 9, 9], "root_to": [7, -1, -1, -1],
    }  # fmt: skip
    assert found["stops"][:2] == [8, 9] and found["stops"][STOPS : 2 * STOPS] == list(range(STOPS))
    assert found["tree_offsets"] == [0, 1, 2, 2, 2] and found["live"] == [2]


def test_a_launch_of_empty_seats_has_dead_values(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_of(2, monkeypatch)
    given.set_requests([Seat(1, 5, 5, 1, 9), Seat(0, 5, 5, 1, 9)], 4)
    given.set_requests([], 1)
    found = {name: array.tolist() for name, array in given.inputs.host.items()}
    assert found["rows"] == found["root_to"] == [-1, -1] and found["root_from"] == [9, 9]
    assert found["live"] == [0] and found["tree_offsets"] == [0] * 3 and found["depths"] == [0, 0]


def test_trees_of_the_host_and_what_is_dead_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_of(3, monkeypatch, tree_tokens=24, tree_parents=24, tree_scores=24)
    given.set_trees(core.TreeBatch.from_parents([[-1, 0, 0]] * 3, [[5, 6, 7]] * 3, [[0.5, 0.25, 0.125]] * 3))
    given.set_trees(core.TreeBatch.from_parents([[-1, 0, 0], [-1]], [[3, 4, 5], [6]], [[0.0, -0.5, -1.0], [0.0]]))
    found = given._trees.there
    assert found["tree_offsets"].tolist() == [0, 3, 4, 4]
    assert found["tree_tokens"].tolist() == [3, 4, 5, 6, *[0] * 20]
    assert found["tree_parents"].tolist() == [-1, 0, 0, -1, *[-1] * 20]
    assert found["tree_scores"].view(torch.float32).tolist() == [0.0, -0.5, -1.0, 0.0, *[0.0] * 20]


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_entries_that_wait_after_an_error_are_written_in_passes_that_fit(most: int) -> None:
    one, two, three = object(), object(), object()
    each: list[Any] = [Entries(one, 5, 9), Entries(two, 0, 4), Entries(three, 2, 0)]  # type: ignore[arg-type]
    passes = list(in_passes(each, most))
    assert all(0 < sum(e.count for e in some) <= most for some in passes)
    assert all(sum(e.count for e in some) == most for some in passes[:-1])
    written = [(e.request, p) for some in passes for e in some for p in range(e.start, e.start + e.count)]
    assert written == [(one, p) for p in range(5, 14)] + [(two, p) for p in range(4)]
    assert not list(in_passes([], most))


def test_positions_that_nobody_kept_features_of_are_made_again_in_passes_that_fit() -> None:
    """A request that has not drafted for long may end on a page that a later request goes on from."""
    drafts = CudaDrafts.__new__(CudaDrafts)
    head = SimpleNamespace(end=16, features=None)
    request: Any = SimpleNamespace(head=head, lag=300)
    ran: list[tuple[int, int]] = []

    def enter(enters: Any, entries: Any, recalls: bool) -> None:
        assert recalls and len(entries) == 1 and entries[0].count <= enters.rows
        ran.append((entries[0].start, entries[0].count))

    drafts.entering, drafts._most_rows = [SimpleNamespace(rows=47, batch=1)], 512  # type: ignore[list-item]
    drafts._enter = enter  # type: ignore[method-assign]
    drafts._write([Entries(request, head.end, request.lag)])
    assert ran[0] == (16, 47) and sum(n for _, n in ran) == 300
    assert all(first + n == second for (first, n), (second, _) in pairwise(ran))


def test_samplers_leave_nothing_for_empty_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Given, "_make_room", lambda *_: None)
    given, names = given_of(3, monkeypatch), ("sampling", "edit_begins", "edit_counts")
    samplers = [core.Sampler(8, [1], temperature=0.5 + i, seed=i + 1) for i in range(3)]
    given.set_samplers(samplers[:1], moving=False)
    alone = {name: given.inputs.host[name].tolist() for name in names}
    given.set_samplers(samplers, moving=False)
    assert given.inputs.host["sampling"].reshape(3, -1).any(1).all()
    given.set_samplers(samplers[:1], moving=False)
    assert {name: given.inputs.host[name].tolist() for name in names} == alone
    assert not given.inputs.host["sampling"].reshape(3, -1)[1:].any()
