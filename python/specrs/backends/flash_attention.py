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

from specrs.backends.base import AttentionBackend, Step

if TYPE_CHECKING:
    import torch

    from specrs.backends.gather import Group


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


def _pass(arrays: Mapping[str, torch.Tensor], prefix: str, page_size: int, causal: bool = False) -> list[Group]:
    """One call of the kernel."""
    from specrs.backends import gather

    lens = arrays[f"{prefix}cache_seqlens"].long()
    first, count = gather.rows_of(arrays[f"{prefix}cu_seqlens_q"], lens.numel())
    slots = gather.paged(arrays[f"{prefix}page_table"], lens, page_size)
    return gather.groups(first, count, slots, lens, causal=causal)
