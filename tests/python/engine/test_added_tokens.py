"""The tokenizer of a directory is the one that transformers makes of it, and its EOS token ends outputs."""

from __future__ import annotations

import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import specrs.hf
from modelzoo import Pair, write_json
from specrs import LLM, ConfigError, SamplingParams
from specrs.engine.prompts import load_eos, load_tokenizer

FILES = "tokenizer_config.json"
END, TOOL = "<|im_end|>", "<tool>"
BASE = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
TEXTS = [f"a {END} b", f"x{TOOL} y", f"x {TOOL}y{TOOL}", f"{END}{TOOL}", "<|IM_END|>x<pad>", "ab"]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def byte_level(added: list[Any] | None = None, special: list[Any] | None = None) -> Tokenizer:
    """Make a tokenizer of 259 tokens and the added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *(special or [])])
    tokenizer.add_tokens(added or [])
    return tokenizer


def written(directory: Path, tokenizer: Tokenizer, config: Any = None, **files: Any) -> Path:
    """A directory with ``tokenizer.json``, ``tokenizer_config.json`` where there is one, and others by their names."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", {"model_type": "llama", "vocab_size": 300})
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in {FILES.removesuffix(".json"): config, **files}.items():
        if content is not None:
            write_json(directory / f"{name}.json", content)
    return directory


def tokens_of(tokenizer: Tokenizer) -> dict[int, tuple[Any, ...]]:
    found = tokenizer.get_added_tokens_decoder()
    return {i: (token.content, *(getattr(token, flag) for flag in FLAGS)) for i, token in found.items()}


def check_same(directory: Path) -> Tokenizer:
    """Check that a directory's tokenizer is transformers' in ids, texts, flags and EOS."""
    theirs = AutoTokenizer.from_pretrained(directory)
    ours = load_tokenizer(directory)
    assert ours is not None
    assert tokens_of(ours) == tokens_of(theirs.backend_tokenizer)
    assert load_eos(directory, ours) == theirs.eos_token_id
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    return ours


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, **flags}


CASES: dict[str, tuple[Tokenizer, Any, dict[str, Any]]] = {
    "plain": (byte_level(), BASE, {}),
    "nothing beside it": (byte_level(special=[END]), None, {}),
    "EOS is not special": (byte_level([END]), {**BASE, "eos_token": END}, {}),
    "EOS is not there": (byte_level(), {**BASE, "eos_token": END}, {}),
    "EOS with flags": (byte_level(), {**BASE, "eos_token": {"__type": "AddedToken", **token(END, lstrip=True)}}, {}),
    "no EOS": (byte_level(), {**BASE, "eos_token": None}, {}),
    "no class": (byte_level(), {"eos_token": END}, {}),
    "pad and unk": (byte_level(), {**BASE, "pad_token": "<pad>", "unk_token": "<unk>"}, {}),
    "a name of the model's": (byte_level(), {**BASE, "image_token": TOOL, "add_bos_token": True}, {}),
    "additional": (byte_level([END]), {**BASE, "additional_special_tokens": [END, TOOL]}, {}),
    "additional, and extra": (
        byte_level(), {**BASE, "additional_special_tokens": [END], "extra_special_tokens": [TOOL]}, {},
    ),
    "additional, extra is empty": (
        byte_level(), {**BASE, "additional_special_tokens": [END], "extra_special_tokens": []}, {},
    ),
    "extra": (
        byte_level(), {**BASE, "extra_special_tokens": [END, {"__type": "AddedToken", **token(TOOL, lstrip=True)}]}, {},
    ),
    "extra by name": (byte_level(), {**BASE, "extra_special_tokens": {"image_token": TOOL}}, {}),
    "decoder": (
        byte_level([END]), {**BASE, "added_tokens_decoder": {"259": token(END, special=True), "260": token(TOOL)}}, {},
    ),
    "decoder of other flags": (
        byte_level([AddedToken(TOOL)]),
        {**BASE, "added_tokens_decoder": {"259": token(TOOL, special=True, lstrip=True, rstrip=True)}}, {},
    ),
    "decoder, single words": (
        byte_level(), {**BASE, "added_tokens_decoder": {"259": token(TOOL, single_word=True, normalized=False)}}, {},
    ),
    "map": (byte_level(), None, {"special_tokens_map": {"eos_token": END}}),
    "map of objects": (
        byte_level(), {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"special_tokens_map": {"eos_token": token(END, lstrip=True), "additional_special_tokens": [TOOL]}},
    ),
    "map before the configuration": (byte_level(), BASE, {"special_tokens_map": {"eos_token": END}}),
    "map behind a decoder": (
        byte_level(), {**BASE, "added_tokens_decoder": {}}, {"special_tokens_map": {"eos_token": END}},
    ),
    "map of extra": (
        byte_level(), {**BASE, "extra_special_tokens": [END]}, {"special_tokens_map": {"extra_special_tokens": [TOOL]}},
    ),
    "added": (byte_level(), BASE, {"added_tokens": {END: 259, TOOL: 260}}),
    "added, one special": (byte_level(), {**BASE, "eos_token": END}, {"added_tokens": {END: 259, TOOL: 260}}),
    "split": (byte_level(special=[END]), {**BASE, "split_special_tokens": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tokenizer, config, files = CASES[name]
    check_same(written(tmp_path, tokenizer, config, **files))


def test_any_files_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    rng = random.Random(5)
    texts = [END, TOOL, "<pad>", "<a>", "<b>"]

    def flagged(content: str) -> dict[str, Any]:
        return token(content, **{flag: rng.random() < 0.5 for flag in FLAGS if rng.random() < 0.5})

    for case in range(60):
        have = rng.sample(texts, rng.randrange(3))
        tokenizer = byte_level([AddedToken(t, lstrip=rng.random() < 0.3, special=rng.random() < 0.3) for t in have])
        config: dict[str, Any] = {**BASE}
        for name in rng.sample(["eos_token", "pad_token", "mask_token", "image_token"], rng.randrange(4)):
            config[name] = rng.choice(texts)
        if rng.random() < 0.4:
            more = [t for t in rng.sample(texts, 3) if t not in have]
            listed = [*have, *more[: rng.randrange(3)]]
            config["added_tokens_decoder"] = {str(259 + i): flagged(text) for i, text in enumerate(listed)}
        if rng.random() < 0.5:
            key = rng.choice(["extra_special_tokens", "additional_special_tokens"])
            config[key] = rng.sample(texts, rng.randrange(1, 4))
        files: dict[str, Any] = {}
        if rng.random() < 0.3:
            files["special_tokens_map"] = {"eos_token": rng.choice([END, token(TOOL, lstrip=True, special=True)])}
        if rng.random() < 0.3:
            files["added_tokens"] = {text: 259 + i for i, text in enumerate([*have, "<c>"])}
        with warnings.catch_warnings():
            # Warnings of ids, which may differ from those of the files here.
            warnings.simplefilter("ignore", RuntimeWarning)
            check_same(written(tmp_path / str(case), tokenizer, config, **files))


def test_an_id_that_no_tokenizer_can_give_is_told(tmp_path: Path) -> None:
    directory = written(tmp_path, byte_level(), {**BASE, "added_tokens_decoder": {"270": token(TOOL)}})
    with pytest.warns(RuntimeWarning, match=r"added_tokens_decoder: '<tool>' is token 270 there and 259 here"):
        check_same(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": ["</s>"]}, r"eos_token = \['</s>'\]: must be a text"),
        ({"pad_token": {"lstrip": True}}, "pad_token = .* must be a text, or an object"),
        ({"extra_special_tokens": 3}, "extra_special_tokens = 3: must be a list"),
        ({"extra_special_tokens": [3]}, "extra_special_tokens = 3: must be a text"),
        ({"added_tokens_decoder": [TOOL]}, "added_tokens_decoder = .*: must be an object"),
        ({"added_tokens_decoder": {"259": TOOL}}, r"added_tokens_decoder\['259'\] = '<tool>': must be an object"),
        ({"added_tokens_decoder": {"x": token(TOOL)}}, "added_tokens_decoder = 'x': must be a token id"),
        ({"eos_token": {"content": END, "lstrip": 1}}, "eos_token.lstrip = 1: must be true or false"),
        ([], "a JSON object is needed, not list"),
    ],
)
def test_a_token_that_is_none_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(FILES)}: {message}"):
        load_tokenizer(written(tmp_path, byte_level(), config))


def test_an_id_of_added_tokens_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"added_tokens.json: '<tool>' = -3: must be a token id"):
        load_tokenizer(written(tmp_path, byte_level(), BASE, added_tokens={TOOL: -3}))


@pytest.fixture
def chat_model(bytes_pair: Pair, tmp_path: Path) -> Path:
    """A model whose end of turn, token 259 of 300, stands in the tokenizer's configuration alone."""
    directory = tmp_path / "model"
    shutil.copytree(bytes_pair.target, directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    byte_level([END]).save(str(directory / "tokenizer.json"))
    write_json(directory / FILES, {**BASE, "eos_token": END})
    return directory


def test_the_eos_token_of_the_tokenizer_ends_an_output(chat_model: Path) -> None:
    likely = {259: 1e6}
    with LLM(chat_model) as llm:
        assert llm.eos_ids == {2, 259}
        params = [
            SamplingParams(max_tokens=5, logit_bias=likely),
            SamplingParams(max_tokens=3, logit_bias=likely, ignore_eos=True),
            SamplingParams(max_tokens=5, logit_bias=likely, min_tokens=2),
        ]
        ended, ignored, late = llm.generate(["a"] * 3, params)
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([259], "", "stop", None)
    assert (ignored.token_ids, ignored.text, ignored.finish_reason) == ([259] * 3, "", "length")
    assert late.token_ids[2:] == [259] and 259 not in late.token_ids[:2]


def test_an_eos_token_that_the_model_lacks_ends_nothing(chat_model: Path) -> None:
    added = [f"<{i}>" for i in range(60)]
    byte_level(added).save(str(chat_model / "tokenizer.json"))
    write_json(chat_model / FILES, {**BASE, "eos_token": "<59>"})
    with LLM(chat_model) as llm:
        assert llm.tokenizer is not None and llm.tokenizer.token_to_id("<59>") == 318
        assert llm.eos_ids == {2}
        with pytest.raises(ConfigError, match=r"prompts\[0\]\[1\] = 318: outside the vocabulary 0..299"):
            llm.generate(["a<59>"])


def test_a_live_model_has_the_eos_token_of_its_tokenizer(tmp_path: Path) -> None:
    config = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(written(tmp_path, byte_level(), {**BASE, "eos_token": END}))
    with specrs.hf.from_model(Qwen2ForCausalLM(config), tokenizer) as llm:
        assert llm.eos_ids == {2, 259}
    with specrs.hf.from_model(Qwen2ForCausalLM(config), tokenizer.backend_tokenizer) as llm:
        assert llm.eos_ids == {2}
