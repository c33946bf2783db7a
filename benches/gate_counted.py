"""What the default of speculation costs and brings, counted instead of timed: real requests, priced passes.

Each pass of the engine is priced by a table that was measured on a quiet machine, and the engine's clock shows the sum
of the prices, so that neither a noisy neighbour nor a throttled core enters: the figures repeat to the last digit. Left
out is what Python spends beside the passes of a request that does not draft, about 6 us a round.
"""

from __future__ import annotations

from typing import Any

import specrs.engine.speculation as speculation_module
from gate_texts import KINDS
from specrs import LLM, SamplingParams
from specrs.engine.costs import PLAIN, SPECULATIVE, Costs, PassCost

ROWS = (1, 2, 4, 8, 16, 32, 64)
# Milliseconds on a quiet machine of two cores, one thread, the model in the package.
TABLE = {
    "target": (1.518, 1.650, 1.850, 2.420, 4.602, 9.294, 16.548),
    "draft_step": (0.237, 0.250, 0.266, 0.348, 0.646, 1.170, 2.147),
    "draft_extend": (0.324, 0.324, 0.324, 0.361, 0.461, 0.690, 1.134),
}
BESIDE = (0.1, 0.3)  # milliseconds of a plain round, and of one that drafts, beside its passes


class Frozen(PassCost):
    """A table that nothing moves."""

    def observe(self, rows: int, seconds: float) -> None:
        """Take no notice."""


class Counter:
    """The sum of prices of the passes that an engine has run; its clock."""

    def __init__(self, llm: LLM) -> None:
        self.seconds = 0.0
        runner: Any = llm._runner
        tables = {name: Frozen(ROWS, [ms / 1e3 for ms in row]) for name, row in TABLE.items()}
        overhead = Frozen([PLAIN, SPECULATIVE], [ms / 1e3 for ms in BESIDE])
        self.costs = runner.speculation.policy.costs = Costs(**tables, overhead=overhead)
        self._price(runner.executor.target, "forward", lambda n, _: self.costs.target.at(n))
        head, step, extend = runner.executor.drafts.head, self.costs.draft_step, self.costs.draft_extend
        self._price(head, "step", lambda n, _: step.at(n))
        self._price(head, "write", lambda n, _: extend.at(n))
        # What Python spends beside the passes of a round.
        speculation = runner.speculation
        for name, ms in (("plain_round", BESIDE[0]), ("spec_round", BESIDE[1])):
            self._charge(speculation, name, ms / 1e3)
        # Logits of all rows, where none are named: what a look back asks for.
        self._price(head, "extend", lambda n, rows: extend.at(n) + (step.at(n) - step.at(1) if rows is None else 0.0))

    def _price(self, owner: Any, name: str, price: Any) -> None:
        run = getattr(owner, name)

        def counted(tokens: Any, *args: Any) -> Any:
            self.seconds += price(len(tokens), args[3] if len(args) > 3 else None)
            return run(tokens, *args)

        setattr(owner, name, counted)

    def _charge(self, owner: Any, name: str, seconds: float) -> None:
        run = getattr(owner, name)

        def charged(*args: Any) -> Any:
            self.seconds += seconds
            return run(*args)

        setattr(owner, name, charged)

    def perf_counter(self) -> float:
        """The engine's clock."""
        return self.seconds


def counted(lengths: list[int], temperatures: list[float]) -> dict[str, Any]:
    """Ratios of plain decoding's price to that of the default, for each kind of text, temperature and length."""
    module: Any = speculation_module  # whose clock this replaces
    llm = LLM(max_batch=1, max_context_len=1024, prefix_cache=False)
    counter = Counter(llm)
    clock, module.time = module.time, counter
    rows: dict[str, Any] = {}
    try:
        for length in lengths:
            for temperature in temperatures:
                for kind, prompts in KINDS.items():
                    took, plain, each = 0.0, 0.0, []
                    for seed, prompt in enumerate(prompts):
                        params = SamplingParams(
                            max_tokens=length, temperature=temperature, top_p=1.0, seed=seed, ignore_eos=True
                        )
                        started = counter.seconds
                        [out] = llm.generate([prompt], params)
                        seconds = counter.seconds - started
                        alone = counter.costs.target.at(out.usage.prompt_tokens) + (length - 1) * counter.costs.plain(1)
                        took, plain = took + seconds, plain + alone
                        each.append(round(alone / seconds, 3))
                    name = f"{kind}, T={temperature:g}, {length} tokens"
                    rows[name] = {"ratio": round(plain / took, 4), "requests": each}
                    print(f"counted: {name}: {rows[name]['ratio']:.3f}  {each}", flush=True)
    finally:
        module.time = clock
    worst = min(rows, key=lambda name: rows[name]["ratio"])
    return {"table_ms": TABLE, "worst": {"row": worst, "ratio": rows[worst]["ratio"]}, "rows": rows}
