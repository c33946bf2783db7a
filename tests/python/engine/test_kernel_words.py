"""Numbers of the kernels' memory that `specrs.engine.devices` has by heart."""

from __future__ import annotations

from typing import Any

import torch

from specrs import _specrs as core
from specrs.engine.devices import given, graphs
from specrs.operands import RoundFound, SeatLimits, SeatState


def row(**config: Any) -> dict[int, int]:
    """Return the words of a sampler's row that are not those of a plain greedy one."""
    samplers = [core.Sampler(16, [1], **one) for one in ({}, config)]
    plain, other = torch.from_dlpack(core._device_samplers(samplers)["rows"]).view(torch.int32)
    return {i: int(word) for i, word in enumerate(other) if word != plain[i]}


def test_words_of_a_samplers_row() -> None:
    half = torch.tensor([2.0]).view(torch.int32).item()  # the inverse of the temperature
    assert row(temperature=0.5) == {given._INV_TEMPERATURE: half}
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert row(**{penalty: 1.5})[given._PENALISED] == 1
    others = row(seed=3, top_k=5, top_p=0.5, min_p=0.1, logit_bias={2: 1.0})
    assert others and not {given._INV_TEMPERATURE, given._PENALISED} & set(others)


def test_the_exit_bit_of_a_loop_that_has_run_its_rounds() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    # One seat, whose request advances by a token a round and is sound.
    limits = SeatLimits(limits=ints(99), caps=ints(4), stops=ints(-1), stop_counts=ints(0))
    state = SeatState(lens=ints(10), roots=ints(1), depths=ints(0), done=ints(0))
    control, ring = ints(0, 2, -1, 0), torch.full((2, 32), -1, dtype=torch.int32)
    for length, bits in ((11, 0), (12, graphs._BUDGET)):
        accepts = RoundFound(
            offsets=ints(0, 1), tokens=ints(7), new_lens=ints(length), roots=ints(7), faults=ints(0), sound=ints(1),
            live=ints(1),
        )  # fmt: skip
        refused = core._round_end(
            ring, accepts=accepts, limits=limits, state=state, control=control, found=ints(0), looped=True, asked=False,
            recorded=False,
        )  # fmt: skip
        assert refused == []
        assert control[2] == bits
