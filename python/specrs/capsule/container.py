"""The container of a capsule: a line that says what it is, a line with lengths and checksum, a compressed body.

::

    specrs capsule 1\\n
    body=<bytes> raw=<bytes> sha256=<hex>\\n
    <body: zlib of JSON, UTF-8>

The checksum covers the lengths and the compressed body, so that a flipped byte anywhere is seen before anything is
decompressed. A file is held against limits before it is believed: its bytes against `MAX_FILE`, the stated length of
the body against `MAX_RAW`, and the body, piece by piece as it is decompressed, against the stated length and against
`MAX_VALUES`, `MAX_LISTS` and `MAX_OBJECTS`. A value of JSON takes far more memory than its text, so a body that has too
many is refused before the first is made. The same value always gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from typing import Any

from specrs.capsule.errors import CapsuleError

MAGIC = b"specrs capsule "
VERSION = 1
MAX_RAW = 1 << 26
"""Most bytes of a body, decompressed."""
MAX_FILE = MAX_RAW + 4096
"""Most bytes of a file."""
MAX_VALUES = 1 << 22
"""Most commas of a body, which part its values: twice the pages of 256 requests of 131072 tokens, 16 a page."""
MAX_LISTS = 3 << 19
"""Most lists of a body: one for each owner of a page beside the batch, and six for each request."""
MAX_OBJECTS = 1 << 18
"""Most objects of a body: two for each request, and as many again."""

_SIZES = re.compile(rb"body=(0|[1-9][0-9]{0,9}) raw=(0|[1-9][0-9]{0,9}) sha256=([0-9a-f]{64})")
_LONGEST_LINE = 128
_PIECE = 1 << 16  # bytes that are decompressed and counted at once


def pack(value: dict[str, Any]) -> bytes:
    """The bytes of a capsule that holds a JSON value.

    Raises:
        CapsuleError: a value beyond the limits.
    """
    raw = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > MAX_RAW:
        raise CapsuleError("body", f"{len(raw)} bytes, the limit is {MAX_RAW}")
    _Count().add(raw)
    body = zlib.compress(raw, 9)
    digest = _digest(len(body), len(raw), body)
    return MAGIC + b"%d\n" % VERSION + b"body=%d raw=%d sha256=%s\n" % (len(body), len(raw), digest) + body


def unpack(data: bytes) -> dict[str, Any]:
    """The JSON value in the bytes of a capsule.

    Raises:
        CapsuleError: says which part is wrong and how.
    """
    version, at = _first_line(data)
    if version != VERSION:
        newer = f"; a newer specrs wrote it, this one reads version {VERSION}" if version > VERSION else ""
        raise CapsuleError("version", f"{version}: must be {VERSION}{newer}")
    end = data.find(b"\n", at, at + _LONGEST_LINE)
    match = None if end < 0 else _SIZES.fullmatch(data, at, end)
    if match is None:
        why = "truncated" if end < 0 and len(data) - at < _LONGEST_LINE else "damaged"
        raise CapsuleError("header", f"{why}: the second line must be body=<bytes> raw=<bytes> sha256=<hex>")
    body = memoryview(data)[end + 1 :]
    body_len, raw_len, digest = int(match[1]), int(match[2]), match[3]
    if raw_len > MAX_RAW:
        raise CapsuleError("header", f"too large: it states a body of {raw_len} bytes, the limit is {MAX_RAW}")
    if len(body) != body_len:
        what = "truncated" if len(body) < body_len else "followed by something else"
        raise CapsuleError("body", f"{what}: the header states {body_len} bytes, there are {len(body)}")
    if _digest(body_len, raw_len, body) != digest:
        raise CapsuleError("body", "damaged: its checksum is not the one in the header")
    return _parse(_decompress(body, raw_len))


class _Count:
    """Counts of a body's parts, taken from its text: none of the counted characters is in a string of a capsule."""

    def __init__(self) -> None:
        self._counts = [0, 0, 0]

    def add(self, piece: bytes) -> None:
        """Count a piece.

        Raises:
            CapsuleError: the body has more than a limit allows, or characters outside ASCII, which take up to four
                times their bytes as text.
        """
        if not piece.isascii():
            raise CapsuleError("body", "not readable as JSON: a capsule is ASCII")
        limits = ((b",", "values", MAX_VALUES), (b"[", "lists", MAX_LISTS), (b"{", "objects", MAX_OBJECTS))
        for i, (mark, what, most) in enumerate(limits):
            self._counts[i] += piece.count(mark)
            if self._counts[i] > most:
                raise CapsuleError("body", f"too large: more than {most} {what}")


def _digest(body_len: int, raw_len: int, body: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(b"%d %d " % (body_len, raw_len))
    digest.update(body)
    return digest.hexdigest().encode()


def _first_line(data: bytes) -> tuple[int, int]:
    """The version, and where the second line begins."""
    if not data:
        raise CapsuleError("file", "empty")
    if len(data) > MAX_FILE:
        raise CapsuleError("file", f"too large: {len(data)} bytes, the limit is {MAX_FILE}")
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            raise CapsuleError("file", f"truncated: {len(data)} bytes, not even the first line is whole")
        raise CapsuleError("file", f"not a capsule: it begins with {data[:16]!r}, a capsule with {MAGIC!r}")
    end = data.find(b"\n", 0, _LONGEST_LINE)
    if end < 0 and len(data) < _LONGEST_LINE:
        raise CapsuleError("file", "truncated: the first line is not whole")
    number = data[len(MAGIC) : end if end >= 0 else _LONGEST_LINE]
    if re.fullmatch(rb"[1-9][0-9]{0,8}", number) is None:
        raise CapsuleError("version", f"damaged: {number[:16]!r} is no version number")
    return int(number), end + 1


def _decompress(body: memoryview, raw_len: int) -> str:
    """Return the text of a body, without ever holding more of it in memory than is allowed."""
    stream, count, raw = zlib.decompressobj(), _Count(), bytearray()
    try:
        for at in range(0, len(body), _PIECE):
            rest: bytes | memoryview = body[at : at + _PIECE]
            more = True
            while more and len(raw) <= raw_len:
                piece = stream.decompress(rest, _PIECE)
                count.add(piece)
                raw += piece
                rest = stream.unconsumed_tail
                more = bool(rest) or len(piece) == _PIECE
    except zlib.error as e:
        raise CapsuleError("body", f"not decompressible: {e}") from None
    whole = stream.eof and not stream.unused_data
    if len(raw) != raw_len or not whole:
        at_least = "more than " if len(raw) > raw_len or not stream.eof else ""
        raise CapsuleError("body", f"inconsistent: {raw_len} bytes stated, {at_least}{min(len(raw), raw_len)} found")
    return raw.decode("ascii")


def _parse(text: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        return value

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise CapsuleError("body", "not readable as JSON: nested too deeply") from None
    except ValueError as e:
        raise CapsuleError("body", f"not readable as JSON: {e}") from None
    if not isinstance(value, dict):
        raise CapsuleError("body", f"holds a {type(value).__name__}, must be an object")
    return value
