"""The device memory of an engine, by numbers: what it counts, the pool that nobody sized, and what would fit."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from specrs import ConfigError, DeviceMemoryError
from specrs import _specrs as core
from specrs.backends import FlashAttentionCuda, FlashInferCuda, NativeCuda, TritonCuda
from specrs.backends.base import Phase
from specrs.backends.splits import SPLITS, num_splits
from specrs.engine.config import EngineConfig
from specrs.engine.devices.memory import format_arrays
from specrs.engine.devices.memory_plan import Engine, Head, attention_bytes, engine_sizes, planned
from specrs.models import HOST, Eagle3Config, ModelConfig, Placement
from specrs.models.cuda import _Memory
from specrs.models.cuda_attention import EngineSizes, FlashAttentionKernels, FlashInferKernels, split_bytes
from specrs.models.layer import Workspace

GIB = 1 << 30
PHASES: tuple[Phase, ...] = ("extend", "decode", "draft", "verify")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
HEAD_SHAPES = {"fc.weight": (4096, 3 * 4096), "lm_head.weight": (32000, 4096), "rest": (4096, 90000)}
PLACE = Placement(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16, torch.float32)
TARGET_BYTES = 2 * 8_030_261_248  # the published number of parameters
PAGE = 16 * (32 + 1) * 2 * 8 * 128 * 2


def engine(head: bool = True, layers: int = 32, **options: Any) -> tuple[Engine, int | None]:
    """An 8B Llama with an EAGLE-3 head, and the pages that its options name."""
    target = ModelConfig.from_dict({**LLAMA_8B, "num_hidden_layers": layers})
    draft = {**LLAMA_8B, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    config = EngineConfig(tree=(8, 6, 64), kv_dtype="bfloat16", attention_backend=NativeCuda(), device="cuda:0",
                          draft_layout="dense", **options)  # fmt: skip
    resolved, geometry = config.resolve(config.max_context_len or 8192)
    heads = Head(Eagle3Config.from_dict(draft), HEAD_SHAPES) if head else None
    return Engine(target, heads, resolved, geometry, PLACE, lambda *sizes: 1 << 20), config.num_pages


def test_weights_and_pages_are_exact() -> None:
    budget = planned(*engine(max_context_len=8192), 140 * GIB)[1]
    lines = dict(budget.lines)
    assert lines["weights of the target"] == TARGET_BYTES
    twice = 2 * 1024 * 2 * 4096  # keys' and values' rows of the head
    assert lines["weights of the draft head"] == 2 * (4096 * (3 * 4096 + 32000 + 90000) + twice)
    assert budget.page_bytes == PAGE
    assert lines["the page that padding writes to"] == PAGE
    assert lines["rotary tables"] == 2 * 2 * (8192 + 256) * 64 * 4
    assert budget.bytes == sum(lines.values()) + budget.pages * PAGE
    plain = dict(planned(*engine(head=False, max_context_len=8192), 140 * GIB)[1].lines)
    assert not {"weights of the draft head", "features"} & plain.keys()
    assert plain["weights of the target"] == TARGET_BYTES
    assert plain["logits"] < lines["logits"]


def test_what_families_take_beside_llama_is_counted() -> None:
    """Rotary tables of two kinds, norms in float32, and memory that a layer's norms and gates want."""

    def lines(architecture: str, **changes: object) -> dict[str, int]:
        raw = {**LLAMA_8B, "architectures": [architecture], "max_position_embeddings": 8192, **changes}
        target = ModelConfig.from_dict(raw)
        config = EngineConfig(tree=(8, 6, 64), kv_dtype="bfloat16", attention_backend=NativeCuda(), device="cuda:0",
                              draft_layout="dense", max_context_len=8192)  # fmt: skip
        resolved, geometry = config.resolve(8192)
        plan = Engine(target, None, resolved, geometry, PLACE, lambda *sizes: 1 << 20)
        return dict(planned(plan, None, 140 * GIB)[1].lines)

    llama = lines("LlamaForCausalLM")
    gemma: dict[str, object] = {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    gemma |= {"query_pre_attn_scalar": 128, "sliding_window": 8192, "rope_local_base_freq": 1e4}
    wide = lines("Gemma3ForCausalLM", **gemma)
    assert wide["rotary tables"] == 2 * llama["rotary tables"]
    norms = 32 * (4 * 4096 + 2 * 128) + 4096
    added = 2 * 32 * (2 * 4096 + 2 * 128)  # two more norms of the stream in each layer, and those of heads
    assert wide["weights of the target"] == llama["weights of the target"] + added + 2 * norms
    rows = (wide["activations"] - llama["activations"]) // (2 * 2 * (2 * 4096 + 2 * 14336))
    assert rows >= 512, "two memories of the stream and both halves of the gate, for all rows and for those wanted"
    olmo = lines("Olmo2ForCausalLM", model_type="olmo2")
    assert olmo["activations"] > llama["activations"] + 2 * 512 * 2 * (2 * 4096 + 3 * 1024)
    assert olmo["rotary tables"] == llama["rotary tables"]


def test_a_pool_that_nobody_sized_is_a_full_load_or_nine_tenths_of_what_is_left() -> None:
    small, asked = engine(max_batch=2, max_context_len=4096)
    config, budget = planned(small, asked, 140 * GIB)
    assert budget.pages == config.num_pages == small.geometry.pages_for_full_load
    large, asked = engine(max_batch=64, max_context_len=131072)
    config, budget = planned(large, asked, 140 * GIB)
    assert config.num_pages == budget.pages < large.geometry.pages_for_full_load
    left = 140 * GIB - budget.fixed
    assert 0.9 * left - PAGE < budget.pages * PAGE <= 0.9 * left
    # With less memory there is room for at least one request of full context, though it takes more than nine tenths.
    least = large.geometry.row_pages * PAGE
    tight = budget.fixed + int(least / 0.95)
    assert planned(large, None, tight)[1].pages == large.geometry.row_pages
    with pytest.raises(DeviceMemoryError):
        planned(large, None, budget.fixed + least - 1)


def test_a_pool_that_does_not_fit_says_how_many_pages_would() -> None:
    have, wanted = 40 * GIB, engine(max_batch=4, max_context_len=8192, num_pages=100_000)
    with pytest.raises(DeviceMemoryError) as caught:
        planned(*wanted, have)
    error = caught.value
    assert (error.have, error.device) == (have, 0) and error.need > have
    found = re.search(r"num_pages = (\d+) fits, 100000 was asked for", str(error))
    assert found is not None and "num_pages=None" in str(error) and "weights of the target" in error.hint
    most = int(found[1])
    assert planned(wanted[0], most, have)[0].num_pages == most
    with pytest.raises(DeviceMemoryError):
        planned(wanted[0], most + 1, have)


@pytest.mark.parametrize("have", [19, 21, 24, 30])
def test_the_numbers_that_are_told_fit_and_more_do_not(have: int) -> None:
    wanted, _ = engine(max_batch=256, max_context_len=131072)
    with pytest.raises(DeviceMemoryError) as caught:
        planned(wanted, None, have * GIB)
    hint = caught.value.hint
    told = hint[hint.index("would fit") :]
    both = re.search(r"max_batch = 1 with max_context_len = (\d+)", told)
    if both is not None:
        pairs = [(1, int(both[1]), 1, int(both[1]) + 1)]
    else:
        pairs = [(n, 131072, n + 1, 131072) for n in map(int, re.findall(r"max_batch = (\d+)", told))]
        pairs += [(256, n, 256, n + 1) for n in map(int, re.findall(r"max_context_len = (\d+)", told))]
    assert pairs, hint
    for batch, context, more_batch, more_context in pairs:
        assert planned(wanted.at(batch, context), None, have * GIB)
        with pytest.raises((DeviceMemoryError, ConfigError)):
            planned(wanted.at(more_batch, more_context), None, have * GIB)


def test_a_model_that_no_number_helps_is_told_so() -> None:
    with pytest.raises(DeviceMemoryError, match="no smaller max_batch or max_context_len would fit"):
        planned(*engine(max_context_len=4096), TARGET_BYTES)


def test_what_loading_takes_on_top_must_fit_too() -> None:
    """The target's own head is compared first, and wants much more than passes of one row."""
    wanted, _ = engine(head=False, layers=1, max_batch=1, max_context_len=64, prefill_chunk=1)
    steady = sum(n for _, n in wanted.fixed()) + wanted.geometry.row_pages * wanted.page_bytes
    loading = sum(n for _, n in wanted.loading())
    assert loading > steady, "else this shows nothing"
    with pytest.raises(DeviceMemoryError, match="products that are compared"):
        planned(wanted, None, steady)
    assert planned(wanted, None, loading)


def test_the_table_has_every_line_the_sum_and_what_was_free() -> None:
    budget = planned(*engine(max_context_len=8192), 140 * GIB)[1]
    text = str(budget).splitlines()
    assert len(text) == len(budget.lines) + 3
    assert f"{TARGET_BYTES}" in text[0] and text[0].endswith("weights of the target")
    assert text[-2].split()[0] == str(budget.bytes) and text[-2].endswith("in all")
    assert text[-1].split()[0] == str(140 * GIB) and text[-1].endswith("were free on cuda:0")


def test_every_option_that_takes_memory_counts() -> None:
    base, _ = engine(max_batch=4, max_context_len=8192)
    bytes_of = sum(n for _, n in base.fixed())
    for other in (
        engine(max_batch=8, max_context_len=8192)[0],
        engine(max_batch=4, max_context_len=16384)[0],
        engine(max_batch=4, max_context_len=8192, prefill_chunk=4096)[0],
        engine(max_batch=4, max_context_len=8192, page_size=64)[0],
        replace(base, attention=lambda *sizes: 1 << 30),
    ):
        assert sum(n for _, n in other.fixed()) > bytes_of


def attention(requests: int, queries: int, kv_heads: int, group: int, head_dim: int, keys: int) -> int:
    """`tiling` of src/device/kernels/attention_tiling.rs, on a small GPU: more requests leave room for fewer blocks."""
    rows = next((rows for rows in (16, 32, 64) if rows >= queries * group), 128)
    splits, tiles = -(-keys // 256) + 1, requests * kv_heads * -(-queries * group // rows)
    resident = 2 if rows * head_dim + 8 * requests < 64 * head_dim + 90 else 1
    grid = max(min(7 * resident, tiles * splits), 1)
    return 256 + max(grid, min(tiles, 2 * grid) * splits) * min(queries * group, rows) * (head_dim * 4 + 8)


@pytest.mark.parametrize("heads", [8, 24, 40, 32])
@pytest.mark.parametrize("drafts", [False, True])
def test_attention_of_every_pass_has_room(heads: int, drafts: bool) -> None:
    """Of any number of requests, with any number of queries, over any number of keys."""
    base, _ = engine(max_batch=20, max_context_len=2048, prefill_chunk=70)
    layers = [replace(base.target, num_heads=heads), base.target]
    most = attention_bytes(base.config, base.geometry, layers, drafts, attention)
    needs = [
        attention(requests, queries, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim, keys)
        for layer in layers
        for requests in range(1, 21)
        for queries in range(1, 71)
        for keys in (16, 512, base.geometry.row_pages * base.config.page_size)
    ]
    assert max(needs) == most


def test_reserved_scratch_memory_never_moves() -> None:
    """Captured graphs have its address."""
    work, memory = Workspace(HOST, x=4), _Memory(torch.device("cpu"))
    work.rows(20)
    work.reserve(33)
    assert work.rows(48)["x"].data_ptr() == work.rows(1)["x"].data_ptr()
    with pytest.raises(RuntimeError, match="a pass of 49 rows: memory is reserved for 48"):
        work.rows(49)
    memory("q", torch.float32, 2, 3)
    memory.reserve("q", torch.float32, 10)
    assert memory("q", torch.float32, 10).data_ptr() == memory("q", torch.float32, 2, 3).data_ptr()
    with pytest.raises(RuntimeError, match="scratch memory 'q' for 12 elements: 10 are reserved"):
        memory("q", torch.float32, 3, 4)
    memory("other", torch.float32, 3, 4)
    memory("other", torch.float32, 300, 4)


@pytest.mark.parametrize("head", [False, True])
def test_a_formats_arrays_are_stated(head: bool) -> None:
    """They are those of the largest pass: K lists of a request in a draft step, masks of V rows to verify."""
    batch, context, k, v = 4, 2048, 8, 64
    plan, pages = engine(head=head, max_batch=batch, max_context_len=context)
    native = dict(planned(plan, pages, 140 * GIB)[1].lines)
    assert not [line for line in native if "format" in line]
    config = replace(plan.config, attention_backend=TritonCuda())
    found = format_arrays(config, plan.geometry, head)
    sizes = {name: size for name, _, [size] in found}
    assert sizes["kv_indptr"] == (batch * k + 1 if head else batch + 1)
    lists = batch * context * (k if head else 1)
    assert lists <= sizes["kv_indices"] < 1.01 * lists + 1000
    assert ("custom_mask" in sizes) is (head or bool(config.sources))
    if "custom_mask" in sizes:
        assert batch * v * context <= sizes["custom_mask"] <= batch * v * (context + v)
    lines = dict(planned(replace(plan, config=config), pages, 140 * GIB)[1].lines)
    uploaded = 2 * 8 * lists  # of a pass that the host plans, and of the one before
    assert lines.pop("arrays of the format 'triton'") == core._DeviceArena.count(found) + uploaded
    assert lines == native


@pytest.mark.parametrize("backend", [FlashInferCuda(), FlashAttentionCuda()], ids=lambda backend: backend.name)
def test_arrays_and_memory_of_the_real_kernels_are_stated(backend: Any) -> None:
    """Every array is as large as any phase may want it, in the form that the kernels read."""
    plan, _ = engine(max_context_len=4096, max_batch=4)
    config = replace(plan.config, attention_backend=backend)
    found = {name: shape[0] for name, _, shape in format_arrays(config, plan.geometry, head=True)}
    pool = core.Pool(2, plan.geometry.page_size, 1, plan.geometry.row_pages)
    planner = core.Planner(plan.geometry, pool, backend.format, mask=backend.mask)
    for phase in PHASES:
        for name, array in planner.capacities(phase).items():
            assert found[name] >= math.prod(array["shape"]), (phase, name)
    assert "custom_mask" not in found
    lines = dict(replace(plan, config=config).fixed())
    assert lines["what kernels of attention allocate"] > 64 << 20
    assert f"arrays of the format {backend.format!r}" in lines
    assert "what kernels of attention allocate" not in dict(plan.fixed())


@pytest.mark.parametrize(("heads", "dim"), [(32, 128), (64, 128), (4, 64), (96, 256)])
def test_parts_of_the_keys_are_as_many_as_their_results_have_room_for(heads: int, dim: int) -> None:
    """FlashAttention's operator allocates a result in float32 and a sum of weights of each row for every part."""
    for rows in (1, 8, 31, 32, 64, 512, 4095, 4096, 65536):
        parts, each = num_splits(rows, heads, dim), rows * heads * (dim + 1) * 4
        most = parts or 128  # 0: the operator's own choice, 128 at most
        assert 1 <= most <= 128 and (most == 1 or most * each <= SPLITS)
        assert parts == 0 or (parts + 1) * each > SPLITS, "no fewer than have room"
    assert num_splits(4096, 32, 128) == 1, "64 requests with trees of 64 nodes"


def test_memory_of_the_real_kernels_follows_from_the_largest_passes() -> None:
    plan, _ = engine(max_context_len=4096, max_batch=64, prefill_chunk=2048)
    layers = [layer for layer, _ in plan.layers]
    sizes = engine_sizes(plan.config, plan.geometry, layers, rows=4096)
    assert (sizes.requests, sizes.lists, sizes.spread) == (64, 64 * 8, 64 * 64)
    most = 4096 * (2 * 32 * 128 + 2 * 4 * 32)
    assert FlashAttentionKernels.allocates(sizes) == most + SPLITS
    spread = 2 * 2 * sizes.spread * 32 * 128
    splits = sum(split_bytes(sizes, layer) for layer in layers)
    assert spread + splits < FlashInferKernels.allocates(sizes) < spread + splits + (65 << 20)


@pytest.mark.parametrize("kv_heads", [8, 32])
def test_results_over_parts_of_the_keys_have_room_in_any_plan_of_flashinfers(kv_heads: int) -> None:
    """``PrefillSplitQOKVIndptr`` of its ``scheduler.cuh``, for buffers of fixed sizes, on a GPU of 132 processors."""
    plan, _ = engine()
    layer = replace(plan.target, num_kv_heads=kv_heads)
    group, sizes = 32 // kv_heads, EngineSizes(rows=600, requests=8, lists=64, spread=0, layers=[])
    found, passes = [], [(rows, n) for n in range(1, 9) for rows in range(n, 601, 7)]
    for rows, lists in [*passes, (600, 8), (64, 64)]:
        packed = (rows - lists + 1) * group
        tile = 128 if packed > 64 else 64 if packed > 16 else 16
        tiles = max(2 * 132 // kv_heads, -(-rows * group // tile) + lists - 1)
        found.append(32 * -(-tiles * tile // group) * (128 + 1) * 4)
    assert max(found) <= split_bytes(sizes, layer) < 2 * max(found)
