"""JSON, a character at a time: each function is a generator that is sent the characters behind the first one.

    following = yield from value(first, tell)

The end of the text is sent as ``""``. A function returns the first character that is not its own, which nobody has read
yet; so grammars compose. A generator yields what it would take at once: the pattern of a run of characters that it
treats alike, or nothing. A character that cannot stand where it stands raises `Broken` at once: what has been read till
then is the beginning of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any

Run = re.Pattern[str] | None
Read = Generator[Any, str, str]  # yields a Run
Tell = Callable[[str], object]

SPACES = frozenset(" \t\n\r")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # within a text
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrtu')
_WORDS = {"t": "true", "f": "false", "n": "null"}
MAX_DEPTH = 128
"""Levels of lists and objects in a call's arguments: beyond what any client's parser needs."""


class Broken(Exception):
    """The text does not go on as its beginning asks."""


def nobody(text: str) -> None:
    """Told what nobody wants to know."""


def spaces(c: str, tell: Tell = nobody) -> Read:
    """White space, none perhaps."""
    while c in SPACES:
        tell(c)
        c = yield
    return c


def word(c: str, text: str) -> Read:
    """A text as it stands."""
    for wanted in text:
        if c != wanted:
            raise Broken
        c = yield
    return c


def value(c: str, tell: Tell) -> Read:
    """Any value, whose first character is ``c``, not white space. Its text is told as it comes."""
    closers: list[str] = []
    while True:
        c = yield from spaces(c, tell)
        opens = {"{": "}", "[": "]"}.get(c)
        if opens:
            if len(closers) == MAX_DEPTH:
                raise Broken
            tell(c)
            closers.append(opens)
            c = yield from spaces((yield), tell)
            if c != opens:
                if opens == "}":
                    c = yield from _key(c, tell)
                continue
        elif c == '"':
            c = yield from string(c, tell)
        elif c == "-" or c in _DIGITS:
            c = yield from _number(c, tell)
        elif c in _WORDS:
            for wanted in _WORDS[c]:
                if c != wanted:
                    raise Broken
                tell(c)
                c = yield
        else:
            raise Broken
        while closers:  # behind a value
            c = yield from spaces(c, tell)
            if c == closers[-1]:
                tell(c)
                closers.pop()
                c = yield
            elif c == ",":
                tell(c)
                c = yield from spaces((yield), tell)
                if closers[-1] == "}":
                    c = yield from _key(c, tell)
                break
            else:
                raise Broken
        else:
            return c


def _key(c: str, tell: Tell) -> Read:
    c = yield from string(c, tell)
    c = yield from spaces(c, tell)
    if c != ":":
        raise Broken
    tell(c)
    return (yield)


def string(c: str, tell: Tell) -> Read:
    """A text with its quotes. Control characters, which models write and JSON forbids, are told as escapes."""
    if c != '"':
        raise Broken
    tell(c)
    while True:
        c = yield _PLAIN
        if c == '"':
            tell(c)
            return (yield)
        if c == "":
            raise Broken
        if c == "\\":
            tell(c)
            c = yield
            if c not in _ESCAPES:
                raise Broken
            tell(c)
            if c == "u":
                for _ in range(4):
                    c = yield
                    if c not in _HEX:
                        raise Broken
                    tell(c)
        else:
            tell(json.dumps(c)[1:-1] if c < " " else c)


def _number(c: str, tell: Tell) -> Read:
    if c == "-":
        tell(c)
        c = yield
    if c == "0":
        tell(c)
        c = yield
    else:
        c = yield from _digits(c, tell)
    if c == ".":
        tell(c)
        c = yield from _digits((yield), tell)
    if c in ("e", "E"):
        tell(c)
        c = yield
        if c in ("+", "-"):
            tell(c)
            c = yield
        c = yield from _digits(c, tell)
    return c


def _digits(c: str, tell: Tell) -> Read:
    """One digit at least."""
    if c not in _DIGITS:
        raise Broken
    while c in _DIGITS:
        tell(c)
        c = yield
    return c
