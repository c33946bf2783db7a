"""`specrs.hf.generate` inside transformers' own `generate`: the same tokens, and what is refused."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo
import specrs
from modelrun import random_tokens
from specrs import ConfigError, UnsupportedModelError
from specrs.hf import UnsupportedGenerationError, engines, from_model
from specrs.hf import generate as by_specrs

transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Phi3ForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Gemma3ForCausalLM": {"sliding_window": 200},
}


def module(directory: Path, architecture: str = "LlamaForCausalLM", **options: Any) -> Any:
    modelzoo.write_target(directory, architecture, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return module(tmp_path_factory.mktemp("llama"), eos_token_id=7)


@pytest.fixture(autouse=True)
def no_engine_stays() -> Iterator[None]:
    yield
    for held in list(engines._ENGINES.values()):
        held.llm.audit()


def rows(*lengths: int, pad: int = 0) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, with their mask."""
    most = max(lengths)
    ids = [[pad] * (most - n) + random_tokens(n, seed=n) for n in lengths]
    mask = [[0] * (most - n) + [1] * n for n in lengths]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    model = module(tmp_path, architecture, **FAMILIES[architecture])
    inputs = rows(9, 3, 14)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, custom_generate=by_specrs)
    assert torch.equal(got, want) and got.dtype == want.dtype


MANY_EOS = [5, 7, 11, 19, 23, 42, 77, 80, 99, 120, 150, 200, 220, 250, 280]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"eos_token_id": MANY_EOS},
        {"min_new_tokens": 9, "eos_token_id": MANY_EOS},
        {"min_length": 27, "eos_token_id": MANY_EOS, "repetition_penalty": 1.3},  # padding counts
        {"min_new_tokens": 6, "min_length": 24, "eos_token_id": MANY_EOS},
        {"min_new_tokens": 50, "eos_token_id": MANY_EOS},
        {"eos_token_id": -1},
        {"eos_token_id": [*MANY_EOS, 300, 1 << 20], "min_new_tokens": 9},
        {"max_length": 20, "max_new_tokens": None},
        {"num_return_sequences": 1, "renormalize_logits": True},
        {"use_cache": False},
        {"temperature": 1.0, "top_k": None},
    ],
    ids=lambda o: next(iter(o)),
)
def test_options_of_greedy_decoding(llama: Any, options: dict[str, Any]) -> None:
    inputs = rows(9, 3, 14)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 1, **options}
    want = llama.generate(**inputs, **options)
    assert torch.equal(llama.generate(**inputs, **options, custom_generate=by_specrs), want)


def test_drafts_change_nothing(tmp_path: Path) -> None:
    model = module(tmp_path / "target", vocab_size=12, eos_token_id=None)
    head = modelzoo.write_eagle3(tmp_path / "draft", tmp_path / "target", draft_vocab_size=None, own_embedding=True)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    want = model.generate(ids, max_new_tokens=60, do_sample=False)
    drafted = {"draft": str(head), "tree": (3, 3, 12)}
    got = model.generate(ids, max_new_tokens=60, do_sample=False, custom_generate=by_specrs, engine_options=drafted)
    assert torch.equal(got, want)
    assert engines._ENGINES[model].llm.speculative


def test_stop_strings_end_a_row_as_transformers_ends_it(tmp_path: Path) -> None:
    model = module(tmp_path, tokenizer=True)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = torch.tensor([random_tokens(12, seed=4)])
    whole = model.generate(ids, max_new_tokens=40, do_sample=False)[0, 12:]
    texts = [tokenizer.decode([token]) for token in whole.tolist()]
    stop = next(text for text in texts[5:] if text and text.isprintable() and text not in texts[:5])
    criteria = [transformers.StopStringCriteria(tokenizer, [stop])]
    options = {"max_new_tokens": 40, "do_sample": False, "stopping_criteria": criteria}
    want = model.generate(ids, **options)
    assert want.shape[1] < 12 + 40
    assert torch.equal(model.generate(ids, **options, custom_generate=by_specrs), want)


def test_sampling_follows_torchs_seed_and_the_distribution(llama: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 20, "min_p": 0.01,
               "num_return_sequences": 6, "custom_generate": by_specrs, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(3)
    first = llama.generate(ids, **options)
    again = llama.generate(ids, **options)
    torch.manual_seed(3)
    assert torch.equal(llama.generate(ids, **options), first) and not torch.equal(again, first)
    assert len({tuple(row) for row in first.tolist()}) > 1
    with torch.no_grad():
        scores = llama(ids).logits[:, -1]
    probable = set(scores[0].topk(20).indices.tolist())
    assert {row[4] for row in first.tolist()} <= probable


class Collector:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_prompt_and_tokens(llama: Any) -> None:
    seen, ids = Collector(), torch.tensor([[5, 6, 7, 8]])
    got = llama.generate(ids, max_new_tokens=9, do_sample=False, custom_generate=by_specrs, token_streamer=seen)
    assert seen.tokens == got[0].tolist() and seen.ended
    seen = Collector()  # stands for a transformers that has put the prompt itself
    by_specrs(llama, ids, generation_config=transformers.GenerationConfig(max_length=9), streamer=seen)
    assert len(seen.tokens) == 5 and seen.ended


def test_a_dictionary_is_returned_where_one_is_asked_for(llama: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 5, "do_sample": False}
    want = llama.generate(ids, **options)
    got = llama.generate(ids, **options, return_dict_in_generate=True, custom_generate=by_specrs)
    assert torch.equal(got.sequences, want)


class Odd(transformers.LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"logits_processor": [Odd()]}, "logits_processor"),
        ({"no_repeat_ngram_size": 2}, "logits_processor"),
        ({"logits_processor": [transformers.MinNewTokensLengthLogitsProcessor(4, 3, [9])]}, "logits_processor"),
        ({"forced_eos_token_id": 3}, "logits_processor"),
        ({"do_sample": True, "typical_p": 0.5}, "logits_processor"),
        ({"max_time": 3.0}, "stopping_criteria"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"max_new_tokens": 600}, "max_length"),
        ({"logits_processor": [transformers.TopKLogitsWarper(3), transformers.TopKLogitsWarper(3)]},
         "logits_processor"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4]])}, "position_ids"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "attention_mask[0]"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "attention_mask[0]"),
        ({"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "input_ids[0]"),
        ({"inputs_embeds": torch.zeros(1, 4, 64)}, "inputs_embeds"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(llama: Any, options: dict[str, Any], what: str) -> None:
    options = {"max_new_tokens": 5, "do_sample": False, **options}
    with pytest.raises(UnsupportedGenerationError) as caught:
        llama.generate(torch.tensor([[5, 6, 7, 8]]), **options, custom_generate=by_specrs)
    assert caught.value.what == what and isinstance(caught.value, ConfigError)


def test_what_only_a_direct_call_can_ask_is_refused(llama: Any) -> None:
    ids, config = torch.tensor([[5, 6]]), transformers.GenerationConfig(max_length=9)
    with pytest.raises(UnsupportedGenerationError, match=r"inputs_embeds = 'torch.float32 \[1, 4, 64\]': not read"):
        llama.generate(inputs_embeds=torch.zeros(1, 4, 64), max_new_tokens=3, custom_generate=by_specrs)
    for options, what in (
        ({"assistant_model": llama}, "assistant_model"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"pixel_values": ids}, "pixel_values"),
    ):
        with pytest.raises(UnsupportedGenerationError) as caught:
            by_specrs(llama, ids, generation_config=config, **options)
        assert caught.value.what == what
    with pytest.raises(UnsupportedGenerationError, match="rows, tokens"):
        by_specrs(llama, ids[0], generation_config=config)
    with pytest.raises(UnsupportedGenerationError, match="one row is streamed, not 2"):
        by_specrs(llama, torch.tensor([[5], [6]]), generation_config=config, streamer=Collector())
    config.max_length = 2
    with pytest.raises(UnsupportedGenerationError, match="no room behind 2 tokens"):
        by_specrs(llama, ids, generation_config=config)


def test_a_cache_is_read_by_what_it_holds(llama: Any) -> None:
    """transformers before 5.24 calls it `past_key_values`, and makes one for each call."""
    text = torch.tensor([[5, 6, 7, 8]])
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    cache = transformers.DynamicCache(config=llama.config)
    want = llama.generate(text, **options)
    got = llama.generate(text, **options, past_key_values=cache, custom_generate=by_specrs)
    assert torch.equal(got, want) and cache.get_seq_length() == 0
    llama(text[:, :3], use_cache=True, past_key_values=cache)
    with pytest.raises(UnsupportedGenerationError, match="DynamicCache of 3 tokens': a cache that holds") as caught:
        llama.generate(text, **options, past_key_values=cache, custom_generate=by_specrs)
    assert caught.value.what in ("cache", "past_key_values")
    config = transformers.GenerationConfig(max_length=9)

    class Own(transformers.DynamicCache):  # type: ignore[misc, name-defined]
        pass

    class OwnLayer(cache_utils.DynamicLayer):  # type: ignore[misc, name-defined]
        pass

    empty, rounded = transformers.DynamicCache, object.__new__(transformers.QuantizedCache)
    rounded.layers = []
    replicated = cache_utils.Cache(layer_class_to_replicate=cache_utils.QuantizedLayer)
    both = cache_utils.EncoderDecoderCache(empty(), empty())
    for given, why in (
        (rounded, "'QuantizedCache': would round"), (replicated, "'QuantizedLayer': would round"),
        (Own(), "'Own': unknown to specrs"), (cache_utils.Cache(layers=[OwnLayer()]), "'OwnLayer': unknown to specrs"),
        (both, "'EncoderDecoderCache': not implemented"), (((text, text),), "not implemented"),
    ):  # fmt: skip
        for name in ("cache", "past_key_values"):
            with pytest.raises(UnsupportedGenerationError, match=f"{name} = .*{why}"):
                by_specrs(llama, text, generation_config=config, **{name: given})
    with pytest.raises(UnsupportedGenerationError, match="mems = 'DynamicCache': not implemented"):
        by_specrs(llama, text, generation_config=config, mems=empty())


# -- engines ------------------------------------------------------------------------------------------------------


def test_an_engine_lives_as_long_as_its_module_and_follows_its_weights(tmp_path: Path) -> None:
    held = [module(tmp_path)]
    [model] = held
    ids = torch.tensor([[5, 6, 7, 8]])

    def run(**options: Any) -> torch.Tensor:
        found: torch.Tensor = held[0].generate(ids, max_new_tokens=8, do_sample=False, **options)
        return found

    before = run(custom_generate=by_specrs)
    first = engines._ENGINES[model].llm
    run(custom_generate=by_specrs)
    assert engines._ENGINES[model].llm is first
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    after = run(custom_generate=by_specrs)
    assert engines._ENGINES[model].llm is not first
    assert torch.equal(after, run()) and not torch.equal(after, before)
    second = engines._ENGINES[model].llm
    run(custom_generate=by_specrs, engine_options={"max_batch": 2})
    assert engines._ENGINES[model].llm is not second
    gone, llm = weakref.ref(model), engines._ENGINES[model].llm
    del model, held[0]
    gc.collect()
    assert gone() is None
    with pytest.raises(Exception, match="closed"):
        llm.add([1])


def write(weight: torch.Tensor, how: str) -> None:
    new = weight.detach().flip(0).clone()
    if how == "data":
        weight.data.copy_(new)
    elif how == "numpy":
        weight.detach().numpy()[:] = new.numpy()
    elif how == "a row":
        weight.data[281] = weight.data[7]  # the row of a token that had been chosen
    else:
        weight.data.copy_(weight.detach().flip(1).clone())


@pytest.mark.parametrize("how", ["data", "numpy", "a row", "columns"])
def test_writes_that_torch_does_not_count_are_seen(tmp_path: Path, how: str) -> None:
    model = module(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 8, "do_sample": False}
    before = model.generate(ids, **options, custom_generate=by_specrs)
    assert 281 in before[0, 4:]
    write(model.lm_head.weight, how)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, custom_generate=by_specrs), want) and not torch.equal(
        want, before
    )


def test_inference_mode_is_the_callers_own(tmp_path: Path) -> None:
    """An engine that was made within it works outside, and the other way round."""
    model, ids = module(tmp_path), torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 24, "do_sample": False, "custom_generate": by_specrs}
    with torch.inference_mode():
        first = model.generate(ids, **options)
        llm = from_model(model)
    assert torch.equal(model.generate(ids, **options), first)
    longer = torch.tensor([random_tokens(100, seed=1)])
    with torch.inference_mode():
        within = model.generate(longer, **options)  # its passes are larger than those before
    assert torch.equal(model.generate(longer, **options), within)
    [out] = llm.generate([ids[0].tolist()], specrs.SamplingParams(max_tokens=24, temperature=0.0))
    assert first[0, 4:].tolist()[: len(out.token_ids)] == out.token_ids
    llm.close()


def test_threads_on_one_module_leave_no_engine_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, said = module(tmp_path), [], []

    def make(*given: Any, **options: Any) -> Any:
        made.append(specrs.LLM(*given, **options))
        return made[-1]

    monkeypatch.setattr(engines, "LLM", make)
    ids = torch.tensor([[5, 6, 7, 8]])
    want = model.generate(ids, max_new_tokens=20, do_sample=False)

    def work(i: int) -> None:
        for n in range(4):
            options = {"max_batch": 1 + (i + n) % 2}  # each call wants another engine than the one before
            try:
                got = model.generate(
                    ids, max_new_tokens=20, do_sample=False, custom_generate=by_specrs, engine_options=options
                )
                said.append(torch.equal(got, want))
            except specrs.EngineBusyError:
                said.append(True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [True] * 12
    assert [llm for llm in made if not llm.closed] == [engines._ENGINES[model].llm]


def test_an_engine_grows_with_what_is_asked(tmp_path: Path) -> None:
    model = module(tmp_path, max_position_embeddings=6000)
    ids = torch.tensor([[5, 6]])
    model.generate(ids, max_new_tokens=1, custom_generate=by_specrs)
    assert engines._ENGINES[model].llm.config.max_context_len == 2048
    with pytest.raises(UnsupportedGenerationError, match="exactly up to 6000 tokens"):
        model.generate(ids, max_new_tokens=6000, custom_generate=by_specrs)
    engine = engines.engine_of(model, {}, 2049)
    assert engine.config.max_context_len == 4096 and engines.engine_of(model, {}, 5) is engine
    assert engines.engine_of(model, {}, 4097).config.max_context_len == 6000


# -- from_model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_llm_of_a_module_is_that_of_its_files(tmp_path: Path, dtype: torch.dtype) -> None:
    from specrs import LLM, SamplingParams

    modelzoo.write_target(tmp_path, dtype=dtype, tokenizer=True, tie_word_embeddings=True)
    modelzoo.write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 9], "repetition_penalty": 1.25})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="<s>")
    tokenizer(["a", "bcd"], padding=True)  # this padding must not reach the engine's prompts
    options: dict[str, Any] = {"device": "cpu", "max_context_len": 200}
    with LLM(tmp_path, **options) as files, from_model(model, tokenizer, **options) as live:
        params = SamplingParams(max_tokens=20)
        want, got = (llm.generate(["def f(", "x"], params) for llm in (files, live))
        assert [(o.token_ids, o.text) for o in got] == [(o.token_ids, o.text) for o in want]
        assert live.eos_ids == files.eos_ids == {2, 9}
        assert live.default_sampling == files.default_sampling
        assert live.numerics == files.numerics
        assert "LlamaForCausalLM (in memory)" in repr(live)


def test_modules_that_do_not_fit_are_refused_by_name(tmp_path: Path, llama: Any) -> None:
    with pytest.raises(ConfigError, match="model of transformers"):
        from_model(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="backed by the tokenizers library"):
        from_model(llama, tokenizer=3)
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        from_model(gpt)

    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    with pytest.raises(UnsupportedModelError, match="Mine"):
        from_model(Mine(llama.config))
    part = module(tmp_path)
    part.model.norm.to("meta")
    with pytest.raises(ConfigError, match="on cpu, meta; a model on one device"):
        from_model(part)
    for options in ({}, {"device": "cpu"}):
        with pytest.raises(ConfigError, match="without values"):
            from_model(part.to("meta"), **options)


class Packed(torch.Tensor):
    """A layer as libraries of quantised weights have it."""


class Twice(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_parts_that_compute_something_else_are_refused_by_name(tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])

    def refused(what: str) -> None:
        with pytest.raises(UnsupportedModelError) as caught:
            model.generate(ids, max_new_tokens=3, custom_generate=by_specrs)
        assert caught.value.what == what

    model = module(tmp_path)
    layer = model.model.layers[1]
    layer.self_attn.q_proj.__class__ = Twice
    refused("module model.layers.1.self_attn.q_proj")
    layer.self_attn.q_proj.__class__ = torch.nn.Linear
    hook = layer.register_forward_hook(lambda part, given, out: out)
    refused("hook of module model.layers.1")
    hook.remove()
    for other in (lambda x: x, model.model.layers[0].mlp.forward, torch.compile(lambda x: x, backend="eager")):
        layer.mlp.forward = other
        refused("module model.layers.1.mlp.forward")
    layer.mlp.forward = torch.compile(layer.mlp.forward, backend="eager")
    compiled = layer.mlp.forward
    layer.mlp.forward = functools.wraps(compiled)(lambda *given: 2 * compiled(*given))
    refused("module model.layers.1.mlp.forward")
    del layer.mlp.forward
    act, layer.mlp.act_fn = layer.mlp.act_fn, torch.nn.ReLU()
    refused("module model.layers.1.mlp.act_fn")
    layer.mlp.act_fn = act
    model(ids, output_hidden_states=True)  # transformers leaves hooks of its own behind
    want = model.generate(ids, max_new_tokens=3, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, custom_generate=by_specrs), want)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed))
    refused("tensor lm_head.weight")
    model.lm_head = torch.ao.nn.quantized.dynamic.Linear(64, 300)
    refused("module lm_head")


def test_tied_embeddings_that_somebody_untied_are_refused(tmp_path: Path) -> None:
    model, ids = module(tmp_path, tie_word_embeddings=True), torch.tensor([[5, 6, 7, 8]])
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    options = {"max_new_tokens": 8, "do_sample": False}
    with pytest.raises(UnsupportedModelError, match=r"tie_word_embeddings = True: .* false uses it"):
        model.generate(ids, **options, custom_generate=by_specrs)
    model.config.tie_word_embeddings = False
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, custom_generate=by_specrs), want)
