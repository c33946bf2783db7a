"""Messages between an engine's process and the one that started it: pickles over a pair of sockets.

Both are processes of one program, and nobody else has the sockets. Requests go one way as `Sealed`, `Abort`, `Audit`
and `Shutdown`; the other way comes a `Turn` for each step, small enough that an engine of hundreds of streams need not
notice it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs._specrs import SpecrsError
from specrs.backends import BACKENDS, Capabilities
from specrs.engine.loops.worker import Add, News, Step
from specrs.engine.request.request import StreamEvent, TokenizedPrompt

if TYPE_CHECKING:
    from specrs.engine.config import EngineConfig
    from specrs.engine.devices.memory_plan import Budget
    from specrs.engine.llm import LLM
    from specrs.engine.rounds.stats import EngineStats
    from specrs.sampling_params import ResolvedSampling, SamplingParams

_KNOWN = ("specrs", "builtins", "torch")  # packages whose errors both processes have
_Bare = tuple[int, int, int, list[int], list[tuple[str, bool]]]
"""An event that is tokens and their text alone, as a tuple: key, request, index, tokens, pieces."""


@dataclass(frozen=True)
class Start:
    """The engine that is wanted.

    Attributes:
        options: options as `LLM` takes them, ``model`` and ``draft`` among them.
        threads: threads of the CPU kernels.
        torch_threads: threads of torch.
    """

    options: Mapping[str, Any]
    threads: int
    torch_threads: int


@dataclass(frozen=True)
class Facts:
    """Facts of an engine that never change; each as `LLM` has it.

    Attributes:
        directory: directory of the model's files.
        name: name of the engine, for people.
        config: configuration of the engine, with the attention backend by name, and without drafters that are objects:
            those stay in the engine's process.
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
        """Take the facts of an engine whose model came from files."""
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

    error: Told


@dataclass(slots=True)
class Turn:
    """Results of one turn of the engine's thread.

    Attributes:
        news: news in the form that `packed` returns.
        stats, steps, last_step, fatal: the fields of the `Worker` of these names.
        made: the step that it made, where it read or wrote a token.
    """

    news: list[News | _Bare]
    stats: EngineStats
    steps: int
    last_step: float
    fatal: Told | None
    made: list[Step]


@dataclass(frozen=True)
class Sealed:
    """An `Add` whose prompt and parameters the other process may not be able to read: then only this request fails."""

    key: int
    submitted: float
    data: bytes

    @classmethod
    def of(cls, add: Add) -> Sealed:
        """Raises what pickling raises."""
        return cls(add.key, add.submitted, dumps((_unadorned(add.prompt), add.params)))

    def opened(self) -> Add:
        """Raises what reading a pickle raises, which may be anything."""
        prompt, params = loads(self.data)
        return Add(self.key, prompt, params, self.submitted)


def _unadorned(prompt: Any) -> Any:
    """A prompt without types of the caller's own, which the other process may not have."""
    if isinstance(prompt, str):
        return str.__str__(prompt)
    if isinstance(prompt, TokenizedPrompt):
        return TokenizedPrompt(_unadorned(prompt.text), _unadorned(prompt.token_ids))
    if isinstance(prompt, (list, tuple)):
        return list(prompt)
    if isinstance(prompt, Mapping):
        return {_unadorned(key): _unadorned(value) for key, value in prompt.items()}
    return prompt


@dataclass(frozen=True)
class Told:
    """An error as it travels: its type, made without the constructor, whose arguments are unknown."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]
    cause: Told | None

    @classmethod
    def of(cls, error: BaseException, causes: int = 3) -> Told:
        """Itself; where the other process could not read it, the nearest of its types that is specrs' own, or else a
        RuntimeError of its text."""
        cause = error.__cause__
        told = cls.of(cause, causes - 1) if cause is not None and causes else None
        for kind in type(error).__mro__[:-1]:
            if kind.__module__.partition(".")[0] not in _KNOWN:
                continue
            for args, state in ((error.args, vars(error)), ((str(error),), {})):
                if kind is not type(error) and (state or not issubclass(kind, SpecrsError)):
                    continue
                found = cls(kind, args, dict(state), told)
                try:
                    loads(dumps(found)).error()
                    return found
                except Exception:
                    continue
        return cls(RuntimeError, (f"{type(error).__name__}: {error}",), {}, told)

    def error(self) -> BaseException:
        """The error again."""
        made = self.kind.__new__(self.kind, *self.args)
        made.args = self.args
        made.__dict__.update(self.state)
        made.__cause__ = None if self.cause is None else self.cause.error()
        return made


def packed(news: Iterable[News]) -> list[News | _Bare]:
    """News as they travel: most are tokens and their text, and go as tuples, which pickle quicker."""
    found: list[News | _Bare] = []
    for one in news:
        event = one.event
        bare = one.times is None and not one.last and event is not None and event.output is None
        if bare and event is not None and event.logprobs is None and not event.rounds:
            found.append((one.key, event.request_id, event.index, event.token_ids, event.pieces))
            continue
        if one.error is not None:
            one.error = Told.of(one.error)  # type: ignore[assignment]
        found.append(one)
    return found


def unpacked(news: Sequence[News | _Bare]) -> list[News]:
    """Return the news that `packed` was given."""
    found = []
    for one in news:
        if isinstance(one, tuple):
            key, request, index, tokens, pieces = one
            one = News(key, event=StreamEvent(request, tokens, pieces, index=index))
        elif isinstance(one.error, Told):
            one.error = one.error.error()
        found.append(one)
    return found


def dumps(message: object) -> bytes:
    """Return a message in the form in which it travels."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


loads = pickle.loads
