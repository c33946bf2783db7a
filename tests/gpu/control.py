"""What memcheck must find: a KV move on a cache that claims more slots than its memory has.

Run under the sanitizer by run.sh. It shows that a clean memcheck of the tests means something: the kernel is watched,
and the checks of specrs trust what a tensor says of itself.
"""

from __future__ import annotations

import torch

from specrs import device


class Claim:
    """A tensor's memory under a shape that is not true."""

    def __init__(self, real: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (real.data_ptr(), False),
            "version": 3,
        }


real = torch.zeros(1, 2, 8, 1, 64, device="cuda")
claimed = torch.as_tensor(Claim(real, (1, 2, 1 << 16, 1, 64)), device="cuda")
if claimed.data_ptr() != real.data_ptr():
    raise SystemExit("the claim was copied")
src, dst, offsets = (torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([3], [5], [0, 1]))
device.kv_move(claimed, src, dst, offsets)
torch.cuda.synchronize()
