"""The pairs of a device's operations and an attention that there are."""

from __future__ import annotations

from specrs.backends import AttentionBackend, Native, PlanAttention
from specrs.models.attention import HostAttention, ReadAttention, TorchAttention
from specrs.models.dense import HostDense, TorchDense
from specrs.models.ops import Dense, Ops
from specrs.models.placement import HOST, Placement


def ops_for(backend: AttentionBackend | None = None, dense: Dense | None = None) -> Ops:
    """A device's operations (`None`: the host's Rust kernels) with a backend's attention (`None`: specrs's own)."""
    dense = dense or HostDense()
    if backend is None or isinstance(backend, Native):
        return Ops(dense, HostAttention())
    return Ops(dense, ReadAttention(dense, PlanAttention(backend)))


def torch_ops(placement: Placement = HOST) -> Ops:
    """Plain torch for everything, reading the plan's attention form: slow, obviously right, the reference."""
    dense = TorchDense(placement)
    return Ops(dense, ReadAttention(dense, TorchAttention()))
