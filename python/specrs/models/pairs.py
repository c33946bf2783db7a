"""The pairs of a device's operations and an attention that there are."""

from __future__ import annotations

from specrs._specrs import TreeShape
from specrs.backends import AttentionBackend, Native, NativeCuda, PlanAttention
from specrs.models.attention import HostAttention, ReadAttention, TorchAttention
from specrs.models.cuda import CudaDense
from specrs.models.cuda_attention import CudaAttention, device_attention
from specrs.models.dense import HostDense, TorchDense
from specrs.models.ops import Dense, Ops
from specrs.models.placement import HOST, Placement


def ops_for(backend: AttentionBackend | None = None, dense: Dense | None = None) -> Ops:
    """A device's operations (`None`: the host's Rust kernels) with a backend's attention (`None`: specrs's own)."""
    dense = dense or HostDense()
    if backend is None or isinstance(backend, Native):
        return Ops(dense, HostAttention())
    return Ops(dense, ReadAttention(dense, PlanAttention(backend)))


def cuda_ops(placement: Placement, tree: TreeShape, backend: AttentionBackend | None = None) -> Ops:
    """A GPU's operations with a backend's attention (`None`: specrs's own), for an engine's tree.

    Raises ``CudaError`` where there are no kernels, driver, GPU or cublasLt, ``ConfigError`` for a tree that the
    attention does not take, ``MissingPackageError`` for a backend whose package is missing.
    """
    kernels, dense = device_attention(backend or NativeCuda(), placement.device), CudaDense(placement)
    return Ops(dense, CudaAttention(dense, tree, kernels))


def torch_ops(placement: Placement = HOST) -> Ops:
    """Plain torch for everything, reading the plan's attention form: slow, obviously right, the reference."""
    dense = TorchDense(placement)
    return Ops(dense, ReadAttention(dense, TorchAttention()))
