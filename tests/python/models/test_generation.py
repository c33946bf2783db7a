"""``generation_config.json``: what the model's authors ask of sampling, and how a malformed file is refused."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from modelzoo import Pair, write_json
from specrs import LLM, SamplingParams
from specrs.models import ModelConfig, ModelFileError, UnsupportedModelError, default_sampling


def write(directory: Path, raw: Any) -> Path:
    directory.mkdir(exist_ok=True)
    write_json(directory / "generation_config.json", raw)
    return directory


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        ({}, {"temperature": 0}), ({"do_sample": False, "temperature": 0.6, "top_p": 0.5}, {"temperature": 0}),
        ({"do_sample": None, "temperature": 0.6}, {"temperature": 0}), ({"do_sample": True}, {"temperature": 1}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1},
         {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1}),
        ({"do_sample": True, "temperature": None, "top_k": None}, {"temperature": 1}),
        ({"repetition_penalty": 1.3, "max_new_tokens": 9},
         {"temperature": 0, "repetition_penalty": 1.3, "max_tokens": 9}),
        ({"max_length": 4096, "transformers_version": "5", "num_beams": 1}, {"temperature": 0}),
    ],
)  # fmt: skip
def test_what_the_file_says(raw: dict[str, Any], want: dict[str, Any], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default_sampling(write(tmp_path, raw)) == SamplingParams(**want)


def test_no_file_is_greedy(tmp_path: Path) -> None:
    assert default_sampling(tmp_path).resolved() == SamplingParams(temperature=0).resolved()


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("temperature", "hot", "a number"), ("temperature", -1, "at least 0"), ("top_p", 0, r"\(0, 1\]"),
        ("top_p", 1.5, r"\(0, 1\]"), ("top_k", -5, "must be in -1"), ("top_k", 2.5, "an integer"),
        ("top_k", True, "an integer"), ("min_p", 2, r"\[0, 1\]"), ("repetition_penalty", 0, "must be in 1e-6"),
        ("repetition_penalty", [1], "a number"), ("max_new_tokens", 0, "at least 1"), ("do_sample", 1, "true or false"),
        ("temperature", float("nan"), "finite"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sample", [True, False])
def test_malformed_values_name_the_file_and_the_field(
    key: str, value: Any, why: str, sample: bool, tmp_path: Path
) -> None:
    directory = write(tmp_path, {"do_sample": sample, key: value})
    with pytest.raises(UnsupportedModelError, match=rf"generation_config\.json: {key} = .*{why}") as e:
        default_sampling(directory)
    assert (e.value.what, e.value.path) == (key, directory / "generation_config.json")


def test_a_malformed_file_is_refused_with_the_model(bytes_pair: Pair, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(bytes_pair.target, model)
    for text in ("[1]", "{", "\x00"):
        (model / "generation_config.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"generation_config\.json"):
            LLM(model)
    write(model, {"eos_token_id": [9, 10**6]})
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json: eos_token_id"):
        LLM(model)
    write(model, {"do_sample": True, "top_p": 7})
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json: top_p = 7"):
        LLM(model)


def test_eos_ids_of_both_files_end_a_request(bytes_pair: Pair, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(bytes_pair.target, model)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4, ignore_eos=True)
    [free] = LLM(model).generate([[5, 6, 7]], params)
    stop = free.token_ids[20]
    write(model, {"eos_token_id": [stop, 0]})
    assert {0, 2, stop} == {*ModelConfig.from_directory(model).eos_token_ids}
    [out] = LLM(model).generate([[5, 6, 7]], SamplingParams(max_tokens=60, temperature=1.0, seed=4))
    assert out.token_ids[-1] in (0, 2, stop) and len(out.token_ids) <= 21


def test_what_is_not_implemented_is_said(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"generation_config\.json: no_repeat_ngram_size = 3 is not implemented"):
        default_sampling(write(tmp_path, {"no_repeat_ngram_size": 3, "num_beams": 1}))


@pytest.mark.parametrize("key", ["top_h", "exponential_decay_length_penalty", "watermarking_config", "max_time"])
def test_nothing_that_changes_tokens_is_left_out_silently(key: str, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=rf"generation_config\.json: {key} = 0.5 is not implemented"):
        default_sampling(write(tmp_path, {key: 0.5}))


def test_outputs_say_what_they_were_sampled_with(bytes_pair: Pair, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(bytes_pair.target, model)
    write(model, {"do_sample": True, "temperature": 0.9, "top_k": 40, "max_new_tokens": 12})
    llm = LLM(model)
    assert llm.default_sampling == SamplingParams(temperature=0.9, top_k=40, max_tokens=12).resolved()
    [a, b] = llm.generate(["x", "x"], [SamplingParams(ignore_eos=True), SamplingParams(top_k=3, seed=5, max_tokens=4)])
    assert (a.params.temperature, a.params.top_k, a.params.max_tokens, a.params.seed) == (0.9, 40, 12, a.seed)
    assert (b.params.temperature, b.params.top_k, b.params.max_tokens, b.params.seed) == (0.9, 3, 4, 5)
    assert len(a.token_ids) == 12
    [again] = llm.generate(["x"], a.params)
    assert again.token_ids == a.token_ids and again.params == a.params
    [greedy] = llm.generate(["x"], SamplingParams(temperature=0))
    [plain] = LLM(bytes_pair.target).generate(["x"], SamplingParams(max_tokens=12))
    assert greedy.token_ids == plain.token_ids
