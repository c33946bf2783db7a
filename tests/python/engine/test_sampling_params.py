"""Every bad parameter is refused by name, value and limit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import specrs
from specrs import ConfigError, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", -0.1), ("temperature", math.nan),
        ("temperature", "hot"), ("top_k", -2), ("top_p", 0.0), ("top_p", 1.01), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", -1), ("seed", 2**64), ("seed", 1.0), ("stop", [""]), ("stop", [3]), ("stop_token_ids", [-1]),
        ("repetition_penalty", 0.0), ("repetition_penalty", math.inf), ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}), ("ignore_eos", 1),
        ("temperature", 10**400), ("stop", 5), ("stop_token_ids", "12"), ("stop_token_ids", [True]),
        ("top_k", 10**30), ("logit_bias", [1]), ("logit_bias", {1: math.inf}), ("logit_bias", {1: 1e300}),
        ("logit_bias", {"7": 1.0}), ("presence_penalty", 1e39), ("frequency_penalty", -1e39),
        ("repetition_penalty", 1e-60), ("frequency_penalty", -3e38), ("repetition_penalty", 1.2e-38),
        ("presence_penalty", -3e38), ("logit_bias", {1: 3e38}), ("n", 0), ("n", 4097), ("n", True), ("min_tokens", -1),
        ("bad_words", [""]), ("bad_words", [3]), ("bad_words", 3), ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]), ("allowed_token_ids", "12"), ("logprobs", 21), ("logprobs", -1),
        ("logprobs", True), ("prompt_logprobs", 21), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
        ("priority", 2**31), ("priority", 0.5), ("skip_special_tokens", 1),
    ],
)  # fmt: skip
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", SamplingParams.__dataclass_fields__)
def test_none_is_unset(name: str) -> None:
    """Request bodies have nulls."""
    assert SamplingParams(**{name: None}) == SamplingParams() == SamplingParams.from_dict({name: None})


def test_unset_fields_take_the_models_values_and_given_ones_win() -> None:
    model = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.2, max_tokens=50)
    assert SamplingParams().resolved(model) == model.resolved()
    given = SamplingParams(temperature=0, top_p=1.0, max_tokens=7, seed=3, stop="x").resolved(model)
    assert (given.temperature, given.top_p, given.max_tokens, given.top_k) == (0.0, 1.0, 7, 20)
    assert (given.seed, given.stop, given.repetition_penalty) == (3, ("x",), 1.2)
    assert SamplingParams(top_k=-1).top_k == 0, "as vLLM says it"
    neutral = SamplingParams().resolved()
    assert (neutral.max_tokens, neutral.temperature, neutral.top_k, neutral.top_p) == (128, 0.0, 0, 1.0)
    assert (neutral.min_p, neutral.repetition_penalty, neutral.logit_bias) == (0.0, 1.0, {})
    assert (str(neutral), str(model.resolved()), str(given)) == (
        "greedy",
        "temperature 0.6, top_k 20, top_p 0.9, min_p 0.1, repetition_penalty 1.2",
        "greedy, repetition_penalty 1.2",
    )


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_integers_of_numpy_and_torch(kind: Any) -> None:
    def params(n: Any) -> SamplingParams:
        return SamplingParams(max_tokens=n(5), top_k=n(3), seed=n(9), stop_token_ids=[n(2)], logit_bias={n(1): n(2)},
                              temperature=n(1), presence_penalty=n(1))  # fmt: skip

    assert params(kind) == params(int)
    assert type(params(kind).max_tokens) is int and type(params(kind).temperature) is float


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, np.array, Fraction])
def test_numbers_of_numpy_and_torch(kind: Any) -> None:
    params = SamplingParams(temperature=kind(0.5), top_p=kind(0.25), min_p=kind(0.5), logit_bias={1: kind(-math.inf)}
                            if kind is not Fraction else {1: kind(0.5)}, frequency_penalty=kind(0.5))  # fmt: skip
    assert (params.temperature, params.top_p, params.min_p, params.frequency_penalty) == (0.5, 0.25, 0.5, 0.5)
    assert type(params.temperature) is float
    assert params.logit_bias == {1: 0.5 if kind is Fraction else -math.inf}


@pytest.mark.parametrize("value", [np.array([1]), torch.tensor([1, 2]), np.bool_(True), torch.tensor(True), 1 + 0j])
def test_arrays_and_truths_are_no_numbers(value: Any) -> None:
    for name in ("max_tokens", "temperature", "top_k", "seed"):
        with pytest.raises(ConfigError, match=name):
            SamplingParams(**{name: value})


def test_request_bodies_name_tokens_as_text() -> None:
    body = {"logit_bias": {"7": -100, 9: 1.5}, "max_tokens": None, "stop": None, "temperature": 0}
    assert SamplingParams.from_dict(body) == SamplingParams(logit_bias={7: -100.0, 9: 1.5}, temperature=0)
    with pytest.raises(ConfigError, match="names a token twice"):
        SamplingParams.from_dict({"logit_bias": {"7": 1, "07": 2}})
    with pytest.raises(ConfigError, match="'x'"):
        SamplingParams.from_dict({"logit_bias": {"x": 1}})
    for key in ("\u0663", "9" * 5000, "7 ", "+7", "7_0", ""):  # digits of other scripts; more than int() takes
        with pytest.raises(ConfigError, match="logit_bias"):
            SamplingParams.from_dict({"logit_bias": {key: 1}})


@pytest.mark.parametrize("options", [None, [1], "n", 3])
def test_options_are_a_mapping(options: Any) -> None:
    with pytest.raises(ConfigError, match=f"options is a {type(options).__name__}: must be a mapping"):
        SamplingParams.from_dict(options)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="best_of"):
        SamplingParams.from_dict({"best_of": 2})
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"logit_bias.*100"):
        SamplingParams(logit_bias={100: 1.0}).check_vocabulary(100)
    with pytest.raises(ConfigError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[100]).check_vocabulary(100)
    with pytest.raises(ConfigError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[100]).check_vocabulary(100)
    SamplingParams(stop_token_ids=[99], logit_bias={99: -1}).check_vocabulary(100)


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",) and SamplingParams(bad_words="x").bad_words == ("x",)


def test_as_many_tokens_as_must_come_may_come() -> None:
    with pytest.raises(ConfigError, match="min_tokens = 5: must be at most max_tokens = 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ConfigError, match="max_tokens = 128"):
        SamplingParams(min_tokens=129).resolved()
    assert SamplingParams(min_tokens=50).resolved(SamplingParams(max_tokens=50)).min_tokens == 50


def test_import_is_light() -> None:
    import subprocess
    import sys

    code = "import sys, specrs; specrs.SamplingParams(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert specrs.LLM is not None  # the engine is there when asked for


def test_a_token_can_be_forbidden() -> None:
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}
