"""Prompts as users give them: texts, token ids, a mapping with either, conversations; and the tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.chat import TOKENIZER_CONFIG, ChatTemplates, Messages, conversations
from specrs.chat.files import read_json, tokenizer_config
from specrs.engine.request.added_tokens import add_tokens, eos_of
from specrs.engine.request.request import TokenizedPrompt
from specrs.models import LiveModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any] | TokenizedPrompt

_KEYS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class Given:
    """A prompt taken apart: its text, its tokens, or both, where the tokens count."""

    text: str | None
    ids: list[int] | None

    @classmethod
    def of(cls, prompt: object, where: str) -> Given:
        """A text, a list or an array of integers, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, a
        `TokenizedPrompt`.

        Raises:
            ConfigError: anything else; ``where`` is what the message calls it.
        """
        if isinstance(prompt, str):
            return cls(prompt, None)
        if isinstance(prompt, TokenizedPrompt):
            return cls(prompt.text, _token_ids(prompt.token_ids, where))
        if not isinstance(prompt, Mapping):
            return cls(None, _token_ids(prompt, where))
        for key in prompt:
            if key not in _KEYS:
                kind, known = type(prompt).__name__, ", ".join(_KEYS)
                raise ConfigError(f"{where} is a {kind} with {key!r}: supported are {known}")
        text, ids = (prompt.get(key) for key in _KEYS)
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"{where}['prompt'] is a {type(text).__name__}: must be a text")
        if text is None and ids is None:
            raise ConfigError(f"{where} = {dict(prompt)!r}: must have 'prompt' or 'prompt_token_ids'")
        return cls(text, None if ids is None else _token_ids(ids, f"{where}['prompt_token_ids']"))


def check_text(text: str, where: str) -> None:
    """Refuse a text that no tokenizer takes: half of a surrogate pair stands for no character.

    Raises:
        ConfigError: the text cannot be encoded as UTF-8; the message names the place by ``where``.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ConfigError(f"{where}: not encodable as UTF-8 at character {e.start}: {e.reason}") from None


def truncated(ids: list[int], keep: int | None, room: int) -> list[int]:
    """Return the last ``keep`` tokens of a prompt; -1: as many as leave ``room``, at least one. ``None`` keeps all."""
    if keep is None:
        return ids
    return ids[-(max(room, 1) if keep < 0 else keep) :]


def spellings(tokenizer: Tokenizer, words: Sequence[str], vocab: int) -> list[tuple[int, ...]]:
    """Return the token ids of ``bad_words``, each as it is and behind a space, at the beginning of a text and within
    one. Spellings with a token that the model lacks can never come and are left out.

    Raises:
        ConfigError: a word of which the tokenizer makes no tokens, or that is not encodable.
    """

    def encoded(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    found: list[tuple[int, ...]] = []
    line = encoded("\n")
    for word in words:
        check_text(word, f"SamplingParams.bad_words: {word!r}")
        for text in (word, " " + word.lstrip(" ")):
            ids = encoded(text)
            if not ids:
                raise ConfigError(f"SamplingParams.bad_words: {text!r} has no tokens")
            found.append(ids)
            # Tokenizers of the sentencepiece kind begin a text with a space, which it does not have behind another one.
            within = encoded(f"\n{text}")
            if within[: len(line)] == line and len(within) > len(line):
                found.append(within[len(line) :])
    return [ids for ids in dict.fromkeys(found) if max(ids) < vocab]


Encode = Callable[[str, str], list[int]]
"""Tokens of a text that has its special tokens already; and what errors call it."""


class Chats:
    """Conversations with one model. Any thread may call it at any time."""

    def __init__(self, model: Path | LiveModel) -> None:
        self._model = model
        self._templates: ChatTemplates | None = None

    @property
    def directory(self) -> Path:
        """Directory of the model's files.

        Raises:
            ConfigError: the model has no directory, since it is in memory.
        """
        if isinstance(self._model, LiveModel):
            raise ConfigError(f"model = {self._model.name!r}: is in this process's memory, which another one lacks")
        return self._model

    @property
    def templates(self) -> ChatTemplates:
        """The model's templates, read once they are asked for."""
        if self._templates is None:
            model = self._model
            if isinstance(model, LiveModel):
                self._templates = ChatTemplates.of_config(Path(model.name), model.files.get(TOKENIZER_CONFIG, {}))
            else:
                self._templates = ChatTemplates.of(model)
        return self._templates

    def prompt(
        self, messages: Messages, options: Mapping[str, Any], encode: Encode, where: str = "messages"
    ) -> TokenizedPrompt:
        """Make a prompt of one conversation, by options of `ChatTemplates.render`."""
        text = self.templates.render(messages, where=where, **options)
        return TokenizedPrompt(text, encode(text, where))

    def prompts(
        self, messages: Messages | Sequence[Messages], options: Mapping[str, Any], encode: Encode
    ) -> list[TokenizedPrompt]:
        """Make a prompt of one conversation, or of each of a list."""
        return [self.prompt(chat, options, encode, where) for chat, where in zip(*conversations(messages), strict=True)]


def load_tokenizer(model: Path | LiveModel) -> Tokenizer | None:
    """Load the tokenizer of a model, with the tokens that only files beside ``tokenizer.json`` have; ``None`` where the
    model has none.

    Prompts are never cut or filled up, whatever the file says: the tokenizer is shared by threads, and such settings
    would be changed under them.

    Raises:
        ConfigError: ``tokenizer.json`` is malformed; or a file beside it is, or has an invalid token.
    """
    if isinstance(model, LiveModel):
        return model.tokenizer
    path = model / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.json: {e}") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = tokenizer_config(model)
    add_tokens(tokenizer, config, read_json(model / "added_tokens.json"))
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    return tokenizer


def load_eos(model: Path | LiveModel, tokenizer: Tokenizer | None) -> int | None:
    """Return the token that ends a text by the tokenizer's own files; for some chat models they alone name the end of a
    turn. ``None`` where they name none. The model may lack the token.

    Raises:
        ConfigError: the same errors as of `load_tokenizer`.
    """
    if tokenizer is None:
        return None
    if isinstance(model, LiveModel):
        return eos_of(tokenizer, model.files.get(TOKENIZER_CONFIG, {}))
    return eos_of(tokenizer, tokenizer_config(model))


def _token_ids(prompt: object, where: str) -> list[int]:
    """A prompt that is no text: a list or an array of integers."""
    try:
        if isinstance(prompt, (str, bytes, Mapping, Set)):
            raise TypeError
        tokens = iter(prompt)  # type: ignore[call-overload]
    except TypeError:  # an array without an axis has the method too, and raises this
        why = "must be a text or a sequence of token ids"
        raise ConfigError(f"{where} is a {type(prompt).__name__}: {why}") from None
    ids = []
    for i, token in enumerate(tokens):
        try:
            if isinstance(token, bool):
                raise TypeError
            ids.append(operator.index(token))  # numpy's and torch's integers too
        except TypeError:
            raise ConfigError(f"{where}[{i}] = {token!r}: must be a token id") from None
    return ids
