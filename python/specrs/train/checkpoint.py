"""Checkpoints of a training that may end at any time: one file, which is whole or not there.

Everything that decides how a training goes on is in the file, or follows from what its `Identity` names; the order of
text is a function of seed and place, so no generator's state is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from specrs._specrs import ConfigError, SpecrsError
from specrs.models.weight_files import weight_files

FOLDER = "checkpoint"
_FILE = "state.pt"
_SAMPLE = 1 << 20  # bytes of a file's beginning and end that stand for it


class CheckpointError(SpecrsError):
    """A checkpoint that cannot be written; the one before is kept."""


def model_digest(model: Path) -> str:
    """SHA-256 of a model's config.json and tokenizer, and of the beginning, end and size of each file of weights."""
    found = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (model / name).exists():
            found.update((model / name).read_bytes())
    for path in sorted(weight_files(model)[0]):
        size = path.stat().st_size
        with path.open("rb") as file:
            found.update(f"{path.name} {size}".encode() + file.read(_SAMPLE))
            file.seek(max(size - _SAMPLE, 0))
            found.update(file.read(_SAMPLE))
    return found.hexdigest()


class Checkpoint:
    """The checkpoint of a training whose results are to be in a folder.

    Args:
        folder: the results' folder.
        identity: model, text and options, as plain values by name. A training goes on only with the same ones.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder / FOLDER
        self._path = self.folder / _FILE
        self._new = self._path.with_suffix(".new")
        self._identity = dict(identity)

    @property
    def exists(self) -> bool:
        """True if there is one."""
        return self._path.exists()

    def check(self) -> None:
        """Raise ConfigError where a checkpoint cannot be written. Leaves the results' folder, as it was or empty."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._new.touch()
            self._discard()
        except OSError as error:
            raise ConfigError(f"out = {str(self.folder.parent)!r}: cannot be written: {error}") from error

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state; a training that is cut off meanwhile leaves the checkpoint before.

        Raises:
            CheckpointError: there is no room, or another fault of the file system.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # raises what kernels of the training did wrong, which is no fault of the disk
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._new.open("wb") as file:
                torch.save({"identity": json.dumps(self._identity), **state}, file)
                file.flush()
                os.fsync(file.fileno())
            self._new.replace(self._path)
        except (OSError, RuntimeError) as error:  # torch's own are of the latter
            before = "the one before is kept, with which --resume goes on" if self.exists else "there is none yet"
            with suppress(OSError):
                self._discard()
            raise CheckpointError(f"checkpoint in {self.folder}: cannot be written: {error}; {before}") from error

    def _discard(self) -> None:
        """Remove what was begun, and the folder if nothing else is in it."""
        self._new.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def load(self) -> dict[str, Any]:
        """Return the state, on the host.

        Raises:
            ConfigError: there is none, the file is none, or it is of another model, text or option, by name.
        """
        if not self.exists:
            raise ConfigError(f"resume: no checkpoint in {self.folder}; without --resume a training begins")
        try:
            state: dict[str, Any] = torch.load(self._path, map_location="cpu", weights_only=True)
            before = json.loads(state.pop("identity"))
        except Exception as e:  # torch and pickle raise errors of many types
            raise ConfigError(f"resume: {self._path} is no checkpoint: {e}") from e
        for name in {**before, **self._identity}:
            was, now = before.get(name), self._identity.get(name)
            if was != now:
                raise ConfigError(f"resume: {name} = {now!r}: the checkpoint was made with {was!r}")
        return state

    def remove(self) -> None:
        """Remove the checkpoint of a training that is over."""
        self._path.unlink(missing_ok=True)
        self._discard()
