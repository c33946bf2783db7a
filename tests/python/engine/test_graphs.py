"""CUDA graphs of rounds as the host keeps their books: on no GPU, whose part is played."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specrs import _specrs as core
from specrs.engine.devices import graphs as captures
from specrs.engine.devices.graphs import Graphs


class Gpu:
    """Captures what it is given; fails as often as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = self.captured = self.replayed = self.allocated = 0
        monkeypatch.setattr(core, "_Graph", SimpleNamespace(capture=self.capture))
        monkeypatch.setattr(captures, "allocations", lambda cuda: self.allocated)

    def capture(self, ordinal: int, stream: Any, work: Callable[[], None], keep: list[object]) -> Any:
        self.captured += 1
        work()
        self.allocated += self.failing > 0
        self.failing -= self.failing > 0
        return self

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


def test_launches_run_once_are_captured_and_replayed(gpu: Gpu) -> None:
    graphs, ran = Graphs(gpu.models()), []

    def launches() -> str:
        ran.append("run")
        return "logits"

    for settled, count, replayed in ((False, 1, 0), (False, 2, 1), (True, 2, 2), (True, 2, 3)):
        assert graphs.settled("key") == settled
        assert graphs.run("key", launches, list) == "logits"
        assert (len(ran), gpu.replayed) == (count, replayed)
    assert gpu.captured == 1


def test_a_capture_during_which_another_thread_allocates_is_tried_again(gpu: Gpu) -> None:
    graphs, gpu.failing = Graphs(gpu.models()), 2
    for _ in range(5):
        assert graphs.run("key", str, list) == ""
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
