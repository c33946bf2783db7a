"""Prompts from lines of JSON, and outputs as lines of JSON.

A line of prompts is a text, or an object with ``prompt`` (a text), ``prompt_token_ids`` (a list) or ``messages`` (a
conversation, by the model's chat template); ``id``, which its outputs repeat; and any field of `SamplingParams`, which
goes before the command line's.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from specrs import progress
from specrs._specrs import ConfigError, SpecrsError
from specrs.cli import options
from specrs.cli.terminal import read_stdin

if TYPE_CHECKING:
    import argparse

    from specrs.engine import LLM, RequestOutput
    from specrs.sampling_params import SamplingParams

_T = TypeVar("_T")
_KINDS = ("prompt", "prompt_token_ids", "messages")
_WAITING = 4  # batches that wait for the one that runs: a file of any length takes no more memory than these


@dataclass(frozen=True)
class Asked:
    """One line of prompts."""

    line: int
    kind: str
    prompt: Any
    params: SamplingParams
    id: Any = None

    def told(self) -> dict[str, Any]:
        """Return the fields that the outputs of the line begin with."""
        return {"line": self.line, **({} if self.id is None else {"id": self.id})}


@dataclass
class Totals:
    """Totals over all lines."""

    ended: int = 0
    failed: int = 0
    tokens: int = 0
    rounds: int = 0
    yielded: float = 0.0

    def add(self, output: RequestOutput) -> None:
        """Count an output."""
        self.ended += 1
        self.failed += output.error is not None
        self.tokens += len(output.token_ids)
        self.rounds += output.rounds
        self.yielded += output.mean_accepted * output.rounds


def read(name: str, args: argparse.Namespace) -> list[Asked]:
    """Every line of a file, or of stdin for ``"-"``; empty lines are left out.

    Raises:
        ConfigError: a line that is no prompt, by its number; a file without prompts.
    """

    def asked(number: int, kind: str, fields: dict[str, Any]) -> Asked:
        prompt, name = fields.pop(kind), fields.pop("id", None)
        return Asked(number, kind, prompt, options.sampling_of(args, **fields), name)

    return each(name, asked)


def each(name: str, made: Callable[[int, str, dict[str, Any]], _T]) -> list[_T]:
    """Make something of each prompt of a file, or of stdin for ``"-"``.

    Args:
        made: called with a line's number, the field that has the prompt, and the fields that there are.

    Raises:
        ConfigError: a line that is no prompt, or of which nothing can be made, by its number; a file without prompts.
    """
    try:
        text = read_stdin() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{name}: not UTF-8: {e}") from None
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                found.append(made(number, *_fields(line)))
            except (ValueError, RecursionError) as e:  # a ConfigError is a ValueError
                raise ConfigError(f"{name}, line {number}: {e}") from None
    if not found:
        raise ConfigError(f"{name}: no prompts")
    return found


def _fields(line: str) -> tuple[str, dict[str, Any]]:
    """The field of a line that has the prompt, and all fields; of several ways to give a prompt, that one alone."""
    try:
        value = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"not JSON: {e}; a line is a text in quotes, or an object with 'prompt'") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"a JSON {type(value).__name__}: must be a text, or an object with 'prompt'")
    kinds = [kind for kind in _KINDS if value.get(kind) is not None]
    if len(kinds) != 1:
        raise ConfigError(f"{' and '.join(map(repr, kinds)) or 'no prompt'}: must have one of {', '.join(_KINDS)}")
    if kinds[0] == "prompt" and not isinstance(value["prompt"], str):
        raise ConfigError(f"prompt is a JSON {type(value['prompt']).__name__}: must be a text")
    return kinds[0], {key: field for key, field in value.items() if key not in _KINDS or key == kinds[0]}


class _Work:
    """Runs the lines of a file on an engine; outputs wait for those of earlier lines."""

    def __init__(self, llm: LLM, asked: Sequence[Asked], out: TextIO) -> None:
        self.totals = Totals()
        self._llm, self._out = llm, out
        self._todo, self._order = deque(asked), deque(one.line for one in asked)
        self._running: dict[int, Asked] = {}  # keyed by request
        self._parts: dict[int, list[str]] = {}  # by request: outputs so far, of which more are to come
        self._done: dict[int, list[str]] = {}  # by line: outputs, none of which is missing

    @property
    def ended(self) -> bool:
        """True if every output is written."""
        return not self._order

    def step(self) -> tuple[int, int]:
        """Begin as many lines as there is room for, step the engine, write what has ended. Returns the numbers of
        tokens that came, and of lines that ended."""
        before, tokens = len(self._order), 0
        while self._todo and len(self._running) < _WAITING * self._llm.config.max_batch:
            self._begin(self._todo.popleft())
        if self._running:
            for event in self._llm.step():
                tokens += len(event.token_ids)
                if event.output is not None:
                    self._end(event.request_id, event.output)
        while self._order and self._order[0] in self._done:
            print("\n".join(self._done.pop(self._order.popleft())), file=self._out)
        self._out.flush()
        return tokens, before - len(self._order)

    def _begin(self, one: Asked) -> None:
        try:
            prompt = self._llm.chat_prompt(one.prompt) if one.kind == "messages" else one.prompt
            request = self._llm.add(prompt, one.params)
        except SpecrsError as e:
            self.totals.failed += 1
            self._done[one.line] = [json.dumps({**one.told(), "error": str(e)})]
        else:
            self._running[request], self._parts[request] = one, []

    def _end(self, request: int, output: RequestOutput) -> None:
        one, parts = self._running[request], self._parts[request]
        self.totals.add(output)
        parts.append(json.dumps({**one.told(), **record_of(output)}, ensure_ascii=False))
        if len(parts) == output.params.n:
            self._done[one.line] = self._parts.pop(request)
            del self._running[request]


def run(llm: LLM, asked: Sequence[Asked], out: TextIO, log: TextIO) -> int:
    """Run every line and write its outputs in the order of the lines, as soon as those before have ended.

    A line that the engine refuses (a prompt beyond the context, a conversation that the template refuses), or that ends
    with an error, has an ``error`` in its output, and the others go on; the exit status is then 1.
    """
    began, work = time.perf_counter(), _Work(llm, asked, out)
    with progress.requests(len(asked), None) as tell:
        while not work.ended:
            tell(*work.step())
    totals, seconds = work.totals, time.perf_counter() - began
    line = (
        f"{len(asked)} prompts, {totals.failed} failed; {totals.tokens} tokens, {totals.tokens / seconds:.0f} tokens/s"
    )
    if totals.rounds and llm.speculative:
        line += f", {totals.yielded / totals.rounds:.2f} tokens a round"
    print(f"[on {llm.device}]\n[{line}]", file=log)
    return 1 if totals.failed else 0


def record_of(output: RequestOutput) -> dict[str, Any]:
    """An output as JSON has it."""
    record: dict[str, Any] = {
        "index": output.index, "prompt": output.prompt, "text": output.text, "token_ids": output.token_ids,
        "finish_reason": output.finish_reason, "stop_reason": output.stop_reason,
        "usage": {"prompt_tokens": output.usage.prompt_tokens, "completion_tokens": output.usage.completion_tokens,
                  "cached_tokens": output.usage.cached_tokens},
        "sampling": str(output.params), "seed": output.seed, "seconds": round(output.seconds, 6),
        "rounds": output.rounds, "drafting_rounds": output.drafting_rounds, "proposed": output.proposed,
        "accepted": sum(output.drafted), "mean_accepted": round(output.mean_accepted, 4),
    }  # fmt: skip
    if output.error is not None:
        record["error"] = str(output.error)
    if output.logprobs is not None:
        record["logprobs"] = [{str(token): p.logprob for token, p in each.items()} for each in output.logprobs]
    return record
