"""Attention over gathered slots in plain torch, which the backends here share once their arrays are read.

`groups` turns a pass's queries, slots and lengths into padded index tensors; `attend` runs a layer over them. Scores
and softmax are float64 and rounded once at the end by the caller, so that what stands beside a row in its batch does
not show in its result, short of a rounding boundary. Dead cells are gathered from the sink and overwritten with 0, as
the kernels' predicated loads do, so that nothing in the sink or behind a row's end (NaN included) reaches a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Most padded (query, key) pairs and keys of a group: tens of MB of scores and keys with the widest models.
_MAX_PAIRS = 1 << 18
_MAX_KEYS = 1 << 15


@dataclass(frozen=True)
class Result:
    """float64 out [Q, H, D], and the log-sum-exp of its scores [Q, H]; 0 and -inf for a query without keys."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Group:
    """Some sequences of a pass, padded to the longest of them: S sequences of n queries over N keys."""

    rows: torch.Tensor  # int64 [S, n] rows of q; 0 where `live` is False
    live: torch.Tensor | None  # bool [S, n]; None: all
    slots: torch.Tensor  # int64 [S, N]; 0, the sink, behind a sequence's end
    dead: torch.Tensor  # bool [S, N, 1, 1]: behind the end
    hidden: torch.Tensor  # bool [S, 1, n or 1, 1, N]: keys that a query does not attend


def groups(
    first: torch.Tensor,
    count: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> list[Group]:
    """The groups of queries that `attend` runs over, cut so that padding stays bounded.

    Args:
        first, count: int64 [S], the rows of q that belong to each sequence.
        slots: int64 [S, >= max(lens)], the keys of each sequence, in order.
        lens: int64 [S], how many.
        causal: query j of n attends the first ``lens - n + j + 1`` keys: aligned at the bottom right, as kernels do.
        mask: bool [S, >= max(count), >= max(lens)], the keys that each query attends; ``None``: all.
    """
    s = lens.numel()
    n, keys = (int(x.max()) if s else 0 for x in (count, lens))
    if n == 0 or keys == 0:
        return []
    if s * n * keys > _MAX_PAIRS or s * keys > _MAX_KEYS:
        if s > 1:
            parts = [slice(0, s // 2), slice(s // 2, s)]
            cut = [[x[p] for x in (first, count, slots, lens)] for p in parts]
            masks = [None if mask is None else mask[p] for p in parts]
            return [g for args, m in zip(cut, masks, strict=True) for g in groups(*args, causal=causal, mask=m)]
        if n > 1:
            half = n // 2
            seen = lens - (n - half) if causal else lens  # the last keys are hidden from the first queries
            masks = [None, None] if mask is None else [mask[:, :half], mask[:, half:]]
            return [
                *groups(first, count - (n - half), slots, seen, causal=causal, mask=masks[0]),
                *groups(first + half, count - half, slots, lens, causal=causal, mask=masks[1]),
            ]
    row, key = torch.arange(n), torch.arange(keys)
    rows = first[:, None] + row
    live = None
    if bool((count != n).any()):
        live = row < count[:, None]
        rows = rows.masked_fill(~live, 0)
    dead = key >= lens[:, None]
    hidden = dead[:, None, :]
    if causal:
        hidden = hidden | (key > (lens - count)[:, None, None] + row[:, None])
    if mask is not None:
        hidden = hidden | ~mask[:, :n, :keys]
    slots = slots[:, :keys].masked_fill(dead, 0)
    return [Group(rows, live, slots, dead[:, :, None, None], hidden[:, None, :, None, :])]


def attend(over: list[Group], keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float) -> Result:
    """Softmax attention of q [Q, H, D] over the slots of keys and values [num_slots, Hkv, D] that each group names."""
    heads, dim = q.shape[1:]
    shared = keys.shape[1]
    out = q.new_zeros(q.shape, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for g in over:
        s, n = g.rows.shape
        k, v = (half[g.slots].double().masked_fill_(g.dead, 0.0).transpose(1, 2) for half in (keys, values))
        x = q[g.rows].double().view(s, n, shared, heads // shared, dim).transpose(1, 2)
        scores = (x.reshape(s, shared, -1, dim) * scale) @ k.transpose(2, 3)
        scores = scores.view(s, shared, n, heads // shared, -1).masked_fill_(g.hidden, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        mixed = _mix(weights.view(s, shared, -1, weights.shape[-1]), v).view(s, shared, n, heads // shared, dim)
        mixed /= total.masked_fill(total == 0.0, 1.0)
        sums = (total.log() + top).squeeze(-1)
        mixed, sums = mixed.transpose(1, 2).reshape(s, n, heads, dim), sums.transpose(1, 2).reshape(s, n, heads)
        if g.live is None:
            out[g.rows], lse[g.rows] = mixed, sums
        else:
            rows = g.rows[g.live]
            out[rows], lse[rows] = mixed[g.live], sums[g.live]
    return Result(out, lse)


def _mix(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``weights @ v``, where a weight of 0 hides its value, NaN or not.

    A draft token whose KV is NaN must not spoil the tokens beside it, to which it is hidden.
    """
    mixed = weights @ v
    if bool(mixed.isfinite().all()):
        return mixed
    sound = v.isfinite()
    met = (weights != 0.0).double() @ (~sound).double()  # number of bad values that each result has weighed
    return (weights @ v.masked_fill(~sound, 0.0)).masked_fill_(met > 0.0, torch.nan)


def merged(results: list[Result]) -> torch.Tensor:
    """float64 [Q, H, D]: attention over the keys of all passes together, each weighted by exp(lse) (FlashInfer,
    https://arxiv.org/abs/2501.01005, section 2.2). Passes without keys weigh nothing."""
    if len(results) == 1:
        return results[0].out
    lse = torch.stack([r.lse for r in results])
    top = lse.amax(0)
    weights = (lse - top.masked_fill(top == -torch.inf, 0.0)).exp_()
    total = weights.sum(0)
    weights /= total.masked_fill(total == 0.0, 1.0)
    return sum((w[..., None] * r.out for w, r in zip(weights, results, strict=True)), torch.zeros_like(results[0].out))


def rows_of(qo_indptr: torch.Tensor | None, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 (first row of q, number of rows) of each sequence; one each where there is no ``qo_indptr`` [S + 1]."""
    if qo_indptr is None:
        return torch.arange(sequences), torch.ones(sequences, dtype=torch.int64)
    ends = qo_indptr.long()
    return ends[:-1], ends.diff()


def ragged(flat: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """int64 [S, max(lens)]: row i is ``flat[starts[i]:][:lens[i]]``, then zeros. IndexError: beyond the end of flat."""
    key = torch.arange(int(lens.max()) if lens.numel() else 0)
    inside = key < lens[:, None]
    return take(flat, (starts[:, None] + key).masked_fill_(~inside, 0)).long().masked_fill_(~inside, 0)


def cells(starts: torch.Tensor, count: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """int64 [S, max(count), max(lens)]: where the cells of row-major [count[i], lens[i]] tables are that begin at
    ``starts[i]`` of an array; 0 for cells that no table has."""
    n, keys = (torch.arange(int(x.max()) if x.numel() else 0) for x in (count, lens))
    wide = lens[:, None, None]
    inside = (n[:, None] < count[:, None, None]) & (keys < wide)
    return (starts[:, None, None] + n[:, None] * wide + keys).masked_fill_(~inside, 0)


def take(flat: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return ``flat[at]``, or zeros if flat is empty, where nothing that is taken is live."""
    return flat[at] if flat.numel() else flat.new_zeros(at.shape)


def joined(
    slots: torch.Tensor, lens: torch.Tensor, more: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of padded slots, each followed by its row of `more`, and their lengths."""
    total = lens + count
    key = torch.arange(int(total.max()) if total.numel() else 0)
    at = torch.where(key < lens[:, None], key, slots.shape[1] + key - lens[:, None])
    inside = key < total[:, None]
    both = torch.cat((slots, more), 1)
    return both.gather(1, at.masked_fill_(~inside, 0)).masked_fill_(~inside, 0) if both.numel() else both, total


def paged(table: torch.Tensor, lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 [S, whole pages]: the slots of the pages that hold the first ``lens[i]`` keys, from a table [S, columns].

    IndexError: a length beyond the table's columns, where the kernel would read past the row.
    """
    pages = -(-int(lens.max() if lens.numel() else 0) // page_size)
    if pages > table.shape[1]:
        have = table.shape[1]
        raise IndexError(
            f"cache_seqlens = {int(lens.max())}: {pages} pages of {page_size}; page_table has {have} columns"
        )
    return (table[:, :pages, None].long() * page_size + torch.arange(page_size)).flatten(1)
