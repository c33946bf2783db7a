"""Memory for keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from specrs._specrs import ConfigError, KvCache
from specrs.backends.base import KV_DTYPES
from specrs.models.config import LayerConfig
from specrs.models.placement import HOST, Placement

_DTYPES = tuple(getattr(torch, name) for name in KV_DTYPES)


@dataclass(frozen=True, eq=False)
class DeviceKvCache:
    """Keys and values on a device: a tensor [layers, 2, num_slots, kv_heads, head_dim], as a `KvCache` has it."""

    tensor: torch.Tensor
    page_size: int


def new_cache(
    config: LayerConfig,
    layers: int,
    num_pages: int,
    page_size: int,
    placement: Placement,
    dtype: torch.dtype | None = None,
) -> KvCache | DeviceKvCache:
    """Zeroed memory for `num_pages` pages, the sink included, of `page_size` tokens.

    Its tensor is [layers, 2, num_slots, kv_heads, head_dim], keys at index 0 and values at 1. Slot s is position
    s % page_size of page s // page_size; page 0 is the sink of padded queries. dtype: that of activations unless given.
    ConfigError: dtype not f32, bf16 or f16, or no memory for it.
    """
    dtype = dtype or placement.activations
    if dtype not in _DTYPES:
        raise ConfigError(f"KV dtype = {dtype}: must be {' or '.join(map(str, _DTYPES))}")
    memory = _memory(config, layers, num_pages, page_size, placement, dtype).zero_()
    return KvCache(memory, page_size) if placement.is_host else DeviceKvCache(memory, page_size)


def cache_bytes(config: LayerConfig, layers: int, num_pages: int, page_size: int, kv_dtype: str) -> int:
    """Bytes of what `new_cache` makes; num_pages: the sink included."""
    return math.prod(_shape(config, layers, num_pages, page_size)) * int(getattr(torch, kv_dtype).itemsize)


def check_memory(config: LayerConfig, layers: int, num_pages: int, page_size: int, kv_dtype: str) -> None:
    """Refuses a cache of the host's that `new_cache` would get no memory for, without touching any.

    ConfigError: the bytes, and what takes fewer.
    """
    _memory(config, layers, num_pages, page_size, HOST, getattr(torch, kv_dtype))


def _shape(config: LayerConfig, layers: int, num_pages: int, page_size: int) -> tuple[int, ...]:
    return (layers, 2, num_pages * page_size, config.num_kv_heads, config.head_dim)


def _memory(
    config: LayerConfig, layers: int, num_pages: int, page_size: int, placement: Placement, dtype: torch.dtype
) -> torch.Tensor:
    shape = _shape(config, layers, num_pages, page_size)
    try:
        return torch.empty(shape, dtype=dtype, device=placement.device)
    except RuntimeError as error:  # torch's allocator has no type of its own for this
        size = math.prod(shape) * dtype.itemsize
        raise ConfigError(
            f"KV cache: no memory for {size} bytes, num_pages = {num_pages} (sink included) of {page_size} tokens; "
            "a smaller num_pages, max_batch or max_context_len, or kv_dtype bfloat16, takes less"
        ) from error
