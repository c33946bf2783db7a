"""Attention on a GPU: the kernels of each backend, behind specrs's rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from specrs import _specrs as core
from specrs._specrs import ConfigError, Plan, TreeShape
from specrs.backends import AttentionBackend, Capabilities, NativeCuda, TritonCuda
from specrs.backends.triton import check_driver, kernels
from specrs.models.cuda import CudaDense, DevicePlan
from specrs.models.ops import Heads, KvMemory

_MASK_BITS = 64
_MOST_BRANCHES = 32  # limit of a draft step: a list of the best lies in the lanes of a warp
_MOST_STEPS = 7  # limit of a branch: as many keys as a row takes one by one, in logical order, beside its own


class DeviceAttention(Protocol):
    """A backend's kernels on a GPU. They read a pass's plan, and its arrays if the backend's format has arrays.

    A launch allocates nothing and waits for nothing, so that it can be captured in a CUDA graph once it has run.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The format of the plans that they read."""

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


class NativeKernels:
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


class TritonKernels:
    """Kernels in Triton over the arrays of the format ``"triton"``.

    Raises MissingPackageError without triton, and ConfigError where it cannot launch kernels.
    """

    capabilities = Capabilities.of(TritonCuda())

    def __init__(self) -> None:
        self._kernels = kernels()
        check_driver()

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


def device_attention(backend: AttentionBackend) -> DeviceAttention:
    """Return the kernels of a backend that has a row for ``"cuda"``.

    Raises:
        MissingPackageError: the package that the backend's kernels need is missing or too old.
    """
    return TritonKernels() if isinstance(backend, TritonCuda) else NativeKernels()


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
