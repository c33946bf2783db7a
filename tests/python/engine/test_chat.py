"""`LLM.chat`: the template's text, its own special tokens, and what `generate` makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import specrs
from chat_corpus import CHATS, TEMPLATES, TOOLS
from modelzoo import Pair, write_json
from specrs import LLM, ChatTemplateError, ConfigError, EngineClosedError, SamplingParams
from specrs.engine.request.request import TokenizedPrompt

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = "{{ bos_token }}" + TEMPLATES["chatml"]


@pytest.fixture(scope="module")
def chatty(bytes_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a template, and a tokenizer that begins every text with <s> where it is asked to."""
    from tokenizers import Tokenizer, processors

    directory = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(bytes_pair.target, directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=512)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {**CONFIG, "chat_template": TEMPLATE})
    return directory


def test_tokens_are_those_of_transformers(chatty: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(chatty) as llm:
        outs = llm.chat([CHATS["one"], CHATS["turns"]], params)
        for out, messages in zip(outs, (CHATS["one"], CHATS["turns"]), strict=True):
            encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            assert out.prompt_token_ids == list(encoded["input_ids"])
            assert out.prompt_token_ids.count(1) == 1  # the template's <s>, and no other
            assert out.prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert out.finish_reason == "length"
        [again] = llm.generate([outs[1].prompt_token_ids], params)
        assert again.token_ids == outs[1].token_ids and again.prompt is None
        assert llm.encode("abcdefgh")[0] == 1 and len(llm.encode("abcdefgh")) == 9  # neither cut nor filled up


def test_a_conversation_goes_wherever_a_prompt_goes(chatty: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {"chat_template": TEMPLATES["tools"], "tools": TOOLS, "add_generation_prompt": False}
    with LLM(chatty) as llm:
        prompt = llm.chat_prompt(CHATS["calls"], **options)
        assert prompt.text.startswith("weather\n(place: string")
        [want] = llm.chat(CHATS["calls"], params, **options)
        assert want.prompt == prompt.text and want.prompt_token_ids == list(prompt.token_ids)
        *_, last = llm.stream([prompt], params)
        request = llm.add(prompt, params)
        outputs = [e.output for _ in range(20) for e in llm.step() if e.request_id == request]
        for out in (last.output, outputs[-1]):
            assert out is not None and out.token_ids == want.token_ids and out.prompt == want.prompt
        mixed = llm.generate(["abc", prompt, [5, 6]], params)
        assert mixed[1].token_ids == want.token_ids
        continued = [*CHATS["one"], {"role": "assistant", "content": "a plant"}]
        [out] = llm.chat(continued, params, add_generation_prompt=False, continue_final_message=True)
        assert out.prompt is not None and out.prompt.endswith("assistant\na plant")
        llm.audit()


def test_errors_name_the_conversation(chatty: Path, bytes_pair: Pair) -> None:
    params = SamplingParams(max_tokens=4)
    with LLM(chatty) as llm:
        with pytest.raises(ChatTemplateError, match=r"messages\[1\]\[0\] is a int"):
            llm.chat([CHATS["one"], [3]], params)  # type: ignore[list-item]
        with pytest.raises(ChatTemplateError, match="messages is a str"):
            llm.chat("hello", params)  # type: ignore[arg-type]
        with pytest.raises(ChatTemplateError, match="alternate"):
            llm.chat(CHATS["one"], params, chat_template="{{ raise_exception('roles must alternate') }}")
        with pytest.raises(ConfigError, match=r"prompts\[0\]: empty"):
            llm.chat(CHATS["one"], params, chat_template="{# nothing #}")
        with pytest.raises(ConfigError, match=r"prompts\[0\]: \d+ tokens leave no room"):
            llm.chat([{"role": "user", "content": "x" * 999}], params)
        with pytest.raises(ConfigError, match=r"messages: not encodable as UTF-8"):
            llm.chat([{"role": "user", "content": "\ud800"}], params)
        with pytest.raises(ChatTemplateError, match="messages: empty"):
            llm.chat([], params)
        assert llm.unfinished == 0
    with pytest.raises(EngineClosedError):
        llm.chat(CHATS["one"], params)
    with LLM(bytes_pair.target) as llm, pytest.raises(ChatTemplateError, match="the model has no chat template"):
        llm.chat(CHATS["one"], params)
    assert issubclass(ChatTemplateError, ConfigError) and issubclass(specrs.ChatLimitError, ChatTemplateError)


def test_the_model_in_the_package_has_none() -> None:
    """The model continues Python; the demo of a conversation brings a template of its own."""
    with LLM(speculative=False, max_batch=1) as llm:
        assert llm.chat_templates.templates == {} and llm.chat_templates.variables["bos_token"] == "<|endoftext|>"
        template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}def "
        [out] = llm.chat(CHATS["one"], SamplingParams(max_tokens=4), chat_template=template)
        assert out.prompt == "# what is a tree? \ndef " and len(out.token_ids) == 4


def test_a_tokenized_prompt_is_checked(chatty: Path) -> None:
    with LLM(chatty) as llm:
        for ids, message in (([], "empty"), ([1, 999], r"\[1\] = 999: outside"), ([1, "x"], r"\[1\] = 'x'")):
            with pytest.raises(ConfigError, match=message):
                llm.generate([TokenizedPrompt("text", ids)])  # type: ignore[arg-type]
