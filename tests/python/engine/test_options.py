"""The engine's options: one table, which types, defaults, flags and the page follow."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import specrs
from specrs import ConfigError, EngineConfig, EngineOptions
from specrs.cli import chat, doctor, generate, options, record, serve
from specrs.engine_options import BEGIN, END, OPTIONS, OptionFields, default_of, flags_of, main, table

ROOT = Path(__file__).parents[3]


def test_types_defaults_and_meanings_are_of_the_same_options() -> None:
    assert EngineOptions.__annotations__.keys() == OPTIONS.keys()
    typed = {name: kind.__forward_arg__ for name, kind in EngineOptions.__annotations__.items()}
    assert typed == {one.name: one.type for one in fields(OptionFields)}
    assert [one.name for one in fields(EngineConfig)] == list(OPTIONS)
    assert all(one.unset or default_of(name) != "None" for name, one in OPTIONS.items())
    assert EngineConfig.__doc__ and all(f"    {name}: " in EngineConfig.__doc__ for name in OPTIONS)
    assert {"EngineConfig", "EngineOptions"} <= set(specrs.__all__)


def test_the_page_has_the_table_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    assert BEGIN + table() + END in page, "make options-table"
    copy = tmp_path / "page.md"
    copy.write_text(page.replace(table(), "stale\n"), encoding="utf-8")
    assert main([str(copy)]) == 0 and copy.read_text(encoding="utf-8") == page
    copy.write_text("nothing")
    assert main([str(copy)]) == 2 and "has no" in capsys.readouterr().err
    assert main([]) == 0 and capsys.readouterr().out == table()


@pytest.mark.parametrize("command", [chat, doctor, generate, record, serve], ids=lambda m: m.__name__.split(".")[-1])
def test_every_command_with_an_engine_has_every_option(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())  # type: ignore[attr-defined]
    name = command.__name__.split(".")[-1]  # type: ignore[attr-defined]
    need = ["-o", "x"] if name == "record" else []
    assert options.engine_options(parser.parse_args([name, *need])) == {}  # the engine's defaults stand
    values = {"tree": "2,3,4", "drafters": "suffix, recycling", "attention_backend": "triton", "device": "cpu"}
    want: dict[str, object] = {}
    argv = []
    for option, one in OPTIONS.items():
        flag = flags_of(option)[0]
        if one.kind is bool:
            argv.append(flag)
            want[option] = False
            continue
        value = values.get(option, one.choices[-1] if one.choices else "32")
        argv += [flag, value]
        want[option] = int(value) if one.kind is int else value
    want |= {"tree": specrs.TreeShape(2, 3, 4), "drafters": ["suffix", "recycling"]}
    got = options.engine_options(parser.parse_args([name, *need, *argv]))
    assert got == want
    EngineConfig(**got)
    with pytest.raises(SystemExit):
        parser.parse_args([name, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for option, one in OPTIONS.items():
        assert flags_of(option)[0] in out and " ".join(one.about.split()) in out, option


def test_other_spellings_are_kept() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for module in (generate, serve, doctor, chat):
        module.add_parser(commands)
    assert options.engine_options(parser.parse_args(["generate", "--max-context-len", "9"])) == {"max_context_len": 9}
    assert options.engine_options(parser.parse_args(["generate", "--drafters", ""])) == {"drafters": []}
    for command in ("serve", "doctor", "chat"):
        for argv in (["M"], ["--model", "M"], ["M", "--model", "M"]):
            assert parser.parse_args([command, *argv]).model == "M"
        assert parser.parse_args([command]).model is None
        with pytest.raises(SystemExit):
            parser.parse_args([command, "M", "--model", "N"])


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="unknown option 'max_batchs', did you mean 'max_batch'"):
        EngineConfig.of({"max_batchs": 4})


_WRONG = """\
from specrs import LLM, AsyncLLM, EngineConfig
from specrs.hf import from_model

LLM(max_batchs=4)
LLM(max_batch="4")
LLM(dtype="float8")
AsyncLLM(speculativ=True)
EngineConfig(kv_dtyp="float32")
from_model(None, max_batchs=4)
LLM("m", max_batch=4, tree=(1, 2, 3), drafters=["suffix"], dtype="float32", prefix_cache=False, speculative=False)
AsyncLLM(max_batch=4, speculative=False, process=True)
"""


def test_a_type_checker_sees_wrong_options(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(_WRONG)
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {ROOT / 'python'}\nignore_missing_imports = True\nfollow_imports = silent\n"
        f"cache_dir = {tmp_path / 'cache'}\n[mypy-torch.*,transformers.*,numpy.*]\nfollow_imports = skip\n"
    )
    done = subprocess.run([sys.executable, "-m", "mypy", "user.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [int(line.split(":")[1]) for line in errors] == [4, 5, 6, 7, 8, 9], done.stdout
    assert 'Unexpected keyword argument "max_batchs"' in errors[0]
