"""Threads of the kernels: where their number comes from, and that workers without work use no CPU."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import specrs
from modelzoo import Pair
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs.cli import main


@pytest.fixture(autouse=True)
def number_restored() -> Iterator[None]:
    before = specrs.num_threads()
    yield
    specrs.set_num_threads(before)


def fresh(code: str, **env: str) -> list[str]:
    """Words that a new process prints, with no thread variables but these."""
    clean = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    run = subprocess.run([sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_the_default_is_the_cpus_of_the_process_at_most_8() -> None:
    code = "import specrs, sys; print(specrs.num_threads(), 'torch' in sys.modules)"
    number, torch_loaded = fresh(code)
    assert 1 <= int(number) <= min(8, os.cpu_count() or 8)
    assert torch_loaded == "False"
    if hasattr(os, "sched_setaffinity"):
        one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); "
        assert fresh(one + code)[0] == "1"


@pytest.mark.parametrize(("value", "number"), [("3", "3"), (" 5,2", "5"), ("1000", "64")])
def test_openmp_is_followed(value: str, number: str) -> None:
    assert fresh("import specrs; print(specrs.num_threads())", OMP_NUM_THREADS=value) == [number]


def test_a_bad_openmp_value_is_ignored() -> None:
    code = "import specrs; print(specrs.num_threads())"
    assert fresh(code, OMP_NUM_THREADS="0") == fresh(code, OMP_NUM_THREADS="many") == fresh(code)


def test_the_first_that_speaks_counts() -> None:
    code = """
import torch, specrs
from specrs.models import follow_torch
seen = [specrs.num_threads()]
follow_torch(); seen.append(specrs.num_threads())                            # OMP_NUM_THREADS, which torch has too
torch.set_num_threads(2); follow_torch(); seen.append(specrs.num_threads())  # torch before OpenMP
specrs.set_num_threads(5); seen.append(specrs.num_threads())                 # specrs before all
follow_torch(); seen.append(specrs.num_threads())
print(*seen)
"""
    assert fresh(code, OMP_NUM_THREADS="1") == ["1", "1", "2", "5", "5"]


@pytest.mark.skipif((os.cpu_count() or 1) >= 64, reason="torch cannot have more threads than CPUs and we follow")
def test_an_engine_asks_torch(tiny: Pair) -> None:
    more = (os.cpu_count() or 1) + 1
    code = f"""
import torch, specrs
before = specrs.num_threads()
specrs.LLM({str(tiny.target)!r}); print(specrs.num_threads() <= before)
torch.set_num_threads(1); specrs.LLM({str(tiny.target)!r}); print(specrs.num_threads())
torch.set_num_threads({more}); specrs.LLM({str(tiny.target)!r}); print(specrs.num_threads())
"""
    assert fresh(code) == ["True", "1", str(more)]


def test_the_command_line_has_an_option(bytes_pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "x", "--model", str(bytes_pair.target), "--max-tokens", "3", "--threads"]
    assert main([*argv, "3"]) == 0
    assert specrs.num_threads() == 3
    assert main([*argv, "0"]) == 2
    assert "num_threads" in capsys.readouterr().err


def workers() -> dict[str, float]:
    """CPU seconds of each worker thread of this process, by id."""
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, fields = (task / "comm").read_text(), (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if name.startswith("specrs-"):
            seconds[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def await_workers(number: int) -> None:
    """Threads start and end behind the call that asks for it."""
    deadline = time.monotonic() + 20
    while len(workers()) != number:
        assert time.monotonic() < deadline, f"{len(workers())} workers, want {number}"
        time.sleep(0.01)


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


class Bursts:
    """Products that are worth two threads, a few at a time."""

    def __init__(self) -> None:
        self.linear = core.PackedLinear(torch.ones(256, 512), storage="f32")
        self.x, self.out = torch.ones(1, 512), torch.empty(1, 256)

    def __call__(self, products: int = 8) -> None:
        for _ in range(products):
            self.linear.forward(self.x, self.out)


@linux
def test_workers_sleep_between_bursts() -> None:
    specrs.set_num_threads(2)
    burst = Bursts()
    burst()
    await_workers(1)
    [before] = workers().values()
    started = time.perf_counter()
    while (wall := time.perf_counter() - started) < 1.5:
        burst()
        time.sleep(0.001)
    [after] = workers().values()
    # 8 products are about 0.1 ms and a worker polls for at most 0.15 ms after them; all the while it would be 1.5 s.
    assert after - before < 0.5 * wall, f"a worker used {after - before:.2f} s in {wall:.2f} s"


@linux
def test_an_idle_engine_uses_no_cpu(bytes_pair: Pair) -> None:
    specrs.set_num_threads(2)
    llm = LLM(bytes_pair.target, bytes_pair.draft)
    llm.generate(["hello"], SamplingParams(max_tokens=20, ignore_eos=True))
    Bursts()()  # whatever the model was worth, there is a worker
    time.sleep(0.1)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(1)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert workers()
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05


@linux
def test_one_thread_has_no_workers() -> None:
    specrs.set_num_threads(3)
    burst = Bursts()
    burst()
    await_workers(2)
    specrs.set_num_threads(1)
    burst()
    await_workers(0)
