"""Attention on a GPU: the kernels of each backend, behind specrs's rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from specrs import _specrs as core
from specrs._specrs import ConfigError, Plan, TreeShape
from specrs.backends import (
    AttentionBackend,
    Capabilities,
    FlashAttentionCuda,
    FlashInferCuda,
    NativeCuda,
    TritonCuda,
    flash_attention,
    flashinfer,
    triton,
)
from specrs.backends.base import Operands
from specrs.backends.packages import check_driver
from specrs.backends.splits import SPLITS
from specrs.models.config import LayerConfig
from specrs.models.cuda import HEAD_DIMS, CudaDense, DevicePlan, PassSizes
from specrs.models.ops import Heads, KvMemory
from specrs.models.placement import Placement

_MASK_BITS = 64
_SCHEDULES = 64 << 20  # bytes of FlashInfer's wrappers: 8 MiB while one is made, then some 130 KiB each
_TILE = 128  # the most rows of a tile of FlashInfer's, a query head of a group counted as a row
_LIST_TILES = (16, 64)  # rows of such a tile where each list has one query, of groups up to 16 and of larger ones
_BLOCKS = 2 * 192  # the most blocks between which its plan splits keys: two for each processor of any GPU there is
MOST_BRANCHES = 32  # limit of a draft step: a list of the best lies in the lanes of a warp
_MOST_STEPS = 7  # limit of a branch: as many keys as a row takes one by one, in logical order, beside its own


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine's largest passes, by which the memory that kernels allocate is counted.

    Attributes:
        rows: the most rows of a pass.
        requests: the most requests of a pass.
        lists: the most rows of a pass in which each has a list of keys.
        spread: the most rows of a pass that the device plans, as many in each request as any may have.
        layers: a decoder layer of each model.
    """

    rows: int
    requests: int
    lists: int
    spread: int
    layers: Sequence[LayerConfig]


@dataclass(frozen=True, eq=False)
class Call:
    """A layer's attention of rotated queries over KV that has been written.

    Attributes:
        q, out: [Q, H, D].
        draft: K and S of the engine's trees, by which a draft step's mask counts its bits.
        space: scratch memory of `DeviceAttention.workspace` bytes at least.
        stream: torch's current stream.
    """

    kv: KvMemory
    layer: int
    q: torch.Tensor
    out: torch.Tensor
    plan: DevicePlan
    heads: Heads
    draft: tuple[int, int]
    space: torch.Tensor
    stream: core._DeviceStream

    def operands(self, arrays: Mapping[str, torch.Tensor]) -> Operands:
        """The tensors for kernels that read such arrays."""
        keys, values = self.kv.tensor[self.layer]
        return Operands(self.q, keys, values, self.out, arrays, self.heads.scale)


class DeviceAttention(Protocol):
    """A backend's kernels on a GPU. They read a pass's plan, and its arrays if the backend's format has arrays.

    A launch waits for nothing, so that it can be captured in a CUDA graph once it has run. Memory that a captured
    launch allocates is in a pool that lives as long as this object.

    Attributes:
        head_dims: sizes of heads that they take.
    """

    head_dims: ClassVar[tuple[int, ...]]

    def __init__(self, device: torch.device | None = None) -> None: ...

    @property
    def capabilities(self) -> Capabilities:
        """The format of the plans that they read."""

    @property
    def captured(self) -> int:
        """Number of blocks of memory that launches have allocated from torch while a stream was captured."""

    @staticmethod
    def allocates(sizes: EngineSizes) -> int:
        """Return the bytes that an engine's passes allocate from torch at most, beside `workspace`, in a type of two
        bytes."""

    def reserve(self, sizes: EngineSizes, placement: Placement) -> None:
        """Allocate the part of `allocates` that captured launches have the address of, before any of them."""

    def workspace(self, ordinal: int, sizes: PassSizes) -> int:
        """Return the bytes of scratch memory that a pass wants on a GPU."""

    def launch(self, call: Call) -> None:
        """Launch attention."""


class _OwnMemory:
    """Kernels whose scratch memory is `DeviceAttention.workspace` alone."""

    captured = 0
    head_dims: ClassVar[tuple[int, ...]] = HEAD_DIMS

    @staticmethod
    def allocates(sizes: EngineSizes) -> int:
        return 0

    def reserve(self, sizes: EngineSizes, placement: Placement) -> None:
        pass  # an engine reserves `workspace` itself


class _OwnScratch:
    """Kernels that allocate their scratch memory themselves."""

    def workspace(self, ordinal: int, sizes: PassSizes) -> int:
        return 0


class NativeKernels(_OwnMemory):
    """specrs's own kernels, which read the page table and the tree's bits in place."""

    capabilities = Capabilities.of(NativeCuda())

    def __init__(self, device: torch.device | None = None) -> None:
        pass  # they are loaded with the GPU

    def workspace(self, ordinal: int, sizes: PassSizes) -> int:
        return core._device_attention_workspace(ordinal, **vars(sizes))

    def launch(self, call: Call) -> None:
        plan, heads = call.plan, call.heads
        core._device_attention(
            call.kv.tensor, call.layer, call.q, call.out, table=plan.table, page_size=call.kv.page_size, rows=plan.rows,
            lens=plan.lens, starts=plan.starts, mask=plan.mask, first_pages=plan.first_pages,
            draft=call.draft if plan.phase == "draft" else None, max_queries=plan.most_queries, scale=heads.scale,
            cap=heads.cap, workspace=call.space, stream=call.stream,
        )  # fmt: skip


class TritonKernels(_OwnMemory):
    """Kernels in Triton over the arrays of the format ``"triton"``.

    Raises MissingPackageError without triton, and ConfigError where it cannot launch kernels.
    """

    capabilities = Capabilities.of(TritonCuda())
    head_dims: ClassVar[tuple[int, ...]] = TritonCuda.head_dims

    def __init__(self, device: torch.device | None = None) -> None:
        self._kernels = triton.kernels()
        check_driver(TritonCuda.name)

    def workspace(self, ordinal: int, sizes: PassSizes) -> int:
        return int(self._kernels.workspace(torch.device("cuda", ordinal), sizes.head_dim))

    def launch(self, call: Call) -> None:
        plan = call.plan
        self._kernels.attention(
            call.operands(plan.arrays), phase=plan.phase, sequences=_lists(plan), most_queries=plan.most_queries,
            space=call.space,
        )  # fmt: skip


class FlashInferKernels(_OwnScratch):
    """FlashInfer's kernels over the arrays of the format ``"flashinfer"``.

    Raises MissingPackageError without FlashInfer or triton, and ConfigError where one of them cannot be used.
    """

    capabilities = Capabilities.of(FlashInferCuda())
    captured = 0
    head_dims: ClassVar[tuple[int, ...]] = FlashInferCuda.head_dims

    def __init__(self, device: torch.device | None = None) -> None:
        self._kernels = flashinfer.kernels()
        check_driver(FlashInferCuda.name)
        self._planned: tuple[DevicePlan, Any] | None = None  # a pass that the host has planned, for all of its layers

    @staticmethod
    def allocates(sizes: EngineSizes) -> int:
        # Each model may have a pass that the host has planned, with results over parts of its keys.
        return 2 * 2 * _spread(sizes) + sum(split_bytes(sizes, layer) for layer in sizes.layers) + _SCHEDULES

    def reserve(self, sizes: EngineSizes, placement: Placement) -> None:
        self._kernels.reserve(_spread(sizes), placement.activations, placement.device)

    def launch(self, call: Call) -> None:
        plan, operands = call.plan, call.operands(call.plan.arrays)
        if plan.of_host is None:
            self._kernels.attention(
                operands, phase=plan.phase, lists=_lists(plan), most_queries=plan.most_queries, most_keys=plan.most_keys
            )
            return
        if self._planned is None or self._planned[0] is not plan:
            self._planned = plan, flashinfer.planned(plan.phase, plan.arrays, plan.of_host)
        self._kernels.attention_of(self._planned[1], operands)


def _lists(plan: DevicePlan) -> int:
    """Return the number of lists of keys that a format of lists has for a pass."""
    return plan.queries if plan.phase in ("draft", "decode") else plan.lens.numel()


def _spread(sizes: EngineSizes) -> int:
    """Return the elements of the queries of the largest pass whose rows are spread; its results have as many."""
    return sizes.spread * max(layer.q_size for layer in sizes.layers)


def split_bytes(sizes: EngineSizes, layer: LayerConfig) -> int:
    """Return the bytes of results over parts of the keys that FlashInfer's plan for a host-planned pass asks for.

    It is ``PrefillPlan`` of FlashInfer's ``scheduler.cuh`` for buffers of fixed sizes: a row of float32 and a sum of
    weights for each row of all tiles, of which there are at least as many as blocks run at once.
    """
    heads, group = layer.num_heads, layer.num_heads // layer.num_kv_heads
    one = _LIST_TILES[group > _LIST_TILES[0]]
    tiled = ((sizes.rows, sizes.requests, _TILE), (sizes.lists, sizes.lists, one))
    padded = max(
        tile * max(_BLOCKS // layer.num_kv_heads, -(-rows * group // tile) + lists - 1) for rows, lists, tile in tiled
    )
    return heads * -(-padded // group) * (layer.head_dim + 1) * 4


class FlashAttentionKernels(_OwnScratch):
    """FlashAttention-3's operator over the arrays of the format ``"flash_attention"``.

    Raises MissingPackageError without vLLM or triton, and ConfigError where one of them cannot be used.
    """

    capabilities = Capabilities.of(FlashAttentionCuda())
    head_dims: ClassVar[tuple[int, ...]] = FlashAttentionCuda.head_dims

    def __init__(self, device: torch.device | None = None) -> None:
        self._kernels = flash_attention.kernels(device)
        check_driver(FlashAttentionCuda.name)

    @property
    def captured(self) -> int:
        return self._kernels.captured

    @staticmethod
    def allocates(sizes: EngineSizes) -> int:
        # The second pass's results, both passes' sums of weights, and results over parts of the keys.
        each = max(2 * layer.q_size + 2 * 4 * layer.num_heads for layer in sizes.layers)
        return sizes.rows * each + SPLITS

    def reserve(self, sizes: EngineSizes, placement: Placement) -> None:
        pass  # its pool keeps what captured launches have

    def launch(self, call: Call) -> None:
        plan = call.plan
        requests, arrays = plan.lens.numel(), dict(plan.arrays)
        for name, rows in (("cache_seqlens", requests), ("page_table", requests), ("cu_seqlens_q", requests + 1),
                           ("expand_cache_seqlens", plan.queries), ("expand_page_table", plan.queries),
                           ("expand_cu_seqlens_q", plan.queries + 1)):  # fmt: skip
            if name in arrays:
                arrays[name] = arrays[name][:rows]
        self._kernels.attention(
            call.operands(arrays), page_size=plan.page_size, expand_page_size=plan.expand_page_size,
            most_queries=plan.most_queries,
        )  # fmt: skip


_KERNELS: dict[type[AttentionBackend], type[DeviceAttention]] = {
    FlashAttentionCuda: FlashAttentionKernels,
    FlashInferCuda: FlashInferKernels,
    NativeCuda: NativeKernels,
    TritonCuda: TritonKernels,
}


def kernels_of(backend: AttentionBackend) -> type[DeviceAttention]:
    """Return the class of the kernels of a backend that has a row for ``"cuda"``."""
    return next(kernels for cls, kernels in _KERNELS.items() if isinstance(backend, cls))


def device_attention(backend: AttentionBackend, device: torch.device | None = None) -> DeviceAttention:
    """Load the kernels of a backend that has a row for ``"cuda"`` for a GPU; ``None``: torch's current one.

    Raises:
        MissingPackageError: a package that the backend's kernels need is missing or too old.
        ConfigError: a package does not load, or has no kernels for the GPU.
    """
    return kernels_of(backend)(device)


class CudaAttention:
    """A backend's attention over paged KV, behind specrs's rotation.

    tree: of the engine, by which a draft step's mask counts its bits. Raises ConfigError for one that does not fit into
    a word of 64 bits, or whose branches are longer than the keys that a row takes in logical order.
    """

    def __init__(self, dense: CudaDense, tree: TreeShape, kernels: DeviceAttention) -> None:
        slots = tree.topk * tree.steps
        why = ""
        if tree.topk > MOST_BRANCHES:
            why = f"{tree.topk} branches (K); selection on a GPU takes at most {MOST_BRANCHES}"
        elif slots > _MASK_BITS:
            why = f"{slots} draft slots (K * S); attention on a GPU takes at most {_MASK_BITS}"
        elif tree.draft_tokens > _MASK_BITS:
            why = f"{tree.draft_tokens} tokens (V); attention on a GPU takes at most {_MASK_BITS}"
        elif tree.topk > 1 and tree.steps > _MOST_STEPS:
            why = f"{tree.steps} steps of {tree.topk} branches; a GPU takes at most {_MOST_STEPS} steps, or K = 1"
        if why:
            raise ConfigError(f"tree = ({tree.topk}, {tree.steps}, {tree.draft_tokens}): {why}")
        self._dense, self.kernels, self._draft = dense, kernels, (tree.topk, tree.steps)
        self._plan: tuple[Plan, DevicePlan] | None = None  # plan of the pass at hand, for all of its layers

    @property
    def capabilities(self) -> Capabilities:
        return self.kernels.capabilities

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return self._dense.rope(cos, sin)

    def attend(
        self, kv: KvMemory, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads, out: torch.Tensor
    ) -> None:
        at = self._on_device(plan, kv.page_size)
        q = self._dense.rotated(kv, layer, at, qkv, rope, heads)
        kv_heads, head_dim = kv.tensor.shape[3:]
        size = at.workspace(self.kernels.workspace, q.device.index, kv_heads, heads.count // kv_heads, head_dim)
        space, stream = self._dense.attention_space(size), self._dense.stream
        self.kernels.launch(Call(kv, layer, q, out.view_as(q), at, heads, self._draft, space, stream))

    def write(self, kv: KvMemory, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        self._dense.rotated(kv, layer, self._on_device(plan, kv.page_size), rows, rope, replace(heads, count=0))

    def _on_device(self, plan: Plan | DevicePlan, page_size: int) -> DevicePlan:
        if isinstance(plan, DevicePlan):
            return plan
        if self._plan is None or self._plan[0] is not plan:
            self._plan = plan, DevicePlan.of(self._dense, plan, page_size)[0]
        return self._plan[1]
