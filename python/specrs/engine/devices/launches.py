"""The launches of a GPU's round, from the roots' logits to the head's pass over the accepted tokens.

    select, (plan, head, select) ..., build trees | plan, target, accept, commit | plan, head

Trees of the host replace the drafts, or are united with the trees that the head drafts. Lengths, beams, trees and
accepted paths stay on the device. Kernels read them there, and the end of a round writes the values that the next round
begins with. So the same launches over the same memory can run directly, from a CUDA graph, or from that graph in a
loop. All three give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from specrs import _specrs as core
from specrs._specrs import Plan
from specrs.backends.base import Phase
from specrs.engine.devices.block_trees import BlockLaunches
from specrs.engine.devices.given import Given
from specrs.engine.devices.memory import BucketMemory, Models, hosts_trees
from specrs.engine.drafting.levels import most_nodes
from specrs.models.cuda import DevicePlan
from specrs.models.features import FeatureRows
from specrs.operands import (
    AcceptArrays,
    BeamArrays,
    BuiltTrees,
    MoveArrays,
    PlanArrays,
    RoundFound,
    ScoredTrees,
    SeatLimits,
    SeatState,
    TreeArrays,
)


@dataclass(frozen=True)
class Variant:
    """A kind of round. Each variant has a CUDA graph of its own.

    Attributes:
        levels: levels of the trees; 0 for a round of roots alone.
        follow: True if the head runs over the accepted tokens, by the features of the target's pass. A head of blocks
            does in rounds of roots alone too.
        edits: room for sampling's edits of tokens; ``None`` if all requests are greedy and have no edits.
        loop: True if the device repeats the round by itself.
        trees: True if the host makes the trees, with at most as many nodes as trees of ``levels`` levels have.
        drafts: levels that the device drafts and unites with the host's trees; 0 if it unites nothing.
    """

    levels: int
    follow: bool
    edits: int | None
    loop: bool = False
    trees: bool = False
    drafts: int = 0


class Launches:
    """The launches of a bucket's rounds.

    Attributes:
        root_logits: the head's logits with which the last round's draft steps began, a row for each seat; ``None`` of
            a head that drafts all levels in one pass.
    """

    def __init__(self, models: Models, memory: BucketMemory, given: Given) -> None:
        self._m, self._memory, self._given, self.batch = models, memory, given, memory.batch
        self._shape, cuda = models.geometry.shape, models.dense.placement.device
        # If each row of logits gets a processor of its own, verification looks at all rows at once.
        self._processors = torch.cuda.get_device_properties(cuda).multi_processor_count
        self._plan_arrays: dict[tuple[str, int], PlanArrays] = {}
        phases: tuple[Phase, ...] = ("draft", "decode")
        self._plans = {name: self._plan(name, 0) for name in phases}
        self._extends = {most: self._plan("extend", most) for most in {1, *memory.paths.values()}}
        levels = range(1, self._shape.steps + 1)
        self._verifies = {n: self._plan("verify", most_nodes(self._shape, n)) for n in levels}
        # Verification of each kind counts in scratch memory of its own, because the layout depends on its sizes. A
        # launch leaves the memory ready for the next launch of the same kind.
        self._scratch = {
            (levels, sampled, trees): torch.zeros(
                core._device_verify_scratch(
                    self.batch * most_nodes(self._shape, levels), self.batch, most if levels else 1
                ),
                dtype=torch.int64,
                device=cuda,
            )
            for levels in range(self._shape.steps + 1)
            for sampled in (False, True)
            for trees, most in memory.paths.items()
        }
        self.root_logits: torch.Tensor | None = None
        self._blocks = None if models.blocks is None else BlockLaunches(models, memory, models.blocks)
        self._name_operands()
        if models.activations is not None:
            self._name_drafts()

    def kept(self) -> list[object]:
        """Return the objects whose memory the launches use.

        None of them may refer to this object, because a graph keeps them and would then never be let go of.
        """
        m, memory = self._m, self._memory
        return [memory.arena, memory.ring, m.table, m.cache, m.draft_cache, m.target, m.head, m.roots, m.activations,
                m.blocks, m.to_target, *m.format.kept(), *self._scratch.values(),
                *self._given.edits.values()]  # fmt: skip

    # -- operands that stay where they are ------------------------------------------------------------------------

    def _name_operands(self) -> None:
        """Group the arrays into the operands that launches take."""
        a, out, given, batch = self._memory.arrays, self._memory.found, self._memory.given, self.batch
        self._state = SeatState(lens=given["lens"], roots=given["roots"], depths=given["depths"], done=given["done"])
        self._limits = SeatLimits(
            limits=given["limits"], caps=given["caps"], stops=given["stops"], stop_counts=given["stop_counts"]
        )
        self._round_found = RoundFound(
            offsets=out["offsets"], tokens=out["tokens"], new_lens=out["new_lens"], roots=out["roots"],
            faults=out["faults"], sound=out["sound"], live=given["live"],
        )  # fmt: skip
        self._accepts = {
            path: AcceptArrays(
                offsets=out["offsets"], paths=out["paths"][: batch * path], tokens=out["tokens"][: batch * path],
                rows=out["rows"][: batch * path], roots=out["roots"], new_lens=out["new_lens"], faults=out["faults"],
            )
            for path in {1, *self._memory.paths.values()}
        }  # fmt: skip
        # The keys are: True if the host made the trees, and the trees' levels.
        self._to_verify_trees = {
            (host, levels): TreeArrays(
                tokens=made["tree_tokens"][: batch * most_nodes(self._shape, levels)],
                parents=made["tree_parents"][: batch * most_nodes(self._shape, levels)],
                offsets=made["tree_offsets"],
            )
            for host, made in ((False, out), (True, self._memory.host_trees))
            for levels in range(1, self._shape.steps + 1)
        }
        self._root_trees = TreeArrays(tokens=given["roots"], parents=a["minus"], offsets=given["tree_offsets"])
        self._moves, self._tails = (
            MoveArrays(src=a[f"{name} src"], dst=a[f"{name} dst"], offsets=a[f"{name} offsets"])
            if f"{name} src" in a
            else None
            for name in ("move", "tail")
        )

    def _name_drafts(self) -> None:
        """Group the arrays that one model passes to the other, and the arrays that the device drafts with."""
        act, b, shape, aux = self._m.activations, self.batch, self._shape, self._m.target.aux_layers
        assert act is not None
        nodes = {levels: b * most_nodes(shape, levels) for levels in range(shape.steps + 1)}
        self._features = {levels: FeatureRows(aux, act.features[:, :n]) for levels, n in nodes.items()}
        self._path_features = act.path_features[:, : b * max(self._memory.paths.values())]
        if act.roots is None or self._blocks is not None:
            return
        self.root_logits, self._root_hidden = act.roots.logits[:b], act.roots.hidden[:b]
        self._step_hidden = act.roots.step_hidden[: b * shape.topk]
        a, out = self._memory.arrays, self._memory.found
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
            host = self._memory.host_trees
            self._others_trees = ScoredTrees(
                offsets=host["tree_offsets"], tokens=host["tree_tokens"], parents=host["tree_parents"],
                scores=host["tree_scores"].view(torch.float32),
            )  # fmt: skip

    def _plan(self, name: Phase, nodes: int) -> DevicePlan:
        """Return the plan of a phase. Plans of the phases verify and extend are for ``nodes`` nodes a request."""
        a = self._arrays(name, nodes)
        mask = a.mask if a.mask.numel() else None
        most = {"draft": self._shape.topk, "verify": nodes, "extend": nodes, "decode": 1}[name]
        table, page_size = self._m.table, self._m.geometry.page_size
        # The head may have begun in the midst of a request; the target never does.
        first_pages = self._memory.given["first_pages"] if name in ("draft", "extend") else None
        return DevicePlan(
            name, a.positions, a.out_slots, a.prefix_lens, a.qo_indptr, table, mask, a.rows, most, page_size,
            first_pages, self._m.format.of(name), self._m.format.expand_page_size(name),
            most_keys=self._m.format.most_keys,
        )  # fmt: skip

    def _arrays(self, name: str, nodes: int) -> PlanArrays:
        """Return the arrays of a phase's plan, for ``nodes`` nodes a request in the phases verify and extend."""
        kept = self._plan_arrays.get((name, nodes))
        if kept is not None:
            return kept
        a, queries = self._memory.arrays, self.batch * nodes if name in ("verify", "extend") else None
        mask = a.get(f"{name} mask", a["versions"][:0])
        kept = self._plan_arrays[name, nodes] = PlanArrays(
            rows=a[f"{name} rows"], versions=a[f"{name} versions"], qo_indptr=a[f"{name} qo_indptr"],
            prefix_lens=a[f"{name} prefix_lens"], positions=a[f"{name} positions"][:queries],
            out_slots=a[f"{name} out_slots"][:queries], mask=mask[:queries],
        )  # fmt: skip
        return kept

    # -- a round --------------------------------------------------------------------------------------------------

    def run(self, variant: Variant, handle: int) -> torch.Tensor:
        """Launch a round. Returns the memory of its logits, a row for each node.

        Args:
            handle: the handle of the loop that has the round as its body; 0 without a loop.
        """
        self._m.dense.forget()  # else a graph would keep a sum that a failed pass left undone, but not its memory
        self._memory.poison(self._m)
        if variant.drafts:
            self._draft(variant.drafts, self._own_trees)
            self._unite()
        elif variant.levels and not variant.trees and self._blocks is not None:
            self._blocks.run(variant.levels, heated=variant.edits is not None)
        elif variant.levels and not variant.trees:
            self._draft(variant.levels, self._trees)
        tokens, plan, features = self._to_verify(variant)
        cache, target = self._m.cache, self._m.target
        logits = target.forward(tokens, cast(Plan, plan), cache, features)[0]
        self._accept(variant, logits)
        if variant.levels:
            self._commit(variant)
        if variant.follow:
            self._extend(variant)
        self._end(handle)
        return logits

    def _end(self, handle: int) -> None:
        """Write the values that the next round begins with, and publish the results to the host."""
        a = self._memory.arrays
        core._device_round_end(
            self._memory.ring, accepts=self._round_found, limits=self._limits, state=self._state, control=a["control"],
            found=a["found"], handle=handle, stream=self._m.dense.stream,
        )  # fmt: skip

    def _draft(self, levels: int, trees: BuiltTrees) -> None:
        m, given, a = self._m, self._memory.given, self._memory.arrays
        head, roots = m.head, m.roots
        assert head is not None and head.passes == "steps" and roots is not None and m.draft_cache is not None
        assert self.root_logits is not None
        rows, stream = given["root_from"], m.dense.stream
        core._device_copy_rows(roots.logits, rows, self.root_logits, None, None, stream)
        core._device_copy_rows(roots.hidden, rows, self._root_hidden, None, None, stream)
        self._select(0, self.root_logits)
        if (tails := self._tails) is not None and levels > 1:
            core._device_tail_copies(
                geometry=m.geometry, table=m.table, num_pages=m.num_pages, rows=given["rows"], lens=given["lens"],
                live=given["live"], moves=tails, stream=stream,
            )  # fmt: skip
            core._device_kv_move(m.draft_cache.tensor, tails.src, tails.dst, tails.offsets, stream)
        hidden, plan = self._root_hidden, self._plans["draft"]
        ancestors = a["ancestors"] if m.config.branches_attend == "ancestors" else None
        for step in range(levels - 1):
            self._plan_step("draft", step, ancestors=ancestors)
            core._device_gather_rows(hidden, a["beam parents"], 0, None, self._step_hidden, m.dense.stream)
            logits, hidden = head.step(a["beam tokens"], self._step_hidden, cast(Plan, plan), m.draft_cache)
            self._select(step + 1, logits)
        core._device_tree_build(
            shape=self._shape, beams=self._beams, roots=given["roots"], max_depths=given["depths"],
            max_nodes=given["nodes"], min_score=None, live=given["live"], trees=trees, masks=None,
            stream=m.dense.stream,
        )  # fmt: skip

    def _unite(self) -> None:
        """Unite the head's tree and the host's tree of each seat."""
        given = self._memory.given
        core._device_tree_unite(
            shape=self._shape, own=self._own_drafts, other=self._others_trees, roots=given["roots"],
            max_nodes=given["nodes"], live=given["live"], trees=self._trees, masks=None,
            origins=self._memory.found["tree_origins"], stream=self._m.dense.stream,
        )  # fmt: skip

    def _verified(self, variant: Variant) -> TreeArrays:
        """Return the trees to verify: roots alone, the host's trees, or trees that the device has made."""
        if not variant.levels:
            return self._root_trees
        return self._to_verify_trees[variant.trees and not variant.drafts, variant.levels]

    def _select(self, step: int, logits: torch.Tensor) -> None:
        core._device_draft_select(
            step=step, logits=logits, to_target=self._m.to_target, vocab=self._m.target.config.vocab_size,
            live=self._memory.given["live"], shape=self._shape, beams=self._beams,
            scratch=self._memory.arrays["select"], stream=self._m.dense.stream,
        )  # fmt: skip

    def _to_verify(self, variant: Variant) -> tuple[torch.Tensor, DevicePlan, FeatureRows | None]:
        levels, trees = variant.levels, self._verified(variant)
        features = self._features[levels] if variant.follow else None
        if not levels:
            self._plan_step("decode")
            return self._memory.given["roots"], self._plans["decode"], features
        nodes = most_nodes(self._shape, levels)
        self._plan_step("verify", offsets=trees.offsets, parents=trees.parents, nodes=nodes)
        return trees.tokens, self._verifies[levels], features

    def _plan_step(
        self,
        name: Phase,
        number: int | None = None,
        *,
        offsets: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        ancestors: torch.Tensor | None = None,
        nodes: int = 0,
    ) -> None:
        given, m = self._memory.given, self._m
        m.format.plan(
            m.dense.stream, name, draft_step=number, table=m.table, num_pages=m.num_pages, rows=given["rows"],
            versions=self._memory.arrays["versions"], lens=given["lens"], live=given["live"], offsets=offsets,
            parents=parents, ancestors=ancestors, plan=self._arrays(name, nodes),
        )  # fmt: skip

    def _accept(self, variant: Variant, logits: torch.Tensor) -> None:
        given, stream, nodes = self._memory.given, self._m.dense.stream, most_nodes(self._shape, variant.levels)
        scratch = self._scratch[variant.levels, variant.edits is not None, variant.trees]
        path = self._path(variant)
        trees, accepts = self._verified(variant), self._accepts[path]
        if variant.edits is None:
            core._device_verify_greedy(
                logits=logits, trees=trees, lens=given["lens"], live=given["live"], max_nodes=nodes,
                max_path=path, accepts=accepts, scratch=scratch, full=self.batch * nodes <= self._processors,
                stream=stream,
            )  # fmt: skip
            return
        core._device_sample_verify(
            logits=logits, trees=trees, lens=given["lens"], live=given["live"], max_nodes=nodes, max_path=path,
            samplers=self._given.samplers[variant.edits], accepts=accepts, scratch=scratch, stream=stream,
        )  # fmt: skip

    def _path(self, variant: Variant) -> int:
        """Return the most nodes of an accepted path."""
        return self._memory.paths[variant.trees] if variant.levels else 1

    def _commit(self, variant: Variant) -> None:
        """Move the KV of each accepted path to the end of its prefix."""
        m, out, given = self._m, self._memory.found, self._memory.given
        chains = self._blocks is None and not (variant.trees and hosts_trees(m.config))
        if self._shape.topk == 1 and chains:
            return  # a chain is already in its place
        moves = self._moves
        core._device_kv_commit(
            offsets=out["offsets"], paths=out["paths"], new_lens=out["new_lens"], table=m.table, rows=given["rows"],
            live=given["live"], num_pages=m.num_pages, page_size=m.geometry.page_size,
            max_nodes=self._shape.draft_tokens, moves=moves, stream=m.dense.stream,
        )  # fmt: skip
        if moves is not None:
            core._device_kv_move(m.cache.tensor, moves.src, moves.dst, moves.offsets, m.dense.stream)

    def _extend(self, variant: Variant) -> None:
        """Run the head over the accepted paths, up to the next roots."""
        m, out, path = self._m, self._memory.found, self._path(variant)
        assert m.head is not None and m.draft_cache is not None
        nodes, plan = self.batch * path, cast(Plan, self._extends[path])
        self._plan_step("extend", offsets=out["offsets"], nodes=path)
        path_features = self._path_features[:, :nodes]
        for layer, features in zip(self._features[variant.levels].layers, path_features, strict=True):
            core._device_gather_rows(layer, out["rows"][:nodes], 0, None, features, m.dense.stream)
        if m.head.passes == "block":
            m.head.write(path_features.unbind(0), plan, m.draft_cache)
            return
        assert m.roots is not None
        logits, hidden = m.head.extend(
            out["tokens"][:nodes], path_features.unbind(0), plan, m.draft_cache, out["offsets"][1:], -1
        )
        rows, stream = self._memory.given["root_to"], m.dense.stream
        core._device_copy_rows(logits, None, m.roots.logits, rows, None, stream)
        core._device_copy_rows(hidden, None, m.roots.hidden, rows, None, stream)
