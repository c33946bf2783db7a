"""The device that an engine runs on and why, and the facts that its bits depend on; `test_gpu_load` has the tests that
need a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo
from modelzoo import Pair
from specrs import LLM, ConfigError, CudaError, DraftMismatchError, SamplingParams, cuda_available
from specrs import _specrs as core
from specrs.models import Eagle3Config, ModelConfig
from specrs.models.cuda import placed, unavailable, why_not

no_gpu = pytest.mark.skipif(cuda_available(), reason="a GPU is there")


@no_gpu
def test_without_a_gpu_the_cpu_runs_and_says_why(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECRS_DEVICE", raising=False)
    why = unavailable()
    assert why
    with LLM(tiny.target) as llm:
        assert llm.device == f"cpu ({why})" and llm.budget is None
        assert "device='cpu'" in repr(llm)
    for asked in ("cuda", "cuda:3"):
        with pytest.raises(CudaError, match=f"device = '{asked}': ") as caught:
            LLM(tiny.target, device=asked)
        assert why in str(caught.value)


def test_the_device_is_as_asked_by_option_then_environment(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRS_DEVICE", "tpu")
    with LLM(tiny.target, device="cpu") as llm:
        assert llm.device == "cpu (asked for)"
    with pytest.raises(ConfigError, match="device = 'tpu': must be 'cpu', 'cuda' or 'cuda:N'"):
        LLM(tiny.target)
    monkeypatch.setenv("SPECRS_DEVICE", "cpu")
    with LLM(tiny.target) as llm:
        assert llm.device == "cpu (SPECRS_DEVICE = 'cpu')"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"head_dim": 32}, "head_dim = 32: attention on a GPU takes 64, 96, 128, 256"),
     ({"head_dim": 64, "intermediate_size": 100}, "a matrix of 100 rows or columns"),
     ({"head_dim": 64, "vocab_size": 301}, "a matrix of 301 rows"), ({"head_dim": 64, "hidden_size": 68}, "of 68 rows"),
     ({"head_dim": 64, "num_attention_heads": 65, "num_key_value_heads": 1}, "65 heads over 1 key heads"),
     ({"head_dim": 64, "vocab_size": 304}, None)],
)  # fmt: skip
def test_targets_and_heads_that_a_gpu_does_not_run(sizes: dict[str, int], words: str | None) -> None:
    whole = {"vocab_size": 304, **sizes}
    raw = modelzoo.target_config(**whole)
    head = {**raw, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "vocab_size": 999,
            "draft_vocab_size": whole["vocab_size"]}  # fmt: skip
    for config in (ModelConfig.from_dict(raw), Eagle3Config.from_dict(head)):
        found = why_not(config)
        assert (found is None) if words is None else (found is not None and words in found)


def test_a_head_that_does_not_fit_is_refused_before_the_targets_weights_are_read(tiny: Pair, tmp_path: Path) -> None:
    target = modelzoo.write_target(tmp_path / "target", vocab_size=10, eos_token_id=None, bos_token_id=None)
    head = modelzoo.write_eagle3(tmp_path / "draft", target, draft_vocab_size=8)
    weights = target / "model.safetensors"
    weights.write_bytes(b"never looked at")
    modelzoo.edit_config(head, target_hidden_size=128)
    with pytest.raises(DraftMismatchError, match="hidden size of features = 128"):
        LLM(target, head, device="cpu")


def test_numerics_of_the_cpu_name_the_dtype_of_every_weight(tiny: Pair) -> None:
    with LLM(tiny.target, tiny.draft, device="cpu") as llm:
        found = llm.numerics
        llm.generate([[1, 2]], SamplingParams(max_tokens=4))
        assert found == llm.numerics
    assert json.loads(json.dumps(found)) == found
    assert found["device"] == "cpu" and found["instructions"] in ("avx512", "avx2", "neon", "scalar")
    assert (found["activations"], found["logits"], found["kv_dtype"], found["attention"]) == (
        "float32", "float32", "float32", "native"
    )  # fmt: skip
    layers = [f"model.layers.{i}.{name}" for i in range(4)
              for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")]  # fmt: skip
    assert list(found["weights"]) == [*layers, "lm_head"]
    assert found["weights"]["model.layers.0.self_attn.qkv_proj"] == {"shape": [256, 64], "dtype": "float32"}
    assert found["weights"]["lm_head"] == {"shape": [10, 64], "dtype": "float32"}
    assert {"fc", "midlayer.self_attn.o_proj", "lm_head"} < found["draft"].keys()
    with LLM(tiny.target, device="cpu", attention_backend="triton") as llm:
        assert (llm.numerics["attention"], llm.numerics["draft"]) == ("triton", None)


def test_the_cpu_computes_in_float32(tiny: Pair) -> None:
    outputs = []
    for dtype in ("auto", "float32"):
        with LLM(tiny.target, device="cpu", dtype=dtype) as llm:
            outputs.append(llm.generate([[1, 2]], SamplingParams(max_tokens=8))[0].token_ids)
            assert llm.numerics["activations"] == "float32"
    assert outputs[0] == outputs[1]
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match=f"dtype = '{dtype}': the CPU computes in float32.*dtype='auto' runs"):
            LLM(tiny.target, device="cpu", dtype=dtype)
    for bad in ("int8", None, 16):
        with pytest.raises(ConfigError, match=r"dtype = .*: must be one of 'auto', 'float32', 'bfloat16', 'float16'"):
            LLM(tiny.target, dtype=bad)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_computes_in_16_bits(stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are settled before the GPU is touched."""
    monkeypatch.setattr("specrs.models.cuda.unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(core, "_device_attention_workspace", None)
    target = modelzoo.write_target(tmp_path / "target", dtype=stored, head_dim=64, vocab_size=304)
    sizes = ModelConfig.from_directory(target)
    own = torch.bfloat16 if stored is torch.float32 else stored
    for dtype, want in (("auto", own), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        place = placed("cuda:0", target, sizes, None, dtype)  # type: ignore[arg-type]
        assert (place.activations, place.weights, place.logits) == (want, want, torch.float32)
    with pytest.raises(ConfigError, match="dtype = 'float32': 'cuda:0' computes in bfloat16 or float16; device='cpu'"):
        placed("cuda:0", target, sizes, None, "float32")

    def small(*_: Any, **sizes: Any) -> int:
        raise ConfigError("shared memory of a block = 101376 bytes: attention needs 140224")

    monkeypatch.setattr(core, "_device_attention_workspace", small)
    large = modelzoo.write_target(tmp_path / "large", dtype=stored, head_dim=256, vocab_size=304)
    with pytest.raises(ConfigError, match=r"head_dim = 256: shared memory of a block = 101376 .*; device='cpu' runs"):
        placed("cuda:0", large, ModelConfig.from_directory(large))
