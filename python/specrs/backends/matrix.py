"""The kinds of rounds, as data: where each backend runs, at which graph levels, and whether rounds may be gpu-only.

K, P, draft layouts and what a branch attends to are the backends' own declarations (`AttentionBackend`); `MATRIX` has a
row for each device that a backend runs on. `specrs.backends.resolve` reads both. A combination that is in no row is
refused while the engine is made; the error names it and what would work.

* Graph levels: with ``"off"`` the launches of a round are made one by one, with ``"round"`` they are one CUDA graph,
  and with ``"loop"`` a graph runs rounds until the host has to look. Bits are the same at every level.
* In gpu-only rounds the host knows no length from the second round on: plans are made on the device, sizes come from
  bounds, and a round is launched before the last one has ended. They exist where the device makes the plans, no backend
  of the engine needs the lengths on the host (`AttentionBackend.needs_cpu_seq_lens`; an empty slot needs nothing), and
  the model has no recurrent state, which a rejected branch could not be taken back out of. ``"loop"`` needs them.

One thing is no cell, since it changes from round to round: penalties (repetition, presence, frequency) need the host in
each round. Requests with them run at every level, and the engine then runs their rounds one after another, none ahead
of the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from specrs._specrs import ConfigError
from specrs.backends.base import AttentionBackend, Capabilities
from specrs.backends.flash_attention import FlashAttention, FlashAttentionCuda
from specrs.backends.flashinfer import FlashInfer, FlashInferCuda
from specrs.backends.native import Native, NativeCuda
from specrs.backends.triton import Triton, TritonCuda

Device = Literal["cpu", "cuda"]
GraphLevel = Literal["off", "round", "loop"]

DEVICES: tuple[Device, ...] = get_args(Device)
GRAPH_LEVELS: tuple[GraphLevel, ...] = get_args(GraphLevel)
"""Graph levels, from the least to the most in one launch."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A backend on a device.

    Attributes:
        backend: the backend whose declarations hold there.
        device: the device where its kernels run.
        graphs: levels that its rounds may have, the default first.
        device_plans: true if the device makes its plans, so that no length has to be on the host.
    """

    backend: type[AttentionBackend]
    device: Device
    graphs: tuple[GraphLevel, ...]
    device_plans: bool

    @property
    def lengths(self) -> str:
        """The reason why the host has the lengths in every round; empty where it need not have them."""
        return "" if self.device_plans else f"on {self.device!r} the host makes the plans, and has every length"


MATRIX: tuple[Row, ...] = (
    Row(backend=Native, device="cpu", graphs=("off",), device_plans=False),
    Row(backend=FlashInfer, device="cpu", graphs=("off",), device_plans=False),
    Row(backend=FlashAttention, device="cpu", graphs=("off",), device_plans=False),
    Row(backend=Triton, device="cpu", graphs=("off",), device_plans=False),
    Row(backend=NativeCuda, device="cuda", graphs=("round", "off", "loop"), device_plans=True),
    Row(backend=FlashInferCuda, device="cuda", graphs=("round", "off", "loop"), device_plans=True),
    Row(backend=FlashAttentionCuda, device="cuda", graphs=("round", "off", "loop"), device_plans=True),
    Row(backend=TritonCuda, device="cuda", graphs=("round", "off", "loop"), device_plans=True),
)
"""Every backend that comes with specrs, on every device that it runs on."""

_OWN = Row(backend=AttentionBackend, device="cpu", graphs=("off",), device_plans=False)  # a user's own backend


def row_of(capabilities: Capabilities, device: Device) -> Row | None:
    """The row of a backend on a device; ``None`` where it does not run there. A backend that is not of specrs runs on
    the CPU, where the host's planner makes its arrays."""
    for row in MATRIX:
        named = (row.backend.name, row.backend.format) == (capabilities.name, capabilities.format)
        if named and row.device == device:
            return row
    return _OWN if device == _OWN.device else None


def on_device(backend: object, device: Device) -> AttentionBackend | None:
    """Return the backend as it is on a device (specrs's own has kernels of its own for each), or ``None`` where it does
    not run there. A user's class runs on the CPU by its own code, whatever its name.

    Raises:
        ConfigError: the backend declares a flag that has no meaning, or has an option that the device does not.
    """
    row = row_of(Capabilities.of(backend), device)
    if row is None:
        return None
    if device == "cuda" and type(backend) is FlashInfer and backend.mask != "packed":
        raise ConfigError(
            f"attention_backend = FlashInfer(mask={backend.mask!r}): FlashInfer's kernels on a GPU read masks in bits; "
            "mask='packed' runs there"
        )
    if type(backend) in {r.backend for r in MATRIX}:
        return backend if isinstance(backend, row.backend) else row.backend()
    return cast(AttentionBackend, backend) if device == _OWN.device else None


def why_not_gpu_only(capabilities: Capabilities, device: Device, recurrent_state: bool) -> str | None:
    """Return the reason why rounds cannot be gpu-only, or ``None`` where they can.

    Args:
        capabilities: the backend's declarations, with the `needs_cpu_seq_lens` of all backends of the engine.
        device: a device for which the backend has a row.
        recurrent_state: true if the model has recurrent state.
    """
    row = row_of(capabilities, device)
    if row is None or row.lengths:
        return f"{capabilities.name} runs on the CPU" if row is None else row.lengths
    if capabilities.needs_cpu_seq_lens:
        return "a backend needs the lengths on the host"
    if recurrent_state:
        return "a recurrent state is advanced by rounds that the host has seen end, none ahead of it"
    return None
