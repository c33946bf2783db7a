"""What an `LLM` does with conversations: prompts by the model's chat template, then as with any prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from specrs.chat import ChatTemplates, Messages
from specrs.engine.prompts import Chats, Prompt
from specrs.engine.request import RequestOutput, TokenizedPrompt
from specrs.sampling_params import SamplingParams


class Conversing(ABC):
    """The part of `LLM` that takes messages in place of prompts."""

    _chats: Chats

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

    @abstractmethod
    def _encode(self, text: str, where: str, special: bool = True) -> list[int]:
        """Tokens of a text."""

    def _encode_chat(self, text: str, where: str) -> list[int]:
        return self._encode(text, where, special=False)  # the template wrote its own

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
            params, on_error, progress: as in `generate`.
            tools, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs: as
                `specrs.chat.ChatTemplates.render` takes them, for all conversations.

        Raises:
            ChatTemplateError: a `ConfigError`: the model has no template, or its template refuses a conversation.
            ChatLimitError: of those, a template that took too long or wrote too much.
            As `generate` otherwise.
        """
        options: dict[str, Any] = {
            "tools": tools, "chat_template": chat_template, "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message, "chat_template_kwargs": chat_template_kwargs,
        }  # fmt: skip
        return self.generate(
            self._chats.prompts(messages, options, self._encode_chat), params, on_error=on_error, progress=progress
        )

    def chat_prompt(self, messages: Messages, **options: Any) -> TokenizedPrompt:
        """What `chat` has the model continue: a prompt for `generate`, `stream` and `add`.

        Any thread may call it at any time. messages: one conversation; options: of
        `specrs.chat.ChatTemplates.render`.
        """
        return self._chats.prompt(messages, options, self._encode_chat)

    @property
    def chat_templates(self) -> ChatTemplates:
        """The model's chat templates, which may be none. Raises ChatTemplateError where its files are malformed."""
        return self._chats.templates
