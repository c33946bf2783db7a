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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

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
        if installed is None or not _new_enough(installed, self.oldest):
            raise MissingPackageError(backend or self.backend, self.name, self.oldest, installed)

    def installed(self) -> str | None:
        """Return the version that is installed, without importing it; ``None`` if there is none."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def broken(self, version: str | None, error: Exception, backend: str | None = None) -> ConfigError:
        """Return the error for a package that is there and cannot be used; ``backend`` as `check` has it."""
        name = backend or self.backend
        return ConfigError(f"attention_backend = {name!r}: {self.name} {version} does not load: {error}")


TRITON = Package("triton", "triton", "3.6")
FLASHINFER = Package("flashinfer", "flashinfer-python", "0.7.2.post1")
VLLM = Package("flash_attention", "vllm", "0.24")
"""vLLM's wheel has the operator of FlashAttention-3 for every head size, in a library that needs nothing else of it."""

FA3_ARGUMENTS = (
    "q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left",
    "window_size_right", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa",
    "sm_margin", "s_aux", "cp_world_size", "cp_rank", "cp_tot_seqused_k",
)  # fmt: skip
"""Names of the operator's arguments, by which it is called."""

_TOLD = 300  # characters of the two ends of an error
_FA3 = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
PACKAGES = (TRITON, FLASHINFER, VLLM)


def triton(backend: str) -> ModuleType:
    """Import triton, in which each of the backends has kernels."""
    try:
        module = importlib.import_module("triton")
        version = module.__version__
    except ModuleNotFoundError as error:
        if error.name not in (None, "triton"):
            raise TRITON.broken(TRITON.installed(), error, backend) from error
        raise MissingPackageError(backend, TRITON.name, TRITON.oldest, None) from error
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise TRITON.broken(TRITON.installed(), error, backend) from error
    TRITON.check(version, backend)
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


def no_flashinfer_kernels(dtype: str, head_dim: int, error: Exception) -> ConfigError:
    """Return the error for kernels that FlashInfer neither has compiled nor could compile."""
    why = str(error).strip() or type(error).__name__
    if len(why) > 2 * _TOLD:
        why = f"{why[:_TOLD]} ... {why[-_TOLD:]}"  # ninja's output ends in what went wrong
    return ConfigError(
        f"attention_backend = 'flashinfer': {FLASHINFER.name} {FLASHINFER.installed()} has no compiled kernels for "
        f"heads of {head_dim} in {dtype}, and could not compile them, which takes nvcc, ninja and a C++ compiler; the "
        f"package flashinfer-jit-cache has compiled ones: {why}"
    )


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
        op = torch.ops._vllm_fa3_C.fwd
        check_arguments(version, [argument.name for argument in op.default._schema.arguments])
        return op
    except (OSError, RuntimeError, AttributeError) as error:
        raise VLLM.broken(version, error) from error


def check_arguments(version: str | None, names: Sequence[str]) -> None:
    """Raise ConfigError where the operator of FlashAttention-3 takes other arguments than it is called with."""
    if other := sorted(set(names) ^ set(FA3_ARGUMENTS)):
        raise VLLM.broken(version, TypeError(f"its operator has other arguments: {', '.join(other)}"))


def _new_enough(installed: str, oldest: str) -> bool:
    """Return whether a version is at least another. One that is no version is not."""
    try:
        return Version(installed) >= Version(oldest)
    except InvalidVersion:
        return False
