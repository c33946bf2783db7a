"""API keys, kept as SHA-256 digests."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specrs._specrs import ConfigError

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Keys:
    """Keys of those who may ask.

    Attributes:
        digests: SHA-256 of each key.
    """

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """Take keys, or digests of them as ``sha256:<64 hexadecimal digits>``.

        Raises:
            ConfigError: a key is empty, has spaces or characters outside ASCII, or a digest is malformed. The message
                does not show it.
        """
        digests = []
        for i, key in enumerate([keys] if isinstance(keys, str) else keys):
            if not isinstance(key, str) or not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(f"API key {i}: must be printable ASCII without spaces")
            if key.startswith("sha256:"):
                if not (found := _DIGEST.fullmatch(key)):
                    raise ConfigError(f"API key {i}: must be sha256: and 64 hexadecimal digits")
                digests.append(bytes.fromhex(found[1]))
            else:
                digests.append(hashlib.sha256(key.encode()).digest())
        return cls(tuple(digests))

    @classmethod
    def from_file(cls, path: str | Path) -> Keys:
        """A key, or a digest of one, on each line; lines that begin with ``#`` are comments."""
        lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
        keys = cls.of([line for line in lines if line and not line.startswith("#")])
        if not keys:
            raise ConfigError(f"{path}: has no API key")
        return keys

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Keys:
        """Read the keys of ``SPECRS_API_KEY``, several with commas between, and of the file ``SPECRS_API_KEY_FILE``."""
        keys = cls.of([key for key in environ.get("SPECRS_API_KEY", "").split(",") if key])
        path = environ.get("SPECRS_API_KEY_FILE")
        return keys if not path else cls(keys.digests + cls.from_file(path).digests)

    def __bool__(self) -> bool:
        return bool(self.digests)

    def accept(self, key: bytes) -> bool:
        """Return whether a key is one of them. The time of the check depends neither on which key it is, nor on what is
        wrong with it."""
        asked = hashlib.sha256(key).digest()
        found = False
        for digest in self.digests:
            found |= hmac.compare_digest(asked, digest)
        return found
