"""The named historical faults through the bindings: in a caller's tensors between canaries, in a pool whose neighbours'
KV must not move, through the environment, and in the engine. `docs/faults.md` tells them; the smallest configurations
are found by search in `tests/faults/`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import specrs
from modelzoo import Pair
from specrs import _specrs as core
from specrs.cli import main

IDS = [27338, 27360, 23037, 26972, 26738]
CANARY = 0x5A
DOCS = Path(__file__).parents[3] / "docs"
TORCH = {"int32": torch.int32, "int64": torch.int64, "bool": torch.bool, "uint8": torch.uint8}
Format = Literal["flashinfer", "flash_attention", "triton"]


class World:
    """Sequences in a pool whose KV holds a value of its own in every slot, and a planner with faults put back."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        page_size: int,
        lens: list[int],
        format: Format,
        reverts: list[int],
        layout: Literal["dense", "holey"] = "dense",
        context: int = 16,
    ) -> None:
        self.geometry = g = core.Geometry(len(lens), context, page_size, core.TreeShape(*shape), layout, reverts)
        self.pool = core.Pool(g.pages_for_full_load + 1, page_size, len(lens), g.row_pages)
        self.lens = lens
        self.seqs = [self.pool.create() for _ in lens]
        self.pool.reserve(list(zip(self.seqs, lens, strict=True))).commit(lens)
        self.planner = core.Planner(g, self.pool, format)
        slots = (g.pages_for_full_load + 1) * page_size
        self.kv = torch.arange(2 * slots * 4, dtype=torch.float32).view(1, 2, slots, 1, 4)
        self.cache = core.KvCache(self.kv, page_size)

    def lease(self) -> core.Lease:
        """A round reserved for everyone, by the rule of the geometry."""
        return self.pool.reserve(
            [(s, self.geometry.alloc_target(n, 0)) for s, n in zip(self.seqs, self.lens, strict=True)]
        )

    def draft(self, step: int = 0, live: int | None = None, **kwargs: Any) -> core.Plan:
        return self.planner.draft(self.seqs[:live], self.lens[:live], step, None, "lane", **kwargs)

    def slots(self, i: int, positions: list[int]) -> list[int]:
        pages, p = self.pool.pages(self.seqs[i]), self.geometry.page_size
        return [pages[x // p] * p + x % p for x in positions]

    def state(self) -> tuple[Any, ...]:
        """Everything that a fault could have changed: accounts, pages of every sequence, all KV."""
        return self.pool.audit(), self.pool.stats(), [self.pool.pages(s) for s in self.seqs], self.kv.clone().tolist()


class Caller:
    """Each array of a phase in the middle of a larger tensor of the caller, at exactly the stated capacity."""

    def __init__(self, planner: core.Planner, step: int) -> None:
        self.blocks: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, c in planner.capacities("draft", step).items():
            dtype = TORCH[c["dtype"]]
            n = int(np.prod(c["shape"])) * torch.tensor([], dtype=dtype).element_size()
            self.blocks[name] = torch.full((n + 512,), CANARY, dtype=torch.uint8)
            self.tensors[name] = self.blocks[name][256 : 256 + n].view(dtype).view(c["shape"])
        self.buffers = planner.buffers("draft", step, tensors=self.tensors)

    def check(self) -> None:
        for name, block in self.blocks.items():
            assert torch.all(block[:256] == CANARY) and torch.all(block[-256:] == CANARY), name


# -- the registry, and the switch as an argument ----------------------------------------------------------------------


def test_the_registry() -> None:
    faults = specrs.faults()
    assert [f["id"] for f in faults] == IDS
    for f in faults:
        assert set(f) == {"id", "title", "report", "reverts", "place", "guard"}
        assert f["report"] == f"https://github.com/sgl-project/sglang/pull/{f['id']}"
        assert all(str(v).strip() for v in f.values())


def test_switches_are_of_one_geometry() -> None:
    shape = core.TreeShape(2, 2, 4)
    with_fault = core.Geometry(2, 64, 4, shape, "holey", [26972, 27338, 26972])
    plain = core.Geometry(2, 64, 4, shape, "holey", [])
    assert with_fault.reverts == (27338, 26972) and plain.reverts == ()
    assert "reverts=[27338,26972]" in repr(with_fault) and "reverts" not in repr(plain)
    assert with_fault != plain and with_fault.row_width < plain.row_width
    for bad in ([1], [27338, 99999], [-1], [2**40]):
        with pytest.raises(core.ConfigError):
            core.Geometry(2, 64, 4, shape, "holey", bad)
    with pytest.raises(core.ConfigError, match="known ones: 27338, 27360, 23037, 26972, 26738"):
        core.Geometry(2, 64, 4, shape, "holey", [99999])
    with pytest.raises(core.ConfigError, match="specrs has no MLA format"):
        core.Geometry(2, 64, 4, shape, "holey", [27460])


# -- 27338: per-branch width without topk -----------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["flashinfer", "triton"])
def test_27338(format: Format) -> None:
    w = World((2, 1, 1), 1, [3, 3], format, [27338], context=4)
    caller = Caller(w.planner, 0)
    assert caller.tensors["kv_indices"].shape == (2 * 1 * (4 + 1),)
    with w.lease():
        w.draft(live=1, out=caller.buffers)  # 2 * (3 + 1) elements fit
        before, held = w.state(), {n: t.clone() for n, t in caller.tensors.items()}
        with pytest.raises(core.ConfigError, match="topk 2") as e:
            w.draft(out=caller.buffers)
        assert (e.value.kind, e.value.what, e.value.need, e.value.have) == ("Capacity", "kv_indices", 16, 10)
        assert f"{format} draft step 0 of 2 requests" in e.value.hint and "max_context_len 4" in e.value.hint
        assert all(torch.equal(t, held[n]) for n, t in caller.tensors.items()) and caller.buffers.generation == 1
        with pytest.raises(core.ConfigError) as e:  # into the planner's own arrays, too
            w.draft()
        assert (e.value.need, e.value.have) == (16, 10)
        assert w.state() == before
    caller.check()
    w.pool.audit()


@pytest.mark.parametrize("format", ["flashinfer", "triton"])
def test_27338_without_the_switch(format: Format) -> None:
    w = World((2, 1, 1), 1, [3, 3], format, [], context=4)
    caller = Caller(w.planner, 0)
    with w.lease():
        arrays = w.draft(out=caller.buffers).arrays()
        assert arrays["kv_indptr"].tolist() == [0, 4, 8, 12, 16]
        want = [slot for i in range(2) for b in range(2) for slot in w.slots(i, [0, 1, 2, 3 + b])]
        assert arrays["kv_indices"].tolist() == want
    caller.check()


# -- 27360: the expand table of S slots -------------------------------------------------------------------------------


def test_27360() -> None:
    w = World((2, 2, 1), 2, [4, 5, 2], "flash_attention", [27360], "holey")
    caller = Caller(w.planner, 0)
    assert caller.tensors["expand_page_table"].shape == (6, 1)
    with w.lease():
        before = w.state()
        with pytest.raises(core.ConfigError, match="request 1, query 0: flash_attention draft step 0") as e:
            w.draft(out=caller.buffers)
        assert (e.value.kind, e.value.what, e.value.need, e.value.have) == ("Capacity", "expand_page_table", 2, 1)
        assert "topk 2, steps 2" in e.value.hint and "page_size 2" in e.value.hint
        assert w.state() == before
        # The first request's rows were written, the second's page did not run into the third's.
        table = caller.tensors["expand_page_table"].flatten().tolist()
        assert table[:2] == [s // 2 for s in w.slots(0, [4, 6])] and table[2:] == [0] * 4
    caller.check()
    w.pool.audit()


def test_27360_without_the_switch() -> None:
    w = World((2, 2, 1), 2, [4, 5, 2], "flash_attention", [], "holey")
    caller = Caller(w.planner, 0)
    with w.lease():
        arrays = w.draft(out=caller.buffers).arrays()
        firsts = w.slots(0, [4, 6]) + w.slots(1, [4, 8]) + w.slots(2, [2, 4])
        assert arrays["expand_page_table"].tolist() == [[s // 2] for s in firsts]
        assert arrays["expand_cache_seqlens"].tolist() == [1, 1, 2, 2, 1, 1]
    caller.check()


# -- 23037: stale padding, and outputs held across replays ------------------------------------------------------------


@pytest.mark.parametrize("format", ["flashinfer", "flash_attention", "triton"])
def test_23037_padding(format: Format) -> None:
    w = World((2, 2, 4), 2, [5, 4, 3], format, [23037])
    caller = Caller(w.planner, 0)
    with w.lease():
        before = w.state()
        w.draft(out=caller.buffers)
        with pytest.raises(core.ConfigError, match=f"{format} draft step 0: padded query 4 reads") as e:
            w.draft(live=2, out=caller.buffers, pad=(3, 6))
        assert (e.value.kind, e.value.what) == ("Invalid", "dead query")
        assert "2 of 3 requests and 4 of 6 queries are live" in e.value.why
        assert w.state() == before
    caller.check()
    w.pool.audit()


@pytest.mark.parametrize("format", ["flashinfer", "flash_attention", "triton"])
def test_23037_held_outputs(format: Format) -> None:
    """The lease on the first replay's outputs is not renewed: what is read by it after the second is refused."""
    w = World((2, 2, 4), 2, [5, 4, 3], format, [23037])
    caller = Caller(w.planner, 0)
    with w.lease():
        first = w.draft(live=2, out=caller.buffers)
        held = first.arrays()
        second = w.draft(out=caller.buffers)
        for read in (first.arrays, second.arrays, next(iter(held.values())).tolist):
            with pytest.raises(core.StaleOutputError) as e:
                read()
            assert (e.value.held, e.value.current) == (1, 2) and f"{format} buffers for draft" in e.value.what
    caller.check()


@pytest.mark.parametrize("format", ["flashinfer", "flash_attention", "triton"])
def test_23037_without_the_switch(format: Format) -> None:
    w = World((2, 2, 4), 2, [5, 4, 3], format, [])
    caller = Caller(w.planner, 0)
    with w.lease():
        first = w.draft(out=caller.buffers)
        held = first.arrays()
        kept = {name: array.tolist() for name, array in held.items()}
        second = w.draft(live=2, out=caller.buffers, pad=(3, 6)).arrays()
        if format == "flash_attention":
            assert second["cache_seqlens"].tolist() == [5, 4, 0]
            assert second["expand_cache_seqlens"].tolist() == [1, 1, 1, 1, 0, 0]
            assert second["page_table"].tolist()[2] == [0] * 3
        else:
            assert second["kv_indptr"].tolist() == [0, 6, 12, 17, 22, 22, 22]
        # Memory that an engine holds across replays is refused, unless the engine took a copy in time.
        for name, array in held.items():
            with pytest.raises(core.StaleOutputError) as e:
                array.tolist()
            assert (e.value.held, e.value.current) == (1, 2) and kept[name]
    caller.check()


# -- 26972: the reserve without the holey term ------------------------------------------------------------------------


def test_26972() -> None:
    w = World((2, 1, 1), 4, [6, 0, 6], "flash_attention", [26972], "holey")
    assert (w.geometry.alloc_len_per_decode, w.geometry.alloc_target(0, 0)) == (2, 4)
    with w.lease():
        before = w.state()
        with pytest.raises(core.OutOfBoundsError) as e:
            w.draft()
        o = e.value
        assert (o.kernel, o.buffer, o.request, o.index, o.bound) == ("draft", "allocated positions", 1, 4, 4)
        assert w.state() == before
    w.pool.audit()
    w.pool.release(w.seqs)
    stats = w.pool.stats()
    assert stats["free_pages"] == stats["total_pages"]  # nothing leaks


def test_26972_without_the_switch() -> None:
    w = World((2, 1, 1), 4, [6, 0, 6], "flash_attention", [], "holey")
    assert (w.geometry.alloc_len_per_decode, w.geometry.alloc_target(0, 0)) == (8, 16)
    with w.lease():
        plan, before = w.draft(), w.kv.clone()
        want = w.slots(0, [6, 10]) + w.slots(1, [0, 4]) + w.slots(2, [6, 10])
        assert plan.out_slots.tolist() == want
        core.kv_write(w.cache, 0, plan, torch.full((6, 1, 4), -1.0), torch.full((6, 1, 4), -2.0))
        changed = (w.kv != before).any(dim=(0, 1, 3, 4)).nonzero().flatten().tolist()
        assert changed == sorted(want)
    w.pool.release(w.seqs)
    stats = w.pool.stats()
    assert stats["free_pages"] == stats["total_pages"]


# -- 26738: host values where lengths live on the device --------------------------------------------------------------


@pytest.mark.parametrize("format", ["flashinfer", "flash_attention", "triton"])
@pytest.mark.parametrize("phase", ["extend", "decode", "draft", "verify"])
def test_26738(format: Format, phase: Literal["extend", "decode", "draft", "verify"]) -> None:
    lens = core.DeviceLens(3, 9)
    w = World((2, 2, 4), 2, [5, 4, 3], format, [26738])
    before = w.state()
    with pytest.raises(core.ConfigError, match="sizing on the host reads lengths") as e:
        w.planner.sizes(phase, lens)
    assert (e.value.kind, e.value.what) == ("Invalid", "lens")
    assert e.value.got == "device lengths of 3 requests (<= 9)"
    assert w.state() == before
    # Without the switch the bound answers, and never with less than any batch within it takes.
    plain = World((2, 2, 4), 2, [5, 4, 3], format, [])
    bound, known = plain.planner.sizes(phase, lens), plain.planner.sizes(phase, [5, 9, 3])
    assert bound.keys() == known.keys() and bound
    assert all(n >= m for name in known for n, m in zip(bound[name]["shape"], known[name]["shape"], strict=True))
    assert plain.planner.sizes(phase, [5, 9, 3]) == w.planner.sizes(phase, [5, 9, 3])


# -- the environment --------------------------------------------------------------------------------------------------


def python(code: str, value: str | None, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "SPECRS_DEBUG_REVERT"}
    env["OMP_NUM_THREADS"] = "1"
    if value is not None:
        env["SPECRS_DEBUG_REVERT"] = value
    return subprocess.run(
        [sys.executable, "-c", code, *argv], env=env, capture_output=True, text=True, timeout=300, check=False
    )


GEOMETRIES = """
import specrs
for _ in range(2):
    print(specrs.Geometry(2, 64, 4, specrs.TreeShape(2, 2, 4), "holey").reverts)
print(specrs.Geometry(2, 64, 4, specrs.TreeShape(2, 2, 4), "holey", []).reverts)
"""


def test_the_environment_is_loud() -> None:
    done = python(GEOMETRIES, " 26972, 27338,26972 ,")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(27338, 26972)"] * 2 + ["()"]
    assert done.stderr.count("SPECRS_DEBUG_REVERT PUTS HISTORICAL FAULTS BACK") == 1
    assert done.stderr.count("RuntimeWarning: SPECRS_DEBUG_REVERT=27338,26972") == 1
    for f in specrs.faults():
        assert (f["reverts"] in done.stderr) == (f["id"] in (27338, 26972))
    # Silencing Python's warnings does not silence the core's.
    done = python("import warnings; warnings.simplefilter('ignore')" + GEOMETRIES, "26738")
    assert "RuntimeWarning" not in done.stderr and "PUTS HISTORICAL FAULTS BACK" in done.stderr


@pytest.mark.parametrize("value", [None, "", " , "])
def test_the_environment_is_silent_without_ids(value: str | None) -> None:
    done = python(GEOMETRIES, value)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.splitlines() == ["()"] * 3


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("27339", "no fault of that name; known ones: 27338, 27360, 23037, 26972, 26738"),
        ("all", "no fault of that name; known ones: 27338, 27360, 23037, 26972, 26738"),
        ("27338,27460", "specrs has no MLA format"),
    ],
)
def test_unknown_ids_refuse_every_geometry(value: str, why: str) -> None:
    caught = "import specrs\ntry:\n    exec({!r})\nexcept specrs.ConfigError as e:\n    print(e.kind, e)"
    done = python(caught.format(GEOMETRIES), value)
    bad = value.split(",")[-1]
    assert done.returncode == 0 and done.stdout.startswith(f"Invalid SPECRS_DEBUG_REVERT = {bad}: "), done.stderr
    assert why in done.stdout and "RuntimeWarning: SPECRS_DEBUG_REVERT" in done.stderr
    done = python("import sys; from specrs.cli import main; sys.exit(main())", value, "certify")
    assert done.returncode == 2 and why in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


# -- engine and command line ------------------------------------------------------------------------------------------

ENGINE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from specrs import _specrs as core
torch.set_num_threads(1)  # tiny models
core.set_num_threads(1)
from specrs import LLM, SamplingParams, SpecrsError
target, draft = sys.argv[1:]
greedy = SamplingParams(max_tokens=6)
prompts = [[(7 * i + j) % 10 for j in range(n)] for i, n in enumerate((40, 3, 41, 39))]
results = {}
for backend in ("native", "flashinfer", "flash_attention", "triton"):
    for layout in ("dense", "holey"):
        if (backend, layout) == ("native", "holey"):
            continue
        llm = LLM(target, draft, tree=(4, 3, 13), page_size=4, max_context_len=64, max_batch=4,
                  attention_backend=backend, draft_layout=layout)
        try:
            got = [o.token_ids for o in llm.generate(prompts, greedy)]
        except SpecrsError as e:
            got = {"error": type(e).__name__, "kind": e.kind, "what": getattr(e, "what", getattr(e, "buffer", ""))}
        results[f"{backend} {layout}"] = [got, llm.audit()["sequences"], llm.unfinished]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def untouched(tiny: Pair) -> dict[str, Any]:
    done = python(ENGINE, None, str(tiny.target), str(tiny.draft))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Backends that run into a fault: those that have its place in their format, in that layout. The engine pads nothing,
# keeps no static buffers, and its lengths are on the host: two of the faults find nothing to spoil.
STOPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "27338": {
        f"{backend} {layout}": ("ConfigError", "Capacity", "kv_indices")
        for backend in ("flashinfer", "triton")
        for layout in ("dense", "holey")
    },
    "27360": {"flash_attention holey": ("ConfigError", "Capacity", "expand_page_table")},
    "26972": {
        f"{backend} holey": ("OutOfBoundsError", "OutOfBounds", "allocated positions")
        for backend in ("flashinfer", "flash_attention", "triton")
    },
    "23037,26738": {},
}


@pytest.mark.parametrize("faults", STOPS)
def test_the_engine_stops_typed_or_is_right(tiny: Pair, untouched: dict[str, Any], faults: str) -> None:
    """Never a wrong token and never a crash; nothing of a failed call stays behind."""
    done = python(ENGINE, faults, str(tiny.target), str(tiny.draft))
    assert done.returncode == 0, done.stderr
    assert "PUTS HISTORICAL FAULTS BACK" in done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    assert results.keys() == untouched.keys() and len(results) == 7
    for name, (tokens, live, unfinished) in results.items():
        assert (live, unfinished) == (0, 0), name
        if name in STOPS[faults]:
            assert isinstance(tokens, dict) and tuple(tokens.values()) == STOPS[faults][name], name
        else:
            assert tokens == untouched[name][0] == untouched["native dense"][0], name


@pytest.mark.parametrize("fault", IDS)
def test_the_command_line(bytes_pair: Pair, fault: int, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "hello", "--model", str(bytes_pair.target), "--draft", str(bytes_pair.draft), "--greedy"]
    argv += ["--max-tokens", "24", "--tree", "4,3,13", "--page-size", "4"]
    argv += ["--attention-backend", "flash_attention", "--draft-layout", "holey", "--mark", "none", "--ignore-eos"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    done = python("import sys; from specrs.cli import main; sys.exit(main())", str(fault), *argv)
    assert "PUTS HISTORICAL FAULTS BACK" in done.stderr and "Traceback" not in done.stderr
    if fault in (27360, 26972):
        assert done.returncode == 2
        last = done.stderr.splitlines()[-1]
        assert last.startswith("specrs: ") and ("expand_page_table" in last or "allocated positions" in last), last
    else:
        assert (done.returncode, done.stdout) == (0, text), done.stderr


def test_certify_finds_the_reserve_that_is_too_small() -> None:
    argv = ["certify", "--tree", "2,2,4", "--page-size", "4", "--json"]
    code = "import sys; from specrs.cli import main; sys.exit(main())"
    assert python(code, None, *argv).returncode == 0
    done = python(code, "26972", *argv)
    result = json.loads(done.stdout)
    assert done.returncode == 1 and not result["holds"]
    worst = next(f for f in result["failures"] if f["what"] == "end of the draft region")
    assert worst["layout"] == "holey" and (worst["got"], worst["limit"]) == (8, 4)


def test_the_document_tells_every_fault() -> None:
    text = (DOCS / "faults.md").read_text()
    for f in specrs.faults():
        assert f"## {f['id']}: " in text and f["report"] in text and f"faults/{f['id']}.svg" in text
    assert "27460" in text and "docs/faults.md" in (DOCS.parent / "README.md").read_text()


def test_layout_names_the_faults_that_it_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "--fault", "27460"]) == 2
    assert capsys.readouterr().err == "specrs: fault = 27460: there are 27338, 27360, 23037, 26972, 26738\n"


@pytest.mark.parametrize("fault", IDS)
def test_the_figures_are_what_layout_draws(fault: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to matplotlib's version, which moves coordinates: the same texts, the same number of shapes."""
    assert main(["layout", "--fault", str(fault), "-o", str(tmp_path / "f.svg")]) == 0
    drawn, committed = (tmp_path / "f.svg").read_text(), (DOCS / "faults" / f"{fault}.svg").read_text()
    texts, shapes = (re.compile(r"<text[^>]*>([^<]*)</text>"), re.compile(r"<path "))
    assert texts.findall(drawn) == texts.findall(committed) != [], "run `make figures`"
    assert len(shapes.findall(drawn)) == len(shapes.findall(committed))
    out = capsys.readouterr().out
    assert out.startswith(f"{fault}: ") and "!" in out
