"""Makes content and tool calls of an answer's text, which comes in any pieces.

**What is a call.** A text of the dialect's form, whose object names a tool that the request has, and whose arguments
are an object, or left out. It is told as soon as its name and the first character of its arguments are known; from
there on the arguments are told as they come, each character once it is known to go on as JSON. Keys may stand in either
order: arguments before the name are held back until the name is known. Other keys are passed over.

**What is none.** A text that begins like a call and is none (malformed, an unknown tool, no object as arguments,
unfinished at the end) is content, up to the character that shows it; that character is looked at again. Arguments that
have been told are not taken back: where they break, the call ends as it stands, and content goes on with the character
that broke it.

**White space** before a call belongs to the call, and so does what stands at the end of the text behind one, with
separators of the dialect. All other text is content, as it is.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import Any

from specrs.tools.deltas import ArgumentsDelta, ContentDelta, Delta, ToolCallStart, merged
from specrs.tools.scanner import SPACES, Broken, Read, Run, nobody, spaces, string, value, word

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Pattern of a tool's whole name."""
_ARGUMENTS = ("arguments", "parameters")


class ToolParser(ABC):
    """Parser of one message. The deltas, neighbours merged, are the same whatever the pieces of the text.

    Args:
        tools: names that calls may have.
        ids: gives each call its id; ``None``: ``call_`` and 24 hexadecimal digits.
        parallel: tell all calls; else those behind the first are dropped.
        certain: a grammar vouches for calls: an unfinished call at the end of the text is dropped, and is no content.
    """

    #: Texts behind which a call may stand.
    opening: tuple[str, ...] = ()
    #: The text that ends a call.
    closing = ""
    #: Characters that may stand between two calls, beside white space.
    separators = ""
    #: True if a call needs no mark at the beginning, and behind another call.
    bare = False

    def __init__(
        self,
        tools: Collection[str],
        ids: Callable[[], str] | None = None,
        *,
        parallel: bool = True,
        certain: bool = False,
    ) -> None:
        self._tools, self._ids = frozenset(tools), ids or self.new_id
        self._parallel, self._certain = parallel, certain
        self.calls = 0
        self._out: list[Delta] = []
        self._held: list[str] = []  # characters that nobody was told of, the last one sent among them
        self._last = ""
        self._run: Run = None  # pattern of characters that the machine takes at once
        self._fresh = True  # no content since the beginning, or since a call
        self._behind = False  # no content since a call that is complete
        self._open = False  # nor the mark that ends it
        self._told = False  # a call has begun and has not ended
        self._listed = ""  # text between two calls of a list that is open
        marks = "".join({mark[0] for mark in self.opening})
        self._plain = re.compile(rf"(?:[ \t\n\r]*[^ \t\n\r{re.escape(marks)}])+")
        self._machine = self._text()
        self._done = False
        next(self._machine)

    @staticmethod
    def new_id() -> str:
        """Return a new id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas of the next piece of the text.

        Raises:
            ValueError: the text has ended.
        """
        if self._done:
            raise ValueError("feed: the text has ended")
        at = 0
        while at < len(text):
            run = None if self._run is None else self._run.match(text, at)
            piece = text[at] if run is None else run[0]
            self._send(piece)
            at += len(piece)
        return self._taken()

    def finish(self) -> list[Delta]:
        """Return the deltas that are known only at the end of the text."""
        if not self._done:
            self._done = True
            with contextlib.suppress(StopIteration):
                self._send("")
        return self._taken()

    def _send(self, c: str) -> None:
        self._held.append(c)
        self._last = c
        self._run = self._machine.send(c)

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return merged(out)

    # -- what the machine does with characters ----------------------------------------------------------------------

    def _tell_content(self, text: str) -> None:
        if text and not (self._done and self._certain):
            self._out.append(ContentDelta(text))
            self._fresh = self._behind = self._open = False

    def _tell_all(self) -> None:
        """All that is held is content."""
        self._tell_content("".join(self._held))
        self._held.clear()

    def _release(self) -> None:
        """Give the held text out as content, but for the last character, which is looked at again."""
        del self._held[-1]
        self._tell_all()
        self._held.append(self._last)

    def _drop(self) -> None:
        """Drop the held text as part of a call, but for the last character."""
        self._held = [self._last]

    def _begin(self, name: str) -> None:
        self._told = True
        if self._parallel or not self.calls:
            self._out.append(ToolCallStart(self.calls, self._ids(), name))
        self.calls += 1

    def _argue(self, text: str) -> None:
        if self._parallel or self.calls == 1:
            self._out.append(ArgumentsDelta(self.calls - 1, text))

    def _complete(self) -> None:
        """A call has ended before the last character."""
        self._told = False
        self._fresh = self._behind = self._open = True
        self._drop()

    # -- the machine ------------------------------------------------------------------------------------------------

    def _text(self) -> Read:
        c = yield
        while True:
            found, c = yield from self._content(c)
            if not found:
                return c
            try:
                c = yield from self._block(c)
            except Broken:
                c = self._last
                if self._told:
                    self._told = self._fresh = self._behind = self._open = False
                    self._drop()
                elif not (c == "" and self._behind and self._is_rest()):
                    self._release()

    def _is_rest(self) -> bool:
        """Return whether all held text may stand behind a call."""
        return not "".join(self._held).strip(f" \t\n\r{self.separators}{self._listed}")

    def _content(self, c: str) -> Generator[Any, str, tuple[bool, str]]:
        """Read up to where a call may begin; white space and a mark are held."""
        while c != "":
            if c in SPACES or (self._behind and c in self.separators):
                c = yield
                continue
            if self.bare and self._fresh and c == "{":
                return True, c
            marks = [mark for mark in self._marks() if mark[0] == c]
            if not marks:
                self._tell_all()
                c = yield self._plain
                continue
            mark, c = yield from self._mark(marks)
            if mark and mark == self.closing:
                self._open = False
                self._drop()
            elif mark:
                return True, c
            elif c == "" and self._open and self._is_closing():
                self._held = [""]
            else:
                self._release()
        if self._behind and self._is_rest():
            self._held.clear()
        self._tell_all()
        return False, c

    def _marks(self) -> tuple[str, ...]:
        return (*self.opening, self.closing) if self._open and self.closing else self.opening

    def _is_closing(self) -> bool:
        held = "".join(self._held).strip()
        return self.closing.startswith(held)

    def _mark(self, marks: list[str]) -> Generator[Any, str, tuple[str, str]]:
        """Return the mark that comes, ``""`` for none, and the character behind it."""
        at = 1
        while True:
            c = yield
            marks = [mark for mark in marks if at < len(mark) and mark[at] == c]
            if not marks:
                return "", c
            at += 1
            if len(marks[0]) == at:  # none is the beginning of another
                return marks[0], (yield)

    @abstractmethod
    def _block(self, c: str) -> Read:
        """Read one call, or several, behind a mark."""

    def _call(self, c: str) -> Read:
        """An object that names a tool and has its arguments."""
        if c != "{":
            raise Broken
        name: str | None = None
        early: list[str] | None = None  # arguments that came before the name
        argued = False
        c = yield from spaces((yield))
        while True:
            key: list[str] = []
            c = yield from string(c, key.append)
            c = yield from spaces(c)
            c = yield from word(c, ":")
            c = yield from spaces(c)
            called = _decoded(key)
            if called == "name":
                if name is not None:
                    raise Broken
                text: list[str] = []
                c = yield from string(c, text.append)
                name = self._known(_decoded(text))
                if early is not None:
                    self._begin(name)
                    self._argue("".join(early))
            elif called in _ARGUMENTS:
                if argued:
                    raise Broken
                argued = True
                if c == "n":
                    c = yield from word(c, "null")  # null counts as left out
                elif c != "{":
                    raise Broken
                elif name is None:
                    early = []
                    c = yield from value(c, early.append)
                else:
                    self._begin(name)
                    c = yield from value(c, self._argue)
            else:
                c = yield from value(c, nobody)
            c = yield from spaces(c)
            if c == "}":
                break
            c = yield from word(c, ",")
            c = yield from spaces(c)
        if name is None:
            raise Broken
        if not self._told:
            self._begin(name)
            self._argue("{}")
        c = yield
        self._complete()
        return c

    def _known(self, name: str) -> str:
        if name not in self._tools:
            raise Broken
        return name


def _decoded(parts: list[str]) -> str:
    return str(json.loads("".join(parts)))
