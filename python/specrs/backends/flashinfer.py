"""FlashInfer's paged attention as specrs's planner feeds it: pages of one token, ``kv_indptr`` and ``kv_indices``.

The backend reads what ``BatchPrefillWithPagedKVCacheWrapper`` and ``BatchDecodeWithPagedKVCacheWrapper`` read
(https://docs.flashinfer.ai): request z's keys are the slots ``kv_indices[kv_indptr[z]:kv_indptr[z + 1]]``, in order,
and its queries are rows ``qo_indptr[z]:qo_indptr[z + 1]``, or row z alone without ``qo_indptr``. A custom mask has a
row of bits per query over the request's keys, as bytes or packed, lowest bit first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from specrs._specrs import ConfigError
from specrs.backends.base import AttentionBackend, Operands, Phase, Step, check_operands
from specrs.backends.packages import flashinfer_wrapper, triton

if TYPE_CHECKING:
    import torch

    from specrs.backends.flashinfer_kernels import FlashInferKernels, Planned


class FlashInfer(AttentionBackend):
    """Both draft layouts, ancestors and lanes: indices are by slot, so a branch can be given any slots.

    Args:
        mask: form of the verify mask that is read, ``"packed"`` (what FlashInfer's kernels take) or ``"bool"``.
    """

    name = "flashinfer"
    format = "flashinfer"
    reads = "`kv_indptr`, `kv_indices` (int32) over pages of one token; custom mask, bool or packed"
    topk_above_1 = True
    page_size_above_1 = True
    draft_attention = MappingProxyType({"dense": ("ancestors", "lane"), "holey": ("ancestors", "lane")})
    kv_dtypes = ("float32", "bfloat16")
    needs_cpu_seq_lens = True  # FlashInfer's plan() schedules on the host

    def __init__(self, mask: Literal["bool", "packed"] = "packed") -> None:
        if mask not in ("bool", "packed"):
            raise ConfigError(f"FlashInfer: mask = {mask!r}: must be 'bool' or 'packed'")
        self.mask = mask  # type: ignore[misc]

    def prepare(self, step: Step) -> Any:
        from specrs.backends import gather

        arrays = step.arrays
        indptr = arrays["kv_indptr"].long()
        first, count = gather.rows_of(arrays.get("qo_indptr"), indptr.numel() - 1)
        # The kernel counts keys in whole pages, except for the last page, whose length is stated. Here a page has one
        # token.
        pages = indptr.diff()
        last = arrays.get("kv_last_page_len")
        lens = pages if last is None else (pages - 1 + last.long()).masked_fill_(pages == 0, 0)
        slots = gather.ragged(arrays["kv_indices"], indptr[:-1], lens)
        mask = self._mask(arrays, count, lens) if step.phase == "verify" else None
        return gather.groups(first, count, slots, lens, causal=step.phase == "extend", mask=mask)

    def _mask(self, arrays: Any, count: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        from specrs.backends import gather

        if self.mask == "packed":
            at = gather.cells(arrays["packed_mask_indptr"].long()[:-1] * 8, count, lens)
            data = arrays["packed_custom_mask"]
            return gather.take(data, at >> 3).int() >> (at & 7).int() & 1 == 1
        return gather.take(arrays["custom_mask"], gather.cells(arrays["mask_indptr"].long()[:-1], count, lens)) != 0

    def attend(
        self, prepared: Any, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        from specrs.backends import gather

        return gather.attend(prepared, keys, values, q, scale).out.to(q.dtype)


class FlashInferCuda(AttentionBackend):
    """The same on a GPU, by FlashInfer's wrapper (`specrs.backends.flashinfer_kernels`).

    The engine launches it itself, by plans that serve every length. `prepare` and `attend` are for other engines: they
    take tensors of the device, the arrays of the step too, and launch on torch's current stream. `prepare` waits for
    the lengths, of which `attend` makes a plan.
    """

    name = FlashInfer.name
    format = FlashInfer.format
    reads = "`kv_indptr`, `kv_indices` (int32) over pages of one token; packed custom mask"
    topk_above_1 = True
    page_size_above_1 = True
    draft_attention = FlashInfer.draft_attention
    kv_dtypes = ("bfloat16", "float16")
    needs_cpu_seq_lens = False  # the engine's plans are made of bounds
    head_dims = (64, 128, 256)
    mask = "packed"

    def __init__(self) -> None:
        self._kernels: FlashInferKernels | None = None

    def prepare(self, step: Step) -> Planned:
        host = {name: step.arrays[name].cpu() for name in ("kv_indptr", "qo_indptr") if name in step.arrays}
        return planned(step.phase, step.arrays, host)

    def attend(
        self, prepared: Planned, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`, with q and the result of the pool's type.

        Args:
            prepared: a pass whose arrays are as long as it has lists, and their ends.

        Raises:
            MissingPackageError: FlashInfer is not installed, or too old.
            ConfigError: it does not load, or an operand is none that it reads.
        """
        import torch

        check_operands(self, self.head_dims, q, keys, values)
        if self._kernels is None:
            self._kernels = kernels()
        q = q.contiguous()
        out = torch.empty_like(q)
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            self._kernels.attention_of(prepared, Operands(q, keys, values, out, prepared.arrays, scale))
        return out


def planned(phase: Phase, arrays: Mapping[str, torch.Tensor], host: Mapping[str, torch.Tensor]) -> Planned:
    """Return a pass whose arrays are on the device, and on the host too: ``kv_indptr``, ``qo_indptr``."""
    from specrs.backends.flashinfer_kernels import Planned

    return Planned(phase, arrays, host)


def kernels() -> FlashInferKernels:
    """Load the wrapper.

    Raises:
        MissingPackageError: FlashInfer is not installed, or is too old.
        ConfigError: it does not load.
    """
    triton(FlashInfer.name)
    wrapper = flashinfer_wrapper()
    from specrs.backends.flashinfer_kernels import FlashInferKernels

    return FlashInferKernels(wrapper)
