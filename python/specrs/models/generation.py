"""`generation_config.json` of a Hugging Face model directory: how the model's authors want it sampled.

    sampling = default_sampling(path)      # SamplingParams; fields that the file leaves out are None

With `do_sample` true, the file's temperature (1 where it has none), top_k, top_p and min_p; else greedy decoding, as
transformers does. `repetition_penalty` and `max_new_tokens` count either way. Where the file has no top_k, all tokens
are kept: transformers would keep 50, a number that is its own and not the model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specrs._specrs import ConfigError
from specrs.models.config import GENERATION
from specrs.models.errors import UnsupportedModelError
from specrs.models.live import ModelSource, model_json
from specrs.sampling_params import SamplingParams

_FIELDS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
_GREEDY = ("repetition_penalty", "max_tokens")  # parameters that count without sampling, too
# Keys that change which tokens come out and that specrs does not implement, with the values that change nothing.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "min_length": (0,), "min_new_tokens": (0,),
    "bad_words_ids": ([],), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": ({}, []),
    "guidance_scale": (1,), "forced_bos_token_id": (), "forced_eos_token_id": (), "stop_strings": ([],),
    "top_h": (), "exponential_decay_length_penalty": (), "watermarking_config": (), "max_time": (),
    "encoder_no_repeat_ngram_size": (0,), "force_words_ids": ([],), "constraints": ([],), "dola_layers": (),
    "num_return_sequences": (1,), "token_healing": (False,),
}  # fmt: skip


def default_sampling(directory: ModelSource) -> SamplingParams:
    """Read the sampling parameters of a model directory's `generation_config.json`; greedy where there is none.

    Raises:
        ModelFileError: a file that is no JSON object.
        UnsupportedModelError: a value of a wrong type or out of range, by file and key.
    """
    raw, path = model_json(directory, GENERATION, optional=True)
    return sampling_of(raw, path)


def stated_sampling(directory: ModelSource) -> SamplingParams:
    """Read only what the file itself says, without what transformers would add: fields that the file leaves out are
    None, the temperature too. `do_sample` false is greedy decoding; a file that does not say whether to sample is taken
    at its numbers. For servers, whose API has defaults of its own. Raises as `default_sampling`."""
    raw, path = model_json(directory, GENERATION, optional=True)
    known = {key: raw[key] for key in ("do_sample", *_FIELDS) if key in raw}  # `default_sampling` warns of others
    if raw.get("do_sample") is not None:
        return sampling_of(known, path)
    stated = sampling_of({**known, "do_sample": True}, path)
    return stated if raw.get("temperature") is not None else replace(stated, temperature=None)


def sampling_of(raw: Mapping[str, Any], path: Path | None = None) -> SamplingParams:
    """The same from parsed JSON; `path` is only named in errors."""
    sample = raw.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise UnsupportedModelError("do_sample", sample, "must be true or false", path)
    given: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        try:
            given[field] = getattr(SamplingParams(**{field: raw.get(key)}), field)
        except ConfigError as e:
            raise UnsupportedModelError(key, raw[key], getattr(e, "why", str(e)), path) from None
    for key, neutral in _IGNORED.items():
        value = raw.get(key)
        if value is not None and value not in neutral:
            where = GENERATION if path is None else path
            warnings.warn(
                f"{where}: {key} = {value!r} is not implemented and is left out", RuntimeWarning, stacklevel=4
            )
    if not sample:
        return SamplingParams(temperature=0.0, **{name: given[name] for name in _GREEDY})
    if given["temperature"] is None:
        given["temperature"] = 1.0
    return SamplingParams(**given)
