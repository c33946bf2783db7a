"""What an engine's process and the one that started it say to each other: pickles over a pair of sockets.

Both are processes of one program, and nobody else has the sockets. Requests go one way as `Add`, `Abort`, `Audit` and
`Shutdown`; the other way comes a `Turn` for each step, small enough that an engine of hundreds of streams need not
notice it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specrs._specrs import SpecrsError
from specrs.backends import BACKENDS, Capabilities
from specrs.engine.request import StreamEvent
from specrs.engine.worker import News, Step

if TYPE_CHECKING:
    from specrs.engine.budget import Budget
    from specrs.engine.config import EngineConfig
    from specrs.engine.llm import LLM
    from specrs.engine.stats import EngineStats
    from specrs.sampling_params import ResolvedSampling, SamplingParams

_Error = TypeVar("_Error", bound=BaseException)
_Plain = tuple[int, int, int, list[int], list[tuple[str, bool]]]
"""Of an event that is tokens and their text alone: key, request, index, tokens, pieces."""


@dataclass(frozen=True)
class Start:
    """The engine that is wanted.

    Attributes:
        options: as `LLM` takes them, ``model`` and ``draft`` among them.
        threads: of the CPU kernels.
        torch_threads: of torch.
    """

    options: Mapping[str, Any]
    threads: int
    torch_threads: int


@dataclass(frozen=True)
class Facts:
    """What never changes of an engine; each as `LLM` has it.

    Attributes:
        directory: of the model's files.
        name: of the engine, for people.
        config: its attention backend by name, and without drafters that are objects: those are the process's own.
    """

    directory: Path
    name: str
    config: EngineConfig
    vocab_size: int
    default_sampling: ResolvedSampling
    stated_sampling: SamplingParams
    numerics: dict[str, Any]
    device: str
    budget: Budget | None
    speculative: bool
    max_tokens_per_round: int

    @classmethod
    def of(cls, llm: LLM) -> Facts:
        """Of an engine whose model came from files."""
        name = Capabilities.of(llm.config.backend).name
        drafters = llm.config.drafters
        config = replace(
            llm.config, attention_backend=name if name in BACKENDS else "native",
            drafters=drafters and [one for one in drafters if isinstance(one, str)],
        )  # fmt: skip
        return cls(
            directory=llm._chats.directory, name=repr(llm), config=config, vocab_size=llm.vocab_size,
            default_sampling=llm.default_sampling, stated_sampling=llm.stated_sampling, numerics=llm.numerics,
            device=llm.device, budget=llm.budget, speculative=llm.speculative,
            max_tokens_per_round=llm.max_tokens_per_round,
        )  # fmt: skip


@dataclass(frozen=True)
class Ready:
    """The engine is there."""

    facts: Facts
    stats: EngineStats


@dataclass(frozen=True)
class Refused:
    """The engine cannot be made."""

    error: BaseException


@dataclass(slots=True)
class Turn:
    """What one turn of the engine's thread gave.

    Attributes:
        news: as `packed` has them.
        stats, steps, last_step, fatal: as the `Worker` has them.
        live: requests that have not ended.
        made: the step that it made, where it read or wrote a token.
    """

    news: list[News | _Plain]
    stats: EngineStats
    steps: int
    last_step: float
    fatal: BaseException | None
    live: int
    made: list[Step]


def packed(news: Iterable[News]) -> list[News | _Plain]:
    """News as they travel: most are tokens and their text, and tuples are several times quicker than objects."""
    found: list[News | _Plain] = []
    for one in news:
        event = one.event
        bare = one.times is None and not one.last and event is not None and event.output is None
        if bare and event is not None and event.logprobs is None and not event.rounds:
            found.append((one.key, event.request_id, event.index, event.token_ids, event.pieces))
            continue
        if one.error is not None:
            one.error = portable(one.error)
        found.append(one)
    return found


def unpacked(news: Sequence[News | _Plain]) -> list[News]:
    """What `packed` was given."""
    found = []
    for one in news:
        if isinstance(one, tuple):
            key, request, index, tokens, pieces = one
            one = News(key, event=StreamEvent(request, tokens, pieces, index=index))
        found.append(one)
    return found


def portable(error: _Error) -> _Error:
    """An error that another process can read: itself, or where it cannot travel, what it is a kind of."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    for kind in type(error).__mro__[1:]:
        if issubclass(kind, SpecrsError) and kind.__module__ == SpecrsError.__module__:
            return kind(str(error))  # type: ignore[return-value]
    return RuntimeError(f"{type(error).__name__}: {error}")  # type: ignore[return-value]


def dumps(message: object) -> bytes:
    """As it travels."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


loads = pickle.loads
