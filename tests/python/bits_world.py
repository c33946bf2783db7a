"""Requests to an engine on a GPU, and the bits of all logits that decide their tokens, held against plain ones."""

from __future__ import annotations

import random
from typing import Any

import torch

from modelzoo import Pair
from specrs import LLM, SamplingParams
from specrs.engine.devices.launched import LaunchedRound
from specrs.engine.request.batch import Batch

SAMPLED: dict[str, Any] = {
    "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1,
}  # fmt: skip
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}  # needs nothing that the host has to say again each round
PARAMS = {"greedy": {"temperature": 0.0}, "sampled": SAMPLED, "drawn": DRAWN}
Bits = dict[tuple[int, int], bytes]


def requests(seed: int, kind: str, long: int = 70) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of mixed lengths, of which some share prefixes."""
    rng = random.Random(seed)
    stem = [rng.randrange(8) for _ in range(long)]
    prompts = [stem[: rng.choice([0, 5, 33, long])] + [rng.randrange(8) for _ in range(rng.randrange(1, 20))]
               for _ in range(5)]  # fmt: skip
    return prompts, [SamplingParams(max_tokens=rng.choice([2, 17, 40]), seed=i, **PARAMS[kind]) for i in range(5)]


def recorded(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], Bits, list[Any]]:
    """Tokens, the logits that decided each of them by request and position, and the accepted paths."""
    executor: Any = llm._runner.executor
    seen: Bits = {}
    last: list[torch.Tensor] = []
    paths: list[Any] = []
    logits_of, prefill, decode, verify = executor._logits, executor.prefill, executor.decode, executor.verify
    launch = executor.launch
    base = llm._next_id

    def note(request: int, position: int, row: torch.Tensor) -> None:
        bits = row.numpy().tobytes()
        assert seen.setdefault((request - base, position), bits) == bits, "a position decided twice, by other bits"

    def logits(*args: Any) -> Any:
        found = logits_of(*args)
        last[:] = [found[0]]
        return found

    def prefilled(batch: Batch, counts: Any, drawing: Any) -> Any:
        done = prefill(batch, counts, drawing)
        for j, i in enumerate(drawing):
            r = batch.requests[i]
            note(r.request_id, len(r.tokens) - 1, last[0][j])
        return done

    def accepted(run: Any) -> Any:
        def passed(batch: Batch, *args: Any) -> Any:
            done = run(batch, *args)
            if isinstance(done, LaunchedRound):
                last[:] = [done.bucket.logits[: done.starts[-1]].cpu()]
            for r, start, first, path in zip(batch, batch.lens, done.starts, done.accepts.paths, strict=False):
                paths.append(path)
                for k, node in enumerate(path):
                    note(r.request_id, start + k, last[0][first + node])
            return done

        return passed

    def launched(before: LaunchedRound, rounds: int, levels: int) -> Any:
        """Of a round behind one that is not collected, before the next one overwrites its logits: 1, also in a loop."""
        done = launch(before, 1, levels)
        if done is not None:
            ahead.append(done)
            found, tree = done.bucket.collect(done.number), done.variant.levels > 0
            bits = done.bucket.logits.cpu()
            for r, seat in zip(done.batch, done.seats, strict=True):
                begin, end = found["offsets"][seat : seat + 2].tolist()
                first = int(found["tree_offsets"][seat]) if tree else seat
                paths.append(found["paths"][begin:end].tolist())
                for k, node in enumerate(paths[-1]):
                    note(r.request_id, int(found["lens"][seat]) + k, bits[first + node])
        return done

    ahead: list[LaunchedRound] = []
    executor._logits, executor.prefill = logits, prefilled
    executor.decode, executor.verify, executor.launch = accepted(decode), accepted(verify), launched
    try:
        outputs = llm.generate(prompts, params)
    finally:
        for name in ("_logits", "prefill", "decode", "verify", "launch"):
            delattr(executor, name)  # the class's own are back, and nothing refers to itself
    if executor_runs_ahead(llm, params):
        assert ahead, "no round was launched before the last one was collected"
        assert any(done.variant.loop for done in ahead) == (llm.config.graphs == "loop")
    llm.audit()
    ends = {i: len(p) + len(o.token_ids) - 1 for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))}
    # If an accepted path runs past the end of its request, the tokens behind the end decided nothing.
    return [o.token_ids for o in outputs], {k: v for k, v in seen.items() if k[1] < ends[k[0]]}, paths


def executor_runs_ahead(llm: LLM, params: list[SamplingParams]) -> bool:
    """Return whether nothing keeps a GPU from launching rounds ahead: no penalties, cost model or trees of the host,
    requests that last."""
    free = not any(p.repetition_penalty for p in params) and max(p.max_tokens or 0 for p in params) > 20
    drafts = llm._runner.executor.drafts
    free = free and not (drafts is not None and drafts.visible)
    return free and llm.config.graphs != "off" and not llm.config.adaptive and llm.device.startswith("cuda")


def plain(pair: Pair, prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> tuple[Any, Bits]:
    """Run the requests one by one, without draft, prefix cache or chunks."""
    tokens, bits = [], {}
    with LLM(
        pair.target, speculative=False, device="cuda", max_batch=1, prefix_cache=False, prefill_chunk=8192, **options
    ) as llm:
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            [out], seen, _ = recorded(llm, [prompt], [one])
            tokens.append(out)
            bits |= {(i, position): row for (_, position), row in seen.items()}
    return tokens, bits


def check(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], want: tuple[Any, Bits]) -> list[Any]:
    tokens, bits, paths = recorded(llm, prompts, params)
    assert tokens == want[0]
    assert bits.keys() == want[1].keys()
    differ = [key for key in bits if bits[key] != want[1][key]]
    assert not differ, f"{len(differ)} of {len(bits)} rows of logits differ, first (request, position) {min(differ)}"
    return paths
