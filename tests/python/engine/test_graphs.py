"""CUDA graphs of rounds as the host keeps their books: on no GPU, whose part is played."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specrs import _specrs as core
from specrs.engine.devices import graphs as captures
from specrs.engine.devices.graphs import Bucket, Graphs
from specrs.engine.devices.launches import Variant

PLAIN = Variant(0, False, None)


class Gpu:
    """Captures what it is given; fails as often as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = self.captured = self.replayed = self.allocated = 0
        fake = SimpleNamespace(capture=self.capture, loop=self.loop)
        monkeypatch.setattr(core, "_Graph", fake)
        monkeypatch.setattr(core, "_device_round_end_load", lambda ordinal: None)
        monkeypatch.setattr(captures, "allocations", lambda cuda: self.allocated)

    def capture(self, ordinal: int, stream: Any, work: Callable[[], None], keep: list[object]) -> Any:
        self.captured += 1
        work()
        self.allocated += self.failing > 0
        self.failing -= self.failing > 0
        return self

    def loop(self, ordinal: int, stream: Any, work: Callable[[int], None], keep: list[object]) -> Any:
        return self.capture(ordinal, stream, lambda: work(7), keep)

    def launch(self, stream: Any) -> None:
        self.replayed += 1

    def models(self, graphs: str = "round") -> Any:
        place = SimpleNamespace(device=torch.device("cpu", 0))
        dense = SimpleNamespace(placement=place, stream=None, forget=lambda: None)
        attention = SimpleNamespace(captured=0)
        return SimpleNamespace(config=SimpleNamespace(graphs=graphs), dense=dense, attention=attention)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def bucket_of(gpu: Gpu, graphs: str = "round") -> Bucket:
    """A bucket without memory."""
    bucket = Bucket.__new__(Bucket)
    bucket.models, bucket.rounds = gpu.models(graphs), 0
    bucket.looping = bucket.overtaken = False
    bucket.graphs = Graphs(bucket.models)
    ring = SimpleNamespace(clear_stop=lambda: None)
    bucket.memory = SimpleNamespace(ring=ring, arrays={"control": torch.zeros(4)})  # type: ignore[assignment]
    logits = torch.zeros(1, 1)
    bucket.launches = SimpleNamespace(run=lambda variant, handle: logits, kept=list)  # type: ignore[assignment]
    return bucket


def test_launches_run_once_are_captured_and_replayed(gpu: Gpu) -> None:
    graphs, ran = Graphs(gpu.models()), []

    def launches(handle: int) -> str:
        ran.append(handle)
        return "logits"

    for settled, count, replayed in ((False, 1, 0), (False, 2, 1), (True, 2, 2), (True, 2, 3)):
        assert graphs.settled("key") == settled
        assert graphs.run("key", launches, list) == "logits"
        assert (len(ran), gpu.replayed) == (count, replayed)
    assert ran == [0, 0] and gpu.captured == 1


def test_a_capture_during_which_another_thread_allocates_is_tried_again(gpu: Gpu) -> None:
    graphs, gpu.failing = Graphs(gpu.models()), 2
    for _ in range(5):
        assert graphs.run("key", str, list) == "0"
    assert gpu.captured == 3 and gpu.replayed == 2 and graphs.failures == {"key": 2}


def test_what_cannot_be_captured_is_given_up_after_some_tries_and_said_once(gpu: Gpu) -> None:
    graphs, gpu.failing = Graphs(gpu.models()), 100
    with pytest.warns(RuntimeWarning, match="key runs without a CUDA graph: torch allocated") as told:
        for _ in range(9):
            graphs.run("key", str, list)
    assert len(told) == 1 and gpu.captured == 3 and gpu.replayed == 0
    assert graphs.settled("key"), "it gets no faster any more"


def test_without_graphs_nothing_is_captured(gpu: Gpu) -> None:
    graphs = Graphs(gpu.models("off"))
    for _ in range(4):
        assert graphs.settled("key")
        graphs.run("key", str, list)
    assert not gpu.captured


def test_a_loop_is_captured_where_it_is_asked_for(gpu: Gpu) -> None:
    bucket = bucket_of(gpu, "loop")
    assert not bucket.loops(PLAIN), "there is nothing to repeat"
    for _ in range(3):
        bucket.again(PLAIN)
    assert gpu.captured == 1
    assert bucket.loops(PLAIN) and gpu.captured == 2
    bucket.again(Variant(0, False, None, loop=True), 8)
    assert bucket.looping and bucket.memory.arrays["control"][1] == 8
    gpu.captured = 0
    assert bucket.loops(PLAIN) and not gpu.captured


def test_a_loop_that_cannot_be_captured_is_a_round_alone(gpu: Gpu) -> None:
    bucket = bucket_of(gpu, "loop")
    for _ in range(2):
        bucket.again(PLAIN)
    gpu.failing = 100
    with pytest.warns(RuntimeWarning, match="loop=True.* runs without a CUDA graph"):
        assert not any(bucket.loops(PLAIN) for _ in range(5))
    assert gpu.captured == 4 and PLAIN in bucket.graphs.made


def test_loops_are_not_made_where_rounds_are_launched_one_by_one(gpu: Gpu) -> None:
    bucket = bucket_of(gpu)
    for _ in range(3):
        bucket.again(PLAIN)
    assert not bucket.loops(PLAIN) and gpu.captured == 1
