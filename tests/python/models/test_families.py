"""Families beyond Llama's nearest: each against transformers, its passes against each other, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo
from modelrun import Driver, path_to, random_parents, random_tokens
from specrs import LLM, ConfigError, SamplingParams
from specrs.models import LlamaModel, ModelConfig, UnsupportedModelError, ops_for, rowwise, torch_ops
from specrs.models.cuda import why_not
from specrs.models.families import FAMILIES

OPS: dict[str, Any] = {"torch": torch_ops, "host": ops_for}
GEMMA = {"head_dim": 32, "tie_word_embeddings": True}
GEMMA2 = {**GEMMA, "query_pre_attn_scalar": 40, "sliding_window": 300}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3-partial": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {
            "num_attention_heads": 2,
            "original_max_position_embeddings": 128,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(16)],
                "long_factor": [2.0 + i for i in range(16)],
            },
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.02,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite-plain": ("GraniteForCausalLM", {"attention_multiplier": 0.25}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo2-biased": ("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": 4}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-listed": ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True}),
    "smollm3-smallest": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1, 0], "head_dim": 2, "hidden_size": 8}),
    "gemma": ("GemmaForCausalLM", GEMMA),
    "gemma-legacy": ("GemmaForCausalLM", {**GEMMA, "hidden_act": "gelu", "num_key_value_heads": 1}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA2, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.4}),
    "gemma2-uncapped": ("Gemma2ForCausalLM", {**GEMMA2, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "query_pre_attn_scalar": 40, "sliding_window": 300,
                                     "rope_local_base_freq": 5000.0, "sliding_window_pattern": 3}),
    "gemma3-scaled": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "sliding_window": 300,
            "rope_theta": None,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        },
    ),
}  # fmt: skip


def build(directory: Path, variant: str, ops: Any, **options: Any) -> LlamaModel:
    architecture, overrides = VARIANTS[variant]
    return LlamaModel.load(modelzoo.write_target(directory, architecture, **overrides, **options), ops)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_features_equal_transformers(tmp_path: Path, variant: str, ops: str) -> None:
    from transformers import AutoModelForCausalLM  # takes seconds to import, and only this test needs it

    model = build(tmp_path, variant, OPS[ops]())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    driver = Driver(model, max_context=120)
    model.set_aux_layers((0, 2, 3))
    tokens = random_tokens(90, seed=3)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), output_hidden_states=True)
    spread = float(expected.logits.std())

    # Chunks that end in the middle of pages and of the kernel's blocks, then decoding.
    seq, start, parts = driver.new(), 0, []
    for count in (33, 40, 1, 7, 1, 1, 7):
        parts.append(driver.extend([seq], [start], [tokens[start : start + count]], aux=True))
        start += count
    logits = torch.cat([part[0] for part in parts])
    features = torch.cat([part[1] for part in parts if part[1] is not None])
    torch.testing.assert_close(logits, expected.logits[0], rtol=1e-4, atol=1e-4 * spread)
    wanted = torch.cat([expected.hidden_states[i][0] for i in (0, 2, 3)], dim=-1)
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4 * float(wanted.std()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "-" not in v])
def test_a_token_has_the_same_bits_in_every_pass(tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    """Plain decoding, chunks, batches and a tree's rows: bitwise equal logits on the host kernels."""
    driver = Driver(build(tmp_path, variant, ops_for(), dtype=dtype, intermediate_size=90), kv_dtype=dtype)
    tokens = random_tokens(75, seed=6)
    logits, _ = driver.decode_all(tokens)
    a, b = driver.new(), driver.new()
    got, _ = driver.extend([a, b], [0, 0], [tokens[:31], tokens[:64]])
    assert torch.equal(got, torch.cat((logits[:31], logits[:64])))
    got, _ = driver.extend([b, a], [64, 31], [tokens[64:], tokens[31:70]], logit_rows=torch.tensor([3, 40, 0]))
    assert torch.equal(got, logits[[67, 60, 64]])
    generator = torch.Generator().manual_seed(7)
    parents = [random_parents(n, generator) for n in (16, 5)]
    rows = [random_tokens(n, seed=8 + n) for n in (16, 5)]
    verified = driver.verify([a, b], [70, 75], parents, rows)
    driver.pool.release([a, b])
    at = 0
    for length, tree, drafts in zip((70, 75), parents, rows, strict=True):
        for node in range(0, len(tree), 3):
            path = [drafts[n] for n in path_to(node, tree)]
            alone, _ = driver.decode_all([*tokens[:length], *path])
            assert torch.equal(verified[at + node], alone[-1]), f"node {node} of the tree at {length}"
        at += len(tree)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "-" not in v])
def test_generation_is_that_of_plain_decoding(tmp_path: Path, variant: str, sampled: bool) -> None:
    architecture, overrides = VARIANTS[variant]
    small = {"vocab_size": 12, "eos_token_id": None}
    target = modelzoo.write_target(tmp_path / "target", architecture, **{**overrides, **small})
    draft = modelzoo.write_eagle3(tmp_path / "draft", target, draft_vocab_size=None, own_embedding=True)
    prompts = [random_tokens(n, seed=n, vocab=12) for n in (3, 17, 30)]
    sampling = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2} if sampled else {"temperature": 0.0}
    params = [SamplingParams(max_tokens=40, seed=i, **sampling) for i in range(3)]
    with LLM(target, device="cpu", max_context_len=100, speculative=False) as llm:
        want = [out.token_ids for out in llm.generate(prompts, params)]
    with LLM(target, draft, device="cpu", max_context_len=100, tree=(3, 3, 12)) as llm:
        outputs = llm.generate(prompts, params)
        assert [out.token_ids for out in outputs] == want
        assert any(sum(out.accepted_lengths[1:]) for out in outputs), "nothing was accepted: this says nothing"


@pytest.mark.parametrize(
    ("architecture", "change", "what", "why"),
    [
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "attn_logit_softcapping", "> 0"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": "a"}, "attn_logit_softcapping", "number"),
        ("GemmaForCausalLM", {"hidden_act": "silu"}, "hidden_act", "only gelu"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation", "only gelu_pytorch_tanh"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "only false"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types", "each of 4 layers"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention", "object"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", "> 0"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "llama3"}}, "rope_scaling.rope_type", "default, longrope"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su"}}, "short_factor", "list of 16 numbers"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su", "short_factor": [0] * 16}}, "short_factor", "> 0"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor", "even number"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.01}, "partial_rotary_factor", "at least 2"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1]}, "no_rope_layers", "each of 4 layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 2, 1]}, "no_rope_layers", "0 (none) and 1"),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier", "> 0"),
        ("GraniteForCausalLM", {"logits_scaling": "8"}, "logits_scaling", "number"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(architecture: str, change: dict[str, Any], what: str, why: str) -> None:
    raw = {**modelzoo.target_config(architecture), **change}
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_dict(raw)
    assert caught.value.what == what
    assert why in str(caught.value)


def test_backends_that_cap_no_scores_are_refused(tmp_path: Path) -> None:
    architecture, overrides = VARIANTS["gemma2"]
    target = modelzoo.write_target(tmp_path, architecture, **overrides)
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping = 0\.4, which 'native' does"):
        LLM(target, device="cpu", attention_backend="flashinfer")


def config(architecture: str, **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(modelzoo.target_config(architecture, **overrides))


def test_defaults_are_those_of_the_family() -> None:
    for name in ("Gemma3ForCausalLM", "GemmaForCausalLM", "SmolLM3ForCausalLM"):
        raw = modelzoo.target_config(name)
        for key in ("tie_word_embeddings", "head_dim", "max_position_embeddings", "rope_theta"):
            raw.pop(key, None)
        found = ModelConfig.from_dict(raw)
        assert found.tie_word_embeddings
        want = {"Gemma3ForCausalLM": (256, 131072, 1e6), "GemmaForCausalLM": (256, 8192, 1e4),
                "SmolLM3ForCausalLM": (16, 32768, 2e6)}[name]  # fmt: skip
        assert (found.head_dim, found.max_position_embeddings, found.rope.theta) == want


def test_windows_and_scalings_limit_the_context() -> None:
    assert config("Gemma2ForCausalLM", sliding_window=64).max_context_len == 64
    assert config("Gemma3ForCausalLM", sliding_window=64).max_context_len == 64
    whole = config("Gemma3ForCausalLM", sliding_window=64, layer_types=["full_attention"] * 4)
    assert whole.max_context_len == 512
    assert config("Phi3ForCausalLM", sliding_window=47).max_context_len == 47
    assert config("SmolLM3ForCausalLM", sliding_window=64).max_context_len == 512
    assert config("SmolLM3ForCausalLM", sliding_window=64, use_sliding_window=True).max_context_len == 64
    long = VARIANTS["phi3-longrope"][1]
    assert config("Phi3ForCausalLM", **long).max_context_len == 128
    with pytest.raises(UnsupportedModelError, match=r"original_max_position_embeddings = 128 \(longrope"):
        config("Phi3ForCausalLM", **long).check_context(129)


# -- operations ---------------------------------------------------------------------------------------------------


def test_operations_are_close_and_do_not_depend_on_the_place() -> None:
    x = torch.randn(300, 77, generator=torch.Generator().manual_seed(1)) * 6
    up = torch.randn(300, 77, generator=torch.Generator().manual_seed(2))
    both, out = torch.cat((x, up), 1), torch.empty_like(x)
    rowwise.gelu_up(both, out)
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh") * up.double()
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=1e-7)
    capped = x.clone()
    rowwise.soft_cap(capped, 5.0)
    torch.testing.assert_close(capped.double(), 5 * torch.tanh(x.double() / 5), rtol=1e-6, atol=0)
    for columns in (1, 2, 15, 16, 33):
        for row in (0, 7, 299):
            part = torch.cat((x[row, :columns], up[row, :columns]))[None]
            alone = torch.empty(1, columns)
            rowwise.gelu_up(part, alone)
            assert torch.equal(alone[0], out[row, :columns])
            alone = x[row : row + 1, :columns].clone()
            rowwise.soft_cap(alone, 5.0)
            assert torch.equal(alone[0], capped[row, :columns])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_operations_hide_no_number_that_is_not_finite(bad: float) -> None:
    out = torch.empty(1, 1)
    rowwise.gelu_up(torch.tensor([[1.0, bad]]), out)
    assert not out.isfinite().any()
    if bad > 0 or bad != bad:
        rowwise.gelu_up(torch.tensor([[bad, 1.0]]), out)
        assert not out.isfinite().any()
    if bad != bad:
        out = torch.tensor([[bad]])
        rowwise.soft_cap(out, 30.0)
        assert not out.isfinite().any()


# -- devices ------------------------------------------------------------------------------------------------------


def test_a_gpu_runs_every_family_of_the_sizes_that_it_has_kernels_for() -> None:
    for name in FAMILIES:
        assert why_not(config(name, head_dim=128, vocab_size=304, residual_multiplier=0.22)) is None, name
    for cap, fits in ((1e-5, False), (1e-4, True), (50.0, True), (1e4, True), (1e8, False)):
        why = why_not(config("Gemma2ForCausalLM", head_dim=128, vocab_size=304, attn_logit_softcapping=cap))
        assert (why is None) is fits, (cap, why)
    why = why_not(config("Gemma2ForCausalLM", head_dim=64, vocab_size=304, attn_logit_softcapping=50.0))
    assert why == ("head_dim = 64: attention on a GPU takes 128, 256 where attn_logit_softcapping caps scores")
