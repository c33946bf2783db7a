"""Every bad parameter is refused by name, value and limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

import specrs
from specrs import ConfigError, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", -0.1), ("temperature", math.nan),
        ("temperature", "hot"), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01), ("min_p", -0.1), ("min_p", 1.1),
        ("seed", -1), ("seed", 2**64), ("seed", 1.0), ("stop", [""]), ("stop", [3]), ("stop_token_ids", [-1]),
        ("repetition_penalty", 0.0), ("repetition_penalty", math.inf), ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}), ("ignore_eos", 1),
        ("temperature", 10**400), ("stop", None), ("stop", 5), ("stop_token_ids", None), ("stop_token_ids", "12"),
        ("top_k", 10**30), ("logit_bias", [1]), ("logit_bias", {1: math.inf}), ("logit_bias", {1: 1e300}),
        ("logit_bias", None), ("presence_penalty", 1e39), ("frequency_penalty", -1e39), ("repetition_penalty", 1e-60),
    ],
)  # fmt: skip
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


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
    SamplingParams(stop_token_ids=[99], logit_bias={99: -1}).check_vocabulary(100)


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_import_is_light() -> None:
    import subprocess
    import sys

    code = "import sys, specrs; specrs.SamplingParams(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert specrs.LLM is not None  # and the engine is there when asked for


def test_a_token_can_be_forbidden() -> None:
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}
