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
        CapsuleError: what is wrong, and where.
    """
    return Capsule.from_json(unpack(data))


def save(capsule: Capsule, path: str | os.PathLike[str]) -> None:
    """Write a file, whole or not at all."""
    data = dumps(capsule)
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def load(path: str | os.PathLike[str]) -> Capsule:
    """Read a file.

    Raises:
        CapsuleError: what is wrong, and where, with the path.
        OSError: the file cannot be opened.
    """
    with open(path, "rb") as f:
        data = f.read(MAX_FILE + 1)
    try:
        return loads(data)
    except CapsuleError as e:
        raise CapsuleError(e.where, e.why, os.fspath(path)) from None
