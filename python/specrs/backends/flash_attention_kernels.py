"""FlashAttention-3's paged operator over the arrays of the planner's format ``"flash_attention"``, in one pass or two.

    kernels = FlashAttentionKernels(flash_attention_op())
    kernels.attention(operands, page_size=16, expand_page_size=1, most_queries=V)

The operator comes from vLLM's wheel (`specrs.backends.packages`). It reads lengths on the device; the widths of its
tables are the bounds by which it sizes grids, so that nothing waits for the device or reads a length on the host. Where
a phase has two passes (verify, draft steps of trees), a kernel of our own merges them by their log-sum-exp.

The operator allocates its scratch memory from torch. It gets a pool of its own, in which blocks that a captured graph
uses are never handed to anybody else. A pass's results over parts of the keys are bounded by `num_splits`; the pool
begins with a block in which the largest of them have room, so that passes of other sizes add none.

Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

from specrs.backends.base import Operands
from specrs.backends.splits import SPLITS, num_splits
from specrs.device import allocations


@triton.jit(do_not_specialize=["sequences", "queries"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, more, sums, more_sums, starts, sequences, queries, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr
):
    """Merge two passes' results of a head of a query, each weighted by its sum of exponentials, into the first.

    Rows behind the last request become 0, whatever either pass left there.
    """
    query, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, WIDE)
    at = (query * HEADS + head).to(tl.int64) * DIM + dims
    live = dims < tl.where(query < tl.load(starts + sequences), DIM, 0)
    here = tl.load(sums + head.to(tl.int64) * queries + query)
    there = tl.load(more_sums + head.to(tl.int64) * queries + query)
    top = tl.maximum(here, there)
    base = tl.where(top == float("-inf"), 0.0, top)  # no keys in either pass
    mine, other = tl.exp(here - base), tl.exp(there - base)
    total = tl.where(mine + other == 0.0, 1.0, mine + other)
    # A pass without keys weighs nothing, whatever it wrote.
    first = tl.load(out + at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(more + at, mask=live, other=0.0).to(tl.float32)
    first, second = tl.where(mine > 0.0, first * mine, 0.0), tl.where(other > 0.0, second * other, 0.0)
    mixed = tl.where(live, (first + second) / total, 0.0)
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=dims < DIM)


def merge(
    out: torch.Tensor, more: torch.Tensor, sums: torch.Tensor, more_sums: torch.Tensor, starts: torch.Tensor
) -> None:
    """Launch the merge of two passes: out = both results, each weighted by exp of its sums.

    Args:
        out: the first pass's result, [Q, heads, head_dim], contiguous; overwritten.
        more: the second pass's.
        sums, more_sums: float32 [heads, Q], the logarithm of each result's sum of exponentials; -inf without keys.
        starts: int32 [B + 1], the first query of each request; rows behind the last become 0.
    """
    queries, heads, dim = out.shape
    if queries:
        _merge[queries, heads](
            out, more, sums, more_sums, starts, starts.numel() - 1, queries, HEADS=heads, DIM=dim,
            WIDE=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip


class FlashAttentionKernels:
    """The operator, and its memory.

    Args:
        op: the operator, as `specrs.backends.packages.flash_attention_op` loads it.

    Attributes:
        captured: number of blocks of memory that launches took from the pool while a stream was captured.
    """

    def __init__(self, op: Callable[..., list[Any]]) -> None:
        self._op, self.captured = op, 0
        self._pool: torch.cuda.MemPool | None = None

    def attention(
        self,
        operands: Operands,
        *,
        page_size: int,
        expand_page_size: int | None,
        most_queries: int,
    ) -> None:
        """Launch attention.

        Args:
            operands: ``cache_seqlens`` has an element for each request of the pass, arrays of the expand pass one for
                each row of q.
            page_size, expand_page_size: tokens a page of the tables, as `Step` has them.
            most_queries: the most queries of a request.
        """
        q, keys, values, out, arrays, scale = operands
        if not q.shape[0]:
            return
        with self._own_memory(q.device):
            starts, expands = arrays["cu_seqlens_q"], "expand_page_table" in arrays
            if not expands:
                out.zero_()  # dead rows: the operator writes those of requests alone
            sums = self._pass(
                q, keys, values, out, (arrays["cache_seqlens"], arrays["page_table"], starts), page_size, most_queries,
                scale, causal=not expands,
            )[1]  # fmt: skip
            if expands:
                assert expand_page_size is not None, "there is an expand pass"
                more, more_sums = self._pass(
                    q, keys, values, None,
                    (arrays["expand_cache_seqlens"], arrays["expand_page_table"], arrays["expand_cu_seqlens_q"]),
                    expand_page_size, 1, scale, causal=False,
                )  # fmt: skip
                merge(out, more, sums, more_sums, starts)

    @contextmanager
    def _own_memory(self, device: torch.device) -> Iterator[None]:
        """Have torch allocate from the pool, and count what it allocates while a stream is captured."""
        if device.type == "cpu":  # under triton's interpreter
            yield
            return
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool, device):
                torch.empty(SPLITS, dtype=torch.uint8, device=device)  # freed at once, and kept by the pool
        capturing = torch.cuda.is_current_stream_capturing()
        before = allocations(device) if capturing else 0
        with torch.cuda.use_mem_pool(self._pool, device):
            yield
        if capturing:
            self.captured += allocations(device) - before

    def _pass(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor | None,
        of: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        page_size: int,
        most_queries: int,
        scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the operator. Returns its result and the sums of each row, [heads, Q]."""
        lens, table, starts = of
        paged = (-1, page_size, *keys.shape[1:])
        found = self._op(
            q=q, k=keys.view(paged), v=values.view(paged), k_new=None, v_new=None, q_v=None, out=out,
            cu_seqlens_q=starts, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=lens,
            max_seqlen_q=most_queries, max_seqlen_k=table.shape[1] * page_size, page_table=table, kv_batch_idx=None,
            leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
            v_descale=None, softmax_scale=scale, is_causal=causal and most_queries > 1, window_size_left=-1,
            window_size_right=-1, softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=None,
            num_splits=num_splits(*q.shape), pack_gqa=None, sm_margin=0, s_aux=None, cp_world_size=1, cp_rank=0,
            cp_tot_seqused_k=None,
        )  # fmt: skip
        return found[0], found[1]
