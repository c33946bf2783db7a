"""The round's logic over an executor that is not the host's: it asks late, and takes what is told late."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from modelzoo import Pair, read_weights, write_eagle3
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs.engine import llm as engine
from specrs.engine.devices.host import HostExecutor, Root
from specrs.models import HOST

BAD = 7
PROMPTS = [[1, 2, 3], [4] * 20, [5], [6, 7] * 9]
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": (1, 4, 5)},
    "tree": {"tree": (2, 3, 8)},
    "holey": {"tree": (2, 3, 8), "page_size": 4, "draft_layout": "holey", "attention_backend": "triton"},
}


class Late:
    """A result on its way: what is read of it is noted."""

    def __init__(self, of: Any, name: str, log: list[str]) -> None:
        self._of, self._name, self._log = of, name, log

    def of(self, batch: Any, rows: Any) -> Late:
        return self

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._of, attribute)
        if (self._name, attribute) == ("drafted", "trees"):  # to have them is not to read them
            return Late(value, "trees", self._log)
        if (self._name, attribute) != ("drafted", "levels"):  # the host knows them
            self._log.append(f"{self._name}.{attribute}")
        return value


@dataclass
class Device:
    """The host behind the protocol: no attribute of `HostExecutor` that the protocol lacks is there."""

    host: HostExecutor
    log: list[str] = field(default_factory=list)

    @property
    def clock(self) -> Any:
        return self.host.clock

    @property
    def planner(self) -> core.Planner:
        return self.host.planner

    @property
    def drafts(self) -> Any:
        return None if self.host.drafts is None else DeviceDrafts(self.host.drafts, self.log)

    def entered(self) -> Any:
        return self.host.entered()

    launched = ahead = False

    @property
    def tail(self) -> int | None:
        return self.host.tail

    def policy(self, pages: Any) -> Any:
        return self.host.policy(pages)

    def copy(self, moves: core.Moves) -> None:
        self.host.copy(moves)

    def prefill(self, *args: Any) -> Any:
        return self.host.prefill(*args)

    def decode(self, *args: Any) -> Any:
        self.log.append("decode")
        return Late(self.host.decode(*args), "verified", self.log)

    def verify(self, batch: Any, drafted: Any) -> Any:
        self.log.append("verify")
        drafted = drafted._of if isinstance(drafted, Late) else drafted  # else the host chose the best nodes
        return Late(self.host.verify(batch, drafted), "verified", self.log)

    def commit(self, batch: Any, lease: Any, verified: Any) -> None:
        self.log.append("commit")
        self.host.commit(batch, lease, verified._of)

    def launch(self, verified: Any, rounds: int, levels: int) -> None:
        raise AssertionError("nothing can be launched ahead")

    def abandon(self, requests: Any) -> None:
        self.log.append("abandon")

    def close(self) -> None:
        self.host.close()


@dataclass
class DeviceDrafts:
    """The head's part of it. NaN is told by the next round's trees alone."""

    host: Any
    log: list[str]
    unites: ClassVar[bool] = False
    catches_up: ClassVar[bool] = False

    def keep(self, batch: Any, passed: Any, rows: Any) -> None:
        self.log.append("keep")
        self.host.keep(batch, passed._of if isinstance(passed, Late) else passed, rows)

    def can_extend(self, request: Any) -> bool:
        able: bool = self.host.can_extend(request)
        return able

    def extend(self, requests: Any) -> list[Root]:
        self.log.append("extend")
        bad = Root(torch.full((self.host.beams.draft_vocab,), math.nan),
                   HOST.empty(self.host.head.config.hidden_size))  # fmt: skip
        return [root if isinstance(root, Root) else bad for root in self.host.extend(requests)]

    def draft(self, *args: Any) -> Any:
        self.log.append("draft")
        return Late(self.host.draft(*args), "drafted", self.log)

    def cut(self, drafted: Any, least: float) -> Any:
        return Late(self.host.cut(drafted._of, least), "drafted", self.log)


def on_device(pair: Pair, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[LLM, Device]:
    devices: list[Device] = []

    def make(*args: Any) -> Any:
        devices.append(Device(HostExecutor(*args)))
        return devices[0]

    with monkeypatch.context() as patch:
        patch.setattr(engine, "HostExecutor", make)
        llm = LLM(pair.target, pair.draft, max_batch=3, max_context_len=200, **options)
    return llm, devices[0]


@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
def test_a_round_reads_nothing_before_the_target_verifies(
    tiny: Pair, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=5)
    want = LLM(tiny.target, tiny.draft, max_batch=3, **options).generate(PROMPTS, params)
    llm, device = on_device(tiny, monkeypatch, **options)
    outputs = llm.generate(PROMPTS, params)
    assert [(o.token_ids, o.accepted_lengths) for o in outputs] == [(o.token_ids, o.accepted_lengths) for o in want]
    assert sum(sum(o.drafted) for o in outputs) > 5
    rounds = [round.split() for round in " ".join(device.log).split("draft ")[1:]]
    assert len(rounds) > 5
    for asked in rounds:
        assert asked[0] == "verify"
        assert asked.index("verified.accepts") < asked.index("commit") < asked.index("keep")
    llm.audit()


@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
def test_faults_of_the_head_that_are_told_late_cost_drafts_alone(
    tiny: Pair, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tiny.target, write_eagle3(tmp_path, tiny.target, draft_vocab_size=None, own_embedding=True))
    weights = read_weights(pair.draft)
    weights["embed_tokens.weight"][BAD] = math.nan
    save_file(weights, pair.draft / "model.safetensors")
    params = SamplingParams(max_tokens=25, temperature=1.0, seed=3, logit_bias={BAD: 1.0})
    want = LLM(pair.target).generate(PROMPTS, params)
    llm, device = on_device(pair, monkeypatch, prefix_cache=False, **options)
    outputs = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in want]
    gave_up = [o for o in outputs if o.draft_error is not None]
    assert len(gave_up) >= 2 and "extend" in device.log
    for o in gave_up:
        assert o.draft_error is not None and o.draft_error.request == o.request_id
        assert o.draft_error.what == "draft logits"
    llm.audit()


def test_an_adaptive_engine_runs_on_any_executor(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=40)
    want = [o.token_ids for o in LLM(tiny.target).generate(PROMPTS, params)]
    llm, device = on_device(tiny, monkeypatch)
    assert [o.token_ids for o in llm.generate(PROMPTS, params)] == want
    assert device.log
