"""Numbers of the kernels' memory that `specrs.engine.lanes` has by heart."""

from __future__ import annotations

from typing import Any

import torch

from specrs import _specrs as core
from specrs.engine import lanes


def row(**config: Any) -> dict[int, int]:
    """The words of a sampler's row that are not those of a plain greedy one."""
    samplers = [core.Sampler(16, [1], **one) for one in ({}, config)]
    plain, other = torch.from_dlpack(core._device_samplers(samplers)[0]).view(torch.int32)
    return {i: int(word) for i, word in enumerate(other) if word != plain[i]}


def test_words_of_a_samplers_row() -> None:
    half = torch.tensor([2.0]).view(torch.int32).item()  # the inverse of the temperature
    assert row(temperature=0.5) == {lanes._INV_TEMPERATURE: half}
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert row(**{penalty: 1.5})[lanes._PENALISED] == 1
    others = row(seed=3, top_k=5, top_p=0.5, min_p=0.1, logit_bias={2: 1.0})
    assert others and not {lanes._INV_TEMPERATURE, lanes._PENALISED} & set(others)


def test_the_exit_bit_of_a_loop_that_has_run_its_rounds() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    # One lane, which advances by a token a round and is sound.
    limits, state = (ints(99), ints(4), ints(-1), ints(0)), (ints(10), ints(1), ints(0), ints(0))
    control, ring = ints(0, 2, -1, 0), torch.full((2, 32), -1, dtype=torch.int32)
    for length, bits in ((11, 0), (12, lanes._BUDGET)):
        accepts = ints(0, 1), ints(7), ints(length), ints(7), ints(0), ints(1), ints(1)
        assert core._round_end(ring, accepts, limits, state, control, ints(0), True, False, False) == []
        assert control[2] == bits
