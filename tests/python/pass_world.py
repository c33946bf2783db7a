"""Passes of each phase in the format of a backend, planned by the host, and the backend's kernels over them.

The kernels run on a GPU, those in Triton under its interpreter on the CPU too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from specrs import _specrs as core
from specrs.backends import BACKENDS, FlashAttentionCuda, FlashInferCuda, Step, gather
from specrs.backends.base import Format, Operands, Phase

PHASES: list[Phase] = ["extend", "decode", "draft", "verify"]
Layout = Literal["dense", "holey"]


@dataclass
class Heads:
    """Heads of a model's attention, and the type of its KV."""

    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype = torch.float32


class Requests:
    """Requests of random lengths whose pages lie anywhere in a pool, with a round reserved."""

    def __init__(
        self,
        seed: int,
        shape: tuple[int, int, int],
        page: int,
        layout: Layout,
        context: int,
        lens: list[int] | None = None,
    ) -> None:
        self.rng = rng = random.Random(seed)
        borders = [0, 1, page, context // 2, context - 8]
        some = [min(rng.choice([*borders, rng.randrange(context - 8)]), context - 8) for _ in range(3)]
        self.lens = some if lens is None else lens
        self.shape = core.TreeShape(*shape)
        self.geometry = g = core.Geometry(len(self.lens) + 1, context, page, self.shape, layout)
        pages = g.row_pages * (len(self.lens) + 1)
        self.pool = core.Pool(pages, page, len(self.lens), g.row_pages)
        order = self.pool.alloc_pages(pages - 1)
        rng.shuffle(order)
        self.pool.free_pages(order)
        self.seqs = [self.pool.create() for _ in self.lens]
        self.pool.reserve(list(zip(self.seqs, self.lens, strict=True))).commit(self.lens)
        self.lease = self.pool.reserve([(s, g.alloc_target(n, 0)) for s, n in zip(self.seqs, self.lens, strict=True)])
        self.trees = [self._tree(shape[2] if lens else rng.randint(1, shape[2])) for _ in self.lens]
        room = [min(self.pool.allocated(s) - n, context - n, 40) for s, n in zip(self.seqs, self.lens, strict=True)]
        self.counts = [rng.choice([0, 1, most]) for most in room]
        k, s, _ = shape
        self.beams = torch.zeros(len(self.lens) * k, g.draft_mask_words, dtype=torch.int64)
        for z in range(len(self.beams)):
            for slot in (*(rng.randrange(k) * s + t for t in range(s - 1)), z % k * s + s - 1):
                word = int(self.beams[z, slot // 64]) & (2**64 - 1) | 1 << slot % 64
                self.beams[z, slot // 64] = word - (word >> 63 << 64)

    def _tree(self, size: int) -> list[int]:
        """Parents of a tree, its deepest path first."""
        deepest = min(self.shape.steps, size - 1)
        if self.shape.topk > 1:
            deepest = self.rng.randint(min(1, deepest), deepest)
        parents, depths = list(range(-1, deepest)), list(range(deepest + 1))
        while len(parents) < size:
            parent = self.rng.randrange(len(parents))
            if depths[parent] < deepest:
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return parents

    def plan(self, phase: Phase, format: str = "triton", padded: bool = False) -> core.Plan:
        """The host's plan of a pass, with a dead request and dead queries behind if it is padded."""
        p, seqs, lens = core.Planner(self.geometry, self.pool, format), self.seqs, self.lens
        b = len(lens) + 1
        most = {"extend": sum(self.counts) + 5, "decode": b, "draft": b * self.shape.topk}
        pad = (b, most.get(phase, b * self.shape.draft_tokens)) if padded else None
        if phase == "extend":
            return p.extend(seqs, lens, self.counts, pad=pad)
        if phase == "decode":
            return p.decode(seqs, lens, pad=pad)
        if phase == "draft":
            if format == "flash_attention" and self.geometry.layout == "holey":
                return p.draft(seqs, lens, self.shape.steps - 1, None, "lane", pad=pad)
            return p.draft(seqs, lens, self.shape.steps - 1, self.beams, pad=pad)
        trees = core.TreeBatch.from_parents(self.trees, [[0] * len(t) for t in self.trees])
        return p.verify(seqs, lens, trees, pad=pad)

    def most_queries(self, phase: Phase) -> int:
        """The most queries of a request of a pass."""
        return {"extend": max(1, *self.counts), "decode": 1, "draft": self.shape.topk}.get(
            phase, self.shape.draft_tokens
        )


class Pass:
    """A pass over random KV, in which every slot that no query's request reads is NaN.

    In the format ``"flash_attention"``, whose kernel reads whole pages, they are those of pages that nothing names.
    """

    def __init__(
        self,
        requests: Requests,
        phase: Phase,
        heads: Heads,
        padded: bool = True,
        seed: int = 0,
        format: Format = "triton",
    ) -> None:
        self.requests, self.phase, self.heads, self.format = requests, phase, heads, format
        plan = requests.plan(phase, format, padded=padded)
        self.arrays = {name: torch.from_dlpack(array).clone() for name, array in plan.arrays().items()}
        self.expand_page_size = plan.expand_page_size
        self.queries, self.sequences = plan.queries, plan.queries if phase in ("draft", "decode") else plan.batch
        g = torch.Generator().manual_seed(seed)
        shape = (requests.pool.num_pages * requests.pool.page_size, heads.kv_heads, heads.dim)
        unread = torch.ones(shape[0], dtype=torch.bool)
        for name in {"kv_indices", "extend_slots"} & set(self.arrays):
            unread[self.arrays[name]] = False
        for name, page in (("page_table", requests.pool.page_size), ("expand_page_table", plan.expand_page_size)):
            if name in self.arrays and page is not None:
                table = self.arrays[name]
                unread[gather.paged(table, torch.tensor([table.shape[1] * page]), page).flatten()] = False
        unread[: requests.pool.page_size] = True  # the sink
        kv = (torch.randn(shape, generator=g).masked_fill_(unread[:, None, None], math.nan) for _ in range(2))
        self.keys, self.values = (half.to(heads.dtype) for half in kv)
        self.q = torch.randn(self.queries, heads.kv_heads * heads.group, heads.dim, generator=g).to(heads.dtype)
        self.scale = heads.dim**-0.5

    def reference(self) -> torch.Tensor:
        """Attention in float64 by the arrays alone, in float32."""
        backend = BACKENDS[self.format]()
        prepared = backend.prepare(self.step(self.arrays))
        return backend.attend(prepared, self.keys, self.values, self.q.float(), self.scale)

    def step(self, arrays: dict[str, torch.Tensor]) -> Step:
        """The pass as a backend is told of it."""
        return Step(
            phase=self.phase, page_size=self.requests.pool.page_size, expand_page_size=self.expand_page_size,
            queries=self.queries, arrays=arrays,
        )  # fmt: skip

    @property
    def most_keys(self) -> int:
        """The most keys of a list."""
        return int(self.arrays["kv_indptr"].diff().max())

    def kernels(self, device: torch.device, flashinfer: Any = None) -> torch.Tensor:
        """The kernels' output, from arrays with some elements of poison behind their ends, into memory full of NaN.

        flashinfer: kernels of FlashInfer that have plans already; ``None``: new ones.
        """
        launch, out = self.launch(device, spare=3, kept=flashinfer)
        launch()
        return out.float().cpu()

    def launch(self, device: torch.device, spare: int = 0, kept: Any = None) -> tuple[Callable[[], None], torch.Tensor]:
        """A launch of the backend's kernels over the pass, and its output. Arrays end in so much poison at least."""

        def there(tensor: torch.Tensor, spare: int = spare) -> torch.Tensor:
            poison = torch.full((spare, *tensor.shape[1:]), 85, dtype=torch.uint8).to(tensor.dtype)
            return torch.cat((tensor, poison)).to(device)

        q, keys, values = self.q.to(device), self.keys.to(device), self.values.to(device)
        out = torch.full_like(q, math.nan)
        arrays: dict[str, Any] = {name: there(array) for name, array in self.arrays.items()}
        operands = Operands(q, keys, values, out, arrays, self.scale)
        most = self.requests.most_queries(self.phase)
        if self.format == "triton":
            from specrs.backends import triton_kernels

            space = torch.full((triton_kernels.workspace(device, self.heads.dim),), 0xFF, dtype=torch.uint8)
            launch = partial(
                triton_kernels.attention, operands, phase=self.phase, sequences=self.sequences, most_queries=most,
                space=space.to(device),
            )  # fmt: skip
        elif self.format == "flashinfer":
            from specrs.backends import flashinfer

            if self.phase == "verify":
                bits = self.arrays["packed_custom_mask"]
                need = self.sequences * -(-most * self.most_keys // 8)  # of all rows that a request may have
                arrays["packed_custom_mask"] = there(bits, max(spare, need - len(bits)))
            launch = partial(
                (kept or flashinfer.kernels()).attention, operands, phase=self.phase, lists=self.sequences,
                most_queries=most, most_keys=self.most_keys,
            )  # fmt: skip
        else:
            from specrs.backends import flash_attention

            # The operator takes an array for as many requests as it has.
            arrays |= {name: array[: len(self.arrays[name])] for name, array in arrays.items()}
            launch = partial(
                flash_attention.kernels().attention, operands, page_size=self.requests.pool.page_size,
                expand_page_size=self.expand_page_size, most_queries=most,
            )  # fmt: skip
        return launch, out

    def planned(self, device: torch.device) -> tuple[Callable[[], None], torch.Tensor]:
        """A launch as another engine makes it, by the backend's class, which has prepared the pass, and its output."""
        backend = {"flashinfer": FlashInferCuda, "flash_attention": FlashAttentionCuda}[self.format]()
        q, keys, values = self.q.to(device), self.keys.to(device), self.values.to(device)
        out = torch.full_like(q, math.nan)
        prepared = backend.prepare(self.step({name: array.to(device) for name, array in self.arrays.items()}))

        def launch() -> None:
            out.copy_(backend.attend(prepared, keys, values, q, self.scale))

        return launch, out

    def native(self, device: torch.device) -> tuple[Callable[[], None], torch.Tensor]:
        """A launch of specrs's own kernels on a GPU over the same KV, without dead rows, and its output."""
        plan, pool, shape = self.requests.plan(self.phase, "native"), self.requests.pool, self.requests.shape
        # By the exact rule a hidden key's value is multiplied by 0, so that the pool may not hold NaN.
        kv = torch.stack((self.keys, self.values)).nan_to_num(0.0)[None].to(device)
        words, most = torch.from_dlpack(plan.mask).reshape(-1), self.requests.most_queries(self.phase)
        table = torch.from_dlpack(plan.page_table()).to(device)
        size = core._device_attention_workspace(
            device.index, requests=plan.batch, max_queries=most, kv_heads=self.heads.kv_heads, group=self.heads.group,
            head_dim=self.heads.dim, max_keys=table.shape[1] * pool.page_size,
        )  # fmt: skip
        q = self.q[: plan.queries].to(device)
        out = torch.full_like(q, math.nan)
        lens, starts = (torch.from_dlpack(a).to(device) for a in (plan.prefix_lens, plan.qo_indptr))
        mask = words.to(device) if words.numel() else None
        space = torch.empty(size, dtype=torch.uint8, device=device)

        def launch() -> None:
            core._device_attention(
                kv, 0, q, out, table=table, page_size=pool.page_size, rows=None, lens=lens, starts=starts, mask=mask,
                draft=(shape.topk, shape.steps) if self.phase == "draft" else None, max_queries=most,
                scale=self.scale, workspace=space, stream=torch.cuda.current_stream(device).cuda_stream,
            )  # fmt: skip

        return launch, out
