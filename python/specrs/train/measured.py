"""What a head is worth on prompts that training never saw, by the engine itself: acceptance, tokens a round, time.

Acceptance is counted over trees of fixed shapes, in which everything is drafted. The temper is the one at which the
nodes' chances sum to what was accepted, of chains: a host verifies the likeliest nodes, which are nearly one. A level's
share is counted in bushes, which a device drafts before it sees their scores.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.dlpack import from_dlpack

from specrs._specrs import Accepts, TreeBatch
from specrs.engine import LLM, RequestOutput
from specrs.models.acceptance import FILE, HEATS
from specrs.sampling_params import SamplingParams
from specrs.train.answers import Prompt, content_of

CHAIN, BUSH = (1, 7, 8), (4, 6, 32)
TEMPERATURES = dict(zip(HEATS, (0.0, 0.7, 1.0), strict=True))


class Counts:
    """Scores of drafts that were verified, and how deep they were accepted."""

    def __init__(self, steps: int) -> None:
        self.scores: list[float] = []
        self.accepted = 0
        self.reached = [0] * (steps + 1)

    def watch(self, trees: TreeBatch, accepts: Accepts) -> None:
        """A round was verified."""
        scores, first = from_dlpack(trees.scores).tolist(), 0
        for size, path in zip(trees.sizes, accepts.paths, strict=True):
            if size > 1:
                self.scores += scores[first + 1 : first + size]
                self.accepted += len(path) - 1
                for level in range(len(path)):
                    self.reached[level] += 1
            first += size

    def temper(self) -> float:
        """The one at which chances sum to what was accepted, by bisection."""
        low, high = 0.2, 2.0
        for _ in range(40):
            middle = (low + high) / 2
            more = sum(math.exp(middle * s) for s in self.scores) > self.accepted
            low, high = (middle, high) if more else (low, middle)
        return low

    def levels(self) -> list[float]:
        """Return for each level the share that is accepted where the one above is."""
        pairs = zip(self.reached, self.reached[1:], strict=False)
        return [round(below / above, 3) for above, below in pairs if above]


@dataclass(frozen=True)
class Kind:
    """Figures of one kind of text, greedy.

    Attributes:
        prompts, tokens: number of prompts, and of tokens that were generated for each measurement.
        chain, bush: tokens a round with drafts of fixed shapes.
        head, text: plain time over time with the head, and with drafts from the text itself, as the engine picks them.
    """

    prompts: int
    tokens: int
    chain: float
    bush: float
    head: float
    text: float


@dataclass(frozen=True)
class Measured:
    """Everything that was measured of a head.

    Attributes:
        kinds: figures of each kind, and of all together as ``"all"``.
        acceptance: content of `acceptance.json`.
        identical: True if all greedy tokens are those of plain decoding.
        device: name of the device.
        plain, head: tokens a second, one request at a time.
    """

    kinds: dict[str, Kind]
    acceptance: dict[str, dict[str, Any]]
    identical: bool
    device: str
    plain: float
    head: float

    @property
    def pays(self) -> bool:
        """True if the head makes this machine faster."""
        return self.head > self.plain


@dataclass(frozen=True)
class Engines:
    """Makes engines over one model and its head, and asks them for answers.

    Attributes:
        prompts: held-out prompts.
        tokens: most tokens of an answer.
        options: options of all engines.
    """

    model: Path
    draft: Path
    prompts: Sequence[Prompt]
    tokens: int
    options: dict[str, Any]

    def _llm(self, **options: Any) -> LLM:
        return LLM(self.model, progress=False, **self.options, **options)

    def _contents(self, llm: LLM) -> list[Any]:
        return [content_of(llm, prompt) for prompt in self.prompts]

    def fixed(self, tree: tuple[int, int, int]) -> tuple[dict[str, Counts], list[RequestOutput]]:
        """Return counts for each heat with drafts of a fixed shape, and the greedy outputs."""
        found: dict[str, Counts] = {}
        greedy: list[RequestOutput] = []
        with self._llm(draft=self.draft, tree=tree, max_batch=8) as llm:
            contents = self._contents(llm)
            for heat, temperature in TEMPERATURES.items():
                counts = found[heat] = Counts(tree[1])
                params = SamplingParams(max_tokens=self.tokens, temperature=temperature, top_p=1.0, top_k=0, seed=1)
                with llm.watching(counts.watch):
                    outputs = llm.generate(contents, params)
                greedy = greedy or outputs
        return found, greedy

    def against_plain(self, **options: Any) -> tuple[list[float], list[float], list[list[int]], bool, str]:
        """Time plain decoding and another engine on each prompt, in turns.

        Returns:
            Seconds of plain decoding and of the other for each prompt, the tokens, whether both had the same, and the
            device.
        """
        params = SamplingParams(max_tokens=self.tokens, temperature=0.0)
        seconds: tuple[list[float], list[float]] = ([], [])
        tokens: list[list[int]] = []
        same = True
        with self._llm(speculative=False, max_batch=1) as plain, self._llm(max_batch=1, **options) as other:
            contents = self._contents(plain)
            for llm in (plain, other):
                llm.generate(contents[:1], params)
            for i, content in enumerate(contents):
                pair = [0, 1] if i % 2 == 0 else [1, 0]
                outputs: dict[int, list[int]] = {}
                for which in pair:
                    began = time.perf_counter()
                    [out] = (plain, other)[which].generate([content], params)
                    seconds[which].append(time.perf_counter() - began)
                    outputs[which] = out.token_ids
                same &= outputs[0] == outputs[1]
                tokens.append(outputs[0])
            return *seconds, tokens, same, other.device


def measured(engines: Engines) -> Measured:
    """Measure a head, and write `acceptance.json`, by which its engine begins, into its directory."""
    chains, chained = engines.fixed(CHAIN)
    bushes, bushed = engines.fixed(BUSH)
    acceptance = {
        heat: {"temper": round(chains[heat].temper(), 3), "levels": bushes[heat].levels() or [0.0]} for heat in HEATS
    }
    (engines.draft / FILE).write_text(json.dumps(acceptance, indent=2) + "\n", encoding="utf-8")
    plain, head, tokens, same, device = engines.against_plain(draft=engines.draft)
    plain_again, text, _, _, _ = engines.against_plain()
    same &= all([out.token_ids for out in outputs] == tokens for outputs in (chained, bushed))

    def of(rows: Sequence[int]) -> Kind:
        def total(each: list[float]) -> float:
            return sum(each[i] for i in rows)

        def a_round(outputs: list[RequestOutput]) -> float:
            rounds = sum(outputs[i].rounds for i in rows)
            return sum(outputs[i].mean_accepted * outputs[i].rounds for i in rows) / rounds if rounds else 1.0

        return Kind(
            len(rows), sum(len(tokens[i]) for i in rows), a_round(chained), a_round(bushed), total(plain) / total(head),
            total(plain_again) / total(text),
        )  # fmt: skip

    names = [prompt.kind for prompt in engines.prompts]
    kinds = {kind: of([i for i, name in enumerate(names) if name == kind]) for kind in dict.fromkeys(names)}
    kinds["all"] = of(range(len(tokens)))
    generated = sum(map(len, tokens))
    return Measured(kinds, acceptance, same, device, generated / sum(plain), generated / sum(head))
