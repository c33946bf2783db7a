"""A fault that memcheck must find: a KV move on a cache that claims more slots than its memory has.

Run under the sanitizer by run.sh. It shows that a clean memcheck of the tests means something: the kernel is watched.
"""

from __future__ import annotations

import torch

from specrs import device

SLOTS, BEYOND = 6144, 64  # [1, 2, 6144, 1, 64] float32 is 3 MiB; the claim ends 32 KiB later


class Claim:
    """A tensor's memory under a shape that is not true."""

    def __init__(self, real: torch.Tensor, shape: tuple[int, ...]) -> None:
        data = (real.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": data, "version": 3}


moves = [torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([SLOTS + BEYOND - 1], [5], [0, 1])]
# specrs refuses a cache that overlaps another operand: take one with none in the gap that follows it.
real = [torch.zeros(1, 2, SLOTS, 1, 64, device="cuda") for _ in range(4)]
claim_bytes = 2 * (SLOTS + BEYOND) * 64 * 4
apart = [r for r in real if not any(0 <= m.data_ptr() - r.data_ptr() < claim_bytes for m in moves)]
claimed = torch.as_tensor(Claim(apart[0], (1, 2, SLOTS + BEYOND, 1, 64)), device="cuda")
if claimed.data_ptr() != apart[0].data_ptr():
    raise SystemExit("the claim was copied")
device.kv_move(claimed, *moves)
torch.cuda.synchronize()
print("not noticed")
