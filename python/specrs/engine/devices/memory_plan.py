"""The device memory of an engine on a GPU, counted before the first byte of it is allocated.

The count needs only configurations and sizes. It is exact for a model's tensors and pages, and an upper bound for
passes. If the engine does not fit, the error says what would fit: fewer pages, requests or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from specrs import _specrs as core
from specrs._specrs import ConfigError, DeviceMemoryError, Geometry
from specrs.backends import on_device
from specrs.engine.config import BlockEngineConfig, EngineConfig
from specrs.engine.devices.block_lists import MOST_BLOCK_ROWS, tree_regions
from specrs.engine.devices.host_blocks import CANDIDATES
from specrs.engine.devices.memory import (
    buckets,
    entering,
    format_arrays,
    hosts_trees,
    longest_path,
    prompt_sizes,
    step_rows,
)
from specrs.engine.drafting.levels import can_unite, drafted_levels, levels_for, tiers
from specrs.models.block_config import BlockConfig
from specrs.models.config import LayerConfig, ModelConfig
from specrs.models.cuda import PassSizes
from specrs.models.cuda_attention import CudaAttention, EngineSizes, kernels_of
from specrs.models.head_config import Eagle3Config, HeadConfig
from specrs.models.layer import LayerTail, WholeNormQkv
from specrs.models.llama import ROPE_SLACK, LlamaModel
from specrs.models.ops import Ops
from specrs.models.placement import Placement

_SHARE = 0.9  # the pool's share of the memory that the other lines leave, if nobody gave its size
_ROUNDING = 2 << 20  # bytes that torch's allocator may add to a large tensor
_SPACE = 512 << 20  # bytes of workspace that a product may ask for: `MAX_WORKSPACE` of src/device/cublaslt/bench.rs
_PRODUCT_ROWS = 2048  # rows that one launch of a product takes
_TILE_ROWS = (16, 32, 64, 128)  # heights of attention's tiles: `TILE_ROWS` of src/device/kernels/attention_tiling.rs
_LAG = 64  # positions of each request whose features may wait for the head
_BLOCKS = 32 * 33 // 2 * 32  # rows of all blocks of features: a block has 32 passes of one size, from 1 to 32 rows
_CAPTURED = 1 << 20  # bytes that the graph of a round may take
_SCRATCH = 64 << 20  # bytes of kernels' scratch beside what is counted
_CALIBRATED = 64  # rows of the largest pass that a cost model measures

Shapes = dict[str, tuple[int, ...]]
Attention = Callable[[int, int, int, int, int, int], int]
Line = tuple[str, int]


def attention_of(ops: Ops, ordinal: int) -> Attention:
    """Return a function that gives the bytes of attention's workspace on a GPU."""
    attention = ops.attention
    assert isinstance(attention, CudaAttention)

    def workspace(requests: int, queries: int, kv_heads: int, group: int, head_dim: int, keys: int) -> int:
        return attention.kernels.workspace(ordinal, PassSizes(requests, queries, kv_heads, group, head_dim, keys))

    return workspace


def attention_bytes(
    config: EngineConfig,
    geometry: Geometry,
    layers: Iterable[LayerConfig],
    drafts: bool,
    workspace: Attention,
) -> int:
    """Return the largest workspace that attention needs in any pass of an engine.

    Attention takes tiles of some heights over a request's queries times the query heads of a group. As long as the
    height is the same, more queries need no less, so passes with the most queries of each height are tried. Fewer
    requests may need more, because they leave room for more blocks.

    Args:
        drafts: True if the engine verifies trees.
        workspace: returns the bytes of a pass, as `Engine.attention`.
    """
    shape, keys = geometry.shape, geometry.row_pages * config.page_size
    path = max(config.head_shape.steps, config.deepest) + 1
    trees = (shape.draft_tokens, shape.topk, path) if drafts else ()
    most = max(config.prefill_chunk, entering(config)[1], *trees)
    return max(
        workspace(requests, queries, layer.num_kv_heads, group, layer.head_dim, keys)
        for layer in layers
        for group in (layer.num_heads // layer.num_kv_heads,)
        for requests in range(1, config.max_batch + 1)
        for queries in {min(max(rows // group, 1), most) for rows in _TILE_ROWS} | {most}
    )


def engine_sizes(config: EngineConfig, geometry: Geometry, layers: Sequence[LayerConfig], rows: int) -> EngineSizes:
    """Return the sizes of an engine's largest passes.

    Args:
        layers: a decoder layer of each model, the target's first.
        rows: the most rows of a pass.
    """
    shape, b = geometry.shape, config.max_batch
    drafts = len(layers) > 1 or bool(config.sources)
    each = max(shape.draft_tokens if drafts else 1, longest_path(config, geometry, trees=True))
    spread = max(math.prod(sizes) for sizes in ((b, each), entering(config), *prompt_sizes(config)))
    return EngineSizes(rows, b, b * shape.topk, spread, layers)


@dataclass(frozen=True)
class Head:
    """A draft head that is not loaded.

    Attributes:
        config: the head's configuration.
        shapes: the shapes of the head's tensors, by name.
    """

    config: HeadConfig
    shapes: Shapes


def head_elements(head: Head, rows: int, step_rows: int) -> int:
    """Return the elements of a head's scratch memory, without logits.

    Args:
        rows: rows of a pass over the target's features, all of which may have logits.
        step_rows: rows of a pass that drafts.
    """
    h = head.config
    if isinstance(h, BlockConfig):
        tail = h.hidden_size + h.q_size + h.intermediate_size
        block = 2 * tail + 3 * h.hidden_size + h.qkv_size
        block += 0 if h.conv is None else 2 * h.hidden_size + h.conv_factors
        block += 0 if h.selector is None else h.selector.rank
        return 2 * (h.hidden_size + h.kv_size * h.num_layers) * rows + block * step_rows
    layer = 4 * h.hidden_size + 2 * h.qkv_size + h.q_size + h.intermediate_size
    normed = any(name.startswith(("input_norm.", "fc_norm.")) for name in head.shapes)
    features = h.aux_size if normed else 0
    writing = layer + 2 * h.kv_size if h.num_layers > 1 else 4 * h.hidden_size + 4 * h.kv_size
    tail = 4 * h.hidden_size + h.q_size + h.intermediate_size
    masked = h.hidden_size if isinstance(h, Eagle3Config) and h.levels else 0
    return (layer + writing + 2 * features + tail) * rows + (layer + h.hidden_size + masked) * step_rows


def _prefix_bytes(config: BlockEngineConfig, head: BlockConfig) -> int:
    """Return the bytes that scoring tokens behind prefixes takes, for all requests of a batch together."""
    if head.gru is None and not head.pair_rank:
        return 0
    prefixes = config.max_batch * config.width
    inner = head.pair_rank if head.gru is None else head.gru.inner
    states = 4 * (head.hidden_size + 4 * (head.pair_rank if head.gru is None else head.gru.state))
    # The products of all prefixes and tokens before their sum, twice: as factors and as products.
    return 4 * prefixes * (2 * max(CANDIDATES, config.width) * inner + states)


def _tree_bytes(config: BlockEngineConfig, head: HeadConfig, most: int) -> int:
    """Return the bytes of the arrays with which rounds make trees of up to ``most`` nodes."""
    levels, pairs = min(config.levels, config.head_shape.steps), isinstance(head, BlockConfig) and head.pair_rank
    beams = config.width if pairs else None
    each = (tree_regions(b, config.rows, levels, most, beams) for b in buckets(config.max_batch))
    return sum(core._DeviceArena.count([(name, kind, [n]) for name, (kind, n) in one.items()]) for one in each)


@dataclass(frozen=True)
class Engine:
    """An engine that is planned but not made.

    Attributes:
        target: the target's configuration.
        head: the draft head; ``None`` without one.
        config: the engine's configuration.
        geometry: the geometry that follows from the configuration.
        place: the GPU, and the dtypes.
        attention: returns the bytes of attention's workspace. Its arguments are requests, queries of each request, key
            heads, query heads in a group, head_dim, and keys of a request.
    """

    target: ModelConfig
    head: Head | None
    config: EngineConfig
    geometry: Geometry
    place: Placement
    attention: Attention

    def at(self, max_batch: int, max_context_len: int) -> Engine:
        """Return the engine with other numbers of requests and tokens. Raises ConfigError if these are impossible."""
        config = replace(self.config, max_batch=max_batch, max_context_len=max_context_len, num_pages=None)
        config, geometry = config.resolve(self.target.max_context_len)
        return replace(self, config=config, geometry=geometry)

    @property
    def drafts(self) -> bool:
        """True if the engine verifies trees, with drafts of a head or of other sources."""
        return self.head is not None or bool(self.config.sources)

    @property
    def layers(self) -> list[tuple[LayerConfig, int]]:
        """The decoder layer of each model, with the number of its layers."""
        head: list[tuple[LayerConfig, int]] = (
            [] if self.head is None else [(self.head.config, self.head.config.num_layers)]
        )
        return [(self.target, self.target.num_layers), *head]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of keys and values, in both caches together."""
        each = sum(2 * n * c.num_kv_heads * c.head_dim for c, n in self.layers)
        return each * self.config.page_size * self.place.activations.itemsize

    def fixed(self) -> Iterator[Line]:
        """Yield the name and bytes of all memory that does not grow with the pool.

        The bytes of weights are exact; all other bytes are upper bounds.
        """
        c, g, head = self.config, self.geometry, self.head
        half, wide = self.place.activations.itemsize, self.place.logits_dtype.itemsize
        shape, b = g.shape, c.max_batch
        nodes = b * (shape.draft_tokens if self.drafts else 1)
        most_rows = rows = _up(max(c.prefill_chunk, nodes, _CALIBRATED, math.prod(entering(c))), 16)
        assert c.max_context_len is not None

        shapes = LlamaModel.shapes(self.target)
        norms = sum(shape[0] for name, shape in shapes.items() if name.endswith("norm.weight"))
        wider = norms * (4 - half) if self.target.block.norm_offset else 0  # f32
        yield "weights of the target", _bytes(shapes, half) + wider
        tensors = len(shapes)
        if head is not None:
            # Rows for keys and values are stored a second time, for passes that only write draft KV: of the last layer,
            # and of all layers of a head of blocks.
            widths = 2 if head.config.num_layers == 1 else 1
            widths = head.config.num_layers if isinstance(head.config, BlockConfig) else widths
            again = 2 * head.config.kv_size * widths * head.config.hidden_size
            yield "weights of the draft head", _bytes(head.shapes, half) + again * half
            tensors += len(head.shapes) + 4
        positions = c.max_context_len + ROPE_SLACK
        kinds = len({self.target.rope_of(i) for i in range(self.target.num_layers)} - {None})  # each kind has a table
        turning = kinds * self.target.head_dim + sum(layer.head_dim for layer, _ in self.layers[1:])
        still = 2 * positions * 2 * 4 if None in self.target.layer_ropes else 0
        yield "rotary tables", 2 * positions * (turning // 2) * 4 + still

        t = self.target
        # A layer's activations count twice: once for all rows, and once for rows whose logits are wanted.
        block = 2 * (t.hidden_size + sum(LayerTail.widths(t, t.block).values())) + t.qkv_size
        norms = sum(WholeNormQkv.widths(t).values()) if t.block.whole_qk_norm else 0
        units = [(block + norms) * rows]
        if head is not None:
            units += [head_elements(head, rows, _up(step_rows(c, g), 16)), head.config.aux_size * rows]
        yield "activations", sum(units) * half
        if head is not None and isinstance(c, BlockEngineConfig):
            if isinstance(head.config, BlockConfig):
                yield "prefixes of blocks", _prefix_bytes(c, head.config)
            yield "trees of blocks", _tree_bytes(c, head.config, shape.draft_tokens)
        most = max(max(layer.hidden_size, 2 * layer.intermediate_size) for layer, _ in self.layers)
        inner = max(max(layer.hidden_size, layer.intermediate_size) for layer, _ in self.layers)
        queries = max(layer.q_size for layer, _ in self.layers)
        yield "scratch of products and rotations", (most + inner + queries) * rows * half
        yield "workspace of products, at most", _SPACE
        layers = [layer for layer, _ in self.layers]
        yield "workspace of attention", attention_bytes(c, g, layers, self.drafts, self.attention)

        logits = t.vocab_size * _up(max(nodes, _CALIBRATED), 16)
        if head is not None:
            # Rows of the head's logits: draft steps, roots in three places, two passes of the largest measured size,
            # and the kept roots of all requests.
            rows = _up(step_rows(c, g), 16) + 3 * _up(b, 16) + 2 * _CALIBRATED + b
            if isinstance(c, BlockEngineConfig):  # copies of the roots of a pass
                rows += min(b, MOST_BLOCK_ROWS)
            if isinstance(c, BlockEngineConfig) and not isinstance(head.config, BlockConfig):  # and all levels together
                rows += MOST_BLOCK_ROWS
            logits += head.config.draft_vocab_size * rows
        yield "logits", logits * wide
        if head is not None:
            # Features wait for the head. A round of the largest batch, passes that begin drafts, and captured passes
            # over prompts have features of their own.
            waits = _LAG * b + _BLOCKS + 2 * c.prefill_chunk + 2 * nodes
            waits += max((n for _, n in prompt_sizes(c)), default=0)
            rounds = b * (shape.draft_tokens + max(c.head_shape.steps, c.deepest) + 1)
            yield "features", (waits + rounds) * head.config.aux_size * half
        if c.graphs != "off":
            # Plain rounds, rounds of each depth, and passes that begin drafts.
            blocks = isinstance(c, BlockEngineConfig)
            drafted = len(drafted_levels(shape, sized=blocks))
            levels = 2 + drafted if head is not None else 1
            each = 2 if c.graphs == "loop" else 1  # a round alone, and in a loop
            given = 0  # rounds with host trees, which never loop: the host makes the next trees
            if hosts_trees(c):
                room = {levels_for(shape, n) for n in tiers(shape.draft_tokens)}
                both = drafted if head is not None and can_unite(shape) and not blocks else 0
                given = len(room) * (1 + both)
            graphs = len(buckets(b)) * 2 * (levels * each + given)  # greedy, and sampled
            if blocks:
                graphs += 2 * len(buckets(step_rows(c, g)))  # passes that draft all levels
            yield "captured rounds and passes over prompts", (graphs + len(prompt_sizes(c))) * _CAPTURED
        # The pool's table, that of a long prompt's pass, and those of captured passes over prompts.
        tables = (
            2 * b + sum(requests for requests, _ in prompt_sizes(c)) + (1 + entering(c)[0] if head is not None else 0)
        )
        if isinstance(c, BlockEngineConfig):  # those of passes over blocks
            tables += 2 * b
        words = tables * g.row_pages + 16 * (c.prefill_chunk + b) + 4 * nodes * 28
        yield "page tables, plans, trees and scratch", words * 4 + _SCRATCH
        if lists := format_arrays(c, g, head is not None):
            # Lists of a pass that the host plans, of a draft step for each branch, and of the one before.
            uploaded = 2 * 8 * b * c.max_context_len * (g.shape.topk if head is not None else 1)
            yield f"arrays of the format {c.backend.format!r}", core._DeviceArena.count(lists) + uploaded
        there = on_device(c.backend, "cuda")
        assert there is not None, "it runs there"
        if scratch := kernels_of(there).allocates(engine_sizes(c, g, layers, most_rows)):
            yield "what kernels of attention allocate", scratch
        yield "the page that padding writes to", self.page_bytes
        yield "rounding of torch's allocator", tensors * _ROUNDING

    def loading(self) -> list[Line]:
        """Return the most memory needed while weights are loaded and algorithms are compared. There is no pool yet."""
        half, wide = self.place.activations.itemsize, self.place.logits_dtype.itemsize
        t, head = self.target, self.head
        table, whole = t.vocab_size * t.hidden_size * half, _bytes(LlamaModel.shapes(t), half)
        # Each moment has the bytes of weights loaded by then, with the parts of the current weight, and the bytes that
        # its comparison takes. The target's output layer is first.
        first = table if t.tie_word_embeddings else 2 * table
        moments = [(first, _trial(t.vocab_size, t.hidden_size, half, wide))]
        sizes = [(whole, _products(t, t.hidden_size))]
        if head is not None:
            h, whole = head.config, whole + _bytes(head.shapes, half)
            sizes.append((whole, [*_products(h, 2 * h.hidden_size), (h.hidden_size, h.aux_size)]))
            moments.append((whole, _trial(h.draft_vocab_size, h.hidden_size, half, wide)))
        moments += [(by_then + n * k * half, _trial(n, k, half, half)) for by_then, each in sizes for n, k in each]
        weights, trial = max(moments, key=sum)
        return [("weights that are loaded by then", weights), ("products that are compared, at most", trial)]


@dataclass(frozen=True)
class Budget:
    """Bytes that an engine needs, by purpose, and bytes that the GPU had free. ``str`` gives the table.

    Attributes:
        device: ordinal of the GPU.
        have: bytes that were free, including memory that this process holds without using it.
        lines: name and bytes of everything but the pool.
        pages: pages of the pool, without the sink.
        page_bytes: bytes of one page.
    """

    device: int
    have: int
    lines: tuple[Line, ...]
    pages: int
    page_bytes: int

    @property
    def fixed(self) -> int:
        """Bytes of everything but the pool."""
        return sum(n for _, n in self.lines)

    @property
    def bytes(self) -> int:
        """Bytes of everything, with the pool."""
        return self.fixed + self.pages * self.page_bytes

    def _core(self, have: int | None, least: int = 1) -> str:
        pool = ("KV pool", "num_pages", self.page_bytes, self.pages, least)
        return core._device_budget(list(self.lines), pool, have=have, ordinal=self.device)

    def check(self, least: int = 1) -> None:
        """Raise DeviceMemoryError if the budget does not fit.

        Args:
            least: the least pages that make a pool useful.
        """
        self._core(self.have, least)

    def __str__(self) -> str:
        return (
            f"{self._core(None)}\n{self.have:>16}  {self.have / (1 << 20):>12.1f} MiB  were free on cuda:{self.device}"
        )


def planned(engine: Engine, num_pages: int | None, have: int) -> tuple[EngineConfig, Budget]:
    """Return the configuration with the pool's pages, and the budget of the whole engine.

    Without ``num_pages``, the pool gets pages for ``max_batch`` requests of full context. If these do not fit, it gets
    9 tenths of the memory that the other lines leave, but at least the pages of one such request.

    Args:
        engine: the engine to plan.
        num_pages: pages of the pool as the user gave them; ``None`` to choose.
        have: bytes that may be used.

    Raises:
        DeviceMemoryError: the engine does not fit; `hint` has the lines, and numbers that would fit.
    """
    config, ordinal = engine.config, engine.place.device.index
    lines, page = tuple(engine.fixed()), engine.page_bytes
    fixed = sum(n for _, n in lines)
    if num_pages is not None:
        budget, least = Budget(ordinal, have, lines, num_pages, page), 1
    else:
        least = engine.geometry.row_pages
        room = int((have - fixed) * _SHARE) // page if have > fixed else 0
        budget = Budget(ordinal, have, lines, max(min(room, engine.geometry.pages_for_full_load), least), page)
    try:
        budget.check(least)
        core._device_budget(engine.loading(), have=have, ordinal=ordinal)
    except DeviceMemoryError as error:
        advice = _advice(engine, num_pages, have)
        error.hint += advice
        error.args = (f"{error}{advice}",)
        raise
    return replace(config, num_pages=budget.pages), budget


def _advice(engine: Engine, num_pages: int | None, have: int) -> str:
    """Return a hint with options for which the engine would fit, if ``num_pages`` is left out.

    The hint has a smaller ``max_batch`` and a smaller ``max_context_len``, each alone, or both together if nothing
    alone helps.
    """
    config = engine.config
    batch, context = config.max_batch, config.max_context_len
    assert context is not None

    def fits(max_batch: int, max_context_len: int) -> bool:
        try:
            other = engine.at(max_batch, max_context_len)
            room = have - sum(n for _, n in other.fixed())
        except ConfigError:
            return False
        return room >= other.geometry.row_pages * other.page_bytes and have >= sum(n for _, n in other.loading())

    found = []
    if num_pages is not None and fits(batch, context):
        found.append("num_pages=None")
    if requests := _most(lambda n: fits(n, context), 1, batch):
        found.append(f"max_batch = {requests}")
    if tokens := _most(lambda n: fits(batch, n), 2, context):
        found.append(f"max_context_len = {tokens}")
    if not found and (tokens := _most(lambda n: fits(1, n), 2, context)):
        found.append(f"max_batch = 1 with max_context_len = {tokens}")
    if not found:
        return "; no smaller max_batch or max_context_len would fit; the host's may"
    return f"; would fit, with the pool that is left: {', or '.join(found)}"


def _most(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """Return the largest number from ``least`` to ``most`` that fits; ``None`` if none does.

    If a number fits, all smaller numbers must fit too.
    """
    if least > most or not fits(least):
        return None
    low, high = least, most + 1  # `low` fits; `high` does not fit, or is out of range
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a new engine can have: free on the device, or held by this process without use.

    The share of the device that `torch.cuda.set_per_process_memory_fraction` gives to the process limits the result.
    """
    core._graph_collect(False)  # lets go of memory that dropped graphs of unclosed engines keep
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - used
    share = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(min(int(free + cached + core._device_memory(device.index)[2]), share - used), 0)


def _bytes(shapes: Shapes, each: int) -> int:
    return each * sum(math.prod(shape) for shape in shapes.values())


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _products(layer: LayerConfig, qkv_inputs: int) -> list[tuple[int, int]]:
    """Return the numbers of outputs and inputs of each of a layer's products."""
    h, inner = layer.hidden_size, layer.intermediate_size
    return [(layer.qkv_size, qkv_inputs), (2 * inner, h), (h, layer.q_size), (h, inner)]


def _trial(n: int, k: int, half: int, out: int) -> int:
    """Return the bytes that comparing algorithms takes for a weight (`Bench::new` of src/device/cublaslt/bench.rs)."""
    weight = n * k * half
    copies = min(max(-(-(256 << 20) // weight), 1), 8)
    return copies * weight + (_PRODUCT_ROWS + 128) * k * half + (_PRODUCT_ROWS + 1) * (n * out + 8) + n * half + _SPACE
