"""Text that the model writes itself, which is what its head will draft: answers to the user's prompts, and
continuations of beginnings that are cut from the user's text. Half of it is greedy, half as the model is sampled by
default."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specrs._specrs import ConfigError
from specrs.sampling_params import SamplingParams
from specrs.train.documents import Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specrs.engine import LLM, StreamEvent

_WAITING = 2  # batches of requests that an engine has at once
_HOPELESS = 1000  # prompts that are refused one after another
_CHARACTERS = 12  # of a text, enough for a token


@dataclass(frozen=True)
class Prompt:
    """A prompt of a kind; its content is what `LLM.generate` takes, or ``{"messages": [...]}``."""

    kind: str
    content: Any
    held_out: bool = False


@dataclass(frozen=True)
class Answer:
    """Tokens of a prompt and its answer."""

    kind: str
    tokens: list[int]
    held_out: bool


def beginnings(documents: Sequence[Document[str]], tokenizer: Tokenizer, longest: int, seed: int) -> Iterator[Prompt]:
    """Yield beginnings of documents, and of lines in them, of 4 to ``longest`` tokens, without end; short ones are as
    frequent as long ones."""
    rng = np.random.default_rng(seed)
    while documents:
        for i in rng.permutation(len(documents)):
            text, count = documents[i].content, int(np.exp(rng.uniform(np.log(4), np.log(max(longest, 5)))))
            lines = [line.end() for line in re.finditer("\n", text[: -4 * count])]
            start = int(rng.choice(lines)) if lines and rng.random() < 0.7 else 0
            ids = tokenizer.encode(text[start : start + _CHARACTERS * count]).ids
            if ids:
                yield Prompt(documents[i].kind, {"prompt_token_ids": ids[:count]})


class Writer:
    """Has an engine answer prompts until something ends it.

    Attributes:
        refused: prompts that the engine refused, and the first reason.
    """

    def __init__(self, llm: LLM, most: int, seed: int) -> None:
        self.refused: list[str] = []
        self._llm, self._most, self._seed = llm, most, seed

    def write(self, prompts: Iterator[Prompt], ended: Callable[[int], bool]) -> list[Answer]:
        """Answer prompts in turn.

        Args:
            ended: True once no further answer is wanted, by the number of tokens that there are.

        Raises:
            ConfigError: the engine refuses every prompt.
        """
        running, found = dict[int, Prompt](), list[Answer]()
        tokens, asked = 0, 0
        room = _WAITING * self._llm.config.max_batch

        def keep(event: StreamEvent | None) -> None:
            nonlocal tokens
            if event is not None and (out := event.output) is not None:
                prompt = running.pop(event.request_id)
                tokens += len(out.token_ids)
                if out.token_ids:
                    found.append(Answer(prompt.kind, out.prompt_token_ids + out.token_ids, prompt.held_out))

        while not ended(tokens):
            while len(running) < room and (running or len(self.refused) < _HOPELESS):
                if (prompt := next(prompts, None)) is None:
                    break
                self._begin(prompt, asked, running)
                asked += 1
            if not running:
                break
            for event in self._llm.step():
                keep(event)
        for request in [*running]:  # an answer that was not finished is text of the model, too
            keep(self._llm.abort(request))
        if asked and len(self.refused) == asked:
            raise ConfigError(f"prompts: all {asked} are refused, the first with: {self.refused[0]}")
        return found

    def _begin(self, prompt: Prompt, index: int, running: dict[int, Prompt]) -> None:
        params = SamplingParams(max_tokens=self._most, seed=self._seed + index)
        if index % 2 == 0:
            params = replace(params, temperature=0.0)
        try:
            running[self._llm.add(content_of(self._llm, prompt), params)] = prompt
        except ConfigError as e:
            self.refused.append(str(e))


def content_of(llm: LLM, prompt: Prompt) -> Any:
    """Return a prompt as the engine takes it."""
    content = prompt.content
    if isinstance(content, dict) and "messages" in content:
        return llm.chat_prompt(content["messages"])
    return content
