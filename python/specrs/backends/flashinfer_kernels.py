"""FlashInfer's wrapper for paged attention over the arrays of the planner's format ``"flashinfer"``.

    kernels = FlashInferKernels(flashinfer_wrapper())
    kernels.attention(operands, phase="verify", lists=B, most_queries=V, most_keys=L)

FlashInfer's ``plan()`` schedules a pass on the host, and its kernels then read the arrays on the device. There are two
ways to plan:

* **Kept** (`attention`): for passes whose lengths the device alone knows. One plan for each shape of a pass serves
  every batch of it: a tile for every block of queries that a request may have, none split over the keys. It is made
  when a pass first runs; nothing waits afterwards, and launches can be captured. A plan that splits the keys holds for
  the lengths it was made of alone, since the kernel derives from the true length where its parts lie. Verification
  reads mask bits of every row that a request may have, so the array of bits has to be as long as `attention` says.
* **Exact** (`attention_of`): for passes that the host has planned. Every pass is planned anew by its lengths, and
  splits the keys where that pays.

The kernel finds the rows of its result by the plan. With a kept plan every request has as many as it may have, so
kernels of our own spread the queries of a pass with several a request, and gather its result.

Decoding and draft steps take the same wrapper, with one query a list. Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from subprocess import CalledProcessError
from typing import Any

import torch
import triton
import triton.language as tl

from specrs._specrs import ConfigError
from specrs.backends.base import Operands, Phase
from specrs.backends.packages import no_flashinfer_kernels

_LISTS = ("draft", "decode")  # phases with a list for each query
_ALIGNED = 256  # bytes: scratch memory of a plan that needs none


@triton.jit(do_not_specialize=["sequences", "queries", "most"])  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    packed, spread, starts, sequences, queries, most, LAST: tl.constexpr, GATHER: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Copy one row between a pass's rows and those of a plan in which every request has ``most``.

    Behind the last request are the dead rows of a padded pass, which a gather makes 0.
    """
    sequence, row = tl.program_id(0), tl.program_id(1)
    words = tl.arange(0, WIDE)
    inside = words < SIZE
    first = tl.load(starts + sequence)
    if sequence == sequences:
        if GATHER:
            zeros = tl.zeros([WIDE], packed.dtype.element_ty)
            for dead in range(row, queries - first, most):
                tl.store(packed + (first.to(tl.int64) + dead) * SIZE + words, zeros, mask=inside)
        return
    count = tl.load(starts + sequence + 1) - first
    query = row - (most - count) if LAST else row
    live = words < tl.where((query >= 0) & (query < count) & (first + query < queries), SIZE, 0)
    here = packed + (first + query).to(tl.int64) * SIZE + words
    there = spread + (sequence * most + row).to(tl.int64) * SIZE + words
    if GATHER:
        tl.store(here, tl.load(there, mask=live, other=0.0), mask=live)
    else:
        tl.store(there, tl.load(here, mask=live, other=0.0), mask=inside)


def place(packed: torch.Tensor, spread: torch.Tensor, starts: torch.Tensor, *, last: bool, gather: bool) -> None:
    """Launch a copy between the rows of a pass and rows of which every request has as many.

    Args:
        packed: [Q, ...], contiguous: request i has rows ``starts[i]`` to ``starts[i + 1]``.
        spread: [B * most, ...], contiguous: request i has ``most`` rows. Those that it does not need are 0 or ignored.
        starts: int32 [B + 1].
        last: True if a request's rows are the last of its ``most``, as a causal kernel counts them; else the first.
        gather: True to copy to ``packed``, where rows behind the last request become 0; False to copy to ``spread``.
    """
    sequences, queries = starts.numel() - 1, packed.shape[0]
    size = packed[0].numel()
    if sequences:
        most = spread.shape[0] // sequences
        _place[sequences + 1, most](
            packed, spread, starts, sequences, queries, most, LAST=last, GATHER=gather, SIZE=size,
            WIDE=triton.next_power_of_2(size),
        )  # fmt: skip


@dataclass(eq=False)
class _Kept:
    """A plan that serves every batch of a shape, with memory for rows of which every request has as many."""

    wrapper: Any
    rows: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(eq=False)
class Planned:
    """A pass whose arrays the host has too, and FlashInfer's plans of it by the heads that asked.

    Attributes:
        phase: purpose of the pass.
        arrays: the format's arrays on the device, as long as the pass needs.
        host: the same arrays on the host: ``kv_indptr``, and ``qo_indptr`` where the phase has it.
    """

    phase: Phase
    arrays: Mapping[str, torch.Tensor]
    host: Mapping[str, torch.Tensor]
    wrappers: dict[Hashable, Any] = field(default_factory=dict)


class FlashInferKernels:
    """The wrapper's plans.

    Args:
        wrapper: the wrapper's class, as `specrs.backends.packages.flashinfer_wrapper` imports it.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._kept: dict[Hashable, _Kept] = {}
        self._rows: torch.Tensor | None = None  # memory that kept plans share, once it is reserved
        self._copied: torch.cuda.Event | None = None  # the last exact plan, which is copied from memory of the host

    def reserve(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the memory in which kept plans spread queries and results, for so many elements of each.

        A plan for more is an error from now on. Without this, each plan has memory of its own.
        """
        self._rows = torch.empty(2, elements, dtype=dtype, device=device)

    def attention(
        self,
        operands: Operands,
        *,
        phase: Phase,
        lists: int,
        most_queries: int,
        most_keys: int | None = None,
    ) -> None:
        """Launch attention by a kept plan.

        Args:
            operands: arrays in memory that stays; they may be longer than the pass needs.
            phase: purpose of the pass.
            lists: lists of the pass: Q in ``"draft"`` and ``"decode"``, else the number of requests.
            most_queries: the most queries of a request.
            most_keys: the most keys of a request. A pass with a mask needs it, and ``packed_custom_mask`` of
                ``lists * ceil(most_queries * most_keys / 8)`` bytes: bits of rows that a request does not have are
                read too, and ignored.

        Raises:
            ConfigError: ``packed_custom_mask`` is shorter than that, or FlashInfer has no kernels for such heads and
                cannot compile them.
        """
        q, keys, values, out, arrays, scale = operands
        if not q.shape[0]:
            return
        most = 1 if phase in _LISTS else most_queries
        heads = (q.shape[1], keys.shape[1], q.shape[2])
        key = (phase, lists, most, *heads, q.dtype, scale, arrays["kv_indptr"].data_ptr())
        kept = self._kept.get(key)
        if kept is None:
            if phase == "verify":
                _check_bits(arrays["packed_custom_mask"], lists, most, most_keys)
            kept = self._kept[key] = self._keep(q, heads, arrays, phase, lists, most, scale)
        cache = keys.unsqueeze(1), values.unsqueeze(1)
        if kept.rows is None:
            kept.wrapper.run(q, cache, out=out, enable_pdl=False)
            return
        starts, last = arrays["qo_indptr"][: lists + 1], phase == "extend"
        queries, results = kept.rows
        place(q, queries, starts, last=last, gather=False)
        kept.wrapper.run(queries, cache, out=results, enable_pdl=False)
        place(out, results, starts, last=last, gather=True)

    def _keep(
        self,
        q: torch.Tensor,
        heads: tuple[int, int, int],
        arrays: Mapping[str, torch.Tensor],
        phase: Phase,
        lists: int,
        most: int,
        scale: float,
    ) -> _Kept:
        """Plan a shape of passes."""
        rows = torch.arange(0, (lists + 1) * most, most, dtype=torch.int32)
        keys = torch.arange(lists + 1, dtype=torch.int32)  # no plan that splits nothing asks for more than one
        wrapper = self._planned(
            q, heads, {**arrays, "qo_indptr": rows.to(q.device)}, rows, keys, phase, scale, lists,
            uniform_q_len=most, disable_split_kv=True,
        )  # fmt: skip
        if phase in _LISTS:
            return _Kept(wrapper, None)
        size, memory = lists * most * q[0].numel(), self._rows
        if memory is None:
            memory = torch.empty(2, size, dtype=q.dtype, device=q.device)
        if memory.shape[1] < size or memory.dtype != q.dtype:
            have = f"{memory.shape[1]} of {memory.dtype} are reserved"
            raise RuntimeError(f"rows of {lists} requests of {most}: {size} elements of {q.dtype}; {have}")
        queries, results = memory[:, :size].view(2, lists * most, *q.shape[1:])
        return _Kept(wrapper, (queries, results))

    def attention_of(self, planned: Planned, operands: Operands) -> None:
        """Launch attention of a pass whose lengths the host has, by a plan of its own.

        Args:
            operands: arrays as long as the pass needs, the same in all layers.

        Raises:
            ConfigError: FlashInfer has no kernels for such heads and cannot compile them.
        """
        q, keys, values, out, on_device, scale = operands
        indptr = planned.host["kv_indptr"]
        lists = indptr.numel() - 1
        rows = planned.host.get("qo_indptr", torch.arange(lists + 1, dtype=torch.int32))
        live = int(rows[-1])
        out[live:].zero_()
        if not live:
            return
        heads = (q.shape[1], keys.shape[1], q.shape[2])
        key = (*heads, q.dtype, scale)
        wrapper = planned.wrappers.get(key)
        if wrapper is None:
            if self._copied is not None:
                self._copied.synchronize()  # the wrapper before may give its memory of the host to this one
            arrays = {"qo_indptr": rows.to(q.device), **on_device}
            wrapper = self._planned(q, heads, arrays, rows, indptr, planned.phase, scale, lists)
            planned.wrappers[key] = wrapper
            if q.is_cuda:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()
        wrapper.run(q[:live], (keys.unsqueeze(1), values.unsqueeze(1)), out=out[:live], enable_pdl=False)

    def _planned(
        self,
        q: torch.Tensor,
        heads: tuple[int, int, int],
        arrays: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        keys: torch.Tensor,
        phase: Phase,
        scale: float,
        lists: int,
        **how: Any,
    ) -> Any:
        """Return a wrapper over the arrays, planned for lists that have such rows and keys. The arrays stay as they
        are."""
        masks = {}
        if phase == "verify":
            masks = {
                "custom_mask_buf": arrays["packed_custom_mask"],
                "mask_indptr_buf": arrays["packed_mask_indptr"][: lists + 1],
            }
        nothing = torch.empty(_ALIGNED, dtype=torch.uint8, device=q.device)
        wrapper = self._wrapper(
            nothing, "NHD", use_cuda_graph=True, qo_indptr_buf=arrays["qo_indptr"][: lists + 1],
            paged_kv_indptr_buf=arrays["kv_indptr"][: lists + 1], paged_kv_indices_buf=arrays["kv_indices"],
            paged_kv_last_page_len_buf=arrays["kv_last_page_len"][:lists], backend="fa2", **masks,
        )  # fmt: skip
        plan = (rows, keys, arrays["kv_indices"][:0], torch.ones(lists, dtype=torch.int32), *heads, 1)
        how |= {"causal": phase == "extend", "q_data_type": q.dtype, "kv_data_type": q.dtype}
        # A wrapper begins with 8 MiB for its schedule, here and on the host. It needs a few KiB.
        try:
            sizes = wrapper.workspace_size(*plan, **how)  # the first call that needs compiled kernels
        except (RuntimeError, OSError, CalledProcessError) as error:
            raise no_flashinfer_kernels(str(q.dtype).removeprefix("torch."), q.shape[-1], error) from error
        wrapper.reset_workspace_buffer(
            *(torch.empty(max(n, _ALIGNED), dtype=torch.uint8, device=q.device) for n in sizes)
        )
        # The wrapper writes what it plans for into the arrays, which hold a pass.
        written = arrays["qo_indptr"][: lists + 1], arrays["kv_indptr"][: lists + 1]
        saved = [array.clone() for array in written]
        wrapper.plan(*plan, sm_scale=scale, **how)
        for array, before in zip(written, saved, strict=True):
            array.copy_(before)
        return wrapper


def _check_bits(bits: torch.Tensor, lists: int, most: int, most_keys: int | None) -> None:
    """Raise ConfigError where a kept plan would read beyond the end of a mask."""
    assert most_keys is not None, "a pass with a mask"
    need = lists * -(-most * most_keys // 8)
    if bits.numel() < need:
        raise ConfigError(
            f"packed_custom_mask = {bits.numel()} bytes: a plan for {lists} requests of {most} queries and {most_keys} "
            f"keys reads {need}"
        )
