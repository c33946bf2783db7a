"""A model's chat templates: where they stand, which one is meant, and the text that it makes of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrs.chat.dialect import rendered
from specrs.chat.errors import ChatTemplateError, RenderLimits
from specrs.chat.files import TOKENIZER_CONFIG, read_text, tokenizer_config
from specrs.chat.messages import OpenEnd, conversation, plain_value, schema

Messages = Sequence[Mapping[str, Any]]
"""A conversation, oldest message first: mappings with ``role``, ``content`` and other keys that the template reads."""

# Names that kwargs may not have.
_OWN = ("messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message")
_LOAD = "give one as chat_template=, or put chat_template.jinja into the model directory"


@dataclass(frozen=True)
class ChatTemplates:
    """The templates of a model, and the facts of its tokenizer that they read.

    Attributes:
        directory: directory of the model; named in errors.
        templates: sources by name; a model with one has it as ``"default"``.
        variables: special tokens by name, such as ``bos_token``.
    """

    directory: Path
    templates: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: str | Path) -> ChatTemplates:
        """Read the templates of a Hugging Face model directory.

        ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja`` come first; where there are neither,
        ``tokenizer_config.json`` has a template, or a list of them by name.

        Raises:
            ChatTemplateError: a file that cannot be read, or that holds something else.
        """
        directory = Path(directory)
        found = {p.stem: read_text(p) for p in sorted(directory.glob("additional_chat_templates/*.jinja"))}
        if (path := directory / "chat_template.jinja").is_file():
            found["default"] = read_text(path)
        return cls.of_config(directory, tokenizer_config(directory), found)

    @classmethod
    def of_config(
        cls, directory: Path, config: Mapping[str, Any], found: Mapping[str, str] | None = None
    ) -> ChatTemplates:
        """Take the templates from the content of ``tokenizer_config.json``.

        Args:
            directory: directory that errors name.
            config: configuration of the tokenizer.
            found: templates by name that come before its own.

        Raises:
            ChatTemplateError: a template is malformed.
        """
        found = dict(found or {})
        if not found and (listed := config.get("chat_template")) is not None:
            named = [{"name": "default", "template": listed}] if isinstance(listed, str) else listed
            try:
                found = {entry["name"]: entry["template"] for entry in named}
            except (TypeError, KeyError):
                found = {"": None}  # type: ignore[dict-item]
            if not all(isinstance(part, str) for pair in found.items() for part in pair):
                path = directory / TOKENIZER_CONFIG
                raise ChatTemplateError(f"{path}: chat_template: must be a text, or a list of name and template")
        return cls(directory, found, dict(_tokens(config)))

    def source(self, chosen: str | None = None, tools: bool = False) -> str:
        """A template's source.

        Args:
            chosen: the name of one of the model's, or a source; ``None``: the model's for tools where there are tools
                and it has one (``"tool_use"``), else its default.
            tools: true if there are tools.

        Raises:
            ChatTemplateError: the model has none, or several and no default.
        """
        if chosen is not None:
            if not isinstance(chosen, str):
                raise ChatTemplateError(f"chat_template is a {type(chosen).__name__}: must be a template, or a name")
            return self.templates.get(chosen, chosen)
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        if self.templates:
            names = ", ".join(sorted(self.templates))
            raise ChatTemplateError(f"{self.directory}: chat templates {names}, none of them 'default': name one")
        raise ChatTemplateError(f"{self.directory}: the model has no chat template; {_LOAD}")

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        limits: RenderLimits | None = None,
        where: str = "messages",
    ) -> str:
        """The text of one conversation, special tokens included.

        The template is the model's, or the caller's own: in a process that strangers send templates to, give theirs to
        `specrs.chat.apart`.

        Args:
            messages: a list of plain values, as JSON has them, dataclasses or pydantic models; keys whose value is
                ``None`` are left out. The messages are not changed.
            tools: JSON schemas, or functions, from whose signature and docstring transformers makes them.
            chat_template: the same as in `source`.
            add_generation_prompt: end with what opens the model's answer.
            continue_final_message: end within the last message instead, so that the model goes on writing it; a text
                names the field to go on with, ``True`` is ``"content"``.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking`` or ``documents``.
            limits: ``None``: the defaults.
            where: name of ``messages`` in errors.

        Raises:
            ChatTemplateError: there is no template, or it is malformed, or it refuses the conversation (such as roles
                that do not alternate); messages or options are not as above.
            ChatLimitError: rendering reached one of `limits`.
        """
        if tools is not None and (isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable)):
            raise ChatTemplateError(f"tools is a {type(tools).__name__}: must be a list of JSON schemas or functions")
        if not isinstance(add_generation_prompt, bool):
            raise ChatTemplateError(f"add_generation_prompt = {add_generation_prompt!r}: must be a bool")
        if not isinstance(continue_final_message, (bool, str)) or continue_final_message == "":
            raise ChatTemplateError(
                f"continue_final_message = {continue_final_message!r}: must be a bool, or the name of a message's field"
            )
        source = self.source(chat_template, tools is not None)
        given = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise ChatTemplateError("chat_template_kwargs: must be a mapping from names of variables")
        if taken := [key for key in _OWN if key in given]:
            raise ChatTemplateError(f"chat_template_kwargs: {taken[0]!r} is an argument of its own")
        documents = given.get("documents")
        if isinstance(documents, Sequence):
            for i, document in enumerate(documents):
                if not isinstance(document, Mapping):
                    kind = type(document).__name__
                    raise ChatTemplateError(
                        f"chat_template_kwargs['documents'][{i}] is a {kind}: must be a mapping with title and text"
                    )
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message with add_generation_prompt: the last message goes on, or another one begins; "
                "add_generation_prompt=False lets it go on"
            )
        chat = conversation(messages, where)
        end: OpenEnd | None = None
        if continue_final_message:
            name = continue_final_message if isinstance(continue_final_message, str) else "content"
            end = OpenEnd.of(chat, name, where)
        variables = {
            "documents": None, **self.variables, **plain_value(given, "chat_template_kwargs"), "messages": chat,
            "tools": None if tools is None else [schema(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        text = rendered(source, variables, limits or RenderLimits())
        return text if end is None else end.cut(text)


def _tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Special tokens as files have them: texts, or objects with their text as ``content``."""
    more = config.get("extra_special_tokens")
    for name, token in {**config, **(more if isinstance(more, dict) else {})}.items():
        if name.endswith("_token") or (isinstance(more, dict) and name in more):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                yield name, text
