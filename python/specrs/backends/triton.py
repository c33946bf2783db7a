"""Attention over the arrays of sglang's Triton kernels: slots as int64, the new tokens apart from the prefix.

Decoding and draft steps read ``kv_indices[kv_indptr[z]:kv_indptr[z + 1]]``, one query a row. Extend and verify are one
kernel (sglang's ``extend_attention_fwd``) in two stages: the prefix by ``kv_indices``, then the pass's own tokens,
which lie at ``extend_slots[qo_indptr[i]:qo_indptr[i + 1]]``, causally or by ``custom_mask``, whose rows cover both.
"""

from __future__ import annotations

from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from specrs.backends import packages
from specrs.backends.base import AttentionBackend, Operands, Step, check_operands

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


class TritonCuda(AttentionBackend):
    """The same on a CUDA device, by kernels in Triton (`specrs.backends.triton_kernels`).

    The engine launches them itself. `prepare` and `attend` are for other engines: they take tensors of the device, the
    arrays of the step too, and launch on torch's current stream; nothing waits for the device.
    """

    name = Triton.name
    format = Triton.format
    reads = Triton.reads
    topk_above_1 = True
    page_size_above_1 = True
    draft_attention = Triton.draft_attention
    kv_dtypes = ("bfloat16", "float16")
    needs_cpu_seq_lens = False
    head_dims = (64, 96, 128, 256)

    def prepare(self, step: Step) -> Step:
        return step

    def attend(
        self, prepared: Step, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`, with q and the result of the pool's type.

        Args:
            prepared: a step whose ``kv_indptr`` is as long as the pass has lists, and one more.

        Raises:
            ConfigError: an operand is none that the kernels read.
            MissingPackageError: triton is not installed, or too old.
        """
        import torch

        check_operands(self, self.head_dims, q, keys, values)
        module, step, q = kernels(), prepared, q.contiguous()
        out = torch.empty_like(q)
        space = torch.empty(module.workspace(q.device, q.shape[2]), dtype=torch.uint8, device=q.device)
        lists = step.arrays["kv_indptr"].numel() - 1
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            module.attention(
                Operands(q, keys, values, out, step.arrays, scale), phase=step.phase, sequences=lists,
                most_queries=step.queries, space=space,
            )  # fmt: skip
        return out


def kernels() -> ModuleType:
    """Import `specrs.backends.triton_kernels`.

    Raises:
        MissingPackageError: triton is not installed, or is too old.
    """
    packages.triton(Triton.name)
    from specrs.backends import triton_kernels

    return triton_kernels
