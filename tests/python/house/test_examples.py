"""The programs in ``examples/``, run as a user would; what they print is checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from modelzoo import Pair
from specrs import LLM, Sampler, SamplingParams, cuda_available

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name: str, *argv: str, status: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *argv], env=env, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def test_generate_with_the_model_in_the_package() -> None:
    out = run("generate.py", "--max-tokens", "24", "--tree", "1", "3", "4", "class Stack:")
    text, _, last = out.rpartition("\n-- ")
    assert last.startswith("24 tokens in ") and last.endswith("ended by length; temperature 0.6, top_p 0.9\n")
    with LLM(speculative=False, max_batch=1) as llm:
        [want] = llm.generate(["class Stack:"], SamplingParams(max_tokens=24, seed=0))
    assert re.sub(r"[\[\]]", "", text) == re.sub(r"[\[\]]", "", "class Stack:" + want.text)
    assert "[" in text  # accepted tokens are marked


def test_generate_with_a_model_and_head_of_your_own(bytes_pair: Pair) -> None:
    out = run(
        "generate.py", "--model", str(bytes_pair.target), "--draft", str(bytes_pair.draft), "--max-tokens", "5", "ab"
    )
    assert out.startswith("ab") and "5 tokens" in out and out.endswith("greedy\n")
    assert "draft: no such directory" in run("generate.py", "--draft", "nowhere", status=2)


def test_requests_join_and_leave_a_loop() -> None:
    out = run("engine_loop.py")
    joined = re.findall(r"step (\d): request (\d) joins", out)
    assert joined == [("0", "0"), ("2", "1"), ("3", "2")]
    assert "request 1 ends by abort" in out and out.endswith("-- 3 requests, 2 of them whole\n")
    texts = {i: "".join(map(eval, re.findall(rf"request {i} \+\d+ (.*)", out))) for i in (0, 2)}
    with LLM(speculative=False) as llm:
        for i, prompt in ((0, "def quicksort(items):"), (2, "class Stack:")):
            [want] = llm.generate([prompt], SamplingParams(max_tokens=40, seed=i))
            assert texts[i] == want.text  # joining and leaving changes nothing


@pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")
def test_sglangs_attention_layer_over_the_core_gives_the_plain_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run("sglang_layer.py").startswith("3 requests, 48 tokens each in ")


def test_sglangs_plugin_walks_its_trees_as_plain_decoding_goes() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import sglang_plugin
    finally:
        sys.path.remove(str(EXAMPLES))
    vocab, nodes = 16, 8
    table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(5))  # scores behind each token

    def samplers() -> list[Sampler]:
        return [Sampler(vocab, [1]), Sampler(vocab, [2], temperature=0.8, seed=3, repetition_penalty=1.1)]

    texts: list[list[int]] = []
    for first, sampler in zip(([1], [2]), samplers(), strict=True):  # plain decoding
        text = list(first)
        while len(text) < 60:
            text.append(sampler.draw(table[text[-1]], len(text)))
            sampler.commit(text[-1:])
        texts.append(text)
    trees, drawing, lengths = sglang_plugin.Trees(nodes, vocab), samplers(), [1, 1]
    rounds = 0
    while max(lengths) < 50:
        recent = [text[max(n - 7, 0) : n] for text, n in zip(texts, lengths, strict=True)]
        tokens, mask = trees.batch_get(["a", "b"], recent, lengths)
        assert tokens.shape == (2 * nodes,) and mask.reshape(2, nodes, nodes).diagonal(axis1=1, axis2=2).all()
        drawn, counts, rows = sglang_plugin.walk(
            trees.batch, table[torch.from_numpy(tokens)], drawing, [n - 1 for n in lengths], nodes
        )
        for i in range(2):
            path = rows[i][rows[i] >= 0].long()
            n, new = lengths[i], drawn[path].tolist()
            assert len(new) == counts[i] and new == texts[i][n : n + len(new)]
            lengths[i] = n + len(new)
        rounds += 1
    assert rounds < 45  # some drafts were accepted


def test_another_engine_over_the_core_gives_the_plain_tokens() -> None:
    out = run("foreign_engine.py")
    found = re.fullmatch(r"3 requests, 48 tokens each in (\d+) rounds; the tokens are those of plain decoding\n", out)
    assert found and int(found[1]) < 40


def test_a_module_of_your_own_in_graphs() -> None:
    if not (torch.cuda.is_available() and cuda_available()):
        assert run("graph_runtime.py", status=1).startswith("this example needs a CUDA GPU: ")
        return
    out = run("graph_runtime.py").splitlines()
    assert re.fullmatch(r"4 buckets need \d+ bytes", out[0])
    assert out[1].startswith("refused: output 'scores' is stale: it holds replay 1 of its memory")
    found = re.fullmatch(r"(\d+) replays of batches 1 to 8; the tokens are those of plain decoding", out[2])
    assert found and int(found[1]) >= 20 and len(out) == 3


def test_a_source_of_drafts_of_your_own() -> None:
    out = run("own_drafter.py").splitlines()
    tokens, alone, both = map(int, re.findall(r"\d+", out[0]))
    assert tokens > 600 and both < alone < tokens / 2
    accepted, proposed = map(int, re.findall(r"\d+", out[1]))
    assert 0.9 * proposed < accepted <= proposed
