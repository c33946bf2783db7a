"""The text of an output goes on where the prompt's text ends, whatever a decoder does at the beginning of a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from modelzoo import write_eagle3, write_target
from specrs import LLM, SamplingParams, StructuredOutputs

WORDS = ["\u2581a", "\u2581be", "c", "\u2581", "\u2581\u2581", "d\u2581", "\u2603"]


def metaspace() -> Any:
    """Llama 2's newer form: the decoder drops the space that begins a text."""
    return decoders.Metaspace(replacement="\u2581", prepend_scheme="always")


def sentencepiece() -> Any:
    """Llama 2's older form: bytes are put together to characters, and one leading space is stripped."""
    strip = decoders.Strip(content=" ", left=1, right=0)
    return decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])


def llm_with(directory: Path, decoder: Any) -> LLM:
    """A tiny model whose every token begins, ends or fills a word, or is special."""
    bytes_of_a_snowman = [f"<0x{b:02X}>" for b in "\u2603".encode()]
    tokens = ["<unk>", "<s>", "</s>", *WORDS, *bytes_of_a_snowman]
    target = write_target(directory / "target", vocab_size=len(tokens), eos_token_id=None, bos_token_id=None)
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    tokenizer.decoder = decoder
    tokenizer.save(str(target / "tokenizer.json"))
    head = write_eagle3(directory / "head", target, draft_vocab_size=None)
    return LLM(target, head, tree=(2, 3, 6), max_batch=4)


@pytest.fixture(scope="module", params=[metaspace, sentencepiece], ids=lambda f: f.__name__)
def llm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> LLM:
    kind: Callable[[], Any] = request.param
    return llm_with(tmp_path_factory.mktemp(kind.__name__), kind())


def continued(llm: LLM, prompt: Sequence[int], generated: Sequence[int]) -> str:
    """Return what the whole text adds to the prompt's."""
    assert llm.tokenizer is not None
    return llm.tokenizer.decode([*prompt, *generated]).removeprefix(llm.tokenizer.decode(list(prompt)))


def test_the_first_word_keeps_its_space(llm: LLM) -> None:
    be = WORDS.index("\u2581be") + 3
    for prompt in ([3], [1, 3], [4, 5] * 10, [3, 2], [3, 2, 1, 2], [1]):
        params = SamplingParams(max_tokens=1, logit_bias={be: 1e4})
        [out] = llm.generate([prompt], params)
        assert out.token_ids == [be]
        spoken = any(t > 2 for t in prompt)
        assert out.text == continued(llm, prompt, out.token_ids) == (" be" if spoken else "be"), prompt


def test_a_text_prompt_is_gone_on_with(llm: LLM) -> None:
    [out] = llm.generate(["a be"], SamplingParams(max_tokens=1, logit_bias={3: 1e4}))
    assert out.text == " a"


def test_any_output_is_what_the_whole_text_adds(llm: LLM) -> None:
    rng = random.Random(0)
    first_byte = 3 + len(WORDS)
    # A prompt ends with a word: neither within a character nor with a row of special tokens.
    prompts = [
        [rng.randrange(first_byte) for _ in range(rng.randrange(12))] + [rng.randrange(3, first_byte)]
        for _ in range(16)
    ]
    params = [SamplingParams(max_tokens=rng.randrange(1, 20), temperature=2.0, seed=i) for i in range(len(prompts))]
    streamed: dict[int, str] = {}
    outputs = []
    for event in llm.stream(prompts, params):
        streamed[event.request_id] = streamed.get(event.request_id, "") + event.text
        if event.output is not None:
            outputs.append(event.output)
    assert len(outputs) == len(prompts)
    for out in outputs:
        assert out.text == continued(llm, out.prompt_token_ids, out.token_ids), out.token_ids
        assert out.text == streamed[out.request_id]


@pytest.fixture(scope="module")
def bytes_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A tiny model whose tokens are two letters, a space and all bytes."""
    directory = tmp_path_factory.mktemp("bytes")
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", *(f"<0x{b:02X}>" for b in range(256))]
    target = write_target(directory / "target", vocab_size=len(tokens), eos_token_id=2, bos_token_id=1)
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = sentencepiece()
    tokenizer.save(str(target / "tokenizer.json"))
    return LLM(target, max_batch=4)


@pytest.mark.parametrize("stop", [(), ("b",)])
def test_characters_that_read_like_broken_ones_take_nothing_behind_them(bytes_llm: LLM, stop: tuple[str, ...]) -> None:
    said = "a\ufffd\ufffd\ufffdb"
    params = SamplingParams(
        max_tokens=40, temperature=0, stop=stop, structured_outputs=StructuredOutputs(choice=[said])
    )
    [out] = bytes_llm.generate(["a"], params)
    assert bytes_llm.tokenizer is not None
    assert bytes_llm.tokenizer.decode(out.token_ids) == said
    assert out.text == ("a\ufffd\ufffd\ufffd" if stop else said)
    assert (out.finish_reason, out.stop_reason) == ("stop", "b" if stop else None)


def test_random_bytes_are_the_text_of_their_tokens(bytes_llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, temperature=3.0, seed=i, ignore_eos=True) for i in range(40)]
    texts = dict.fromkeys(range(len(params)), "")
    assert bytes_llm.tokenizer is not None
    for event in bytes_llm.stream([[1]] * len(params), params):
        texts[event.request_id % len(params)] += event.text
        if event.output is not None:
            want = bytes_llm.tokenizer.decode(event.output.token_ids)
            assert event.output.text == texts[event.request_id % len(params)] == want


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_the_last_flush_completes_is_the_reason(bytes_llm: LLM, include: bool) -> None:
    half = 6 + 0xE6  # the first byte of a character, which max_tokens leaves without the others
    params = SamplingParams(max_tokens=2, logit_bias={half: 1e4}, stop=("\ufffd",), include_stop=include)
    [one] = bytes_llm.generate([[1, 4]], replace(params, max_tokens=1))
    assert (one.token_ids, one.text) == ([half], "\ufffd" if include else "")
    assert (one.finish_reason, one.stop_reason) == ("stop", "\ufffd")
    [early] = bytes_llm.generate([[1, 4]], replace(params, max_tokens=1, min_tokens=1, stop=("x\ufffd",)))
    assert (early.text, early.finish_reason, early.stop_reason) == ("\ufffd", "length", None)


def test_a_byte_that_is_a_stop_string_ends_an_output_at_once(bytes_llm: LLM) -> None:
    line = 6 + 0x0A
    params = SamplingParams(max_tokens=5, logit_bias={line: 1e4}, stop=("\n",))
    late = SamplingParams(max_tokens=5, logit_bias={line: 1e4}, stop=("\n",), min_tokens=3)
    first, other = bytes_llm.generate([[1, 4]] * 2, [params, late])
    assert (first.token_ids, first.text, first.finish_reason, first.stop_reason) == ([line], "", "stop", "\n")
    assert (other.token_ids, other.text, other.finish_reason) == ([line] * 3, "\n\n", "stop")
