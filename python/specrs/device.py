"""CUDA kernels of specrs on torch's CUDA tensors and torch's current stream.

    >>> from specrs import device
    >>> device.kv_move(cache, src, dst, offsets)     # asynchronous, like an operation of torch
    >>> torch.cuda.current_stream().synchronize()    # or any later point at which the host waits anyway
    >>> device.check()                               # raises OutOfBoundsError for an index that was skipped

A launch allocates nothing and waits for nothing, so it can be captured by ``torch.cuda.graph``; a replay reads the
contents that the tensors have then. Call :func:`init` before capturing: setting a device up takes some 0.4 s. The
package holds machine code for GPUs of compute capability 8.x and 9.0; for later ones the driver compiles PTX at the
first use, which takes tens of seconds, and keeps the result.

An index that only the GPU knows is checked by the kernel, always: it skips the access and leaves one record for each
device, the first of those since the last :func:`check`. Programs that share a device get a record of their own by
:func:`faults`.

Importing this module needs neither a GPU nor torch.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specrs._specrs import (
    ConfigError,
    _device_check,
    _device_init,
    _device_kv_move,
    _DeviceFaults,
    _DeviceProducts,
    cuda_available,
    cuda_unavailable_reason,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "broken",
    "check",
    "cublaslt_folders",
    "cuda_available",
    "cuda_unavailable_reason",
    "faults",
    "init",
    "kv_move",
    "products",
]


def init(device: torch.device | int | None = None) -> int:
    """Set up a CUDA device (torch's current one if ``None``): load the kernels, allocate the fault record.

    Returns its compute capability, major * 10 + minor. Every other function does this on its first use.
    Raises ``CudaError`` where there are no kernels in this build, no driver or one that is too old, or no GPU;
    :func:`cuda_unavailable_reason` says which, with what was found and what is needed.
    """
    return _device_init(_ordinal(device))


def allocations(device: torch.device) -> int:
    """Number of blocks that torch has handed out on a device so far."""
    import torch

    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])


def check(device: torch.device | int | None = None) -> None:
    """Raise ``OutOfBoundsError`` for what a kernel of this device skipped since the last call.

    Its attributes are ``kernel``, ``buffer``, ``request``, ``step``, ``index`` and ``bound``. Scores from which a
    kernel could choose nothing raise ``NonFiniteError`` (``what``, ``value``, ``request``, ``row``, ``position`` and
    ``index``). Reads host memory and waits for nothing: it sees the faults of work that has finished.
    """
    _device_check(_ordinal(device))


def faults(device: torch.device | int | None = None) -> _DeviceFaults:
    """Return a fault record on a CUDA device (torch's current one if ``None``) for an engine that runs beside others.

    Kernels that are launched on ``faults.on(stream)`` leave what they skip there alone, and ``faults.check()`` raises
    it as :func:`check` does. It stays for the life of the process, since a graph may report to it at any later time.
    Raises ``CudaError`` as :func:`init` does.
    """
    return _DeviceFaults(_ordinal(device))


def kv_move(
    cache: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    offsets: torch.Tensor,
    *,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Move token rows of a KV cache from slot to slot, K and V of all layers, for a whole batch, in one launch.

    For each request ``r`` and ``m`` in ``range(offsets[r], offsets[r + 1])``, in this order:
    ``cache[:, :, dst[m]] = cache[:, :, src[m]]``. A request's moves may overlap in any way; requests run
    concurrently, so one's destinations must not be slots that another one's moves name.

    Args:
        cache: ``[layers, 2, num_slots, kv_heads, head_dim]``, contiguous, on a CUDA device, of any type of 1, 2, 4 or
            8 bytes.
        src: ``int32[capacity]``, contiguous, same device.
        dst: destination slots, of the same type and length as ``src``. Slot 0 is the sink: a move to it is padding and
            does nothing.
        offsets: ``int32[requests + 1]``; equal neighbours are a request without moves. Entries of ``src`` and ``dst``
            outside every request are not read.
        stream: the stream of the launch; torch's current stream of the cache's device if ``None``.

    A slot outside ``[0, num_slots)`` skips its move, offsets outside ``[0, capacity]`` or decreasing skip their
    request; see :func:`check`. Raises ``ConfigError`` for operands that do not fit, and for a cache that requires grad,
    before anything is launched. The call counts up the cache's version for autograd; a replayed graph does not.
    """
    handle = 0  # for a cache that is not on a CUDA device, which is refused
    if stream is not None:
        handle = stream.cuda_stream
    elif getattr(cache, "is_cuda", False):
        import torch

        handle = torch.cuda.current_stream(cache.device).cuda_stream
    _device_kv_move(cache, src, dst, offsets, handle)


def broken(name: str | None) -> Exception | None:
    """Return the error that sticks to a CUDA context in which nothing runs any more; ``None`` for a sound context, and
    for the CPU.

    Waits for the device. name: ``"cuda:0"``, or ``"cpu"``.
    """
    if name is None or not name.startswith("cuda"):
        return None
    import torch

    try:
        torch.cuda.synchronize(torch.device(name))
    except Exception as error:  # errors of torch's own kinds
        return error
    return None


def cublaslt_folders() -> list[str]:
    """Folders of ``sys.path`` where the wheels that torch needs put cublasLt, those of CUDA 13 first."""
    places = [Path("nvidia", "cu13", "lib"), Path("nvidia", "cublas", "lib")]
    found = [Path(site) / place for place in places for site in sys.path]
    return [str(folder) for folder in found if folder.is_dir()]


def products(device: torch.device | int | None = None, *, cache: str | None = "") -> _DeviceProducts:
    """cublasLt on a CUDA device (torch's current one if ``None``): products whose rows' bits depend on the row alone.

    Args:
        cache: file that keeps the measurements; ``""`` is ``cublaslt.json`` in the user's cache folder
            (``SPECRS_CACHE``, or ``specrs`` in ``XDG_CACHE_HOME`` or ``~/.cache``), ``None`` keeps nothing.

    What is chosen for a shape holds for the process, whatever files keep it: two engines give the same bits. A file is
    asked for the shapes that the process has not met, and told the others.

    Raises ``CudaError`` where there is no CUDA or no cublasLt, with every place that was looked at.
    """
    return _opened(_ordinal(device)).keeping(cache)


@functools.cache
def _opened(ordinal: int) -> _DeviceProducts:
    """Return the products of a device for the process, kept in no file."""
    return _DeviceProducts(ordinal, cublaslt_folders())


def _ordinal(device: torch.device | int | None) -> int:
    if isinstance(device, int):
        return device
    if device is not None:
        if device.type != "cuda":
            raise ConfigError(f"device: got {device}, want a CUDA device")
        if device.index is not None:
            return device.index
    if not cuda_available():
        return 0  # the call that follows says why there is none
    import torch

    return torch.cuda.current_device()
