"""A server's options: the model, the address, keys, and every limit, each with its default.

    config = ServeConfig(model="org/name", drain_seconds=60)
    config = ServeConfig.from_env()                 # SPECRS_SERVE_MODEL, SPECRS_SERVE_DRAIN_SECONDS, ...

A limit that a request meets is named in its error, by the name that it has here.
"""

from __future__ import annotations

import ipaddress
import json
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from specrs._specrs import ConfigError
from specrs.serve.keys import Keys
from specrs.tools import PARSERS, REASONING

_ENV = "SPECRS_SERVE_"
_WORDS = {
    "log": ("requests", "errors", "none"),
    "tool_call_parser": ("auto", "none", *PARSERS),
    "reasoning_parser": ("auto", "none", *REASONING),
}


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Configuration of one server with one engine.

    Attributes:
        model, draft, speculative: options as `specrs.LLM` takes them.
        engine_process: true to give the engine a process of its own (`specrs.AsyncLLM`): then engine and HTTP do not
            wait for each other.
        engine: options of `specrs.LLM`: ``device``, ``max_batch``, ``tree``, ...
        served_names: names by which requests may call the model; responses to requests that name none have the first.
            Empty: the name of the model's directory, or ``org/name``.
        host, port: to listen at; port 0 takes a free one.
        uds: a Unix domain socket to listen at instead, by its path: programs of this machine that may write to it need
            no key.
        root_path: the path below which a proxy serves this server, and which the proxy removes from requests, such as
            ``/llm``.
        keys: API keys; none: everybody may ask.
        allow_public_without_key: listen at an address that other machines reach, with no key.
        allowed_hosts: names that a request's ``Host`` may have; empty: any. The command line allows the names of this
            machine alone where it listens on loopback with no key, so that no web page can pose as one.
        cors_origins: web pages that browsers let ask; ``*``: all.
        playground: serve a page to try the model on at ``/``.
        max_waiting, max_waiting_tokens: requests, and their prompt tokens, that may wait for the engine; 429 beyond.
        max_body_bytes: limit of a request's body; 413 beyond.
        max_prompts: limit of prompts in one request of ``/v1/completions``.
        max_prompt_chars: limit of one prompt's characters, or of a rendered conversation's; 0: 64 for each token of the
            context.
        max_messages: limit of messages in a conversation.
        max_tools: limit of tools in a request.
        max_n: limit of ``n`` and ``best_of``.
        max_outputs: limit of a request's outputs: its prompts times ``n``.
        max_stop, max_stop_chars: stop strings, and characters of one.
        max_token_ids: limit of entries in ``stop_token_ids``, ``allowed_token_ids``, ``logit_bias`` and ``bad_words``.
        max_schema_bytes: limit of a grammar or a JSON schema.
        max_template_seconds, max_template_chars: limits of the time that rendering a conversation takes, and of the
            text that it writes.
        chat_template: a file with the template of conversations; ``None``: the model's own. It is read when the server
            is made, before the model is.
        tool_call_parser: the form in which the model writes tool calls: ``"hermes"``, ``"llama3"``, ``"mistral"``,
            ``"none"``, or ``"auto"``, by its chat template.
        reasoning_parser: the marks around its reasoning: ``"think"`` (``<think>``), ``"mistral"`` (``[THINK]``),
            ``"none"``, or ``"auto"``.
        trust_request_chat_template: take templates from requests; they are rendered in a process of their own.
        body_seconds: time in which a body must come; 408 beyond.
        send_seconds: time for which a client may leave a response unread; then the response is aborted.
        keep_alive_seconds: time for which a connection may stay open between two requests.
        comment_seconds: pause between comments on a stream on which nothing else is sent.
        drain_seconds: time for which requests may go on after SIGTERM; those that still run then end with ``"abort"``.
        stall_seconds: time after which a step that still runs makes ``/health`` say 503.
        retry_after_seconds: time that clients are asked to wait after 429 and 503.
        log: requests that get a line on stdout: each (``"requests"``), those that fail (``"errors"``), or none.

    Raises:
        ConfigError: a value of another type or out of range, by name.
    """

    model: str | None = None
    draft: str | None = None
    speculative: bool = True
    engine_process: bool = True
    engine: Mapping[str, Any] = field(default_factory=dict)
    served_names: Sequence[str] = ()
    chat_template: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    keys: Keys = field(default_factory=Keys)
    allow_public_without_key: bool = False
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    playground: bool = True
    max_waiting: int = 512
    max_waiting_tokens: int = 1 << 20
    max_body_bytes: int = 8 << 20
    max_prompts: int = 256
    max_prompt_chars: int = 0
    max_messages: int = 2048
    max_tools: int = 128
    max_n: int = 128
    max_outputs: int = 1024
    max_stop: int = 16
    max_stop_chars: int = 1024
    max_token_ids: int = 1024
    max_schema_bytes: int = 256 << 10
    max_template_seconds: float = 5.0
    max_template_chars: int = 16 << 20
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    trust_request_chat_template: bool = False
    body_seconds: float = 60.0
    send_seconds: float = 120.0
    keep_alive_seconds: float = 30.0
    comment_seconds: float = 15.0
    drain_seconds: float = 30.0
    stall_seconds: float = 300.0
    retry_after_seconds: float = 1.0
    log: str = "requests"

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            check = _CHECKS.get(kind)
            if check is not None:
                object.__setattr__(self, name, check(name, value))
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port}: must be in 0..65535")
        if self.root_path:
            object.__setattr__(self, "root_path", _below(self.root_path))
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(words)}")
        if self.max_prompts > self.max_waiting:
            raise ConfigError(
                f"max_prompts = {self.max_prompts}: of so many some could never wait, max_waiting = {self.max_waiting}"
            )
        if not isinstance(self.engine, Mapping) or not all(isinstance(name, str) for name in self.engine):
            raise ConfigError("engine: must be a mapping from options of specrs.LLM")
        if not isinstance(self.keys, Keys):
            object.__setattr__(self, "keys", Keys.of(self.keys))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ServeConfig:
        """Make a configuration from a mapping; an unknown name is refused."""
        known = {one.name for one in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"{name}: no option of a server; there are {', '.join(sorted(known))}")
        return cls(**options)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ServeConfig:
        """Make a configuration from variables ``SPECRS_SERVE_<NAME>``: numbers and flags as JSON, sequences with commas
        between, ``ENGINE`` a JSON object; and ``SPECRS_API_KEY`` or ``SPECRS_API_KEY_FILE``."""
        environ = os.environ if environ is None else environ
        kinds = typing.get_type_hints(cls)
        options: dict[str, Any] = {}
        for variable, text in environ.items():
            name = variable[len(_ENV) :].lower()
            if not variable.startswith(_ENV):
                continue
            if name not in kinds or name == "keys":
                raise ConfigError(f"{variable}: no option of a server")
            options[name] = _parsed(variable, text, kinds[name])
        return cls(keys=Keys.from_env(environ), **options)

    def check_address(self) -> None:
        """Refuse an address that other machines reach, if requests need no key.

        Raises:
            ConfigError: the address is refused; the message says what to do.
        """
        if not self.keys and not self.allow_public_without_key and not self.is_local:
            raise ConfigError(
                f"host = {self.host!r}: other machines would reach this server, and no API key is set; give "
                "--api-key-file (or SPECRS_API_KEY), or --allow-public-without-key"
            )

    @property
    def is_local(self) -> bool:
        """True if this machine alone reaches the server."""
        return self.uds is not None or is_loopback(self.host)

    def check_template(self) -> None:
        """Refuse a ``chat_template`` that cannot be read.

        Raises:
            ConfigError: the file is missing, no text, or no template in Jinja; the message has the line.
        """
        if self.template is None:
            return
        from jinja2 import TemplateSyntaxError

        from specrs.chat.dialect import environment

        try:
            environment().parse(self.template)
        except TemplateSyntaxError as e:
            raise ConfigError(f"chat_template = {self.chat_template!r}, line {e.lineno}: {e.message}") from None

    @cached_property
    def template(self) -> str | None:
        """The text of ``chat_template``. Raises as `check_template`."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) else "not a text in UTF-8"
            raise ConfigError(f"chat_template = {self.chat_template!r}: {why}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which requests may call the model."""
        if self.served_names:
            return tuple(self.served_names)
        if self.model is None:
            from specrs import assets

            return (assets.model_dir().name,)
        path = Path(self.model)
        return (path.resolve().name if path.exists() else self.model,)


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from its own machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _below(path: str) -> str:
    """A path that others stand below."""
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or set(path) & set("?#% "):
        raise ConfigError(f"root_path = {path!r}: must be a path that begins with /, as it stands in URLs")
    return path.rstrip("/")


def _parsed(variable: str, text: str, kind: Any) -> Any:
    if kind in (str, str | None):
        return text
    if kind == Sequence[str]:
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{variable} = {text!r}: must be JSON") from None


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}: must be a bool")
    return value


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (not value and name not in _MAY_BE_0):
        raise ConfigError(f"{name} = {value!r}: must be an integer of at least {0 if name in _MAY_BE_0 else 1}")
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"{name} = {value!r}: must be a number of seconds of at least 0")
    return float(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} = {value!r}: must be a text")
    return value


def _path(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} = {value!r}: must be a path, or org/name")
    return None if value is None else os.fspath(value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{name} = {value!r}: must be a sequence of texts")
    return tuple(value)


_MAY_BE_0 = ("port", "max_prompt_chars")
_CHECKS: dict[Any, Callable[[str, object], Any]] = {
    bool: _flag, int: _count, float: _seconds, str: _text, str | None: _path, Sequence[str]: _texts,
}  # fmt: skip
assert isinstance(str | None, types.UnionType)  # a union compares by its members, as the table needs
