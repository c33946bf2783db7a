"""The operations of a CUDA device and its attention: specrs's kernels and cublasLt, launched on torch's current stream.

A row's bits depend on that row, its position and its keys alone: products keep one split of K for each weight,
reductions one order for each width, and attention takes keys by their logical position. So a token's logits are the
same bits whether it is decoded alone, prefilled in a chunk or verified in a tree.

If a kernel skips an access because an index is out of bounds, the host raises it where it waits anyway
(`CudaDense.host`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs import device
from specrs._specrs import (
    ConfigError,
    CudaError,
    Moves,
    Plan,
    cuda_unavailable_reason,
)
from specrs.backends.base import Phase
from specrs.engine_options import Dtype
from specrs.models.block_config import BlockConfig
from specrs.models.config import LayerConfig, ModelConfig
from specrs.models.head_config import Eagle3Config, HeadConfig
from specrs.models.live import ModelSource
from specrs.models.loader import Checkpoint
from specrs.models.ops import Embedding, Heads, KvMemory, Linear
from specrs.models.placement import HOST, Placement

_MOST_ROWS = 2048  # limit of one launch of a product; longer passes take several
HEAD_DIMS = (64, 96, 128, 256)
_CAPPED = (128, 256)  # head sizes for which scores are capped
_CAPS = 1e-4, 1e4  # bounds of score caps: `CAPS` of src/device/kernels/attention.rs
_SMALL_HEADS = 128  # elements of a head that every GPU has shared memory for
_MOST_GROUP = 64
_MOST_CANDIDATES = 32  # tokens of a list: `MAX_DEVICE_TOPK` of src/device/kernels/draft_select.rs
_LARGE = 1 << 25  # bytes of a block that is made no larger than it has to be
_MOST_VIEWS = 1024  # limit of views of scratch memory: sizes repeat from round to round
_MOST_VOCABULARY = 1 << 18  # limit of logits that are sampled from: a bit for each token lies in shared memory
_MOST_NORMED = 1 << 15  # columns of a norm: `MAX_NORM_COLUMNS` of src/device/kernels/rows.rs


def unavailable() -> str | None:
    """Return the reason why no GPU can be used in this process, or ``None`` where one can."""
    if (why := cuda_unavailable_reason()) is not None:
        return why
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use a GPU; install one built for CUDA"
    return None


def placed(
    asked: str, model: ModelSource, sizes: ModelConfig, head: HeadConfig | None = None, dtype: Dtype = "auto"
) -> Placement:
    """Return the placement of a model: where it computes, and in which types.

    Args:
        asked: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        model: directory of the model, or a model in memory. The type of its embedding gives the type in which a GPU
            computes: bf16 and f16 checkpoints in their own, f32 ones in bf16.
        sizes: sizes of the model.
        head: sizes of its draft head.
        dtype: type in which the model computes; ``"auto"``: the type that the device takes for this model.

    Raises:
        ConfigError: no such device, a dtype in which it does not compute, or a model or head that a GPU does not run.
        CudaError: a GPU is asked for, and there are no kernels in this build, no driver, no GPU, or torch has no CUDA.
    """
    if asked == "cpu":
        if dtype not in ("auto", HOST.dtype_name):
            raise ConfigError(
                f"dtype = {dtype!r}: the CPU computes in {HOST.dtype_name}, over weights as the checkpoint has them; "
                f"dtype='auto' runs this model, and a GPU computes in {dtype}"
            )
        return HOST
    found = re.fullmatch(r"cuda(?::(\d{1,4}))?", asked) if isinstance(asked, str) else None
    if found is None:
        raise ConfigError(f"device = {asked!r}: must be 'cpu', 'cuda' or 'cuda:N'")
    if (why := unavailable()) is not None:
        raise CudaError(f"device = {asked!r}: {why}")
    ordinal, count = int(found[1]) if found[1] else torch.cuda.current_device(), torch.cuda.device_count()
    if ordinal >= count:
        raise ConfigError(f"device = {asked!r}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    if dtype == "float32":
        raise ConfigError(f"dtype = {dtype!r}: {asked!r} computes in bfloat16 or float16; device='cpu' has float32")
    cuda = torch.device("cuda", ordinal)
    for whose, part in (("", sizes), ("the draft head: ", head)):
        if part is not None and (why := why_not(part) or _too_large(cuda, part)) is not None:
            raise ConfigError(f"device = {asked!r}: {whose}{why}; device='cpu' runs this model")
    half = torch.float16 if Checkpoint(model).dtype("model.embed_tokens.weight") == "F16" else torch.bfloat16
    half = half if dtype == "auto" else getattr(torch, dtype)
    return Placement(cuda, half, half, torch.float32)


def why_not(sizes: ModelConfig | HeadConfig) -> str | None:
    """Return the reason why a GPU does not run a model, or a head, or ``None`` where it does."""
    cap = sizes.block.score_cap if isinstance(sizes, ModelConfig) else None
    capped = cap is not None
    if cap is not None and not _CAPS[0] <= cap <= _CAPS[1]:
        return f"attn_logit_softcapping = {cap:g}: attention on a GPU takes {_CAPS[0]:g} to {_CAPS[1]:g}"
    if sizes.head_dim not in (dims := _CAPPED if capped else HEAD_DIMS):
        where = " where attn_logit_softcapping caps scores" if capped else ""
        return f"head_dim = {sizes.head_dim}: attention on a GPU takes {', '.join(map(str, dims))}{where}"
    if sizes.num_heads // sizes.num_kv_heads > _MOST_GROUP:
        return f"{sizes.num_heads} heads over {sizes.num_kv_heads} key heads: a group has at most {_MOST_GROUP}"
    if sizes.vocab_size > _MOST_VOCABULARY:
        return f"vocab_size = {sizes.vocab_size}: sampling on a GPU takes at most {_MOST_VOCABULARY}"
    tokens = sizes.vocab_size if isinstance(sizes, ModelConfig) else sizes.draft_vocab_size
    widths = [sizes.hidden_size, sizes.qkv_size, sizes.q_size, sizes.intermediate_size, tokens]
    if isinstance(sizes, BlockConfig):
        widths += [sizes.pair_rank, sizes.conv_factors]
        widths += [] if sizes.gru is None else [sizes.gru.state, sizes.gru.inner]
        if sizes.selector is not None and sizes.selector.candidates > _MOST_CANDIDATES:
            return f"selector_top_k = {sizes.selector.candidates}: a GPU lists at most {_MOST_CANDIDATES} tokens"
    if isinstance(sizes, Eagle3Config) and sizes.norm_before_fc and sizes.aux_size > _MOST_NORMED:
        return f"norm_before_fc over {sizes.aux_size} columns: norms on a GPU take at most {_MOST_NORMED}"
    odd = next((n for n in widths if n % 8), None)
    return None if odd is None else f"a matrix of {odd} rows or columns: products on a GPU take multiples of 8"


def _too_large(cuda: torch.device, sizes: ModelConfig | HeadConfig) -> str | None:
    """Return the reason why this GPU has no room for a block of attention over such heads, or ``None`` where it has."""
    if sizes.head_dim <= _SMALL_HEADS:
        return None  # known without the device
    group = sizes.num_heads // sizes.num_kv_heads
    try:
        core._device_attention_workspace(
            cuda.index,
            requests=1,
            max_queries=1,
            kv_heads=sizes.num_kv_heads,
            group=group,
            head_dim=sizes.head_dim,
            max_keys=1,
        )
    except ConfigError as error:
        return f"head_dim = {sizes.head_dim}: {error}"
    return None


class _Memory:
    """Scratch tensors by name, grown as needed and kept.

    Views are kept too, and found by what was asked for: to make one takes as long as a launch. A reserved block never
    moves, because captured graphs have its address.
    """

    def __init__(self, cuda: torch.device) -> None:
        self._cuda = cuda
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}
        self._reserved: set[tuple[str, torch.dtype]] = set()

    def __call__(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        view = self._views.get((name, dtype, shape))
        if view is None:
            count = math.prod(shape)
            memory = self._kept.get((name, dtype))
            if memory is None or memory.numel() < count:
                if memory is not None and (name, dtype) in self._reserved:
                    raise RuntimeError(f"scratch memory {name!r} for {count} elements: {memory.numel()} are reserved")
                # A block that is let go of is too small for the next: in steps where it costs little, so that few are.
                memory = self._grow(name, dtype, count + (count // 2 if count * dtype.itemsize < _LARGE else 0))
            elif len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[name, dtype, shape] = memory[:count].view(shape)
        return view

    def reserve(self, name: str, dtype: torch.dtype, count: int) -> None:
        """Allocate a block of so many elements. A view of more is an error from now on."""
        self._grow(name, dtype, count)
        self._reserved.add((name, dtype))

    def _grow(self, name: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        self._views.clear()  # views keep the block that goes
        memory = self._kept[name, dtype] = torch.empty(count, dtype=dtype, device=self._cuda)
        return memory


class CudaDense:
    """Products and row operations of one GPU.

    placement: of a CUDA device, bf16 or f16. Raises ``CudaError`` where there are no kernels, driver, GPU or cublasLt.
    """

    def __init__(self, placement: Placement) -> None:
        if placement.device.type != "cuda" or placement.activations not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"placement = {placement.device}, {placement.activations}: must be a CUDA device, bfloat16 or float16"
            )
        self.placement = placement
        device.init(placement.device)
        self.faults = device.faults(placement.device)  # an engine's own, whoever else is on the device
        self.products = device.products(placement.device)
        self.memory = _Memory(placement.device)
        self._ordinal = torch.cuda.current_device() if placement.device.index is None else placement.device.index
        self._owed: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def stream(self) -> core._DeviceStream:
        """The stream on which operations are launched; they report to `faults`."""
        # `torch.cuda.current_stream` takes ten times as long, for every launch.
        return self.faults.on(torch._C._cuda_getCurrentRawStream(self._ordinal))

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, scores: bool = False
    ) -> Linear:
        return CudaLinear(self, weight, bias, scores)

    def embedding(self, table: torch.Tensor) -> Embedding:
        return CudaTable(self, self.placement.vector(table))

    def owe(self, total: torch.Tensor, residual: torch.Tensor) -> None:
        """Owe ``total`` += ``residual``: the next norm that reads it makes the sum, or else the next operation does
        before it begins."""
        self.settle()
        self._owed = total, residual

    def forget(self) -> None:
        """Drop the sum that is owed, after a pass that broke off."""
        self._owed = None

    def settle(self) -> None:
        """Make the sum that is owed."""
        if self._owed is not None:
            total, residual = self._owed
            self._owed = None
            torch.add(total, residual, out=total)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        residual = None
        if self._owed is not None and self._owed[0] is x:
            residual, self._owed = self._owed[1], None
        self.settle()
        core._device_add_rms_norm(x, residual, weight, eps, None, 0, None, out, self.stream)

    def gelu_up(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        self.settle()
        core._device_gated_up(gate_up, "gelu_tanh", False, None, out, self.stream)

    def scaled_add(self, x: torch.Tensor, y: torch.Tensor, scale: float, out: torch.Tensor) -> None:
        self.settle()
        torch.add(x, y, alpha=scale, out=out)

    def soft_cap(self, x: torch.Tensor, cap: float) -> None:
        self.settle()
        x.div_(cap).tanh_().mul_(cap)  # one thread an element, wherever it lies

    def convolve(
        self, x: torch.Tensor, base: torch.Tensor, own: torch.Tensor, side: int, plan: Plan, out: torch.Tensor,
        adds: bool = False,
    ) -> None:  # fmt: skip
        self.settle()
        starts = plan.starts if isinstance(plan, DevicePlan) else self.upload(from_dlpack(plan.qo_indptr))
        core._device_row_conv(x, base, own, side, starts, adds, out, self.stream)

    def attention_space(self, size: int) -> torch.Tensor:
        """Scratch of attention, of so many bytes at least."""
        return self.memory("attention", torch.uint8, size)

    def reserve(
        self, rows: int, layers: Sequence[LayerConfig], products: Iterable[CudaLinear], features: int, attention: int
    ) -> None:
        """Reserve scratch memory for passes of so many rows through these layers and products, which read features so
        wide, with so many bytes for attention."""
        half = self.placement.activations
        widths = [
            ("normed", max(layer.hidden_size for layer in layers)),
            ("product", max(2 * layer.intermediate_size for layer in layers)),
            ("q", max(layer.q_size for layer in layers)),
            ("concat", features),
        ]
        for name, width in widths:
            self.memory.reserve(name, half, rows * width)
        self.memory.reserve("workspace", torch.uint8, max(product.workspace_bytes for product in products))
        self.memory.reserve("attention", torch.uint8, attention)

    def gather(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, shift: int = 0) -> None:
        self.settle()
        core._device_gather_rows(x, self.upload(rows), shift, None, out, self.stream)

    def concat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        self.settle()
        rows, wide = parts[0].shape[0], sum(p.shape[1] for p in parts)
        return torch.cat(tuple(parts), 1, out=self.memory("concat", parts[0].dtype, rows, wide))

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        cuda = self.placement.device
        return cos.to(cuda).contiguous(), sin.to(cuda).contiguous()

    def rope_write(
        self, kv: KvMemory, layer: int, plan: Plan, qkv: torch.Tensor, rope: Any, heads: Heads
    ) -> torch.Tensor:
        return self.rotated(kv, layer, DevicePlan.of(self, plan, kv.page_size)[0], qkv, rope, heads)

    def rotated(
        self, kv: KvMemory, layer: int, plan: DevicePlan, qkv: torch.Tensor, rope: Any, heads: Heads
    ) -> torch.Tensor:
        """Write as `rope_write` does, for a plan that is on the device."""
        self.settle()
        kv_heads, head_dim = kv.tensor.shape[3:]
        rows = qkv.shape[0]
        q = self.memory("q", qkv.dtype, rows, heads.count * head_dim) if heads.count else None
        core._device_rope_kv(
            qkv,
            heads.count,
            kv_heads,
            None,
            heads.q_norm if heads.count else None,
            heads.k_norm,
            heads.eps,
            rope,
            plan.positions,
            plan.out_slots,
            q,
            kv.tensor,
            layer,
            self.stream,
        )
        return self.memory("q", qkv.dtype, rows, heads.count, head_dim)

    def host(self, scores: torch.Tensor) -> torch.Tensor:
        self.settle()
        scores = scores.to("cpu", torch.float32)  # waits for all that was launched
        # Scores that are no numbers the host sees itself, and names; those of a round in flight, collecting it does.
        with suppress(core.NonFiniteError):
            self.faults.check()
        return scores

    def kv_move(self, kv: KvMemory, moves: Moves) -> None:
        if len(moves):
            moves.claim(kv.tensor.data_ptr(), kv.tensor.nbytes)
            # One request at a time: a move may depend on the one before.
            pairs = self.upload(
                torch.cat((from_dlpack(moves.src), from_dlpack(moves.dst), torch.tensor([0, len(moves)])))
            )
            n = len(moves)
            core._device_kv_move(kv.tensor, pairs[:n], pairs[n : 2 * n], pairs[2 * n :], self.stream)

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """Integers of the host, as int32 on the device, in stream order."""
        if values.is_cuda:
            return values.to(torch.int32)
        return values.to(torch.int32).pin_memory().to(self.placement.device, non_blocking=True)


class CudaTable:
    """An embedding.

    Attributes:
        table: its rows, behind one another.
    """

    def __init__(self, dense: CudaDense, table: torch.Tensor) -> None:
        self.table, self._dense = table.contiguous(), dense

    def lookup(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        vocab = self.table.shape[0]
        if not tokens.is_cuda and tokens.numel():
            low, high = (int(v) for v in torch.aminmax(tokens))
            if low < 0 or high >= vocab:
                raise ConfigError(f"token = {low if low < 0 else high} is outside 0..{vocab} (the vocabulary)")
        self._dense.settle()
        core._device_embed(self.table, self._dense.upload(tokens), None, out, self._dense.stream)


class CudaLinear:
    """A product of cublasLt, with a norm before and a residual behind.

    Attributes:
        weight: [N, K].
        workspace_bytes: bytes of workspace that its algorithms want.
    """

    def __init__(self, dense: CudaDense, weight: torch.Tensor, bias: torch.Tensor | None, scores: bool) -> None:
        at = dense.placement
        self.weight = at.vector(weight).contiguous()
        bias = None if bias is None else at.vector(bias).contiguous()
        self._dense, self._dtype = dense, at.logits_dtype if scores else at.activations
        self._product = dense.products.linear(
            self.weight, _MOST_ROWS, bias=bias, f32_output=self._dtype == torch.float32
        )
        self.workspace_bytes = max(self._product.workspace_bytes, 16)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def product(self) -> core._DeviceLinear:
        """Algorithms of the product, all of one class of bits."""
        return self._product

    def forward(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        self._multiply(x, norm, eps, out)
        if residual is not None:
            self._dense.owe(out, residual)

    def forward_swiglu(self, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor | None, eps: float) -> None:
        y = self._dense.memory("product", self._dtype, x.shape[0], self.out_features)
        self._multiply(x, norm, eps, y)
        core._device_gated_up(y, "silu", False, None, out, self._dense.stream)

    def _multiply(self, x: torch.Tensor, norm: torch.Tensor | None, eps: float, y: torch.Tensor) -> None:
        dense, (rows, columns) = self._dense, x.shape
        if norm is not None:
            normed = dense.memory("normed", x.dtype, rows, columns)
            dense.rms_norm(x, norm, eps, normed)
            x = normed
        else:
            dense.settle()
        space, stream = dense.memory("workspace", torch.uint8, self.workspace_bytes), dense.stream
        if 0 < rows <= _MOST_ROWS:
            self._product.launch(rows, x, y, space, stream)
            return
        for first in range(0, rows, _MOST_ROWS):
            part, to = x[first : first + _MOST_ROWS], y[first : first + _MOST_ROWS]
            self._product.launch(part.shape[0], part, to, space, stream)


@dataclass(frozen=True)
class PassSizes:
    """Sizes of a pass, by which the scratch memory of its attention is counted.

    Attributes:
        requests: number of requests.
        max_queries: the most queries of a request.
        kv_heads: number of key heads.
        group: query heads that share a key head.
        head_dim: elements of a head.
        max_keys: the most keys of a request.
    """

    requests: int
    max_queries: int
    kv_heads: int
    group: int
    head_dim: int
    max_keys: int


@dataclass(eq=False)
class DevicePlan:
    """A plan's arrays on the device.

    Attributes:
        phase: phase of a round, as a `Plan` names it.
        positions, out_slots: int32 [Q].
        lens, starts: positions before a request's queries and its first query, int32 [B] and [B + 1].
        table: pages of each request, int32 [rows, columns].
        mask: int64 [Q], or ``None`` of a causal plan.
        rows: each request's row of the table, int32 [B]; ``None`` where rows are in the order of requests.
        first_pages: column of the table at which each request's keys begin, int32 [B]; ``None`` where it is the first.
        most_queries: most queries of one request.
        page_size: tokens of a page.
        arrays: arrays of the attention backend's format, by name. They may be longer than the pass needs.
        expand_page_size: as `Step` has it.
        of_host: the same arrays on the host, as long as the pass needs; ``None`` where the device has planned the pass.
        most_keys: most keys of one request, for which masks have room where the device plans; else the table's columns.
    """

    phase: Phase
    positions: torch.Tensor
    out_slots: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    table: torch.Tensor
    mask: torch.Tensor | None
    rows: torch.Tensor | None
    most_queries: int
    page_size: int
    first_pages: torch.Tensor | None = None
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)
    expand_page_size: int | None = None
    of_host: Mapping[str, torch.Tensor] | None = None
    most_keys: int | None = None

    @classmethod
    def of(
        cls, dense: CudaDense, plan: Plan, page_size: int, *more: torch.Tensor, writes: bool = True
    ) -> tuple[DevicePlan, list[torch.Tensor]]:
        """Copy a plan of the host to the device, with more integers of the pass as int32.

        There is one copy of all arrays, because a copy costs as much as some launches, and one more for each array of
        the attention backend's format.

        Args:
            writes: False for a pass over positions whose KV is there already: it writes none.

        Raises:
            ConfigError: a mask has more than one word.
        """
        starts, mask = from_dlpack(plan.qo_indptr), from_dlpack(plan.mask)
        table, lens = from_dlpack(plan.page_table()), from_dlpack(plan.prefix_lens)
        if mask.shape[1] > 1:
            raise ConfigError(f"mask of {mask.shape[1]} words: attention on a GPU takes one, 64 nodes or draft slots")
        slots = from_dlpack(plan.out_slots)
        slots = slots if writes else torch.zeros_like(slots)  # nothing is ever written to slot 0
        arrays = [from_dlpack(plan.positions), slots, lens, starts, table.reshape(-1)]
        if not plan.whole:
            arrays.append(torch.tensor(plan.first_pages, dtype=torch.int32))
        words = mask.reshape(-1).view(torch.int32)  # first: their 8 bytes are aligned there
        arrays += [a.to(torch.int32) for a in more]
        buffer = dense.upload(torch.cat((words, *arrays)))
        parts = torch.split(buffer, [words.numel(), *(a.numel() for a in arrays)])
        masks = parts[0].view(torch.int64) if words.numel() else None
        positions, out_slots, lens_there, starts_there = parts[1:5]
        ends = starts.tolist()
        most = max((end - first for first, end in pairwise(ends)), default=0)
        there, rest = parts[5].view(table.shape), list(parts[6:])
        first_pages = None if plan.whole else rest.pop(0)
        of_host = {name: from_dlpack(array) for name, array in plan.arrays().items()}
        of_format = {
            name: array.pin_memory().to(dense.placement.device, non_blocking=True) for name, array in of_host.items()
        }
        at = cls(
            plan.phase, positions, out_slots, lens_there, starts_there, there, masks, None, most, page_size,
            first_pages, of_format, plan.expand_page_size, of_host,
        )  # fmt: skip
        return at, rest

    @property
    def queries(self) -> int:
        """Q, dead ones of a bucket included."""
        return self.positions.numel()

    @functools.cached_property
    def _workspaces(self) -> dict[tuple[int, int, int], int]:
        return {}

    def workspace(
        self, wanted: Callable[[int, PassSizes], int], ordinal: int, kv_heads: int, group: int, head_dim: int
    ) -> int:
        """Bytes that a pass wants for these heads by `DeviceAttention.workspace`, the same in all layers."""
        heads = (kv_heads, group, head_dim)
        if heads not in self._workspaces:
            keys = self.table.shape[1] * self.page_size
            sizes = PassSizes(self.lens.numel(), self.most_queries, *heads, keys)
            self._workspaces[heads] = wanted(ordinal, sizes)
        return self._workspaces[heads]
