"""The command line, in process, on tiny models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelzoo import Pair, write_json
from specrs import LLM, SamplingParams
from specrs.cli import main


def test_generate_streams_marks_and_compares(bytes_pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "hello", "--model", str(bytes_pair.target), "--draft", str(bytes_pair.draft), "--compare"]
    argv += ["--max-tokens", "40", "--mark", "brackets", "--temperature", "1.5", "--seed", "3", "--ignore-eos"]
    argv += ["--tree", "8,3,60"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.startswith("hello")
    assert out.count("\u27e8") == out.count("\u27e9")
    assert "40 tokens" in err and "tokens/s" in err and "tokens a round" in err
    assert "tokens identical" in err


def test_marks_do_not_change_the_text(bytes_pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "x", "--model", str(bytes_pair.target), "--draft", str(bytes_pair.draft), "--max-tokens", "30"]
    texts = []
    for mark in ("none", "brackets", "auto"):
        assert main([*argv, "--mark", mark]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1].replace("\u27e8", "").replace("\u27e9", "") == texts[2]


def test_generate_takes_a_backend_and_a_layout(bytes_pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "x", "--model", str(bytes_pair.target), "--draft", str(bytes_pair.draft), "--max-tokens", "20"]
    argv += ["--ignore-eos", "--tree", "3,3,9", "--page-size", "4"]
    texts = []
    for more in ([], ["--attention-backend", "flash_attention", "--draft-layout", "holey", "--compare"],
                 ["--attention-backend", "triton", "--draft-attention", "lane"]):  # fmt: skip
        assert main([*argv, *more]) == 0
        out, err = capsys.readouterr()
        assert ("tokens identical" in err) == ("--compare" in more)
        texts.append(out)
    assert texts[0] == texts[1] == texts[2]
    assert main([*argv, "--attention-backend", "fa3"]) == 2
    assert "must be one of native, flashinfer, flash_attention, triton" in capsys.readouterr().err
    holey = ["--attention-backend", "flash_attention", "--draft-layout", "holey", "--draft-attention", "ancestors"]
    assert main([*argv, *holey]) == 2
    assert "What would work: draft_attention='lane'" in capsys.readouterr().err


def test_errors_are_one_line_with_the_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("specrs: ") and "nowhere" in err and err.count("\n") == 1
    assert main(["layout", "--page-size", "3"]) == 2
    assert "page_size = 3" in capsys.readouterr().err
    assert main(["layout", "-o", "x.gif"]) == 2
    assert ".svg or .png" in capsys.readouterr().err


def test_layout_draws_the_worked_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "--length", "7", "--page-size", "4", "--tree", "3,6"]) == 0
    out = capsys.readouterr().out
    assert "r=3, base=4, 3 page(s) a branch, row needs 40" in out
    slots = [s for page in out[out.index("[") :].split("]")[:-1] for s in page.replace("[", " ").split()]
    # positions 4..6 are copied to 16..18 and to 28..30; branches start at 7, 19 and 31
    assert slots[:7] == ["#"] * 7
    assert slots[7:13] == [f"0.{s}" for s in range(6)]
    assert slots[13:16] == ["."] * 3
    assert slots[16:25] == ["<4", "<5", "<6", *(f"1.{s}" for s in range(6))]
    assert slots[28:37] == ["<4", "<5", "<6", *(f"2.{s}" for s in range(6))]
    assert len(slots) == 40


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_layout_writes_pictures(tmp_path: Path, ending: str, bytes_pair: Pair) -> None:
    row, tree = tmp_path / f"row.{ending}", tmp_path / f"tree.{ending}"
    assert main(["layout", "--length", "100", "-o", str(row)]) == 0
    model = ["--model", str(bytes_pair.target), "--draft", str(bytes_pair.draft)]
    assert main(["layout", "--prompt", "some $text", *model, "-o", str(tree)]) == 0
    head = b"<?xml" if ending == "svg" else b"\x89PNG"
    assert row.read_bytes().startswith(head)
    assert tree.read_bytes().startswith(head)


def test_layout_of_long_prefixes_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "--length", "1000", "--page-size", "16"]) == 0
    assert "61 full page(s) of prefix: positions 0..975" in capsys.readouterr().out


def test_certify_proves_the_big_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["certify", "--tree", "8,5,64", "--page-size", "64", "--max-batch", "64",
            "--max-context", "131072"]  # fmt: skip
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "HOLDS   64 residues" in out
    # 5 steps x 64 requests x 8 branches x (131072 + 5) int32: 1.34 GB, where native needs a page table
    assert "1.34 GB" in out
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["holds"] and result["failures"] == []
    assert result["per_branch"]["bytes"] == 5 * 64 * 8 * (131072 + 5) * 4
    assert result["native_bytes"] < result["per_branch"]["bytes"] / 100
    assert result["native_bytes"] == sum(b["bytes"] for b in result["buffers"])


def certify_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    status = main(["certify", "--json", *argv])
    return status, json.loads(capsys.readouterr().out)


def test_certify_puts_the_formats_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tree", "8,5,64", "--page-size", "64", "--max-batch", "64",
            "--max-context", "131072"]  # fmt: skip
    status, result = certify_json(capsys, *argv)
    assert status == 0
    formats = {f["format"]: {y["layout"]: y for y in f["layouts"]} for f in result["formats"]}
    assert list(formats) == ["native", "flashinfer", "flash_attention", "triton"]
    # 5 steps of 512 lists of up to 131072 slots, int32 and int64, with 513 starts, and 512 last page lengths
    assert formats["flashinfer"]["dense"]["bytes_of"]["draft"] == 5 * 4 * (512 * 131072 + 513 + 512)
    assert formats["triton"]["dense"]["bytes_of"]["draft"] == 5 * (8 * 512 * 131072 + 4 * 513)
    assert formats["native"]["dense"]["bytes"] < 10**6 and formats["flash_attention"]["holey"]["bytes"] < 10**7
    assert "dense layout" in formats["native"]["holey"]["refused"]
    for layout in (y for f in ("flashinfer", "flash_attention", "triton") for y in formats[f].values()):
        assert layout["refused"] is None and layout["failed"] == 0
        assert layout["reads"] > 10**6 and layout["written_context"] == 131072
        assert layout["bytes"] == sum(n for phase, n in layout["bytes_of"].items() if phase != "extend")
        assert sum(layout["bytes_of"].values()) == sum(a["bytes"] for a in layout["arrays"])
    assert main(["certify", *argv]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("flashinfer  ") and "dense" in line)
    assert "1.34 GB" in row and row.endswith("holds")
    assert "CANNOT  native, holey layout" in out and "REVERT" not in out


def test_certify_of_one_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--format", "flash_attention"]) == 0
    out = capsys.readouterr().out
    # K = 4, step 2 of 8 requests: three columns
    line = next(x for x in out.splitlines() if x.startswith("expand_page_table") and "draft 2" in x)
    assert "32 x 3 int32" in line and "step + 1 3" in line
    assert "flashinfer" not in out and "native" not in out
    # more than int32 counts: said, with what would do, and exit status 1 for the one format that was asked for
    big = ["--max-batch", "65536", "--max-context", "4096", "--tree", "8,2,8"]
    assert main(["certify", "--format", "triton", *big]) == 1
    out = capsys.readouterr().out
    assert "CANNOT  triton, dense layout" in out and "native, would do" in out
    assert main(["certify", "--format", "all", *big]) == 0
    capsys.readouterr()
    # longer rows than a proof writes: they are shortened, and it says so
    assert main(["certify", "--format", "flash_attention", "--max-context", "300000", "--tree", "16,4,16"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("flash_attention")]
    assert len(rows) == 2 and all(row.endswith("holds (rows written up to 131,072 tokens)") for row in rows)


def test_certify_fails_where_a_fault_is_put_back() -> None:
    def certified(*argv: str) -> subprocess.CompletedProcess[bytes]:
        return run(["certify", *argv], env={**os.environ, "SPECRS_DEBUG_REVERT": "27338"})

    done = certified("--format", "flashinfer")
    out = done.stdout.decode()
    assert done.returncode == 1
    assert out.startswith("!!!!!!  REVERT 27338 IS IN FORCE") and out.splitlines()[-1].startswith(
        "!!!!!!  REVERT 27338"
    )
    # behind L = 2047 step 0 lists 8 * 4 * 2048 slots; without topk there are 8 * (2048 + 4)
    want = f"kv_indices of a full batch, elements: got {8 * 4 * 2048}, limit {8 * 2052} "
    assert want in out and "committed 2047, residue 15" in out
    assert "WARNING" in done.stderr.decode()
    done = certified("--format", "flashinfer", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["reverts"] == [27338] and not result["holds"]
    assert result["formats"][0]["layouts"][0]["failed"] > 0
    # page tables do not depend on the width that is lost
    result = json.loads(certified("--format", "flash_attention", "--json").stdout)
    assert result["formats"][0]["holds"]


def test_certify_refuses_what_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--tree", "2,1,4"]) == 2
    assert "draft_tokens = 4" in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    err = capsys.readouterr().err
    assert "usage: specrs" in err and "certify" in err


def test_generate_samples_as_the_model_says_unless_told_otherwise(
    bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(model: Path, *more: str) -> tuple[str, str]:
        assert main(["generate", "x", "--model", str(model), "--max-tokens", "30", "--ignore-eos", *more]) == 0
        out, err = capsys.readouterr()
        return out, err.rsplit("; ", 1)[1]

    greedy = text(bytes_pair.target)  # it has no generation_config.json
    assert greedy == text(bytes_pair.target, "--greedy") and greedy[1] == "greedy]\n"
    model = tmp_path / "model"
    shutil.copytree(bytes_pair.target, model)
    write_json(model / "generation_config.json", {"do_sample": True, "temperature": 0.6, "top_p": 0.9})
    default = text(model)
    assert default == text(bytes_pair.target, "--temperature", "0.6", "--top-p", "0.9", "--seed", "0")
    assert default[1] == "temperature 0.6, top_p 0.9, seed 0]\n"
    assert default != text(model, "--seed", "1")
    assert greedy == text(model, "--greedy") == text(model, "--temperature", "0", "--seed", "random")
    [out] = LLM(model).generate(["x"], SamplingParams(max_tokens=30, seed=0, ignore_eos=True))
    assert default[0].startswith("x" + out.text)  # the API samples by the same defaults


def test_the_model_in_the_package_samples_alike_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(speculative=False, max_batch=1, max_context_len=256)
    assert str(llm.default_sampling) == "temperature 0.6, top_p 0.9"
    [out] = llm.generate(["class Stack:"], SamplingParams(max_tokens=16, seed=0))
    assert main(["generate", "class Stack:", "--max-tokens", "16"]) == 0
    text, err = capsys.readouterr()
    assert text == f"class Stack:{out.text}\n" and "temperature 0.6, top_p 0.9, seed 0" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["layout", "--length", "-1"], "length = -1"), (["layout", "--tree", "3,0"], "steps = 0"),
     (["layout", "--tree", "3,6,0"], "--tree 3,6,0: draft_tokens = 0"), (["layout", "--tree", "0,6"], "topk = 0"),
     (["layout", "--tree", "class Stack:"], "--tree 'class Stack:': must be K,S,V or K,S, as 3,6"),
     (["certify", "--tree", "4,4"], "--tree '4,4': must be K,S,V, as 4,4,16"),
     (["record", "-o", "x", "--tree", "2,2,8"], "--tree 2,2,8: draft_tokens = 8"),
     (["layout", "--prompt", "x", "--rounds", "0"], "rounds = 0"), (["layout", "--length", "9" * 20], "length = 999"),
     (["layout", "-o", "/nonexistent/x.png"], "/nonexistent/x.png"), (["generate", "\udcff"], "not encodable"),
     (["generate", "x", "--stop", ""], "stop"), (["certify", "--max-batch", "0"], "max_batch = 0")],
)  # fmt: skip
def test_bad_values_are_one_line(
    argv: list[str], message: str, bytes_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    if argv[0] == "generate":
        argv = [*argv, "--model", str(bytes_pair.target)]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("specrs: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("former", ["--topk", "--steps", "--draft-tokens"])
@pytest.mark.parametrize("command", [["generate"], ["certify"], ["layout"], ["record", "-o", "x"]])
def test_a_former_name_of_the_tree_says_the_new_one(
    command: list[str], former: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        main([*command, former, "4"])
    assert e.value.code == 2
    assert f"{former}: the tree is one option, --tree K,S,V" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([command[0], "--help"])
    out = capsys.readouterr().out
    assert "--tree K,S" in out and former not in out


def run(argv: list[str], **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "specrs", *argv], capture_output=True, timeout=120, check=False, **kwargs
    )


def test_stdin_and_terminals_without_unicode(bytes_pair: Pair) -> None:
    argv = ["generate", "-", "--model", str(bytes_pair.target), "--max-tokens", "2"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = run(argv, input="\u00e9 \u2603".encode(), env=env)
    assert (done.returncode, done.stdout[:11]) == (0, b"\\xe9 \\u2603"), done.stderr
    done = run(argv, input=b"\xff", env=env)
    assert done.returncode == 2 and done.stderr.startswith(b"specrs: stdin: not UTF-8")


def test_a_closed_pipe_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from specrs.cli import main; sys.exit(main(['layout', '--length', '5000', '--page-size', '1']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_pictures_fold_long_prefixes(tmp_path: Path) -> None:
    sizes = []
    for length in (24, 1_000_000):
        path = tmp_path / f"{length}.png"
        assert main(["layout", "--length", str(length), "--page-size", "4", "-o", str(path)]) == 0
        sizes.append(int.from_bytes(path.read_bytes()[20:24], "big"))  # height
    assert sizes[1] < 1.3 * sizes[0]
