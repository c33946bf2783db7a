"""`specrs bench`: texts of figures worked by hand, arguments, errors, and real runs of small models on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch

from modelzoo import Pair, target_config, write_json
from specrs import ConfigError, DeviceMemoryError
from specrs.cli import main
from specrs.engine.devices.memory_plan import Budget, Head
from specrs.measuring import cases, floors, report, shapes
from specrs.measuring.rounds import EDGE, Steady
from specrs.models import Eagle3Head, LlamaModel, ModelConfig, check_draft, ops_for

TIMES = {
    "type": ["object", "null"], "required": ["ms", "host_ms", "period_ms", "floor_ms", "of_floor"],
    "properties": {"ms": {"type": "number", "exclusiveMinimum": 0},
                   "floor_ms": {"type": "number", "exclusiveMinimum": 0}, "period_ms": {"type": ["number", "null"]}},
}  # fmt: skip
SCHEMA = {
    "type": "object", "additionalProperties": False,
    "properties": {
        "specrs": {"type": "string"}, "commit": {"type": "string"}, "date": {"type": "string"},
        "device": {"type": "string"}, "driver": {"type": ["string", "null"]},
        "versions": {"required": ["python", "torch"]},
        "bytes_per_second": {"type": "integer", "exclusiveMinimum": 0},
        "model": {"required": ["name", "random_weights", "layers", "weights_dtype", "draft", "rounds"]},
        "cases": {"type": "array", "minItems": 1, "items": {
            "required": ["batch", "context", "tree_shape", "pays_from", "tokens_per_second", "same_tokens", "in_turns",
                         "memory", "error"],
            "properties": {"plain": TIMES, "tree": TIMES},
        }},
        "answers": {"type": ["object", "null"], "required": ["prompts", "tokens", "speed_up", "same_tokens"]},
        "answers_error": {"type": ["string", "null"]},
        "kernels": {"type": "array"},
    },
}  # fmt: skip
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[arg-type, call-overload]


def bench(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """Run the command, and return what it wrote."""
    path = tmp_path / "bench.json"
    assert main(["bench", "--device", "cpu", "--json", str(path), *argv]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    jsonschema.validate(found, SCHEMA)
    return found


def fake(rows: list[cases.Row]) -> report.Report:
    """A report of an invented machine."""
    machine = {"specrs": "0.1.0", "commit": "abc", "date": "2026-01-01", "device": "cuda:0 (GPU)", "driver": "580.1",
               "versions": {"python": "3.12", "torch": "2.11"}}  # fmt: skip
    model = {"name": "shape", "random_weights": True, "layers": 2, "weights_dtype": "16 bits", "draft": "random",
             "rounds": 24}  # fmt: skip
    return report.Report(machine, model, 2e12, rows)


def test_the_text_of_figures_that_are_given() -> None:
    case = cases.Case.of(8, 1024, (2, 4, 8), 24)
    memory: dict[str, int | None] = {"weights": 16_000_000_000, "kv_per_request": 134_000_000, "other": 900_000_000}
    good = cases.Row(
        case, cases.RoundTimes(5.0, 0.5, 4.9, 4.0), cases.RoundTimes(8.0, 0.6, 7.9, 6.0), True, True, memory
    )
    failed = cases.Row(cases.Case.of(64, 8192, (1, 2, 3), 24), error="DeviceMemoryError: too large")
    found = fake([good, failed])
    found.kernels = [{"batch": 8, "context": 1024, "plain": {
        "classes": {"products": {"us": 4000.0}, "attention": {"us": 500.25}}, "unknown_us": {"x": 1.5},
        "sum_us": 4501.75, "busy_us": 4400.0, "launches": 12.0,
    }, "tree": {"rounds": 0, "error": "no profiler"}}]  # fmt: skip
    assert (
        found.text()
        == """\
specrs 0.1.0, commit abc, python 3.12, torch 2.11
cuda:0 (GPU), driver 580.1, memory 2000 GB/s
shape: random weights, 2 layers, weights 16 bits, draft head: random

batch  context  plain ms  floor ms  of floor  tokens/s  tree K,S,V  tree ms  floor ms  of floor  pays from
    8     1024     5.000     4.000       80%      1600       2,4,8    8.000     6.000       75%       1.60
   64     8192         -         -         -         -       1,2,3        -         -         -          -
batch 64, context 8192: DeviceMemoryError: too large
ms: a steady round, median. floor: reading weights and KV at the bandwidth above. pays from: tokens a round from
which drafting with this tree is faster than plain decoding.

batch  context  weights MB  KV MB a request  other MB
    8     1024       16000              134       900
   64     8192           -                -         -

GPU time of a round by kernel, microseconds
class          8 x 1024 plain
products               4000.0
attention               500.2
other kernels             1.5
sum                    4501.8
device busy            4400.0
launches                   12
8 x 1024 tree: no profiler

tokens identical with drafts and without"""
    )
    assert found.record()["cases"][0]["pays_from"] == 1.6
    jsonschema.validate(json.loads(json.dumps(found.record())), SCHEMA)
    good.in_turns, good.same_tokens = False, False
    assert "one engine at a time" in found.text() and found.text().endswith("DIFFERENT with drafts and without")
    assert not found.identical


def test_memory_beside_weights_is_what_the_other_lines_of_the_budget_state() -> None:
    lines = (("weights of the target", 700), ("weights of the draft head", 50), ("activations", 30), ("logits", 4))
    llm: Any = SimpleNamespace(budget=Budget(0, 10_000, lines, 8, 16))
    assert cases.stated_beside(llm) == 34
    assert [cases.usual_tree(batch) for batch in (1, 2, 64, 256)] == [(8, 6, 64), (4, 5, 24), (1, 2, 3), (1, 2, 3)]


def test_answers_in_a_line() -> None:
    found = fake([])
    found.answers = cases.Answers(tokens=200, plain=[1.0, 1.0], drafting=[0.6, 0.4], rounds=80)
    assert "2 answers of 100 tokens" in found.text()
    assert "plain 100 tokens/s, drafting 200 tokens/s, 2.00x, 2.50 tokens a round" in found.text()
    assert found.answers.record()["speed_ups"] == [1.6667, 2.5]


def test_floors_by_hand() -> None:
    sizes = ModelConfig.from_dict(target_config(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        intermediate_size=16, vocab_size=32,
    ))  # fmt: skip
    # A layer: q 8x8, k and v 4x8, o 8x8, three matrices of 16x8; and lm_head. K and V of a token: 4 each in 3 layers.
    target = 3 * (64 + 32 + 32 + 64 + 384) + 256
    reads = floors.Reads.of(sizes, None, weight_size=2, kv_size=4)
    assert (reads.target_weights, reads.target_kv) == (2 * target, 4 * 24)
    assert reads.plain(2, 10) == 2 * target + 20 * 96 == reads.tree(2, 10, 0)
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4,
           "num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 32, "draft_vocab_size": 16,
           "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
           "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # fmt: skip
    from specrs.models import Eagle3Config
    from specrs.models.layer import LayerKind, layer_shapes

    config = Eagle3Config.from_dict(raw)
    layer = layer_shapes(config, LayerKind(), "midlayer.", 16)
    head = Head(config, {"fc.weight": (8, 24), "lm_head.weight": (16, 8), "norm.weight": (8,), **layer})
    reads = floors.Reads.of(sizes, head)
    # q, k and v read rows of 16, the rest is as above, lm_head is 16x8; fc is read once a round.
    assert reads.head_weights == 2 * (128 + 64 + 64 + 64 + 384 + 128)
    assert reads.fusion == 2 * 8 * 24 and reads.head_kv == 2 * 8
    assert reads.tree(1, 10, 4) == reads.plain(1, 10) + reads.fusion + 4 * (reads.head_weights + 10 * 16)


def test_the_floor_of_the_8b_shape_is_known(tmp_path: Path) -> None:
    sizes = ModelConfig.from_dict(shapes.shape_config("llama-3.1-8b"))
    reads = floors.Reads.of(sizes, None)
    assert 15.0e9 < reads.target_weights < 15.1e9  # 8.03e9 weights without the embedding's 0.525e9, of 2 bytes
    assert reads.target_kv == 131072


@pytest.mark.parametrize("name", list(shapes.SHAPES))
def test_shapes_are_configurations_that_run(name: str, tmp_path: Path) -> None:
    from specrs.models.cuda import why_not

    with shapes.random_weights():
        target, draft = shapes.directories(tmp_path, shapes.shape_config(name))
        sizes = ModelConfig.from_directory(target)
        config, found = check_draft(draft, sizes)
    assert why_not(sizes) is None and why_not(config) is None
    assert found["fc.weight"] == (sizes.hidden_size, 3 * sizes.hidden_size)


def test_random_weights_are_the_same_in_every_engine_and_gone_behind_the_block(tiny: Pair, tmp_path: Path) -> None:
    before = LlamaModel.load(tiny.target, ops_for()).embedding.table.clone()  # type: ignore[attr-defined]
    config = target_config(num_hidden_layers=2)
    with shapes.random_weights():
        target, draft = shapes.directories(tmp_path, config)
        one, two = (LlamaModel.load(target, ops_for()) for _ in range(2))
        assert torch.equal(one.embedding.table, two.embedding.table)  # type: ignore[attr-defined]
        assert one.embedding.table.float().std() > 0.5  # type: ignore[attr-defined]
        Eagle3Head.load(draft, one.ops, one)
    assert torch.equal(LlamaModel.load(tiny.target, ops_for()).embedding.table, before)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="safetensors"):
        LlamaModel.load(target, ops_for())


def test_a_small_model_with_its_head(tiny: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--draft", str(tiny.draft), "--batch", "1,2", "--context", "16", "--rounds", "3", "--tree", "2,2,4"]
    found = bench(tmp_path, str(tiny.target), *argv, "--plot", str(tmp_path / "b.svg"))
    out = capsys.readouterr().out
    assert "tokens identical" in out and "2,2,4" in out and "draft head: draft" in out
    assert [(row["batch"], row["context"], row["tree_shape"]) for row in found["cases"]] == [
        (1, 16, [2, 2, 4]), (2, 16, [2, 2, 4])]  # fmt: skip
    assert found["answers"] is None and found["answers_error"] is None  # it has no tokenizer
    for row in found["cases"]:
        assert row["error"] is None and row["same_tokens"] and row["in_turns"]
        assert row["pays_from"] == pytest.approx(row["tree"]["ms"] / row["plain"]["ms"], rel=1e-3)
        assert row["memory"]["other"] is None and row["memory"]["weights"] > 0
    drawn = (tmp_path / "b.svg").read_text()
    assert drawn.startswith("<?xml") and "plain round" in drawn and "2 x 16" in drawn


def test_a_model_without_a_head_has_plain_rounds_and_answers(bytes_pair: Pair, tmp_path: Path) -> None:
    found = bench(tmp_path, str(bytes_pair.target), "--batch", "1", "--context", "16", "--rounds", "3")
    [row] = found["cases"]
    assert row["tree"] is None and row["tree_shape"] is None and row["pays_from"] is None and row["plain"]["ms"] > 0
    answers = found["answers"]
    assert answers["same_tokens"] and answers["prompts"] == 4 == len(answers["speed_ups"])
    assert answers["tokens"] == 4 * 128


def test_a_shape_of_a_file_cut_to_some_layers(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", target_config(num_hidden_layers=8))
    argv = ["--layers", "2", "--batch", "1", "--context", "16", "--rounds", "3"]
    found = bench(tmp_path, "--shape", str(tmp_path / "config.json"), *argv)
    assert found["model"]["random_weights"] and found["model"]["layers"] == 2 and found["model"]["draft"] == "random"
    [row] = found["cases"]
    assert row["same_tokens"] and row["tree"]["ms"] > 0 and found["answers"] is None


@pytest.mark.parametrize(("argv", "said"), [
    (["--shape", "llama-9"], "shape = 'llama-9': must be one of llama-3.2-1b, llama-3.1-8b"),
    (["--shape", "llama-3.1-8b", "--layers", "33"], "layers = 33: the shape 'llama-3.1-8b' has 1 to 32"),
    (["--shape", "llama-3.3-70b"], "shape = 'llama-3.3-70b' on the CPU: weights of two engines take"),
    (["--shape", "llama-3.1-8b", "--draft", "x"], "--draft 'x' with --shape llama-3.1-8b"),
    (["--shape", "llama-3.1-8b", "--model", "x"], "MODEL 'x' with --shape llama-3.1-8b"),
    (["--layers", "2"], "layers = 2: only a --shape can be cut"),
    (["--context", "4000"], "of pystdlib-16m; at most"),
    (["--context", "0"], "context = 0: must be at least 1"),
    (["--batch", "-1"], "batch = -1: must be at least 1"),
    (["--batch", "1,x"], "batch = '1,x': must be numbers, as 1,8"),
    (["--rounds", "0"], "rounds = 0: must be at least 1"),
    (["--tree", "4,4"], "--tree '4,4': must be K,S,V"),
    (["--kernels"], "kernels: times of a GPU's kernels; the device is cpu"),
    (["--plot", "x.gif"], "output = 'x.gif': must end in .svg or .png"),
    (["--json", "/nowhere/x.json"], "json = '/nowhere/x.json': no such directory"),
    (["--model", "/nowhere"], "/nowhere"),
])  # fmt: skip
def test_errors_name_the_operand_its_value_and_the_limit(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--device", "cpu", *argv]) == 2
    told = capsys.readouterr().err
    assert told.startswith("specrs: ") and said in told and told.count("\n") == 1


def test_a_tree_without_a_head_is_an_error(tiny: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny.target), "--device", "cpu", "--tree", "4,4,16"]) == 2
    assert "tree = 4,4,16: rounds with trees need a draft head, and target was given without" in capsys.readouterr().err


def test_usual_contexts_are_those_that_the_model_has(tiny: Pair) -> None:
    own = cases.Subject.of(None, None, "cpu")
    assert [(c.batch, c.context) for c in cases.cases_of(own, None, None, None, 12)] == [
        (1, 256), (1, 1024), (4, 256), (4, 1024)]  # fmt: skip
    small = cases.Subject.of(tiny.target, None, "cpu")
    with pytest.raises(ConfigError, match="target has a context of 256, too short for the usual cases"):
        cases.cases_of(small, None, None, None, 12)


class Engine:
    """An engine that only says whether it is open."""

    opened: list[str]

    def __init__(self, name: str, opened: list[str], most: int) -> None:
        if len(opened) == most:
            raise DeviceMemoryError("full", 0, 0, 0, "")
        self.name, self.opened = name, opened
        opened.append(name)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.remove(self.name)


@pytest.mark.parametrize(("room", "groups"), [(2, [["plain", "tree"]]), (1, [["plain"], ["tree"]])])
def test_engines_that_do_not_fit_together_run_one_after_the_other(room: int, groups: list[list[str]]) -> None:
    opened: list[str] = []
    openers: Any = {name: lambda name=name: Engine(name, opened, room) for name in ("plain", "tree")}
    assert [list(opened) for _ in cases.together(openers)] == groups
    assert opened == []
    with pytest.raises(DeviceMemoryError):
        next(cases.together({"plain": lambda: Engine("plain", opened, 0)}))  # type: ignore[dict-item, return-value]


def test_a_case_that_fails_has_its_error_and_the_others_stay(
    tiny: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = cases.Subject.open

    def opened(self: cases.Subject, case: cases.Case, kind: str, graphs: Any = None) -> Any:
        if case.batch == 2:
            raise ConfigError("batch = 2: too many today")
        return usual(self, case, kind, graphs)

    monkeypatch.setattr(cases.Subject, "open", opened)
    found = bench(tmp_path, str(tiny.target), "--batch", "1,2", "--context", "16", "--rounds", "3")
    assert [row["error"] for row in found["cases"]] == [None, "ConfigError: batch = 2: too many today"]
    assert "batch 2, context 16: ConfigError: batch = 2: too many today" in capsys.readouterr().out
    assert main(["bench", str(tiny.target), "--device", "cpu", "--batch", "2", "--context", "16", "--rounds", "3"]) == 1


def test_edges_of_a_turn_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says 1 ms for steps in the middle, and 100 ms for the first and the last ones."""
    ticks = iter([0.1] * EDGE + [0.001] * 5 + [0.1] * EDGE)

    def clock() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += next(ticks)
            yield now

    times = clock()
    monkeypatch.setattr("specrs.measuring.rounds.time.perf_counter", lambda: next(times))

    class Steps:
        unfinished = 1

        def step(self) -> list[Any]:
            return []

    run = Steady.__new__(Steady)
    run._llm, run._ids, run._tokens = Steps(), [0], {}  # type: ignore[assignment]
    run._steps, run._hosts, run._periods = [], [], []
    run.turn(2 * EDGE + 5)
    assert run.figures() == {"step_ms": 1.0, "host_ms": 1.0}
    Steps.unfinished = 0
    ticks = iter([0.1])
    with pytest.raises(RuntimeError, match="0 steady rounds, at least 4 are timed"):
        run.turn(4)


def test_progress_names_what_runs(tiny: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(tiny.target), "--batch", "1", "--context", "16", "--rounds", "3"]
    bench(tmp_path, *argv, "--progress")
    assert "batch 1, context 16" in capsys.readouterr().err
    bench(tmp_path, *argv)  # no terminal: no bar
    assert capsys.readouterr().err == ""
