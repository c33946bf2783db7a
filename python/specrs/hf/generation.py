"""`generate`, to pass to transformers as `custom_generate`.

transformers prepares inputs, lists of processors and of criteria, and calls it in place of its own loop (the contract:
`GenerationMixin.generate` of transformers 5). Tokens are those of its greedy decoding; where it samples, the
distribution is the same and the random numbers are specrs's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specrs._specrs import ConfigError
from specrs.engine import LLM, RequestOutput
from specrs.hf.engines import engine_of, turn
from specrs.hf.errors import UnsupportedGenerationError
from specrs.hf.honoured import Asked, check_arguments, prompts, read, shape_of
from specrs.sampling_params import SamplingParams


def generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    *,
    streamer: Any = None,
    token_streamer: Any = None,
    engine_options: Mapping[str, Any] | None = None,
    assistant_model: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Continue each row of `input_ids`, by an engine over the model's own weights.

    The first call makes the engine (`from_model` says what it copies), later ones find it by the module, which it does
    not keep alive. It is made anew when weights have been written to, `engine_options` differ, or a call needs a longer
    context.

    Args:
        model: a causal language model of a family that specrs runs.
        input_ids: int64 [rows, n]. Rows are padded on the left, as the attention mask says.
        logits_processor, stopping_criteria: transformers' own, as its configuration makes them; others are refused.
        generation_config: honoured are `max_length` or `max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`,
            `min_p`, `repetition_penalty`, `eos_token_id`, `pad_token_id`, `num_return_sequences`, `renormalize_logits`,
            `return_dict_in_generate`; what else would change the output is refused.
        streamer: gets tokens as they come, of one row. transformers (5.24 too) does not hand it on to a
            `custom_generate`, so there give it as `token_streamer`, which gets the prompt too.
        engine_options: options of `LLM`, such as ``{"draft": head, "max_batch": 4}``.

    Returns:
        int64 [rows, n + new] on the device of `input_ids`, rows that ended earlier padded with `pad_token_id`; or
        transformers' `GenerateDecoderOnlyOutput` with these `sequences`.

    Where it samples, each row's seed is drawn from torch's default generator on the CPU (`torch.manual_seed`).

    Raises:
        UnsupportedGenerationError: a `ConfigError` that names the argument, its value, and what would work.
        EngineBusyError: another thread generates from this module.
        NonFiniteError: the model's scores held NaN.
        As `from_model` otherwise.
    """
    if assistant_model is not None:
        why = "drafts are specrs's own; engine_options={'draft': directory} takes a draft head"
        raise UnsupportedGenerationError("assistant_model", type(assistant_model).__name__, why)
    if synced_gpus:
        raise UnsupportedGenerationError("synced_gpus", synced_gpus, "one process generates for itself")
    if (embeds := model_kwargs.get("inputs_embeds")) is not None:
        raise UnsupportedGenerationError("inputs_embeds", shape_of(embeds), "not read; token ids as input_ids work")
    if input_ids.dim() != 2:
        raise UnsupportedGenerationError("input_ids", list(input_ids.shape), "must be [rows, tokens]")
    if generation_config is None:
        generation_config = model.generation_config
    rows = len(input_ids)
    asked = read(generation_config, logits_processor, stopping_criteria, input_ids.shape)
    texts = prompts(input_ids, model_kwargs.get("attention_mask"), asked.ignored)
    check_arguments(model_kwargs, [len(text) for text in texts])
    out = token_streamer if token_streamer is not None else streamer
    if out is not None and rows != 1:
        raise UnsupportedGenerationError("streamer", type(out).__name__, f"one row is streamed, not {rows}")
    with turn(model):
        llm = engine_of(model, engine_options or {}, max(map(len, texts)) + asked.most)
        if token_streamer is not None:
            token_streamer.put(input_ids.cpu())
        params = _params(asked, rows, llm, bool(generation_config.do_sample))
        new = _run(llm, texts, params, asked, input_ids.cpu(), out)
    if out is not None:
        out.end()
    return _result(input_ids, new, asked, generation_config)


def _params(asked: Asked, rows: int, llm: LLM, sample: bool) -> list[SamplingParams]:
    """Return the parameters of each row; each row has its own seed where the rows sample."""
    seeds: list[int | None] = [None] * rows
    if sample:
        seeds = list(torch.randint(2**63 - 1, (rows,)).tolist())
    return [asked.params(seed, llm.vocab_size) for seed in seeds]


def _run(
    llm: LLM, texts: list[list[int]], params: list[SamplingParams], asked: Asked, given: torch.Tensor, out: Any
) -> list[list[int]]:
    """New tokens of each row."""
    new: list[list[int]] = [[] for _ in texts]
    live: dict[int, int] = {}
    try:
        for i, (text, p) in enumerate(zip(texts, params, strict=True)):
            live[llm.add(text, p)] = i
        while live:
            for event in llm.step():
                if event.request_id not in live:
                    continue  # the row has ended at a stop string
                i = live[event.request_id]
                ended = _extend(new[i], event.token_ids, asked, given[i], out)
                if ended and event.output is None:
                    llm.abort(event.request_id)
                if ended or event.output is not None:
                    del live[event.request_id]
                if not ended:
                    _raise(event.output)
    finally:
        for request in live:
            llm.abort(request)
    return new


def _extend(row: list[int], tokens: Sequence[int], asked: Asked, given: torch.Tensor, out: Any) -> bool:
    """Append tokens up to one that ends the row by a criterion; returns whether there is one."""
    for token in tokens:
        row.append(token)
        if out is not None:
            out.put(torch.tensor([token]))
        if asked.stops:
            so_far = torch.cat((given, torch.tensor(row, dtype=given.dtype)))[None]
            if any(stop(so_far) for stop in asked.stops):
                return True
    return False


def _raise(output: RequestOutput | None) -> None:
    if output is not None and output.error is not None:
        raise output.error


def _result(input_ids: torch.Tensor, new: list[list[int]], asked: Asked, config: Any) -> Any:
    """Rows side by side, as transformers returns them."""
    longest = max(map(len, new))
    if any(len(row) < longest for row in new):
        pad = _pad_token(config, asked)
        new = [row + [pad] * (longest - len(row)) for row in new]
    added = torch.tensor(new, dtype=input_ids.dtype).to(input_ids.device)
    sequences = torch.cat((input_ids, added), 1)
    if not getattr(config, "return_dict_in_generate", False):
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]


def _pad_token(config: Any, asked: Asked) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else pad
    if pad is not None:
        return int(pad)
    if asked.eos:
        return asked.eos[0]  # as transformers does
    raise ConfigError("pad_token_id = None: rows end at different lengths; give one")
