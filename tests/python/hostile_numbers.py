"""Calls every binding with hostile numbers under an address-space limit: one good call each, one argument changed.

Run as a program by `bindings/test_limits.py`. Prints a JSON line a call: name, parameter, value, outcome, seconds.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from specrs import _specrs as core

CORPUS = Path(tempfile.gettempdir()) / f"specrs-hostile-{os.getpid()}.corpus"
VALUES = [-1, 2**16, 2**20, 2**31 - 1, 2**32, 2**40, 2**63 - 1, 2**64, -(2**63), 2**200]
ROOM = 2**30  # bytes of address space beyond what the imports took
SHAPE = core.TreeShape(2, 3, 5)
TREES = ([[-1, 0]], [[5, 6]])
LETTERS = [b"a", b"b", b"c", b"d", b"ab", b"", b"cd", b"<end>"]
DRAFTS = {"parents": [-1, 0], "tokens": [5, 6], "probs": [0.9, 0.8], "buckets": [3, 0]}


class World:
    """Two sequences of 5 and 3 committed tokens under a lease, and what the calls take."""

    def __init__(self, format: Any = "flash_attention", page_size: int = 4) -> None:
        self.geometry = core.Geometry(2, 64, page_size, SHAPE)
        self.pool = core.Pool(64, page_size, 4, self.geometry.row_pages)
        self.planner = core.Planner(self.geometry, self.pool, format)
        self.planner.set_debug(False)
        self.seqs = [self.pool.create(), self.pool.create()]
        self.lens = [5, 3]
        self.pool.reserve(list(zip(self.seqs, self.lens, strict=True))).commit(self.lens)
        self.lease = self.pool.reserve([(s, 24) for s in self.seqs])
        self.trees = core.TreeBatch.from_parents([[-1, 0], [-1, 0]], [[5, 6], [1, 2]])
        self.samplers = [core.Sampler(8, []), core.Sampler(8, [])]

    def beams(self) -> core.DraftBeams:
        beams = core.DraftBeams(2, SHAPE, None, 8)
        beams.start(zeros(2, 8))
        return beams

    def accepts(self) -> core.Accepts:
        return core.verify(self.trees, zeros(4, 8), self.samplers, self.lens)

    def cache(self) -> core.KvCache:
        return core.KvCache(zeros(1, 2, 64 * 4, 1, 8), self.geometry.page_size)


WORLDS: list[World] = []
"""Worlds of the calls at hand: a lease that nobody holds is rolled back."""


PASSES = ([1, 4], [1.0, 2.0], 1.0)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, dtype=np.float32)


def merge(root: int = 1, vocab: int = 8, nodes: int = 5, depth: int = 4, **more: Any) -> core.MergedDrafts:
    return core.merge_drafts(root, vocab, [SimpleNamespace(**DRAFTS)], nodes, depth, **more)


@functools.cache
def corpus() -> core.DraftCorpus:
    atexit.register(CORPUS.unlink, missing_ok=True)
    core.DraftCorpus.build(CORPUS, 8, np.arange(6, dtype=np.int32), [2, 6])
    return core.DraftCorpus(CORPUS)


@functools.cache
def letters() -> core.GrammarVocabulary:
    return core.GrammarVocabulary(LETTERS, [7])


def tracker() -> core.GrammarTracker:
    return letters().compile("regex", ["[ab]+"]).start([7])


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """A good call of each function of `_specrs.pyi` that takes a number, made afresh: what it writes is thrown away."""
    w, native = World(), World("native")
    plan = w.planner.draft(w.seqs, w.lens, 0, None, "lane")
    elsewhere = (plan.rows, plan.versions, plan.qo_indptr, plan.prefix_lens, plan.positions, plan.out_slots, plan.mask)
    region, sampler, buffers = w.geometry.draft_region(5), w.samplers[0], core.Planner.buffers
    one_page = World("native", page_size=1)
    WORLDS[:] = [w, native, one_page]
    alone = {"seqs": w.seqs, "lens": w.lens}
    linear = core.PackedLinear(zeros(8, 8))
    gated = core.PackedLinear(zeros(16, 8), gated=True)
    plan = native.planner.decode(native.seqs, native.lens)
    of_qkv, of_o = core.PackedLinear(zeros(32, 8)), core.PackedLinear(zeros(8, 16))
    rope = core.RopeTable(zeros(64, 4), zeros(64, 4))
    of_tail: dict[str, Any] = {"o": of_o, "gate_up": gated, "down": linear, "norm": zeros(8), "eps": 1e-5, "rope": rope}
    of_tail |= {"num_heads": 2, "scale": 1.0, "q_norm": zeros(8), "k_norm": zeros(8), "cap": 2.0}
    tail = core.LayerTail(**of_tail)
    layers = [(of_qkv, zeros(8), 1e-5, tail)]
    attend: dict[str, Any] = {"cache": native.cache(), "layer": 0, "plan": plan}
    queries = {"q": zeros(2, 2, 8), "out": zeros(2, 2, 8), "scale": 1.0}
    lender = native.pool.create()
    cached = native.pool.create()
    native.pool.reserve([(cached, 4)]).commit([4])
    raw, free = native.pool.alloc_pages(1), native.pool.alloc_pages(1)
    native.pool.free_pages(free)
    array = plan.rows
    return {
        "Array.__dlpack__": (array.__dlpack__, {"max_version": (1, 0), "dl_device": (1, 0)}),
        "TreeShape.__new__": (core.TreeShape, {"topk": 2, "steps": 3, "draft_tokens": 5}),
        "TreeShape.clamp_depth": (SHAPE.clamp_depth, {"depth": 2}),
        "Geometry.__new__": (
            core.Geometry,
            {"max_batch": 2, "max_context_len": 64, "page_size": 4, "shape": SHAPE, "reverts": [27338]},
        ),
        "Geometry.alloc_target": (w.geometry.alloc_target, {"committed": 5, "allocated": 8}),
        "Geometry.draft_region": (w.geometry.draft_region, {"committed": 5}),
        "DraftRegion.pos": (region.pos, {"branch": 0, "step": 0}),
        "DraftRegion.hole": (region.hole, {"branch": 0}),
        "Tree.from_parents": (core.Tree.from_parents, {"parents": [-1, 0]}),
        "Pool.__new__": (core.Pool, {"num_pages": 9, "page_size": 4, "max_seqs": 3, "row_pages": 6}),
        "Pool.fork": (w.pool.fork, {"seq": w.seqs[0], "length": 4}),
        "Pool.reserve": (native.pool.reserve, {"wants": [(lender, 8)]}),
        "Pool.cache_lookup": (w.pool.cache_lookup, {"tokens": [1, 2, 3, 4], "max": 4, "salt": 5}),
        "Pool.cache_insert": (
            native.pool.cache_insert,
            {"seq": cached, "tokens": [1, 2, 3, 4], "drafted": 4, "salt": 0},
        ),
        "Pool.alloc_pages": (w.pool.alloc_pages, {"n": 1}),
        "Pool.free_pages": (native.pool.free_pages, {"pages": raw}),
        "Pool.take_next": (native.pool.take_next, {"pages": free}),
        "Lease.commit": (w.lease.commit, {"committed": [6, 4]}),
        "Lease.renew": (w.lease.renew, {"positions": [12, 12]}),
        "Lease.advance": (native.lease.advance, {"committed": [5, 3]}),
        "Lease.remap": (one_page.lease.remap, {"seq": one_page.seqs[0], "first": 5, "order": [1, 0]}),
        "Moves.__new__": (core.Moves, {"src": [1, 2], "dst": [2, 1], "num_slots": 8, "scratch": 5}),
        "Moves.claim": (core.Moves([1, 2], [2, 1], 8, 5).claim, {"address": 4096, "nbytes": 64}),
        "DeviceLens.__new__": (
            lambda batch, at_most: w.planner.sizes("verify", core.DeviceLens(batch, at_most)),
            {"batch": 2, "at_most": 64},
        ),
        "Planner.extend": (w.planner.extend, {"seqs": w.seqs, "starts": w.lens, "counts": [1, 2], "pad": (2, 4)}),
        "Plan.attending_from": (plan.attending_from, {"starts": [0, 0]}),
        "Planner.decode": (w.planner.decode, {**alone, "pad": (2, 2)}),
        "Planner.draft": (w.planner.draft, {**alone, "step": 0, "beams": None, "mode": "lane", "pad": (2, 4)}),
        "Planner.verify": (w.planner.verify, {**alone, "trees": w.trees, "pad": (2, 6)}),
        "Planner.audit": (lambda **k: w.planner.audit("draft", elsewhere, **k), {"step": 0}),
        "Planner.tail_copies": (w.planner.tail_copies, alone),
        "Planner.commit": (w.planner.commit, {"lease": w.lease, **alone, "accepts": w.accepts()}),
        "Planner.buffers": (lambda **k: buffers(w.planner, "draft", **k), {"step": 0, "max_batch": 2}),
        "Planner.capacities": (lambda **k: w.planner.capacities("draft", **k), {"step": 0, "max_batch": 2}),
        "Planner.sizes": (lambda **k: w.planner.sizes("draft", **k), {"lens": w.lens, "step": 0}),
        "KvCache.__new__": (core.KvCache, {"tensor": zeros(1, 2, 8, 1, 8), "page_size": 4}),
        "PackedLinear.forward": (
            linear.forward,
            {"x": zeros(2, 8), "out": zeros(2, 8), "norm": zeros(8), "eps": 1e-5},
        ),
        "PackedLinear.forward_swiglu": (
            gated.forward_swiglu,
            {"x": zeros(2, 8), "out": zeros(2, 8), "norm": zeros(8), "eps": 1e-5},
        ),
        "LayerTail.__new__": (core.LayerTail, of_tail),
        "LayerTail.forward": (
            tail.forward,
            {**attend, "qkv": zeros(2, 32), "residual": zeros(2, 8), "out": zeros(2, 8)},
        ),
        "DecoderLayers.__new__": (core.DecoderLayers, {"layers": layers}),
        "DecoderLayers.forward": (
            core.DecoderLayers(layers).forward,
            {"cache": native.cache(), "first": 0, "end": 1, "plan": plan, "x": zeros(2, 8), "out": zeros(2, 8)},
        ),
        "Eagle3Layer.__new__": (
            core.Eagle3Layer,
            {"feature_norm": zeros(8), "of_feature": of_qkv, "embedding_norm": zeros(8), "of_embedding": of_qkv}
            | {"tail": tail, "norm": zeros(8), "lm_head": linear, "eps": 1e-5},
        ),
        "DraftBeams.__new__": (
            core.DraftBeams,
            {"max_batch": 2, "shape": core.TreeShape(64, 64, 5), "d2t": None, "vocab": 64},
        ),
        "DraftBeams.finish": (
            w.beams().finish,
            {"roots": [1, 2], "max_depths": [1, 1], "max_nodes": [3, 3], "min_score": -5.0},
        ),
        "TreeBatch.from_parents": (
            core.TreeBatch.from_parents,
            {"parents": TREES[0], "tokens": TREES[1], "scores": [[0.0, -1.0]]},
        ),
        "merge_drafts": (
            merge,
            {"root": 1, "vocab": 8, "nodes": 5, "depth": 4, "off_spine": 8, "min_score": -5.0},
        ),
        "MergedDrafts.pruned": (merge().pruned, {"nodes": 2, "depth": 1, "off_spine": 8, "min_score": -5.0}),
        "MergedDrafts.settle": (
            lambda path: merge().settle(path, core.DraftCalibration(1)),
            {"path": [0, 1]},
        ),
        "DraftCalibration.__new__": (core.DraftCalibration, {"sources": 2}),
        "DraftCalibration.account": (core.DraftCalibration(2).account, {"source": 1}),
        "DraftCalibration.corrected": (
            core.DraftCalibration(2).corrected,
            {"source": 1, "bucket": 3, "prob": 0.5},
        ),
        "DraftCalibration.observe": (
            lambda **k: core.DraftCalibration(2).observe(accepted=True, **k),
            {"source": 1, "bucket": 3, "prob": 0.5},
        ),
        "DraftCalibration.grade": (
            functools.partial(core.DraftCalibration(2).grade, [None, core.DraftProposal([-1], [1], [0.5])]),
            {"drawn": [1, 2]},
        ),
        "DraftLists.__new__": (functools.partial(core.DraftLists, zeros(2, 8)), {"levels": [1, 1], "width": 4}),
        "DraftLists.of": (
            functools.partial(core.DraftLists.of, zeros(2, 4).astype("i4"), zeros(2, 4), zeros(2).astype("i4")),
            {"levels": [1, 1]},
        ),
        "DraftLists.begin": (core.DraftLists(zeros(2, 8), [1, 1], 4).begin, {"roots": [1, 2], "width": 4}),
        "DraftLists.trees": (
            core.DraftLists(zeros(2, 8), [1, 1], 4).trees,
            {"roots": [1, 2], "nodes": 5, "off_spine": 8, "min_score": -5.0},
        ),
        "DraftProposal.__new__": (
            core.DraftProposal,
            {"parents": [-1, 0], "tokens": [1, 2], "probs": [0.5, 0.5], "buckets": [0, 63]},
        ),
        "DraftProposal.fits": (core.DraftProposal([-1], [1], [0.5]).fits, {"nodes": 4, "vocab": 8}),
        "choose_drafts": (
            functools.partial(core.choose_drafts, calibration=core.DraftCalibration(1)),
            {
                "requests": [(1, [core.DraftProposal([-1], [1], [0.5])], 4, None)],
                "vocab": 8,
                "nodes": 5,
                "cost": (PASSES, 0.1, [2, 4]),
            },
        ),
        "SuffixDrafts.__new__": (core.SuffixDrafts, {"vocab": 8, "limit": 2**16, "prediction": [1, 2, 3]}),
        "SuffixDrafts.prompt": (core.SuffixDrafts(8, 2**16).prompt, {"tokens": [1, 2, 3]}),
        "SuffixDrafts.extend": (core.SuffixDrafts(8, 2**16).extend, {"tokens": [1, 2, 3]}),
        "SuffixDrafts.propose": (core.SuffixDrafts(8, 2**16, [1, 2]).propose, {"nodes": 4, "depth": 4, "after": [1]}),
        "RecycledTokens.__new__": (core.RecycledTokens, {"vocab": 8, "limit": 2**16}),
        "RecycledTokens.observe": (
            core.RecycledTokens(8, 2**16).observe,
            {"tokens": [1, 2], "best": [[3, 4], [5]]},
        ),
        "RecycledTokens.follow": (core.RecycledTokens(8, 2**16).follow, {"text": [1, 2, 3]}),
        "RecycledTokens.propose": (core.RecycledTokens(8, 2**16).propose, {"last": 1, "nodes": 4, "depth": 4}),
        "DraftCorpus.build": (
            lambda vocab, ends: core.DraftCorpus.build(CORPUS, vocab, np.arange(6, dtype=np.int32), ends),
            {"vocab": 8, "ends": [2, 6]},
        ),
        "CorpusDrafts.__new__": (lambda vocab: core.CorpusDrafts(corpus(), vocab), {"vocab": 8}),
        "CorpusDrafts.extend": (core.CorpusDrafts(corpus(), 8).extend, {"tokens": [1, 2, 3]}),
        "CorpusDrafts.propose": (
            core.CorpusDrafts(corpus(), 8).propose,
            {"nodes": 4, "depth": 4, "after": [1]},
        ),
        "TokenMask.__new__": (core.TokenMask, {"vocab": 8, "tokens": [1, 2]}),
        "TokenMask.__contains__": (lambda token: token in core.TokenMask(8, [1, 2]), {"token": 1}),
        "GrammarVocabulary.__new__": (lambda special: core.GrammarVocabulary(LETTERS, special), {"special": [7]}),
        "GrammarVocabulary.compile": (
            functools.partial(letters().compile, "regex", ["[ab]+"]),
            {"start_after": [2, 3]},
        ),
        "Grammar.start": (letters().compile("regex", ["[ab]+"]).start, {"endings": [7]}),
        "GrammarTracker.commit": (tracker().commit, {"tokens": [0, 1]}),
        "GrammarTracker.mask": (tracker().mask, {"path": [0, 1]}),
        "GrammarTracker.allowed": (tracker().allowed, {"tokens": [0, 1]}),
        "Sampler.__new__": (
            core.Sampler,
            {"vocab": 8, "prompt_tokens": [1], "temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "seed": 1}
            | {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {1: 0.5}},
        ),
        "Sampler.commit": (sampler.commit, {"tokens": [1]}),
        "Sampler.draw": (sampler.draw, {"logits": zeros(8), "position": 3, "path": [1]}),
        "Sampler.processed": (sampler.processed, {"logits": zeros(8), "out": zeros(8), "path": [1]}),
        "likeliest": (core.likeliest, {"trees": w.trees, "logits": zeros(4, 8), "requests": [0], "count": 2}),
        "verify": (core.verify, {"trees": w.trees, "logits": zeros(4, 8), "samplers": w.samplers, "lens": w.lens}),
        "kv_write": (core.kv_write, {**attend, "k": zeros(2, 1, 8), "v": zeros(2, 1, 8)}),
        "attention": (core.attention, {**attend, **queries, "cap": 2.0}),
        "attention_reference": (core.attention_reference, {**attend, **queries, "cap": 2.0}),
        "rope_attention": (
            core.rope_attention,
            {**attend, "qkv": zeros(2, 32), "rope": core.RopeTable(zeros(64, 4), zeros(64, 4)), "num_heads": 2}
            | {"out": zeros(2, 16), "scale": 1.0, "q_norm": zeros(8), "k_norm": zeros(8), "eps": 1e-5}
            | {"cap": 2.0},
        ),
        "rope_write": (
            core.rope_write,
            {**attend, "kv": zeros(2, 16), "rope": core.RopeTable(zeros(64, 4), zeros(64, 4))}
            | {"k_norm": zeros(8), "eps": 1e-5},
        ),
        "rms_norm": (core.rms_norm, {"x": zeros(2, 8), "weight": zeros(8), "eps": 1e-5, "out": zeros(2, 8)}),
        "set_num_threads": (core.set_num_threads, {"n": 1}),
        "_follow_torch": (core._follow_torch, {"torch_threads": 1, "machine_cpus": 1}),
        "_device_budget": (
            core._device_budget,
            {"lines": [("weights", 5)], "scaled": ("KV pool", "num_pages", 2, 3, 1), "have": 100, "ordinal": 0},
        ),
        "certify": (core.certify, {"max_batch": 2, "max_context_len": 64, "page_size": 4, "shape": SHAPE}),
    }


def large() -> dict[str, Callable[[], Any]]:
    """Sizes inside their limits that the room does not hold: refused with a reason, not the end of the process."""
    g = core.Geometry(2**16, 8192, 1, core.TreeShape(8, 64, 1024))
    pool = core.Pool(2**14, 1, 4, g.row_pages)
    seq = pool.create()
    pool.reserve([(seq, 8000)]).commit([8000])
    lease = pool.reserve([(seq, 8001)])
    native, paged = core.Planner(g, pool), core.Planner(core.Geometry(2**16, 8192, 1, SHAPE), pool, "flash_attention")
    none = core.TreeBatch.from_parents([], [])
    beams = core.DraftBeams(8000, core.TreeShape(64, 64, 5), None, 64)
    logits = zeros(8000, 64)
    return {
        "plan": lambda: native.verify([], [], none, pad=(2**16, 2**26)),
        "arrays": lambda: (lease, paged.decode([seq], [8000], pad=(2**16, 2**16))),
        "buffers": lambda: paged.buffers("verify"),
        "candidates": lambda: beams.start(logits),
        "pool": lambda: core.Pool(2**31 - 1, 1, 1, 1),
    }


def changed(good: Any, value: int) -> Iterator[Any]:
    """`good` with each number in it replaced, one at a time: of scalars, lists, tuples and mappings."""
    if isinstance(good, (int, float)) and not isinstance(good, bool):
        yield value
    elif isinstance(good, (list, tuple)):
        for i, item in enumerate(good):
            for other in changed(item, value):
                yield type(good)((*good[:i], other, *good[i + 1 :]))
    elif isinstance(good, dict):
        for key, item in good.items():
            yield {value: item}
            yield from ({key: other} for other in changed(item, value))


def numbers(good: dict[str, Any]) -> list[str]:
    """Parameters of a call that have a number in them."""
    return [name for name, value in good.items() if any(True for _ in changed(value, 0))]


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> str:
    try:
        call(**arguments)
    except (core.SpecrsError, ValueError, OverflowError, TypeError, BufferError) as e:
        return f"{type(e).__name__} {getattr(e, 'kind', '')}".strip()
    except BaseException as e:
        return f"not typed: {type(e).__name__}: {e}"
    return "done"


def main() -> None:
    names = {name: numbers(good) for name, (_, good) in calls().items()}
    for name in names:
        call, good = calls()[name]
        found = outcome(call, good)
        print(json.dumps({"name": name, "parameter": None, "value": None, "outcome": found, "seconds": 0.0}))
    with open("/proc/self/statm") as f:
        limit = int(f.read().split()[0]) * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for name, parameters in names.items():
        for parameter in parameters:
            for value in VALUES:
                variants = len(list(changed(calls()[name][1][parameter], value)))
                for i in range(variants):
                    call, good = calls()[name]
                    good[parameter] = list(changed(good[parameter], value))[i]
                    sys.stdout.flush()
                    started = time.perf_counter()
                    found = outcome(call, good)
                    seconds = time.perf_counter() - started
                    line = {"name": name, "parameter": parameter, "value": str(value)}
                    print(json.dumps(line | {"outcome": found, "seconds": seconds}))
    core.set_num_threads(1)
    with open("/proc/self/status") as f:  # `ru_maxrss` would count the parent, before the exec, too
        peak = next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    print(json.dumps({"peak": peak}))
    for name in large():
        print(json.dumps({"large": name, "outcome": outcome(large()[name], {})}))


if __name__ == "__main__":
    main()
