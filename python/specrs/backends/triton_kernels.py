"""Paged attention in Triton over the arrays of the planner's format ``"triton"``: draft, decode, extend and verify.

    space = torch.empty(workspace(q.device, head_dim=128), dtype=torch.uint8, device=q.device)
    attention(
        q, keys, values, out, arrays, phase="verify", sequences=B, most_queries=V, scale=scale, space=space
    )

Nothing here waits for the device or reads a length on the host: grids follow from the arrays' sizes and from bounds, so
that the launches can be captured in a CUDA graph. Where a pass has too few rows to occupy the device, the keys of each
row are split between programs, and a second launch merges the splits by their log-sum-exp. Scores, sums and outputs of
splits are float32. The number of splits follows from the batch, and so do a row's last bits: these kernels do not keep
what `native` promises.

A slot outside the pool is not read and a row outside the output not written. Neither is recorded: the planner, which
made the arrays, records what is wrong with them.

Importing this module imports triton; `specrs.backends.triton.kernels` imports it where that is allowed to fail.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from specrs.backends.base import Operands, Phase

# Rows of a tile, which are queries of a sequence times the query heads that share a key head; for sequences of few rows
# and for others.
_FEW_ROWS, _ROWS = 16, 64
_PROGRAMS = 2  # programs a multiprocessor that splits may bring a pass to
_HOST_PROGRAMS = 8  # the same for a host, on which triton's interpreter runs one after another
_MERGED = 16  # splits that are merged at a time
_LOG2_E = 1.4426950408889634

_LISTS, _CAUSAL, _MASKED = 0, 1, 2  # what a row attends to behind its list: nothing, earlier tokens, those of its mask


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    q, best, total, mixed, slots, inside, visible, keys, values, slot_stride, num_slots, scale, DIM: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Fold a block of keys into each row's maximum, sum of weights and weighted values."""
    dims = tl.arange(0, WIDE)
    inside = inside & (slots >= 0) & (slots < num_slots)
    at = slots[:, None] * slot_stride + dims[None, :]
    load = inside[:, None] & (dims < DIM)[None, :]
    k = tl.load(keys + at, mask=load, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible & inside[None, :], scores, float("-inf"))
    above = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(above == float("-inf"), 0.0, above)  # a row that has seen no key yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    v = tl.load(values + at, mask=load, other=0.0)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return above, total * shrink + tl.sum(weights, 1), mixed


@triton.jit  # type: ignore[untyped-decorator]
def _each(length, splits, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of a split: whole blocks, as few as do, so that short lists have few splits."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, KEYS), splits), 1) * KEYS


@triton.jit(do_not_specialize=["sequences", "queries", "num_slots", "tiles", "splits"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, out, parts, sums, kv_indptr, kv_indices, qo_indptr, own_slots, mask_indptr, mask, scale, sequences,
    queries, num_slots, slot_stride, tiles, splits, OWN: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of a sequence's rows for one key head, over a split of its keys.

    Row r of a sequence is query r // GROUP, and head r % GROUP of those that share the key head. Behind the last
    sequence are the dead rows of a padded pass, which become 0.
    """
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, split = tl.program_id(1), tl.program_id(2)
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, WIDE)
    if OWN == 0:
        first, count = sequence, 1
    else:
        first = tl.load(qo_indptr + sequence).to(tl.int32)
        if sequence == sequences:
            if split == 0:
                for begin in range(tile * ROWS, (queries - first) * GROUP, tiles * ROWS):
                    row = begin + tl.arange(0, ROWS)
                    at = (first + row // GROUP) * HEADS + head * GROUP + row % GROUP
                    live = (first + row // GROUP < queries)[:, None] & (dims < DIM)[None, :]
                    zeros = tl.zeros([ROWS, WIDE], tl.float32).to(out.dtype.element_ty)
                    tl.store(out + at.to(tl.int64)[:, None] * DIM + dims[None, :], zeros, mask=live)
            return
        count = tl.load(qo_indptr + sequence + 1).to(tl.int32) - first
    if tile * ROWS >= count * GROUP:
        return
    query = rows // GROUP
    cells = ((query < count) & (first + query < queries))[:, None] & (dims < DIM)[None, :]
    at = ((first + query) * HEADS + head * GROUP + rows % GROUP).to(tl.int64)[:, None] * DIM + dims[None, :]
    x = tl.load(q + at, mask=cells, other=0.0)
    keys += head * DIM
    values += head * DIM

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    start = tl.load(kv_indptr + sequence)
    length = tl.load(kv_indptr + sequence + 1) - start
    each = _each(length, splits, KEYS)
    begin = split * each
    if (split > 0) & (begin >= length):
        return
    end = tl.minimum(begin + each, length)
    for key in range(begin, end, KEYS):
        places = key + tl.arange(0, KEYS)
        inside = places < end
        slots = tl.load(kv_indices + start + places, mask=inside, other=0)
        best, total, mixed = _fold(
            x, best, total, mixed, slots, inside, inside[None, :], keys, values, slot_stride, num_slots, scale, DIM,
            WIDE,
        )  # fmt: skip
    if OWN != 0:  # noqa: SIM102 - known when it is compiled, unlike the split
        if split == 0:  # the pass's own tokens
            reach = count
            if OWN == 1:
                reach = tl.minimum(count, ((tile + 1) * ROWS - 1) // GROUP + 1)
            else:
                mask += tl.load(mask_indptr + sequence) + length
            for key in range(0, reach, KEYS):
                places = key + tl.arange(0, KEYS)
                inside = places < reach
                slots = tl.load(own_slots + first + places, mask=inside, other=0)
                if OWN == 1:
                    visible = places[None, :] <= query[:, None]
                else:
                    cell = query.to(tl.int64)[:, None] * (length + count) + places[None, :]
                    visible = tl.load(mask + cell, mask=(query < count)[:, None] & inside[None, :], other=0) != 0
                best, total, mixed = _fold(
                    x, best, total, mixed, slots, inside, visible, keys, values, slot_stride, num_slots, scale, DIM,
            WIDE,
                )  # fmt: skip

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    if not SPLIT:
        tl.store(out + at, mixed.to(out.dtype.element_ty), mask=cells)
    else:
        part = (tl.program_id(0) * tl.num_programs(1) + head) * splits + split
        lines = part.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(parts + lines[:, None] * DIM + dims[None, :], mixed, mask=cells)
        tl.store(sums + lines, best + tl.log2(total))  # -inf where there was no key


@triton.jit(do_not_specialize=["queries", "tiles", "splits"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, parts, sums, kv_indptr, qo_indptr, queries, tiles, splits, OWN: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a row, each weighted by its sum of exponentials."""
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, row = tl.program_id(1), tl.program_id(2)
    if OWN == 0:
        first, count = sequence, 1
    else:
        first = tl.load(qo_indptr + sequence).to(tl.int32)
        count = tl.load(qo_indptr + sequence + 1).to(tl.int32) - first
    query, member = (tile * ROWS + row) // GROUP, (tile * ROWS + row) % GROUP
    if (query >= count) | (first + query >= queries):
        return
    length = tl.load(kv_indptr + sequence + 1) - tl.load(kv_indptr + sequence)
    used = tl.maximum(tl.cdiv(length, _each(length, splits, KEYS)), 1)
    dims = tl.arange(0, WIDE)
    best, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    mixed = tl.zeros([WIDE], tl.float32)
    first_line = ((tl.program_id(0) * tl.num_programs(1) + head) * splits).to(tl.int64) * ROWS + row
    for begin in range(0, used, MERGED):
        split = begin + tl.arange(0, MERGED)
        lines = first_line + split * ROWS
        sizes = tl.load(sums + lines, mask=split < used, other=float("-inf"))
        above = tl.maximum(best, tl.max(sizes, 0))
        base = tl.where(above == float("-inf"), 0.0, above)
        weights, shrink = tl.exp2(sizes - base), tl.exp2(best - base)
        load = (split < used)[:, None] & (dims < DIM)[None, :]
        part = tl.load(parts + lines[:, None] * DIM + dims[None, :], mask=load, other=0.0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * part, 0)
        total = total * shrink + tl.sum(weights, 0)
        best = above
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    at = ((first + query) * HEADS + head * GROUP + member).to(tl.int64) * DIM + dims
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=dims < DIM)


@functools.cache
def _programs(device: torch.device) -> int:
    """Return the number of programs that occupy a device."""
    if device.type == "cpu":
        return _HOST_PROGRAMS
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def workspace(device: torch.device, head_dim: int) -> int:
    """Return the bytes of scratch memory that any pass over heads of this size may need on a device."""
    return _programs(device) * _ROWS * (head_dim + 1) * 4


def attention(
    operands: Operands,
    *,
    phase: Phase,
    sequences: int,
    most_queries: int,
    space: torch.Tensor,
) -> None:
    """Launch attention.

    Args:
        operands: arrays may be longer than the pass needs.
        phase: purpose of the pass.
        sequences: lists of the pass: Q in ``"draft"`` and ``"decode"``, else the number of requests.
        most_queries: the most queries of a request.
        space: uint8, contiguous, of `workspace` bytes at least; overwritten.
    """
    q, keys, values, out, arrays, scale = operands
    queries, heads, dim = q.shape
    key_heads = keys.shape[1]
    group, own = heads // key_heads, {"extend": _CAUSAL, "verify": _MASKED}.get(phase, _LISTS)
    if not queries:
        return
    most = group * (most_queries if own != _LISTS else 1)
    rows = _FEW_ROWS if most <= _FEW_ROWS else _ROWS
    tiles = triton.cdiv(most, rows)
    programs = sequences * tiles * key_heads
    splits = 1 << max(_programs(q.device) // max(programs, 1), 1).bit_length() - 1
    unused = arrays["kv_indptr"]
    qo_indptr, mask = arrays.get("qo_indptr", unused), arrays.get("custom_mask", unused)
    parts = space.view(torch.float32)[: programs * splits * rows * dim]
    sums = space.view(torch.float32)[programs * splits * rows * dim :]
    sizes = {
        "OWN": own, "HEADS": heads, "GROUP": group, "DIM": dim, "WIDE": triton.next_power_of_2(dim), "ROWS": rows,
        "KEYS": 64 if dim <= 128 else 32,
    }  # fmt: skip
    grid = ((sequences + (own != _LISTS)) * tiles, key_heads, splits)
    _attend[grid](
        q, keys, values, out, parts, sums, arrays["kv_indptr"], arrays["kv_indices"], qo_indptr,
        arrays.get("extend_slots", unused), arrays.get("mask_indptr", unused), mask.view(torch.uint8),
        scale * _LOG2_E, sequences, queries, keys.shape[0], keys.stride(0), tiles, splits, SPLIT=splits > 1,
        **sizes,
    )  # fmt: skip
    if splits > 1:
        _merge[sequences * tiles, key_heads, min(rows, most)](
            out, parts, sums, arrays["kv_indptr"], qo_indptr, queries, tiles, splits, MERGED=_MERGED, **sizes
        )
