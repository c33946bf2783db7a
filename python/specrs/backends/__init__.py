"""Attention backends: specrs's own kernels, kernels and plain torch over the metadata arrays of other engines.

    from specrs.backends import BACKENDS, find, resolve, Combination

A backend declares what it can do (`AttentionBackend`), `MATRIX` says where it runs and how its rounds may be launched
there, `resolve` decides from both what it may be asked for, and the engine (``LLM(attention_backend=...)``) runs models
over it. On the CPU, plain torch stands in for other engines' kernels. It computes from the metadata arrays and the KV
pool and from nothing else, as the real kernels do, so that arrays on which it gives the right tokens are arrays that an
engine can hand to the real ones. On a GPU the real kernels read them: FlashInfer's, FlashAttention-3's, and kernels in
Triton. Importing this package imports neither torch nor any of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from specrs._specrs import ConfigError
from specrs.backends.base import FORMATS, AttentionBackend, Capabilities, MissingPackageError, Step
from specrs.backends.flash_attention import FlashAttention, FlashAttentionCuda
from specrs.backends.flashinfer import FlashInfer, FlashInferCuda
from specrs.backends.matrix import GRAPH_LEVELS, MATRIX, GraphLevel, Row, on_device
from specrs.backends.native import Native, NativeCuda
from specrs.backends.routing import (
    Alternative,
    Combination,
    Resolved,
    UnsupportedCombinationError,
    check,
    needs_cpu_seq_lens,
)
from specrs.backends.routing import resolve as _resolve
from specrs.backends.running import PlanAttention
from specrs.backends.triton import Triton, TritonCuda

BACKENDS = MappingProxyType({cls.name: cls for cls in (Native, FlashInfer, FlashAttention, Triton)})
"""The backends that come with specrs, by name."""

__all__ = [
    "BACKENDS",
    "FORMATS",
    "GRAPH_LEVELS",
    "MATRIX",
    "Alternative",
    "AttentionBackend",
    "Capabilities",
    "Combination",
    "FlashAttention",
    "FlashAttentionCuda",
    "FlashInfer",
    "FlashInferCuda",
    "GraphLevel",
    "MissingPackageError",
    "Native",
    "NativeCuda",
    "PlanAttention",
    "Resolved",
    "Row",
    "Step",
    "Triton",
    "TritonCuda",
    "UnsupportedCombinationError",
    "check",
    "find",
    "needs_cpu_seq_lens",
    "on_device",
    "resolve",
]


def find(backend: str | AttentionBackend | None) -> AttentionBackend:
    """The backend of an option: a name, an instance (returned as it is), or ``None`` for specrs's own.

    Raises:
        ConfigError: an unknown name, with the known ones; a class where an instance is wanted; an instance whose format
            is ``"native"``, which has no arrays for another backend to read.
    """
    if backend is None:
        return Native()
    if isinstance(backend, str):
        if backend not in BACKENDS:
            raise ConfigError(f"attention_backend = {backend!r}: must be one of {', '.join(BACKENDS)}")
        return BACKENDS[backend]()
    if isinstance(backend, type):
        raise ConfigError(f"attention_backend = {backend.__name__}: a class; give an instance, {backend.__name__}()")
    capabilities = Capabilities.of(backend)
    if capabilities.format == "native" and not isinstance(backend, (Native, NativeCuda)):
        others = ", ".join(repr(name) for name in FORMATS if name != "native")
        raise ConfigError(
            f"attention backend {capabilities.name!r}: format = 'native': specrs's own kernels alone read it, it "
            f"has no arrays; formats for other backends are {others}"
        )
    return backend


def resolve(
    backend: str | AttentionBackend | None, asked: Combination, *, slots: Iterable[object | None] = ()
) -> Resolved:
    """`specrs.backends.routing.resolve` for a name or an instance, recommending the backends that come with specrs."""
    return _resolve(find(backend), asked, others=[cls() for cls in BACKENDS.values()], slots=slots)
