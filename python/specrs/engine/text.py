"""From tokens to text, a token at a time: incremental detokenisation and stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"
_MAX_HELD_TOKENS = 8  # more tokens than any UTF-8 character has bytes: what is held is not a character in the making


class Decoder(Protocol):
    """The part of ``tokenizers.Tokenizer`` that turns ids into text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""
        ...


class KeepingDecoder:
    """Leaves special tokens out of texts, but for some.

    Args:
        decoder: of all tokens.
        special: tokens that texts leave out.
        kept: of those, the ones that texts have.
    """

    def __init__(self, decoder: Decoder, special: Collection[int], kept: Collection[int]) -> None:
        self._decoder, self._dropped = decoder, frozenset(special) - frozenset(kept)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """As the decoder, but for the special tokens that stay."""
        if not skip_special_tokens:
            return self._decoder.decode(ids, skip_special_tokens=False)
        return self._decoder.decode([i for i in ids if i not in self._dropped], skip_special_tokens=False)


class Detokenizer:
    """Yields the text that each token completes.

    A window of earlier tokens is decoded along with the new one, since a token's text can depend on its neighbours
    (leading spaces, byte fallback); bytes of an unfinished UTF-8 character wait for the next token.
    """

    def __init__(self, decoder: Decoder, context: Sequence[int], skip_special_tokens: bool = True):
        self._decoder, self._skip = decoder, skip_special_tokens
        self._ids = list(context)
        self._start = 0  # window start
        self._read = len(self._ids)  # tokens whose text was released
        self._known = self._decode()  # text of the window's released tokens

    def _decode(self) -> str:
        return self._decoder.decode(self._ids[self._start :], skip_special_tokens=self._skip)

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode()
        if text.endswith(_UNFINISHED) and len(self._ids) - self._read < _MAX_HELD_TOKENS:
            return ""
        piece = text[len(self._known) :]
        if not piece:  # a special token: alone, it would make the next token the first of a text
            self._read, self._known = len(self._ids), text
            return piece
        self._start, self._read = self._read, len(self._ids)
        self._known = self._decode()
        return piece

    def finish(self) -> str:
        """Text of bytes that never became a character (replacement characters)."""
        piece = self._decode()[len(self._known) :]
        self._start = self._read = len(self._ids)
        self._known = ""
        return piece


class StopMatcher:
    """Finds stop strings in text that arrives in pieces; holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str], include: bool):
        self._stop = tuple(stop)
        self._include = include
        self._longest = max((len(s) for s in self._stop), default=0)
        self._held = ""

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Text released by ``piece``, and the stop string that it completed, if any and if it ``may_stop`` already."""
        if not self._stop:
            return piece, None
        window, old = self._held + piece, len(self._held)
        # What is held may be a whole one, which came when nothing might stop and begins a longer one: it ends nothing.
        hits = [(at + len(s), at, s) for s in self._stop if (at := window.find(s, max(old - len(s) + 1, 0))) >= 0]
        if hits and may_stop:
            # What ends first was completed first; of two that end together, the longer one (it begins earlier).
            end, at, s = min(hits)
            self._held = ""
            return window[: end if self._include else at], s
        keep = self._pending(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _pending(self, window: str) -> int:
        """Length of the longest suffix of ``window`` that is a proper prefix of a stop string."""
        for n in range(min(self._longest - 1, len(window)), 0, -1):
            if any(len(s) > n and s.startswith(window[-n:]) for s in self._stop):
                return n
        return 0
