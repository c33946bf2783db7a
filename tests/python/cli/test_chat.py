"""``specrs chat``, from pipes and in a terminal of its own."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelzoo import Pair
from specrs import LLM, SamplingParams
from specrs.cli import main

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}:{{ m.content }}>{% endfor %}<a:"


@pytest.fixture(scope="module")
def talker(bytes_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(bytes_pair.target, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def talk(monkeypatch: pytest.MonkeyPatch, text: str, *argv: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    return main(["chat", *argv])


def spoken(llm: LLM, messages: list[dict[str, str]], **options: object) -> str:
    params = SamplingParams(max_tokens=8, seed=0, ignore_eos=True)
    [out] = llm.chat(messages, params, **options)  # type: ignore[arg-type]
    return out.text


def test_each_message_of_a_pipe_has_those_before_it(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'hi\n\nand \\\nmore\n"""\none\ntwo\n"""\n/new\nhi\n/system B\nhi\n//x\n/quit\nunread\n'
    argv = [str(talker), "--max-tokens", "8", "--ignore-eos", "--system", "A"]
    assert talk(monkeypatch, text, *argv) == 0
    out, err = capsys.readouterr()
    want: list[str] = []
    with LLM(talker, max_batch=1) as llm:

        def say(*said: str, system: str) -> None:
            messages = [{"role": "system", "content": system}]
            for i, one in enumerate(said):
                messages.append({"role": "user", "content": one})
                answer = spoken(llm, messages)
                if i == len(said) - 1:
                    want.append(answer)
                messages.append({"role": "assistant", "content": answer})

        for i in (1, 2, 3):
            say(*["hi", "and \nmore", "one\ntwo"][:i], system="A")
        say("hi", system="A")
        say("hi", system="B")
        say("hi", "/x", system="B")
    assert out == "".join(f"{one}\n" for one in want)
    assert err.count("8 tokens, ") == 6 and "> " not in out


def test_a_message_that_cannot_be_answered_leaves_the_conversation_as_it_was(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{'x' * 400}\n/nonsense\n/retry\nhi\n"
    assert talk(monkeypatch, text, "--model", str(talker), "--max-tokens", "8", "--ignore-eos") == 1
    out, err = capsys.readouterr()
    assert "leave no room" in err and "/nonsense: no command" in err and "/retry: nothing was said" in err
    with LLM(talker, max_batch=1) as llm:
        assert out.splitlines()[-1] == spoken(llm, [{"role": "user", "content": "hi"}])


def test_retry_draws_another_answer(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(talker), "--max-tokens", "16", "--ignore-eos", "--temperature", "1.5"]
    assert talk(monkeypatch, "hi\n/retry\n", *argv) == 0
    once, again = capsys.readouterr().out.split("\n", 1)
    with LLM(talker, max_batch=1) as llm:
        said = [{"role": "user", "content": "hi"}]
        params = [SamplingParams(max_tokens=16, temperature=1.5, seed=i, ignore_eos=True) for i in (0, 1)]
        want = [llm.chat(said, one)[0].text for one in params]
    assert f"{once}\n{again}" == f"{want[0]}\n{want[1]}\n" and want[0] != want[1]


def test_accepted_drafts_are_marked_as_generate_marks_them(
    talker: Path, bytes_pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(talker), "--draft", str(bytes_pair.draft), "--max-tokens", "40", "--ignore-eos", "--tree", "8,3,60"]
    argv += ["--temperature", "1.5", "--seed", "3"]
    assert talk(monkeypatch, "hi\n", *argv) == 0
    plain = capsys.readouterr().out
    assert talk(monkeypatch, "hi\n", *argv, "--mark", "brackets") == 0
    marked = capsys.readouterr().out
    assert "\u27e8" in marked and re.sub("[\u27e8\u27e9]", "", marked) == plain


def test_a_model_without_a_template_is_refused_with_a_remedy_before_it_is_read(
    bytes_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"  # no weights: nothing could be read of them
    bare.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(bytes_pair.target / name, bare)
    assert talk(monkeypatch, "hi\n", str(bare)) == 2
    err = capsys.readouterr().err
    assert "no chat template" in err and "chat_template.jinja" in err and "--chat-template FILE" in err
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE)
    argv = [str(bytes_pair.target), "--chat-template", str(template), "--max-tokens", "8", "--ignore-eos"]
    assert talk(monkeypatch, "hi\n", *argv) == 0
    with LLM(bytes_pair.target, max_batch=1) as llm:
        want = spoken(llm, [{"role": "user", "content": "hi"}], chat_template=TEMPLATE)
    assert capsys.readouterr().out == want + "\n"
    assert talk(monkeypatch, "hi\n", *argv[:1], "--chat-template", str(tmp_path / "none")) == 2
    assert "none" in capsys.readouterr().err


def test_in_a_terminal(talker: Path) -> None:
    """Prompts, answers as they come, Control-C within an answer, Control-D."""
    leader, follower = pty.openpty()
    argv = [sys.executable, "-m", "specrs", "chat", str(talker), "--ignore-eos", "--mark", "none"]
    env = {**os.environ, "TERM": "dumb"}
    with subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=follower, env=env, start_new_session=True,
                          preexec_fn=lambda: os.close(leader)) as child:  # fmt: skip
        os.close(follower)
        seen = ""

        def until(text: str) -> None:
            nonlocal seen
            end = time.monotonic() + 240
            while text not in seen:
                assert time.monotonic() < end, seen
                if select.select([leader], [], [], 1)[0]:
                    seen += os.read(leader, 4096).decode(errors="replace")
            seen = seen[seen.index(text) + len(text) :]

        try:
            until("/help lists commands]")
            until("> ")
            os.write(leader, b"/help\n")
            until("/retry")
            until("> ")
            os.write(leader, b"hi\n")
            until(" tokens/s")  # without --max-tokens it fills the context of 256
            until("finished by length")
            until("> ")
            os.write(leader, b"more\n")
            until("specrs: ")  # the context is full
            until("> ")
            os.write(leader, b"/new\n")
            until("> ")
            os.write(leader, b"\x04")
            assert child.wait(60) == 0
        finally:
            child.kill()
            os.close(leader)
