"""``specrs generate``: prompts from files, JSON, colours, and what ``--compare`` tells."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelzoo import Pair
from specrs import LLM, SamplingParams
from specrs.cli import main, terminal
from specrs.cli.comparing import PAIRS, Comparison


def model(pair: Pair, *argv: str) -> list[str]:
    return ["generate", "--model", str(pair.target), "--draft", str(pair.draft), "--ignore-eos", *argv]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# -- prompts from files -----------------------------------------------------------------------------------------------


def test_every_line_of_a_file_is_a_prompt(bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = [
        "hello",
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 30, "id": "long"},
        {"prompt": "h\u00e9", "temperature": 1.0, "seed": 7, "n": 2, "id": {"a": 1}},
        {"prompt": "x" * 300},  # beyond the context
        {"messages": [{"role": "user", "content": "hi"}]},  # the model has no template
        {"prompt": "y", "max_tokens": 1, "logprobs": 0},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, asked)) + "\n", encoding="utf-8")
    assert main(model(bytes_pair, "--prompts-file", str(file), "--max-tokens", "5", "--max-batch", "2")) == 1
    out, err = capsys.readouterr()
    got = lines(out)
    assert [one["line"] for one in got] == [1, 3, 5, 5, 7, 9, 11]  # in order, whatever ended first
    assert [one.get("id") for one in got] == [None, "long", {"a": 1}, {"a": 1}, None, None, None]
    assert sorted(one["index"] for one in got if one["line"] == 5) == [0, 1]
    assert "leave no room" in got[4]["error"] and "no chat template" in got[5]["error"]
    assert "6 prompts, 2 failed; 46 tokens" in err
    with LLM(bytes_pair.target, bytes_pair.draft, max_batch=2) as llm:
        params = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
        [first] = llm.generate(["hello"], params)
        [long] = llm.generate([[1, 2, 3]], replace(params, max_tokens=30))
        [two] = llm.generate(["h\u00e9"], replace(params, temperature=1.0, seed=7, n=2))
    assert (got[0]["text"], got[0]["token_ids"], got[0]["prompt"]) == (first.text, first.token_ids, "hello")
    assert got[1]["token_ids"] == long.token_ids and len(long.token_ids) == 30
    by_index = {one["index"]: one["token_ids"] for one in got if one["line"] == 5}
    assert by_index == {one.index: one.token_ids for one in two.outputs}
    usage = {"prompt_tokens": 5, "completion_tokens": 5, "cached_tokens": 0}
    assert got[0]["usage"] == usage and got[0]["finish_reason"] == "length" and got[0]["stop_reason"] is None
    assert list(got[6]["logprobs"][0]) == [str(got[6]["token_ids"][0])]
    for one in (one for one in got if "error" not in one):
        assert one["accepted"] <= one["proposed"] and one["mean_accepted"] >= (1.0 if one["rounds"] else 0.0)


def test_conversations_of_a_file(bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    directory = tmp_path / "model"
    shutil.copytree(bytes_pair.target, directory)
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}>")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    assert main(["generate", "--model", str(directory), "--prompts-file", str(file), "--max-tokens", "3"]) == 0
    [one] = lines(capsys.readouterr().out)
    assert one["prompt"] == "hi>" and one["text"]


@pytest.mark.parametrize(
    ("text", "why"),
    [('"a"\nplain text\n', "line 2: not JSON"), ("3", "line 1: a JSON int"), ("{}", "line 1: no prompt"),
     ('{"prompt": "a", "prompt_token_ids": [1]}', "'prompt' and 'prompt_token_ids'"),
     ('{"prompt": 3}', "must be a text"), ('{"prompt": "a", "max_token": 3}', "max_token"),
     ('{"prompt": "a", "top_p": 7}', "top_p"), ("\n \n", "no prompts"), ("[" * 100_000, "line 1")],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named_before_a_model_is_read(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    assert main(["generate", "--model", "/nonexistent", "--prompts-file", str(file)]) == 2
    err = capsys.readouterr().err
    assert why in err and str(file) in err and err.count("\n") == 1


def test_a_prompt_beside_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["x"], ["--compare"]):
        assert main(["generate", *more, "--prompts-file", str(tmp_path)]) == 2
        assert "with --prompts-file" in capsys.readouterr().err


def test_an_output_as_json(bytes_pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(model(bytes_pair, "hello", "--json", "--max-tokens", "12", "--tree", "2,2,4", "--compare")) == 0
    out, err = capsys.readouterr()
    [one] = lines(out)
    assert one["prompt"] == "hello" and len(one["token_ids"]) == 12 and one["device"].startswith("cpu")
    told = one["compare"]
    assert told["identical"] and told["pairs"] == PAIRS == len(told["plain_seconds"]) == len(told["ratios"])
    assert told["proposed"] > 0 and told["ratio"] is not None and "12 tokens" in err


# -- comparing --------------------------------------------------------------------------------------------------------


def test_a_comparison_tells_what_was_drafted_and_a_spread(bytes_pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(model(bytes_pair, "hello", "--max-tokens", "20", "--tree", "2,2,4", "--compare", "--greedy")) == 0
    err = capsys.readouterr().err
    found = re.search(r"([\d.]+)x \(([\d.]+)x to ([\d.]+)x in (\d+) pairs\)", err)
    assert found and float(found[2]) <= float(found[1]) <= float(found[3]) and int(found[4]) == PAIRS
    assert re.search(rf"drafted in {PAIRS} of {PAIRS} runs: \d+ of \d+ rounds, \d+ of \d+ draft tokens accepted", err)
    assert "tokens identical" in err


def test_where_nothing_was_drafted_no_ratio_is_told(bytes_pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--max-tokens", "1", "--compare", "--greedy"]  # the prefill's token: there is no round
    assert main(model(bytes_pair, "hello", *one, "--tree", "2,2,4")) == 0
    err = capsys.readouterr().err
    assert f"nothing was drafted in {PAIRS} runs" in err and not re.search(r"\dx", err)
    assert "plain decoding: " in err and "tokens identical" in err
    assert main(model(bytes_pair, "hello", *one, "--json")) == 0
    [told] = lines(capsys.readouterr().out)
    assert told["compare"]["ratio"] is None and told["compare"]["ratios"] == [] and told["compare"]["proposed"] == 0


def test_a_ratio_is_of_pairs() -> None:
    found = Comparison(10, adaptive=True, speculative=[1.0, 2.0, 4.0], plain=[2.0, 3.0, 16.0])
    assert found.ratios == []
    with LLM(speculative=False, max_batch=1, max_context_len=64) as llm:
        [out] = llm.generate([[5, 6]], SamplingParams(max_tokens=2))
    found.outputs += [replace(out, proposed=4, drafting_rounds=1), out, out]
    assert found.ratios == [2.0, 1.5, 4.0]
    assert "2.00x (1.50x to 4.00x in 3 pairs); drafted in 1 of 3 runs" in found.line()


@pytest.mark.parametrize(
    ("argv", "why"),
    [(["--no-draft"], "--no-draft decodes plainly"), (["--drafters", ""], "--drafters '' names no source")],
)  # fmt: skip
def test_a_comparison_that_cannot_be_names_the_reason(
    argv: list[str], why: str, bytes_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(model(bytes_pair, "hello", "--max-tokens", "2", "--compare", *argv)) == 0
    assert f"[nothing to compare: {why}" in capsys.readouterr().err


# -- colours ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.wants_color(Terminal()) and not terminal.wants_color(io.StringIO())
    assert terminal.marks_of("auto", Terminal()) == ("\x1b[32m", "\x1b[0m")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as m:
            m.setenv(name, value)
            assert not terminal.wants_color(Terminal()) and terminal.marks_of("auto", Terminal()) == ("", "")
            assert terminal.marks_of("color", Terminal()) != ("", "")  # the mark that is asked for is given
    monkeypatch.setenv("NO_COLOR", "")  # empty is not set, by the convention
    assert terminal.wants_color(Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["layout"]) == 0 and "\x1b[" in sys.stdout.getvalue()  # type: ignore[attr-defined]
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["layout"]) == 0 and "\x1b[" not in sys.stdout.getvalue()  # type: ignore[attr-defined]


def test_layout_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def widest(columns: int | None) -> tuple[int, int]:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["layout", "--page-size", "16", "--length", "40"]) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
        return max(map(len, rows)), len(rows)

    assert widest(None) == (65, 4) and widest(130) == (65, 4)
    assert widest(131) == (131, 2) and widest(400) == (263, 1) and widest(20) == (65, 4)


def test_prompts_of_a_pipe(bytes_pair: Pair) -> None:
    argv = [sys.executable, "-m", "specrs", *model(bytes_pair, "--prompts-file", "-", "--max-tokens", "2")]
    done = subprocess.run(argv, input='"\u00e9"\n'.encode(), capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    [one] = lines(done.stdout.decode())
    assert one["prompt"] == "\u00e9" and b"1 prompts, 0 failed" in done.stderr
