"""The container of a capsule: a line that says what it is, a line with lengths and checksum, a compressed body.

::

    specrs capsule 1\\n
    body=<bytes> raw=<bytes> sha256=<hex>\\n
    <body: zlib of JSON, UTF-8>

The checksum covers the lengths and the compressed body, so that a flipped byte anywhere is seen before anything is
decompressed; lengths are checked against `MAX_RAW` before they are believed, and decompression stops at the stated
length, so that no file can ask for more memory than that. The same value always gives the same bytes.
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
"""Most bytes of a body, decompressed: a round of 256 requests of 131072 tokens has a tenth of it."""
MAX_FILE = MAX_RAW + 4096
"""Most bytes of a file."""

_SIZES = re.compile(rb"body=(0|[1-9][0-9]{0,9}) raw=(0|[1-9][0-9]{0,9}) sha256=([0-9a-f]{64})")
_LONGEST_LINE = 128


def pack(value: dict[str, Any]) -> bytes:
    """The bytes of a capsule that holds a JSON value.

    Raises:
        CapsuleError: a value of more than `MAX_RAW` bytes.
    """
    raw = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > MAX_RAW:
        raise CapsuleError("body", f"{len(raw)} bytes, the limit is {MAX_RAW}")
    body = zlib.compress(raw, 9)
    digest = _digest(len(body), len(raw), body)
    return MAGIC + b"%d\n" % VERSION + b"body=%d raw=%d sha256=%s\n" % (len(body), len(raw), digest) + body


def unpack(data: bytes) -> dict[str, Any]:
    """The JSON value in the bytes of a capsule.

    Raises:
        CapsuleError: says which part is wrong and how.
    """
    version, rest = _first_line(data)
    if version != VERSION:
        newer = f"; a newer specrs wrote it, this one reads version {VERSION}" if version > VERSION else ""
        raise CapsuleError("version", f"{version}: must be {VERSION}{newer}")
    line, newline, body = rest.partition(b"\n")
    match = _SIZES.fullmatch(line)
    if not newline or match is None:
        why = "truncated" if not newline and len(rest) < _LONGEST_LINE else "damaged"
        raise CapsuleError("header", f"{why}: the second line must be body=<bytes> raw=<bytes> sha256=<hex>")
    body_len, raw_len, digest = int(match[1]), int(match[2]), match[3]
    if raw_len > MAX_RAW:
        raise CapsuleError("header", f"too large: it states a body of {raw_len} bytes, the limit is {MAX_RAW}")
    if len(body) != body_len:
        what = "truncated" if len(body) < body_len else "followed by something else"
        raise CapsuleError("body", f"{what}: the header states {body_len} bytes, there are {len(body)}")
    if _digest(body_len, raw_len, body) != digest:
        raise CapsuleError("body", "damaged: its checksum is not the one in the header")
    return _parse(_decompress(body, raw_len))


def _digest(body_len: int, raw_len: int, body: bytes) -> bytes:
    return hashlib.sha256(b"%d %d " % (body_len, raw_len) + body).hexdigest().encode()


def _first_line(data: bytes) -> tuple[int, bytes]:
    if not data:
        raise CapsuleError("file", "empty")
    if len(data) > MAX_FILE:
        raise CapsuleError("file", f"too large: {len(data)} bytes, the limit is {MAX_FILE}")
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            raise CapsuleError("file", f"truncated: {len(data)} bytes, not even the first line is whole")
        raise CapsuleError("file", f"not a capsule: it begins with {data[:16]!r}, a capsule with {MAGIC!r}")
    line, newline, rest = data.partition(b"\n")
    number = line[len(MAGIC) :]
    if not newline and len(data) < _LONGEST_LINE:
        raise CapsuleError("file", "truncated: the first line is not whole")
    if re.fullmatch(rb"[1-9][0-9]{0,8}", number) is None:
        raise CapsuleError("version", f"damaged: {number[:16]!r} is no version number")
    return int(number), rest


def _decompress(body: bytes, raw_len: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(body, raw_len + 1)
    except zlib.error as e:
        raise CapsuleError("body", f"not decompressible: {e}") from None
    if len(raw) != raw_len or not stream.eof or stream.unused_data:
        at_least = "more than " if len(raw) > raw_len or not stream.eof else ""
        raise CapsuleError("body", f"inconsistent: {raw_len} bytes stated, {at_least}{min(len(raw), raw_len)} found")
    return raw


def _parse(raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key occurs twice in one object")
        return value

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise CapsuleError("body", "not readable as JSON: nested too deeply") from None
    except ValueError as e:  # JSON errors and UTF-8 errors are ValueErrors
        raise CapsuleError("body", f"not readable as JSON: {e}") from None
    if not isinstance(value, dict):
        raise CapsuleError("body", f"holds a {type(value).__name__}, must be an object")
    return value
