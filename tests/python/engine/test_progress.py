"""Bars on stderr: on a terminal, or as asked; never anything else."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from modelzoo import Pair
from specrs import LLM, ConfigError, SamplingParams

PARAMS = SamplingParams(max_tokens=4)


def test_quiet_where_there_is_no_terminal(tiny: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(tiny.target) as llm:
        llm.generate([[1]] * 5, PARAMS)
        llm.generate([[1]] * 5, PARAMS, progress=False)
    assert capfd.readouterr() == ("", "")


def test_bars_say_how_far(tiny: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(tiny.target, tiny.draft, progress=True) as llm:
        out, err = capfd.readouterr()
        assert out == "" and "weights: 100%" in err
        llm.generate([[1]] * 5, PARAMS, progress=True)
        out, err = capfd.readouterr()
        assert out == "" and "prompts: 100%" in err and "5/5" in err and "tokens/s" in err
        with pytest.raises(ConfigError):
            llm.generate([[99]], PARAMS, progress=True)
        assert capfd.readouterr().err == ""


def test_on_a_terminal_several_prompts_have_one(
    tiny: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with LLM(tiny.target) as llm:
        assert "weights: 100%" in capfd.readouterr().err
        llm.generate([[1]], PARAMS)
        assert capfd.readouterr().err == ""
        llm.generate([[1], [2]], PARAMS)
        assert "2/2" in capfd.readouterr().err


class Silent:
    """A stream that somebody put in the place of stderr: it takes text and can do no more."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def closed() -> io.StringIO:
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize("progress", [None, True])
@pytest.mark.parametrize("make", [closed, Silent, lambda: None], ids=["closed", "silent", "none"])
def test_a_process_without_a_stderr_works(
    tiny: Pair, make: Any, progress: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", make())
    with LLM(tiny.target, progress=progress) as llm:
        assert len(llm.generate([[1], [2]], PARAMS, progress=progress)) == 2


@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_what_progress_may_be(tiny: Pair, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"progress = .*: must be True, False, or None"):
        LLM(tiny.target, progress=value)
    with LLM(tiny.target) as llm, pytest.raises(ConfigError, match="progress = "):
        llm.generate([[1]], progress=value)


def test_importing_is_light(tiny: Pair) -> None:
    """Modules that are not used are not imported."""
    code = (
        "import sys, specrs\nassert not {'tqdm', 'jinja2', 'huggingface_hub', 'torch'} & set(sys.modules)\n"
        "llm = specrs.LLM(sys.argv[1])\nllm.generate([[1]])\n"
        "print({'huggingface_hub', 'transformers'} & set(sys.modules))\n"  # torch has tqdm
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    argv = [sys.executable, "-c", code, str(tiny.target)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout == "set()\n", done.stderr
