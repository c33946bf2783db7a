"""The Rust core of specrs."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as _List
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, final, type_check_only

from typing_extensions import Self

from specrs.operands import (
    AcceptArrays,
    BeamArrays,
    BlockArrays,
    BuiltTrees,
    ListArrays,
    MoveArrays,
    PlanArrays,
    RoundFound,
    SamplerArrays,
    ScoredTrees,
    SeatLimits,
    SeatState,
    TreeArrays,
)

__version__: str

@type_check_only
class _Tensor(Protocol):
    def __dlpack__(self) -> Any: ...

_Stream: TypeAlias = "SupportsIndex | _DeviceStream"

class SpecrsError(Exception):
    """Base of every error of specrs. `kind` names the core's variant ("" for one raised in Python); the operands of
    the variant are attributes.
    """

    kind: str

class ConfigError(SpecrsError, ValueError):
    """A value, size, shape or element type that cannot be honoured."""

    what: str
    operand: str
    got: Any
    min: int
    max: int
    why: str
    expr: str
    ty: str
    limit: Any
    need: int
    have: int
    hint: str
    want: Any

class PoolExhaustedError(SpecrsError):
    """Too few free pages or sequences; nothing was changed."""

    need: int
    free: int
    total: int
    limit: int

class LedgerError(SpecrsError):
    """A double free, or pages whose account does not add up."""

    page: int
    owners: int
    frees: int
    what: str
    history: str

class StaleHandleError(SpecrsError):
    """A sequence, lease or plan that is no longer live."""

    what: str
    id: str
    why: str

class OutOfBoundsError(SpecrsError, IndexError):
    """A computed index left its buffer; the access was skipped."""

    kernel: str
    buffer: str
    request: int
    step: int
    index: int
    bound: int

class NonFiniteError(SpecrsError, ValueError):
    """NaN, or a row without a finite score."""

    what: str
    value: str
    request: int
    row: int
    position: int
    index: int

class GrammarError(ConfigError):
    """A grammar that cannot be honoured: malformed, too large, or of a model without a tokenizer; raised before its
    request is queued.
    """

    what: str
    why: str

class GrammarFailedError(SpecrsError):
    """The grammar of a request allows no token that the request could take, or following it met a limit."""

    why: str
    request: int
    row: int
    position: int

class CudaError(SpecrsError, RuntimeError):
    """CUDA is missing, or its driver refused a call."""

    call: str
    message: str
    reason: str

class DeviceMemoryError(SpecrsError, MemoryError):
    """A device has too little free memory; nothing was allocated."""

    what: str
    device: int
    need: int
    have: int
    hint: str

class StaleOutputError(SpecrsError):
    """A view of static buffers, or a graph's output, was read after a later write."""

    what: str
    held: int
    current: int

class GraphCaptureError(SpecrsError):
    """Work could not be captured into a graph; nothing of the graph is left, and its stream works as before."""

    call: str
    node: str
    path: str
    why: str

@final
class Array:
    """A small tensor of specrs on the CPU. `torch.from_dlpack(a)` and `numpy.from_dlpack(a)` share its memory (numpy
    has no bfloat16 and refuses it); `tolist()` copies it. Writing into the shared memory changes this array and
    nothing that specrs reads; numpy refuses to write into a plan's arrays.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> str:
        """Element type: `"int32"`, `"int64"`, `"float32"`, `"bfloat16"`, ..."""

    def tolist(self) -> Any:
        """The values as (nested) lists."""

    def __len__(self) -> int: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class TreeShape:
    """Shape of a dynamic draft tree: `topk` (K) branches per step, `steps` (S) steps, `draft_tokens` (V) tokens
    verified per request, root included; `1 <= V <= 1 + K + (S-1)*K*K`. Raises `ConfigError` for anything else.
    """

    def __new__(cls, topk: SupportsIndex, steps: SupportsIndex, draft_tokens: SupportsIndex) -> Self: ...
    @property
    def topk(self) -> int:
        """K: branches kept per draft step."""

    @property
    def steps(self) -> int:
        """S: draft steps."""

    @property
    def draft_tokens(self) -> int:
        """V: tokens verified per request, root included."""

    @property
    def candidates(self) -> int:
        """Nodes that the draft proposes: `K + (S-1)*K*K`."""

    @property
    def draft_slots(self) -> int:
        """Draft slots of a request in the dense layout: `K*S`."""

    def clamp_depth(self, depth: SupportsIndex) -> TreeShape | None:
        """The same tree with at most `depth` steps, V clamped with it; `None` where no step fits (verify the root
        alone).
        """

    def __getnewargs__(self) -> tuple[int, int, int]:
        """Arguments for copies and pickles: configurations are sent to processes."""

    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Geometry:
    """Checked limits, tree shape and draft layout: every size of specrs is a property of this object. Raises
    `ConfigError` if a limit is out of range or a size does not fit int32 indexing.

    `reverts` are ids of historical faults to put back, for debugging alone (see `faults()`); `None` means those that
    the environment variable `SPECRS_DEBUG_REVERT` names, usually none.
    """

    def __new__(
        cls,
        max_batch: SupportsIndex,
        max_context_len: SupportsIndex,
        page_size: SupportsIndex,
        shape: TreeShape,
        layout: Literal["dense", "holey"] = "dense",
        reverts: _List[SupportsIndex] | None = None,
    ) -> Self: ...
    @property
    def max_batch(self) -> int:
        """Largest number of requests in a batch."""

    @property
    def max_context_len(self) -> int:
        """Largest number of tokens of a request, prompt and output together."""

    @property
    def page_size(self) -> int:
        """P: tokens per page."""

    @property
    def shape(self) -> TreeShape:
        """The tree shape."""

    @property
    def layout(self) -> Literal["dense", "holey"]:
        """Draft layout in use: `"dense"` (also for K = 1 or P = 1) or `"holey"`."""

    @property
    def reverts(self) -> tuple[int, ...]:
        """Ids of the historical faults that are put back; empty except for debugging."""

    @property
    def alloc_len_per_decode(self) -> int:
        """Positions that one round may write beyond the committed length."""

    @property
    def reserve_per_decode(self) -> int:
        """Twice `alloc_len_per_decode`: with overlapped scheduling the host's length lags one round."""

    @property
    def row_width(self) -> int:
        """Positions of a request's row, whole pages."""

    @property
    def row_pages(self) -> int:
        """Columns of a request's page table."""

    @property
    def pages_for_full_load(self) -> int:
        """Pages of a pool in which `max_batch` requests of full context run at once, without the sink."""

    @property
    def per_branch_kv_indices(self) -> int:
        """Width of one step's `kv_indices` in the per-branch formats; raises `ConfigError` where int32 cannot index
        it.
        """

    @property
    def draft_mask_words(self) -> int:
        """64-bit words of a draft query's ancestor mask."""

    @property
    def verify_mask_words(self) -> int:
        """64-bit words of a verify query's ancestor mask."""

    def alloc_target(self, committed: SupportsIndex, allocated: SupportsIndex) -> int:
        """Positions a request must have allocated for its next round: whole pages, never fewer than `allocated`."""

    def draft_region(self, committed: SupportsIndex) -> DraftRegion:
        """Returns the draft region after a prefix of `committed` tokens."""

    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class DraftRegion:
    """Row positions of the draft KV of one request."""

    @property
    def layout(self) -> Literal["dense", "holey"]:
        """`"dense"` or `"holey"`."""

    @property
    def base(self) -> int:
        """First position of the prefix's tail page."""

    @property
    def remainder(self) -> int:
        """Tokens in the prefix's tail page, `L mod P`."""

    @property
    def pages_per_branch(self) -> int:
        """`ceil((remainder + S) / P)`."""

    @property
    def end(self) -> int:
        """One past the last position of the region."""

    def pos(self, branch: SupportsIndex, step: SupportsIndex) -> int:
        """Row position of branch `branch`, step `step`."""

    def hole(self, branch: SupportsIndex) -> tuple[int, int, int] | None:
        """`(src, dst, len)` of the copy that fills the hole before `branch`; `None` where there is no hole."""

@final
class Tree:
    """A checked token tree: node 0 is the root, every parent has a smaller index than its child."""

    @staticmethod
    def from_parents(parents: _List[SupportsIndex]) -> Tree:
        """Check a parent array: `parents[0] == -1`, `0 <= parents[i] < i` otherwise."""

    @property
    def parents(self) -> list[int]:
        """Parent of each node, -1 for the root."""

    @property
    def depths(self) -> list[int]:
        """Depth of each node, 0 for the root."""

    @property
    def next_child(self) -> list[int]:
        """First child of each node, -1 for a leaf."""

    @property
    def next_sibling(self) -> list[int]:
        """Next child of the same parent, -1 for the last."""

    def mask_bits(self) -> list[int]:
        """Returns one integer per node: bit j is set if node j is that node or one of its ancestors."""

    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Sequence:
    """Handle of a sequence of a pool. The handle does not own the sequence: `Pool.release` ends the sequence, and
    using the handle afterwards raises `StaleHandleError`.
    """

    @property
    def row(self) -> int:
        """Row of the page table."""

    @property
    def generation(self) -> int:
        """Number of sequences that had the row so far, this one included."""

    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Pool:
    """Account of KV pages: page ids and their owners, no KV bytes. Page 0 is the sink. A call that fails changes
    nothing.
    """

    def __new__(
        cls, num_pages: SupportsIndex, page_size: SupportsIndex, max_seqs: SupportsIndex, row_pages: SupportsIndex
    ) -> Self: ...
    @property
    def num_pages(self) -> int:
        """Pages, the sink included."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def max_seqs(self) -> int:
        """Sequences that can live at once."""

    @property
    def row_pages(self) -> int:
        """Pages that one sequence can have."""

    def create(self) -> Sequence:
        """Make a sequence without pages. Raises `PoolExhaustedError` if `max_seqs` sequences live."""

    def fork(self, seq: Sequence, length: SupportsIndex) -> Sequence:
        """Make a sequence that shares the pages of the first `length` committed positions of `seq`."""

    def reserve(self, wants: _List[tuple[Sequence, SupportsIndex]]) -> Lease:
        """Reserve pages for row positions `0..positions` of each sequence, for all sequences or none
        (`PoolExhaustedError`). The lease is a context manager: leaving it without `commit` rolls back.
        """

    def release(self, seqs: _List[Sequence]) -> None:
        """End sequences; each of their pages loses an owner."""

    def committed(self, seq: Sequence) -> int:
        """Valid positions of a sequence."""

    def allocated(self, seq: Sequence) -> int:
        """Positions of a sequence that have a page: a multiple of the page size."""

    def pages(self, seq: Sequence) -> list[int]:
        """Pages of a sequence, in the order of its positions."""

    def cache_lookup(
        self, tokens: _List[SupportsIndex], max: SupportsIndex | None = None, salt: SupportsIndex = ...
    ) -> tuple[Sequence, int, int]:
        """Returns a new sequence that starts with the longest cached prefix of `tokens` (full pages, at most `max`
        positions, default all), the length of that prefix, and how many of its positions have the draft's KV too.
        `salt` has 64 bits: prefixes of different salts share no page.
        """

    def cache_insert(
        self, seq: Sequence, tokens: _List[SupportsIndex], drafted: SupportsIndex = ..., salt: SupportsIndex = ...
    ) -> int:
        """Let the cache keep the full pages of `tokens`, the first committed tokens of `seq`; the first `drafted` of
        them have the draft's KV too (0 without a draft model). Returns how many pages were new to the cache. It
        keeps the pages that it has already, unless they lack draft KV that this sequence's pages have. Lookups with
        the same `salt` may find the pages.
        """

    def cache_clear(self) -> int:
        """Empty the prefix cache; returns how many pages it had."""

    def alloc_pages(self, n: SupportsIndex) -> list[int]:
        """Take `n` pages, or none, for a caller that keeps its own sequences."""

    def free_pages(self, pages: _List[SupportsIndex]) -> None:
        """Give back pages of `alloc_pages`. A page that is given back more often than it is owned raises
        `LedgerError`, and nothing is changed.
        """

    def owners(self) -> list[tuple[int, str]]:
        """Returns `(page, owner)` for each owner of each page, pages ascending: `"sequence ROW.GENERATION"`,
        `"prefix cache"`, or `"raw pages"` (of `alloc_pages`).
        """

    def take_next(self, pages: _List[SupportsIndex]) -> None:
        """Put these free pages before all others, so that the next calls take them, in this order. Raises
        `ConfigError` for a page that has an owner or is given twice, and changes nothing then.
        """

    def audit(self) -> dict[str, int]:
        """Recount every owner of every page; raises `LedgerError` if the account is wrong, else returns the counts."""

    def stats(self) -> dict[str, int]:
        """Counters: pages (without the sink) and sequences."""

@final
class Lease:
    """Lease on pages reserved for a batch. `with pool.reserve(...) as lease:` rolls back on leaving unless `commit`
    was called; a lease that is dropped rolls back, too.
    """

    @property
    def copies(self) -> Moves:
        """Copies of slots, to be run by `kv_move` before any write under the lease."""

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences, in the order of the reservation."""

    @property
    def live(self) -> bool:
        """True if the lease has neither been committed nor rolled back."""

    def commit(self, committed: _List[SupportsIndex]) -> None:
        """Make `committed[i]` the committed length of sequence i and end the lease; whole pages beyond the lengths
        go back. If a length is refused (`ConfigError`), nothing changes and the lease stays live.
        """

    def renew(self, positions: _List[SupportsIndex]) -> None:
        """Reserve pages for row positions `0..positions[i]` of sequence i, for all sequences or none
        (`PoolExhaustedError`): room for a later round while one is in flight. No page goes back. Afterwards `copies`
        are those of this call, to be run after the round in flight.
        """

    def advance(self, committed: _List[SupportsIndex]) -> None:
        """Make `committed[i]` the committed length of sequence i and keep the lease with all of its pages: `commit`
        of a round while the next one is in flight. Leaving the lease later rolls back to these lengths.
        """

    def rollback(self) -> None:
        """Give back every page beyond the committed lengths and end the lease."""

    def remap(self, seq: Sequence, first: SupportsIndex, order: _List[SupportsIndex]) -> None:
        """Reorder the pages of `seq`, which must have one token each: position `first + i` gets the page that `first
        + order[i]` had.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> Literal[False]: ...

@final
class Moves:
    """Copies of one token's KV, in every layer, for `kv_move` to run in order."""

    def __new__(
        cls,
        src: _List[SupportsIndex],
        dst: _List[SupportsIndex],
        num_slots: SupportsIndex,
        scratch: SupportsIndex | None = None,
    ) -> Self: ...
    @property
    def src(self) -> Array:
        """Source slots, int32."""

    @property
    def dst(self) -> Array:
        """Destination slots, int32."""

    def claim(self, address: SupportsIndex, nbytes: SupportsIndex) -> None:
        """Check that the moves may run now over the KV cache whose memory is `nbytes` bytes at `address`, and count
        them as run there, as `kv_move` does: for a caller that runs them by a kernel of its own. Raises
        `StaleHandleError` if they have run there, or if their pages, their lease or the committed length have
        changed.
        """

    def __len__(self) -> int: ...

@final
class Plan:
    """Plan of one step of a batch: the slots that it writes and attends to, checked against the pool, and the arrays
    of the plan's format. Kernels refuse the plan (`StaleHandleError`) once a row's pages have changed, its lease has
    ended, or more is committed than the plan was made for. B requests, Q queries.
    """

    @property
    def format(self) -> Literal["native", "flashinfer", "flash_attention", "triton"]:
        """Format of the plan's arrays: `"native"` (none), `"flashinfer"`, `"flash_attention"` or `"triton"`."""

    @property
    def expand_page_size(self) -> int | None:
        """Tokens per page that `expand_page_table` names in format `"flash_attention"` (1: slots). `None` if the
        phase is one causal pass, and in other formats.
        """

    def arrays(self) -> dict[str, Array]:
        """Returns the arrays of the plan's format by name, of exactly the length that is used, without a copy.
        Arrays in the plan's own memory keep their values for as long as anybody holds them; numpy may only read
        them. Writing into them by other means (torch, say) corrupts the plan. Arrays in `FormatBuffers` are views:
        reading them raises `StaleOutputError` once the buffers are written again.
        """

    def attending_from(self, starts: _List[SupportsIndex]) -> Plan:
        """Returns the same plan, except that live request i attends only its positions from `starts[i]` on: for a
        draft model that began in the midst of a request and never wrote the KV before. Each start is a multiple of
        the page size and at most the request's prefix. A request whose prefix is 0 begins there whatever its start
        is: all of its queries are behind the context wall. Positions do not change. The plan must be of format
        `"native"`.
        """

    def attending_block(self) -> Plan:
        """Returns the same plan, except that each query attends all queries of its request, those behind it included:
        the plan of a block that is not causal. It must be of an `extend` in format `"native"`, with at most 64 queries
        of a request.
        """

    @property
    def whole(self) -> bool:
        """True if the plan's requests attend all of their positions (see `attending_from`)."""

    @property
    def first_pages(self) -> _List[int]:
        """Column of the page table at which the keys of each request begin, dead ones included (`attending_from`);
        empty where all begin at column 0.
        """

    @property
    def phase(self) -> Literal["extend", "decode", "draft", "verify"]:
        """`"extend"`, `"decode"`, `"draft"` or `"verify"`."""

    @property
    def step(self) -> int | None:
        """Step of a draft plan, else `None`."""

    @property
    def batch(self) -> int:
        """B."""

    @property
    def live_batch(self) -> int:
        """Requests that are not padding; they come first."""

    @property
    def queries(self) -> int:
        """Q."""

    @property
    def live_queries(self) -> int:
        """Queries of the live requests; they come first."""

    @property
    def rows(self) -> Array:
        """Row of the pool's page table of each request, int32 [B]."""

    @property
    def versions(self) -> Array:
        """Version of each row when the plan was made, int64 [B]; 0 for a dead request."""

    @property
    def committed(self) -> Array:
        """Committed length that each live request was planned for, int32 [live_batch]: kernels refuse the plan
        (`StaleHandleError`) once more is committed, or a commit of more is planned.
        """

    @property
    def qo_indptr(self) -> Array:
        """First query of each request, then Q: int32 [B + 1]."""

    @property
    def prefix_lens(self) -> Array:
        """Row positions before the queries, which all of them attend: int32 [B]."""

    @property
    def positions(self) -> Array:
        """RoPE position of each query, int32 [Q]."""

    @property
    def out_slots(self) -> Array:
        """Slot that each query's KV is written to, int32 [Q]."""

    @property
    def mask(self) -> Array:
        """Attention mask, int64 [Q, W]: bit b of a row says that the query attends row position `prefix + b`. W = 0
        in a causal plan.
        """

    def page_table(self) -> Array:
        """Returns the pages of each request, int32 [B, columns]; 0 in columns without a page."""

@final
class DeviceLens:
    """Committed lengths of `batch` requests that live on the device: the host knows only that none exceeds
    `at_most`. They can size buffers; the planner itself, which runs on the host and has to read lengths, refuses
    them.
    """

    def __new__(cls, batch: SupportsIndex, at_most: SupportsIndex) -> Self: ...
    @property
    def batch(self) -> int:
        """Requests."""

    @property
    def at_most(self) -> int:
        """A bound on every length."""

    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class FormatBuffers:
    """Static memory for the arrays of one format and phase, made by `Planner.buffers` and written by plans made with
    `out=`: it never moves and never grows. Each write makes a new generation, and arrays of earlier plans are stale
    from then on.
    """

    @property
    def format(self) -> Literal["native", "flashinfer", "flash_attention", "triton"]:
        """Format of the arrays."""

    @property
    def phase(self) -> Literal["extend", "decode", "draft", "verify"]:
        """Phase whose plans may be written: `"extend"`, `"decode"`, `"draft"` or `"verify"`."""

    @property
    def step(self) -> int | None:
        """The one draft step whose plans may be written; `None` for every step, and for other phases."""

    @property
    def max_batch(self) -> int:
        """Requests that are certain to fit, padded ones included."""

    @property
    def generation(self) -> int:
        """Number of writes to the arrays, including one that has begun; 0 before the first."""

    def tensors(self) -> dict[str, Array]:
        """Returns the whole memory of each array by name, for users that keep addresses (a captured graph). These
        tensors never go stale: they show the last write. A write sets every element of the plan's own shapes
        (`Plan.arrays`) and no element beyond them: those keep the values of earlier writes, by specrs or by others.
        In tables specrs clears the elements that it wrote before.
        """

@final
class Planner:
    """Makes the plans of a geometry over a pool, in the format of an attention backend. It reuses its buffers once the
    plans in them, and the arrays of those plans, are dropped.

    `format` is `"native"`, `"flashinfer"`, `"flash_attention"` or `"triton"`; a format that cannot run the geometry
    raises `ConfigError`, which says what would work. A pool of another page size, or with fewer `row_pages` than the
    geometry's, raises it, too. `mask` chooses the masks of `"flashinfer"`: `"bool"`, `"packed"` bits, or `"both"`.
    """

    def __new__(
        cls,
        geometry: Geometry,
        pool: Pool,
        format: Literal["native", "flashinfer", "flash_attention", "triton"] = "native",
        mask: Literal["both", "bool", "packed"] = "both",
    ) -> Self: ...
    @property
    def geometry(self) -> Geometry:
        """The geometry."""

    @property
    def format(self) -> Literal["native", "flashinfer", "flash_attention", "triton"]:
        """The format of the arrays of the planner's plans."""

    def set_debug(self, on: bool) -> None:
        """Turn on or off a slow search for faults: checks of every query and every page of each plan from its arrays
        alone, and poison in reused buffers.
        """

    def extend(
        self,
        seqs: _List[Sequence],
        starts: _List[SupportsIndex] | DeviceLens,
        counts: _List[SupportsIndex],
        *,
        out: FormatBuffers | None = None,
        pad: tuple[SupportsIndex, SupportsIndex] | None = None,
    ) -> Plan:
        """Plan `counts[i]` tokens of sequence i at row positions `starts[i]...`, attended causally: prefill chunks, and
        the draft model's pass over accepted tokens.

        For every plan, `pad` is (requests, queries) to pad to, at most `max_batch` requests and the queries that so
        many requests have in the phase; `out` takes the arrays of the format, see `buffers`. A live lease must have
        reserved (`Pool.reserve`) the positions that the plan writes. They begin right after the committed positions and
        those in flight: a smaller length, which would overwrite committed KV, is a `ConfigError`, and so is a larger
        one, which would leave positions unwritten. Only `extend` may start earlier, for the draft model; up to the
        committed length it needs no lease.
        """

    def decode(
        self,
        seqs: _List[Sequence],
        lens: _List[SupportsIndex] | DeviceLens,
        *,
        out: FormatBuffers | None = None,
        pad: tuple[SupportsIndex, SupportsIndex] | None = None,
    ) -> Plan:
        """Plan plain decoding: one token of each sequence after its `lens[i]` committed ones."""

    def draft(
        self,
        seqs: _List[Sequence],
        lens: _List[SupportsIndex] | DeviceLens,
        step: SupportsIndex,
        beams: DraftBeams | _Tensor | None,
        mode: Literal["ancestors", "lane"] = "ancestors",
        *,
        out: FormatBuffers | None = None,
        pad: tuple[SupportsIndex, SupportsIndex] | None = None,
    ) -> Plan:
        """Plan the forward of the beams of draft step `step` (0-based), K queries a request. A beam attends its true
        ancestors (`mode="ancestors"`), or the slots that its own lane has from the earlier steps (`"lane"`).

        `beams` are `DraftBeams`, or their ancestors: int64 [B * K, draft_mask_words], where bit b * S + s of a row
        stands for beam b of step s, and the row's own bit is set (`DraftBeams.ancestors`). With `"lane"` it may be
        `None`.
        """

    def verify(
        self,
        seqs: _List[Sequence],
        lens: _List[SupportsIndex] | DeviceLens,
        trees: TreeBatch,
        *,
        out: FormatBuffers | None = None,
        pad: tuple[SupportsIndex, SupportsIndex] | None = None,
    ) -> Plan:
        """Plan the target's pass over one tree for each request: node j is at row position `lens[i] + j` and attends
        the prefix and its ancestors.
        """

    def audit(
        self,
        phase: Literal["extend", "decode", "draft", "verify"],
        arrays: tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor],
        step: SupportsIndex | None = None,
    ) -> Plan:
        """Check a plan that was made elsewhere, such as on a device, from its arrays alone: each query, each page,
        each dead value. `arrays` are rows, versions, qo_indptr, prefix_lens, positions, out_slots and mask, each as
        in `Plan`; `step` is the step of a `"draft"`. The arrays that the planner's format derives from these are
        read back and checked, too.
        """

    def tail_copies(self, seqs: _List[Sequence], lens: _List[SupportsIndex] | DeviceLens) -> Moves:
        """Returns copies of each prefix's tail into the holes before its draft branches, to be run on the draft
        model's cache before the first step; none in the dense layout.
        """

    def commit(
        self, lease: Lease, seqs: _List[Sequence], lens: _List[SupportsIndex] | DeviceLens, accepts: Accepts
    ) -> Moves:
        """Make the accepted nodes' KV the dense end of each prefix: with pages of one token the lease's rows are
        reordered and no KV moves; else the returned moves have to be run before the lease is committed. `lease` must
        be of the planner's pool and cover each of `seqs`, else this raises `ConfigError` and changes nothing. A
        second commit of a round is a `ConfigError`, too. The round's plans are refused after the commit.
        """

    def buffers(
        self,
        phase: Literal["extend", "decode", "draft", "verify"],
        step: SupportsIndex | None = None,
        max_batch: SupportsIndex | None = None,
        tensors: Mapping[str, _Tensor] | None = None,
    ) -> FormatBuffers:
        """Make static memory for the arrays of `phase` (`"extend"`, `"decode"`, `"draft"`, `"verify"`), at the sizes
        that `capacities` returns, for plans made with `out=`. With `step` the memory is for that draft step alone.

        With `tensors`, name to tensor, the arrays are written into these. Each tensor is on the CPU, contiguous, and of
        the array's dtype (`custom_mask`: bool or uint8); it overlaps neither the others nor those of other buffers. A
        table may have more rows and columns than needed. The tensors are zeroed, kept alive, and written by later
        plans: no thread may use them during such a call. A tensor that was resized since is refused. `ConfigError`
        names the first tensor that is missing, unknown, of another kind or too small.
        """

    def capacities(
        self,
        phase: Literal["extend", "decode", "draft", "verify"],
        step: SupportsIndex | None = None,
        max_batch: SupportsIndex | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Returns the largest size of each array of a phase, for `max_batch` requests: name to `shape`, `dtype`,
        `bytes` and `formula`, which tells where the size comes from.
        """

    def sizes(
        self,
        phase: Literal["extend", "decode", "draft", "verify"],
        lens: _List[SupportsIndex] | DeviceLens,
        step: SupportsIndex | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Returns the size of each array of a phase for requests of these lengths (a list, or `DeviceLens`, whose
        bound counts): name to `shape`, `dtype`, `bytes`. `"extend"` counts tokens up to the context limit; `"draft"`
        without `step` means the first step.
        """

@final
class KvCache:
    """Keys and values of all layers: a CPU tensor [layers, 2, num_slots, kv_heads, head_dim], float32 or bfloat16, keys
    at index 0 and values at 1. Slot s is position `s % page_size` of page `s // page_size`; page 0 is the sink.

    The tensor's memory is shared and kept alive. Every call looks at the tensor again and raises `ConfigError` if its
    storage was resized since (`resize_`, `set_`, numpy's `resize`), which frees the memory although the cache holds it.
    Calls that write wait for each other; torch may use the tensor between calls, not during one. The tensor may not
    require grad.
    """

    def __new__(cls, tensor: _Tensor, page_size: SupportsIndex) -> Self: ...
    @property
    def tensor(self) -> Any:
        """The tensor it was made from."""

    @property
    def layers(self) -> int:
        """Layers."""

    @property
    def num_slots(self) -> int:
        """Slots, those of the sink included."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""

    @property
    def head_dim(self) -> int:
        """Elements of a head."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """`"float32"` or `"bfloat16"`."""

@final
class RopeTable:
    """Cosines and sines of RoPE's angles, float32 [positions, half] each. Angle d rotates the elements d and d +
    half of a head; the first 2 * half elements of a head are rotated.
    """

    def __new__(cls, cos: _Tensor, sin: _Tensor) -> Self: ...
    @property
    def positions(self) -> int:
        """Positions."""

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""

@final
class PackedLinear:
    """A linear layer whose weight [N, K] (float32, bfloat16 or float16) and optional bias [N] (float32) are packed
    once; the originals may be freed then. `storage` is `"bf16"` or `"f16"` (2 bytes a weight; exact if the weight has
    that type, else rounded to nearest) or `"f32"`. `gated` says that the first N / 2 rows are a gate and the others an
    up projection, which only `forward_swiglu` takes.

    A row of the output depends, to the bit, on its own row of x alone: not on the other rows, nor on the threads.
    """

    def __new__(
        cls,
        weight: _Tensor,
        bias: _Tensor | None = None,
        storage: Literal["bf16", "f16", "f32"] = "bf16",
        gated: bool = False,
    ) -> Self: ...
    @property
    def in_features(self) -> int:
        """K: elements of a row of x."""

    @property
    def out_features(self) -> int:
        """N: rows of the weight."""

    @property
    def storage(self) -> Literal["bf16", "f16", "f32"]:
        """`"bf16"`, `"f16"` or `"f32"`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""

    def forward(
        self, x: _Tensor, out: _Tensor, residual: _Tensor | None = None, norm: _Tensor | None = None, eps: float = 0.0
    ) -> None:
        """out [M, N] = residual + linear(rms_norm(x [M, K], norm [K], eps)), all float32; residual [M, N] and norm
        may be absent. `residual` may be `out` itself: then the product is added to what it holds.
        """

    def forward_swiglu(self, x: _Tensor, out: _Tensor, norm: _Tensor | None = None, eps: float = 0.0) -> None:
        """For a gated weight: out [M, N / 2] = silu(gate) * up of rms_norm(x [M, K], norm [K], eps), all float32."""

@final
class LayerTail:
    """Everything of a decoder layer behind its projection of queries, keys and values, in one call: `rope_attention`,
    the product `o` beside the residual stream, and a SwiGLU MLP. Weights of norms are copied.
    """

    def __new__(
        cls,
        o: PackedLinear,
        gate_up: PackedLinear,
        down: PackedLinear,
        norm: _Tensor,
        eps: float,
        rope: RopeTable,
        num_heads: SupportsIndex,
        scale: float,
        q_norm: _Tensor | None = None,
        k_norm: _Tensor | None = None,
        cap: float | None = None,
    ) -> Self: ...
    def forward(
        self,
        cache: KvCache,
        layer: SupportsIndex,
        plan: Plan,
        qkv: _Tensor,
        residual: _Tensor,
        out: _Tensor,
        rows: _Tensor | None = None,
    ) -> None:
        """out [R, h] = the residual stream behind layer `layer` of the cache, which gets the keys and values of all
        rows. qkv is [Q, (heads + 2 kv_heads) * head_dim], residual [Q, h] the stream before the layer, all float32.
        rows, int64 [R]: the rows of `out`; without it R = Q, and `residual` may be `out` itself.
        """

@final
class DecoderLayers:
    """Decoder layers in one call: each is (projection of queries, keys and values, weight of the norm before it,
    epsilon of that norm, everything behind it).
    """

    def __new__(cls, layers: _List[tuple[PackedLinear, _Tensor, float, LayerTail]]) -> Self: ...
    def forward(
        self,
        cache: KvCache,
        first: SupportsIndex,
        end: SupportsIndex,
        plan: Plan,
        x: _Tensor,
        out: _Tensor,
    ) -> None:
        """out [Q, h] = the residual stream x [Q, h] behind layers `first` to `end`, float32. Each writes its keys and
        values to its layer of the cache. `x` may be `out` itself.
        """

    def __len__(self) -> int: ...

@final
class Eagle3Layer:
    """The one layer of an EAGLE-3 head, and the scores behind it, in one call: queries, keys and values of a feature
    and a token's embedding, each normalised, everything behind them, and `lm_head` of the norm. Weights of norms are
    copied.
    """

    def __new__(
        cls,
        feature_norm: _Tensor,
        of_feature: PackedLinear,
        embedding_norm: _Tensor,
        of_embedding: PackedLinear,
        tail: LayerTail,
        norm: _Tensor,
        lm_head: PackedLinear,
        eps: float,
    ) -> Self: ...
    def forward(
        self,
        cache: KvCache,
        plan: Plan,
        table: _Tensor,
        tokens: _Tensor,
        feature: _Tensor,
        hidden: _Tensor,
        logits: _Tensor,
        rows: _Tensor | None = None,
    ) -> None:
        """hidden [R, h] = the residual stream behind the layer, which is layer 0 of the cache, and logits [R, V] its
        scores, all float32. `table` and `tokens` [Q] are those of `embed`; feature is [Q, h]. rows: as in
        `LayerTail.forward`; without them `feature` may be `hidden` itself.
        """

@final
class DraftBeams:
    """Candidates and beams of a batch while the draft model runs: made once, for rounds of up to `max_batch` requests.
    `vocab` is the target's vocabulary; `d2t` (int64 [draft vocabulary]) holds the offset to add to each draft id (the
    EAGLE-3 format), `None` where both share one; only this constructor reads it.

    Call `start(logits)` once a round, then `advance(logits)` after each forward of the draft model; after each call
    `tokens` and `parents` are the next forward's input, K rows a request. Logits without a distribution (NaN, +inf, no
    finite value) raise no error: their request stops drafting, see `faults`.
    """

    def __new__(cls, max_batch: SupportsIndex, shape: TreeShape, d2t: _Tensor | None, vocab: SupportsIndex) -> Self: ...
    @property
    def shape(self) -> TreeShape:
        """The tree shape."""

    @property
    def max_batch(self) -> int:
        """Most requests of a round."""

    @property
    def batch(self) -> int:
        """Requests of this round; 0 before `start`."""

    @property
    def draft_vocab(self) -> int:
        """Columns of a row of draft logits."""

    @property
    def steps_done(self) -> int:
        """Steps done in this round; 0 before `start`."""

    def start(self, logits: _Tensor) -> None:
        """Begin a round of any batch up to `max_batch` from the logits at the roots, float32 [batch, draft
        vocabulary].
        """

    def advance(self, logits: _Tensor) -> None:
        """Extend the tree by one step from the logits of the beams, float32 [batch * K, draft vocabulary]."""

    @property
    def faults(self) -> list[NonFiniteError]:
        """Why requests of this round stopped drafting: a `NonFiniteError` each, with `request` (its row of the
        batch), and `row` and `index` into the logits. Such a request keeps the levels that were drafted before; if
        `start` met the fault, `finish` gives it only its root.
        """

    @property
    def tokens(self) -> Array:
        """Token of each beam in the target's vocabulary, int32 [batch * K]."""

    @property
    def parents(self) -> Array:
        """Row of the previous hidden states that each beam continues, int32 [batch * K]: the request after `start`,
        `request * K + beam` after `advance`.
        """

    @property
    def ancestors(self) -> Array:
        """True ancestors of each beam and itself, int64 [batch * K, words]: bit `b * S + s` is beam b of step s."""

    def scores(self) -> list[list[float]]:
        """Cumulative log-probabilities of the beams of each request, best first."""

    def finish(
        self,
        roots: _List[SupportsIndex],
        max_depths: _List[SupportsIndex],
        max_nodes: _List[SupportsIndex],
        min_score: float | None = None,
    ) -> TreeBatch:
        """The trees of the round so far: for request i the root `roots[i]` and the best candidates by cumulative
        log-probability, of depth <= `max_depths[i]`, with at most `max_nodes[i]` nodes, root included, and none of a
        score below `min_score`. The round can go on or be finished again.
        """

@type_check_only
class _Proposal(Protocol):
    @property
    def parents(self) -> _List[SupportsIndex]: ...
    @property
    def tokens(self) -> _List[SupportsIndex]: ...
    @property
    def probs(self) -> _List[float]: ...
    @property
    def buckets(self) -> _List[SupportsIndex] | None: ...

@final
class DraftLists:
    """The likeliest tokens of each level of a batch's blocks, best first, with their log-probabilities.

    `logits` are float32 [rows, draft vocabulary]: `levels[i]` rows of request i, which may be none. `width` tokens of
    each are listed, or as many as there are; `target_ids` (int64 [draft vocabulary]) are these in the target's
    vocabulary, `None` where both share one. A request with a row that has no distribution (NaN, +inf, no finite value),
    or with a bias that is not finite, is one of `faults` and gets only its root.
    """

    def __new__(
        cls,
        logits: _Tensor,
        levels: _List[SupportsIndex],
        width: SupportsIndex,
        target_ids: _Tensor | None = None,
    ) -> Self: ...
    @staticmethod
    def of(
        ids: _Tensor,
        log_probs: _Tensor,
        sound: _Tensor,
        levels: _List[SupportsIndex],
        target_ids: _Tensor | None = None,
    ) -> DraftLists:
        """The lists that a device has made: `ids` (int32) and `log_probs` (float32), [rows, width] each; a row whose
        `sound` (int32 [rows]) is 0 has no distribution.
        """

    @property
    def ids(self) -> Array:
        """Listed tokens in the draft's vocabulary, int32 [rows, width]."""

    @property
    def faults(self) -> list[NonFiniteError]:
        """A `NonFiniteError` for each request that has no drafts, with `request` (its place in the batch), and `row`
        and `index` into the logits.
        """

    def begin(self, roots: _List[SupportsIndex], width: SupportsIndex) -> list[int]:
        """Begin beams below the tokens `roots`, one of each request: of up to `width` prefixes a request, by which
        `advance` makes the lists of a level depend on the path. Those with levels and without a fault have beams;
        returns their places.
        """

    @property
    def tokens(self) -> Array:
        """Token of each beam, int32 [requests with beams, width]; the root alone before the first level. 0 where there
        are fewer beams.
        """

    @property
    def parents(self) -> Array:
        """Place of each beam's parent among the beams of the level before, as `tokens` has them."""

    def advance(self, bias: _Tensor) -> None:
        """Go one level on. `bias` is what each listed token's log-probability changes by behind each beam, float32
        [requests with beams, beams of `tokens`, width of the lists]; that of beams that are not there does not count,
        nor that of requests without another level.
        """

    def trees(
        self,
        roots: _List[SupportsIndex],
        nodes: SupportsIndex,
        *,
        off_spine: SupportsIndex = 8,
        min_score: float | None = None,
    ) -> TreeBatch:
        """The best trees below the tokens `roots`, of at most `nodes` nodes each, root included: of the lists, or of
        the beams if they have begun. The deepest path stands first, and no path has more than `off_spine` nodes off it;
        nodes of a score below `min_score` are left out.
        """

@final
class DraftProposal:
    """What a source of the core proposes: a tree below a request's last token, as `specrs.drafters.Proposal`
    describes it.
    """

    def __new__(
        cls,
        parents: _List[SupportsIndex],
        tokens: _List[SupportsIndex],
        probs: _List[float],
        buckets: _List[SupportsIndex] = (),
    ) -> DraftProposal: ...
    @property
    def parents(self) -> list[int]:
        """Index of each node's parent in this proposal; -1 for a child of the request's last token."""

    @property
    def tokens(self) -> list[int]:
        """Token of each node."""

    @property
    def probs(self) -> list[float]:
        """Probability that each node is accepted, given that its parent is."""

    @property
    def buckets(self) -> list[int]:
        """Class of each node, for calibration."""

    def first(self) -> int | None:
        """The likeliest next token, of equal ones the first; `None` where nothing is proposed."""

    def fits(self, nodes: SupportsIndex, vocab: SupportsIndex) -> bool:
        """Whether there are at most so many nodes, all of a vocabulary of `vocab` tokens."""

    def __len__(self) -> int: ...

@final
class MergedDrafts:
    """A tree of `merge_drafts`, for one request."""

    @property
    def parents(self) -> list[int]:
        """Parent of each node, parents first; -1 for the root, node 0."""

    @property
    def tokens(self) -> list[int]:
        """Token of each node."""

    @property
    def scores(self) -> list[float]:
        """Cumulative log-probability of each node; 0 for the root."""

    @property
    def sources(self) -> list[int]:
        """Which sources proposed each node, a bit a source; 0 for the root."""

    @property
    def spine(self) -> int:
        """Nodes of the deepest path, root included; they stand first."""

    def pruned(
        self,
        nodes: SupportsIndex,
        depth: SupportsIndex,
        *,
        off_spine: SupportsIndex = 8,
        min_score: float | None = None,
    ) -> MergedDrafts:
        """The best nodes of this tree within closer limits, as `merge_drafts` takes them."""

    def settle(self, path: _List[SupportsIndex], calibration: DraftCalibration) -> None:
        """Tell a calibration what was accepted: `path` are the nodes that verification walked, from the root (0) on.
        Nodes whose parent is on the path had their chance; of those, the ones on the path were accepted.
        """

    def __len__(self) -> int: ...

@final
class DraftCalibration:
    """What the probabilities of so many sources have been worth: claims are corrected by the outcomes of their
    source and bucket, decayed over about 500 of them.
    """

    def __new__(cls, sources: SupportsIndex) -> DraftCalibration: ...
    @property
    def sources(self) -> int:
        """Sources."""

    def account(self, source: SupportsIndex) -> tuple[int, int]:
        """Of a source's nodes whose parent was accepted: how many there were, and how many were accepted."""

    def corrected(self, source: SupportsIndex, bucket: SupportsIndex, prob: float) -> float:
        """The corrected probability of a claim of a source in a bucket."""

    def observe(self, source: SupportsIndex, bucket: SupportsIndex, prob: float, accepted: bool) -> None:
        """A node that a source claimed with probability `prob`, and whose parent was accepted, was accepted or not."""

    def grade(self, proposals: _List[DraftProposal | None], drawn: _List[SupportsIndex]) -> list[int]:
        """Compare what sources proposed, one of each or `None`, with the tokens that the target drew: every node
        whose parent these reached had its outcome, verified or not. Returns how many of the tokens each proposal
        has, one below the other.
        """

def choose_drafts(
    requests: _List[tuple[SupportsIndex, _List[DraftProposal | None], SupportsIndex, GrammarTracker | None]],
    calibration: DraftCalibration,
    vocab: SupportsIndex,
    nodes: SupportsIndex,
    cost: tuple[tuple[_List[SupportsIndex], _List[float], float], float, _List[SupportsIndex]] | None = None,
) -> tuple[list[MergedDrafts], float, float]:
    """The trees of a round, the tokens that it is expected to give, and its seconds. What the sources propose for a
    request is merged as by `merge_drafts`, without what the request's grammar forbids; of all trees, the nodes stay
    that give the most tokens a second.

    Each request is (last token, proposal of each source or `None`, levels of its tree at most, grammar or `None`).
    `nodes`: of a tree at most, root included. `cost` is (table, seconds of the round beside the target's pass, tiers).
    The table has the target's passes: (row counts, seconds of a pass of each, factor on them), interpolated. `tiers`
    are the rows that a tree may take, ascending, where all trees take as many; else there are none, and each node takes
    a row. Without a cost all nodes stay, and the round takes 0 seconds.
    """

def merge_drafts(
    root: SupportsIndex,
    vocab: SupportsIndex,
    sources: _List[_Proposal],
    nodes: SupportsIndex,
    depth: SupportsIndex,
    *,
    calibration: DraftCalibration | None = None,
    off_spine: SupportsIndex = 8,
    min_score: float | None = None,
) -> MergedDrafts:
    """One tree from the proposals of many sources, below the token `root`: equal tokens under equal parents are one
    node, its probability that of their union, each claim corrected by `calibration`; siblings sum to at most 1. The
    tree takes the best nodes by cumulative log-probability: `nodes` at most, the root included, `depth` levels, none of
    a score below `min_score`. The deepest path (the spine) stands first; no path has more than `off_spine` nodes off
    it, as the GPU's attention asks for.

    Source i of `calibration` and of the tree's masks is `sources[i]`: a `DraftProposal`, or any object with `parents`,
    `tokens`, `probs` and `buckets`.
    """

@final
class SuffixDrafts:
    """Source of drafts from one request's own text: an automaton over its prediction, prompt and output, in at most
    `limit` bytes. Half of the bytes hold the recent text and half the text before that; older text is forgotten.
    """

    def __new__(
        cls, vocab: SupportsIndex, limit: SupportsIndex, prediction: _List[SupportsIndex] = ()
    ) -> SuffixDrafts: ...
    def prompt(self, tokens: _List[SupportsIndex]) -> None:
        """Append the prompt, or a part of it."""

    def extend(self, tokens: _List[SupportsIndex]) -> None:
        """Append tokens of the output."""

    def propose(self, nodes: SupportsIndex, depth: SupportsIndex, after: _List[SupportsIndex] = ()) -> DraftProposal:
        """Propose at most `nodes` nodes of at most `depth` levels that may follow the text and then the tokens
        `after`; the likeliest first.
        """

    @property
    def matched(self) -> int:
        """Length in tokens of the longest suffix of the text that occurred before."""

    @property
    def bytes(self) -> int:
        """Bytes held."""

    def __len__(self) -> int: ...

@final
class RecycledTokens:
    """Source of drafts from recycled tokens: after each token, the tokens that the target last ranked highest, 8 a
    row, in at most `limit` bytes. Rows that were not written for long are forgotten.
    """

    def __new__(cls, vocab: SupportsIndex, limit: SupportsIndex) -> RecycledTokens: ...
    def observe(self, tokens: _List[SupportsIndex], best: _List[_List[SupportsIndex]]) -> None:
        """Learn that after each of `tokens` the target's likeliest next tokens were those of `best`, the likeliest
        first; tokens beyond 8 are ignored.
        """

    def follow(self, text: _List[SupportsIndex]) -> None:
        """Learn a text: each of its tokens becomes the likeliest after the token before it."""

    def propose(self, last: SupportsIndex, nodes: SupportsIndex, depth: SupportsIndex) -> DraftProposal:
        """Propose at most `nodes` nodes of at most `depth` levels that may follow `last`; the likeliest first."""

    @property
    def bytes(self) -> int:
        """Bytes held."""

    def __len__(self) -> int: ...

@final
class DraftCorpus:
    """Source of drafts from texts that the operator gives, sorted in a file that is mapped into memory. The file
    must not be changed in place while it is open; renaming another file over it is safe.
    """

    def __new__(cls, path: str | PathLike[str], verify: bool = True) -> DraftCorpus: ...
    @staticmethod
    def build(path: str | PathLike[str], vocab: SupportsIndex, tokens: _Tensor, ends: _List[SupportsIndex]) -> None:
        """Write the file of a corpus: int32 `tokens` [n] of all documents, one document after another, and the
        position where each document `ends`, ascending; the last one is n. Takes 8 bytes of memory a token. An
        existing file is replaced by renaming.
        """

    @property
    def vocab(self) -> int:
        """Size of the vocabulary of its tokens."""

    @property
    def documents(self) -> int:
        """Documents."""

    @property
    def bytes(self) -> int:
        """Size of the mapped file in bytes."""

    def __len__(self) -> int: ...

@final
class CorpusDrafts:
    """One request's place in a corpus; `vocab` is the size of the target's vocabulary."""

    def __new__(cls, corpus: DraftCorpus, vocab: SupportsIndex) -> CorpusDrafts: ...
    def extend(self, tokens: _List[SupportsIndex]) -> None:
        """Append tokens of the request's text."""

    def propose(self, nodes: SupportsIndex, depth: SupportsIndex, after: _List[SupportsIndex] = ()) -> DraftProposal:
        """Propose at most `nodes` nodes of at most `depth` levels that may follow the text and then the tokens
        `after`; the likeliest first.
        """

    @property
    def matched(self) -> int:
        """Length in tokens, at most 63, of the longest suffix of the text that occurs in the corpus."""

@final
class TreeBatch:
    """The token trees of a batch, one for each request; the nodes of each request follow those of the request
    before. Node 0 of each tree is its root; indices count within the request's own tree.
    """

    @staticmethod
    def from_parents(
        parents: _List[_List[SupportsIndex]],
        tokens: _List[_List[SupportsIndex]],
        scores: _List[_List[float]] | None = None,
    ) -> TreeBatch:
        """Trees of any shape, from a parent array (-1 for the root, `parents[i] < i`) and the tokens of each
        request; `scores` are cumulative log-probabilities, 0 for roots.
        """

    @staticmethod
    def from_drafts(drafts: _List[MergedDrafts]) -> TreeBatch:
        """The trees of merged drafts, one a request, with their scores."""

    @staticmethod
    def from_arrays(offsets: _Tensor, tokens: _Tensor, parents: _Tensor, scores: _Tensor) -> TreeBatch:
        """Trees from the arrays of a device, on the host: int32 `offsets` [B + 1], int32 `tokens` and `parents` and
        float32 `scores` of at least as many nodes; entries after the last are not read.
        """

    @property
    def sizes(self) -> list[int]:
        """Nodes of each tree."""

    @property
    def tokens(self) -> Array:
        """Token of each node, int32 [nodes]."""

    @property
    def scores(self) -> Array:
        """Cumulative log-probability that its source gave each node, float32 [nodes]; 0 for roots, and for trees
        made without scores.
        """

    @property
    def depths(self) -> Array:
        """Depth of each node (0 for a root), int32 [nodes]."""

    @property
    def parents(self) -> Array:
        """Parent of each node within its tree (-1 for a root), int32 [nodes]."""

    def proposals(self) -> list[DraftProposal | None]:
        """The trees of a head as proposals, in which a node's probability is conditional on its parent and its class
        the tenth that this lies in; `None` for a root alone.
        """

    def __len__(self) -> int: ...

@final
class TokenMask:
    """Set of the tokens that may be drawn, one bit a token; made once and shared by samplers."""

    def __new__(cls, vocab: SupportsIndex, tokens: _List[SupportsIndex]) -> Self: ...
    @property
    def vocab(self) -> int:
        """Tokens of the vocabulary."""

    def tokens(self) -> list[int]:
        """Returns the tokens of the set, ascending."""

    def __len__(self) -> int: ...
    def __contains__(self, token: SupportsIndex) -> bool: ...

@final
class GrammarVocabulary:
    """The bytes of a model's tokens, by which its grammars are compiled; one for each engine. Making it takes a second
    for 128k tokens.

    `tokens` has the bytes of each token within a text, none for a token that never occurs in a text. `special` are the
    tokens that stand for no text (EOS, marks of a chat): a grammar allows them only where it names them.
    """

    def __new__(cls, tokens: _List[bytes], special: _List[SupportsIndex]) -> Self: ...
    def compile(
        self,
        kind: str,
        texts: _List[str],
        whitespace: str | None = None,
        start_after: str | _List[SupportsIndex] | None = None,
    ) -> Grammar:
        """Compile a grammar that texts must follow. `kind` is `json` (a schema's text; between JSON's tokens comes
        whitespace that the regular expression `whitespace` matches, `""` for none), `regex`, `choice` (each of
        `texts`) or `grammar` (Lark's syntax). The grammar begins after the text, or the tokens, `start_after`,
        before which any text may come. Raises `GrammarError`.
        """

    def __len__(self) -> int: ...

@final
class Grammar:
    """A compiled grammar that requests share."""

    def start(self, endings: _List[SupportsIndex]) -> GrammarTracker:
        """Returns the tracker of a request at its beginning; `endings` are tokens that end its output, which are
        allowed where the text may end.
        """

@final
class GrammarTracker:
    """Tracks how far one request has come in its grammar. Samplers that hold it draw under its masks; each output
    token is committed to it once.
    """

    def commit(self, tokens: _List[SupportsIndex]) -> None:
        """Commit the output's next tokens. Raises `GrammarFailedError` if the grammar cannot follow them; then every
        later mask raises it, too.
        """

    def mask(self, path: _List[SupportsIndex] | None = None) -> TokenMask | None:
        """Returns the tokens that may be drawn after the output and `path`; `None`, after an ending, for every
        token. Raises `GrammarFailedError`.
        """

    @property
    def complete(self) -> bool:
        """True if only an ending can follow."""

    def allowed(self, tokens: _List[SupportsIndex]) -> int:
        """Returns how many of these tokens the grammar accepts, one after another, after the output."""

    def forced(self) -> list[int | tuple[bytes, list[int]]]:
        """Returns the pieces that must come next, in order: special tokens and endings as tokens, texts as `(bytes,
        tokens)`, where the tokens are one spelling of the bytes.
        """

@final
class Sampler:
    """Sampling parameters and token history of one request. The token at absolute position p depends on the logits, the
    parameters, the history, the path and `(seed, p)` alone, so plain and speculative decoding draw the same.

    `vocab` is the length of a logits row. `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, a repetition
    penalty of 1 and presence and frequency penalties of 0 do nothing. `logit_bias` maps token ids to a finite bias, or
    -inf to forbid the token. `allowed` are the tokens that may be drawn at all; `grammar` tells which may be drawn
    after the output and a path, and the caller commits the output to it. A parameter that cannot be honoured raises
    `ConfigError` with its name.

    Logits are edited in float32. Limits: |bias| <= 1e30, |penalty| <= 1e20, repetition penalty in [1e-6, 1e6]; within
    them no logit of magnitude up to 1e30 overflows, however often a token occurs.
    """

    def __new__(
        cls,
        vocab: SupportsIndex,
        prompt_tokens: _List[SupportsIndex],
        temperature: float = 0.0,
        top_k: SupportsIndex = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: SupportsIndex = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed: TokenMask | None = None,
        grammar: GrammarTracker | None = None,
    ) -> Self: ...
    @property
    def vocab(self) -> int:
        """Length of a logits row."""

    def commit(self, tokens: _List[SupportsIndex]) -> None:
        """Add emitted tokens to the history."""

    def draw(self, logits: _Tensor, position: SupportsIndex, path: _List[SupportsIndex] | None = None) -> int:
        """Draw the token at absolute `position` from its `logits` (float32 [vocab]); `path` are the tokens between
        the committed history and that position. Raises `NonFiniteError` for NaN, +inf, or no finite value; its
        `what` says whether the logits were given so, or bias and penalties made them so. Raises `GrammarFailedError`
        if the grammar allows no token.
        """

    def processed(self, logits: _Tensor, out: _Tensor, path: _List[SupportsIndex] | None = None) -> None:
        """Write the scores that a token is drawn from to `out`, float32 [vocab]: each of its `logits` after masks,
        bias and penalties, minus the largest of them, divided by the temperature if that is not 0. Tokens that are
        banned, or that top-k, top-p and min-p leave out, get -inf. `path` and errors are those of `draw`.
        """

@final
class Accepts:
    """Accepted paths and emitted tokens of a round."""

    @staticmethod
    def from_arrays(offsets: _Tensor, paths: _Tensor, tokens: _Tensor) -> Accepts:
        """Accepted paths from the arrays of a device, on the host: int32 `offsets` [B + 1], int32 `paths` and
        `tokens` of at least as many entries; entries after the last are not read. No request has an error.
        """

    @property
    def paths(self) -> list[list[int]]:
        """Accepted nodes of each request, the root (0) first."""

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens that each request emits: the accepted drafts and one more, drawn at the last accepted node. If
        `errors` has an error for the request, only the accepted drafts: one token less than its path has nodes.
        """

    @property
    def errors(self) -> list[NonFiniteError | GrammarFailedError | None]:
        """For each request `None`, or the error that says why no token could be drawn at the last node of its path:
        the `NonFiniteError` of the row of logits, or a `GrammarFailedError`. Its `request` is the row of the batch,
        its `row` the row of logits.
        """

    def __len__(self) -> int: ...

def verify(trees: TreeBatch, logits: _Tensor, samplers: _List[Sampler], lens: _List[SupportsIndex]) -> Accepts:
    """Walk each tree along the tokens that plain decoding would draw. `logits` is float32 [sum of sizes, vocab], one
    row a node; `samplers` and `lens` (committed lengths: the roots' positions) have one entry a request. Samplers
    are not changed. A row of logits that cannot be sampled ends only the walk of the request that reads it: see
    `Accepts.errors`.
    """

def likeliest(
    trees: TreeBatch, logits: _Tensor, requests: _List[SupportsIndex], count: SupportsIndex
) -> list[tuple[list[int], list[list[int]]]]:
    """Returns, for some `requests` (rows of the batch), the tokens of their trees' nodes, and for each node the
    tokens of its `count` largest logits (of all, if there are fewer). The largest comes first; of equal logits the
    lower token comes first. A row of logits with NaN or without a finite value gives none. `logits` is float32 [sum
    of sizes, vocab], one row a node. Raises `ConfigError` for a request that is named twice, so that no more tokens
    come back than there are logits.
    """

def kv_write(cache: KvCache, layer: SupportsIndex, plan: Plan, k: _Tensor, v: _Tensor) -> None:
    """Write keys and values, float32 [Q, kv_heads, head_dim], of `layer` to the plan's slots."""

def kv_move(cache: KvCache, moves: Moves) -> None:
    """Copy the KV of each source slot to its destination slot, in every layer, in order. Moves that a planner or a
    lease made run once over a cache: a second run raises `StaleHandleError`, and so does a run after their pages,
    their lease or the committed length have changed.
    """

def attention(
    cache: KvCache, layer: SupportsIndex, plan: Plan, q: _Tensor, out: _Tensor, scale: float, cap: float | None = None
) -> None:
    """Compute attention of q, float32 [Q, heads, head_dim], over a layer of the cache by the plan, into out of the
    same shape. Query heads are grouped over the cache's heads in order; scores are multiplied by `scale`, and with a
    `cap` x becomes cap * tanh(x / cap). A query that attends nothing gives 0.
    """

def attention_reference(
    cache: KvCache, layer: SupportsIndex, plan: Plan, q: _Tensor, out: _Tensor, scale: float, cap: float | None = None
) -> None:
    """`attention` computed by a plain softmax in float64, as a reference."""

def rope_attention(
    cache: KvCache,
    layer: SupportsIndex,
    plan: Plan,
    qkv: _Tensor,
    rope: RopeTable,
    num_heads: SupportsIndex,
    out: _Tensor,
    scale: float,
    q_norm: _Tensor | None = None,
    k_norm: _Tensor | None = None,
    eps: float = 0.0,
    cap: float | None = None,
) -> None:
    """Run a layer's step around attention: norms each head of q and k (`q_norm`, `k_norm` [head_dim], optional),
    rotates them at the plan's positions, writes k and v to the plan's slots, attends as `attention` does. `qkv` is
    float32 [Q, (num_heads + 2 kv_heads) * head_dim], `out` float32 [Q, num_heads * head_dim].
    """

def rope_write(
    cache: KvCache,
    layer: SupportsIndex,
    plan: Plan,
    kv: _Tensor,
    rope: RopeTable,
    k_norm: _Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """The part of `rope_attention` that later rows need: norms each head of k (`k_norm` [head_dim], optional),
    rotates it at the plan's positions, writes k and v to the plan's slots. `kv` is float32 [Q, 2 * kv_heads *
    head_dim], keys and values.
    """

def rms_norm(x: _Tensor, weight: _Tensor, eps: float, out: _Tensor) -> None:
    """out [M, K] = weight [K] * x [M, K] / sqrt(mean(x^2) + eps), all float32."""

def embed(table: _Tensor, tokens: _Tensor, out: _Tensor) -> None:
    """out [Q, K] = rows of `table` [vocab, K] (float32, bfloat16 or float16) for `tokens` (int32 or int64 [Q]), as
    float32. A token outside the vocabulary is a `ConfigError`, and nothing is written then.
    """

def all_finite(x: _Tensor) -> bool:
    """Whether no element of `x`, float32, is NaN or an infinity."""

def as_array(tensor: _Tensor) -> Array:
    """Copy the values of `tensor` (CPU, contiguous) into an array, to move a tensor between DLPack libraries."""

def set_num_threads(n: SupportsIndex) -> None:
    """Let the CPU kernels of this process use `n` threads, 1 to 64, the calling one included.

    Results do not depend on `n`, to the bit. With 1 there are no other threads. Otherwise workers start when a kernel
    first has enough work, poll within a pass, and sleep once no kernel has called them for about the time that waking
    takes.

    Without a call of this function (or `--threads` on the command line, which calls it), the number is the first of
    these. (1) `torch.get_num_threads()` when an `LLM` is made, if somebody must have changed that number: it differs
    from `OMP_NUM_THREADS`, or, without that variable, is below number 3 or above the machine's CPUs. (2) The first
    number of `OMP_NUM_THREADS`, read once; a value that is not a list of positive numbers is ignored. (3) The CPUs that
    the process may use, by affinity mask and cgroup quota, at most 8.

    Raises `ConfigError` for an `n` out of range.
    """

def num_threads() -> int:
    """Threads that the CPU kernels may use, the calling one included; `set_num_threads` says where the number comes
    from.
    """

def _follow_torch(torch_threads: SupportsIndex, machine_cpus: SupportsIndex) -> None:
    """Take over torch's number of threads if somebody must have changed that; `set_num_threads` has the rule."""

def _numerics_ids() -> tuple[str, int | None]:
    """Returns `(instruction set, rule)`: the instruction set that the CPU kernels were dispatched to (`avx512`,
    `avx2`, `neon` or `scalar`), and the number of the rule that attention's bits on a GPU follow, which changes with
    those bits; `None` for the rule in a build without CUDA.
    """

def faults() -> list[dict[str, Any]]:
    """Registry of the historical faults that `SPECRS_DEBUG_REVERT` or `Geometry(reverts=)` can put back, for
    debugging and tests: `id` (int), `title`, `report` (URL), `reverts` (what the switch puts back), `place` (where),
    `guard` (what stops it).
    """

def _reverts_warning() -> str | None:
    """Returns the line of a process under `SPECRS_DEBUG_REVERT` that names the faults put back, which is also
    written to stderr once; `None` if no fault is put back. Raises `ConfigError` for an unknown id.
    """

def certify(
    max_batch: SupportsIndex,
    max_context_len: SupportsIndex,
    page_size: SupportsIndex,
    shape: TreeShape,
    formats: _List[str] | None = None,
) -> dict[str, Any]:
    """Prove a configuration in bounds: run the placements of every residue of the committed length in both layouts, and
    plan and audit whole rounds. For each of `formats` (`"native"`, `"flashinfer"`, `"flash_attention"`, `"triton"`;
    none by default) also count full batches, write the arrays of representative rows and read them back as the format's
    kernel does.

    Returns `holds` (bool: no check failed), `reverts` (ids of historical faults that `SPECRS_DEBUG_REVERT` puts back),
    and for placements and rounds `failed` (number of failed checks), `failures` (the first failed checks: `what`,
    `layout`, `committed`, `residue`, `branch`, `step`, `got`, `limit`), `residues`, `placements` and `plans` checked,
    `layouts` (`layout`, `alloc_len_per_decode`, `reserve_per_decode`, `row_width`), `buffers` of the native format
    (`name`, `phase`, `dtype`, `elements`, `bytes`, `formula`), `native_bytes`, and for comparison `per_branch` (a
    buffer) with `per_branch_fits`. Then `formats`, a list of: `format`, `holds`, `usable` (in some layout) and
    `layouts`, each with `layout`, `refused` (why the format cannot be used and what would work, or `None`), `arrays`
    (`phase`, `step`, `name`, `dtype`, `shape`, `bytes`, `formula`), `bytes` of all rounds' arrays and `bytes_of` each
    phase, `sizes` compared, `plans` written, `reads` (slots read back), `written_context`, `failed` and `failures`.
    Raises `ConfigError` for a configuration that cannot be made.
    """

def cuda_available() -> bool:
    """Returns whether CUDA kernels can run in this process: the build has them, and there are a driver and a GPU."""

def cuda_unavailable_reason() -> str | None:
    """The reason why `cuda_available()` is false; `None` where it is true."""

def version() -> str:
    """Version of the core."""

def _device_init(ordinal: SupportsIndex) -> int:
    """Set up CUDA device `ordinal`: retain torch's context, load the kernels, allocate the fault record. Returns its
    compute capability, major * 10 + minor.
    """

def _device_check(ordinal: SupportsIndex) -> None:
    """Raise `OutOfBoundsError` for what a kernel of device `ordinal` skipped since the last call, or
    `NonFiniteError` for scores that it could choose nothing from.
    """

@final
class _DeviceFaults:
    """A fault record of its own on CUDA device `ordinal`, beside the device's: for an engine that shares the device."""

    def __new__(cls, ordinal: SupportsIndex) -> _DeviceFaults: ...
    def on(self, stream: SupportsIndex) -> _DeviceStream:
        """The raw stream `stream` for launches that report here; every `stream` argument takes it."""

    def check(self) -> None:
        """As `_device_check`, of this record."""

@final
class _DeviceStream:
    """A raw stream whose launches report to a fault record (`_DeviceFaults.on`)."""

def _device_kv_move(cache: _Tensor, src: _Tensor, dst: _Tensor, offsets: _Tensor, stream: _Stream) -> None:
    """Launch the KV move on the raw stream `stream` of the cache's device."""

def _device_embed(table: _Tensor, tokens: _Tensor, live: _Tensor | None, out: _Tensor, stream: _Stream) -> None:
    """out [rows, hidden] = table[tokens], int32 tokens; zeros for a token of -1, and behind the live rows."""

def _device_gather_rows(
    source: _Tensor, indices: _Tensor, shift: SupportsIndex, live: _Tensor | None, out: _Tensor, stream: _Stream
) -> None:
    """out [rows, columns] = source[indices + shift], int32 indices; zeros for -1, and behind the live rows."""

def _device_add_rms_norm(
    residual: _Tensor,
    x: _Tensor | None,
    weight: _Tensor,
    eps: float,
    copy: _Tensor | None,
    column: SupportsIndex,
    live: _Tensor | None,
    out: _Tensor | None,
    stream: _Stream,
) -> None:
    """residual += x (where x is given); copy[:, column:] = residual; out = RMSNorm(residual) * weight. All bf16 or
    f16 [rows, columns], `copy` [rows, at least column + columns]; `weight` [columns] may be float32.
    """

def _device_gated_up(
    gate_up: _Tensor,
    activation: Literal["silu", "gelu_tanh"],
    interleaved: bool,
    live: _Tensor | None,
    out: _Tensor,
    stream: _Stream,
) -> None:
    """out [rows, columns] = activation(gate) * up of gate_up [rows, 2 * columns], all gates first, or interleaved
    pairs; the activation is "silu" or "gelu_tanh".
    """

def _device_row_conv(
    x: _Tensor,
    base: _Tensor,
    own: _Tensor,
    side: SupportsIndex,
    starts: _Tensor,
    adds: bool,
    out: _Tensor,
    stream: _Stream,
) -> None:
    """out [rows, columns] = (out +) sum over t of (base[t] + own[:, side, t]) * x, shifted by t rows within each
    request: x is [rows, columns], base [taps, columns], own [rows, 2 * taps * groups] for groups of columns, starts
    int32 [requests + 1].
    """

def _device_rope_kv(
    qkv: _Tensor,
    heads: SupportsIndex,
    kv_heads: SupportsIndex,
    bias: _Tensor | None,
    q_norm: _Tensor | None,
    k_norm: _Tensor | None,
    eps: float,
    table: tuple[_Tensor, _Tensor],
    positions: _Tensor,
    slots: _Tensor,
    q: _Tensor | None,
    cache: _Tensor,
    layer: SupportsIndex,
    stream: _Stream,
) -> None:
    """Bias, per-head RMSNorm and rotation of the rows of qkv: queries to q, keys and values to the slots of a layer
    of the cache. `table` is (cos, sin), float32 [positions, pairs]; the norms' weights may be float32, both or
    neither.
    """

def _device_verify_greedy(
    *,
    logits: _Tensor,
    trees: TreeArrays,
    lens: _Tensor,
    live: _Tensor | None,
    max_nodes: SupportsIndex,
    max_path: SupportsIndex,
    accepts: AcceptArrays,
    scratch: _Tensor,
    full: bool,
    stream: _Stream,
) -> None:
    """Greedy verification of trees (`TreeArrays`) by logits [nodes, vocab]; writes `accepts` (`AcceptArrays`).
    `full` picks the mode that reads all rows. `scratch` (int64) is 0 before the first call.
    """

def _device_kv_commit(
    *,
    offsets: _Tensor,
    paths: _Tensor,
    new_lens: _Tensor,
    table: _Tensor,
    rows: _Tensor,
    live: _Tensor | None,
    num_pages: SupportsIndex,
    page_size: SupportsIndex,
    max_nodes: SupportsIndex,
    moves: MoveArrays | None,
    stream: _Stream,
) -> None:
    """Accepted paths into the rows of the page table [rows, columns]: reordered where `moves` is `None` (pages of
    one token), else as the moves (`MoveArrays`) of `_device_kv_move`. `offsets`, `paths` and `new_lens` are those of
    `AcceptArrays`.
    """

def _device_draft_select(
    *,
    step: SupportsIndex,
    logits: _Tensor,
    to_target: _Tensor | None,
    vocab: SupportsIndex,
    live: _Tensor | None,
    shape: TreeShape,
    beams: BeamArrays,
    scratch: _Tensor,
    stream: _Stream,
) -> None:
    """One step of draft selection from logits [batch (* K), draft vocabulary]; writes `beams` (`BeamArrays`).
    `scratch` (int64) is 0 before the first call; `_device_draft_scratch` says how long it is.
    """

def _device_tree_build(
    *,
    shape: TreeShape,
    beams: BeamArrays,
    roots: _Tensor,
    max_depths: _Tensor,
    max_nodes: _Tensor,
    min_score: _Tensor | None,
    live: _Tensor | None,
    trees: BuiltTrees,
    masks: _Tensor | None,
    stream: _Stream,
) -> None:
    """Trees of a round's candidates, which are in `beams` (`BeamArrays`): into `trees` (`BuiltTrees`) and, where
    they are given, their ancestor bits `masks` (int64). `roots`, `max_depths` and `max_nodes` are int32 [batch],
    `min_score` float32 [1].
    """

def _device_tree_unite(
    *,
    shape: TreeShape,
    own: ScoredTrees | BuiltTrees,
    other: ScoredTrees | BuiltTrees,
    roots: _Tensor,
    max_nodes: _Tensor,
    live: _Tensor | None,
    trees: BuiltTrees,
    masks: _Tensor | None,
    origins: _Tensor,
    stream: _Stream,
) -> None:
    """One tree of two for each request: its root and the best nodes of `own` and of `other`, each offsets (int32
    [batch + 1]), tokens, parents and scores (float32) of batch * V entries (`ScoredTrees`, or `BuiltTrees`). Equal
    paths are one node. `roots` and `max_nodes` are int32 [batch]; `trees` and `masks` as for `_device_tree_build`;
    `origins` (int32) says whose a node is, bit 0 of `own`, bit 1 of `other`.
    """

def _device_block_rows(
    *,
    rows: SupportsIndex,
    skipped: SupportsIndex,
    context: SupportsIndex,
    most: SupportsIndex,
    mask_token: SupportsIndex,
    lens: _Tensor,
    roots: _Tensor,
    depths: _Tensor,
    nodes: _Tensor,
    heats: _Tensor,
    live: _Tensor | None,
    blocks: BlockArrays,
    stream: _Stream,
) -> None:
    """The rows of the blocks of a batch (`BlockArrays`, written): a request's root (`roots`) and `mask_token` behind
    it, `rows` of them, or as many as there are positions behind its `lens` in `context`; none where `depths` is 0. The
    first level is predicted by the row behind `skipped` others, or with -1 by none; then all rows have `mask_token`.
    All are int32 [batch], `heats` float32 [batch]. A tree has at most `most` nodes, and as many as `nodes` (int32
    [batch]) says.
    """

def _device_tree_lists(
    *,
    draft_tokens: SupportsIndex,
    width: SupportsIndex,
    lists: ListArrays,
    to_target: _Tensor | None,
    roots: _Tensor,
    max_depths: _Tensor,
    max_nodes: _Tensor,
    live: _Tensor | None,
    trees: BuiltTrees,
    masks: _Tensor | None,
    sound: _Tensor,
    stream: _Stream,
) -> None:
    """The best trees of the lists of levels (`ListArrays`), of at most `draft_tokens` nodes each: `DraftLists.trees` on
    the device. `roots`, `max_depths` and `max_nodes` are int32 [batch]; `trees` and `masks` as for
    `_device_tree_build`; `sound` (int32 [batch], written) is 0 of a request with a list without a distribution.
    """

def _device_list_beams(
    *,
    shape: TreeShape,
    width: SupportsIndex,
    lists: ListArrays,
    heats: _Tensor,
    to_target: _Tensor | None,
    roots: _Tensor,
    max_depths: _Tensor,
    before: _Tensor,
    behind: _Tensor,
    weights: _Tensor | None,
    closed: bool,
    live: _Tensor | None,
    beams: BeamArrays,
    stream: _Stream,
) -> None:
    """The candidates of beams over the lists of levels (`ListArrays`) into `beams` (`BeamArrays`, of as many steps): a
    token's log-probability changes by the product of its row of `behind` [draft vocabulary, rank] and that of the token
    before in `before` [vocabulary, rank], times `heats` (float32 [batch * levels]). `weights` [batch * levels, rank]
    are factors on the product's elements. If the lists are `closed`, no other token has a chance. `roots` and
    `max_depths` are int32 [batch].
    """

def _device_draft_scratch(
    shape: TreeShape, batch: SupportsIndex, draft_vocab: SupportsIndex, ordinal: SupportsIndex
) -> int:
    """64-bit words of scratch that `_device_draft_select` needs on CUDA device `ordinal` for rounds of up to `batch`
    requests.
    """

def _device_samplers(samplers: _List[Sampler]) -> dict[str, Array]:
    """Sampling parameters and histories of a batch as the device reads them, by the names of `SamplerArrays`: rows
    (int64 [B, 6]), edit_begins and edit_counts (int32 [B]), edit_tokens (int32 [E]), edit_biases (float32 [E]),
    edit_outputs (int32 [E]).
    """

def _device_sample_verify(
    *,
    logits: _Tensor,
    trees: TreeArrays,
    lens: _Tensor,
    live: _Tensor | None,
    max_nodes: SupportsIndex,
    max_path: SupportsIndex,
    samplers: SamplerArrays,
    accepts: AcceptArrays,
    scratch: _Tensor,
    stream: _Stream,
) -> None:
    """Sampling verification: as `_device_verify_greedy`, by what tokens are drawn by, `samplers` (`SamplerArrays`),
    and always along the walks alone.
    """

def _device_plan(
    *,
    geometry: Geometry,
    phase: Literal["extend", "decode", "draft", "verify"],
    draft_step: SupportsIndex | None,
    table: _Tensor,
    num_pages: SupportsIndex,
    rows: _Tensor,
    versions: _Tensor,
    lens: _Tensor,
    live: _Tensor | None,
    offsets: _Tensor | None = None,
    parents: _Tensor | None = None,
    ancestors: _Tensor | None = None,
    plan: PlanArrays,
    format: str,
    masks: str,
    arrays: dict[str, Any],
    stream: _Stream,
) -> None:
    """Plan a step on the device into `plan` (`PlanArrays`), whose sizes are the bucket, and the arrays of `format`
    if one is given: `arrays` name to tensor. `rows`, `versions` (int64), `lens` and `live` are those of the batch,
    `table` is int32 [rows, columns]. `offsets`, `parents` and `ancestors` are those of the step, where its phase has
    them.
    """

def _device_tail_copies(
    *,
    geometry: Geometry,
    table: _Tensor,
    num_pages: SupportsIndex,
    rows: _Tensor,
    lens: _Tensor,
    live: _Tensor | None,
    moves: MoveArrays,
    stream: _Stream,
) -> None:
    """Copies of each prefix's tail into the holes of the holey layout, into `moves` (`MoveArrays`). `rows`, `lens`
    and `live` are those of the batch.
    """

def _device_verify_scratch(nodes: SupportsIndex, batch: SupportsIndex, max_path: SupportsIndex) -> int:
    """64-bit words of scratch that `_device_verify_greedy` needs."""

@final
class _DeviceArray:
    """A region of device memory of specrs. `torch.from_dlpack(a)` shares it: torch's current stream waits for what
    the region's own stream has then, and the memory stays until the work on that stream, as it is when torch drops
    the tensor, has finished. Nothing waits on the host.
    """

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class _DeviceArena:
    """One allocation on CUDA device `ordinal` with regions `(name, dtype, shape)`, each on 256 bytes; with `guards`
    a gap of known bytes around each. Raises `ConfigError` for what cannot be declared, `DeviceMemoryError` for what
    does not fit, before anything is allocated.
    """

    def __new__(
        cls, ordinal: SupportsIndex, regions: _List[tuple[str, str, _List[int]]], guards: bool = False
    ) -> _DeviceArena: ...
    @staticmethod
    def count(regions: _List[tuple[str, str, _List[int]]], guards: bool = False) -> int:
        """Bytes that the allocation of these regions would take; needs no device."""

    @property
    def bytes(self) -> int:
        """Bytes of the allocation."""

    def tensor(self, name: str, stream: _Stream) -> _DeviceArray:
        """The region as a tensor that torch can share; work that writes it is on the raw stream `stream`."""

    def poison(self, stream: _Stream, names: _List[str] | None = None) -> None:
        """Fill the regions of these names, or every region, with bytes that are NaN and -1."""

    def check_guards(self, stream: _Stream) -> None:
        """Raise `OutOfBoundsError`, with the region and the byte, where something was written outside every region."""

@final
class _Graph:
    """Work captured from a raw stream into a CUDA graph, with every object that the work needs.

    It may be dropped at any time, on any thread: the graph and what it keeps stay until the device has finished the
    last launch, and go at a later capture, launch or `_graph_collect`.
    """

    @staticmethod
    def capture(ordinal: SupportsIndex, stream: _Stream, work: Callable[[], object], keep: _List[object]) -> _Graph:
        """Capture what `work()` puts on the raw stream `stream` of CUDA device `ordinal`, which is not the default
        stream. Captures run one at a time in the process; the stream's other work and other threads go on. `keep`:
        objects that live until the graph is dropped and its last launch has finished.

        Raises what `work` raises, unchanged; `GraphCaptureError` for a capture that something broke, with the call, and
        for a node that may not be there its type and path. Either way nothing of the graph is left and the stream works
        as before.
        """

    @staticmethod
    def loop(ordinal: SupportsIndex, stream: _Stream, work: Callable[[int], object], keep: _List[object]) -> _Graph:
        """As `capture`, of the body of a loop: it runs until the last kernel of the body sets the condition to 0, by
        `cudaGraphSetConditional(handle, 0)`, once at least. `work` gets the handle, an integer of 64 bits.

        The body holds kernels, copies, memsets, and graphs of these: no host functions, event waits, memory allocations
        or cooperative kernels, which raise `GraphCaptureError`.
        """

    def launch(self, stream: _Stream) -> None:
        """Put the captured work on the raw stream `stream`, and an event behind it. Waits for nothing. Raises
        `CudaError` for what the driver refuses, also for a fault of earlier work; `GraphCaptureError` on a stream
        that is being captured.
        """

    @property
    def replays(self) -> int:
        """Launches so far: the generation of what the graph writes."""

    @property
    def nodes(self) -> dict[str, int]:
        """Nodes by type, such as `{"kernel": 12, "memcpy": 1}`; those of child graphs and of a loop's body included,
        beside the `graph` and `conditional` nodes that hold them.
        """

def _graph_child(stream: _Stream, raw: SupportsIndex) -> None:
    """Add the graph `raw` (a `cudaGraph_t` as an integer, such as `torch.cuda.CUDAGraph.raw_cuda_graph()`) to what
    is being captured on the raw stream `stream`, by a capture of specrs on this thread, behind what is there. The
    caller keeps what it came from alive through the call, and has what its work touches in `keep`. Raises
    `GraphCaptureError` where the stream is not being captured, and for a node that no child graph may hold.
    """

def _graph_collect(wait: bool = False) -> tuple[int, int]:
    """Destroy the dropped graphs whose last launch has finished, and let go of what they kept; with `wait`, wait for
    it first. Returns how many were destroyed and how many are left.
    """

def _graph_loop_count(handle: SupportsIndex, left: _Tensor, stop: _Tensor | None, stream: _Stream) -> None:
    """Take one from `left` (int32[1] on a CUDA device) and set the condition `handle` of a loop to whether any is
    left and `stop` (int32[1], or `None`) is 0: the last launch of the work that `_Graph.loop` captures, on the raw
    stream `stream`.
    """

@final
class _DeviceTable:
    """A copy of a pool's page table on CUDA device `ordinal`, which follows it on the raw stream `stream`."""

    def __new__(cls, pool: Pool, ordinal: SupportsIndex, stream: _Stream) -> _DeviceTable: ...
    def tensor(self, stream: _Stream) -> _DeviceArray:
        """The table, int32 [rows, columns], whose writers are on the raw stream `stream`; its address stays."""

    def upload(self, stream: _Stream, permutes: _List[int] = ...) -> tuple[int, int, int, bool]:
        """Store what changed since the last upload. `permutes`: rows that a round in flight permutes itself. Returns
        `(columns stored, launches, waits, rounds_first)`.
        """

    def forget(self) -> None:
        """The device's table may be another than the last upload left: the next one stores every row."""

    def read(self, stream: _Stream) -> list[int]:
        """The device's table, row by row, once the work on `stream` has finished."""

    def host(self) -> tuple[list[int], list[int]]:
        """The pool's own table, and the version of each of its rows."""

    def versions(self) -> list[int]:
        """The version of each row at the last upload."""

@final
class _RoundRing:
    """Pinned memory by which the host learns what rounds found, without a synchronisation: `slots` slots (a power of
    two, at least 2) on CUDA device `ordinal`, for rounds of `batch` seats that find `words` int32 words. Round r has
    slot r % slots; its first round is 0. Round r can be read until round r + slots - 1 has ended.
    """

    def __new__(
        cls, ordinal: SupportsIndex, slots: SupportsIndex, batch: SupportsIndex, words: SupportsIndex
    ) -> _RoundRing: ...
    @property
    def slots(self) -> int:
        """Slots."""

    @property
    def batch(self) -> int:
        """Seats of a round."""

    @property
    def words(self) -> int:
        """Words of what a round found."""

    @property
    def slot_words(self) -> int:
        """Words of a slot."""

    @property
    def round(self) -> int:
        """Word of a slot: the round's number, modulo 2^32."""

    @property
    def live(self) -> int:
        """Word of a slot: live seats."""

    @property
    def exit(self) -> int:
        """Word of a slot: why no further round should follow, 0 for no reason. Bits: 1 a live seat is done, 2 a
        seat's target scores were NaN, 4 a root's draft scores give no distribution, 8 an access was recorded that
        the host has not read, 16 the host asked, 32 the rounds of the launch are used up.
        """

    @property
    def continues(self) -> int:
        """Word of a slot: 1 where another round follows in the same launch."""

    @property
    def time_at(self) -> int:
        """First of two words of a slot: when the round was published, in nanoseconds of the device's clock
        (`%globaltimer`), the low word first; the slot's row viewed as int64 has it at time_at / 2.
        """

    @property
    def lens_at(self) -> int:
        """First word of the lengths of a slot, `batch` of them, as the round used them."""

    @property
    def depths_at(self) -> int:
        """First word of the depths of a slot, `batch` of them, as the round used them."""

    @property
    def found_at(self) -> int:
        """First of the `words` words of a slot that the round found."""

    def tensor(self) -> Array:
        """The slots, int32 [slots, slot_words], on the CPU; whoever has it keeps the memory. The device writes it:
        read a round's row between `wait` and `check`.
        """

    def slot(self, round: SupportsIndex) -> int:
        """The row of `tensor()` that has round `round`."""

    def wait(self, round: SupportsIndex, stream: _Stream) -> None:
        """Wait until round `round`, launched on the raw stream `stream`, has ended, without the GIL. Raises
        `StaleOutputError` where a later round has overwritten it, `CudaError` where the device has failed,
        `ConfigError` where the stream has no work left and the round has not ended.
        """

    def ready(self, round: SupportsIndex) -> bool:
        """Whether round `round` has ended. Raises `StaleOutputError` where a later round has overwritten it."""

    def check(self, round: SupportsIndex) -> None:
        """Behind a reader of a round's row: raise `StaleOutputError` where a later round has begun to overwrite it."""

    def ask_stop(self) -> None:
        """Ask the rounds that have not ended yet to be the last of their launch: they have exit bit 16 until
        `clear_stop`.
        """

    def clear_stop(self) -> None:
        """Ask no longer."""

def _device_round_end(
    ring: _RoundRing,
    *,
    accepts: RoundFound,
    limits: SeatLimits,
    state: SeatState,
    control: _Tensor,
    found: _Tensor,
    handle: SupportsIndex,
    stream: _Stream,
) -> None:
    """End a round, in one launch: seats advance to what verification found or become done, and the round's slot of
    `ring` gets the lengths and depths that the round used and a copy of `found` (int32 [words]). All tensors are
    int32. `accepts` (`RoundFound`): offsets [B + 1], tokens, new_lens, roots, faults, sound [B], live (its last
    element counts). `limits` (`SeatLimits`): the committed length at which a seat has ended, the deepest level
    wanted, stop tokens [B * places], places used. `state` (`SeatState`), in and out: lens, roots, depths, done [B].
    `control` [4], zeros at first: rounds ended, rounds left of the launch, exit bits, the kernel's own. `handle` of
    the conditional node whose body this is captured into, or 0.
    """

def _device_round_end_load(ordinal: SupportsIndex) -> None:
    """Load the kernel that `_device_round_end` launches with a handle on CUDA device `ordinal`: the driver compiles
    it.
    """

def _round_end(
    ring: _Tensor,
    *,
    accepts: RoundFound,
    limits: SeatLimits,
    state: SeatState,
    control: _Tensor,
    found: _Tensor,
    looped: bool,
    asked: bool,
    recorded: bool,
) -> list[tuple[str, int, int, int]]:
    """Compute the end of a round on the host, for tests of the kernel. Takes the operands of `_device_round_end` on
    the CPU: `ring` is int32 [slots, slot words], `looped` says that there is a conditional node, `asked` and
    `recorded` stand for the host's request and the fault record. Writes `ring`, `state` and `control`. Returns
    (buffer, request, index, bound) of each index that was refused.
    """

def _device_copy_rows(
    src: _Tensor,
    src_rows: _Tensor | None,
    dst: _Tensor,
    dst_rows: _Tensor | None,
    live: _Tensor | None,
    stream: _Stream,
) -> None:
    """dst[dst_rows[i]] = src[src_rows[i]] of rows of float32, bfloat16 or float16, int32 lists; `None` is row i. -1
    in either list is nothing, and so are rows behind the live ones; rows of dst that no index names stay as they
    are. None is named twice.
    """

@final
class _DeviceProducts:
    """cublasLt on CUDA device `ordinal`. The library is looked for in the process, in `folders`, then by the loader.
    Choices are kept in the file `cache`; `None` keeps none, and `""` means the user's cache folder (`SPECRS_CACHE`,
    `XDG_CACHE_HOME`, `~/.cache`).

    Raises `CudaError` where there is no CUDA or no cublasLt, with every place that was looked at.
    """

    def __new__(cls, ordinal: SupportsIndex, folders: _List[str], cache: str | None = None) -> _DeviceProducts: ...
    def keeping(self, cache: str | None = None) -> _DeviceProducts:
        """The same choices, kept in the file `cache` as well: a choice that is known is stored there too, where the
        file has none for its shape. `None` keeps nothing, `""` means the user's cache folder as the environment
        names it now.
        """

    def linear(
        self,
        weight: _Tensor,
        max_rows: SupportsIndex,
        *,
        bias: _Tensor | None = None,
        f32_output: bool = False,
        split: SupportsIndex | None = None,
    ) -> _DeviceLinear:
        """The product with `weight`, `[outputs, inputs]` of bfloat16 or float16 on the device: up to `max_rows` rows
        of x give rows of the same type, or of float32 with `f32_output`, plus `bias` (`[outputs]`). `split` asks for
        one split of K instead of the fastest class of bits. Measures, or checks what an earlier process measured.
        The weight and the bias are kept, and must not be changed in shape.
        """

    def numerics(self) -> str:
        """What the bits of products depend on, as JSON: device, driver, library; of each shape that was asked for
        its split of K, the fingerprint of its class, and the algorithm of each bucket of rows with its microseconds;
        `contract` is false for those of `without_contract`.
        """

    def without_contract(self) -> _DeviceProducts:
        """For benches alone, which measure what exactness costs: the same library, and for each number of rows the
        fastest algorithm of any class of bits. A row's bits then change with the number of rows, so speculation is
        not exact. Measured in each process and kept in no file; `numerics` says it, and so does `LLM.numerics`.
        """

@final
class _DeviceLinear:
    """One weight's product, from `_DeviceProducts.linear`."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that a launch of up to `max_rows` rows needs at most."""

    @property
    def split(self) -> int:
        """Parts that K is split into."""

    @property
    def fingerprint(self) -> int:
        """The class of bits by a number."""

    def launch(self, rows: SupportsIndex, x: _Tensor, y: _Tensor, workspace: _Tensor, stream: _Stream) -> None:
        """Put the product of the first `rows` rows of `x` into those of `y`, on the raw stream `stream`.
        `workspace`: `uint8[>= workspace_bytes]`. Raises `ConfigError`, before anything is launched, for operands
        that do not fit.
        """

def _device_memory(ordinal: SupportsIndex) -> tuple[int, int, int, int]:
    """Free and total bytes of device `ordinal`; of specrs's own buffers the bytes that were dropped and wait for
    work in flight, and all.
    """

def _device_collect(ordinal: SupportsIndex) -> int:
    """Free memory of device `ordinal` that was dropped and is no longer in use; returns the bytes."""

def _device_collect_captured(ordinal: SupportsIndex) -> int:
    """Free memory of device `ordinal` that was dropped and that captured graphs use; returns the bytes. The caller
    says by it that no launch of such a graph is in flight or follows.
    """

def _device_budget(
    lines: _List[tuple[str, int]],
    scaled: tuple[str, str, int, int, int] | None = None,
    *,
    have: SupportsIndex | None = None,
    ordinal: SupportsIndex = ...,
) -> str:
    """The table of a budget: `lines` are `(name, bytes)`, `scaled` is `(name, unit, bytes, count, least)`, a line
    that may be made smaller down to `least` units. Raises `DeviceMemoryError` where it does not fit into `have`
    bytes of device `ordinal`.
    """

def _device_table_update(
    table: _Tensor,
    rows: SupportsIndex,
    width: SupportsIndex,
    num_pages: SupportsIndex,
    staged: _Tensor,
    changes: SupportsIndex,
    stream: _Stream,
) -> None:
    """Launch the update of a page table `table` (int32 `[rows * width]`) by `changes` changes in `staged` (int32),
    on the raw stream `stream`.
    """

def _device_fill(
    out: _Tensor, seed: SupportsIndex, exponent: SupportsIndex, mirror: SupportsIndex, stream: _Stream
) -> None:
    """Write reproducible values to `out` (bfloat16 or float16), on the raw stream `stream`, of magnitudes around
    2^`exponent`. `mirror`: 0 for rows as they come, 1 for rows that read the same from both ends, 2 for rows whose
    second half is the first from its end, negated.
    """

def _device_fingerprint(matrix: _Tensor, rows: SupportsIndex, out: _Tensor, stream: _Stream) -> None:
    """Write the fingerprints of the first `rows` rows of `matrix` to `out` (int64), on the raw stream `stream`."""

def _device_linear(weight: _Tensor, x: _Tensor, y: _Tensor, split: SupportsIndex, stream: _Stream) -> bool:
    """The product `y = x W^T` of up to 16 rows by the package's own kernel, on the raw stream `stream`: `weight`
    `[outputs, inputs]` and `x` of bfloat16, `y` of bfloat16 or float32, K in `split` parts. False, and nothing is
    launched, where the kernel has none of these sizes, or the GPU has not the kernel. For tests: `_DeviceProducts`
    chooses.
    """

def _device_attention_workspace(
    ordinal: SupportsIndex,
    *,
    requests: SupportsIndex,
    max_queries: SupportsIndex,
    kv_heads: SupportsIndex,
    group: SupportsIndex,
    head_dim: SupportsIndex,
    max_keys: SupportsIndex,
) -> int:
    """Bytes of workspace with which `_device_attention` keeps CUDA device `ordinal` busy: for `requests` of up to
    `max_queries` queries and `max_keys` keys each, `kv_heads` heads with `group` query heads each, of `head_dim`
    elements.
    """

def _device_attention(
    cache: _Tensor,
    layer: SupportsIndex,
    q: _Tensor,
    out: _Tensor,
    *,
    table: _Tensor,
    page_size: SupportsIndex,
    rows: _Tensor | None,
    lens: _Tensor,
    starts: _Tensor,
    mask: _Tensor | None,
    first_pages: _Tensor | None = None,
    draft: tuple[SupportsIndex, SupportsIndex] | None,
    max_queries: SupportsIndex,
    scale: float,
    cap: float | None = None,
    workspace: _Tensor,
    stream: _Stream,
) -> None:
    """Launch paged attention over layer `layer` of `cache` on the raw stream `stream` of the cache's device.

    Query j of request i is row `starts[i] + j` of `q` [queries, heads, head_dim]. It attends to positions `[0,
    lens[i])` of row `rows[i]` (i without `rows`) of `table` [rows, width], whose pages hold `page_size` tokens, and
    then causally to `lens[i] ..= lens[i] + j`, or, with a `mask`, to `lens[i] + b` of each bit b of its word. `draft =
    (K, S)`: bits are `branch * S + step`. With `first_pages` no query of request i attends to a position before page
    `first_pages[i]` of its row. `out` is of `q`'s type or `float32`. With a `cap` a scaled score x becomes `cap *
    tanh(x / cap)`.
    """

def _error_examples() -> list[SpecrsError]:
    """One exception for each kind of core error, for tests and documentation."""
