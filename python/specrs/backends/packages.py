"""The packages whose kernels attention backends launch on a GPU: the oldest versions, and how each is loaded.

    from specrs.backends.packages import TRITON, flash_attention_op

Nothing here is imported before a backend is used on a GPU. A package that is absent or too old is a
`MissingPackageError`, which names the package and the version; one that does not load is a `ConfigError` with the
reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from specrs._specrs import ConfigError
from specrs.backends.base import MissingPackageError


@dataclass(frozen=True)
class Package:
    """A package that a backend needs on a GPU.

    Attributes:
        backend: name of the backend.
        name: name of the distribution.
        oldest: the oldest version with which the backend was seen to run.
    """

    backend: str
    name: str
    oldest: str

    def check(self, installed: str | None, backend: str | None = None) -> None:
        """Raise MissingPackageError where the version that is installed, if any, is not new enough.

        Args:
            backend: the backend that needs the package here, if it is another.
        """
        if installed is None or _release(installed) < _release(self.oldest):
            raise MissingPackageError(backend or self.backend, self.name, self.oldest, installed)

    def installed(self) -> str | None:
        """Return the version that is installed, without importing it; ``None`` if there is none."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def broken(self, version: str | None, error: Exception) -> ConfigError:
        """The error for a package that is there and cannot be used."""
        return ConfigError(f"attention_backend = {self.backend!r}: {self.name} {version} does not load: {error}")


TRITON = Package("triton", "triton", "3.6")
FLASHINFER = Package("flashinfer", "flashinfer-python", "0.7.2")
VLLM = Package("flash_attention", "vllm", "0.24")
"""vLLM's wheel has the operator of FlashAttention-3 for every head size, in a library that needs nothing else of it."""

_FA3 = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
PACKAGES = (TRITON, FLASHINFER, VLLM)


def triton(backend: str) -> ModuleType:
    """Import triton, in which each of the backends has kernels."""
    try:
        module = importlib.import_module("triton")
    except ImportError as error:
        raise MissingPackageError(backend, TRITON.name, TRITON.oldest, None) from error
    TRITON.check(module.__version__, backend)
    return module


def check_driver(backend: str) -> None:
    """Raise ConfigError where triton cannot launch kernels: it builds a module for that, once, by a C compiler."""
    module: Any = triton(backend)
    try:
        module.runtime.driver.active.get_current_target()
    except Exception as error:
        why = f"triton {module.__version__} finds no driver; it needs a GPU, and a C compiler (cc) to build its module"
        raise ConfigError(f"attention_backend = {backend!r}: {why}: {error}") from error


def flashinfer_wrapper() -> Any:
    """Return the class ``BatchPrefillWithPagedKVCacheWrapper``."""
    FLASHINFER.check(version := FLASHINFER.installed())
    try:
        return importlib.import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise FLASHINFER.broken(version, error) from error


def flash_attention_op() -> Callable[..., list[Any]]:
    """Load the operator of FlashAttention-3 from vLLM's library, without importing vLLM, and return it."""
    import torch

    VLLM.check(version := VLLM.installed())
    found = importlib.util.find_spec("vllm")
    folders = [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
    library = next((path for folder in folders if (path := folder / _FA3).exists()), None)
    if library is None:
        raise VLLM.broken(version, FileNotFoundError(f"no {_FA3} in {', '.join(map(str, folders)) or 'its folders'}"))
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        return torch.ops._vllm_fa3_C.fwd
    except (OSError, RuntimeError, AttributeError) as error:
        raise VLLM.broken(version, error) from error


def _release(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, as far as there are so many."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])
