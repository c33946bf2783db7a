"""A round on a GPU, from the roots' logits to the head's pass over what was accepted, launched at once.

    select, (plan, head, select) ..., build trees | plan, target, accept, commit | plan, head

Trees of the host take the place of the drafts, or are united with those that the head drafts.

Lengths, beams, trees and accepted paths stay on the device: kernels read them there, and the round's end makes what the
next one begins with. So a round can be launched behind another of which the host knows nothing yet, or go round and
round in a WHILE loop on the device. Each publishes what it found to a slot of mapped memory, where the host reads it
without a synchronisation.

All memory of a bucket of requests is declared in one arena; a lane is a request's place in it. Lanes behind the live
ones are dead: the kernels write their dead values into them. A lane whose request has ended repeats its root.

The same launches run as they are, from a CUDA graph of them, or from that graph in a loop; bits do not depend on which.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs._specrs import Geometry, Plan
from specrs.engine.config import EngineConfig
from specrs.engine.drafting.ahead import most_nodes
from specrs.models.cuda import CudaDense, DevicePlan
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import FeatureRows
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory
from specrs.operands import (
    AcceptArrays,
    BeamArrays,
    BuiltTrees,
    LaneLimits,
    LaneState,
    MoveArrays,
    PlanArrays,
    RoundFound,
    SamplerArrays,
    ScoredTrees,
    TreeArrays,
)

_LEAST_EDITS = 64
_COLD = 1  # runs of a variant before it is captured, which load kernels and grow memory
_LASTING = {"given", "host trees", "control", "versions", "minus", "select"}  # what a round finds in place
_DOUBTS = 3  # captures during which memory is allocated, before the variant is taken to do so
_SLOTS = 32  # rounds whose results are kept
_INV_TEMPERATURE, _PENALISED = 7, 11  # words of a `SamplerRow`: 0 for greedy, and for one without penalties
_STOPS = 8  # tokens by which the device sees that a request ends; the host sees all
MOST_AHEAD = 8  # rounds of a loop at most
_BUDGET = 32  # `EXIT_BUDGET` of src/round/round_end.rs: the loop has run as many rounds as it was to


@dataclass(frozen=True)
class Variant:
    """What a launch is made for: a graph each.

    Attributes:
        batch: lanes.
        levels: of drafts, 0 for a round of roots alone.
        follow: whether the target's features are kept.
        edits: room for sampling's edits of tokens; ``None`` where all lanes are greedy and have none.
        loop: whether the device goes on by itself.
        trees: whether the host made them, of as many nodes as those of ``levels`` have.
        drafts: with trees of the host's, levels that the device drafts and unites with these; 0 for none.
    """

    batch: int
    levels: int
    follow: bool
    edits: int | None
    loop: bool = False
    trees: bool = False
    drafts: int = 0


class Roots:
    """The head's results for roots, a row for each row of the page table: where a round's drafts begin.

    A root is valid until the next round that drafts for its row.

    One more row, `nothing`, is read for lanes that do not draft, and stays 0.
    """

    def __init__(self, head: Eagle3Head, rows: int) -> None:
        at = head.placement
        self.nothing = rows
        self.logits = at.for_logits().empty(rows + 1, head.vocab_size).zero_()
        self.hidden = at.empty(rows + 1, head.config.hidden_size).zero_()

    def put(self, row: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keep a root's logits and hidden state."""
        self.logits[row].copy_(logits)
        self.hidden[row].copy_(hidden)


@dataclass(eq=False)
class Models:
    """What a round runs over: the target and its KV, the head and its own, and the pool's page table on the device."""

    dense: CudaDense
    target: LlamaModel
    cache: KvMemory
    head: Eagle3Head | None
    draft_cache: KvMemory | None
    roots: Roots | None
    to_target: torch.Tensor | None  # int32: the target's token of each draft id
    geometry: Geometry
    config: EngineConfig
    num_pages: int
    table: torch.Tensor
    stream: torch.cuda.Stream  # of everything
    activations: Activations | None


class Activations:
    """What passes from one model to the other in a round of the largest batch; every bucket uses its first rows.

    Attributes:
        features: of the target's pass, [layers, B * V, h].
        path_features: of accepted nodes, [layers, B * path, h].
        root_logits, root_hidden, step_hidden: the head's, B, B and B * K rows.
    """

    def __init__(self, target: LlamaModel, head: Eagle3Head, config: EngineConfig, geometry: Geometry) -> None:
        at, shape, b = head.placement, geometry.shape, geometry.max_batch
        layers, wide, h = len(head.aux_layers), target.config.hidden_size, head.config.hidden_size
        self.features = at.empty(layers, b * shape.draft_tokens, wide)
        self.path_features = at.empty(layers, b * longest_path(config, geometry, trees=True), wide)
        self.root_logits = at.for_logits().empty(b, head.vocab_size)
        self.root_hidden, self.step_hidden = at.empty(b, h), at.empty(b * shape.topk, h)


@dataclass(frozen=True, eq=False)
class _Captured:
    """A round's launches, and where its logits lie."""

    graph: core._Graph
    logits: torch.Tensor


class _Fields:
    """Arrays of int32 words behind one another in one array, which is copied at once. Names to first word and words."""

    def __init__(self, **words: int) -> None:
        ends = list(accumulate(words.values()))
        self.places = {name: (end - n, n) for (name, n), end in zip(words.items(), ends, strict=True)}
        self.words = ends[-1]

    def of(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as views."""
        return {name: memory[first : first + n] for name, (first, n) in self.places.items()}


class Lanes:
    """Memory and launches of a bucket of ``batch`` requests.

    Under ``SPECRS_POISON=1`` every round begins with NaN and -1 in all memory that it writes before it reads, gaps lie
    between the regions of the arena, and each landing looks for writes into those.

    Attributes:
        given: int32 arrays of the host that `launch` uploads, by name; `give` and `sample_by` fill them.
        features: of the target's pass, a row for each node; ``None`` without a head.
        logits: of the last round, a row for each node.
        root_logits: of the head, by which the last round's drafts began, a row for each lane.
        live: lanes of the last launch.
        rounds: launched so far; of a loop under way, those that are known of.
        looping: whether a loop may be under way.
        overtaken: whether a pass of the target that is none of these rounds has run behind them, over its logits.
        changing: whether what tokens are drawn by changes from round to round, so that the host has to say it again.
        cold: whether the last launch made what later ones of its variant only replay.
        waited: seconds, ever, for which the host waited for rounds to end.
    """

    def __init__(self, models: Models, batch: int) -> None:
        self.batch, self._m = batch, models
        shape, g, cuda = models.geometry.shape, models.geometry, models.dense.placement.device
        self._shape, self._cuda = shape, cuda
        # With a processor for each row of logits, all are looked at at once.
        self._processors = torch.cuda.get_device_properties(cuda).multi_processor_count
        k, c, v = shape.topk, shape.candidates, shape.draft_tokens
        # Of trees that the device drafts, and of those that the host makes, which may be deeper.
        self._paths = {trees: longest_path(models.config, g, trees) for trees in (False, True)}
        path = max(self._paths.values())
        # 8-byte arrays first, so that they are aligned.
        self._given = _Fields(
            sampling=batch * 12, root_from=batch, root_to=batch, rows=batch, lens=batch, roots=batch, depths=batch,
            done=batch, limits=batch, caps=batch, stops=batch * _STOPS, stop_counts=batch, nodes=batch,
            tree_offsets=batch + 1, edit_begins=batch, edit_counts=batch, live=1,
        )  # fmt: skip
        self._found = _Fields(
            offsets=batch + 1, paths=batch * path, tokens=batch * path, rows=batch * path, roots=batch, new_lens=batch,
            faults=batch, sound=batch, tree_offsets=batch + 1, tree_tokens=batch * v, tree_parents=batch * v,
            tree_scores=batch * v, tree_origins=batch * v if models.config.sources else 0,
        )  # fmt: skip
        self._host_trees = _Fields(
            tree_offsets=batch + 1, tree_tokens=batch * v, tree_parents=batch * v, tree_scores=batch * v
        )
        regions: dict[str, tuple[str, list[int]]] = {
            "given": ("int32", [self._given.words]),
            "host trees": ("int32", [self._host_trees.words]),
            "found": ("int32", [self._found.words]),
            "control": ("int32", [4]),
            "versions": ("int64", [batch]),
            "minus": ("int32", [batch]),
        }
        for name, queries, words in (("draft", batch * k, 1), ("verify", batch * v, 1), ("extend", batch * path, 0),
                                     ("decode", batch, 0)):  # fmt: skip
            regions |= {
                f"{name} rows": ("int32", [batch]),
                f"{name} versions": ("int64", [batch]),
                f"{name} qo_indptr": ("int32", [batch + 1]),
                f"{name} prefix_lens": ("int32", [batch]),
                f"{name} positions": ("int32", [queries]),
                f"{name} out_slots": ("int32", [queries]),
            }
            if words:
                regions[f"{name} mask"] = "int64", [queries]
        head = models.head
        if head is not None:
            regions |= {
                "scores": ("float32", [batch * c]),
                "candidate tokens": ("int32", [batch * c]),
                "candidate parents": ("int32", [batch * c]),
                "beams": ("int32", [batch * k]),
                "beam tokens": ("int32", [batch * k]),
                "beam parents": ("int32", [batch * k]),
                "ancestors": ("int64", [batch * k]),
                "select": ("int64", [core._device_draft_scratch(shape, batch, head.vocab_size, cuda.index)]),
                "depths": ("int32", [batch * v]),
                "next_child": ("int32", [batch * v]),
                "next_sibling": ("int32", [batch * v]),
            }
        if head is not None and models.config.sources:  # what the head drafts, before it is united with other trees
            regions["own offsets"] = ("int32", [batch + 1])
            regions |= {f"own {name}": ("int32", [batch * v]) for name in ("tokens", "depths", "parents", "next_child",
                                                                         "next_sibling")}  # fmt: skip
            regions["own scores"] = ("float32", [batch * v])
        if g.page_size > 1 and (k > 1 or models.config.sources):
            moves = batch * path
            regions |= {name: ("int32", [moves]) for name in ("move src", "move dst")}
            regions["move offsets"] = ("int32", [batch + 1])
        self._poisoned = [name for name in regions if name not in _LASTING] if _poisons() else None
        self._arena = core._DeviceArena(
            cuda.index,
            [(name, dtype, cast(Any, size)) for name, (dtype, size) in regions.items()],
            self._poisoned is not None,
        )
        stream = models.dense.stream
        self._a = a = {name: from_dlpack(self._arena.tensor(name, stream)) for name in regions}
        for tensor in a.values():
            tensor.zero_()
        a["minus"].fill_(-1)
        self._no_mask = a["versions"][:0]
        self._in, self._out = self._given.of(a["given"]), self._found.of(a["found"])
        self._given_host = torch.zeros(self._given.words, dtype=torch.int32, pin_memory=True)
        self._host_trees_host = torch.zeros(self._host_trees.words, dtype=torch.int32, pin_memory=True)
        self._trees_in = self._host_trees.of(a["host trees"])
        self.given = self._given.of(self._given_host)
        self._sampling = self._in["sampling"].view(torch.int64).view(batch, 6)
        self._numbers = {name: array.numpy() for name, array in self.given.items()}
        self._ring = core._RoundRing(cuda.index, _SLOTS, batch, self._found.words)
        self._slots = [self._views(slot) for slot in from_dlpack(self._ring.tensor())]
        self._samplers: list[core.Sampler] = []  # those that `given` has, where they stay as they are
        self._sampled_by: int | None = None
        self._edits: dict[int, torch.Tensor] = {}
        self._samplers_of: dict[int, SamplerArrays] = {}  # with this room for edits
        self._edits_host: dict[int, torch.Tensor] = {}
        self._plan_arrays: dict[tuple[str, int], PlanArrays] = {}
        self._plans = {name: self._plan(name, 0) for name in ("draft", "decode")}
        self._extends = {trees: self._plan("extend", most) for trees, most in self._paths.items()}
        self._verifies = [self._plan("verify", most_nodes(shape, levels)) for levels in range(shape.steps + 1)]
        # Each counts in its own place, which depends on its sizes; a launch leaves it ready for the next of the same.
        self._scratch = {
            (levels, sampled, trees): torch.zeros(
                core._device_verify_scratch(batch * most_nodes(shape, levels), batch, most if levels else 1),
                dtype=torch.int64,
                device=cuda,
            )
            for levels in range(shape.steps + 1)
            for sampled in (False, True)
            for trees, most in self._paths.items()
        }
        self._name_operands()
        self.features: FeatureRows | None = None
        if models.activations is not None:
            self._hold(models.activations)
        self.logits = a["given"]  # until the first launch
        self.live = self.rounds = 0
        self.waited = 0.0
        self.looping = self.overtaken = self.changing = self.cold = False
        self._graphs: dict[Variant, _Captured] = {}
        self._doubts: Counter[Variant] = Counter()  # captures during which somebody allocated memory
        self._runs: Counter[Variant] = Counter()  # without a graph, since scratch memory moved
        self._captured_at = self._epoch

    def _name_operands(self) -> None:
        """Arrays that launches take together, which stay where they are."""
        a, out, given, trees_in = self._a, self._out, self._in, self._trees_in
        self._state = LaneState(lens=given["lens"], roots=given["roots"], depths=given["depths"], done=given["done"])
        self._limits = LaneLimits(
            limits=given["limits"], caps=given["caps"], stops=given["stops"], stop_counts=given["stop_counts"]
        )
        self._round_found = RoundFound(
            offsets=out["offsets"], tokens=out["tokens"], new_lens=out["new_lens"], roots=out["roots"],
            faults=out["faults"], sound=out["sound"], live=given["live"],
        )  # fmt: skip
        self._accepts = {
            path: AcceptArrays(
                offsets=out["offsets"], paths=out["paths"][: self.batch * path],
                tokens=out["tokens"][: self.batch * path], rows=out["rows"][: self.batch * path], roots=out["roots"],
                new_lens=out["new_lens"], faults=out["faults"],
            )
            for path in {1, *self._paths.values()}
        }  # fmt: skip
        # Trees by whether the host made them, and by levels.
        self._to_verify_trees = {
            (host, levels): TreeArrays(
                tokens=made["tree_tokens"][: self.batch * most_nodes(self._shape, levels)],
                parents=made["tree_parents"][: self.batch * most_nodes(self._shape, levels)],
                offsets=made["tree_offsets"],
            )
            for host, made in ((False, out), (True, trees_in))
            for levels in range(1, self._shape.steps + 1)
        }
        self._root_trees = TreeArrays(tokens=given["roots"], parents=a["minus"], offsets=given["tree_offsets"])
        self._moves: MoveArrays | None = None
        if "move src" in a:
            self._moves = MoveArrays(src=a["move src"], dst=a["move dst"], offsets=a["move offsets"])

    def _hold(self, act: Activations) -> None:
        """Activations that pass from one model to the other."""
        b, shape, aux = self.batch, self._shape, self._m.target.aux_layers
        self.features = FeatureRows(aux, act.features[:, : b * shape.draft_tokens])
        nodes = [b * most_nodes(shape, levels) for levels in range(shape.steps + 1)]
        self._features = [FeatureRows(aux, act.features[:, :n]) for n in nodes]
        self._path_features = act.path_features[:, : b * max(self._paths.values())]
        self.root_logits, self._root_hidden = act.root_logits[:b], act.root_hidden[:b]
        self._step_hidden = act.step_hidden[: b * shape.topk]
        a, out = self._a, self._out
        self._beams = BeamArrays(
            scores=a["scores"], candidate_tokens=a["candidate tokens"], candidate_parents=a["candidate parents"],
            beams=a["beams"], tokens=a["beam tokens"], parents=a["beam parents"], ancestors=a["ancestors"],
            sound=out["sound"],
        )  # fmt: skip
        self._trees = BuiltTrees(
            offsets=out["tree_offsets"], tokens=out["tree_tokens"], depths=a["depths"], parents=out["tree_parents"],
            next_child=a["next_child"], next_sibling=a["next_sibling"], scores=out["tree_scores"].view(torch.float32),
        )  # fmt: skip
        if "own offsets" in a:
            names = ("offsets", "tokens", "depths", "parents", "next_child", "next_sibling", "scores")
            self._own_trees = own = BuiltTrees(**{name: a[f"own {name}"] for name in names})
            self._own_drafts = ScoredTrees(
                offsets=own.offsets, tokens=own.tokens, parents=own.parents, scores=own.scores
            )  # fmt: skip
            host = self._trees_in
            self._others_trees = ScoredTrees(
                offsets=host["tree_offsets"], tokens=host["tree_tokens"], parents=host["tree_parents"],
                scores=host["tree_scores"].view(torch.float32),
            )  # fmt: skip

    def _plan(self, name: str, nodes: int) -> DevicePlan:
        """The plan of a phase; of verification and of accepted paths, for so many nodes a request."""
        a = self._arrays(name, nodes)
        mask = a.mask if a.mask.numel() else None
        most = {"draft": self._shape.topk, "verify": nodes, "extend": nodes, "decode": 1}[name]
        table, page_size = self._m.table, self._m.geometry.page_size
        return DevicePlan(
            name, a.positions, a.out_slots, a.prefix_lens, a.qo_indptr, table, mask, a.rows, most, page_size
        )

    def _arrays(self, name: str, nodes: int) -> PlanArrays:
        """A phase's plan; of verification and of accepted paths, for so many nodes a request."""

        def of(array: str) -> torch.Tensor:
            return self._a.get(f"{name} {array}", self._no_mask)

        kept = self._plan_arrays.get((name, nodes))
        if kept is None:
            queries = self.batch * nodes if name in ("verify", "extend") else None
            kept = self._plan_arrays[name, nodes] = PlanArrays(
                rows=of("rows"), versions=of("versions"), qo_indptr=of("qo_indptr"), prefix_lens=of("prefix_lens"),
                positions=of("positions")[:queries], out_slots=of("out_slots")[:queries], mask=of("mask")[:queries],
            )  # fmt: skip
        return kept

    def _views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of a slot of the ring: what its round found, ``lens`` and ``depths`` as it used them, and its ``header``."""
        ring, batch = self._ring, self.batch
        found = self._found.of(slot[ring.found_at : ring.found_at + ring.words])
        for name, first in (("lens", ring.lens_at), ("depths", ring.depths_at)):
            found[name] = slot[first : first + batch]
        return {**found, "header": slot[: ring.lens_at]}

    # -- the host's side ----------------------------------------------------------------------------------------

    def give(
        self,
        rows: Sequence[int],
        lens: Sequence[int],
        tokens: Sequence[int],
        depths: Sequence[int],
        nodes: int,
        cap: int = 0,
        limits: Sequence[int] = (),
        stops: Sequence[Collection[int]] = (),
    ) -> None:
        """Say what the next launch is for.

        Args:
            rows, lens, tokens, depths: of each live request its row of the page table, its committed length, the root's
                token, and how deep it drafts, 0 for not at all.
            nodes: of a tree at most.
            cap: how deep those that draft do so in rounds behind this one.
            limits: of each request, the committed length with which it ends.
            stops: of each request, tokens with which it ends.
        """
        live, n = len(rows), self._numbers
        self.live = live
        caps = [cap if depth > 0 else 0 for depth in depths]
        fields = [
            ("rows", rows, -1), ("lens", lens, 0), ("roots", tokens, 0), ("depths", depths, 0), ("caps", caps, 0),
            ("limits", limits or [2**31 - 1] * live, 0),
        ]  # fmt: skip
        for name, values, dead in fields:
            n[name][:live], n[name][live:] = values, dead
        n["done"][:] = 0
        n["stop_counts"][:] = 0
        for i, some in enumerate(stops):
            few = list(some)[:_STOPS]  # of the others the host tells
            n["stop_counts"][i] = len(few)
            n["stops"][i * _STOPS : i * _STOPS + len(few)] = few
        n["nodes"][:live], n["nodes"][live:] = nodes, 0
        n["live"][0] = live
        n["tree_offsets"][: live + 1], n["tree_offsets"][live + 1 :] = range(live + 1), live
        roots = self._m.roots
        if roots is not None:
            drafting = [(row, depth > 0) for row, depth in zip(rows, depths, strict=True)]
            n["root_from"][:live] = [row if drafts else roots.nothing for row, drafts in drafting]
            n["root_to"][:live] = [row if drafts else -1 for row, drafts in drafting]
            n["root_from"][live:], n["root_to"][live:] = roots.nothing, -1

    def give_trees(self, trees: core.TreeBatch) -> None:
        """Say what the next launch verifies, of a variant whose trees the host makes: one for each live request."""
        host = self._host_trees.of(self._host_trees_host)
        sizes = trees.sizes
        total = sum(sizes)
        offsets = [*accumulate(sizes, initial=0)]
        host["tree_offsets"][: len(offsets)] = torch.tensor(offsets, dtype=torch.int32)
        host["tree_offsets"][len(offsets) :] = total
        for name, values, dead in (("tree_tokens", trees.tokens, 0), ("tree_parents", trees.parents, -1)):
            host[name][:total], host[name][total:] = from_dlpack(values), dead
        scores = host["tree_scores"].view(torch.float32)
        scores[:total], scores[total:] = from_dlpack(trees.scores), 0.0
        self._a["host trees"].copy_(self._host_trees_host, non_blocking=True)

    def sample_by(self, samplers: Sequence[core.Sampler], moving: bool) -> int | None:
        """Say what tokens are drawn by; the variant's ``edits``. ``moving``: a sampler has a grammar, and draws by
        another mask in each round."""
        if samplers == self._samplers:
            return self._sampled_by
        arrays = {name: from_dlpack(a) for name, a in core._device_samplers(list(samplers)).items()}
        edits = [arrays[name] for name in ("edit_tokens", "edit_biases", "edit_outputs")]
        words = arrays["rows"].view(torch.int32)
        used, live = edits[0].numel(), len(samplers)
        sampled, penalised = (bool(words[:, column].any()) for column in (_INV_TEMPERATURE, _PENALISED))
        room = None
        if used or sampled or penalised:
            self.given["sampling"][: live * 12] = words.reshape(-1)
            self.given["edit_begins"][:live] = arrays["edit_begins"]
            self.given["edit_counts"][:live] = arrays["edit_counts"]
            room = _LEAST_EDITS
            while room < used:
                room *= 2
            if room not in self._edits:
                self._edits_host[room] = torch.zeros(3 * room, dtype=torch.int32, pin_memory=True)
                self._edits[room] = there = torch.zeros(3 * room, dtype=torch.int32, device=self._cuda)
                tokens, biases, outputs = there.view(3, room)
                self._samplers_of[room] = SamplerArrays(
                    rows=self._sampling, edit_begins=self._in["edit_begins"], edit_counts=self._in["edit_counts"],
                    edit_tokens=tokens, edit_biases=biases.view(torch.float32), edit_outputs=outputs,
                )  # fmt: skip
            if used:
                host = self._edits_host[room]
                for i, part in enumerate(edits):
                    host[i * room : i * room + used] = part.view(torch.int32)
                self._edits[room].copy_(host, non_blocking=True)
        # Without penalties and biases nothing changes from round to round; biases alone are where they were.
        self.changing = bool(used or penalised)
        self._samplers, self._sampled_by = [] if penalised or moving else list(samplers), room
        return room

    def launch(self, variant: Variant, graphs: bool) -> int:
        """Upload what was `given`, and run the round behind whatever the current stream has. Returns its number."""
        self._a["given"].copy_(self._given_host, non_blocking=True)
        return self.again(variant, graphs)

    def again(self, variant: Variant, graphs: bool, rounds: int = 1) -> int:
        """Run a round that begins where the last one ends; a loop, up to so many. Returns the first one's number."""
        number = self.rounds
        self.rounds, self.looping, self.overtaken = number + 1, variant.loop, False
        if self._epoch != self._captured_at:  # scratch memory that graphs were captured with has moved
            self._graphs.clear()
            self._runs.clear()
            self._captured_at = self._epoch
        kept = self._graphs.get(variant)
        self.cold = graphs and kept is None
        if kept is None and graphs and (variant.loop or self._runs[variant] >= _COLD):
            kept = self._capture(variant)
        if kept is not None:
            if variant.loop:
                self._ring.clear_stop()  # nothing runs that was to be hastened
                self._a["control"][1:2].fill_(rounds)
            kept.graph.launch(self._m.dense.stream)
            self.logits = kept.logits
        else:
            # The first time loads kernels and grows memory, which a capture could not.
            self.looping = False
            self._run(replace(variant, loop=False), 0)
            self._runs[variant] += 1
        return number

    def loops(self, variant: Variant) -> bool:
        """Whether the variant can go on by itself: there is a graph of it over the present memory, and none of a loop
        of it has failed."""
        again = replace(variant, loop=True)
        return variant in self._graphs and self._epoch == self._captured_at and self._runs[again] >= 0

    @property
    def _epoch(self) -> int:
        """Counts moves of the scratch memory that a round's launches use: activations of both models, and what products
        and attention work in. Everything else of a round stays where it is as long as these lanes do."""
        m = self._m
        return m.dense.memory.moves + m.target.moves + (0 if m.head is None else m.head.moves)

    def _capture(self, variant: Variant) -> _Captured | None:
        """A graph of the variant's launches, which are not run; ``None`` where it cannot be captured."""
        m, epoch, stream = self._m, self._epoch, self._m.dense.stream
        # What the launches point at. Nothing of it points back here, or nobody would ever let go of the graph.
        keep = [self._arena, self._ring, m.table, m.cache, m.draft_cache, m.target, m.head, m.roots, m.activations,
                m.to_target, *self._scratch.values(), *self._edits.values()]  # fmt: skip
        allocated, collecting = _allocations(self._cuda), gc.isenabled()
        gc.disable()  # what it would destroy within the capture could break it
        try:
            if variant.loop:
                core._device_round_end_load(self._cuda.index)
                graph = core._Graph.loop(self._cuda.index, stream, lambda handle: self._run(variant, handle), keep)
            else:
                graph = core._Graph.capture(self._cuda.index, stream, lambda: self._run(variant, 0), keep)
            if self._epoch != epoch:
                raise RuntimeError("scratch memory moved within the capture")
            if _allocations(self._cuda) != allocated:
                # By another thread, perhaps: then not the next time.
                self._doubts[variant] += 1
                if self._doubts[variant] < _DOUBTS:
                    return None
                raise RuntimeError("torch allocated memory within the capture")
        except (RuntimeError, core.GraphCaptureError) as error:
            m.dense.forget()
            self._runs[variant] = -sys.maxsize  # from now on without
            warnings.warn(f"{variant} runs without a CUDA graph: {error}", RuntimeWarning, stacklevel=2)
            return None
        finally:
            if collecting:
                gc.enable()
        self._graphs[variant] = captured = _Captured(graph, self.logits)
        return captured

    def landed(self, number: int) -> dict[str, torch.Tensor]:
        """What a round found, for which this waits. Raises what kernels skipped, OutOfBoundsError, and StaleOutputError
        once later rounds have overwritten it."""
        started = time.perf_counter()
        self._ring.wait(number, self._m.dense.stream)
        self.waited += time.perf_counter() - started
        with suppress(core.NonFiniteError):  # `faults` and `sound` say of whom
            self._m.dense.faults.check()
        if self._poisoned is not None:
            self._arena.check_guards(self._m.dense.stream)
        slot = self._ring.slot(number)
        return self._slots[slot]

    def followed_by(self, number: int) -> int | None:
        """The round that the device began by itself behind this one, of a loop, for which this waits."""
        if not self.looping or number != self.rounds - 1:
            return None
        header = self.landed(number)["header"]
        if int(header[self._ring.continues]):
            self.rounds = number + 2
            return number + 1
        self.looping = False
        return None

    def ended(self, number: int) -> bool:
        """Whether a round of a loop, which has landed, was its last for another reason than that there were enough."""
        return bool(int(self.landed(number)["header"][self._ring.exit]) & ~_BUDGET)

    def holds(self, number: int) -> bool:
        """Whether device memory of rounds (features, root_logits) is still what this one left there."""
        return not self.looping and number == self.rounds - 1

    def holds_logits(self, number: int) -> bool:
        """Whether the logits are still this round's."""
        return self.holds(number) and not self.overtaken

    def hasten(self) -> None:
        """A loop under way ends with the round at hand."""
        if self.looping:
            self._ring.ask_stop()

    def settle(self) -> None:
        """Wait for everything that was launched, whatever it was, and forget what its kernels skipped."""
        self._ring.ask_stop()
        try:
            self._m.stream.synchronize()
        finally:
            self._ring.clear_stop()
        self.rounds, self.looping = int(self._a["control"][0]), False
        with suppress(core.SpecrsError):
            self._m.dense.faults.check()

    # -- the device's -------------------------------------------------------------------------------------------

    def _run(self, variant: Variant, handle: int) -> None:
        """A round. ``handle``: of the loop that it is the body of, else 0."""
        self._m.dense.forget()  # a sum that a broken pass owes would be in a graph for good, its memory would not
        if self._poisoned is not None:
            self._poison(self._poisoned)
        if variant.drafts:
            self._draft(variant.drafts, self._own_trees)
            self._unite()
        elif variant.levels and not variant.trees:
            self._draft(variant.levels, self._trees)
        tokens, plan, features = self._to_verify(variant)
        cache, target = self._m.cache, self._m.target
        self.logits = target.forward(tokens, cast(Plan, plan), cache, features if variant.follow else None)[0]
        self._accept(variant)
        if variant.levels:
            self._commit(variant)
            if variant.follow:
                self._extend(variant)
        self._end(handle)

    def _poison(self, names: list[str]) -> None:
        m = self._m
        self._arena.poison(m.dense.stream, names)
        if m.activations is not None:
            act = m.activations
            for tensor in (act.features, act.path_features, act.root_logits, act.root_hidden, act.step_hidden):
                tensor.fill_(math.nan)

    def _end(self, handle: int) -> None:
        """Make what the next round begins with, and tell the host."""
        core._device_round_end(
            self._ring, accepts=self._round_found, limits=self._limits, state=self._state, control=self._a["control"],
            found=self._a["found"], handle=handle, stream=self._m.dense.stream,
        )  # fmt: skip

    def _draft(self, levels: int, trees: BuiltTrees) -> None:
        m = self._m
        head, roots = m.head, m.roots
        assert head is not None and roots is not None and m.draft_cache is not None
        rows, stream = self._in["root_from"], m.dense.stream
        core._device_copy_rows(roots.logits, rows, self.root_logits, None, None, stream)
        core._device_copy_rows(roots.hidden, rows, self._root_hidden, None, None, stream)
        self._select(0, self.root_logits)
        hidden, plan, a = self._root_hidden, self._plans["draft"], self._a
        ancestors = a["ancestors"] if m.config.branches_attend == "ancestors" else None
        for step in range(levels - 1):
            self._plan_step("draft", step, ancestors=ancestors)
            core._device_gather_rows(hidden, a["beam parents"], 0, None, self._step_hidden, m.dense.stream)
            logits, hidden = head.step(a["beam tokens"], self._step_hidden, cast(Plan, plan), m.draft_cache)
            self._select(step + 1, logits)
        given = self._in
        core._device_tree_build(
            shape=self._shape, beams=self._beams, roots=given["roots"], max_depths=given["depths"],
            max_nodes=given["nodes"], min_score=None, live=given["live"], trees=trees, masks=None,
            stream=m.dense.stream,
        )  # fmt: skip

    def _unite(self) -> None:
        """Make one tree of what the head has drafted and of the host's, for each lane."""
        given = self._in
        core._device_tree_unite(
            shape=self._shape, own=self._own_drafts, other=self._others_trees, roots=given["roots"],
            max_nodes=given["nodes"], live=given["live"], trees=self._trees, masks=None,
            origins=self._out["tree_origins"], stream=self._m.dense.stream,
        )  # fmt: skip

    def _verified(self, variant: Variant) -> TreeArrays:
        """The trees that are verified: roots alone, the host's, or those that the device has made."""
        if not variant.levels:
            return self._root_trees
        return self._to_verify_trees[variant.trees and not variant.drafts, variant.levels]

    def _select(self, step: int, logits: torch.Tensor) -> None:
        core._device_draft_select(
            step=step, logits=logits, to_target=self._m.to_target, vocab=self._m.target.config.vocab_size,
            live=self._in["live"], shape=self._shape, beams=self._beams, scratch=self._a["select"],
            stream=self._m.dense.stream,
        )  # fmt: skip

    def _to_verify(self, variant: Variant) -> tuple[torch.Tensor, DevicePlan, FeatureRows | None]:
        levels, trees = variant.levels, self._verified(variant)
        if not levels:
            self._plan_step("decode")
            return self._in["roots"], self._plans["decode"], self._features[0] if variant.follow else None
        nodes = most_nodes(self._shape, levels)
        self._plan_step("verify", offsets=trees.offsets, parents=trees.parents, nodes=nodes)
        features = self._features[levels] if variant.follow else None
        return trees.tokens, self._verifies[levels], features

    def _plan_step(
        self,
        name: Any,
        number: int | None = None,
        *,
        offsets: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        ancestors: torch.Tensor | None = None,
        nodes: int = 0,
    ) -> None:
        given, m = self._in, self._m
        core._device_plan(
            geometry=m.geometry, phase=name, draft_step=number, table=m.table, num_pages=m.num_pages,
            rows=given["rows"], versions=self._a["versions"], lens=given["lens"], live=given["live"], offsets=offsets,
            parents=parents, ancestors=ancestors, plan=self._arrays(name, nodes), format="native", masks="both",
            arrays={}, stream=m.dense.stream,
        )  # fmt: skip

    def _accept(self, variant: Variant) -> None:
        given, stream, nodes = self._in, self._m.dense.stream, most_nodes(self._shape, variant.levels)
        scratch = self._scratch[variant.levels, variant.edits is not None, variant.trees]
        path = self._paths[variant.trees] if variant.levels else 1
        trees, accepts, full = self._verified(variant), self._accepts[path], self.batch * nodes <= self._processors
        if variant.edits is None:
            core._device_verify_greedy(
                logits=self.logits, trees=trees, lens=given["lens"], live=given["live"], max_nodes=nodes,
                max_path=path, accepts=accepts, scratch=scratch, full=full, stream=stream,
            )  # fmt: skip
            return
        core._device_sample_verify(
            logits=self.logits, trees=trees, lens=given["lens"], live=given["live"], max_nodes=nodes, max_path=path,
            samplers=self._samplers_of[variant.edits], accepts=accepts, scratch=scratch, full=full, stream=stream,
        )  # fmt: skip

    def _commit(self, variant: Variant) -> None:
        """Make the KV of accepted paths the end of each prefix."""
        m, out, given = self._m, self._out, self._in
        if self._shape.topk == 1 and not (variant.trees and m.config.sources):
            return  # a chain is where it belongs
        moves = self._moves
        core._device_kv_commit(
            offsets=out["offsets"], paths=out["paths"], new_lens=out["new_lens"], table=m.table, rows=given["rows"],
            live=given["live"], num_pages=m.num_pages, page_size=m.geometry.page_size,
            max_nodes=self._shape.draft_tokens, moves=moves, stream=m.dense.stream,
        )  # fmt: skip
        if moves is not None:
            core._device_kv_move(m.cache.tensor, moves.src, moves.dst, moves.offsets, m.dense.stream)

    def _extend(self, variant: Variant) -> None:
        """The head's pass over the accepted path, up to the next root."""
        m, out = self._m, self._out
        assert m.head is not None and m.roots is not None and m.draft_cache is not None and self.features is not None
        path = self._paths[variant.trees]
        nodes, plan = self.batch * path, cast(Plan, self._extends[variant.trees])
        self._plan_step("extend", offsets=out["offsets"], nodes=path)
        path_features = self._path_features[:, :nodes]
        for layer, features in zip(self.features.layers, path_features, strict=True):
            core._device_gather_rows(layer, out["rows"][:nodes], 0, None, features, m.dense.stream)
        logits, hidden = m.head.extend(
            out["tokens"][:nodes], path_features.unbind(0), plan, m.draft_cache, out["offsets"][1:], -1
        )
        rows, stream = self._in["root_to"], m.dense.stream
        core._device_copy_rows(logits, None, m.roots.logits, rows, None, stream)
        core._device_copy_rows(hidden, None, m.roots.hidden, rows, None, stream)


def _poisons() -> bool:
    return os.environ.get("SPECRS_POISON", "0") not in ("", "0")


def _allocations(cuda: torch.device) -> int:
    """Blocks that torch has handed out so far."""
    return int(torch.cuda.memory_stats(cuda)["allocation.all.allocated"])


def longest_path(config: EngineConfig, geometry: Geometry, trees: bool) -> int:
    """Nodes of an accepted path at most, of trees that the device drafts, or that the host makes."""
    levels = config.head_shape.steps
    return min(max(levels, config.deepest if trees else 0) + 1, geometry.max_context_len)


def buckets(most: int) -> list[int]:
    """Batch sizes that rounds are made for, the largest last: powers of two."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]
