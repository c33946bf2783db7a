"""``specrs generate --compare``: the same prompt with drafts and without, in pairs, and what drafts were worth.

A pair is a run of each, one right behind the other, in turns first. The ratio of a pair is plain time over speculative
time; the median of all pairs is told with the least and the greatest. Where nothing was drafted, both runs did the same
work, their ratio is noise, and none is told.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrs.engine import LLM, RequestOutput

PAIRS = 5


@dataclass
class Comparison:
    """Results of the pairs of runs.

    Attributes:
        speculative, plain: seconds of each pair's runs.
        outputs: outputs of the speculative runs.
        identical: true if every run gave the same tokens.
        adaptive: true if the cost model decides what is drafted.
    """

    tokens: int
    adaptive: bool
    identical: bool = True
    speculative: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def drafting_runs(self) -> int:
        """Speculative runs that verified a draft."""
        return sum(one.proposed > 0 for one in self.outputs)

    @property
    def ratios(self) -> list[float]:
        """Speed-up of the speculative run of each pair; empty if nothing was drafted."""
        return [p / s for p, s in zip(self.plain, self.speculative, strict=True)] if self.drafting_runs else []

    def line(self) -> str:
        """Return the comparison in a line for people."""
        same = f"tokens {'identical' if self.identical else 'DIFFERENT'}"
        plain = f"plain decoding: {self.tokens / statistics.median(self.plain):.0f} tokens/s"
        runs = len(self.outputs)
        if not self.drafting_runs:
            why = "no draft was worth its time; --tree K,S,V drafts whatever it costs" if self.adaptive else (
                "no source had a proposal"
            )  # fmt: skip
            return f"nothing was drafted in {runs} runs, so there is no speed-up to tell ({why}); {plain}; {same}"
        rounds, drafting = sum(o.rounds for o in self.outputs), sum(o.drafting_rounds for o in self.outputs)
        proposed, accepted = sum(o.proposed for o in self.outputs), sum(sum(o.drafted) for o in self.outputs)
        ratios = self.ratios
        return (
            f"{plain}; speculative: {self.tokens / statistics.median(self.speculative):.0f} tokens/s, "
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x in {runs} pairs); "
            f"drafted in {self.drafting_runs} of {runs} runs: {drafting} of {rounds} rounds, {accepted} of {proposed} "
            f"draft tokens accepted; {same}"
        )

    def record(self) -> dict[str, Any]:
        """Return the comparison as values for programs."""
        ratios = self.ratios
        return {
            "pairs": len(self.outputs), "drafting_runs": self.drafting_runs,
            "proposed": sum(o.proposed for o in self.outputs),
            "accepted": sum(sum(o.drafted) for o in self.outputs),
            "plain_seconds": [round(s, 6) for s in self.plain],
            "speculative_seconds": [round(s, 6) for s in self.speculative],
            "ratio": round(statistics.median(ratios), 4) if ratios else None,
            "ratios": [round(r, 4) for r in ratios], "identical": self.identical,
        }  # fmt: skip


def compare(llm: LLM, plain: LLM, prompt: str, output: RequestOutput) -> Comparison:
    """Both engines on a prompt that ``llm`` has run already, with the parameters and the seed of that ``output``."""
    found = Comparison(len(output.token_ids), llm.config.adaptive)

    def timed(engine: LLM) -> tuple[float, RequestOutput]:
        began = time.perf_counter()
        [again] = engine.generate([prompt], output.params)
        seconds = time.perf_counter() - began
        found.identical &= again.token_ids == output.token_ids
        return seconds, again

    timed(plain)  # the other engine has run the prompt before, too, and keeps its prefix
    for pair in range(PAIRS):
        for engine in (llm, plain) if pair % 2 == 0 else (plain, llm):
            seconds, again = timed(engine)
            if engine is llm:
                found.speculative.append(seconds)
                found.outputs.append(again)
            else:
                found.plain.append(seconds)
    return found


def why_plain(no_draft: bool, drafters: str | None) -> str:
    """Return the reason why an engine decodes plainly, from the options given: ``--no-draft``, ``--drafters``."""
    if no_draft:
        return "--no-draft decodes plainly"
    if drafters is not None:
        return f"--drafters {drafters!r} names no source of drafts"
    return "this model has recurrent layers, which are decoded plainly"
