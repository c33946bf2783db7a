"""Goal 1: the page allocator against vLLM's ``BlockPool`` and sglang's allocators.

Two kinds of work, on pools of 64k and 1M pages:

* ``raw``: take n pages and give them back: vLLM's ``get_new_blocks`` / ``free_blocks``, specrs's ``alloc_pages`` /
  ``free_pages``, sglang's ``alloc`` / ``free`` (P = 1) and ``alloc`` / ``free_page_ids`` (P > 1);
* ``round``: every request of a batch reserves its next round (K = 8, S = 6, V = 64: 128, 512 and 2048 positions at
  P = 1, 16 and 64), commits 1 to 7 tokens, and the overshoot goes back. Peers get one call for the whole batch
  each way, and the index of what to free is made before the clock starts where it does not depend on the pages;
  keeping request tables, which specrs's figure includes, is not asked of them.

All take turns in one run; figures are medians. After 32 rounds the committed lengths and the number of free pages
must be equal everywhere. The Rust core is timed in a release binary (``examples/allocator_driver.rs``) that takes its
turn like the others, with the free list in order as the peers have it (``specrs``) and in random order as after long
service (``specrs_shuffled``), and through the Python bindings where they are built. Writes ``results/allocator.json``.

Peers come from the package index at the pinned versions and are unpacked, not installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import logging
import statistics
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common import Driver, interleave, release_binary, seconds, unpack, wheel, write_result

VLLM, SGLANG = "0.33.0", "0.5.23"
POOLS = (1 << 16, 1 << 20)
RAW = (1, 64, 4096)
BATCHES = (1, 16, 64, 256)
COMPARED = 32  # rounds after which the accounts are compared
Timer = Callable[[], float]


def start_len(i: int) -> int:
    """First length of request i, as in ``benches/workload/allocator.rs``."""
    return 1024 + i * 37 % 512


def accepted(i: int) -> int:
    """Tokens that request i commits in a round."""
    return 1 + i % 7


class AnyName(types.ModuleType):
    """Stands for a module whose names are imported and never used here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stub(name: str, **names: Any) -> None:
    """Put a module of this name where imports find it."""
    module = AnyName(name)
    module.__dict__.update(names, __path__=[])
    sys.modules[name] = module


def load(name: str, path: Any) -> types.ModuleType:
    """Import a file under a module name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def vllm_block_pool() -> Any:
    """The class ``BlockPool`` of vLLM, its own code unchanged."""
    folder = unpack(wheel("vllm", VLLM), ["vllm/v1/core/block_pool.py", "vllm/v1/core/kv_cache_utils.py"])
    for name in (
        "vllm", "vllm.config", "vllm.distributed", "vllm.distributed.kv_events", "vllm.envs", "vllm.multimodal",
        "vllm.multimodal.utils", "vllm.utils", "vllm.utils.hashing", "vllm.utils.math_utils", "vllm.v1", "vllm.v1.core",
        "vllm.v1.core.kv_cache_metrics", "vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_spec_registry",
        "vllm.v1.request", "vllm.v1.utils",
    ):  # fmt: skip
        stub(name)
    sys.modules["vllm"].__dict__["envs"] = sys.modules["vllm.envs"]
    sys.modules["vllm.distributed.kv_events"].__dict__["MEDIUM_GPU"] = "GPU"
    stub("vllm.logger", init_logger=logging.getLogger)
    load("vllm.v1.core.kv_cache_utils", folder / "vllm/v1/core/kv_cache_utils.py")
    return load("vllm.v1.core.block_pool", folder / "vllm/v1/core/block_pool.py").BlockPool


def function_of(path: Any, name: str) -> Any:
    """Return one function of a file that does not import, by its syntax tree."""
    tree = ast.parse(path.read_text())
    found: list[ast.stmt] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    future = ast.parse("from __future__ import annotations").body
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(future + found[:1], []), str(path), "exec"), names)
    return names[name]


def sglang_allocators() -> tuple[Any, Any]:
    """sglang's token (P = 1) and paged allocator classes, their own code unchanged, on CPU tensors."""
    folder = unpack(wheel("sglang", SGLANG), ["sglang/srt/mem_cache/allocator/*", "sglang/srt/utils/common.py"])
    base = folder / "sglang/srt/mem_cache/allocator"
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.memory",
                 "sglang.kernels.ops.memory.allocator", "sglang.srt", "sglang.srt.mem_cache",
                 "sglang.srt.mem_cache.allocator"):  # fmt: skip
        stub(name)
    # A CPU platform: the allocators then take their own path without Triton.
    cpu = types.SimpleNamespace(capabilities=types.SimpleNamespace(supports_triton=False))
    stub("sglang.srt.platforms", current_platform=cpu)
    pages = function_of(folder / "sglang/srt/utils/common.py", "get_num_new_pages")
    stub("sglang.srt.utils", get_bool_env_var=lambda _: False, is_hip=lambda: False, get_num_new_pages=pages,
         next_power_of_2=lambda n: 1 << (n - 1).bit_length())  # fmt: skip
    load("sglang.srt.mem_cache.allocator.base", base / "base.py")
    token = load("sglang.srt.mem_cache.allocator.token", base / "token.py").TokenToKVPoolAllocator
    paged = load("sglang.srt.mem_cache.allocator.paged", base / "paged.py").PagedTokenToKVPoolAllocator
    return token, paged


class Batch:
    """Lengths of a batch, and what a round reserves and gives back."""

    def __init__(self, page: int, batch: int, reserve: int) -> None:
        self.page, self.batch, self.reserve = page, batch, reserve
        self.lens = [start_len(i) for i in range(batch)]

    def up(self, n: int) -> int:
        """Whole pages, in tokens."""
        return -(-n // self.page) * self.page

    def plan(self) -> tuple[list[int], list[int], list[int]]:
        """Positions allocated before a round, during it, and after it; always whole pages."""
        before = [self.up(n) for n in self.lens]
        during = [self.up(n + self.reserve) for n in self.lens]
        after = [self.up(n + accepted(i)) for i, n in enumerate(self.lens)]
        return before, during, after

    def step(self) -> None:
        """Commit."""
        self.lens = [n + accepted(i) for i, n in enumerate(self.lens)]


class VllmRounds(Batch):
    """Rounds with vLLM's ``BlockPool``; the pages that requests keep are only counted."""

    def __init__(self, pool: Any, page: int, batch: int, reserve: int) -> None:
        super().__init__(page, batch, reserve)
        self.pool = pool
        self.kept = [pool.get_new_blocks(self.up(n) // page) for n in self.lens]

    def end(self) -> None:
        """Give every request's pages back."""
        for blocks in self.kept:
            self.pool.free_blocks(blocks)

    def round(self) -> float:
        """Seconds of one round."""
        before, during, after = self.plan()
        taken = sum(d - b for d, b in zip(during, before, strict=True)) // self.page
        kept = sum(a - b for a, b in zip(after, before, strict=True)) // self.page
        spent: list[Any] = []

        def work() -> None:
            blocks = self.pool.get_new_blocks(taken)
            self.pool.free_blocks(blocks[kept:])
            spent.append(blocks[:kept])

        took = once(work)
        self.kept.extend(spent)
        self.step()
        return took


class SglangRounds(Batch):
    """Rounds with sglang's allocators: ``alloc_extend`` and a free of the overshoot's slots or pages."""

    def __init__(self, allocator: Any, page: int, batch: int, reserve: int, free: str) -> None:
        super().__init__(page, batch, reserve)
        self.allocator, self.free = allocator, free
        self.slots = [allocator.alloc(self.up(n)) for n in self.lens]
        self.last = torch.stack([s[-1] for s in self.slots])

    def end(self) -> None:
        """Give every request's slots back."""
        self.allocator.free(torch.cat(self.slots))

    def round(self) -> float:
        """Seconds of one round."""
        before, during, after = self.plan()
        prefix, seq = torch.tensor(before), torch.tensor(during)
        new = [d - b for d, b in zip(during, before, strict=True)]
        # Offset of the overshoot in what the round allocates, and of what stays: known before any page is.
        starts = [sum(new[:i]) for i in range(self.batch)]
        keep = [a - b for a, b in zip(after, before, strict=True)]
        over = torch.cat([torch.arange(s + k, s + n) for s, k, n in zip(starts, keep, new, strict=True)])
        stays = torch.cat([torch.arange(s, s + k) for s, k in zip(starts, keep, strict=True)])
        firsts, total, allocator = over[:: self.page].clone(), sum(new), self.allocator
        spent: list[Any] = []

        def work() -> None:
            if self.page == 1:
                out = allocator.alloc(total)
                allocator.free(out[over])
            else:
                out = allocator.alloc_extend(prefix, prefix, seq, seq, self.last, total)
                if self.free == "slots":
                    allocator.free(out[over])
                else:
                    allocator.free_page_ids(out[firsts] // self.page)
            spent.append(out)

        took = once(work)
        self.slots.append(spent[0][stays])
        self.step()
        return took


class SpecrsRounds(Batch):
    """Rounds through specrs's Python bindings."""

    def __init__(self, module: Any, page: int, batch: int, reserve: int, pages: int) -> None:
        super().__init__(page, batch, reserve)
        width = -(-(4096 + reserve + page) // page)
        self.pool = module.Pool(pages + 1, page, batch, width)
        self.seqs = [self.pool.create() for _ in range(batch)]
        self.pool.reserve(list(zip(self.seqs, self.lens, strict=True))).commit(self.lens)

    def round(self) -> float:
        """Seconds of one round."""
        _, during, _ = self.plan()
        self.step()
        pool, seqs, lens = self.pool, self.seqs, self.lens

        def work() -> None:
            pool.reserve(list(zip(seqs, during, strict=True))).commit(lens)

        return once(work)


def once(work: Callable[[], None]) -> float:
    """Seconds of one call; rounds can't be repeated, since each starts where the last one ended."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounds_of(make: Callable[[], Any]) -> tuple[Timer, Any]:
    """A timer that gives the median of 8 rounds, beginning anew before requests would grow too long."""
    state: dict[str, Any] = {"rounds": make(), "left": 256}

    def sample() -> float:
        if state["left"] <= 0:
            if hasattr(state["rounds"], "end"):
                state["rounds"].end()
            state["rounds"], state["left"] = make(), 256
        state["left"] -= 8
        return float(statistics.median(state["rounds"].round() for _ in range(8)))

    return sample, state["rounds"]


def ask(driver: Driver, *words: object) -> float:
    """Seconds of one cycle by the Rust core."""
    return float(driver.ask(*words)["ns"]) * 1e-9


def specrs_module() -> Any:
    """The bindings, or None where they are not built."""
    try:
        return importlib.import_module("specrs._specrs")
    except ImportError:
        return None


def bench_raw(driver: Driver, block_pool: Any, allocators: tuple[Any, Any], repeats: int) -> list[dict[str, Any]]:
    """Take n pages and give them back."""
    rows = []
    module = specrs_module()
    for pages in POOLS:
        vllm = block_pool(pages + 1, False, 16)
        token = allocators[0](pages, torch.float16, "cpu", None, False)
        paged = allocators[1](pages * 64, 64, torch.float16, "cpu", None, False)
        bound = module.Pool(pages + 1, 16, 1, 1) if module else None
        for n in RAW:

            def with_vllm(vllm: Any = vllm, n: int = n) -> None:
                vllm.free_blocks(vllm.get_new_blocks(n))

            def with_token(token: Any = token, n: int = n) -> None:
                token.free(token.alloc(n))

            def with_paged(paged: Any = paged, n: int = n) -> None:
                paged.free_page_ids(paged.alloc(64 * n)[::64] // 64)

            def with_bindings(bound: Any = bound, n: int = n) -> None:
                bound.free_pages(bound.alloc_pages(n))

            candidates: dict[str, Timer] = {
                "specrs": partial(ask, driver, "raw", pages, n, 0),
                "specrs_shuffled": partial(ask, driver, "raw", pages, n, 1),
                "vllm": partial(seconds, with_vllm),
                "sglang_p1": partial(seconds, with_token),
                "sglang_p64": partial(seconds, with_paged),
            }
            if bound:
                candidates["specrs_python"] = partial(seconds, with_bindings)
            medians = interleave(candidates, repeats)
            free = {
                "specrs": driver.ask("raw", pages, n, 0)["free"],
                "vllm": vllm.get_num_free_blocks(),
                "sglang_p1": token.available_size(),
                "sglang_p64": paged.available_size() // 64,
            }
            if set(free.values()) != {pages}:
                raise AssertionError(f"pages free after {n} of {pages}: {free}")
            row = {"pool": pages, "n": n, "ns": {k: round(v * 1e9, 1) for k, v in medians.items()}}
            rows.append(finish(row, n))
    return rows


def bench_rounds(driver: Driver, block_pool: Any, allocators: tuple[Any, Any], repeats: int) -> list[dict[str, Any]]:
    """Reserve, commit and free overshoot for a batch."""
    rows = []
    module = specrs_module()
    for pages in POOLS:
        for page in (1, 16, 64):
            reserve = driver.ask("geometry", page)["reserve"]
            for batch in BATCHES:
                if batch * 2048 > pages * page:
                    continue  # the requests themselves do not fit
                made: dict[str, Any] = {}
                vllm = block_pool(pages + 1, False, 16)

                shape = (page, batch, reserve)
                makers: dict[str, Callable[[], Any]] = {"vllm": partial(VllmRounds, vllm, *shape)}
                kind = (torch.float16, "cpu", None, False)
                if page == 1:
                    token = allocators[0](pages, *kind)
                    makers["sglang"] = partial(SglangRounds, token, *shape, "slots")
                else:
                    for name, freed in ("sglang", "slots"), ("sglang_page_ids", "pages"):
                        paged = allocators[1](pages * page, page, *kind)
                        makers[name] = partial(SglangRounds, paged, *shape, freed)
                if module:
                    makers["specrs_python"] = partial(SpecrsRounds, module, *shape, pages)
                candidates: dict[str, Timer] = {
                    "specrs": partial(ask, driver, "round", page, batch, pages, 0),
                    "specrs_shuffled": partial(ask, driver, "round", page, batch, pages, 1),
                }
                for name, make in makers.items():
                    candidates[name], made[name] = rounds_of(make)
                # The accounts after 32 rounds from the start, before anything is timed.
                for rounds in made.values():
                    for _ in range(COMPARED):
                        rounds.round()
                answer = driver.ask("round", page, batch, pages, 0)
                sums = {name: sum(r.lens) for name, r in made.items()}
                free = {name: free_pages(r, page) for name, r in made.items()}
                if set(sums.values()) != {answer["sum_after_32"]} or set(free.values()) != {answer["free_after_32"]}:
                    raise AssertionError(f"P={page} batch {batch}: {sums}, {free}, specrs {answer}")
                medians = interleave(candidates, repeats)
                row = {"pool": pages, "page_size": page, "batch": batch, "pages_per_round": answer["pages"],
                       "ns": {k: round(v * 1e9, 1) for k, v in medians.items()}}  # fmt: skip
                rows.append(finish(row, answer["pages"]))
    return rows


def free_pages(rounds: Any, page: int) -> int:
    """Return the free pages of the pool that the rounds use."""
    if isinstance(rounds, VllmRounds):
        return int(rounds.pool.get_num_free_blocks())
    if isinstance(rounds, SglangRounds):
        return int(rounds.allocator.available_size()) // page
    return int(rounds.pool.stats()["free_pages"])


def finish(row: dict[str, Any], pages: float) -> dict[str, Any]:
    """Add ns a page and the ratios, and print the row."""
    ns = row["ns"]
    row["ns_per_page"] = round(ns["specrs"] / pages, 2)
    row["ns_per_page_shuffled"] = round(ns["specrs_shuffled"] / pages, 2)
    row["times"] = {k: round(v / ns["specrs"], 1) for k, v in ns.items() if not k.startswith("specrs")}
    shape = " ".join(f"{k}={row[k]}" for k in ("pool", "page_size", "batch", "n") if k in row)
    figures = f"{row['ns_per_page']} ns/page, {row['ns_per_page_shuffled']} shuffled"
    print(shape, figures, {k: f"{v / 1e3:.2f} us" for k, v in ns.items()}, row["times"], flush=True)
    return row


def goals(raw: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The goal's three clauses, each with the worst figure."""
    over_vllm = min(r["times"]["vllm"] for r in raw if r["n"] >= 64)
    at_64 = [r for r in rounds if r["page_size"] == 64 and r["batch"] >= 64]
    over_sglang = {k: min(r["times"][k] for r in at_64) for k in ("sglang", "sglang_page_ids")}
    all_rows = [r for r in raw if r["n"] >= 64] + rounds
    return {
        **{
            f"{key} <= 10": {
                "worst": max(r[key] for r in all_rows),
                "rows_within": sum(r[key] <= 10 for r in all_rows),
                "rows": len(all_rows),
            }
            for key in ("ns_per_page", "ns_per_page_shuffled")
        },
        "BlockPool >= 20x at n >= 64": {"worst": over_vllm, "met": over_vllm >= 20},
        "sglang >= 100x at P = 64, batch >= 64": {"worst": over_sglang, "met": min(over_sglang.values()) >= 100},
    }


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    # More threads only slow tensors of this size down, most of all on a machine that others use too.
    torch.set_num_threads(1)
    block_pool, allocators = vllm_block_pool(), sglang_allocators()
    driver = Driver(release_binary("allocator_driver"))
    raw = bench_raw(driver, block_pool, allocators, args.repeats)
    rounds = bench_rounds(driver, block_pool, allocators, args.repeats)
    driver.close()
    met = goals(raw, rounds)
    print(met)
    peers = {"vllm": VLLM, "sglang": SGLANG}
    write_result("allocator", {"goal": 1, "peers": peers, "goals": met, "raw": raw, "rounds": rounds})


if __name__ == "__main__":
    main()
