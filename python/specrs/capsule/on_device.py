"""A replay whose plans, trees, accepted paths and moves come from a GPU.

The kernels that an engine there launches make what the device decides of a round: the page table's mirror, the plan of
each phase and the arrays of its format, copies into holes, the trees out of their candidates' scores, greedy
verification, the commit, and every move of KV. It is read back and logged as the host's is, array by array; kernels
write over bytes that are known, between bytes that must stay. Keys and values are written, and attention is computed,
on the host by the device's plan, which is audited before. Draft selection reads logits, which a capsule does not hold.

An access that a kernel skips (`OutOfBoundsError`) or an audit refuses ends the run, as a guard does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs import device
from specrs._specrs import CudaError, Plan, SpecrsError
from specrs.backends.base import DraftAttention, Format, Layout
from specrs.capsule.log import Guard, Run
from specrs.capsule.owners import ArrayNames
from specrs.capsule.replay import LOGGED, Inputs, Make, Replay
from specrs.capsule.schema import Capsule
from specrs.capsule.static import FILLS, MAX_BYTES, Image, Memory, Phase, static_bytes
from specrs.operands import AcceptArrays, BeamArrays, BuiltTrees, MoveArrays, PlanArrays, TreeArrays

_PLAN = ("rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask")
_ACCEPTS = ("offsets", "paths", "tokens", "rows", "roots", "new_lens", "faults")
_OF_THE_HOST = ("arrays of the write before",)
"""Arrays that no device has."""


def find(name: str) -> torch.device:
    """The GPU of that name, ``cuda`` or ``cuda:N``, with kernels loaded.

    Raises:
        CudaError: no such GPU; the message says why.
    """
    if (why := device.cuda_unavailable_reason()) is not None:
        raise CudaError(f"device = {name!r}: {why}")
    if not torch.cuda.is_available():
        raise CudaError(f"device = {name!r}: torch {torch.__version__} cannot use a GPU; install one built for CUDA")
    found = torch.device(name)
    ordinal, count = torch.cuda.current_device() if found.index is None else found.index, torch.cuda.device_count()
    if ordinal >= count:
        raise CudaError(f"device = {name!r}: there are {count} CUDA devices, cuda:0 to cuda:{count - 1}")
    device.init(ordinal)
    return torch.device("cuda", ordinal)


def replay_on(
    capsule: Capsule,
    cuda: torch.device,
    *,
    format: Format | None = None,
    layout: Layout | None = None,
    mode: DraftAttention | None = None,
) -> tuple[Run, tuple[str, ...]]:
    """Return the writes of a replay where `cuda` decides, and the arrays of a host's run that it does not have.

    Args:
        cuda: the device, from `find`.
        others: the same as in `specrs.capsule.replay.replay`.

    Raises:
        ConfigError: a round that the device's kernels do not take, with the limit; else as `replay`.
    """
    with torch.cuda.device(cuda):
        made = OnDevice(capsule, format or capsule.format, [], layout, mode, False)
        made.on(cuda)
        return made.run(), (*_OF_THE_HOST, *made.left_out)


class _Stopped(Exception):
    """A guard ended the run; the log has it."""


class OnDevice(Replay):
    """Replays a round on a GPU, once `on` has named it."""

    def on(self, cuda: torch.device) -> None:
        """Decide on this device."""
        self.cuda = cuda
        self.log.name = f"{self.log.name} on {cuda}"
        self.left_out: tuple[str, ...] = ()
        self._faults = device.faults(cuda)  # this replay's own record: an engine on this device keeps its own
        self._stream = self._faults.on(torch.cuda.current_stream(cuda).cuda_stream)
        self._mirror: core._DeviceTable | None = None

    def run(self) -> Run:
        try:
            return super().run()
        except _Stopped:
            return self.log

    # -- the device's decisions -----------------------------------------------------------------------------------

    def _tables(self) -> list[list[int]]:
        """Rows of the device's table, as long as the pool says they are."""
        pool = self.world.pool
        if self._mirror is None:
            self._mirror = core._DeviceTable(pool, self.cuda.index, self._stream)
            self._mirror.upload(self._stream)
            flat = self._mirror.read(self._stream)
            self._checked()
            self.table = torch.tensor(flat, dtype=torch.int32).view(pool.max_seqs, pool.row_pages).to(self.cuda)
        table = self.table.cpu()
        return [table[seq.row, : len(pool.pages(seq))].tolist() for seq in self.seqs]

    def _plan(self, phase: Phase, make: Make, who: ArrayNames, inputs: Inputs, across: bool) -> Plan:
        b, q = inputs.pad
        words = {"verify": self.geometry.verify_mask_words, "draft": self.geometry.draft_mask_words}.get(phase, 0)
        shapes = dict(zip(_PLAN, ([b], [b], [b + 1], [b], [q], [q], [q, words]), strict=True))
        plan = Memory({name: _sized(shape, "int64" if name in ("versions", "mask") else "int32")
                       for name, shape in shapes.items()}, self.cuda)  # fmt: skip
        sizes = self._array_sizes(phase, make, q)
        arrays, operands = Memory(sizes, self.cuda), self._operands(phase, inputs)
        views = PlanArrays(**{name: plan.views[name] for name in _PLAN})
        copies = []
        for byte in FILLS:
            plan.fill(byte, tables=True)
            arrays.fill(byte, tables=True)
            core._device_plan(
                geometry=self.geometry, phase=phase, draft_step=inputs.step, table=self.table,
                num_pages=self.world.pool.num_pages, **operands, plan=views, format=self.format, masks="both",
                arrays=arrays.views, stream=self._stream,
            )  # fmt: skip
            self._checked()
            try:
                made, copy = plan.bytes(byte), arrays.bytes(byte)
            except SpecrsError as e:
                self._stop(e)
            copies.append(copy)
        images = arrays.images(copies)
        if self._unbounded(phase):
            images = {name: _whole(image) for name, image in images.items()}
        own = {name: torch.from_numpy(made[name]).view(shapes[name]) for name in _PLAN}
        seven: Any = tuple(own[name] for name in _PLAN)
        audited, refused = None, None
        try:
            audited = self.planner.audit(phase, seven, inputs.step)
        except SpecrsError as e:
            refused = e
        self._log_arrays(images, audited, who)
        self._log_plan({name: own[name] for name in LOGGED}, who, across)
        if refused is not None:
            self._stop(refused)
        assert audited is not None
        return audited

    def _unbounded(self, phase: Phase) -> bool:
        """Return whether static buffers of the phase would be too large: arrays are then as large as the plan has
        them."""
        return self.format != "native" and static_bytes(self.planner, phase, self.padded) > MAX_BYTES

    def _array_sizes(self, phase: Phase, make: Make, queries: int) -> dict[str, dict[str, Any]]:
        """Memory for each array of the format."""
        if self._unbounded(phase):
            arrays = {name: from_dlpack(array) for name, array in make(None).arrays().items()}
            return {name: _sized(a.shape, str(a.dtype).removeprefix("torch.")) for name, a in arrays.items()}
        sizes = {}
        for name, c in self.planner.capacities(phase, max_batch=self.padded).items():
            shape = list(c["shape"])
            if len(shape) == 1:  # a pass over prompts may have more queries than the largest batch has elsewhere
                shape[0] = max(shape[0], queries + 1)
            sizes[name] = _sized(shape, c["dtype"])
        return sizes

    def _operands(self, phase: Phase, inputs: Inputs) -> dict[str, Any]:
        """The batch and the step of a plan, in device memory, as `_device_plan` names them."""
        assert self._mirror is not None
        live, b = len(inputs.requests), inputs.pad[0]
        versions = self._mirror.host()[1]
        rows = [self.seqs[i].row for i in inputs.requests]
        batch = {
            "rows": self._i32(rows, b, -1),
            "versions": torch.tensor([versions[row] for row in rows] + [0] * (b - live)).to(self.cuda),
            "lens": self._i32(inputs.starts, b, 0),
            "live": self._i32([live], 1, 0),
        }
        ends = list(accumulate(inputs.counts, initial=0))
        offsets = self._i32(ends, b + 1, ends[-1]) if phase in ("extend", "verify") else None
        parents = self._i32(inputs.parents, len(inputs.parents), 0) if phase == "verify" else None
        beams = None
        if inputs.beams is not None:
            beams = torch.zeros(b * self.geometry.shape.topk, inputs.beams.shape[1], dtype=torch.int64)
            beams[: len(inputs.beams)] = inputs.beams
            beams = beams.to(self.cuda)
        return {**batch, "offsets": offsets, "parents": parents, "ancestors": beams}

    def _tail_copies(self) -> tuple[list[int], list[int]]:
        b, g = len(self.seqs), self.geometry
        room = b * g.shape.topk * g.page_size
        out = self._empty_moves(room)
        rows = self._i32([seq.row for seq in self.seqs], b, -1)
        core._device_tail_copies(
            geometry=g, table=self.table, num_pages=self.world.pool.num_pages, rows=rows,
            lens=self._i32(self.lens, b, 0), live=None, moves=out, stream=self._stream,
        )  # fmt: skip
        return self._moved(out)

    def _trees(self) -> None:
        self.phase = "trees"
        try:
            candidates = Candidates.of(self.c)
        except ValueError as e:
            self.log.notes.append(f"trees were not built on the device: {e}")
            self.left_out += ("trees",)
            return
        shape, b = self.geometry.shape, len(self.seqs)
        k, s, v, n = shape.topk, shape.steps, shape.draft_tokens, candidates.scores.shape[1]

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(size, -1, dtype=dtype, device=self.cuda)

        beams = BeamArrays(
            scores=torch.from_numpy(candidates.scores).to(self.cuda),
            candidate_tokens=torch.from_numpy(candidates.tokens).to(self.cuda),
            candidate_parents=torch.from_numpy(candidates.parents).to(self.cuda),
            beams=empty(b, k), tokens=empty(b * k), parents=empty(b * k),
            ancestors=empty(b * k, -(-k * s // 64), dtype=torch.int64), sound=self._i32([s] * b, b, 0),
        )  # fmt: skip
        trees = BuiltTrees(
            offsets=empty(b + 1), tokens=empty(b * v), depths=empty(b * v), parents=empty(b * v),
            next_child=empty(b * v), next_sibling=empty(b * v), scores=empty(b * v, dtype=torch.float32),
        )  # fmt: skip
        assert n == k + (s - 1) * k * k
        core._device_tree_build(
            shape=shape, beams=beams, roots=self._i32([t.tokens[0] for t in self.c.trees], b, 0),
            max_depths=self._i32(candidates.depths, b, 0),
            max_nodes=self._i32([len(t.parents) for t in self.c.trees], b, 0), min_score=None, live=None, trees=trees,
            masks=None, stream=self._stream,
        )  # fmt: skip
        self._checked()
        made = (trees.offsets, trees.tokens, trees.parents, trees.scores)
        offsets, tokens, parents, scores = (array.tolist() for array in made)
        ranges = [range(*ends) for ends in pairwise(offsets)]
        self._log_trees([([tokens[j] for j in r], [parents[j] for j in r], [scores[j] for j in r]) for r in ranges])

    def _accept(self, trees: core.TreeBatch, logits: torch.Tensor) -> core.Accepts:
        sizes = trees.sizes
        b, nodes, most = len(sizes), sum(sizes), max(sizes)
        inputs = TreeArrays(
            tokens=_copy(trees.tokens).to(self.cuda), parents=_copy(trees.parents).to(self.cuda),
            offsets=self._i32(list(accumulate(sizes, initial=0)), b + 1, 0),
        )  # fmt: skip
        lengths = (b + 1, b * most, b * most, b * most, b, b, b)
        out = {
            name: torch.full((n,), -1, dtype=torch.int32, device=self.cuda)
            for name, n in zip(_ACCEPTS, lengths, strict=True)
        }
        scratch = torch.zeros(core._device_verify_scratch(nodes, b, most), dtype=torch.int64, device=self.cuda)
        core._device_verify_greedy(
            logits=logits.to(self.cuda), trees=inputs, lens=self._i32(self.lens, b, 0), live=None, max_nodes=most,
            max_path=most, accepts=AcceptArrays(**out), scratch=scratch, full=False, stream=self._stream,
        )  # fmt: skip
        self.phase = "accept"
        self._checked()
        self.accepted = out
        offsets, paths, tokens = (self.accepted[name].tolist() for name in _ACCEPTS[:3])
        ranges = [range(*ends) for ends in pairwise(offsets)]
        self._log_accepted(*([[values[j] for j in r] for r in ranges] for values in (paths, tokens)))
        samplers = [core.Sampler(logits.shape[1], [0]) for _ in self.c.rows]
        return core.verify(trees, logits, samplers, self.lens)  # the pool's own commit goes by it

    def _commit_moves(self, lease: core.Lease, accepts: core.Accepts) -> tuple[list[int], list[int]]:
        pool, most = self.world.pool, max(len(t.parents) for t in self.c.trees)
        rows = self._i32([seq.row for seq in self.seqs], len(self.seqs), -1)
        room = max(self.accepted["paths"].numel(), 1)
        out = self._empty_moves(room)
        remap = pool.page_size == 1
        core._device_kv_commit(
            offsets=self.accepted["offsets"], paths=self.accepted["paths"], new_lens=self.accepted["new_lens"],
            table=self.table, rows=rows, live=None, num_pages=pool.num_pages, page_size=pool.page_size, max_nodes=most,
            moves=None if remap else out, stream=self._stream,
        )  # fmt: skip
        moved = ([], []) if remap else self._moved(out)
        self._checked()
        self.planner.commit(lease, self.seqs, self.lens, accepts)
        return moved

    def _move(self, cache: int, src: list[int], dst: list[int]) -> None:
        if not src:
            return
        pool = self.pools[cache].to(self.cuda)
        n = len(src)
        core._device_kv_move(
            pool, self._i32(src, n, 0), self._i32(dst, n, 0), self._i32([0, n], 2, 0), self._stream
        )  # fmt: skip
        self._checked()
        self.pools[cache].copy_(pool)

    # -- what they share ------------------------------------------------------------------------------------------

    def _i32(self, values: Sequence[int], size: int, fill: int) -> torch.Tensor:
        """Return an int32 tensor on the device, padded."""
        padded = [*values, *[fill] * (size - len(values))]
        return torch.tensor(padded, dtype=torch.int32).to(self.cuda)

    def _empty_moves(self, room: int) -> MoveArrays:
        """Arrays for moves of all requests."""
        src, dst, offsets = (
            torch.full((n,), -1, dtype=torch.int32, device=self.cuda) for n in (room, room, len(self.seqs) + 1)
        )
        return MoveArrays(src=src, dst=dst, offsets=offsets)

    def _moved(self, out: MoveArrays) -> tuple[list[int], list[int]]:
        """The moves of all requests."""
        self._checked()
        n = int(out.offsets[-1])
        return out.src[:n].tolist(), out.dst[:n].tolist()

    def _checked(self) -> None:
        """Wait, and end the run by what a kernel skipped."""
        torch.cuda.current_stream(self.cuda).synchronize()
        try:
            self._faults.check()
        except SpecrsError as e:
            self._stop(e)

    def _stop(self, e: SpecrsError) -> NoReturn:
        self.log.guard = Guard.of(self.phase, e)
        raise _Stopped from e


@dataclass(frozen=True)
class Candidates:
    """The tables out of which trees are built, as far as a capsule tells them: B requests, N = K + (S - 1) * K * K.

    Attributes:
        scores: float32 [B, N]; -inf for candidates that were neither expanded nor chosen.
        tokens, parents: int32 [B, N]; a parent is a candidate, -1 for the root.
        depths: depths of each tree.
    """

    scores: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    depths: list[int]

    @classmethod
    def of(cls, c: Capsule) -> Candidates:
        """The candidates of a speculative round.

        Raises:
            ValueError: a tree that these candidates cannot give, and why.
        """
        k, steps = c.shape.topk, c.shape.steps
        n = k + (steps - 1) * k * k
        b = len(c.rows)
        scores = np.full((b, n), -np.inf, dtype=np.float32)
        tokens, parents = np.zeros((b, n), dtype=np.int32), np.full((b, n), -1, dtype=np.int32)
        depths = []
        for i in range(b):
            known = _known(c, i)
            depths.append(max((len(path) for path, (_, node) in known.items() if node is not None), default=0))
            _place(c, i, known, (scores[i], tokens[i], parents[i]))
        return cls(scores, tokens, parents, depths)


_Path = tuple[int, ...]  # tokens from below the root to a candidate


def _known(c: Capsule, i: int) -> dict[_Path, tuple[float, int | None]]:
    """Scores of a request's candidates, and the node that each is; nodes before beams that are none."""
    tree = c.trees[i]
    paths: list[_Path] = [()]
    known: dict[_Path, tuple[float, int | None]] = {}
    for node in range(1, len(tree.parents)):
        path = (*paths[tree.parents[node]], tree.tokens[node])
        paths.append(path)
        if path in known:
            raise ValueError(f"nodes {known[path][1]} and {node} of request {i} are one")
        if tree.scores[node] == -math.inf:
            raise ValueError(f"node {node} of request {i} has the score -inf, as candidates have that nobody chose")
        known[path] = tree.scores[node], node
    for t, beams in enumerate(_beams(c, i)):
        for path, beam in beams.items():
            known.setdefault(path, (c.steps[t].scores[i * c.shape.topk + beam], None))
    return known


def _beams(c: Capsule, i: int) -> list[dict[_Path, int]]:
    """The beams of each step of a request, by their paths."""
    k = c.shape.topk
    levels: list[dict[_Path, int]] = []
    before: list[_Path] = []
    for t, step in enumerate(c.steps):
        own = range(i * k, (i + 1) * k)
        now = [(*(before[step.parents[z] - i * k] if t else ()), step.tokens[z]) for z in own]
        levels.append({path: beam for beam, path in enumerate(now)})
        before = now
    return levels


def _place(c: Capsule, i: int, known: dict[_Path, tuple[float, int | None]], tables: tuple[Any, Any, Any]) -> None:
    """Put a request's candidates where selection has them: level by level, by the beam they continue, best first."""
    k = c.shape.topk
    scores, tokens, parents = tables
    beams = _beams(c, i)
    at: dict[_Path, int] = {}  # candidates placed
    for level in range(c.shape.steps):
        first = 0 if level == 0 else k + (level - 1) * k * k
        children: dict[int, list[_Path]] = {}
        for path in (p for p in known if len(p) == level + 1):
            beam = 0 if level == 0 else (beams[level - 1].get(path[:-1]) if level <= len(beams) else None)
            if beam is None:
                raise ValueError(f"a candidate of request {i} continues no beam of draft step {level - 1}")
            children.setdefault(beam, []).append(path)
        for beam, paths in children.items():
            if len(paths) > k:
                raise ValueError(f"beam {beam} of draft step {level - 1} of request {i} has {len(paths)} children")
            # Stable: children with one score stand as the tree has them.
            for j, path in enumerate(sorted(paths, key=lambda p: -known[p][0])):
                n = first + beam * k + j
                at[path] = n
                scores[n], tokens[n] = known[path][0], path[-1]
                parents[n] = at[path[:-1]] if level else -1


def _sized(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    size = {"int32": 4, "int64": 8, "bool": 1, "uint8": 1}[dtype]
    return {"shape": list(shape), "dtype": dtype, "bytes": math.prod(shape) * size}


def _copy(array: core.Array) -> torch.Tensor:
    return from_dlpack(array).clone()


def _whole(image: Image) -> Image:
    """An array that counts as written everywhere."""
    values = np.zeros(math.prod(image.shape), dtype=image.values.dtype)
    values[: len(image.values)] = image.values
    return Image(values, np.ones(len(values), dtype=np.bool_), image.shape)
