"""The Triton kernels of sglang as specrs's planner feeds them: slots as int64, the new tokens apart from the prefix.

Decoding and draft steps read ``kv_indices[kv_indptr[z]:kv_indptr[z + 1]]``, one query a row. Extend and verify are one
kernel (sglang's ``extend_attention_fwd``) in two stages: the prefix by ``kv_indices``, then the pass's own tokens,
which lie at ``extend_slots[qo_indptr[i]:qo_indptr[i + 1]]``, causally or by ``custom_mask``, whose rows cover both.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specrs.backends.base import AttentionBackend, Step

if TYPE_CHECKING:
    import torch


class Triton(AttentionBackend):
    """Both draft layouts, ancestors and lanes: indices are by slot, so a branch can be given any slots."""

    name = "triton"
    format = "triton"
    reads = "`kv_indptr` (int32), `kv_indices` (int64); the pass's own tokens apart; custom mask"
    topk_above_1 = True
    page_size_above_1 = True
    draft_attention = MappingProxyType({"dense": ("ancestors", "lane"), "holey": ("ancestors", "lane")})
    kv_dtypes = ("float32", "bfloat16")
    needs_cpu_seq_lens = False  # grids are sized by upper bounds

    def prepare(self, step: Step) -> Any:
        from specrs.backends import gather

        arrays = step.arrays
        indptr = arrays["kv_indptr"].long()
        lens = indptr.diff()
        slots = gather.ragged(arrays["kv_indices"], indptr[:-1], lens)
        if step.phase in ("draft", "decode"):
            first, count = gather.rows_of(None, lens.numel())
            return gather.groups(first, count, slots, lens)
        first, count = gather.rows_of(arrays["qo_indptr"], lens.numel())
        new = gather.ragged(arrays["extend_slots"], first, count)
        slots, lens = gather.joined(slots, lens, new, count)
        if step.phase == "extend":
            return gather.groups(first, count, slots, lens, causal=True)
        cells = gather.cells(arrays["mask_indptr"].long()[:-1], count, lens)
        return gather.groups(first, count, slots, lens, mask=gather.take(arrays["custom_mask"], cells) != 0)

    def attend(
        self, prepared: Any, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        from specrs.backends import gather

        return gather.attend(prepared, keys, values, q, scale).out.to(q.dtype)
