"""The torch attention of each backend: from arrays made by hand as the formats define them, and from the planner's."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specrs.backends import FlashAttention, FlashInfer, Step, Triton, gather

HEADS, KV_HEADS, DIM = 4, 2, 8


def i32(*values: Any) -> torch.Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.int32)


def i64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pool(slots: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(slots, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
    return keys, values


def queries(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reads: list[list[int]], scale: float
) -> torch.Tensor:
    """Softmax attention of query i over the slots reads[i], one query and head at a time."""
    out = torch.zeros_like(q)
    for i, slots in enumerate(reads):
        for h in range(q.shape[1] if slots else 0):
            k, v = (half[slots, h * KV_HEADS // HEADS].double() for half in (keys, values))
            out[i, h] = ((q[i, h].double() @ k.T) * scale).softmax(-1) @ v
    return out


def run(
    backend: Any, step: Step, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float = 0.3
) -> torch.Tensor:
    return backend.attend(backend.prepare(step), keys, values, q, scale)


def poisoned(keys: torch.Tensor, values: torch.Tensor, reads: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool with NaN in every slot that no query may read."""
    read = torch.zeros(keys.shape[0], dtype=torch.bool)
    read[[slot for slots in reads for slot in slots]] = True
    return keys.masked_fill(~read[:, None, None], math.nan), values.masked_fill(~read[:, None, None], math.nan)


def same(backend: Any, step: Step, reads: list[list[int]], slots: int, dtype: torch.dtype = torch.float32) -> None:
    """The backend's attention over a poisoned pool is the reference's."""
    keys, values = pool(slots, dtype=dtype)
    q = queries(step.queries)
    want = reference(q, keys, values, reads, 0.3)
    got = run(backend, step, *poisoned(keys, values, reads), q)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert not any(got[i].any() for i, r in enumerate(reads) if not r)


def step(
    phase: Any, count: int, arrays: dict[str, torch.Tensor], page_size: int = 1, expand: int | None = None
) -> Step:
    return Step(phase=phase, page_size=page_size, expand_page_size=expand, queries=count, arrays=arrays)


# -- worked by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flashinfer_draft_reads_the_slots_of_each_branch(dtype: torch.dtype) -> None:
    arrays = {
        "kv_indptr": i32(0, 3, 6, 6, 6, 8),  # two branches of a request, two of a dead one, one of another
        "kv_indices": i32(7, 2, 9, 7, 2, 5, 1, 3),
        "kv_last_page_len": i32(1, 1, 1, 1, 1),
    }
    same(FlashInfer(), step("draft", 5, arrays), [[7, 2, 9], [7, 2, 5], [], [], [1, 3]], 10, dtype)


def test_flashinfer_extend_is_causal_at_the_bottom_right() -> None:
    arrays = {
        "qo_indptr": i32(0, 2, 2, 3),
        "kv_indptr": i32(0, 4, 4, 5),
        "kv_indices": i32(3, 8, 1, 6, 2),
        "kv_last_page_len": i32(1, 1, 1),
    }
    same(FlashInfer(), step("extend", 4, arrays), [[3, 8, 1], [3, 8, 1, 6], [2], []], 9)  # and a padded row


@pytest.mark.parametrize("mask", ["bool", "packed"])
def test_flashinfer_verify_reads_its_mask(mask: Any) -> None:
    # Prefixes of 2 and 1, trees of 3 (a root with two children) and 1: 3 * 5 = 15 bits, then 2, each from a byte on.
    bits = [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    arrays = {
        "qo_indptr": i32(0, 3, 4),
        "kv_indptr": i32(0, 5, 7),
        "kv_indices": i32(11, 4, 6, 7, 8, 2, 9),
        "kv_last_page_len": i32(1, 1),
    }
    if mask == "bool":
        arrays |= {"mask_indptr": i32(0, 15, 17), "custom_mask": torch.tensor(bits, dtype=torch.uint8)}
    else:
        packed = [sum(bit << i for i, bit in enumerate(part)) for part in (bits[:8], bits[8:15], bits[15:])]
        assert packed == [0b11100111, 0b01011101, 0b11]
        arrays |= {"packed_mask_indptr": i32(0, 2, 3), "packed_custom_mask": torch.tensor(packed, dtype=torch.uint8)}
    reads = [[11, 4, 6], [11, 4, 6, 7], [11, 4, 6, 8], [2, 9]]
    same(FlashInfer(mask), step("verify", 4, arrays), reads, 12)


def test_triton_reads_the_prefix_and_then_its_own_tokens() -> None:
    arrays = {
        "qo_indptr": i32(0, 3, 4),
        "kv_indptr": i32(0, 2, 3),
        "kv_indices": i64([11, 4, 2]),
        "extend_slots": i64([6, 7, 8, 9]),
    }
    causal = [[11, 4, 6], [11, 4, 6, 7], [11, 4, 6, 7, 8], [2, 9]]
    same(Triton(), step("extend", 4, arrays), causal, 12)
    bits = [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
    arrays |= {"mask_indptr": i64([0, 15, 17]), "custom_mask": torch.tensor(bits, dtype=torch.uint8)}
    same(Triton(), step("verify", 4, arrays), [[11, 4, 6], [11, 4, 6, 7], [11, 4, 6, 8], [2, 9]], 12)
    decode = {"kv_indptr": i32(0, 2, 2, 4), "kv_indices": i64([11, 4, 2, 9])}
    for phase in ("decode", "draft"):
        same(Triton(), step(phase, 3, decode), [[11, 4], [], [2, 9]], 12)


def test_flash_attention_reads_whole_pages_up_to_its_lengths() -> None:
    arrays = {
        "cache_seqlens": i32(5, 0, 2),
        "page_table": i32([[2, 1], [0, 0], [3, 0]]),
        "cu_seqlens_q": i32(0, 2, 2, 3),
    }
    own = [8, 9, 10, 11, 4]  # page 2, and the first token of page 1
    same(FlashAttention(), step("extend", 3, arrays, 4), [own[:4], own, [12, 13]], 16)


def test_flash_attention_verifies_in_two_passes() -> None:
    arrays = {
        "cache_seqlens": i32(5, 0),
        "page_table": i32([[2, 1], [0, 0]]),
        "cu_seqlens_q": i32(0, 3, 4),
        "expand_cache_seqlens": i32(1, 2, 2, 1),
        "expand_page_table": i32([[5, 0, 0], [5, 6, 0], [5, 7, 0], [14, 0, 0]]),  # slots, whatever P
        "expand_cu_seqlens_q": i32(0, 1, 2, 3, 4),
    }
    own = [8, 9, 10, 11, 4]
    same(FlashAttention(), step("verify", 4, arrays, 4, 1), [[*own, 5], [*own, 5, 6], [*own, 5, 7], [14]], 16)


def test_flash_attention_reads_a_holey_branch_by_its_pages() -> None:
    # L = 6, P = 4, K = 2, S = 2: base 4, remainder 2. Branch 0 goes on in the prefix's page 3; branch 1 has page 5,
    # whose first two slots are copies of the prefix's tail.
    arrays = {
        "cache_seqlens": i32([4]),
        "page_table": i32([[2]]),
        "cu_seqlens_q": i32(0, 2),
        "expand_cache_seqlens": i32(4, 4),
        "expand_page_table": i32([[3, 0], [5, 0]]),
        "expand_cu_seqlens_q": i32(0, 1, 2),
    }
    reads = [[8, 9, 10, 11, 12, 13, 14, 15], [8, 9, 10, 11, 20, 21, 22, 23]]
    same(FlashAttention(), step("draft", 2, arrays, 4, 4), reads, 24)


def test_flash_attention_drafts_chains_in_one_pass() -> None:
    arrays = {"cache_seqlens": i32(5, 1), "page_table": i32([[2, 1], [3, 0]]), "cu_seqlens_q": i32(0, 1, 2)}
    reads = [[8, 9, 10, 11, 4], [12]]
    same(FlashAttention(), step("draft", 2, arrays, 4), reads, 16)
    same(FlashAttention(), step("decode", 2, arrays, 4), reads, 16)


def test_nothing_is_read_behind_a_rows_pages() -> None:
    arrays = {"cache_seqlens": i32(5, 0, 4), "page_table": i32([[2, 1], [10**6, 10**6], [3, -7]]),
              "cu_seqlens_q": i32(0, 1, 2, 3)}  # fmt: skip
    same(FlashAttention(), step("decode", 3, arrays, 4), [[8, 9, 10, 11, 4], [], [12, 13, 14, 15]], 16)


def test_a_length_beyond_the_table_is_an_error() -> None:
    arrays = {"cache_seqlens": i32([9]), "page_table": i32([[2, 1]]), "cu_seqlens_q": i32(0, 1)}
    with pytest.raises(IndexError, match="cache_seqlens = 9: 3 pages of 4; page_table has 2 columns"):
        FlashAttention().prepare(step("decode", 1, arrays, 4))
    with pytest.raises(IndexError):
        FlashInfer().prepare(
            step("decode", 1, {"kv_indptr": i32(0, 3), "kv_indices": i32(1, 2), "kv_last_page_len": i32([1])})
        )


# -- at random --------------------------------------------------------------------------------------------------


@dataclass
class Ragged:
    """Requests of n queries over keys, with a mask."""

    counts: list[int]
    keys: list[list[int]]
    masks: list[list[list[int]]]  # [n][keys]

    @property
    def reads(self) -> list[list[int]]:
        return [
            [slot for slot, bit in zip(keys, row, strict=True) if bit]
            for keys, mask in zip(self.keys, self.masks, strict=True)
            for row in mask
        ]

    def arrays(self) -> dict[str, torch.Tensor]:
        def indptr(lens: list[int]) -> torch.Tensor:
            return i32([sum(lens[:i]) for i in range(len(lens) + 1)])

        cells = [n * len(k) for n, k in zip(self.counts, self.keys, strict=True)]
        return {
            "qo_indptr": indptr(self.counts),
            "kv_indptr": indptr([len(k) for k in self.keys]),
            "kv_indices": i32([slot for k in self.keys for slot in k]),
            "kv_last_page_len": i32([1] * len(self.keys)),
            "mask_indptr": indptr(cells),
            "custom_mask": torch.tensor([b for m in self.masks for row in m for b in row], dtype=torch.uint8),
        }


@pytest.mark.parametrize("seed", range(12))
def test_random_masks_and_every_way_to_cut_a_batch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    batch = rng.randrange(1, 6)
    slots = rng.sample(range(1, 200), 190)
    counts = [rng.randrange(0, 7) for _ in range(batch)]
    keys = [[slots.pop() for _ in range(rng.randrange(0, 30))] for _ in range(batch)]
    masks = [[[int(rng.random() < 0.7) for _ in k] for _ in range(n)] for n, k in zip(counts, keys, strict=True)]
    # The kernels weigh hidden values by 0, so that NaN must not stand where another query of the request reads.
    ragged = Ragged(counts, keys, masks)
    there = [[s for k in keys for s in k]]
    q = queries(sum(counts))
    k, v = poisoned(*pool(200), there)
    want = reference(q, k, v, ragged.reads, 0.3)
    for pairs, most in ((1 << 18, 1 << 15), (40, 1 << 15), (7, 1 << 15), (1 << 18, 40)):
        monkeypatch.setattr(gather, "_MAX_PAIRS", pairs)
        monkeypatch.setattr(gather, "_MAX_KEYS", most)
        got = run(FlashInfer("bool"), step("verify", sum(counts), ragged.arrays()), k, v, q)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pairs", [1 << 18, 60, 9, 1])
def test_causal_rows_keep_their_alignment_when_cut(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_MAX_PAIRS", pairs)
    slots = random.Random(1).sample(range(1, 100), 60)
    counts, lens = [11, 3, 9], [11, 30, 19]
    keys = [slots[sum(lens[:i]) : sum(lens[: i + 1])] for i in range(3)]
    masks = [
        [[int(j <= length - n + i) for j in range(length)] for i in range(n)]
        for n, length in zip(counts, lens, strict=True)
    ]
    ragged = Ragged(counts, keys, masks)
    same(FlashInfer(), step("extend", sum(counts), ragged.arrays()), ragged.reads, 100)


def test_merging_passes_is_attention_over_both() -> None:
    keys, values = pool(20)
    q = queries(3)
    rows = torch.arange(3)
    one = torch.ones(3, dtype=torch.int64)
    a, b = i64([[1, 2, 3], [4, 0, 0], [0, 0, 0]]), i64([[5], [6], [0]])
    lens_a, lens_b = i64([3, 1, 0]), i64([1, 1, 0])
    results = [
        gather.attend(gather.groups(rows, one, s, n), keys, values, q, 2.0) for s, n in ((a, lens_a), (b, lens_b))
    ]
    want = reference(q, keys, values, [[1, 2, 3, 5], [4, 6], []], 2.0)
    torch.testing.assert_close(gather.merged(results).float(), want, rtol=1e-6, atol=1e-6)
    assert results[0].lse[2].tolist() == [-math.inf] * HEADS  # no keys


def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    keys, values = pool(8)
    q = queries(1) * 1e18
    arrays = {"kv_indptr": i32(0, 4), "kv_indices": i32(1, 2, 3, 4), "kv_last_page_len": i32([1])}
    got = run(FlashInfer(), step("decode", 1, arrays), keys * 1e18, values, q, 1.0)
    torch.testing.assert_close(got, reference(q, keys * 1e18, values, [[1, 2, 3, 4]], 1.0))


EMPTY = {
    "qo_indptr": i32([0]), "kv_indptr": i32([0]), "kv_indices": i32([]), "kv_last_page_len": i32([]),
    "mask_indptr": i32([0]), "custom_mask": torch.zeros(0, dtype=torch.uint8), "extend_slots": i64([]),
    "packed_mask_indptr": i32([0]), "packed_custom_mask": torch.zeros(0, dtype=torch.uint8),
    "cache_seqlens": i32([]), "page_table": torch.zeros((0, 3), dtype=torch.int32), "cu_seqlens_q": i32([0]),
    "expand_cache_seqlens": i32([]), "expand_page_table": torch.zeros((0, 3), dtype=torch.int32),
    "expand_cu_seqlens_q": i32([0]),
}  # fmt: skip


@pytest.mark.parametrize("phase", ["extend", "decode", "draft", "verify"])
@pytest.mark.parametrize(
    "backend", [FlashInfer("bool"), FlashInfer(), FlashAttention(), Triton()], ids=lambda b: b.name
)
def test_a_batch_of_nothing_and_a_batch_of_dead_rows(backend: Any, phase: str) -> None:
    arrays = {name: a for name, a in EMPTY.items() if name != "qo_indptr" or phase not in ("draft", "decode")}
    for expand in (None, 1, 4):
        same(backend, step(phase, 0, arrays, 4, expand), [], 8)
        same(backend, step(phase, 3, arrays, 4, expand), [[], [], []], 8)


def test_results_do_not_depend_on_the_batch() -> None:
    """A request's rows are the same bits alone and among others, cut or not (float64, rounded once)."""
    rng = random.Random(3)
    keys, values = pool(400)
    q = queries(24)
    slots = rng.sample(range(1, 400), 390)
    lens = [rng.randrange(1, 60) for _ in range(6)]
    lists = [slots[sum(lens[:i]) : sum(lens[: i + 1])] for i in range(6)]

    def extend(some: list[int]) -> torch.Tensor:
        counts, keep = [4] * len(some), [lists[i] for i in some]
        masks = [[[1] * len(k)] * 4 for k in keep]
        rows = torch.cat([q[4 * i : 4 * i + 4] for i in some])
        return run(
            FlashInfer("bool"), step("verify", len(rows), Ragged(counts, keep, masks).arrays()), keys, values, rows
        )

    together = extend(list(range(6)))
    for i in range(6):
        assert torch.equal(extend([i]), together[4 * i : 4 * i + 4])
