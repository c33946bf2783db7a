"""The bench over public prompt sets: what it reads of files, which prompts it picks, and the figures that it makes."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import spec_bench


def test_sets_are_read_as_they_are_published(tmp_path: Path) -> None:
    lines = [{"category": "writing", "turns": ["a", "b"]}, {"category": "rag", "turns": ["c"]}]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    spec = spec_bench.Set.read(f"spec={tmp_path / 'q.jsonl'}@abc")
    assert spec.prompts == [("mt_bench", "a"), ("rag", "c")] and spec.told["commit"] == "abc"
    assert spec.told["sha256"] == hashlib.sha256((tmp_path / "q.jsonl").read_bytes()).hexdigest()
    (tmp_path / "h.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "def f():"}\n'))
    assert spec_bench.Set.read(f"humaneval={tmp_path / 'h.jsonl.gz'}").prompts == [("humaneval", "def f():")]
    (tmp_path / "g.jsonl").write_text('{"question": "How many?", "answer": "4"}')
    other = spec_bench.Set.read(f"gsm8k={tmp_path / 'g.jsonl'}")
    assert other.prompts == [("gsm8k", "How many?")] and other.told["commit"] is None


def test_prompts_of_each_category_are_picked_at_equal_distances() -> None:
    prompts = [("a", str(i)) for i in range(10)] + [("b", "x")]
    assert spec_bench.picked(prompts, 4) == [("a", "0"), ("a", "2"), ("a", "5"), ("a", "7"), ("b", "x")]


def test_speeds_are_over_plain_decoding_of_the_same_prompts() -> None:
    counts = spec_bench.Measured()
    for name, rounds, seconds, tokens in (("plain", 4, 2.0, [1, 2, 3, 4]), ("h all", 2, 1.0, [1, 2, 3, 5])):
        out = SimpleNamespace(token_ids=tokens, rounds=rounds, mean_accepted=4 / rounds)
        for category in ("rag", "qa"):
            counts.found.setdefault(name, {}).setdefault(category, spec_bench.Count()).add(out, seconds, [1, 2, 3, 4])
    rows = counts.rows()
    assert [*rows] == ["rag", "qa", "all"] and rows["all"]["plain"]["prompts_that_differ"] == 0
    assert rows["all"]["h all"] == {"tokens_a_round": 2.0, "speed": 2.0, "tokens": 8, "rounds": 4, "seconds": 2.0,
                                    "prompts_that_differ": 2}  # fmt: skip
    assert spec_bench.table_of(rows).splitlines()[1] == "rag | 2.00 (2.00x)"


def test_a_plot_is_drawn_and_engines_are_chosen_by_name(tmp_path: Path) -> None:
    engines = spec_bench.engines_of(argparse.Namespace(draft=["e=DIR"], only=["tree", "sources"]))
    assert [*engines] == ["plain", "sources", "e tree"] and engines["e tree"]["tree"] == (4, 6, 32)
    row = {"plain": {"tokens_a_round": 1.0, "speed": 1.0}, "e tree": {"tokens_a_round": 2.0, "speed": 1.5}}
    spec_bench.plot({"rag": row, "all": row}, "a model", tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000
