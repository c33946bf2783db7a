"""Attention on a GPU: the kernels of each backend, behind specrs's rotation."""

from __future__ import annotations

from dataclasses import replace
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
from specrs.backends.packages import check_driver
from specrs.models.cuda import HEAD_DIMS, CudaDense, DevicePlan
from specrs.models.ops import Heads, KvMemory

_MASK_BITS = 64
_SCHEDULES = 64 << 20  # bytes that FlashInfer's schedules may take
_SPLITS = 64 << 20  # bytes of results over parts of the keys that FlashAttention's operator may take
_MOST_BRANCHES = 32  # limit of a draft step: a list of the best lies in the lanes of a warp
_MOST_STEPS = 7  # limit of a branch: as many keys as a row takes one by one, in logical order, beside its own


class DeviceAttention(Protocol):
    """A backend's kernels on a GPU. They read a pass's plan, and its arrays if the backend's format has arrays.

    A launch waits for nothing, so that it can be captured in a CUDA graph once it has run. Memory that a captured
    launch allocates is in a pool that lives as long as this object.

    Attributes:
        head_dims: sizes of heads that they take.
    """

    head_dims: ClassVar[tuple[int, ...]]

    @property
    def capabilities(self) -> Capabilities:
        """The format of the plans that they read."""

    @property
    def captured(self) -> int:
        """Number of blocks of memory that launches have allocated from torch while a stream was captured."""

    @staticmethod
    def allocates(rows: int, requests: int, most: int, heads: int, head_dim: int) -> int:
        """Return the bytes that passes allocate from torch at most, beside `workspace`, in a type of two bytes.

        Args:
            rows: the most rows of a pass.
            requests, most: of the largest pass that the device plans, its requests and the most rows of one.
            heads: query heads.
            head_dim: elements of a head.
        """

    def workspace(
        self,
        ordinal: int,
        *,
        requests: int,
        max_queries: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        max_keys: int,
    ) -> int:
        """Return the bytes of scratch memory that a pass wants on a GPU.

        Args:
            requests: number of requests.
            max_queries: the most queries of a request.
            kv_heads: number of key heads.
            group: query heads that share a key head.
            head_dim: elements of a head.
            max_keys: the most keys of a request.
        """

    def launch(
        self,
        kv: KvMemory,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        plan: DevicePlan,
        heads: Heads,
        draft: tuple[int, int],
        space: torch.Tensor,
        stream: core._DeviceStream,
    ) -> None:
        """Launch attention of rotated queries over KV that has been written, both [Q, H, D].

        Args:
            draft: K and S of the engine's trees, by which a draft step's mask counts its bits.
            space: scratch memory of `workspace` bytes at least.
            stream: torch's current stream.
        """


class _OwnMemory:
    """Kernels whose scratch memory is `DeviceAttention.workspace` alone."""

    captured = 0
    head_dims: ClassVar[tuple[int, ...]] = HEAD_DIMS

    @staticmethod
    def allocates(rows: int, requests: int, most: int, heads: int, head_dim: int) -> int:
        return 0


class _OwnScratch:
    """Kernels that allocate their scratch memory themselves."""

    def workspace(
        self,
        ordinal: int,
        *,
        requests: int,
        max_queries: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        max_keys: int,
    ) -> int:
        return 0


class NativeKernels(_OwnMemory):
    """specrs's own kernels, which read the page table and the tree's bits in place."""

    capabilities = Capabilities.of(NativeCuda())

    def workspace(
        self,
        ordinal: int,
        *,
        requests: int,
        max_queries: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        max_keys: int,
    ) -> int:
        return core._device_attention_workspace(
            ordinal, requests=requests, max_queries=max_queries, kv_heads=kv_heads, group=group, head_dim=head_dim,
            max_keys=max_keys,
        )  # fmt: skip

    def launch(
        self,
        kv: KvMemory,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        plan: DevicePlan,
        heads: Heads,
        draft: tuple[int, int],
        space: torch.Tensor,
        stream: core._DeviceStream,
    ) -> None:
        core._device_attention(
            kv.tensor,
            layer,
            q,
            out,
            table=plan.table,
            page_size=kv.page_size,
            rows=plan.rows,
            lens=plan.lens,
            starts=plan.starts,
            mask=plan.mask,
            first_pages=plan.first_pages,
            draft=draft if plan.phase == "draft" else None,
            max_queries=plan.most_queries,
            scale=heads.scale,
            cap=heads.cap,
            workspace=space,
            stream=stream,
        )


class TritonKernels(_OwnMemory):
    """Kernels in Triton over the arrays of the format ``"triton"``.

    Raises MissingPackageError without triton, and ConfigError where it cannot launch kernels.
    """

    capabilities = Capabilities.of(TritonCuda())

    def __init__(self) -> None:
        self._kernels = triton.kernels()
        check_driver(TritonCuda.name)

    def workspace(
        self,
        ordinal: int,
        *,
        requests: int,
        max_queries: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        max_keys: int,
    ) -> int:
        return int(self._kernels.workspace(torch.device("cuda", ordinal), head_dim))

    def launch(
        self,
        kv: KvMemory,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        plan: DevicePlan,
        heads: Heads,
        draft: tuple[int, int],
        space: torch.Tensor,
        stream: core._DeviceStream,
    ) -> None:
        keys, values = kv.tensor[layer]
        self._kernels.attention(
            q, keys, values, out, plan.arrays, phase=plan.phase,
            sequences=plan.queries if plan.phase in ("draft", "decode") else plan.lens.numel(),
            most_queries=plan.most_queries, scale=heads.scale, space=space,
        )  # fmt: skip


class FlashInferKernels(_OwnScratch):
    """FlashInfer's kernels over the arrays of the format ``"flashinfer"``.

    Raises MissingPackageError without FlashInfer or triton, and ConfigError where one of them cannot be used.
    """

    capabilities = Capabilities.of(FlashInferCuda())
    captured = 0
    head_dims: ClassVar[tuple[int, ...]] = (64, 128, 256)

    def __init__(self) -> None:
        self._kernels = flashinfer.kernels()
        check_driver(FlashInferCuda.name)
        self._planned: tuple[DevicePlan, Any] | None = None  # a pass that the host has planned, for all of its layers

    @staticmethod
    def allocates(rows: int, requests: int, most: int, heads: int, head_dim: int) -> int:
        # Rows of which every request has as many, of queries and of results. Memory that was too small for the next
        # shape is kept, and the shapes of buckets double.
        return 2 * 2 * (2 * requests * most * heads * head_dim) + _SCHEDULES

    def launch(
        self,
        kv: KvMemory,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        plan: DevicePlan,
        heads: Heads,
        draft: tuple[int, int],
        space: torch.Tensor,
        stream: core._DeviceStream,
    ) -> None:
        keys, values = kv.tensor[layer]
        if plan.of_host is None:
            self._kernels.attention(
                q, keys, values, out, plan.arrays, phase=plan.phase,
                lists=plan.queries if plan.phase in ("draft", "decode") else plan.lens.numel(),
                most_queries=plan.most_queries, scale=heads.scale,
            )  # fmt: skip
            return
        if self._planned is None or self._planned[0] is not plan:
            self._planned = plan, flashinfer.planned(plan.phase, plan.arrays, plan.of_host)
        self._kernels.attention_of(self._planned[1], q, keys, values, out, heads.scale)


class FlashAttentionKernels(_OwnScratch):
    """FlashAttention-3's operator over the arrays of the format ``"flash_attention"``.

    Raises MissingPackageError without vLLM or triton, and ConfigError where one of them cannot be used.
    """

    capabilities = Capabilities.of(FlashAttentionCuda())
    head_dims: ClassVar[tuple[int, ...]] = HEAD_DIMS

    def __init__(self) -> None:
        self._kernels = flash_attention.kernels()
        check_driver(FlashAttentionCuda.name)

    @property
    def captured(self) -> int:
        return self._kernels.captured

    @staticmethod
    def allocates(rows: int, requests: int, most: int, heads: int, head_dim: int) -> int:
        # The second pass's results, and both passes' sums of weights.
        return rows * heads * (2 * head_dim + 2 * 4) + _SPLITS

    def launch(
        self,
        kv: KvMemory,
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        plan: DevicePlan,
        heads: Heads,
        draft: tuple[int, int],
        space: torch.Tensor,
        stream: core._DeviceStream,
    ) -> None:
        keys, values = kv.tensor[layer]
        requests, arrays = plan.lens.numel(), dict(plan.arrays)
        for name, rows in (("cache_seqlens", requests), ("page_table", requests), ("cu_seqlens_q", requests + 1),
                           ("expand_cache_seqlens", plan.queries), ("expand_page_table", plan.queries),
                           ("expand_cu_seqlens_q", plan.queries + 1)):  # fmt: skip
            if name in arrays:
                arrays[name] = arrays[name][:rows]
        self._kernels.attention(
            q, keys, values, out, arrays, page_size=plan.page_size, expand_page_size=plan.expand_page_size,
            most_queries=plan.most_queries, scale=heads.scale,
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


def device_attention(backend: AttentionBackend) -> DeviceAttention:
    """Load the kernels of a backend that has a row for ``"cuda"``.

    Raises:
        MissingPackageError: a package that the backend's kernels need is missing or too old.
        ConfigError: a package does not load, or has no kernels for the GPU.
    """
    return kernels_of(backend)()


class CudaAttention:
    """A backend's attention over paged KV, behind specrs's rotation.

    tree: of the engine, by which a draft step's mask counts its bits. Raises ConfigError for one that does not fit into
    a word of 64 bits, or whose branches are longer than the keys that a row takes in logical order.
    """

    def __init__(self, dense: CudaDense, tree: TreeShape, kernels: DeviceAttention) -> None:
        slots = tree.topk * tree.steps
        why = ""
        if tree.topk > _MOST_BRANCHES:
            why = f"{tree.topk} branches (K); selection on a GPU takes at most {_MOST_BRANCHES}"
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
        self.kernels.launch(kv, layer, q, out.view_as(q), at, heads, self._draft, space, stream)

    def write(self, kv: KvMemory, layer: int, plan: Plan, rows: torch.Tensor, rope: Any, heads: Heads) -> None:
        self._dense.rotated(kv, layer, self._on_device(plan, kv.page_size), rows, rope, replace(heads, count=0))

    def _on_device(self, plan: Plan | DevicePlan, page_size: int) -> DevicePlan:
        if isinstance(plan, DevicePlan):
            return plan
        if self._plan is None or self._plan[0] is not plan:
            self._plan = plan, DevicePlan.of(self._dense, plan, page_size)[0]
        return self._plan[1]
