"""Reading and writing capsule files."""

from __future__ import annotations

import os
from pathlib import Path

from specrs.capsule.container import MAX_FILE, pack, unpack
from specrs.capsule.errors import CapsuleError
from specrs.capsule.schema import Capsule


def dumps(capsule: Capsule) -> bytes:
    """The bytes of a file; the same round always gives the same ones."""
    capsule.check()
    return pack(capsule.to_json())


def loads(data: bytes) -> Capsule:
    """The capsule in the bytes of a file.

    Raises:
        CapsuleError: the data is no valid capsule; the message says what is wrong, and where.
    """
    return Capsule.from_json(unpack(data))


def save(capsule: Capsule, path: str | os.PathLike[str]) -> None:
    """Write a file, whole or not at all; a path that is no regular file (a pipe, a device) is written as the data
    comes.

    Raises:
        OSError: the file cannot be written; no part of it is left.
    """
    data = dumps(capsule)
    target = Path(os.path.realpath(path))  # behind links, which stay what they are
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> Capsule:
    """Read a file.

    Raises:
        CapsuleError: the file is no valid capsule; the message says what is wrong, and where, with the path.
        OSError: the file cannot be opened.
    """
    with open(path, "rb") as f:
        data = f.read(MAX_FILE + 1)
    try:
        return loads(data)
    except CapsuleError as e:
        raise CapsuleError(e.where, e.why, os.fspath(path)) from None
