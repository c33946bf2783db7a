"""The target model against transformers, and its passes against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo
from modelrun import Driver, path_to, random_parents, random_tokens
from specrs import ConfigError
from specrs.models import (
    HOST,
    Eagle3Head,
    HostDense,
    LlamaModel,
    ModelFileError,
    Ops,
    Placement,
    UnsupportedModelError,
    numerics,
    ops_for,
    torch_ops,
)

OPS: dict[str, Any] = {"torch": torch_ops, "host": ops_for}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied-biased": ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-head64": ("LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 64}),
    "llama-head128": ("LlamaForCausalLM", {"head_dim": 128}),
    "llama-odd-sizes": ("LlamaForCausalLM", {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 301}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3-tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-biased": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "rope-linear": ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "rope-dynamic": ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "rope-llama3": (
        "LlamaForCausalLM",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope-yarn": (
        "Qwen2ForCausalLM",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "rope-yarn-parameters": (
        "Qwen3ForCausalLM",
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            },
        },
    ),
}


def build(directory: Path, variant: str, ops: Ops, **options: Any) -> LlamaModel:
    architecture, overrides = VARIANTS[variant]
    return LlamaModel.load(modelzoo.write_target(directory, architecture, **overrides, **options), ops)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_features_equal_transformers(tmp_path: Path, variant: str, ops: str) -> None:
    from transformers import AutoModelForCausalLM  # takes seconds to import, and only this test needs it

    model = build(tmp_path, variant, OPS[ops]())
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    driver = Driver(model)
    model.set_aux_layers((0, 2, 3))
    tokens = random_tokens(90, seed=3)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), output_hidden_states=True)
    spread = float(expected.logits.std())

    # Prefill in chunks that end in the middle of pages and in the middle of the kernel's blocks, then decode.
    seq, start, parts = driver.new(), 0, []
    for count in (33, 40, 1, 7, 1, 1, 7):
        parts.append(driver.extend([seq], [start], [tokens[start : start + count]], aux=True))
        start += count
    assert start == len(tokens)
    logits = torch.cat([part[0] for part in parts])
    features = torch.cat([part[1] for part in parts if part[1] is not None])
    torch.testing.assert_close(logits, expected.logits[0], rtol=1e-4, atol=1e-4 * spread)
    wanted = torch.cat([expected.hidden_states[i][0] for i in (0, 2, 3)], dim=-1)
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [(0,), (3,), (3, 0), (2, 2, 1), (1, 1, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("some", [False, True])
def test_features_of_any_layers(tmp_path: Path, layers: tuple[int, ...], some: bool) -> None:
    """In any order and named more than once, beside logits of all rows or of some; nothing else changes by them."""
    driver = Driver(build(tmp_path, "llama", ops_for()))
    tokens = random_tokens(9, seed=8)
    driver.target.set_aux_layers((0, 1, 2, 3))
    rows = torch.tensor([8, 2]) if some else None
    want, every = driver.extend([driver.new()], [0], [tokens], aux=True)
    assert every is not None
    plain, none = driver.extend([driver.new()], [0], [tokens], logit_rows=rows)
    driver.target.set_aux_layers(layers)
    got, features = driver.extend([driver.new()], [0], [tokens], aux=True, logit_rows=rows)
    assert none is None and features is not None
    assert torch.equal(got, want[rows] if some else want) and torch.equal(got, plain)
    by_layer = every.chunk(4, 1)
    assert torch.equal(features, torch.cat([by_layer[i] for i in layers], 1))


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3-tied"])
def test_host_and_torch_agree(tmp_path: Path, variant: str) -> None:
    tokens = random_tokens(50, seed=4)
    logits = []
    for ops in (torch_ops(), ops_for()):
        driver = Driver(build(tmp_path, variant, ops))
        seq = driver.new()
        logits.append(driver.extend([seq], [0], [tokens])[0])
        parents = [-1, 0, 0, 1, 1, 2, 5]
        logits.append(driver.verify([seq], [50], [parents], [random_tokens(7, seed=5)]))
    torch.testing.assert_close(logits[0], logits[2], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(logits[1], logits[3], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("variant", "page_size", "kv_dtype"),
    [
        ("llama", 1, torch.float32),
        ("llama", 4, torch.bfloat16),
        ("llama", 16, torch.float32),
        ("llama-odd-sizes", 4, torch.float32),
        ("llama-head128", 16, torch.bfloat16),
        ("qwen2", 4, torch.float32),
        ("qwen3-tied", 1, torch.bfloat16),
    ],
)
def test_a_token_has_the_same_bits_in_every_pass(
    tmp_path: Path, variant: str, page_size: int, kv_dtype: torch.dtype
) -> None:
    """Plain decoding, prefill in any chunks, any batch, and a tree's rows: bitwise equal logits on the host kernels."""
    driver = Driver(build(tmp_path, variant, ops_for(), dtype=torch.bfloat16), page_size=page_size, kv_dtype=kv_dtype)
    driver.target.set_aux_layers((1, 3))
    tokens = random_tokens(75, seed=6)
    logits, features = driver.decode_all(tokens, aux=True)
    assert features is not None

    # Chunks of two sequences side by side, of which one is a prefix of the other.
    a, b = driver.new(), driver.new()
    got_a, aux_a = driver.extend([a, b], [0, 0], [tokens[:31], tokens[:64]], aux=True)
    assert torch.equal(got_a, torch.cat((logits[:31], logits[:64])))
    assert aux_a is not None and torch.equal(aux_a, torch.cat((features[:31], features[:64])))
    got_b, _ = driver.extend([b, a], [64, 31], [tokens[64:], tokens[31:70]])
    assert torch.equal(got_b, torch.cat((logits[64:], logits[31:70])))

    # Trees over different prefixes, each node against a decode of its path.
    generator = torch.Generator().manual_seed(7)
    sizes, lens = (16, 5, 1), (70, 75, 3)
    c = driver.new()
    driver.extend([c], [0], [tokens[:3]])
    parents = [random_parents(n, generator) for n in sizes]
    rows = [random_tokens(n, seed=8 + n) for n in sizes]
    verified = driver.verify([a, b, c], list(lens), parents, rows)
    driver.pool.release([a, b, c])
    at = 0
    for length, tree, drafts in zip(lens, parents, rows, strict=True):
        for node in range(len(tree)):
            path = [drafts[n] for n in path_to(node, tree)]
            alone, _ = driver.decode_all([*tokens[:length], *path])
            assert torch.equal(verified[at + node], alone[-1]), f"node {node} of the tree at {length}"
        at += len(tree)


@pytest.mark.parametrize("ops", OPS)
def test_logit_rows_choose_and_order_rows(tmp_path: Path, ops: str) -> None:
    driver = Driver(build(tmp_path, "llama", OPS[ops]()))
    tokens = random_tokens(20, seed=9)
    a, b, c = driver.new(), driver.new(), driver.new()
    whole, _ = driver.extend([a], [0], [tokens])
    some, _ = driver.extend([b], [0], [tokens], logit_rows=torch.tensor([19, 3]))
    none, _ = driver.extend([c], [0], [tokens], logit_rows=torch.empty(0, dtype=torch.int64))
    assert none.shape == (0, 300)
    torch.testing.assert_close(some, whole[[19, 3]], rtol=1e-5, atol=1e-5)
    if ops == "host":
        assert torch.equal(some, whole[[19, 3]])
    # The KV written without logits serves later rows as well.
    after, _ = driver.extend([c], [20], [[5]])
    expected, _ = driver.extend([a], [20], [[5]])
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", OPS)
def test_empty_plan(tmp_path: Path, ops: str) -> None:
    driver = Driver(build(tmp_path, "llama", OPS[ops]()))
    logits, _ = driver.extend([], [], [])
    assert logits.shape == (0, 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_each_dtype_are_used_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    """The host's packed storage must not round what the file holds: the torch reference upcasts it to f32."""
    tokens = random_tokens(12, seed=10)
    logits = []
    for ops in (torch_ops(), ops_for()):
        driver = Driver(build(tmp_path, "qwen2", ops, dtype=dtype))
        logits.append(driver.extend([driver.new()], [0], [tokens])[0])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_half_weights_are_kept_and_give_the_bits_of_the_same_in_f32(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    """Half the memory, the same logits bit for bit: of single tokens, of chunks, of a head."""
    options = {"dtype": dtype, "tie_word_embeddings": tied}
    target = modelzoo.write_target(tmp_path / "target", **options)
    modelzoo.write_eagle3(tmp_path / "head", target, dtype=dtype, qk_norm=True, own_embedding=True)
    whole = Placement(HOST.device, HOST.activations, HOST.activations)
    tokens, found, bytes_ = random_tokens(60, seed=3), [], []
    for dense in (HostDense(), HostDense(whole)):
        model = LlamaModel.load(target, ops_for(None, dense))
        head = Eagle3Head.load(tmp_path / "head", model.ops, model)
        driver = Driver(model, head)
        seq = driver.new()
        logits, aux = driver.extend([seq], [0], [tokens], aux=True)
        assert aux is not None and torch.equal(driver.decode_all(tokens)[0], logits)
        drafted = driver.head_extend(seq, 0, [*tokens[1:], 5], aux)
        found.append([logits, aux, *drafted])
        products = [*model.products(), *head.products()]
        bytes_.append(sum(linear.nbytes for _, linear in products))  # type: ignore[attr-defined]
        names = {entry["dtype"] for entry in numerics(ops_for(dense=dense), products)["weights"].values()}
        assert names == {str(dense.placement.weights or dtype).removeprefix("torch.")}
    assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    assert 2 * bytes_[0] == bytes_[1]


@pytest.mark.parametrize("token", [-1, 300, 1 << 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_outside_the_vocabulary(tmp_path: Path, token: int, dtype: torch.dtype) -> None:
    driver = Driver(build(tmp_path, "llama", torch_ops(), dtype=dtype))
    with pytest.raises(ConfigError, match=rf"token = {token} is outside 0\.\.300"):
        driver.extend([driver.new()], [0], [[1, token, 2]])


def test_calls_that_do_not_fit_the_plan(tmp_path: Path) -> None:
    driver = Driver(build(tmp_path, "llama", torch_ops()))
    seq = driver.new()
    with driver.pool.reserve([(seq, 3)]):
        plan = driver.planner.extend([seq], [0], [3])
        with pytest.raises(ConfigError, match="3 queries"):
            driver.target.forward(torch.tensor([1, 2]), plan, driver.kv)
        with pytest.raises(ConfigError, match="set_aux_layers"):
            driver.target.forward(torch.tensor([1, 2, 3]), plan, driver.kv, aux=True)
        driver.target.set_aux_layers((0, 2))
        assert driver.target.features is not None
        with pytest.raises(ConfigError, match="memory of 2 rows; must be of 3"):
            driver.target.forward(torch.tensor([1, 2, 3]), plan, driver.kv, driver.target.features.rows(2))
        earlier = driver.target.features.rows(3)
        driver.target.set_aux_layers((0, 1))
        with pytest.raises(ConfigError, match="from this model's"):
            driver.target.forward(torch.tensor([1, 2, 3]), plan, driver.kv, earlier)
    with pytest.raises(UnsupportedModelError, match=r"0\.\.4"):
        driver.target.set_aux_layers((1, 4))
    with pytest.raises(ConfigError, match="float16"):
        driver.target.new_cache(4, 4, torch.float16)


def test_broken_model_is_refused_whole(tmp_path: Path) -> None:
    directory = modelzoo.write_target(tmp_path)
    modelzoo.edit_config(directory, intermediate_size=97)
    with pytest.raises(ModelFileError, match="97"):
        LlamaModel.load(directory, torch_ops())
    modelzoo.edit_config(directory, intermediate_size=96)
    with pytest.raises(UnsupportedModelError, match="max_context_len <= 512 works"):
        LlamaModel.load(directory, torch_ops(), max_context_len=513)
