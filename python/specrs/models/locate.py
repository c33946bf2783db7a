"""From what a user names to a model directory: a path, or a Hugging Face id.

A snapshot of an id is taken from the local hub cache; where it has none, `huggingface_hub` downloads one into it, the
files that specrs reads alone. `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE` forbid that. A directory that holds no model
is recognised by its files, and refused with what would work. The hub cache is read by its layout,
https://huggingface.co/docs/huggingface_hub/guides/manage-cache: `models--ORG--NAME/refs/main` names the revision,
`snapshots/REVISION` is the directory.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specrs.models.errors import HubError, ModelFileError
from specrs.progress import wanted

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NEEDS = {
    "model": "a Hugging Face model directory (config.json, *.safetensors, tokenizer.json)",
    "draft": "the directory of an EAGLE-3 draft head (config.json, *.safetensors)",
}


_READ = [  # of a repository: neither pickles, nor the same weights in other formats
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja", "model*.safetensors", "model.safetensors.index.json",
]  # fmt: skip
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def locate(given: str | os.PathLike[str], role: str, *, download: bool = True, progress: bool | None = None) -> Path:
    """The directory of a model or of a draft head.

    Args:
        given: a path, or ``org/name``.
        role: ``"model"`` or ``"draft"``, the argument that errors name.
        download: whether a snapshot that the hub cache lacks may be downloaded.
        progress: of a download; see `specrs.progress`.

    Raises:
        ModelFileError: nothing there that can be loaded, with what there is and what would work.
        HubError: a `ModelFileError`: it is not in the hub cache, and could not be downloaded; ``why`` says why.
    """
    name = os.fspath(given)
    path = Path(given)
    if not name:  # which a path takes for the folder that the process stands in
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
    if _HUB_ID.fullmatch(name):
        try:
            return _cached(name, role)
        except HubError as missing:
            if not download:
                raise
            _download(name, role, missing, wanted(progress))
        return _cached(name, role)
    raise ModelFileError(path, f"{role}: no such directory; give {_NEEDS[role]}, or org/name of one in the hub cache")


def hub_cache() -> Path:
    """Where huggingface_hub keeps snapshots, by its environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def _cached(name: str, role: str) -> Path:
    cache = hub_cache()
    folder = cache / f"models--{name.replace('/', '--')}"
    get = f"hf download {name} --local-dir {name.split('/')[1]}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise HubError(
            Path(name),
            f"{role}: no such directory, and no snapshot of {name!r} in the hub cache {cache}. To download it: {get} "
            f"(then {role}={name.split('/')[1]!r})",
        ) from None
    snapshot = folder / "snapshots" / revision
    if (
        Path(revision).name != revision
        or revision in ("", "..")  # the first is the folder of all, the second leads out of it
        or not (snapshot / "config.json").is_file()
        or not _has(snapshot, "*.safetensors")
        or not _whole(snapshot)
    ):
        raise HubError(snapshot, f"{role}: the hub cache has no whole snapshot of {name!r}. To download it: {get}")
    _check(snapshot, role)
    return snapshot


def _whole(snapshot: Path) -> bool:
    """Whether every shard that the index names is there: a download may have been cut."""
    try:
        index = json.loads((snapshot / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return all((snapshot / shard).is_file() for shard in set(index["weight_map"].values()))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return True  # the loader says what is wrong with it


def _download(name: str, role: str, missing: HubError, shown: bool) -> None:
    """Bring a snapshot into the hub cache. missing: why it is wanted, which errors begin with.

    Raises:
        HubError: it is forbidden, or it failed.
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
            snapshot = Path(snapshot_download(name, allow_patterns=_READ, cache_dir=hub_cache()))
    except Exception as error:  # of its own kinds, of its HTTP client's, of the disk's
        said = " ".join(str(error).split()) or "no reason given"
        raise failed(f"{type(error).__name__}: {said}") from error
    if not _has(snapshot, "*.safetensors"):
        raise failed("the repository has no model*.safetensors (pickled weights and GGUF are not read)")


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
    """What a file is, where a directory is needed."""
    if path.suffix == ".gguf":
        return "a GGUF file, whose format is not read; the model's original safetensors work"
    if path.suffix == ".safetensors":
        return f"a file; its directory {path.parent} works if it has a config.json"
    if path.suffix in (".bin", ".pt", ".pth"):
        return "pickled weights, which run code when loaded and are refused; safetensors work"
    return "a file, no directory"


def _check(directory: Path, role: str) -> None:
    """Refuse a directory that holds something else, by name."""
    needs = f"give {_NEEDS[role]}"
    if (directory / "adapter_config.json").is_file() and not _has(directory, "model*.safetensors"):
        raise ModelFileError(
            directory,
            f"{role}: a LoRA adapter (adapter_config.json), not a whole model; merge it into its base model "
            "(peft: merge_and_unload(), then save_pretrained) and give that directory",
        )
    if not _has(directory, "*.safetensors"):
        if _has(directory, "*.gguf"):
            why = "only GGUF files, whose format is not read; the model's original safetensors work"
            raise ModelFileError(directory, f"{role}: {why}")
        if _has(directory, "pytorch_model*.bin*"):
            raise ModelFileError(
                directory,
                f"{role}: only pickled weights (pytorch_model.bin), which run code when loaded and are refused; "
                "convert them: safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')",
            )
    if not (directory / "config.json").is_file():
        if next(directory.iterdir(), None) is None:
            raise ModelFileError(directory, f"{role}: an empty directory; {needs}")
        if (directory / "snapshots").is_dir() and directory.name.startswith("models--"):
            name = directory.name.removeprefix("models--").replace("--", "/", 1)
            raise ModelFileError(
                directory, f"{role}: a folder of the hub cache; give {name!r}, or a folder in snapshots/"
            )
        raise ModelFileError(directory / "config.json", f"{role}: no such file; {needs}")
