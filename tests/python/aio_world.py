"""Parts that tests of `AsyncLLM` share: an engine's options, requests, and a loop in which nothing may hang."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from modelzoo import VOCAB
from specrs import SamplingParams

OPTIONS: dict[str, Any] = {"tree": (3, 3, 9), "max_batch": 6, "page_size": 4, "prefill_chunk": 16}


def run(work: Callable[[], Coroutine[Any, Any, Any]], limit: float = 240.0) -> Any:
    """Run in a fresh loop; work that hangs fails."""
    return asyncio.run(asyncio.wait_for(work(), limit))


def prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def params(count: int, seed: int, most: int = 30) -> list[SamplingParams]:
    rng = random.Random(seed)
    heat = (0.0, 0.7, 1.3)
    return [SamplingParams(max_tokens=rng.randint(1, most), temperature=rng.choice(heat), seed=i) for i in range(count)]


def clean(audit: dict[str, int]) -> None:
    assert audit["sequences"] == audit["leased_sequences"] == audit["held_pages"] == 0
