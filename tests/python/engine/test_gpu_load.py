"""An engine comes to a GPU: chosen, counted, loaded, refused. And what its bits depend on."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo
from modelzoo import Pair
from seen_runs import seen
from specrs import LLM, ConfigError, DeviceMemoryError, ModelFileError, SamplingParams, device
from specrs import _specrs as core
from specrs.backends import MissingPackageError

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

CUDA = torch.device("cuda", torch.cuda.current_device())
MIB = 1 << 20
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("load")
    target = modelzoo.write_target(
        root / "target", "Qwen2ForCausalLM", head_dim=64, vocab_size=256, dtype=torch.bfloat16, shards=3
    )
    draft = modelzoo.write_eagle3(root / "draft", target, head_dim=64, draft_vocab_size=128, dtype=torch.bfloat16)
    return Pair(target, draft)


@pytest.fixture(autouse=True)
def nobody_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECRS_DEVICE", raising=False)


def mine() -> int:
    """Bytes of the GPU that this process has; other tests may run beside."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    core._device_collect(CUDA.index)
    return torch.cuda.memory_reserved(CUDA) + core._device_memory(CUDA.index)[3]


@pytest.fixture
def small_gpu() -> Iterator[Callable[[int], None]]:
    """Leaves so many bytes of the GPU to torch, which refuses more."""
    total = torch.cuda.get_device_properties(CUDA).total_memory

    def leave(count: int) -> None:
        mine()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated(CUDA) + count) / total, CUDA)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


# -- the device -------------------------------------------------------------------------------------------------------


def test_a_gpu_is_taken_where_nobody_says_otherwise(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"cuda:{CUDA.index} ({torch.cuda.get_device_name(CUDA)})"
    with LLM(pair.target) as llm:
        assert (
            llm.device == name
            and llm.config.device == f"cuda:{CUDA.index}"
            and f"device='cuda:{CUDA.index}'" in repr(llm)
        )
    with LLM(pair.target, device="cpu") as llm:
        assert llm.device == "cpu (asked for)" and llm.budget is None
    monkeypatch.setenv("SPECRS_DEVICE", "cpu")
    with LLM(pair.target) as llm:
        assert llm.device == "cpu (SPECRS_DEVICE = 'cpu')"
    monkeypatch.setenv("SPECRS_DEVICE", "cuda")
    with LLM(pair.target) as llm:
        assert llm.device == name


def test_what_the_gpu_does_not_run_runs_on_the_cpu_with_a_warning(tmp_path: Path, pair: Pair) -> None:
    odd = modelzoo.write_target(tmp_path / "odd")
    with pytest.warns(RuntimeWarning, match="not the GPU: head_dim = 32: attention on a GPU takes 64, 96, 128, 256$"):
        llm = LLM(odd)
    assert llm.device == "cpu (not the GPU: head_dim = 32: attention on a GPU takes 64, 96, 128, 256)"
    assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 24
    with pytest.warns(RuntimeWarning, match="tree = "):
        assert LLM(pair.target, pair.draft, tree=(4, 8, 32)).device.startswith("cpu (not the GPU: tree = (4, 8, 32)")
    with warnings.catch_warnings():  # an option that the CPU alone has says what is meant
        warnings.simplefilter("error")
        assert LLM(pair.target, kv_dtype="float32").device.startswith("cpu (not the GPU: ")
    with pytest.raises(ConfigError, match="num_pages = 0"):  # wrong on both
        LLM(pair.target, num_pages=0)


def test_what_the_gpu_does_not_hold_runs_on_the_cpu_with_a_warning(
    pair: Pair, small_gpu: Callable[[int], None]
) -> None:
    small_gpu(256 * MIB)
    before = mine()
    with pytest.raises(DeviceMemoryError) as caught:
        LLM(pair.target, pair.draft, device="cuda")
    assert caught.value.need > caught.value.have and "weights of the target" in caught.value.hint
    with pytest.warns(RuntimeWarning, match="not the GPU: .*weights of the target"):
        llm = LLM(pair.target, pair.draft)
    assert re.fullmatch(r"cpu \(not the GPU: \d+ bytes are needed on cuda:0, \d+ are free\)", llm.device)
    assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 24
    assert mine() - before <= MIB, "nothing was allocated"


# -- the budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "options"), [
    ("tiny", {"max_batch": 8, "tree": (8, 6, 64), "prefill_chunk": 2048, "max_context_len": 500}),
    ("tiny", {"max_batch": 5, "tree": (1, 5, 6), "page_size": 1, "graphs": "off"}),
    ("tiny", {"max_batch": 16, "tree": (4, 3, 16), "page_size": 64}),
    ("package", {"max_context_len": 500}),
    *(
        ("tiny", {"attention_backend": name, **options})
        for name in ("flashinfer", "flash_attention", "triton")
        for options in (
            {"max_batch": 8, "tree": (8, 6, 64), "prefill_chunk": 2048, "max_context_len": 500},
            {"max_batch": 16, "tree": (4, 3, 16), "page_size": 64, "draft_layout": "holey"},
        )
    ),
])  # fmt: skip
def test_an_engine_at_its_limits_stays_within_its_budget(
    pair: Pair, model: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    models = (pair.target, pair.draft) if model == "tiny" else (None, None)
    before = mine()
    torch.cuda.reset_peak_memory_stats(CUDA)
    caplog.set_level("INFO", "specrs")
    try:
        llm = LLM(*models, device="cuda", **options)
    except MissingPackageError as error:
        pytest.skip(str(error))
    with llm:
        assert str(llm.budget) in caplog.text
        for seed in (None, 1):
            params = SamplingParams(max_tokens=40, temperature=0.0 if seed is None else 0.8, seed=seed, ignore_eos=True)
            prompts = [[(3 + i * j) % 200 for j in range(440)] for i in range(2 * llm.config.max_batch)]
            llm.generate(prompts, params)
        budget = llm.budget
        # Memory that torch keeps without use is the engine's too.
        used = torch.cuda.max_memory_reserved(CUDA) + core._device_memory(CUDA.index)[3] - before
    assert budget is not None
    print(f"{model} {options}: {used / MIB:.1f} MiB used of {budget.bytes / MIB:.1f}\n{budget}")
    assert budget.pages * budget.page_bytes < used <= budget.bytes
    if backend := options.get("attention_backend"):
        tree, layout = options["tree"], options.get("draft_layout", "dense")
        seen("budget", backend=backend, tree=tree, draft_layout=layout, used=used, counted=budget.bytes)


def test_the_pool_by_default_is_a_full_load_or_most_of_what_is_free(
    pair: Pair, small_gpu: Callable[[int], None]
) -> None:
    options = {"device": "cuda", "max_batch": 64, "max_context_len": 512}
    with LLM(pair.target, pair.draft, **options) as llm:
        full, budget = llm._runner.geometry.pages_for_full_load, llm.budget
        assert budget is not None and llm.config.num_pages == budget.pages == full
    half = budget.fixed + full * budget.page_bytes // 2
    small_gpu(half)
    with LLM(pair.target, pair.draft, **options) as llm:
        budget = llm.budget
        assert budget is not None and llm.config.num_pages == budget.pages
        assert abs(budget.have - half) <= 4 * MIB
        assert budget.pages == int((budget.have - budget.fixed) * 0.9) // budget.page_bytes < full
        assert len(llm.generate([[1, 2]] * 4, GREEDY)) == 4


def test_the_numbers_that_an_error_tells_work(pair: Pair, small_gpu: Callable[[int], None]) -> None:
    with pytest.raises(DeviceMemoryError, match=r"num_pages = (\d+) fits, 2000000000 was asked for") as caught:
        LLM(pair.target, device="cuda", num_pages=2_000_000_000)
    most = re.search(r"num_pages = (\d+) fits", str(caught.value))
    assert most is not None
    options: dict[str, Any] = {"device": "cuda", "tree": (8, 6, 64), "max_context_len": 512}
    with LLM(pair.target, pair.draft, max_batch=64, **options) as llm:
        budget, pages = llm.budget, llm._runner.geometry.row_pages
    assert budget is not None
    small_gpu(budget.fixed + pages * budget.page_bytes + 8 * MIB)
    with pytest.raises(DeviceMemoryError, match="would fit") as caught:
        LLM(pair.target, pair.draft, max_batch=512, **options)
    told = re.search(r"max_batch = (\d+)", caught.value.hint)
    assert told is not None and 64 <= int(told[1]) < 512, caught.value.hint
    with LLM(pair.target, pair.draft, max_batch=int(told[1]), **options) as llm:
        assert len(llm.generate([[1, 2]] * 4, GREEDY)) == 4


# -- weights ----------------------------------------------------------------------------------------------------------


def copied(source: Path, to: Path) -> dict[str, torch.Tensor]:
    to.mkdir()
    (to / "config.json").write_bytes((source / "config.json").read_bytes())
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= modelzoo.load_file(file)
    return weights


@pytest.mark.parametrize(("name", "value"), [
    ("model.embed_tokens.weight", "nan"), ("model.norm.weight", "inf"), ("lm_head.weight", "nan"),
    ("model.layers.3.self_attn.k_proj.weight", "-inf"), ("model.layers.0.self_attn.v_proj.bias", "nan"),
    ("model.layers.2.mlp.up_proj.weight", "nan"),
])  # fmt: skip
def test_a_weight_that_is_not_finite_is_refused_by_name(pair: Pair, tmp_path: Path, name: str, value: str) -> None:
    weights = copied(pair.target, tmp_path / "target")
    weights[name].view(-1)[-1] = float(value)
    modelzoo.write_weights(tmp_path / "target", weights, shards=2)
    before = mine()
    with pytest.raises(ModelFileError, match=f"tensor {re.escape(name)}: 1 of .* are NaN or infinite") as caught:
        LLM(tmp_path / "target", device="cuda")
    assert caught.value.tensor == name and caught.value.path.name.startswith("model-0000")
    del caught
    assert mine() - before <= 4 * MIB
    assert LLM(tmp_path / "target", device="cpu")


def test_a_head_that_is_not_finite_or_not_of_a_gpus_sizes_is_refused(pair: Pair, tmp_path: Path) -> None:
    weights = copied(pair.draft, tmp_path / "draft")
    weights["fc.weight"][0, 0] = float("nan")
    modelzoo.write_weights(tmp_path / "draft", weights)
    with pytest.raises(ModelFileError, match=r"tensor fc\.weight: 1 of"):
        LLM(pair.target, tmp_path / "draft", device="cuda")
    for i, (sizes, words) in enumerate([
        ({"head_dim": 32}, "the draft head: head_dim = 32"),
        ({"intermediate_size": 92}, "the draft head: a matrix of 92"),
    ]):  # fmt: skip
        odd = modelzoo.write_eagle3(tmp_path / f"odd{i}", pair.target, **{"head_dim": 64, **sizes})
        before = mine()
        with pytest.raises(ConfigError, match=words):
            LLM(pair.target, odd, device="cuda")
        assert mine() - before <= MIB, "before anything is loaded"


LOAD = """
import gc, sys
from specrs import LLM, SamplingParams
def memory(what):
    [line] = [line for line in open("/proc/self/status") if line.startswith(what)]
    return int(line.split()[1]) << 10
def run():
    with LLM(sys.argv[1], device="cuda", max_batch=1, max_context_len=128) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
run()  # libraries load kernels of their own
gc.collect()
try:
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
except OSError:
    sys.exit("no reset")
before = memory("VmRSS")
run()
print("grew", (memory("VmHWM") - before) >> 20)
"""


def test_the_hosts_peak_is_near_a_tensor_not_the_model(tmp_path: Path) -> None:
    """The checkpoint has one file; `test_loader` has several, and the host."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "vocab_size": 16384,
             "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
    modelzoo.write_json(tmp_path / "config.json", modelzoo.target_config(**sizes))
    shapes = modelzoo.LlamaModel.shapes(modelzoo.ModelConfig.from_directory(tmp_path))
    weights = {n: torch.full(s, 0.01, dtype=torch.bfloat16) for n, s in shapes.items()}
    whole = sum(w.nbytes for w in weights.values()) >> 20
    modelzoo.write_weights(tmp_path, weights)
    del weights
    ran = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=False)
    if "no reset" in ran.stderr:
        pytest.skip("this kernel does not reset a process's peak")
    assert ran.returncode == 0, ran.stderr
    grew = int(ran.stdout.split()[-1])
    print(f"{whole} MiB in all: the host's peak grew by {grew} MiB")
    assert whole > 1300 and grew < 500


# -- bits -------------------------------------------------------------------------------------------------------------


def test_numerics_name_device_library_and_the_class_of_every_weight(pair: Pair) -> None:
    with LLM(pair.target, pair.draft, device="cuda") as llm, LLM(pair.target, device="cuda", max_batch=2) as other:
        found = llm.numerics
        assert json.loads(json.dumps(found)) == found
        assert other.numerics == {**found, "draft": None}
    assert found["device"] == torch.cuda.get_device_name(CUDA)
    assert found["capability"] == "{}.{}".format(*torch.cuda.get_device_capability(CUDA))
    assert found["cublaslt"] >= 120000 and "cublasLt" in found["cublaslt_path"] and found["driver_cuda"] >= 12000
    assert found["attention_rule"] >= 1
    assert (found["activations"], found["logits"], found["kv_dtype"]) == ("bfloat16", "float32", "bfloat16")
    layers = [f"model.layers.{i}.{name}" for i in range(4)
              for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")]  # fmt: skip
    assert list(found["weights"]) == [*layers, "lm_head"]
    known = {w["fingerprint"] for w in json.loads(device.products(CUDA).numerics())["weights"]}
    for entry in (*found["weights"].values(), *found["draft"].values()):
        assert entry["split"] >= 1 and entry["fingerprint"] in known


def test_numerics_say_that_a_bench_left_the_contract(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = device.products
    with LLM(pair.target, device="cuda") as llm:
        exact = llm.numerics
    monkeypatch.setattr(device, "products", lambda *args: opened(*args).without_contract())
    with LLM(pair.target, pair.draft, device="cuda") as llm:
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == GREEDY.max_tokens
        found = llm.numerics
    assert "products" not in exact and "NOT exact" in found.pop("products")
    assert {w["fingerprint"] for w in found["weights"].values()} == {"0x0000000000000000"}
    assert {k: v for k, v in found.items() if k not in ("weights", "draft")} == {
        k: v for k, v in exact.items() if k not in ("weights", "draft")
    }
    monkeypatch.setattr(device, "products", opened)
    with LLM(pair.target, device="cuda") as llm:
        assert llm.numerics == exact
