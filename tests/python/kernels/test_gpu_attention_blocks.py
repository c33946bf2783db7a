"""Attention of blocks whose rows attend to all of them, on a GPU: a row has the bits of the same query that is decoded
alone behind the block, and is near float64's."""

from __future__ import annotations

import random

import pytest
import torch

from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from attention_cases import Cache, Request, Shape, attend, reference, same, tokens

pytestmark = pytest.mark.usefixtures("no_fault_is_left")
SIZES = [1, 2, 5, 7, 8, 9, 15, 16, 17, 24, 33, 63, 64]


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_a_row_of_a_block_is_the_row_that_is_decoded_behind_it(dim: int, group: int) -> None:
    rng = random.Random(dim + group)
    for turn in range(6):
        shape = Shape(rng.choice([1, 2]), group, dim, [torch.bfloat16, torch.float16][turn % 2], rng.choice([1, 4, 16]))
        blocks = [(rng.choice([0, 1, 7, 15, 16, 31, 120, 128, 505, 1020, 1031]), rng.choice(SIZES)) for _ in range(4)]
        rooms = sum(length + rows for length, rows in blocks)
        cache = Cache(shape, rooms // shape.page + 3 * len(blocks) + 4, rng)
        requests, alone, wanted = [], [], []
        for i, (length, rows) in enumerate(blocks):
            text = tokens(shape, length + rows, 10 * turn + i)
            pages = cache.store(text)
            requests.append(Request(pages, length, text.q[length:], [(1 << rows) - 1] * rows))
            alone += [Request(pages, length + rows - 1, text.q[length + j : length + j + 1]) for j in range(rows)]
            wanted += [reference(shape, text.q[length + j], text) for j in range(rows)]
        got = torch.cat(attend(cache, requests))
        each = torch.cat(
            [out for first in range(0, len(alone), 64) for out in attend(cache, alone[first : first + 64])]
        )
        assert same(got, each), (blocks, shape)
        error = (got.double().cpu() - torch.stack(wanted).cpu()).abs().max()
        assert error < 0.05, (error, blocks, shape)
