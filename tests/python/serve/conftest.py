"""One engine for all tests of the server: the small model in the package."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from serve_world import Running, running
from specrs import LLM
from specrs.engine import AsyncLLM

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="session")
def plain() -> Iterator[LLM]:
    """An engine that is asked directly."""
    with LLM(max_batch=8, max_context_len=512) as llm:
        yield llm


@pytest.fixture(scope="session")
def engine() -> Iterator[AsyncLLM]:
    """Make the engine as `specrs serve` does: in a process of its own."""
    made = AsyncLLM(process=True, max_batch=8, max_context_len=512, max_waiting=64)
    yield made
    asyncio.run(made.aclose(drain=False))


@pytest.fixture(scope="session")
def web(engine: AsyncLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server, without keys."""
    with running(engine, tmp_path_factory.mktemp("web"), max_waiting=64, max_prompts=32) as made:
        yield made
        made.idle()
