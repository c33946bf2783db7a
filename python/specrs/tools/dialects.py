"""The forms in which families of models write their calls."""

from __future__ import annotations

import secrets
import string

from specrs.tools.parser import ToolParser
from specrs.tools.scanner import Broken, Read, spaces, value, word

_LETTERS = string.ascii_letters + string.digits
_NAME = frozenset(_LETTERS + "_-")
_MAX_NAME = 64
_MAX_ID = 64


class Hermes(ToolParser):
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once for each call.

    The mark at the end may be missing.
    """

    opening = ("<tool_call>",)
    closing = "</tool_call>"

    def _block(self, c: str) -> Read:
        c = yield from spaces(c)
        return (yield from self._call(c))


class Llama3(ToolParser):
    """Llama 3: ``{"name": ..., "parameters": {...}}`` at the text's beginning, and behind a call, ``;`` between two.

    ``<|python_tag|>`` may stand before it, anywhere.
    """

    opening = ("<|python_tag|>",)
    separators = ";"
    bare = True

    def _block(self, c: str) -> Read:
        c = yield from spaces(c)
        return (yield from self._call(c))


class Mistral(ToolParser):
    """Mistral: behind ``[TOOL_CALLS]`` a list of objects ``[{"name": ..., "arguments": {...}}, ...]``, or one object;
    in newer models ``name[ARGS]{...}``, perhaps with ``[CALL_ID]`` and an id behind the name.

    Templates of these models take ids of 9 letters and digits alone, so that is what calls get; the model's own are
    dropped.
    """

    opening = ("[TOOL_CALLS]",)

    @staticmethod
    def new_id() -> str:
        """Return a new id for a call."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def _block(self, c: str) -> Read:
        c = yield from spaces(c)
        if c == "{":
            return (yield from self._call(c))
        if c != "[":
            return (yield from self._named(c))
        while True:
            c = yield from spaces((yield))
            c = yield from self._call(c)
            self._open, self._listed = False, ","
            c = yield from spaces(c)
            if c == "]":
                c = yield
                self._complete()
                return c
            if c != ",":
                raise Broken

    def _named(self, c: str) -> Read:
        name = ""
        while c in _NAME and len(name) < _MAX_NAME:
            name += c
            c = yield
        name = self._known(name)
        if c == "[":
            c = yield
            if c == "C":
                c = yield from word(c, "CALL_ID]")
                for _ in range(_MAX_ID):
                    if c not in _NAME:
                        break
                    c = yield
                if c == "[":
                    c = yield from word((yield), "ARGS]")
            else:
                c = yield from word(c, "ARGS]")
        c = yield from spaces(c)
        if c != "{":
            raise Broken
        self._begin(name)
        c = yield from value(c, self._argue)
        self._complete()
        return c


PARSERS: dict[str, type[ToolParser]] = {"hermes": Hermes, "llama3": Llama3, "mistral": Mistral}
"""Parsers by the name of the dialect."""
