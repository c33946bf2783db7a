"""Replays: rounds of the engine agree in every format, and a difference is found where it was put, by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from formats_world import FORMATS
from modelzoo import Pair
from specrs import LLM, ConfigError, SamplingParams
from specrs import _specrs as core
from specrs.capsule import Capsule, CapsuleError, dumps, load, loads, save, synth
from specrs.capsule import replay as replaying
from specrs.capsule.compare import replay_against, replay_formats, replay_reverted
from specrs.capsule.log import Run, Segment, compare
from specrs.capsule.on_device import Candidates
from specrs.capsule.parts import DraftStep, Extend, PoolSize, Row, Shape, Tree
from specrs.capsule.replay import replay
from specrs.capsule.static import Overrun, Static
from specrs.capsule.world import rebuild, with_room
from specrs.cli import main


def record(pair: Pair, round: int = 2, **options: Any) -> Capsule:
    """Three requests of different lengths; the first two share the pages of five tokens."""
    llm = LLM(pair.target, pair.draft, max_context_len=64, **options)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9, 8, 7, 6, 5, 4], [3]]
    llm.generate([prompts[0]], SamplingParams(max_tokens=2))  # leaves its pages in the cache
    with llm.recording(round=round) as recorder:
        llm.generate(prompts, SamplingParams(max_tokens=12, temperature=1.0, seed=5))
    assert recorder.capsule is not None
    return loads(dumps(recorder.capsule))


def hand(**changes: Any) -> Capsule:
    """Two requests, K=2, S=3, V=4, P=4: L=10 and L=5; scattered pages, the first page shared and cached.

    Tree of request 0: 0 -> {1, 2}, 1 -> 3; of request 1: 0 -> 1. Accepted: 0, 2 and 0, 1.
    """
    ancestors = ((1 << 0, 1 << 3, 1 << 0, 1 << 3), (1 << 3 | 1 << 1, 1 << 3 | 1 << 4, 1 << 0 | 1 << 1, 1 << 3 | 1 << 4))
    c = Capsule(
        round=1,
        kind="speculative",
        format="native",
        draft_attention="ancestors",
        shape=Shape(2, 16, 4, 2, 3, 4, "dense"),
        pool=PoolSize(20, 4, 7),
        rows=(Row(1, 3, 10, 16, 7, (9, 4, 17, 2)), Row(3, 1, 5, 11, 8, (9, 12, 1))),
        others=((5, "raw pages"), (9, "prefix cache"), (11, "sequence 2.4")),
        steps=(
            DraftStep((1, 2, 3, 4), (0, 0, 1, 1), (-0.5, -1.0, -0.25, -2.0), ancestors[0]),
            DraftStep((5, 6, 7, 8), (1, 1, 2, 3), (-1.5, -2.0, -0.5, -3.0), ancestors[1]),
        ),
        trees=(Tree((-1, 0, 0, 1), (9, 1, 2, 6), (0.0, -0.5, -1.0, -2.0)), Tree((-1, 0), (3, 1), (0.0, -0.5))),
        paths=((0, 2), (0, 1)),
        kept=(2, 2),
        extend=(Extend(0, 10, 2), Extend(1, 5, 2)),
    )
    c = dataclasses.replace(c, **changes)
    return loads(dumps(c))


def segment(run: Run, phase: str, array: str) -> Segment:
    [found] = [s for s in run.segments if s.key == (phase, array)]
    return found


# -- rounds of the engine agree -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "s", "v"), [(1, 3, 4), (2, 2, 4), (4, 3, 9)])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("mode", ["ancestors", "lane"])
def test_formats_agree(tiny: Pair, k: int, s: int, v: int, page: int, mode: str) -> None:
    c = record(tiny, tree=(k, s, v), page_size=page, draft_attention=mode)
    assert len(c.rows) == 3 and c.draft_attention == mode
    for format in ["native", *FORMATS]:
        result = replay_formats(c, format=format)
        assert result.equal, "\n".join(result.lines())
        assert result.found.writes > 300 and result.found.largest < 1e-6
        assert result.found.skipped == ()  # page tables, slots and both pools were compared
        assert all(not np.isnan(s.values).any() for s in result.runs[1].segments if s.array == "attention")


@pytest.mark.parametrize("page", [2, 4, 16])
def test_holey_rounds_agree(tiny: Pair, page: int) -> None:
    tree = {"tree": (3, 4, 9), "page_size": page}
    c = record(tiny, attention_backend="flash_attention", draft_layout="holey", **tree)
    assert (c.format, c.shape.layout, c.draft_attention) == ("flash_attention", "holey", "lane")
    result = replay_formats(c)
    assert result.equal, "\n".join(result.lines())
    assert result.found.skipped == ("page table", "plan.out_slots", "draft KV")  # drafts lie elsewhere there
    assert segment(result.runs[1], "tail copies", "draft KV").writes == sum(2 * (r.committed % page) for r in c.rows)
    # A dense round in the holey layout: the committed pages are the recorded ones, the branches get more.
    dense = record(tiny, draft_attention="lane", **tree)
    again = replay_formats(dense, format="flash_attention", layout="holey")
    assert again.equal, "\n".join(again.lines())
    assert any("more for this layout" in note for note in again.runs[1].notes)


def test_plain_rounds_agree(tiny: Pair) -> None:
    llm = LLM(tiny.target, speculative=False, max_context_len=64, page_size=4)
    with llm.recording(round=2) as recorder:
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=6))
    assert recorder.capsule is not None and recorder.capsule.kind == "plain"
    c = recorder.capsule
    for format in FORMATS:
        result = replay_formats(c, format=format)
        assert result.equal, "\n".join(result.lines())
        assert [s.phase for s in result.runs[1].segments if s.array == "attention"] == ["decode"]
    # One key a position and the token itself, for each of the two requests; the rest of the batch of 8 is padding.
    keys = segment(replay(c, format="triton"), "decode", "kv_indices")
    assert keys.writes == sum(r.committed + 1 for r in c.rows)
    last = c.rows[0].committed
    assert keys.values[last] == c.rows[0].pages[last // 4] * 4 + last % 4
    assert keys.owner(last) == f"request 0 ({c.rows[0].owner}), node 0, new token 0"
    first = replay_reverted(c, [23037], format="triton").found.first
    assert first is not None and (first.phase, first.array, first.index) == ("decode", "kv_indptr", (3,))


def test_a_replay_is_deterministic(tiny: Pair) -> None:
    c = record(tiny, tree=(2, 2, 4), page_size=4)
    result = replay_against(c, c, format="triton")
    assert result.equal and not result.across and result.found.arrays == len(result.runs[0].segments)
    other = record(tiny, round=3, tree=(2, 2, 4), page_size=4)
    assert not replay_against(c, other).equal


# -- the pool made again ------------------------------------------------------------------------------------------


def test_page_tables_are_made_again() -> None:
    c = hand()
    world = rebuild(c, c.shape.geometry())
    assert world.pages == [[9, 4, 17, 2], [9, 12, 1]]
    assert [seq.row for seq in world.seqs] == [1, 3]
    assert (world.recorded, world.columns) == (7, 7)
    # The capsule says 7 columns; a planner over the geometry wants 8.
    assert (world.pool.num_pages, world.pool.max_seqs, world.pool.row_pages) == (20, 4 + 2, 8)
    owners: dict[int, list[str]] = {}
    for page, owner in world.pool.owners():
        owners.setdefault(page, []).append(owner)
    assert set(owners) == {1, 2, 4, 5, 9, 11, 12, 17}
    assert len(owners[9]) == 4  # both requests, and for each of them the cache
    assert owners[4] == ["sequence 1.1"] and owners[12] == ["sequence 3.1"]
    assert owners[5] == owners[11] == ["raw pages"]
    world.lease.rollback()
    assert [world.pool.committed(seq) for seq in world.seqs] == [10, 5]


def test_a_page_is_shared_only_when_it_is_full() -> None:
    def second(committed: int) -> Capsule:
        rows = (hand().rows[0], Row(3, 1, committed, 10, 8, (9, 12, 1)))
        return hand(rows=rows, extend=(Extend(0, 10, 2), Extend(1, committed, 2)))

    assert replay_formats(second(4), format="triton").equal  # page 9 holds positions 0..3
    with pytest.raises(CapsuleError, match=r"rows\[1\]\.pages\[0\]: 9: rows\[0\]\.pages\[0\] is it too; only equal"):
        second(3)
    alone = {"rows": hand().rows[:1], "trees": hand().trees[:1], "steps": (), "paths": ((0, 2),), "kept": (2,)}
    for page, fits in ((4, True), (17, False)):  # positions 4..7 and 8..11, of which 10 are committed
        others = ((page, "sequence 2.2"),)
        if fits:
            assert replay_formats(hand(**alone, extend=(), others=others), format="triton").equal
        else:
            with pytest.raises(CapsuleError, match=r"page 17: rows\[0\] writes it"):
                hand(**alone, extend=(), others=others)


def test_a_layout_that_takes_more(tiny: Pair) -> None:
    c = hand()
    # Holey: ceil((3 + 3) / 4) * 4 * 2 = 16 positions a round instead of 6, so reserved 26 and 21: 7 and 6 columns.
    world = rebuild(c, c.shape.geometry("holey"))
    assert world.pages[0][:4] == [9, 4, 17, 2] and world.pages[1][:3] == [9, 12, 1]
    assert [len(p) for p in world.pages] == [7, 6] and (world.recorded, world.columns) == (7, 13)
    assert len({p for pages in world.pages for p in pages} & {5, 11}) == 0
    # Six more pages are wanted: five are free.
    raw = tuple((page, "raw pages") for page in (3, 5, 6, 7, 8, 10))
    small = hand(pool=PoolSize(18, 4, 7), others=(*raw[:5], (9, "prefix cache"), raw[5]))
    with pytest.raises(core.PoolExhaustedError):
        rebuild(small, small.shape.geometry("holey"))
    for format in ("flashinfer", "flash_attention", "triton"):
        result = replay_formats(small, format=format, layout="holey", mode="lane")
        assert result.equal
        assert [len(run.notes) for run in result.runs] == [1, 2]
        assert result.runs[1].notes[1] == "the recorded pool is too small for this layout: 1 pages were added"
    assert with_room(c, c.shape.geometry("holey")) == c


def test_pools_beyond_memory_are_refused() -> None:
    c = hand(pool=PoolSize(2**24, 4, 7))
    with pytest.raises(ConfigError, match=r"pool of 67108864 slots: replay would make up \d+ bytes"):
        replay(c)


# -- what is logged, by hand --------------------------------------------------------------------------------------


def test_slots_keys_and_names_by_hand() -> None:
    run = replay(hand(), format="flashinfer")
    # Draft slots of the dense layout: L + b * 3 + t, so of request 0 positions 10, 13 and 11, 14; of request 1 5, 8.
    slots = segment(run, "draft step 0", "plan.out_slots")
    assert slots.values.tolist() == [17 * 4 + 2, 2 * 4 + 1, 12 * 4 + 1, 1 * 4]
    assert slots.owner(1) == "request 0 (sequence 1.3), branch 1, step 0"
    assert slots.show(70) == "slot 70 (page 17 (sequence 1.3), position 10 of request 0)"
    assert segment(run, "draft step 1", "plan.out_slots").values.tolist() == [71, 10, 50, 5]
    # Step 1, request 0: both beams continue branch 1 of step 0, which lies in slot 9. Lists are in order of position.
    keys = segment(run, "draft step 1", "kv_indices")
    prefix0 = [36, 37, 38, 39, 16, 17, 18, 19, 68, 69]
    prefix1 = [36, 37, 38, 39, 48]
    assert keys.values.tolist() == [*prefix0, 71, 9, *prefix0, 9, 10, *prefix1, 49, 50, *prefix1, 4, 5]
    assert keys.written.all()
    assert keys.owner(10) == "request 0 (sequence 1.3), branch 0, step 1, draft of branch 0, step 1"
    assert keys.owner(11) == "request 0 (sequence 1.3), branch 0, step 1, draft of branch 1, step 0"
    assert keys.owner(12) == "request 0 (sequence 1.3), branch 1, step 1, prefix position 0"
    assert keys.owner(99) == "behind the lists of 4 rows"
    assert keys.show(36).startswith(
        "slot 36 (page 9 (sequence 3.1, sequence 1.3, prefix cache), position 0 of request 0"
    )
    assert segment(run, "draft step 1", "kv_indptr").values.tolist() == [0, 12, 24, 31, 38]
    # The draft's KV lies where the plan said, and says whose it is.
    kv = segment(run, "draft step 1", "draft KV")
    assert {i: kv.values[i] for i in kv.written.nonzero()[0]} == {
        71: "KV of request 0 (sequence 1.3), branch 0, step 1", 10: "KV of request 0 (sequence 1.3), branch 1, step 1",
        50: "KV of request 1 (sequence 3.1), branch 0, step 1", 5: "KV of request 1 (sequence 3.1), branch 1, step 1",
    }  # fmt: skip
    # Verify: nodes at positions L + j; node 3 attends the prefix, 0, 1 and itself.
    assert segment(run, "verify", "plan.out_slots").values.tolist()[:6] == [70, 71, 8, 9, 49, 50]
    mask = segment(run, "verify", "custom_mask")
    assert mask.values.tolist()[3 * 14 : 4 * 14] == [1] * 10 + [1, 1, 0, 1]
    assert mask.owner(3 * 14 + 12) == "request 0 (sequence 1.3), node 3, node 2"
    assert mask.owner(4 * 14 + 6) == "request 1 (sequence 3.1), node 0, node 1"
    packed = segment(run, "verify", "packed_custom_mask")
    assert packed.owner(7) == "request 1 (sequence 3.1), bits from node 0, prefix position 0"
    # Commit: node 2 of request 0 moves from position 12 to 11, and nothing else moves.
    moved = segment(run, "commit", "target KV")
    assert [(i, moved.values[i]) for i in moved.written.nonzero()[0]] == [
        (71, "KV of request 0 (sequence 1.3), node 2")
    ]
    assert segment(run, "commit", "source slots").values.tolist() == [8]
    assert segment(run, "commit", "page table").values.reshape(2, -1).tolist() == [[9, 4, 17], [9, 12, 0]]
    assert segment(run, "commit", "committed").values.tolist() == [12, 7]
    # The draft model's pass: positions 10, 11 and 5, 6.
    kv = segment(run, "draft extend", "draft KV")
    assert sorted(kv.written.nonzero()[0].tolist()) == [49, 50, 70, 71]
    assert kv.values[50] == "KV of request 1 (sequence 3.1), position 6"


def test_lanes_by_hand() -> None:
    run = replay(hand(draft_attention="lane"), format="triton")
    keys = segment(run, "draft step 1", "kv_indices")
    assert keys.values.tolist()[22:24] == [9, 10] and keys.values.tolist()[-2:] == [4, 5]
    assert keys.owner(22) == "request 0 (sequence 1.3), branch 1, step 1, draft of branch 1, step 0"
    assert keys.owner(37) == "request 1 (sequence 3.1), branch 1, step 1, draft of branch 1, step 1"
    assert segment(run, "draft step 1", "plan.mask").show(0b011000) == "0x18"


def test_pages_are_reordered_where_pages_have_one_token() -> None:
    pages = (tuple(range(1, 17)), (1, 2, 3, 4, *range(20, 27)))
    rows = (Row(1, 3, 10, 16, 7, pages[0]), Row(3, 1, 5, 11, 8, pages[1]))
    c = hand(shape=Shape(2, 16, 1, 2, 3, 4, "dense"), pool=PoolSize(40, 4, 28), rows=rows, others=())
    run = replay(c)
    # Row positions 10.. of request 0 had pages 11, 12, 13, 14; the accepted nodes are 0 and 2.
    table = segment(run, "commit", "page table").values.reshape(2, -1)
    assert table[0].tolist() == [*range(1, 12), 13]
    assert table[1].tolist() == [1, 2, 3, 4, 20, 21, 22, 0, 0, 0, 0, 0]
    assert segment(run, "commit", "target KV").writes == 0


def test_page_tables_of_flash_attention_by_hand() -> None:
    run = replay(hand(draft_attention="lane"), format="flash_attention", layout="holey")
    # Request 0: r = 2, base = 8: branch 0 in columns 2, 3, branch 1 in columns 4, 5; the tail, positions 8 and 9 in
    # page 17, is copied into the first two slots of column 4. Request 1: r = 1, branches in columns 1 and 2.
    table = segment(run, "reserve", "page table").values.reshape(2, -1).tolist()
    copied = segment(run, "tail copies", "destination slots").values.tolist()
    assert copied == [table[0][4] * 4, table[0][4] * 4 + 1, table[1][2] * 4]
    assert segment(run, "tail copies", "source slots").values.tolist() == [68, 69, 48]
    kv = segment(run, "tail copies", "draft KV")
    assert kv.values[copied[1]] == "KV of request 0 (sequence 1.3), prefix position 9"
    # Step 1 reaches r + 2 = 4 and 3 tokens into a branch: one page each.
    expand = segment(run, "draft step 1", "expand_page_table")
    assert expand.values[:: expand.shape[1]].tolist() == [17, table[0][4], 12, table[1][2]]
    assert segment(run, "draft step 1", "expand_cache_seqlens").values.tolist()[:4] == [4, 4, 3, 3]
    assert segment(run, "draft step 1", "cache_seqlens").values.tolist() == [8, 4]
    assert expand.owner(expand.shape[1]) == "request 0 (sequence 1.3), branch 1, step 1, column 0"
    assert expand.show(17) == "page 17 (sequence 1.3)"


def test_padding_has_names() -> None:
    c = hand(shape=Shape(3, 16, 4, 2, 3, 4, "dense"))
    run = replay(c, format="triton")
    starts = segment(run, "draft step 0", "kv_indptr")
    assert starts.values.tolist() == [0, 11, 22, 28, 34, 34, 34]
    assert starts.owner(4) == "start of padding, query 4"
    assert segment(run, "draft step 0", "plan.rows").values.tolist() == [1, 3, -1]
    assert segment(run, "draft step 0", "plan.rows").owner(2) == "request 2 (padding)"
    assert replay_formats(c, format="triton").equal


@pytest.mark.parametrize("format", ["native", *FORMATS])
def test_every_element_has_an_owner(format: Any) -> None:
    run = replay(hand(shape=Shape(3, 16, 4, 2, 3, 4, "dense")), format=format)
    phases = list(dict.fromkeys(s.phase for s in run.segments))
    passes = ["tail copies", "draft step 0", "draft step 1", "trees", "verify", "accept"]
    assert phases == ["reserve", *passes, "commit", "draft extend"]
    arrays = {s.array for s in run.segments}
    pool = core.Pool(20, 4, 4, 8)
    planner = core.Planner(hand().shape.geometry(), pool, format=format)
    for phase in ("draft", "verify", "extend"):
        assert set(planner.capacities(phase)) <= arrays  # type: ignore[arg-type]
    for s in run.segments:
        assert len(s.values) == len(s.written) <= np.prod(s.shape)
        for at in s.written.nonzero()[0]:
            owner, index = s.owner(int(at)), s.index(int(at))
            assert owner and not owner.startswith("element ") and len(index) == len(s.shape), (s.array, at)
            assert all(0 <= i < n for i, n in zip(index, s.shape, strict=True))
            assert s.show(s.value(int(at)))


def test_buffers_too_large_to_be_static(monkeypatch: pytest.MonkeyPatch) -> None:
    static = replay(hand(), format="flashinfer")
    monkeypatch.setattr(replaying, "MAX_BYTES", 100)
    run = replay(hand(), format="flashinfer")
    assert any(note.startswith("static buffers of draft would have ") for note in run.notes)
    first = compare(run, static).first  # nobody holds arrays across writes where nothing is static
    assert first is not None and (first.phase, first.array) == ("draft step 0", "arrays of the write before")
    for name in ("kv_indptr", "kv_indices", "custom_mask"):
        a, b = (segment(r, "verify", name) for r in (run, static))
        assert a.values.tolist() == b.values.tolist()[: len(a.values)]


# -- what a GPU builds trees from -----------------------------------------------------------------------------------


def built(candidates: Candidates, shape: Shape, i: int, nodes: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and scores of the best candidates of a request, without the root, as selection takes them."""
    scores, tokens, parents = (a[i].tolist() for a in (candidates.scores, candidates.tokens, candidates.parents))
    levels = candidates.depths[i]
    within = shape.topk + (levels - 1) * shape.topk**2 if levels else 0
    chosen = sorted(sorted(range(within), key=lambda c: (-scores[c], c))[: nodes - 1])
    node = {c: n + 1 for n, c in enumerate(chosen)}
    return [tokens[c] for c in chosen], [node.get(parents[c], 0) for c in chosen], [scores[c] for c in chosen]


@pytest.mark.parametrize(("k", "s", "v"), [(1, 3, 4), (2, 2, 4), (4, 3, 9), (3, 5, 20)])
@pytest.mark.parametrize("round", [1, 2, 3])
def test_a_capsule_tells_what_its_trees_were_chosen_from(tiny: Pair, k: int, s: int, v: int, round: int) -> None:
    c = record(tiny, round=round, tree=(k, s, v))
    candidates = Candidates.of(c)
    for i, t in enumerate(c.trees):
        want = (list(t.tokens[1:]), list(t.parents[1:]), list(t.scores[1:]))
        assert built(candidates, c.shape, i, len(t.parents)) == want
    assert max(candidates.depths) > 1 or s == 1


def test_trees_of_no_candidates_are_named() -> None:
    second = hand().trees[1]
    for tree, why in (
        (Tree((-1, 0, 1, 2), (9, 1, 2, 6), (0.0, -0.5, -1.0, -2.0)), "continues no beam of draft step 1"),
        (Tree((-1, 0, 0), (9, 1, 1), (0.0, -0.5, -1.0)), "nodes 1 and 2 of request 0 are one"),
        (Tree((-1, 0), (9, 1), (0.0, float("-inf"))), "node 1 of request 0 has the score -inf"),
    ):
        with pytest.raises(ValueError, match=why):
            Candidates.of(dataclasses.replace(hand(), trees=(tree, second)))
    roots = hand(
        steps=(), trees=(Tree((-1, 0), (9, 1), (0.0, -0.5)), Tree((-1,), (3,), (0.0,))), paths=((0,), (0,)),
        kept=(1, 1), extend=(),
    )  # fmt: skip
    assert Candidates.of(roots).depths == [1, 0]


def test_bytes_beside_an_array_are_watched() -> None:
    pool = core.Pool(20, 4, 4, 8)
    planner = core.Planner(hand().shape.geometry(), pool, format="triton")
    for side, at in (("before", 63), ("behind", -64)):
        static = Static(planner, "draft", 2)
        static.fill(0xA5)
        static.bytes(0xA5)
        static._backing["kv_indices"][at] = 0
        with pytest.raises(Overrun, match=f"kv_indices: bytes {side} the array"):
            static.bytes(0xA5)


def test_rounds_that_cannot_run_are_typed_errors() -> None:
    """Any valid file gives a replay, or an error of specrs."""
    value = hand().to_json()
    ran = 0
    for path, new in [(("pool", "num_pages"), n) for n in (18, 19, 2**17, 2**29)] + [
        (("pool", "max_seqs"), n) for n in (4, 2**20, 2**27)
    ] + [(("pool", "row_pages"), n) for n in (4, 2**27)] + [
        (("shape", "max_batch"), n) for n in (3, 65536)
    ] + [(("shape", "max_context_len"), n) for n in (12, 13, 2**20, 2**24)] + [
        (("rows", 1, "row"), 0), (("extend", 0), [0, 0, 12]), (("steps",), []), (("extend",), []), (("others",), []),
    ]:  # fmt: skip
        changed = json.loads(json.dumps(value))
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = new
        for format in ("native", "flashinfer"):
            try:
                c = Capsule.from_json(changed)
                replay(c, format=format)  # type: ignore[arg-type]
                ran += 1
            except core.SpecrsError as e:
                assert str(e)
    assert ran >= 20


# -- differences are found ----------------------------------------------------------------------------------------


def test_the_index_width_without_topk() -> None:
    """27338: max_batch * (max_context_len + S) = 2 * (14 + 3) = 34 entries, where topk = 2 makes 68. Step 0 needs
    2 * (11 + 6) = 34, which just fits; step 1 needs 38."""
    c = hand(shape=Shape(2, 14, 4, 2, 3, 4, "dense"))
    result = replay_reverted(c, [27338], format="flashinfer")
    assert not result.equal and result.found.first is not None
    # The first difference is in the sizes that step 0 says it may need with lengths up to 10: 2 * 2 * (10 + 3), and
    # half of it.
    first, beyond, guard = result.found.first, result.found.beyond, result.runs[1].guard
    assert (first.phase, first.array, first.index) == ("draft step 0", "sizes for device lengths", (1,))
    assert (first.owner, first.values) == ("elements of kv_indices, lengths up to 10", (52, 26))
    assert guard is not None and (guard.phase, guard.array, guard.have) == ("draft step 1", "kv_indices", 34)
    assert guard.kind == "ConfigError (Capacity)" and "need 38 elements, have 34" in guard.error
    # Entry 34 is the fourth of the last list (31..38): position 3 of the page that both requests share.
    assert beyond is not None and (beyond.phase, beyond.array, beyond.index) == ("draft step 1", "kv_indices", (34,))
    assert beyond.owner == "request 1 (sequence 3.1), branch 1, step 1, prefix position 3"
    assert beyond.values == (39, None) and beyond.shown[1] == "not written"


def test_the_reserve_without_the_holey_term() -> None:
    """26972: max(S * K, V) = 6 positions instead of 16, so request 0 has columns for 16 positions, not for 26."""
    c = hand(draft_attention="lane")
    result = replay_reverted(c, [26972], format="flash_attention", layout="holey")
    first, guard = result.found.first, result.runs[1].guard
    assert first is not None and (first.phase, first.array, first.index) == ("reserve", "page table", (0, 4))
    assert first.owner == "request 0 (sequence 1.3), column 4"
    assert first.values == (3, None)  # the first page that nobody has
    assert guard is not None and (guard.phase, guard.kind) == ("tail copies", "OutOfBoundsError (OutOfBounds)")
    assert "index 16 into allocated positions is outside 0..16 (request 0" in guard.error


def test_the_expand_table_with_the_slots_of_all_steps() -> None:
    """27360: step 0 of request 0 reaches 3 tokens into a branch, one page; all 3 steps would reach 5, two pages."""
    result = replay_reverted(hand(draft_attention="lane"), [27360], format="flash_attention", layout="holey")
    first, guard = result.found.first, result.runs[1].guard
    assert first is not None and first.phase == "draft step 0" and first.values[1] is None
    assert first.owner.startswith("request 0 (sequence 1.3), branch 0")
    assert guard is not None and (guard.phase, guard.array, guard.have) == ("draft step 0", "expand_page_table", 1)
    assert "need 2 elements, have 1; columns of request 0, query 0" in guard.error
    # Request 1 alone reaches 1 + 3 = 4 tokens, one page: the fault does not show.
    rows, trees = hand().rows[1:], hand().trees[1:]
    steps = (DraftStep((1, 2), (0, 0), (-0.5, -1.0), (1 << 0, 1 << 3)),)
    alone = hand(draft_attention="lane", rows=rows, trees=trees, steps=steps, paths=((0, 1),), kept=(2,), extend=(),
                 others=((9, "prefix cache"),))  # fmt: skip
    assert replay_reverted(alone, [27360], format="flash_attention", layout="holey").equal


def test_padding_that_is_not_written() -> None:
    """23037: with a largest batch of 3, queries 4 and 5 of a draft step are dead, and stay as they were before."""
    c = hand(shape=Shape(3, 16, 4, 2, 3, 4, "dense"))
    for format, array, index, value in [("flashinfer", "kv_indptr", (5,), 34), ("triton", "kv_indptr", (5,), 34),
                                        ("flash_attention", "cache_seqlens", (2,), 0)]:  # fmt: skip
        result = replay_reverted(c, [23037], format=format)
        first, guard = result.found.first, result.runs[1].guard
        assert first is not None and (first.phase, first.array, first.index) == ("draft step 0", array, index)
        assert first.values == (value, None) and "padding" in first.owner
        assert guard is not None and guard.phase == "draft step 0" and "dead query" in guard.error


def test_outputs_that_are_held_across_writes() -> None:
    """23037 without padding: the lease on what a buffer holds is not renewed, which reading it finds."""
    guard = replay_reverted(hand(draft_attention="lane"), [23037], format="triton").runs[1].guard
    assert guard is not None and "StaleOutput" in guard.kind and guard.phase == "draft step 0"
    run = replay(hand(), format="triton")
    assert segment(run, "draft step 0", "arrays of the write before").values.tolist() == ["refused as stale"]


def test_host_values_read_where_lengths_are_on_the_device() -> None:
    """26738: the first size that is asked for reads the host's lengths, of which there are none."""
    for format in ["native", *FORMATS]:
        result = replay_reverted(hand(), [26738], format=format)
        first, guard = result.found.first, result.runs[1].guard
        assert guard is not None and guard.phase == "draft step 0" and "device lengths of 2 requests" in guard.error
        assert first is not None and first.phase == "draft step 0"
        if format != "native":
            assert first.array == "sizes for device lengths" and first.index == (0,) and first.values[1] is None


def test_reverts_that_a_round_does_not_reach() -> None:
    assert replay_reverted(hand(), [27338], format="native").equal
    assert replay_reverted(hand(), [26972], format="triton").equal


def break_once(monkeypatch: pytest.MonkeyPatch, name: str, call: int, wrong: Any) -> None:
    """The `call`-th call of a kernel, over both runs, is `wrong(real, *args)`."""
    real, calls = getattr(core, name), [0]

    def kernel(*args: Any) -> Any:
        calls[0] += 1
        return wrong(real, *args) if calls[0] == call else real(*args)

    monkeypatch.setattr(replaying.core, name, kernel)


def test_a_move_that_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    # Moves of a run: tail copies, then commit; the fourth is the commit of the second run.
    break_once(monkeypatch, "kv_move", 4, lambda real, cache, moves: None)
    first = replay_against(hand(), hand()).found.first
    assert first is not None and (first.phase, first.array, first.index) == ("commit", "target KV", (71,))
    assert first.owner == "slot 71 (page 17 (sequence 1.3), position 11 of request 0)"
    assert first.values == ("KV of request 0 (sequence 1.3), node 2", None)


def test_a_token_written_to_the_wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(real: Any, cache: core.KvCache, layer: int, plan: core.Plan, k: torch.Tensor, v: torch.Tensor) -> None:
        real(cache, layer, plan, k, v)
        cache.tensor[0, :, 18] = cache.tensor[0, :, 71]  # into a committed position of request 0

    break_once(monkeypatch, "kv_write", 4 + 2, wrong)  # draft step 1 of the second run
    result = replay_against(hand(), hand())
    first = result.found.first
    assert first is not None and (first.phase, first.array, first.index) == ("draft step 1", "draft KV", (18,))
    assert first.owner == "slot 18 (page 4 (sequence 1.3), position 6 of request 0)"
    assert first.values == (None, "KV of request 0 (sequence 1.3), branch 0, step 1")
    assert "value   native: not written" in "\n".join(result.lines())


def test_attention_that_reads_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(real: Any, cache: core.KvCache, layer: int, plan: core.Plan, q: Any, out: Any, scale: float) -> None:
        real(cache, layer, plan, q, out, scale)
        out[2, 1, 3] += 2e-5

    break_once(monkeypatch, "attention", 3, wrong)  # verify
    result = replay_formats(hand(), format="triton")
    first = result.found.first
    assert first is not None and (first.phase, first.array, first.index) == ("verify", "attention", (2, 1, 3))
    assert first.owner == "request 0 (sequence 1.3), node 2"
    assert abs(first.values[0] - first.values[1]) == pytest.approx(2e-5, abs=2e-6)


def test_reads_of_what_nobody_wrote_are_seen() -> None:
    pool = synth.new_pool(8)
    assert torch.isnan(pool).all()
    tokens = synth.Tokens()
    keys, values = tokens.make(["a", "b"], 1, np.arange(2))
    again = synth.Tokens().make(["a", "b"], 1, np.arange(2))
    assert torch.equal(keys, again[0]) and torch.equal(values, again[1])
    assert not torch.equal(keys[0], keys[1]) and float(keys.abs().max()) <= 1.0
    pool[0, 0, [3, 5]], pool[0, 1, [3, 5]] = keys, values
    rows = synth.by_slot(pool)
    assert [tokens.name(rows[i]) for i in (3, 5, 1)] == ["a", "b", "nothing written"]
    rows[3, 0] = 0.0
    assert tokens.name(rows[3]) == "a mixture of tokens"


# -- the command line ---------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "hand.capsule"
    save(hand(shape=Shape(2, 14, 4, 2, 3, 4, "dense")), path)
    return str(path)


def test_replay_says_what_agreed(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--format", "triton"], ["--against", file], ["--format", "native", "--revert", "27338"]):
        assert main(["replay", file, *more]) == 0
        out = capsys.readouterr().out
        assert "speculative round 1 of 2 request(s) at 10, 5 tokens: K=2 S=3 V=4 P=4" in out
        assert "page tables: 7 columns as recorded" in out and "NO DIVERGENCE: " in out


def test_replay_says_what_differs(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["replay", file, "--format", "flashinfer", "--revert", "27338"]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert err.startswith("specrs: WARNING: the second run has a historical fault, 27338: ")
    assert "FIRST DIVERGENT WRITE" in out and "owner " in out
    assert (
        "flashinfer with 27338 reverted was stopped in draft step 1: ConfigError (Capacity): kv_indices: need 38" in out
    )
    assert "draft step 1: kv_indices[34]" in out and "request 1 (sequence 3.1), branch 1" in out
    assert main([*argv, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["equal"] is False and told["runs"][1]["guard"]["have"] == 34
    assert told["beyond"]["index"] == [34] and told["beyond"]["values"] == [39, None]
    assert main(["replay", file, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["equal"] is True and told["first"] is None and told["tolerance"] == 1e-5


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--revert", "1"], "1"), (["--revert", "27338,x"], "'x' is no number"), (["--revert", "27460"], "MLA"),
     (["--revert", ""], "is no number"), (["--layout", "holey"], "dense layout"),
     (["--format", "flash_attention", "--layout", "holey"], "lane"), (["--device", "tpu"], "must be 'cuda' or"),
     (["--device", "cuda:9999"], "device = 'cuda:9999': ")],
)  # fmt: skip
def test_refused_options(file: str, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", file, *more]) == 2
    err = capsys.readouterr().err
    assert err.startswith("specrs: ") and message in err and err.count("\n") == 1


def test_bad_files(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.capsule"
    for data, message in [(b"", "empty"), (Path(file).read_bytes()[:-1], "truncated"), (b"\x89PNG", "not a capsule")]:
        bad.write_bytes(data)
        for argv in (["replay", str(bad)], ["replay", file, "--against", str(bad)]):
            assert main(argv) == 2
            err = capsys.readouterr().err
            assert err.startswith(f"specrs: {bad}: ") and message in err and err.count("\n") == 1
    for missing in ("/nonexistent/x.capsule", str(tmp_path)):
        assert main(["replay", missing]) == 2
        assert capsys.readouterr().err.startswith("specrs: ")


def test_record_and_replay(bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.capsule"
    argv = ["record", "some text", "more", "-o", str(path), "--model", str(bytes_pair.target), "--draft",
            str(bytes_pair.draft), "--tree", "2,2,4", "--page-size", "4",
            "--max-context", "64"]  # fmt: skip
    assert main([*argv, "--round", "2"]) == 0
    assert f"{path}: {path.stat().st_size} bytes, speculative round 2 of 2 request(s)" in capsys.readouterr().out
    assert load(path).round == 2 and len(load(path).rows) == 2
    assert main(["replay", str(path), "--format", "flashinfer"]) == 0
    assert main([*argv, "--round", "999"]) == 2
    assert "round = 999: only" in capsys.readouterr().err
    assert main([*argv, "--attention-backend", "flash_attention", "--draft-layout", "holey"]) == 0
    assert (load(path).shape.layout, load(path).format) == ("holey", "flash_attention")
    assert main(["replay", str(path)]) == 0
    assert main([*argv, "-o", "/nonexistent/x"]) == 2
