"""FlashAttention-3/4 with a paged KV cache as specrs's planner feeds it: ``cache_seqlens`` and whole pages by a table.

A pass over trees runs the kernel twice and merges the results by their log-sum-exp, as sglang's cascade does: once over
the prefix that the queries of a request share, once over what each query has of its own. The kernel
(``flash_attn_with_kvcache``, https://github.com/Dao-AILab/flash-attention) cannot skip a token inside a page, so in the
holey layout, whose branches are pages, a branch reads its own lane and the prefix's tail that its hole holds a copy of.
In the dense layout, and to verify, the expanded pass views the pool as pages of one token and can be given any slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.backends.base import AttentionBackend, Operands, Step, check_operands
from specrs.backends.packages import flash_attention_op, triton

if TYPE_CHECKING:
    import torch

    from specrs.backends.flash_attention_kernels import FlashAttentionKernels
    from specrs.backends.gather import Group

_HOPPER = 9  # major compute capability


class FlashAttention(AttentionBackend):
    """Ancestors and lanes in the dense layout; lanes alone in the holey one, which reads whole pages."""

    name = "flash_attention"
    format = "flash_attention"
    reads = "`cache_seqlens`, `page_table` (int32): whole pages, prefix and expanded pass merged"
    topk_above_1 = True
    page_size_above_1 = True
    draft_attention = MappingProxyType({"dense": ("ancestors", "lane"), "holey": ("lane",)})
    kv_dtypes = ("float32", "bfloat16")
    needs_cpu_seq_lens = True  # max_seqlen_k, and the columns of the table, are host values

    def prepare(self, step: Step) -> Any:
        # One causal pass where the queries need no tree: extend, decode, and the steps of a chain.
        passes = [_pass(step.arrays, "", step.page_size, causal=step.phase == "extend")]
        if step.expand_page_size is not None:
            passes.append(_pass(step.arrays, "expand_", step.expand_page_size))
        return passes

    def attend(
        self, prepared: Any, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        from specrs.backends import gather

        return gather.merged([gather.attend(over, keys, values, q, scale) for over in prepared]).to(q.dtype)


class FlashAttentionCuda(AttentionBackend):
    """The same on a Hopper GPU, by FlashAttention-3's operator (`specrs.backends.flash_attention_kernels`).

    The engine launches it itself. `prepare` and `attend` are for other engines: they take tensors of the device, the
    arrays of the step too, and launch on torch's current stream; nothing waits for the device.
    """

    name = FlashAttention.name
    format = FlashAttention.format
    reads = FlashAttention.reads
    topk_above_1 = True
    page_size_above_1 = True
    draft_attention = FlashAttention.draft_attention
    kv_dtypes = ("bfloat16", "float16")
    needs_cpu_seq_lens = False  # the operator takes bounds: the columns of the tables
    head_dims = (64, 96, 128, 256)

    def __init__(self) -> None:
        self._kernels: FlashAttentionKernels | None = None

    def prepare(self, step: Step) -> Step:
        return step

    def attend(
        self, prepared: Step, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As `AttentionBackend.attend`, with q and the result of the pool's type.

        Raises:
            MissingPackageError: vLLM is not installed, or too old.
            ConfigError: its library does not load, the GPU is none that the operator has code for, or an operand is
                none that it reads.
        """
        import torch

        check_operands(self, self.head_dims, q, keys, values, prepared.page_size)
        if self._kernels is None:
            self._kernels = kernels(q.device)
        step, q = prepared, q.contiguous()
        out = torch.empty_like(q)
        most = 1 if step.phase == "decode" else step.queries  # a bound is enough
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            self._kernels.attention(
                Operands(q, keys, values, out, step.arrays, scale), page_size=step.page_size,
                expand_page_size=step.expand_page_size, most_queries=most,
            )  # fmt: skip
        return out


def kernels(device: torch.device | None = None) -> FlashAttentionKernels:
    """Load the operator for a GPU; ``None``: torch's current one.

    Raises:
        MissingPackageError: vLLM is not installed, or is too old.
        ConfigError: its library does not load, or the GPU is none that the operator has code for.
    """
    import torch

    triton(FlashAttention.name)
    op = flash_attention_op()
    if torch.cuda.is_available() and (have := torch.cuda.get_device_capability(device))[0] != _HOPPER:
        found = f"{torch.cuda.get_device_name(device)} has compute capability {have[0]}.{have[1]}"
        raise ConfigError(f"attention_backend = {FlashAttention.name!r}: FlashAttention-3 runs on {_HOPPER}.x; {found}")
    from specrs.backends.flash_attention_kernels import FlashAttentionKernels

    return FlashAttentionKernels(op)


def _pass(arrays: Mapping[str, torch.Tensor], prefix: str, page_size: int, causal: bool = False) -> list[Group]:
    """One call of the kernel."""
    from specrs.backends import gather

    lens = arrays[f"{prefix}cache_seqlens"].long()
    first, count = gather.rows_of(arrays[f"{prefix}cu_seqlens_q"], lens.numel())
    slots = gather.paged(arrays[f"{prefix}page_table"], lens, page_size)
    return gather.groups(first, count, slots, lens, causal=causal)
