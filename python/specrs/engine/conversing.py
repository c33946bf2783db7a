"""Prompts from texts and conversations, by the model's tokenizer and chat template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from specrs._specrs import ConfigError
from specrs.chat import ChatTemplates, Messages
from specrs.engine.errors import EngineClosedError
from specrs.engine.prompts import Chats, Given, Prompt, check_text
from specrs.engine.request.request import RequestOutput, TokenizedPrompt
from specrs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_LONG_TEXT = 4096  # characters


class Tokenizing(ABC):
    """The part of an engine that makes tokens of what users give. Any thread may call it at any time."""

    tokenizer: Tokenizer | None
    _chats: Chats

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True if the engine was closed."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model's tokenizer adds."""
        return self._encode(text, "prompt")

    def _encode(self, text: str, where: str, special: bool = True) -> list[int]:
        tokenizer = self.tokenizer
        if self.closed:
            raise EngineClosedError
        if tokenizer is None:
            raise ConfigError(
                f"{where}: the model directory has no tokenizer.json; give prompts as token ids, or write one with "
                "transformers: AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
            )
        if not isinstance(text, str):
            raise ConfigError(f"{where} is a {type(text).__name__}: must be a text")
        check_text(text, where)
        if len(text) < _LONG_TEXT:
            return list(tokenizer.encode(text, add_special_tokens=special).ids)
        # Encode a batch of one: `encode` keeps the interpreter's lock, and with it every other thread.
        return list(tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    def _settled(self, prompt: Prompt, where: str = "prompt") -> list[int] | TokenizedPrompt:
        """A prompt of any kind with its token ids, as `LLM.add` reads it. Any thread may call it at any time.

        Raises:
            ConfigError: the same errors as of `LLM.add`.
        """
        given = Given.of(prompt, where)
        if given.text is None:
            return given.ids or []
        return TokenizedPrompt(given.text, self._encode(given.text, where) if given.ids is None else given.ids)

    def _encode_chat(self, text: str, where: str) -> list[int]:
        return self._encode(text, where, special=False)  # the template wrote its own

    def chat_prompt(self, messages: Messages, **options: Any) -> TokenizedPrompt:
        """Return the prompt that `LLM.chat` has the model continue, for `generate`, `stream` and `add`.

        Any thread may call it at any time. messages: one conversation; options: of
        `specrs.chat.ChatTemplates.render`.
        """
        return self._chats.prompt(messages, options, self._encode_chat)

    @property
    def chat_templates(self) -> ChatTemplates:
        """The model's chat templates, which may be none. Raises ChatTemplateError where its files are malformed."""
        return self._chats.templates


class Conversing(Tokenizing):
    """The part of `LLM` that takes messages in place of prompts."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Literal["raise", "return"] = "raise",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt."""

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, in the form of the model's chat template.

        The output's ``prompt`` is the text that the template made. One conversation gives a list of one output.

        Args:
            messages: mappings with ``role`` and ``content``, oldest first; or a list of such conversations.
            params, on_error, progress: the same as in `generate`.
            tools, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs: options of
                `specrs.chat.ChatTemplates.render`, for all conversations.

        Raises:
            ChatTemplateError: a `ConfigError`: the model has no template, or its template refuses a conversation.
            ChatLimitError: a template took too long or wrote too much; one of the errors above.
            As `generate` otherwise.
        """
        options: dict[str, Any] = {
            "tools": tools, "chat_template": chat_template, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message, "chat_template_kwargs": chat_template_kwargs,
        }  # fmt: skip
        return self.generate(
            self._chats.prompts(messages, options, self._encode_chat), params, on_error=on_error, progress=progress
        )
