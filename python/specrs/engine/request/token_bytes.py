"""The bytes that each token stands for, from a tokenizer's own table.

Decoding a single id would lose information: bytes of an unfinished character become U+FFFD, and a leading space may
vanish.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # the library accepts a sign, too


class TokenTable:
    """The bytes of a tokenizer's tokens, by id.

    The decoder tells how tokens are written: in the byte-level alphabet; with ``<0x..>`` for bytes; with a mark for a
    space; or with a prefix for a continuation within a word. The same holds for added tokens. A token's bytes are the
    bytes that it has within a text, so they include a leading space, although a decoder may strip that at the beginning
    of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        parts = decoder_parts(tokenizer) or []
        kinds = {part["type"]: part for part in parts}
        self._alphabet = BYTE_LEVEL if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._spaces = [p["replacement"] for p in parts if p["type"] == "Metaspace"]
        replaced = [p["pattern"] for p in parts if p["type"] == "Replace" and p.get("content") == " "]
        self._spaces += [pattern["String"] for pattern in replaced if "String" in pattern]
        self._prefix = kinds["WordPiece"]["prefix"] if "WordPiece" in kinds else None
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """Return the bytes of a token; none if the tokenizer lacks it, since a model may have more rows."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._spelled(token)
        return found

    def _spelled(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._alphabet is not None and all(c in self._alphabet for c in text):
            return bytes(self._alphabet[c] for c in text)
        if self._fallback and (byte := byte_of(text)) is not None:
            return byte
        for mark in self._spaces:
            text = text.replace(mark, " ")
        if self._prefix is not None:
            text = text[len(self._prefix) :] if text.startswith(self._prefix) else f" {text}"
        return text.encode("utf-8", "replace")


def byte_of(token: str) -> bytes | None:
    """Return the byte that a token such as ``<0x0A>`` stands for; ``None`` for another kind of token."""
    found = _BYTE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else None


def decoder_parts(tokenizer: Tokenizer) -> list[dict[str, Any]] | None:
    """Return the decoders of a tokenizer, first to last, as in ``tokenizer.json``; ``None`` if there are none."""
    if tokenizer.decoder is None:
        return None
    return _flat(json.loads(tokenizer.decoder.__getstate__()))


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [one for part in state["decoders"] for one in _flat(part)]


def _byte_level() -> dict[str, int]:
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in set(own)]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_LEVEL = _byte_level()
"""The byte of each letter of the byte-level alphabet. Letters for printable bytes of Latin-1 are these characters
themselves; the letters for the other bytes, in order, are the characters from U+0100 on."""
