"""Calls by which callers once could end a process, or make it wait for itself: each is refused, or goes through."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from specrs import _specrs as core


def runs(script: str, *args: str) -> str:
    """Return the output of the script in a process of its own."""
    command = [sys.executable, "-c", script, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


FORKED = """
import multiprocessing as mp, sys, numpy as np
from specrs import _specrs as core
tokens = (np.arange(200_000) * 7919 % 1000).astype(np.int32)
def build(path):
    core.DraftCorpus.build(path, 1000, tokens, [len(tokens)])
build(sys.argv[1])
child = mp.get_context("fork").Process(target=build, args=(sys.argv[2],))
child.start()
child.join(120)
if child.is_alive():
    child.kill()
    sys.exit("the child hangs")
print(child.exitcode)
"""


def test_a_forked_child_builds_a_corpus_too(tmp_path: Path) -> None:
    files = tmp_path / "parent.corpus", tmp_path / "child.corpus"
    assert runs(FORKED, *map(str, files)) == "0"
    assert files[0].read_bytes() == files[1].read_bytes()


COLLECTED = """
import faulthandler, gc, sys, numpy as np
from specrs import _specrs as core
faulthandler.dump_traceback_later(120, exit=True)
class Looks:
    def __init__(self, look):
        self.look, self.me = look, self
    def __del__(self):
        self.look()
def garbage(look, call):
    "Call while the collector finds garbage at any allocation whose finalizers look at the same object."
    gc.disable()
    for _ in range(20):
        Looks(look)
    gc.set_threshold(1, 1, 1)
    gc.enable()
    try:
        call()
    except core.SpecrsError:
        pass
    gc.set_threshold(700, 10, 10)
beams = core.DraftBeams(64, core.TreeShape(1, 1, 1), None, 4)
beams.start(np.full((64, 4), np.nan, np.float32))
garbage(lambda: beams.tokens, lambda: beams.faults)
calibration = core.DraftCalibration(1)
sources = [core.DraftProposal([-1], [1], [0.5])] * 2
refused = lambda: core.merge_drafts(0, 9, sources, 4, 2, calibration=calibration)
garbage(lambda: calibration.sources, refused)
print("done")
"""


def test_finalizers_may_look_at_what_a_call_has_locked() -> None:
    assert runs(COLLECTED) == "done"


LIKELIEST = """
import resource, numpy as np
from specrs import _specrs as core
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
trees, logits = core.TreeBatch.from_parents([[-1]], [[0]]), np.zeros((1, 262_144), np.float32)
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    core.likeliest(trees, logits, [0] * 3000, 262_144)
except core.ConfigError as error:
    print(error)
"""


def test_likeliest_tokens_of_one_row_are_told_once() -> None:
    assert "requests = 0: named twice" in runs(LIKELIEST)


def test_batches_beyond_the_limit_are_refused() -> None:
    drafts = core.merge_drafts(1, 9, [core.DraftProposal([-1], [2], [0.5])], 2, 1)
    for call in (
        lambda: core.TreeBatch.from_drafts([drafts] * 65_537),
        lambda: core.choose_drafts([(1, [], 1, None)] * 65_537, core.DraftCalibration(1), 9, 2),
    ):
        with pytest.raises(core.ConfigError, match=r"= 65537 is outside [01]\.\.=65536"):
            call()


def test_a_list_that_stands_in_a_list_again_and_again_is_counted() -> None:
    long = [-1, *range(1023)]
    many, recycled = [long] * 65_537, core.RecycledTokens(9, 1 << 20)
    for call in (
        lambda: core.TreeBatch.from_parents(many, [[0]]),
        lambda: core.TreeBatch.from_parents([[-1]], many),
        lambda: core.TreeBatch.from_parents([[-1]], [[0]], many),
        lambda: recycled.observe([1] * 65_537, many),
    ):
        with pytest.raises(core.ConfigError, match=r"is outside 0\.\.=67108864"):
            call()
    with pytest.raises(TypeError):
        core.TreeBatch.from_parents([1, 2], [[0]])


def test_a_score_from_a_device_is_a_number() -> None:
    offsets, tokens, parents = (torch.tensor(v, dtype=torch.int32) for v in ([0, 2], [5, 6], [-1, 0]))
    scores = torch.tensor([0.0, -0.5, float("nan")])
    assert len(core.TreeBatch.from_arrays(offsets, tokens, parents, scores)) == 1, "what lies behind is not read"
    scores[1] = float("nan")
    with pytest.raises(core.ConfigError, match="tree score = NaN at node 1 of all: a score is a log-probability"):
        core.TreeBatch.from_arrays(offsets, tokens, parents, scores)


LISTS = ("offsets of trees", "offsets of paths", "an accepted path", "rows of passes")


def long_lists(n: int) -> dict[str, Callable[[], object]]:
    many, one = torch.arange(n, 0, -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    drafts = core.merge_drafts(1, 9, [core.DraftProposal([-1], [2], [0.5])], 2, 1)
    table, calibration = list(range(n, 0, -1)), core.DraftCalibration(1)
    return {
        "offsets of trees": lambda: core.TreeBatch.from_arrays(many, one, one, torch.zeros(1)),
        "offsets of paths": lambda: core.Accepts.from_arrays(many, one, one),
        "an accepted path": lambda: drafts.settle(table, calibration),
        "rows of passes": lambda: core.choose_drafts(
            [(1, [None], 1, None)], calibration, 9, 2, ((table, [1.0] * n, 1.0), 0.0, [])
        ),
    }


@pytest.mark.parametrize("name", LISTS)
def test_errors_show_the_start_of_a_long_list(name: str) -> None:
    with pytest.raises(core.ConfigError, match=r"\.\.\.\] of 1000000 entries") as e:
        long_lists(1_000_000)[name]()
    assert len(str(e.value)) < 1000


def test_a_pool_and_a_lease_say_what_they_are() -> None:
    pool = core.Pool(64, 16, 4, 8)
    assert repr(pool) == "Pool(num_pages=64, page_size=16, max_seqs=4, row_pages=8)"
    lease = pool.reserve([(pool.create(), 20), (pool.create(), 1)])
    assert repr(lease) == "Lease(sequences=2, live=True)"
    lease.commit([20, 1])
    assert repr(lease) == "Lease(live=False: it was committed)"


def test_an_index_behind_what_is_allocated_names_reserve() -> None:
    geometry = core.Geometry(2, 64, 4, core.TreeShape(2, 2, 4))
    pool = core.Pool(64, 4, 2, geometry.row_pages)
    planner = core.Planner(geometry, pool)
    with pytest.raises(core.SpecrsError, match=r"allocated positions is outside 0\.\.0 .*reserve them first") as e:
        planner.extend([pool.create()], [0], [10])
    assert isinstance(e.value, core.OutOfBoundsError)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 2.9e-39])
def test_processed_says_what_draw_does_at_any_temperature(temperature: float) -> None:
    sampler = core.Sampler(3, [0], temperature=temperature)
    logits, out = np.array([0.0, 1.4e-45, -1.0], np.float32), np.empty(3, np.float32)
    sampler.processed(logits, out)
    drawn = np.bincount([sampler.draw(logits, p) for p in range(2000)], minlength=3) / 2000
    weights = np.exp(out.astype(np.float64))
    assert np.abs(drawn - weights / weights.sum()).max() < 0.05, (out, drawn)
