"""The end of a round on the host: what the GPU's kernel is compared with."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import specrs
from operands_world import named
from specrs import _specrs as core
from specrs.operands import RoundFound, SeatLimits, SeatState

HEADER, LENS, DONE, UNSOUND, FAULT, BUDGET = 16, 16, 1, 4, 8, 32


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Round:
    """Three seats: one advances, one draws its stop token, one reaches its limit; and what may be changed of them."""

    def __init__(self, slots=2, words=5):
        self.accepts = [
            ints(0, 2, 4, 5, 5), ints(7, 8, 9, 3, 6, -1), ints(12, 22, 31, 99), ints(8, 3, 6, 77), ints(0, 0, 0, 1),
            ints(1, 1, 1, 0), ints(3),
        ]  # fmt: skip
        self.limits = [ints(15, 99, 31, 0), ints(4, 4, 4, 4), ints(-1, -1, 9, 3, 1, 1, 1, 1), ints(0, 2, 2, 9)]
        self.state = [ints(10, 20, 30, 40), ints(1, 2, 3, 4), ints(2, 2, 2, 2), ints(0, 0, 0, 0)]
        self.control, self.found = ints(0, 5, -1, 0), torch.arange(words, dtype=torch.int32)
        self.ring = torch.full((slots, 32), -1, dtype=torch.int32)

    def end(self, looped=False, asked=False, recorded=False):
        return core._round_end(
            self.ring, accepts=named(RoundFound, self.accepts), limits=named(SeatLimits, self.limits),
            state=named(SeatState, self.state), control=self.control, found=self.found, looped=looped, asked=asked,
            recorded=recorded,
        )  # fmt: skip


def test_seats_and_the_slot():
    r = Round()
    assert r.end() == []
    assert [t.tolist() for t in r.state] == [[12, 20, 30, 40], [8, 2, 3, 4], [2, 0, 0, 2], [0, 1, 1, 0]]
    assert r.control.tolist() == [1, 5, DONE, 0]
    row = r.ring[0].tolist()
    assert row[:5] == [1, 0, 3, DONE, 0] and row[5:HEADER] == [0] * 11
    assert row[LENS:][:8] == [10, 20, 30, 40, 2, 2, 2, 2] and row[24:29] == [0, 1, 2, 3, 4] and row[29:] == [-1] * 3
    assert r.ring[1].tolist() == [1] + [-1] * 31  # round 1 is to write it


def test_a_loop_counts_its_rounds():
    r = Round()
    r.state[3][1:3] = 0
    r.limits[3][1] = 0
    r.limits[0][2] = 99
    r.limits[3][2] = 0
    r.accepts[5][0] = 0
    assert r.end(looped=True) == []
    assert r.control.tolist() == [1, 4, UNSOUND, 0] and r.ring[0, 4] == 0
    r = Round()
    r.accepts[6][0] = 0
    assert r.end(looped=True) == [] and r.control.tolist() == [1, 4, 0, 0] and r.ring[0, 4] == 1
    r.control[1] = 1
    assert r.end(looped=True) == [] and r.control.tolist() == [2, 0, BUDGET, 0] and r.ring[1, 4] == 0


def test_what_is_refused():
    r = Round()
    r.accepts[0][1] = 7
    assert r.end() == [("accepted path", 0, 7, 7), ("accepted path", 1, 7, 7)]
    assert r.control[2] == DONE | FAULT and r.state[3].tolist() == [1, 1, 1, 0]
    r = Round()
    r.state[1] = r.state[0]
    with pytest.raises(specrs.ConfigError, match="roots"):
        r.end()
    r = Round()
    r.ring = torch.zeros(2, 64, dtype=torch.int32)
    with pytest.raises(specrs.ConfigError, match="ring"):
        r.end()
    r = Round(slots=3)
    with pytest.raises(specrs.ConfigError, match="power of two"):
        r.end()
    r = Round()
    r.limits[2] = r.limits[2][:7]
    with pytest.raises(specrs.ConfigError, match="stops"):
        r.end()


def test_operands_have_names():
    r = Round()
    given = {
        "accepts": named(RoundFound, r.accepts), "limits": named(SeatLimits, r.limits),
        "state": named(SeatState, r.state), "control": r.control, "found": r.found,
    }  # fmt: skip
    how = {"looped": False, "asked": False, "recorded": False}
    for name, attribute in (("accepts", "offsets"), ("limits", "limits"), ("state", "lens")):
        with pytest.raises(AttributeError, match=f"no attribute '{attribute}'"):
            core._round_end(r.ring, **{**given, name: tuple(getattr(r, name))}, **how)
        with pytest.raises(specrs.ConfigError, match=f"{attribute}: "):
            core._round_end(r.ring, **{**given, name: dataclasses.replace(given[name], **{attribute: None})}, **how)
    with pytest.raises(TypeError, match="positional"):
        core._round_end(r.ring, *given.values(), *how.values())
    with pytest.raises(TypeError, match="positional"):
        SeatState(*r.state)


def test_a_round_that_found_nothing_for_the_host():
    r = Round(words=0)
    assert r.end() == [] and r.ring[0, 24:].tolist() == [-1] * 8
