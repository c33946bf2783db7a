"""Finds the model directory that a user names: by a path, or a Hugging Face id, alone or with a revision behind an `@`.

A snapshot of an id is taken from the local hub cache; where it has none, `huggingface_hub` downloads one into it, the
files that specrs reads alone. `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE` forbid that. A directory that holds no model
is recognised by its files, and refused with what would work. The hub cache is read by its layout,
https://huggingface.co/docs/huggingface_hub/guides/manage-cache: `models--ORG--NAME/refs/main` names the commit of a
branch or a tag, `snapshots/COMMIT` is the directory.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrs.models.errors import HubError, ModelFileError
from specrs.models.weight_files import PICKLED, SAFETENSORS, has_weights, weight_files
from specrs.progress import wanted

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\w[\w.+-]*(?:/\w[\w.+-]*)*))?", re.ASCII)
_NEEDS = {
    "model": f"a Hugging Face model directory (config.json, *.safetensors or {PICKLED}, tokenizer.json)",
    "draft": f"the directory of an EAGLE draft head (config.json, *.safetensors or {PICKLED})",
}


_READ = [  # files of a repository, without the same weights in other formats
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "acceptance.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja", "model*.safetensors", "model.safetensors.index.json",
    "adapter_config.json",  # an adapter must be seen to be refused
]  # fmt: skip
_READ_ELSE = [PICKLED, f"{PICKLED}.index.json", "pytorch_model-*-of-*.bin"]  # files of a repository without safetensors
# Files of an adapter as peft saves it.
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FOLDER = re.compile(r"(?!\.+$)[\w.-]{1,64}", re.ASCII)  # name of a snapshot's folder, within the folder of all
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class _Wish:
    """A repository at a revision, for a role."""

    name: str
    revision: str
    role: str

    @property
    def get(self) -> str:
        """The command that downloads the model by hand."""
        at = "" if self.revision == "main" else f" --revision {self.revision}"
        return f"hf download {self.name}{at} --local-dir {self.name.split('/')[1]}"

    def __str__(self) -> str:
        return repr(self.name if self.revision == "main" else f"{self.name}@{self.revision}")


def locate(given: str | os.PathLike[str], role: str, *, download: bool = True, progress: bool | None = None) -> Path:
    """The directory of a model or of a draft head.

    Args:
        given: a path, ``org/name``, or ``org/name@revision``: a branch, a tag or a whole commit; else ``main``.
        role: ``"model"`` or ``"draft"``, the argument that errors name.
        download: true if a snapshot that the hub cache lacks may be downloaded.
        progress: progress bar of a download; see `specrs.progress`.

    Raises:
        ModelFileError: nothing there can be loaded; the message says what there is and what would work.
        HubError: a `ModelFileError`: the model is not in the hub cache, and could not be downloaded; ``why`` says why.
    """
    name = os.fspath(given)
    path = Path(given)
    if not name:  # a path takes an empty name for the current folder
        raise ModelFileError(path, f"{role} = '': no path; give {_NEEDS[role]}")
    try:
        there, directory = path.exists(), path.is_dir()
    except OSError as error:  # too long, or not to be looked at
        raise ModelFileError(path, f"{role}: {error.strerror}; give {_NEEDS[role]}") from None
    if directory:
        _check(path, role)
        return path
    if there:
        raise ModelFileError(path, f"{role}: {_file(path)}; give {_NEEDS[role]}")
    if match := _HUB_ID.fullmatch(name):
        wish = _Wish(match[1], match[2] or "main", role)
        try:
            return _cached(wish)
        except HubError as missing:
            if not download:
                raise
            _download(wish, missing, wanted(progress))
        return _cached(wish)
    raise ModelFileError(path, f"{role}: no such directory; give {_NEEDS[role]}, or org/name of one in the hub cache")


def hub_cache() -> Path:
    """Return the folder where huggingface_hub keeps snapshots, by its environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def _cached(wish: _Wish) -> Path:
    cache, role = hub_cache(), wish.role
    folder = cache / f"models--{wish.name.replace('/', '--')}"
    snapshot = folder / "snapshots" / wish.revision  # snapshot of a commit
    if not _COMMIT.fullmatch(wish.revision):
        try:
            commit = (folder / "refs" / wish.revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            directory = wish.name.split("/")[1]
            raise HubError(
                Path(wish.name),
                f"{role}: no such directory, and no snapshot of {wish} in the hub cache {cache}. To download it: "
                f"{wish.get} (then {role}={directory!r})",
            ) from None
        snapshot = folder / "snapshots" / (commit if _FOLDER.fullmatch(commit) else "no commit")
    _check_adapter(snapshot, role)  # an adapter has no config.json, and downloading more would not help
    if not (snapshot / "config.json").is_file() or not _whole(snapshot):
        raise HubError(snapshot, f"{role}: the hub cache has no whole snapshot of {wish}. To download it: {wish.get}")
    _check(snapshot, role)
    return snapshot


def _whole(snapshot: Path) -> bool:
    """Return whether the weights are there, with every shard that an index names: a download may have been cut."""
    try:
        return all(file.is_file() for file in weight_files(snapshot)[0])
    except ModelFileError:
        return has_weights(snapshot)  # for an index that cannot be read, the loader says what is wrong with it


def _download(wish: _Wish, missing: HubError, shown: bool) -> None:
    """Bring a snapshot into the hub cache. missing: why it is wanted, which errors begin with.

    Raises:
        HubError: the download is forbidden, or it failed.
    """

    def failed(why: str) -> HubError:
        return HubError(missing.path, f"{missing.why}. It was not downloaded: {why}")

    for variable in _OFFLINE:
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise failed(f"{variable} = {os.environ[variable]!r}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise failed("huggingface_hub is not installed") from None
    try:
        with _quiet(not shown):
            revision = wish.revision
            for files in (_READ, _READ_ELSE):
                got = Path(snapshot_download(wish.name, revision=revision, allow_patterns=files, cache_dir=hub_cache()))
                if has_weights(got) or _adapter(got):
                    return
                revision = got.name  # the same commit, whatever becomes of the branch meanwhile
    except Exception as error:  # errors of the hub's own kinds, of its HTTP client, of the disk
        said = " ".join(str(error).split()) or "no reason given"
        raise failed(f"{type(error).__name__}: {said}") from error
    raise failed(
        f"no weights came: the repository has no {SAFETENSORS}, no {PICKLED} and no shards of them (GGUF is not read), "
        "or the hub was not reached and the cache has none"
    )


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Without the bars of huggingface_hub, which are on or off for a process."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    if not quiet or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _has(directory: Path, pattern: str) -> bool:
    return next(directory.glob(pattern), None) is not None


def _file(path: Path) -> str:
    """Return the kind of a file that is given in place of a directory."""
    if path.suffix == ".gguf":
        return "a GGUF file, whose format is not read; the model's original safetensors work"
    if path.suffix == ".safetensors" or path.name == PICKLED:
        return f"a file; its directory {path.parent} works if it has a config.json"
    if path.suffix in (".bin", ".pt", ".pth"):
        return f"pickled weights; those of a whole model are read as {PICKLED} in a directory with a config.json"
    return "a file, no directory"


def _check(directory: Path, role: str) -> None:
    """Refuse a directory that holds something else, by name."""
    needs = f"give {_NEEDS[role]}"
    _check_adapter(directory, role)
    if not has_weights(directory) and not _has(directory, "*.safetensors") and _has(directory, "*.gguf"):
        why = "only GGUF files, whose format is not read; the model's original safetensors work"
        raise ModelFileError(directory, f"{role}: {why}")
    if not (directory / "config.json").is_file():
        if next(directory.iterdir(), None) is None:
            raise ModelFileError(directory, f"{role}: an empty directory; {needs}")
        if (directory / "snapshots").is_dir() and directory.name.startswith("models--"):
            name = directory.name.removeprefix("models--").replace("--", "/", 1)
            raise ModelFileError(
                directory, f"{role}: a folder of the hub cache; give {name!r}, or a folder in snapshots/"
            )
        raise ModelFileError(directory / "config.json", f"{role}: no such file; {needs}")


def _adapter(directory: Path) -> list[str]:
    """The files of an adapter (LoRA and its like) in a directory."""
    return [name for name in _ADAPTER if (directory / name).is_file()]


def _check_adapter(directory: Path, role: str) -> None:
    """Refuse an adapter, alone or beside weights: without it those are another model. Raises ModelFileError."""
    if not (files := _adapter(directory)):
        return
    beside = has_weights(directory)
    where = "beside the weights of a model, and adapters are not applied" if beside else "not a whole model"
    why = (
        f"an adapter such as LoRA ({', '.join(files)}), {where}; merge it into its base model (peft: "
        "merge_and_unload(), which LoRA and most others have, then save_pretrained) and give that directory"
    )
    also = "; without these files in it, the directory runs as the model that its weights are" if beside else ""
    raise ModelFileError(directory, f"{role}: {why}{also}")
