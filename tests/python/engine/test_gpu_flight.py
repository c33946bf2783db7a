"""Rounds in flight on a GPU: the device goes on while the host knows nothing, and nobody's tokens are worse for it.

Plain decoding of one request, round by round, is the reference. Levels, batches that shrink and grow, requests that end
in every way, aborts and faults with rounds in flight must give its tokens, keep the pool's books, and take no memory.
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from driver_calls import driver_calls
from modelzoo import Pair, agree, write_eagle3, write_target
from specrs import LLM, SamplingParams, device
from specrs import _specrs as core
from specrs.engine.devices.cuda_drafts import CudaDrafts
from specrs.engine.devices.graphs import Graphs
from specrs.engine.devices.launched import LaunchedRound
from specrs.engine.devices.launches import Launches

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

VOCAB = 16
TREES = {"plain": None, "chain": (1, 4, 5), "tree": (4, 3, 12), "deep": (3, 6, 20)}


def pair_in(root: Path, **options: Any) -> Pair:
    sizes = {"vocab_size": VOCAB, "eos_token_id": 3, "bos_token_id": None, "max_position_embeddings": 1024}
    target = write_target(root / "target", dtype=torch.bfloat16, head_dim=64, **sizes)
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=torch.bfloat16, head_dim=64, **options)
    agree(target, draft)
    return Pair(target, draft)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_in(tmp_path_factory.mktemp("gpu"))


pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def engine(pair: Pair, tree: str, **options: Any) -> LLM:
    options = {"device": "cuda", "max_context_len": 256, "prefix_cache": False, **options}
    if TREES[tree] is None:
        return LLM(pair.target, **{"speculative": False, **options})
    return LLM(pair.target, pair.draft, tree=TREES[tree], **options)


def work(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests that end in every way: by length, by a token, at the wall of the context."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 7, 40, 200, 250]))]
        ends = {"ignore_eos": rng.random() < 0.7, "stop_token_ids": [5] if rng.random() < 0.2 else []}
        kind = rng.choice([{"temperature": 0.0}, {"temperature": 0.9, "top_k": 8}, {"temperature": 1.3}])
        if rng.random() < 0.15:
            kind["repetition_penalty"] = 1.2
        found.append((prompt, SamplingParams(max_tokens=rng.choice([1, 2, 9, 33, 60]), seed=i, **ends, **kind)))
    return found


@pytest.fixture(scope="module")
def reference(pair: Pair) -> dict[int, list[list[int]]]:
    """Tokens of `work`, by its seed: one request at a time, no graphs, nothing ahead."""
    with engine(pair, "plain", graphs="off", max_batch=1) as llm:
        return {
            seed: [llm.generate([prompt], params)[0].token_ids for prompt, params in work(seed, 24)] for seed in (1, 2)
        }


class Flights:
    """Counts what an engine's rounds did."""

    def __init__(self, llm: LLM) -> None:
        self.ahead = self.loops = self.begun = 0
        executor: Any = llm._runner.executor
        launch, verify, decode = executor.launch, executor.verify, executor.decode
        following = LaunchedRound.following

        def launched(verified: Any, rounds: int, levels: int) -> Any:
            done = launch(verified, rounds, levels)
            if done is not None:
                self.ahead += 1
                self.loops += done.variant.loop
            return done

        def follows(verified: LaunchedRound, goes_on: bool) -> Any:
            done = following(verified, goes_on)
            self.ahead += done is not None
            return done

        def counted(run: Any) -> Any:
            def ran(*args: Any) -> Any:
                self.begun += 1
                return run(*args)

            return ran

        executor.launch, LaunchedRound.following = launched, follows  # type: ignore[method-assign]
        executor.verify, executor.decode = counted(verify), counted(decode)

        def undo() -> None:
            LaunchedRound.following = following  # type: ignore[method-assign]
            for name in ("launch", "verify", "decode"):
                delattr(executor, name)

        self._undo = undo

    def __enter__(self) -> Flights:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()


def served(llm: LLM, requests: list[tuple[list[int], SamplingParams]], rng: random.Random) -> list[list[int]]:
    """Tokens of requests that join at random steps."""
    waiting, ids, tokens = list(requests), [], {}
    while waiting or llm.unfinished:
        while waiting and (rng.random() < 0.3 or not llm.unfinished):
            ids.append(llm.add(*waiting.pop(0)))
        for event in llm.step():
            if event.output is not None:
                tokens[event.request_id] = event.output.token_ids
    return [tokens[i] for i in ids]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
def test_every_level_gives_the_tokens_of_plain_decoding(
    pair: Pair, reference: dict[int, list[list[int]]], tree: str, graphs: str
) -> None:
    for seed, page, batch in ((1, 1, 5), (2, 16, 8)):
        with engine(pair, tree, graphs=graphs, page_size=page, max_batch=batch) as llm, Flights(llm) as flights:
            for again in range(2):
                assert served(llm, work(seed, 24), random.Random(again)) == reference[seed]
            counts = llm.audit()
            assert counts["leased_sequences"] == 0
        # Requests join at random, and where one is about to, no round is launched ahead.
        assert (flights.ahead > flights.begun / 8) == (graphs != "off"), (flights.ahead, flights.begun)
        assert (flights.loops > 3) == (graphs == "loop")


@pytest.mark.parametrize("graphs", ["round", "loop"])
def test_poisoned_memory_changes_nothing(
    pair: Pair, reference: dict[int, list[list[int]]], graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN and -1 wherever a round has not written, and known bytes between the regions."""
    monkeypatch.setenv("SPECRS_POISON", "1")
    for tree, page in (("plain", 1), ("chain", 4), ("tree", 1), ("deep", 16)):
        with engine(pair, tree, graphs=graphs, page_size=page, max_batch=6) as llm:
            assert served(llm, work(1, 24), random.Random(3)) == reference[1]
            llm.audit()


def test_a_region_that_no_kernel_writes_is_seen_when_it_is_poisoned(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of empty seats is left out: then what they attend to is what was there before."""
    monkeypatch.setenv("SPECRS_POISON", "1")
    plan = core._device_plan

    def lazy(*, phase: Any, **operands: Any) -> None:
        if phase != "decode":
            plan(phase=phase, **operands)

    with engine(pair, "plain", graphs="off", max_batch=4) as llm:
        monkeypatch.setattr(core, "_device_plan", lazy)
        with pytest.raises(core.SpecrsError):
            llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=8, ignore_eos=True))
        monkeypatch.undo()
    torch.cuda.synchronize()


def test_a_write_beyond_a_region_is_seen_with_the_next_round(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRS_POISON", "1")
    with engine(pair, "plain", graphs="round", max_batch=2) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        want = llm.generate([[1, 2, 3]], params)[0].token_ids
        bucket = next(iter(llm._runner.executor._buckets.values()))  # type: ignore[attr-defined]
        positions = bucket.memory.arrays["decode positions"]
        beyond, fill = positions.data_ptr() + positions.nbytes, ctypes.CDLL("libcuda.so.1").cuMemsetD32_v2
        torch.cuda.synchronize()
        assert fill(ctypes.c_uint64(beyond), ctypes.c_uint(7), ctypes.c_size_t(1)) == 0
        with pytest.raises(core.OutOfBoundsError, match="decode positions"):
            llm.generate([[1, 2, 3]], params)
        assert fill(ctypes.c_uint64(beyond), ctypes.c_uint(0xA5A5A5A5), ctypes.c_size_t(1)) == 0
        assert llm.generate([[1, 2, 3]], params)[0].token_ids == want
        llm.audit()


@pytest.mark.parametrize("tree", ["plain", "tree"])
@pytest.mark.parametrize("graphs", ["round", "loop"])
def test_a_steady_round_makes_no_synchronisation(pair: Pair, tree: str, graphs: str) -> None:
    """Synchronisations are counted on the driver's own calls, whoever makes them."""
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    with engine(pair, tree, graphs=graphs, max_batch=4, page_size=16, max_context_len=512) as llm:
        llm.generate([[1, 2, 3]] * 4, params)
        ids = [llm.add([1, 2, 3], params) for _ in range(4)]
        for _ in range(8):
            llm.step()
        rounds = 0
        with driver_calls() as seen:
            for _ in range(12):
                llm.step()
                rounds += 1
        assert llm.unfinished == 4, "the requests ended: nothing was steady"
        assert seen.calls, "the hook saw no call at all"
        assert not seen.synchronisations, seen
        for i in ids:
            llm.abort(i)
        llm.audit()


def test_the_heads_passes_over_a_prompt_wait_for_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    extend, seen = CudaDrafts.extend, list[Any]()

    def extended(*args: Any) -> Any:
        torch.cuda.synchronize()  # a GPU that others share may not have read the inputs of the pass before
        with driver_calls() as calls:
            found = extend(*args)
        seen.append(calls)
        return found

    prompt, params = [1, 2, 3] * 20, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with engine(pair, "tree", max_batch=2, prefill_chunk=24) as llm:
        want = llm.generate([prompt], params)[0].token_ids
        monkeypatch.setattr(CudaDrafts, "extend", extended)
        assert llm.generate([prompt], params)[0].token_ids == want
    assert len(seen) > 2
    for calls in seen:
        assert calls.calls and not calls.synchronisations, calls


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
def test_a_head_that_gives_nan_over_a_prompt_is_told_by_the_round_that_drafts(
    tmp_path: Path, graphs: str, watched: bool
) -> None:
    """No caller waits for the pass over the prompt: the scores of the root tell it, whether the device drafts or the
    host does, to anybody who looks on. Drafts of other sources are not touched."""
    pair, bad = pair_in(tmp_path, own_embedding=True), 7
    prompts, params = [[1, 2, bad, *[4, 5, 6] * 9], [1, 2, 8, *[4, 5, 6] * 9]], SamplingParams(max_tokens=9, seed=1)
    params = replace(params, temperature=0.8, ignore_eos=True, logit_bias={bad: -math.inf})
    with engine(pair, "plain", graphs="off") as llm:
        want = [o.token_ids for o in llm.generate(prompts, params)]
    with engine(pair, "tree", graphs=graphs) as llm:
        embedding: Any = llm._runner.executor.drafts.head.embedding  # type: ignore[attr-defined, union-attr]
        embedding.table[bad].fill_(float("nan"))  # a checkpoint with NaN would be refused
        for _ in range(2):
            with llm.watching(lambda trees, accepts: None) if watched else nullcontext():
                outputs = llm.generate(prompts, params)
            assert [o.token_ids for o in outputs] == want
            broken, sound = (o.draft_error for o in outputs)
            assert broken is not None and (broken.what, broken.request) == ("draft logits", outputs[0].request_id)
            assert sum(outputs[0].drafted) == 0 and sound is None and sum(outputs[1].drafted) > 0
        llm.audit()


def test_a_first_request_finds_its_graphs_made(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any prompt, sampled or greedy, however deep it drafts; and nothing moves the memory that graphs
    point at."""
    made: list[Any] = []
    captured = Graphs._captured

    def watched(self: Graphs, *args: Any) -> Any:
        made.append(args)
        return captured(self, *args)

    options = {"device": "cuda", "max_context_len": 512, "prefix_cache": False, "max_batch": 2}
    for drafting in (True, False):
        with LLM(pair.target, pair.draft, **options) if drafting else LLM(pair.target, **options) as llm:
            bucket = llm._runner.executor._buckets[1]  # type: ignore[attr-defined]
            kept = set(bucket.graphs.made)
            assert {(v.levels > 0, v.edits is None) for v in kept} == {(a, b) for a in (0, 1) for b in (0, 1)}
            monkeypatch.setattr(Graphs, "_captured", watched)
            for length, temperature in ((1, 0.0), (300, 0.0), (300, 1.0), (37, 1.0)):
                params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
                llm.generate([[i % 5 for i in range(length)]], params)
            monkeypatch.undo()
            assert set(bucket.graphs.made) == kept and not made


@pytest.mark.parametrize("graphs", ["round", "loop"])
def test_aborts_with_rounds_in_flight_lose_nothing(
    pair: Pair, reference: dict[int, list[list[int]]], graphs: str
) -> None:
    for tree, page in (("plain", 1), ("tree", 1), ("deep", 4)):
        rng = random.Random(9)
        with engine(pair, tree, graphs=graphs, page_size=page, max_batch=6) as llm:
            ids = {llm.add(*one): i for i, one in enumerate(work(2, 24))}
            tokens: dict[int, list[int]] = {}
            gone = set()
            while llm.unfinished:
                events = llm.step()
                tokens |= {ids[e.request_id]: e.output.token_ids for e in events if e.output is not None}
                live = [i for i in ids if i not in gone and ids[i] not in tokens]
                if live and rng.random() < 0.2:
                    gone.add(one := rng.choice(live))
                    event = llm.abort(one)
                    assert event is not None and event.output is not None
                    tokens[ids[one]] = event.output.token_ids
            assert len(tokens) == len(ids) and gone
            for i, place in ids.items():
                want = reference[2][place]
                assert tokens[place] == (want[: len(tokens[place])] if i in gone else want)
            assert llm.audit()["leased_sequences"] == 0


@pytest.mark.parametrize("graphs", ["round", "loop"])
def test_pools_that_are_too_small_for_rounds_ahead(
    pair: Pair, reference: dict[int, list[list[int]]], graphs: str
) -> None:
    for tree in ("plain", "tree"):
        with engine(pair, tree, graphs=graphs, page_size=4, max_batch=6, num_pages=90) as llm:
            assert served(llm, work(1, 24), random.Random(5)) == reference[1]
            llm.audit()


def test_a_batch_beyond_a_fault_record_starts_over(pair: Pair, reference: dict[int, list[list[int]]]) -> None:
    """A page id that no pool has, on the device alone, with a round in flight: the step raises, the next ones go on."""
    for graphs in ("round", "loop"):
        for tree in ("plain", "tree"):
            with engine(pair, tree, graphs=graphs, page_size=1, max_batch=4) as llm:
                some = [one for one in work(2, 24) if len(one[0]) == 40][:4]
                want = [reference[2][i] for i, one in enumerate(work(2, 24)) if len(one[0]) == 40][:4]
                ids = [llm.add(*one) for one in some]
                tokens: dict[int, list[int]] = {}
                raised = 0
                while llm.unfinished:
                    if llm._runner._flight is not None and raised < 3:
                        executor: Any = llm._runner.executor
                        executor._models.table[:, 3].fill_(10**6)
                    try:
                        for event in llm.step():
                            if event.output is not None:
                                tokens[event.request_id] = event.output.token_ids
                    except core.OutOfBoundsError:
                        raised += 1
                assert raised, "nothing was in flight"
                assert [tokens[i] for i in ids] == want
                llm.audit()


def test_a_stream_that_hogs_the_gpu_changes_nothing(pair: Pair, reference: dict[int, list[list[int]]]) -> None:
    other, big = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for graphs in ("round", "loop"):
        with engine(pair, "tree", graphs=graphs, page_size=1, max_batch=6) as llm:
            with torch.cuda.stream(other):
                for _ in range(400):
                    big = (big @ big).clamp_(-1, 1)
            assert served(llm, work(1, 24), random.Random(7)) == reference[1]
    other.synchronize()


def test_rounds_take_no_memory(pair: Pair) -> None:
    def used() -> int:
        gc.collect()
        core._graph_collect(True)
        torch.cuda.synchronize()
        core._device_collect(torch.cuda.current_device())
        return torch.cuda.memory_allocated() + core._device_memory(torch.cuda.current_device())[3]

    for graphs in ("round", "loop"):
        with engine(pair, "tree", graphs=graphs, max_batch=6) as llm:
            executor: Any = llm._runner.executor
            for size in executor._buckets:  # each has memory of its own, made when it is wanted first
                executor._of(size)
            # Features of passes of each size do so too; graphs that a round's graph replaces change who joins when.
            for seed in (0, 1, 0, 1, 0, 1):
                served(llm, work(1, 24), random.Random(seed))
            before = used()
            for seed in (0, 1, 0, 1):
                served(llm, work(1, 24), random.Random(seed))
            assert used() <= before, f"{used() - before} bytes grown"


def test_closing_gives_weights_and_caches_back_at_once(pair: Pair) -> None:
    """Memory that graphs point at is given back too, which they keep as long as they are there."""

    def used() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    for graphs in ("round", "loop"):
        gc.collect()
        core._graph_collect(True)
        before = used()
        llm = engine(pair, "tree", graphs=graphs, max_batch=4)
        for _ in range(3):
            llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=40, ignore_eos=True))
        taken = used() - before
        llm.close()
        gc.collect()
        assert used() - before < taken / 10, (before, taken, used())


def test_engines_dropped_with_rounds_in_flight(pair: Pair) -> None:
    """Engines are closed, or let go of, in the midst of a round: nothing is freed under it."""
    for graphs in ("round", "loop"):
        for close in (True, False):
            llm = engine(pair, "tree", graphs=graphs, max_batch=4)
            for _ in range(4):
                llm.add([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
            for _ in range(12):
                llm.step()
            assert llm._runner._flight is not None
            if close:
                llm.close()
            del llm
            gc.collect()
            torch.zeros(1 << 20, device="cuda").add_(1)
    torch.cuda.synchronize()
    core._graph_collect(True)


def test_a_variant_that_cannot_be_captured_runs_without_a_graph(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Launches._end

    def waits(self: Launches, handle: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()  # no stream under capture can be waited for
        end(self, handle)

    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with engine(pair, "plain", max_batch=1) as llm:
        want = llm.generate([[1, 2, 3]], params)[0].token_ids
    monkeypatch.setattr(Launches, "_end", waits)
    with engine(pair, "plain", max_batch=1) as llm, pytest.warns(RuntimeWarning, match="runs without a CUDA graph"):
        assert llm.generate([[1, 2, 3]], params)[0].token_ids == want


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
def test_nan_in_flight_is_nobody_elses(tmp_path: Path, tree: str, graphs: str) -> None:
    """A request that emits `bad` fails at the position after it, while others' prompts run and rounds are in flight."""
    pair = pair_in(tmp_path, own_embedding=True)  # so that the head stays sound
    bad, requests = 7, work(2, 24)
    requests = [([t if t != bad else 8 for t in prompt], params) for prompt, params in requests]

    def poisoned(tree: str, **options: Any) -> LLM:
        llm = engine(pair, tree, **options)
        embedding: Any = llm._runner.executor.target.embedding  # type: ignore[attr-defined]
        embedding.table[bad].fill_(float("nan"))  # a checkpoint with NaN would be refused
        return llm

    def told(output: Any) -> tuple[Any, ...]:
        error = output.error
        return output.token_ids, output.finish_reason, error and (error.request == output.request_id, error.position)

    with poisoned("plain", graphs="off", max_batch=1) as llm:
        want = [told(llm.generate([prompt], params, on_error="return")[0]) for prompt, params in requests]
    ends = [reason for _, reason, _ in want]
    assert 2 < ends.count("error") < len(ends) - 2, ends
    for page, batch in ((1, 5), (16, 8)):
        with poisoned(tree, graphs=graphs, page_size=page, max_batch=batch, prefill_chunk=32) as llm:
            for again in range(2):
                rng, waiting, ids, outputs = random.Random(again), list(requests), [], {}
                while waiting or llm.unfinished:
                    while waiting and (rng.random() < 0.3 or not llm.unfinished):
                        ids.append(llm.add(*waiting.pop(0)))
                    outputs |= {e.request_id: e.output for e in llm.step() if e.output is not None}
                assert [told(outputs[i]) for i in ids] == want
                assert all(outputs[i].draft_error is None for i in ids)
                assert llm.audit()["leased_sequences"] == 0
