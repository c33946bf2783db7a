"""A tokenizer's decoder, a token at a time: text comes as soon as no later token can change it.

    decoder = TokenDecoder(tokenizer)
    text = Detokenizer(decoder, prompt_ids)
    pieces = [text.push(token) for token in ids] + [text.finish()]

The pieces together are ``tokenizer.decode(ids)``, for every decoder of the tokenizers library. There is one exception:
a space that a decoder drops at the beginning of a text stays if the prompt has already begun the text. A decoder is a
chain of steps over parts of a text; at first the parts are tokens. A step holds back the parts whose text depends on
later parts: the bytes of an unfinished character, or a run of byte tokens, which is text only if all of it is UTF-8.
"""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specrs.engine.request.token_bytes import BYTE_LEVEL, byte_of, decoder_parts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTEXT_TOKENS = 8  # tokens of the prompt: enough to tell that its text has begun, and how it ends
_NO_CHARACTER = "\ufffd"

_Decode = Callable[[list[str]], str]  # the decoder of a part's chain, by the library


class Step:
    """One decoder of a chain."""

    def push(self, part: str) -> Iterable[str]:
        """Take one more part, and return the parts that are settled now."""
        return (part,)

    def rest(self) -> Iterable[str]:
        """Return the parts that are settled if no more parts come."""
        return ()

    def cut(self) -> Iterable[str]:
        """Settle the bytes that wait for more, because the next bytes belong to another text; return the parts."""
        return ()


class Each(Step):
    """A decoder that decodes each part by itself."""

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode

    def push(self, part: str) -> Iterable[str]:
        return (self._decode([part]),)


class FirstApart(Step):
    """A decoder that decodes each part by itself, and treats the first part as the beginning of a text."""

    def __init__(self, decode: _Decode) -> None:
        self._decode, self._first = decode, True

    def push(self, part: str) -> Iterable[str]:
        first, self._first = self._first, False
        return (self._decode([part] if first else ["", part]),)


class LastApart(Step):
    """A decoder that decodes each part by itself, and treats the last part as the end of a text."""

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._within = self._last = ""  # text of the latest part, if another part comes behind it, and if it is the end

    def push(self, part: str) -> Iterable[str]:
        behind = self._within
        within, last = self._decode([part, ""]), self._decode([part])
        same = 0
        while same < min(len(within), len(last)) and within[same] == last[same]:
            same += 1
        self._within, self._last = within[same:], last[same:]
        return (behind + within[:same],)

    def rest(self) -> Iterable[str]:
        return (self._last,)


class Unrepeated(Step):
    """A decoder (CTC) that treats equal parts in a row as one part."""

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._latest: str | None = None

    def push(self, part: str) -> Iterable[str]:
        latest, self._latest = self._latest, part
        text = "" if part == latest else self._decode([part])
        return (text,) if text else ()


class Spaced(Step):
    """The step of a tokenizer without a decoder: spaces between tokens."""

    def __init__(self) -> None:
        self._first = True

    def push(self, part: str) -> Iterable[str]:
        first, self._first = self._first, False
        return (part if first else f" {part}",)


class Stripped(Step):
    """A step that strips one text, which a step before it has joined from all parts.

    It removes up to ``start`` characters at the beginning and up to ``stop`` characters at the end.
    """

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._end = ""  # text that `stop` takes if nothing comes behind it

    def push(self, part: str) -> Iterable[str]:
        while self._start and part:
            if part[0] != self._content:
                self._start = 0
            else:
                part, self._start = part[1:], self._start - 1
        text = self._end + part
        ends = min(len(text) - len(text.rstrip(self._content)), self._stop)
        self._end = text[len(text) - ends :]
        return (text[: len(text) - ends],)


class ByteLevel(Step):
    """A decoder of bytes that are written in the byte-level alphabet.

    A part with any other character stands for itself. Invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._bytes = b""  # bytes of an unfinished character

    def push(self, part: str) -> Iterable[str]:
        try:
            data = bytes(BYTE_LEVEL[c] for c in part)
        except KeyError:
            data = part.encode()
        text, read = codecs.utf_8_decode(self._bytes + data, "replace", False)
        self._bytes = (self._bytes + data)[read:]
        return (text,)

    def rest(self) -> Iterable[str]:
        return (self._bytes.decode("utf-8", "replace"),)

    def cut(self) -> Iterable[str]:
        rest, self._bytes = self.rest(), b""
        return rest


class ByteFallback(Step):
    """A decoder of tokens for one byte each, such as ``<0x0A>``: a run of them becomes one part if it is UTF-8, else
    U+FFFD for each byte.

    Attributes:
        run: characters of a run that is UTF-8 so far. One more byte may turn all of them into U+FFFD.
        grown: true if the latest part has completed a character.
    """

    def __init__(self) -> None:
        self.run: list[str] = []
        self.grown = False
        self._bytes = b""  # bytes of an unfinished character
        self._count = 0  # bytes of the run
        self._broken = False  # true if the bytes are no UTF-8

    def push(self, part: str) -> Iterable[str]:
        byte = byte_of(part)
        self.grown = False
        if byte is None:
            return (*self.cut(), part)
        self._count += 1
        if self._broken:
            return (_NO_CHARACTER,)
        try:
            text, read = codecs.utf_8_decode(self._bytes + byte, "strict", False)
        except UnicodeDecodeError:
            self.run, self._bytes, self._broken = [], b"", True
            return (_NO_CHARACTER,) * self._count
        self._bytes = (self._bytes + byte)[read:]
        if text:
            self.run.append(text)
            self.grown = True
        return ()

    def rest(self) -> Iterable[str]:
        if self._bytes:
            return (_NO_CHARACTER,) * self._count
        return ("".join(self.run),) if self.run else ()

    def cut(self) -> Iterable[str]:
        rest = self.rest()
        self.run, self.grown, self._bytes, self._count, self._broken = [], False, b"", 0, False
        return rest


class AtOnce(Step):
    """A decoder that none of the other steps can replace: all of its text comes at the end."""

    def __init__(self, decode: _Decode) -> None:
        self._decode = decode
        self._parts: list[str] = []

    def push(self, part: str) -> Iterable[str]:
        self._parts.append(part)
        return ()

    def rest(self) -> Iterable[str]:
        return (self._decode(self._parts),)

    def cut(self) -> Iterable[str]:
        self._parts = []
        return ()


_ONE_BY_ONE: dict[str, Callable[[_Decode], Step]] = {
    "Replace": Each, "Strip": Each, "Metaspace": FirstApart, "WordPiece": FirstApart, "BPEDecoder": LastApart,
    "CTC": Unrepeated,
}  # fmt: skip
_OF_BYTES: dict[str, Callable[[], Step]] = {"ByteLevel": ByteLevel, "ByteFallback": ByteFallback}


class TokenDecoder:
    """Decodes tokens to text, as a tokenizer does.

    Attributes:
        special: special tokens, which texts leave out unless the user asks for them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._names: dict[int, str | None] = {}
        self._makers = _makers(tokenizer)

    def steps(self) -> list[Step]:
        """Return a new chain of steps, at the beginning of a text."""
        return [make() for make in self._makers]

    def name(self, token: int) -> str | None:
        """Return a token as the tokenizer writes it; ``None`` if the tokenizer lacks it, since a model may have more
        rows."""
        if token not in self._names:
            self._names[token] = self._tokenizer.id_to_token(token)
        return self._names[token]


def _makers(tokenizer: Tokenizer) -> list[Callable[[], Step]]:
    parts = decoder_parts(tokenizer)
    if parts is None:
        return [Spaced]
    makers: list[Callable[[], Step]] = []
    fused = False  # true if all tokens are one part
    for part in parts:
        make = _maker(part, fused)
        if make is None:
            return [partial(AtOnce, tokenizer.decoder.decode)]
        makers.append(make)
        fused = fused or part["type"] in ("Fuse", "ByteLevel")
    return makers


def _maker(part: dict[str, Any], fused: bool) -> Callable[[], Step] | None:
    kind = part["type"]
    if kind == "Fuse":
        return Step
    if fused:
        if kind == "Strip":
            return partial(Stripped, part["content"], part["start"], part["stop"])
        # The step replaces single characters, so no border between parts can lie within a match.
        single = kind == "Replace" and len(part["pattern"].get("String", "")) == 1
        return partial(Each, _library(part)) if single else None
    if kind in _OF_BYTES:
        return _OF_BYTES[kind]
    return partial(_ONE_BY_ONE[kind], _library(part)) if kind in _ONE_BY_ONE else None


def _library(part: dict[str, Any]) -> _Decode:
    """Return the library's implementation of one decoder of a chain."""
    from tokenizers import Tokenizer, models

    state = json.loads(Tokenizer(models.BPE()).to_str())
    decode: _Decode = Tokenizer.from_str(json.dumps({**state, "decoder": part})).decoder.decode
    return decode


class Detokenizer:
    """Makes the text of an output's tokens, piece by piece; no piece is ever taken back.

    Args:
        decoder: decoder of the tokens.
        prompt: tokens before the output. They decide whether the output begins a text. An unfinished character at their
            end does not join the output's bytes.
        skip_special_tokens: leave special tokens out of the text.
        keep: special tokens that stay in the text nonetheless.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        keep: Collection[int] = (),
    ) -> None:
        self._decoder = decoder
        self._dropped = decoder.special.difference(keep) if skip_special_tokens else frozenset[int]()
        self._steps = decoder.steps()
        self._run = next((step for step in self._steps if isinstance(step, ByteFallback)), None)
        for token in self._end_of(prompt):
            self.push(token)
        for i, step in enumerate(self._steps):
            _through(self._steps[i + 1 :], step.cut())

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt that have text."""
        found: list[int] = []
        for token in reversed(prompt):
            if token not in self._dropped and self._decoder.name(token) is not None:
                found.append(token)
                if len(found) == _CONTEXT_TOKENS:
                    break
        return found[::-1]

    def push(self, token: int) -> str:
        """Take the next token, and return the text that is settled now."""
        name = None if token in self._dropped else self._decoder.name(token)
        return "" if name is None else _through(self._steps, (name,))

    def finish(self) -> str:
        """Return the text that is settled once no more tokens come. Call this once."""
        return "".join(_through(self._steps[i + 1 :], step.rest()) for i, step in enumerate(self._steps))

    @property
    def run(self) -> Sequence[str]:
        """Whole characters of byte tokens so far, which the next byte may still turn into U+FFFD."""
        return () if self._run is None else self._run.run

    @property
    def grown(self) -> bool:
        """True if the latest token completed a character of `run`."""
        return self._run is not None and self._run.grown

    def ahead(self) -> str:
        """Return the text of `run`, without settling it."""
        if self._run is None:
            return ""
        behind = self._steps[self._steps.index(self._run) + 1 :]
        return _through([copy.copy(step) for step in behind], ("".join(self.run),))


def _through(steps: Sequence[Step], parts: Iterable[str]) -> str:
    for step in steps:
        parts = [settled for part in parts for settled in step.push(part)]
    return "".join(parts)
