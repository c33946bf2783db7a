"""Results that the parsers of tool calls must give for a whole text, found without them: by `json`, by searches.

A text begins like JSON where something behind it makes JSON of it; that is tried, not parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

SPACE = " \t\n\r"
Call = tuple[str, str]
Message = tuple[str, list[Call]]


def _constant(name: str) -> Any:
    raise ValueError(name)


_DECODER = json.JSONDecoder(strict=False, parse_constant=_constant)
_TAILS = ("", "0", '"', '""', '"":0', '":0', ":0", '0"', '00"', '000"', '0000"', 'n"', "rue", "ue", "e", "alse", "lse",
          "se", "ull", "ll", "l", *(f'{"0" * n}":0' for n in range(1, 5)), 'n":0')  # fmt: skip


def begins(text: str) -> bool:
    """Return whether an object may begin so."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*(?:"|\\?$)', "", text, flags=re.S)  # without strings
    closers = ""
    for c in bare:
        if c in "{[":
            closers = ("}" if c == "{" else "]") + closers
        elif c in "}]":
            closers = closers[1:]
    for tail in _TAILS:
        for end in {closers, closers[1:]}:
            try:
                found, at = _DECODER.raw_decode(text + tail + end)
            except ValueError:
                continue
            if isinstance(found, dict) and at == len(text + tail + end):
                return True
    return False


def longest(text: str) -> int:
    """Characters of the longest beginning of an object; or of the object itself."""
    try:
        found, at = _DECODER.raw_decode(text)
        if isinstance(found, dict):
            return at
    except ValueError:
        pass
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if begins(text[:middle]) else (low, middle - 1)
    return low


def escaped(text: str) -> str:
    """Control characters within strings as escapes."""
    return re.sub(
        r'"(?:[^"\\]|\\.)*(?:"|\\?$)', lambda m: re.sub("[\x00-\x1f]", lambda c: json.dumps(c[0])[1:-1], m[0]), text,
        flags=re.S,
    )  # fmt: skip


class Broken(Exception):
    """At a place, with the call that was told before."""

    def __init__(self, at: int, call: Call | None = None) -> None:
        super().__init__(at)
        self.at, self.call = at, call


def skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def value(text: str, at: int) -> int | None:
    try:
        return _DECODER.raw_decode(text, at)[1]
    except ValueError:
        return None


def envelope(text: str, start: int, tools: Sequence[str]) -> tuple[Call, int]:
    """The object at ``start`` as a call, and where it ends."""
    if text[start : start + 1] != "{":
        raise Broken(start)
    far = start + longest(text[start:])
    name: str | None = None
    args: tuple[int, int] | None = None  # place of the arguments; (0, 0) for null
    at = skip(text, start + 1)

    def told(end: int) -> Call | None:
        return None if name is None or args is None or args == (0, 0) else (name, escaped(text[args[0] : end]))

    while True:
        key_end = value(text, at) if text[at : at + 1] == '"' else None
        if key_end is None:
            raise Broken(far, told(args[1] if args else 0))
        key = json.loads(text[at:key_end], strict=False)
        at = skip(text, key_end)
        if text[at : at + 1] != ":":
            raise Broken(far, told(args[1] if args else 0))
        at = skip(text, at + 1)
        before = told(args[1] if args else 0)
        if key == "name":
            if name is not None:
                raise Broken(at, before)
            end = value(text, at) if text[at : at + 1] == '"' else None
            if end is None:
                raise Broken(far if text[at : at + 1] == '"' else at, before)
            name = json.loads(text[at:end], strict=False)
            if name not in tools:
                name = None
                raise Broken(end)
        elif key in ("arguments", "parameters"):
            if args is not None:
                raise Broken(at, before)
            if text[at : at + 1] == "n":
                end, args = value(text, at), (0, 0)
            elif text[at : at + 1] == "{":
                end = value(text, at)
                args = (at, far if end is None else end)
                if end is None:
                    raise Broken(far, told(far))
            else:
                raise Broken(at, before)
        else:
            end = value(text, at)
        after = told(args[1] if args else 0)
        if end is None:
            raise Broken(far, after)
        at = skip(text, end)
        if text[at : at + 1] == "}":
            break
        if text[at : at + 1] != ",":
            raise Broken(far, after)
        at = skip(text, at + 1)
    if name is None:
        raise Broken(at + 1)
    return told(args[1] if args else 0) or (name, "{}"), at + 1


class Whole:
    """A message in the making."""

    def __init__(self, text: str, tools: Sequence[str]) -> None:
        self.text, self.tools = text, tools
        self.content, self.calls = "", list[Call]()
        self.since = 0  # place where content goes on
        self.solid = 0  # up to where it is content, white space too
        self.behind = False  # true if only dropped text stands between `since` and a complete call

    def called(self, call: Call, mark: int, end: int) -> None:
        """A call whose mark stands there."""
        solid = max(self.since, self.solid)
        self.content += self.text[self.since : solid] + self.text[solid:mark].rstrip(SPACE)
        self.calls.append(call)
        self.since, self.behind = end, True

    def broken(self, error: Broken, mark: int) -> None:
        if error.call is not None:
            self.called(error.call, mark, error.at)
            self.behind = False
        else:
            self.solid = error.at

    def done(self, drop: str) -> Message:
        rest = self.text[self.since :]
        if not self.behind or rest.strip(drop):
            self.content += rest
        return self.content, self.calls


def hermes(text: str, tools: Sequence[str]) -> Message:
    found, at = Whole(text, tools), 0
    while (mark := text.find("<tool_call>", at)) >= 0:
        try:
            call, at = envelope(text, skip(text, mark + len("<tool_call>")), tools)
        except Broken as error:
            found.broken(error, mark)
            at = error.at
            continue
        found.called(call, mark, at)
        after = skip(text, at)
        if text.startswith("</tool_call>", after):
            at = found.since = after + len("</tool_call>")
        elif "</tool_call>".startswith(text[after:]):
            found.since = len(text)
            break
    return found.done(SPACE)


def llama3(text: str, tools: Sequence[str]) -> Message:
    found, at, tag = Whole(text, tools), 0, "<|python_tag|>"
    bare, separators = True, SPACE
    while at < len(text):
        begin = at
        while begin < len(text) and text[begin] in separators:
            begin += 1
        if bare and text[begin : begin + 1] == "{":
            mark = start = begin
        else:
            mark = text.find(tag, at)
            if mark < 0:
                break
            start = skip(text, mark + len(tag))
        between = text[found.since : mark]
        try:
            call, at = envelope(text, start, tools)
        except Broken as error:
            if error.call is not None and found.behind and not between.strip(SPACE + ";"):
                found.since = mark
            found.broken(error, mark)
            at, bare = error.at, False
            continue
        if found.behind and not between.strip(SPACE + ";"):
            found.since = mark
        found.called(call, mark, at)
        bare, separators = True, SPACE + ";"
    return found.done(SPACE + ";")


def mistral(text: str, tools: Sequence[str]) -> Message:
    found, at, tag = Whole(text, tools), 0, "[TOOL_CALLS]"
    drop = SPACE
    while (mark := text.find(tag, at)) >= 0:
        at = skip(text, mark + len(tag))
        drop = SPACE
        try:
            if text[at : at + 1] == "{":
                call, at = envelope(text, at, tools)
                found.called(call, mark, at)
                continue
            if text[at : at + 1] != "[":
                call, at = _named(text, at, tools)
                found.called(call, mark, at)
                continue
            at = skip(text, at + 1)
            while True:
                call, at = envelope(text, at, tools)
                found.called(call, mark, at)
                drop = SPACE + ","
                mark = at
                at = skip(text, at)
                if text[at : at + 1] == "]":
                    at = found.since = at + 1
                    drop = SPACE
                    break
                if text[at : at + 1] != ",":
                    raise Broken(at)
                at = skip(text, at + 1)
                mark = at
                if text[found.since : at].strip(SPACE + ",") == "" and text[at : at + 1] == "{":
                    try:
                        envelope(text, at, tools)
                    except Broken as error:
                        if error.call is not None:
                            found.since = at
                        raise
                    found.since = at
        except Broken as error:
            found.broken(error, mark)
            at = error.at
            if at < len(text) or error.call is not None:
                drop = SPACE
    return found.done(drop)


_PARTS = re.compile(r"([a-zA-Z0-9_-]*)(.*)", re.S)


def _named(text: str, at: int, tools: Sequence[str]) -> tuple[Call, int]:
    name = re.compile(r"[a-zA-Z0-9_-]{0,64}").match(text, at)
    assert name is not None
    at = name.end()
    if name[0] not in tools:
        raise Broken(at)
    for form in (r"\[CALL_ID\][a-zA-Z0-9_-]{0,64}\[ARGS\]", r"\[CALL_ID\][a-zA-Z0-9_-]{0,64}(?!\[)", r"\[ARGS\]"):
        if known := re.compile(form).match(text, at):
            at = known.end()
            break
    else:
        if text[at : at + 1] == "[":
            raise Broken(at + _common(text[at:]))
    at = skip(text, at)
    if text[at : at + 1] != "{":
        raise Broken(at)
    far = at + longest(text[at:])
    end = value(text, at)
    if end is None:
        raise Broken(far, (name[0], escaped(text[at:far])))
    return (name[0], escaped(text[at:end])), end


def _common(rest: str) -> int:
    """Return how far a text goes on like what may stand behind a name."""
    best = 0
    for n in range(1, len(rest) + 1):
        head = rest[:n]
        whole = re.fullmatch(r"\[CALL_ID\][a-zA-Z0-9_-]{0,64}(\[.*)?", head, re.S)
        tail = whole[1] or "" if whole else None
        if (
            "[ARGS]".startswith(head)
            or "[CALL_ID]".startswith(head)
            or (tail is not None and "[ARGS]".startswith(tail))
        ):
            best = n
    return best


REFERENCES: dict[str, Callable[[str, Sequence[str]], Message]] = {
    "hermes": hermes, "llama3": llama3, "mistral": mistral,
}  # fmt: skip
