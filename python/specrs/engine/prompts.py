"""What a request begins with: the model's tokenizer, and conversations as its chat template writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.chat import ChatTemplates, Messages, conversations
from specrs.engine.request import TokenizedPrompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = str | Sequence[int] | TokenizedPrompt


Encode = Callable[[str, str], list[int]]
"""Tokens of a text that has its special tokens already; and what errors call it."""


class Chats:
    """Conversations with one model. Any thread may call it at any time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._templates: ChatTemplates | None = None

    @property
    def templates(self) -> ChatTemplates:
        """The model's templates, read once they are asked for."""
        if self._templates is None:
            self._templates = ChatTemplates.of(self._directory)
        return self._templates

    def prompt(
        self, messages: Messages, options: Mapping[str, Any], encode: Encode, where: str = "messages"
    ) -> TokenizedPrompt:
        """One conversation, by options of `ChatTemplates.render`."""
        text = self.templates.render(messages, where=where, **options)
        return TokenizedPrompt(text, encode(text, where))

    def prompts(
        self, messages: Messages | Sequence[Messages], options: Mapping[str, Any], encode: Encode
    ) -> list[TokenizedPrompt]:
        """One conversation, or each of a list of them."""
        return [self.prompt(chat, options, encode, where) for chat, where in zip(*conversations(messages), strict=True)]


def load_tokenizer(model: Path) -> Tokenizer | None:
    """Of a model directory; ``None`` where it has none.

    Prompts are never cut or filled up, whatever the file says: the tokenizer is shared by threads, and such settings
    would be changed under them.

    Raises:
        ConfigError: a ``tokenizer.json`` that is none.
    """
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
    return tokenizer
