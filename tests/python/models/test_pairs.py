"""Any device's operations go with any attention: pairs are composed, and each part is asked for its own work alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo
from modelrun import Driver, random_tokens
from modelzoo import Pair
from specrs import LLM, ConfigError, SamplingParams
from specrs.backends import BACKENDS, Native, PlanAttention
from specrs.engine.devices import placing
from specrs.models import (
    HOST,
    Dense,
    Eagle3Head,
    Embedding,
    Heads,
    HostDense,
    Linear,
    LlamaModel,
    Ops,
    Placement,
    ReadAttention,
    TorchAttention,
    TorchDense,
    ops_for,
    torch_ops,
)  # fmt: skip
from specrs.models.features import FeatureMemory
from specrs.models.layer import Workspace

PACKAGE = Path(__file__).parents[3] / "python/specrs"


class Foreign:
    """Another device: float64 inside, weights transposed, rotary tables as complex numbers. Counts what it is asked."""

    placement = HOST

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False, scores: bool = False
    ) -> Linear:
        return ForeignLinear(self, weight, bias, gated)

    def embedding(self, table: torch.Tensor) -> Embedding:
        return ForeignTable(table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self.asked["rms_norm"] += 1
        out.copy_(normed(x, weight, eps))

    def gather(self, x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, shift: int = 0) -> None:
        self.asked["gather"] += 1
        out.copy_(x[rows + shift])

    def concat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.hstack(tuple(parts))

    def host(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def kv_move(self, kv: Any, moves: Any) -> None:
        for src, dst in zip(*(torch.from_dlpack(a).tolist() for a in (moves.src, moves.dst)), strict=True):
            kv.tensor[:, :, dst] = kv.tensor[:, :, src].clone()

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return torch.complex(cos, sin)

    def rope_write(self, kv: Any, layer: int, plan: Any, qkv: torch.Tensor, rope: Any, heads: Heads) -> torch.Tensor:
        self.asked["rope_write"] += 1
        kv_heads, dim = kv.tensor.shape[3:]
        rows = qkv.view(qkv.shape[0], -1, dim)
        turned = [rows[:, : heads.count], rows[:, heads.count : heads.count + kv_heads]]
        angles = rope[torch.from_dlpack(plan.positions).long()][:, None]
        for i, norm in enumerate((heads.q_norm, heads.k_norm)):
            part = turned[i] if norm is None else normed(turned[i], norm, heads.eps)
            pair = torch.complex(*(half.float().contiguous() for half in part.chunk(2, -1))) * angles
            turned[i] = torch.cat((pair.real, pair.imag), -1)
        slots = torch.from_dlpack(plan.out_slots).long()
        kv.tensor[layer, :, slots] = torch.stack((turned[1], rows[:, heads.count + kv_heads :])).to(kv.tensor.dtype)
        return turned[0]


class ForeignLinear:
    def __init__(self, device: Foreign, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> None:
        self.device, self.weight, self.gated = device, weight.double().T.contiguous(), gated
        self.bias = None if bias is None else bias.double()
        self.in_features, self.out_features = self.weight.shape

    def forward(self, x: Any, out: Any, residual: Any = None, norm: Any = None, eps: float = 0.0) -> None:
        y = self.product(x, norm, eps)
        out.copy_(y if residual is None else y + residual)

    def forward_swiglu(self, x: Any, out: Any, norm: Any, eps: float) -> None:
        assert self.gated
        gate, up = self.product(x, norm, eps).chunk(2, -1)
        out.copy_(gate * up * torch.sigmoid(gate))

    def product(self, x: Any, norm: Any, eps: float) -> torch.Tensor:
        self.device.asked["linear"] += 1
        y = (x.double() if norm is None else normed(x, norm, eps)) @ self.weight
        return y if self.bias is None else y + self.bias


class ForeignTable:
    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def lookup(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self.table[tokens.long()])


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


DENSE: dict[str, Callable[[], Dense]] = {"host": HostDense, "torch": TorchDense, "foreign": Foreign}
ATTENTION: dict[str, Callable[[Dense], Ops]] = {
    **{name: lambda dense, backend=backend: ops_for(backend(), dense) for name, backend in BACKENDS.items()},
    "native, which only reads": lambda dense: Ops(dense, ReadAttention(dense, PlanAttention(Native()))),
    "torch": lambda dense: Ops(dense, ReadAttention(dense, TorchAttention())),
}


def through(directory: Path, head: Path, ops: Ops) -> list[torch.Tensor]:
    """Logits of a prompt in two chunks, of a decoded token, of a tree, and of the head's extend, write and step."""
    target = LlamaModel.load(directory, ops)
    driver = Driver(target, Eagle3Head.load(head, ops, target))
    seq, tokens = driver.new(), random_tokens(40, 1)
    some, aux = driver.extend([seq], [0], [tokens[:30]], aux=True, logit_rows=torch.tensor([29, 4]))
    more, _ = driver.extend([seq], [30], [tokens[30:]])
    one, _ = driver.extend([seq], [40], [[7]])
    tree = driver.verify([seq], [41], [[-1, 0, 0, 1, 2, 4]], [random_tokens(6, 2)])
    assert aux is not None and driver.head is not None and driver.draft_kv is not None
    driver.head_write(seq, 0, tokens[1:21], aux[:20])
    logits, hidden = driver.head_extend(seq, 20, tokens[21:31], aux[20:], torch.tensor([9]))
    with driver.pool.reserve([(seq, 42)]):
        plan = driver.planner.extend([seq], [30], [1])
        step, _ = driver.head.step(torch.tensor([3]), hidden, plan, driver.draft_kv)
    return [some, more, one, tree, logits, hidden, step]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Norms of heads, and a head that norms before its residual, so that every operation is asked for."""
    root = tmp_path_factory.mktemp("qwen")
    target = modelzoo.write_target(root / "target", "Qwen3ForCausalLM", num_hidden_layers=4)
    return Pair(target, modelzoo.write_eagle3(root / "head", target, norm_before_residual=True))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dense", DENSE)
def test_a_pair_computes_what_plain_torch_does(qwen: Pair, dense: str, attention: str) -> None:
    device = DENSE[dense]()
    got = through(qwen.target, qwen.draft, ATTENTION[attention](device))
    for mine, reference in zip(got, through(qwen.target, qwen.draft, torch_ops()), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=2e-4)
    if isinstance(device, Foreign):
        assert all(device.asked[name] > 0 for name in ("linear", "rms_norm", "gather"))
        assert (device.asked["rope_write"] > 0) == (attention != "native"), "its kernels rotate and write themselves"


def test_the_parts_of_the_host_alone_have_the_bits_of_both(qwen: Pair) -> None:
    """With specrs's own attention, products alone decide what is different about a device, and the reverse."""
    want = through(qwen.target, qwen.draft, ops_for())
    again = through(qwen.target, qwen.draft, ops_for(Native(), HostDense()))
    assert all(torch.equal(a, b) for a, b in zip(want, again, strict=True))
    for other in (ops_for(None, Foreign()), ATTENTION["torch"](HostDense())):
        assert not all(map(torch.equal, want, through(qwen.target, qwen.draft, other)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_on_another_device_generates_the_same_tokens(
    tiny: Pair, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [[1, 2, 3], [4] * 20, [5, 6]], SamplingParams(max_tokens=30, temperature=0.8, seed=3)
    want = [o.token_ids for o in LLM(tiny.target).generate(prompts, params)]
    device = Foreign()
    monkeypatch.setattr(placing, "ops_for", lambda backend: ops_for(backend, device))
    llm = LLM(tiny.target, tiny.draft, tree=(2, 3, 8), page_size=4, max_batch=2, attention_backend=backend)
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == want
    assert sum(sum(o.drafted) for o in outputs) > 5 and device.asked["linear"] > 100


# -- device and dtypes -------------------------------------------------------------------------------------------------


def test_activations_features_and_caches_follow_the_placement(tmp_path: Path) -> None:
    """In bf16, to the error that bf16 has."""
    directory = modelzoo.write_target(tmp_path / "target")
    head = modelzoo.write_eagle3(tmp_path / "head", directory)
    half = Placement(HOST.device, torch.bfloat16)
    got, want = (through(directory, head, torch_ops(placement)) for placement in (half, HOST))
    assert {t.dtype for t in got} == {torch.bfloat16} and {t.dtype for t in want} == {HOST.activations}
    for mine, reference in zip(got, want, strict=True):
        assert (mine.float() - reference).norm() < 0.06 * reference.norm()
    target = LlamaModel.load(directory, torch_ops(half))
    assert target.new_cache(2, 4).tensor.dtype == torch.bfloat16
    target.set_aux_layers((0, 1))
    assert target.features is not None and target.features.rows(3).stacked.dtype == torch.bfloat16


def test_memory_is_made_where_the_placement_says() -> None:
    nowhere = Placement(torch.device("meta"), torch.float16)
    for memory in (Workspace(nowhere, x=4).rows(3)["x"], FeatureMemory((0, 2), 8, nowhere).rows(5).stacked):
        assert (memory.device.type, memory.dtype) == ("meta", torch.float16)
    assert [t.device.type for t in TorchDense(nowhere).rope(torch.ones(2, 2), torch.ones(2, 2))] == ["meta", "meta"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_where_the_placement_says(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = modelzoo.write_target(tmp_path, dtype=torch.float32)
    rounded = Placement(HOST.device, HOST.activations, dtype)
    logits = []
    for dense in (HostDense(rounded), TorchDense(rounded), HostDense()):
        driver = Driver(LlamaModel.load(directory, ops_for(None, dense)))
        logits.append(driver.extend([driver.new()], [0], [random_tokens(20, 4)])[0])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=2e-4)
    assert float((logits[0] - logits[2]).abs().max()) > (1e-3 if dtype == torch.bfloat16 else 2e-4)


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        (Placement(torch.device("meta"), HOST.activations), "device = meta: the host's kernels compute with cpu"),
        (Placement(HOST.device, torch.bfloat16), "activations = torch.bfloat16: .* compute with torch.float32"),
        (Placement(HOST.device, HOST.activations, torch.float64), "weights = torch.float64: .* keep torch.bfloat16 or"),
    ],
)
def test_the_hosts_kernels_refuse_what_they_cannot_compute_in(placement: Placement, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        HostDense(placement)


def test_models_and_engine_name_no_device_and_no_dtype() -> None:
    """Exceptions are the host's definitions, the names of a file format, and the arithmetic of published tables."""
    named = {
        path.name
        for folder in ("models", "engine")
        for path in (PACKAGE / folder).rglob("*.py")
        if re.search(r"torch\.(float|bfloat)\d+|[\"'](cpu|cuda)[\"':]|\.(cpu|cuda)\(", path.read_text())
    }
    # cuda.py, cuda_attention.py, cuda_blocks.py, cuda_drafts.py: what a GPU is; config.py: the option by which a user
    # names one; placing.py: which is taken if none does; block_lists.py, block_trees.py, given.py, launched.py,
    # launches.py: what the words of a kernel are; memory_plan.py: kernels of other packages, whose memory a GPU's
    # budget counts.
    assert named == {
        "placement.py",
        "weight_files.py",
        "pickled.py",
        "rope.py",
        "dense.py",
        "cuda.py",
        "cuda_attention.py",
        "cuda_blocks.py",
        "cuda_drafts.py",
        "block_lists.py",
        "block_trees.py",
        "config.py",
        "placing.py",
        "given.py",
        "launched.py",
        "launches.py",
        "memory_plan.py",
    }
