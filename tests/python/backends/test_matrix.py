"""Every cell of the table of rounds: backend, device, K, P, layout, what a branch attends to, graph level, gpu-only."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pickle
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo import Pair
from specrs import LLM, ConfigError, SamplingParams
from specrs.backends import (
    BACKENDS,
    GRAPH_LEVELS,
    MATRIX,
    Capabilities,
    Combination,
    FlashAttentionCuda,
    FlashInfer,
    FlashInferCuda,
    MissingPackageError,
    Native,
    NativeCuda,
    Triton,
    TritonCuda,
    UnsupportedCombinationError,
    find,
    on_device,
    packages,
    resolve,
)
from specrs.engine.config import EngineConfig
from specrs.engine.devices.placing import Wanted
from specrs.models.cuda_attention import device_attention

DTYPES: dict[str, Any] = {"cpu": "float32", "cuda": "float16"}  # a type that the device has
# Written out, apart from what the classes declare: (layout, mode) of trees with K > 1 and P > 1.
TREES = {
    "native": {("dense", "ancestors"), ("dense", "lane")},
    "flashinfer": {(layout, mode) for layout in ("dense", "holey") for mode in ("ancestors", "lane")},
    "flash_attention": {("dense", "ancestors"), ("dense", "lane"), ("holey", "lane")},
    "triton": {(layout, mode) for layout in ("dense", "holey") for mode in ("ancestors", "lane")},
}


class Mine(Triton):
    """A user's own."""

    name = "mine"


class Silent:
    """A user's own backend that declares only its format: chains over pages of one token, lengths on the host."""

    format = "triton"
    prepare = attend = Triton().prepare


def domain(device: str) -> Iterator[Combination]:
    for topk, page, layout, mode, recurrent, graphs, gpu_only in itertools.product(
        (None, 1, 8), (1, 16), (None, "dense", "holey"), (None, "ancestors", "lane"), (False, True),
        (None, *GRAPH_LEVELS), (None, False, True),
    ):  # fmt: skip
        yield Combination(
            topk=topk, page_size=page, layout=layout, draft_attention=mode, recurrent_state=recurrent,
            kv_dtype=DTYPES[device], device=device, graphs=graphs, gpu_only=gpu_only,
        )  # fmt: skip


def exists(name: str, asked: Combination) -> bool:
    """The table in words."""
    if asked.recurrent_state and asked.topk is not None:
        return False
    if (asked.topk or 1) > 1 and asked.page_size > 1:
        fits = any(
            asked.layout in (None, layout) and asked.draft_attention in (None, mode) for layout, mode in TREES[name]
        )
        if not fits:
            return False
    if asked.device == "cpu":
        return asked.graphs in (None, "off") and not asked.gpu_only
    if asked.graphs == "loop" or asked.gpu_only:
        return not asked.recurrent_state and not (asked.graphs == "loop" and asked.gpu_only is False)
    return True


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_cell_is_answered_or_refused_with_what_would_work(name: str, device: str) -> None:
    accepted = refused = 0
    tried: dict[tuple[str, Combination], bool] = {}
    for asked in domain(device):
        try:
            found = resolve(name, asked)
        except UnsupportedCombinationError as error:
            assert not exists(name, asked), asked
            assert error.combination == asked and error.alternatives and error.why in str(error)
            assert f"attention backend {name!r} with " in str(error) and "What would work: " in str(error)
            for other in error.alternatives:
                key = (other.backend, other.combination)
                if key not in tried:
                    resolve(other.backend, other.combination)  # raises where it would not work
                    tried[key] = True
            refused += 1
            continue
        assert exists(name, asked), asked
        accepted += 1
        assert found.graphs == (asked.graphs or ("off" if device == "cpu" else "round"))
        ahead = device == "cuda" and not asked.recurrent_state and asked.gpu_only is not False
        assert found.gpu_only is ahead, asked
        assert found.speculate is not asked.recurrent_state
        if device == "cuda":
            assert not found.needs_cpu_seq_lens and "float16" in found.capabilities.kv_dtypes
    assert refused > 0 and accepted > 0


def test_the_rows_are_those_backends_on_those_devices() -> None:
    assert [(row.backend, row.device) for row in MATRIX] == [
        *((cls, "cpu") for cls in BACKENDS.values()), (NativeCuda, "cuda"), (FlashInferCuda, "cuda"),
        (FlashAttentionCuda, "cuda"), (TritonCuda, "cuda"),
    ]  # fmt: skip
    for row in MATRIX:
        assert set(row.graphs) <= set(GRAPH_LEVELS) and len(set(row.graphs)) == len(row.graphs) > 0
        assert isinstance(on_device(row.backend(), row.device), row.backend)


def test_specrs_own_backend_stands_for_itself_on_either_device() -> None:
    assert isinstance(on_device(Native(), "cuda"), NativeCuda) and isinstance(on_device(NativeCuda(), "cpu"), Native)
    mine, cuda = Mine(), NativeCuda()
    assert on_device(mine, "cpu") is mine and on_device(mine, "cuda") is None
    assert on_device(cuda, "cuda") is cuda
    assert isinstance(on_device(Triton(), "cuda"), TritonCuda) and isinstance(on_device(TritonCuda(), "cpu"), Triton)


@pytest.mark.parametrize("mine", [Mine(), Silent()], ids=["declared", "silent"])
def test_a_backend_of_a_user_runs_on_the_cpu(mine: Any) -> None:
    found = resolve(mine, Combination(topk=1))
    assert (found.graphs, found.gpu_only) == ("off", False)
    for asked in (
        Combination(topk=1, graphs="round"),
        Combination(topk=1, graphs="loop"),
        Combination(topk=1, gpu_only=True),
        Combination(topk=1, device="cuda", kv_dtype="float32"),
    ):
        with pytest.raises(UnsupportedCombinationError) as caught:
            resolve(mine, asked)
        for other in caught.value.alternatives:
            resolve(mine if other.backend == caught.value.backend else other.backend, other.combination)


@pytest.mark.parametrize(
    ("slots", "gpu_only"),
    [((), True), ((None,), True), ((None, NativeCuda(), Triton()), True), ((FlashInfer(),), False),
     ((None, Silent()), False), ((object(),), False)],
)  # fmt: skip
def test_one_backend_that_needs_the_lengths_takes_the_gpu_only_rounds_away(
    slots: tuple[Any, ...], gpu_only: bool
) -> None:
    """sglang PR 26738: an empty slot is skipped, and one that declares nothing is taken to need them."""
    asked = Combination(topk=4, device="cuda", kv_dtype="bfloat16")
    found = resolve("native", asked, slots=slots)
    assert (found.gpu_only, found.needs_cpu_seq_lens, found.graphs) == (gpu_only, not gpu_only, "round")
    for change in ({"graphs": "loop"}, {"gpu_only": True}):
        want = dataclasses.replace(asked, **change)
        if gpu_only:
            assert resolve("native", want, slots=iter(slots)).gpu_only
            continue
        with pytest.raises(UnsupportedCombinationError, match="needs the lengths on the host") as caught:
            resolve("native", want, slots=slots)
        assert caught.value.alternatives
        for other in caught.value.alternatives:
            resolve(other.backend, other.combination, slots=slots)


@pytest.mark.parametrize(
    ("backend", "asked", "parts"),
    [
        ("native", Combination(graphs="loop"), ["graphs='loop'", "on 'cpu' have graphs 'off'", "work: graphs='off'"]),
        ("native", Combination(device="cuda", kv_dtype="bfloat16", graphs="loop", recurrent_state=True),
         ["recurrent_state=True", "graphs='loop'", "recurrent state", "work: graphs='round'; or graphs='off'"]),
        ("native", Combination(device="cuda", kv_dtype="bfloat16", graphs="loop", gpu_only=False),
         ["no length while a loop runs", "graphs='round'", "gpu_only=None"]),
        ("flash_attention", Combination(device="cuda", kv_dtype="bfloat16", topk=8, page_size=16, layout="holey",
                                        draft_attention="ancestors"),
         ["a branch of flash_attention attends to its lane", "attention_backend='flashinfer' or 'triton'"]),
        ("flashinfer", Combination(topk=2, gpu_only=True), ["the host makes the plans", "gpu_only=None"]),
    ],
)  # fmt: skip
def test_a_refusal_says_what_and_what_instead(backend: str, asked: Combination, parts: list[str]) -> None:
    with pytest.raises(UnsupportedCombinationError) as caught:
        resolve(backend, asked)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_values_that_there_are_not_are_refused() -> None:
    for name, value in (("device", "tpu"), ("graphs", "always"), ("gpu_only", "yes")):
        with pytest.raises(ConfigError, match=f"{name} = '{value}': must be"):
            resolve("native", Combination(**{name: value}))
    with pytest.raises(ConfigError, match=r"graphs = 'always': must be one of 'off', 'round', 'loop', or None"):
        EngineConfig.of({"graphs": "always"})


# -- the engine's options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [None, *GRAPH_LEVELS])
@pytest.mark.parametrize(
    ("topk", "page", "mode"), list(itertools.product((None, 1, 8), (1, 16), (None, "ancestors", "lane")))
)
def test_options_of_an_engine_on_a_gpu(topk: int | None, page: int, mode: Any, graphs: Any) -> None:
    """The options are those that `EngineConfig.on` leaves; no GPU is asked."""
    tree = None if topk is None else (topk, 3, 4)
    config = EngineConfig(
        tree=tree, page_size=page, draft_attention=mode, graphs=graphs, device="cuda:0", kv_dtype="float16",
        attention_backend=NativeCuda(),
    )  # fmt: skip
    routed, speculate = config.route(recurrent_state=False)
    assert speculate and routed.graphs == (graphs or "round") and routed.draft_layout == "dense"
    if topk == 8:
        assert routed.branches_attend == (mode or "ancestors")
    if topk is None and graphs != "loop":
        assert not config.route(recurrent_state=True)[1]
    else:
        with pytest.raises(UnsupportedCombinationError, match="recurrent"):
            config.route(recurrent_state=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("graphs", ["round", "loop"])
def test_an_engine_on_the_cpu_launches_one_by_one(tiny: Pair, backend: str, graphs: str) -> None:
    with pytest.raises(UnsupportedCombinationError, match=f"graphs='{graphs}'.*What would work: graphs='off'"):
        LLM(tiny.target, tiny.draft, attention_backend=backend, graphs=graphs, device="cpu")


def test_an_engine_says_the_level_that_is_in_force(tiny: Pair) -> None:
    for graphs in (None, "off"):
        with LLM(tiny.target, tiny.draft, graphs=graphs, device="cpu") as llm:
            assert llm.config.graphs == "off"
            assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4


def test_a_model_with_recurrent_state_is_refused_a_loop(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrs.engine.llm.has_recurrent_state", lambda _: True)
    with pytest.raises(UnsupportedCombinationError, match="recurrent state") as caught:
        LLM(tiny.target, device="cuda", graphs="loop")  # before a GPU is looked for
    assert caught.value.combination.recurrent_state and caught.value.combination.graphs == "loop"


def test_what_is_declared_is_what_the_table_stands_on() -> None:
    """A flag that decides here and that a class forgot would promise the least."""
    for row in MATRIX:
        assert "needs_cpu_seq_lens" in vars(row.backend), row.backend
        assert find(row.backend()).name == Capabilities.of(row.backend()).name


@pytest.mark.parametrize(("installed", "words"), [(None, "it is not installed"), ("3.5.1", "3.5.1 is installed")])
def test_a_package_that_is_missing_or_too_old_is_named(
    installed: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = None if installed is None else types.SimpleNamespace(__version__=installed)
    monkeypatch.setitem(sys.modules, "triton", module)  # None: importing it fails
    with pytest.raises(
        MissingPackageError, match=f"'triton': needs the package triton 3.6 or newer.*{words}"
    ) as caught:
        device_attention(TritonCuda())
    error = caught.value
    assert (error.backend, error.package, error.oldest, error.found) == ("triton", "triton", "3.6", installed)
    device_attention(NativeCuda())


@pytest.mark.parametrize(
    ("backend", "package", "oldest"),
    [(FlashInferCuda(), "flashinfer-python", "0.7.2.post1"), (FlashAttentionCuda(), "vllm", "0.24")],
    ids=["flashinfer", "flash_attention"],
)
def test_packages_of_the_real_kernels_are_named(
    backend: Any, package: str, oldest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one is absent, too old, or new enough and does not load; and triton, which each of them needs too."""
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    for installed, words in ((None, "it is not installed"), ("0.2.9", "0.2.9 is installed")):
        monkeypatch.setattr(packages.Package, "installed", lambda _, found=installed: found)
        with pytest.raises(
            MissingPackageError, match=f"{backend.name!r}: needs the package {package} {oldest}.*{words}"
        ):
            device_attention(backend)
    monkeypatch.setattr(packages.Package, "installed", lambda _: "99.0")
    for name in ("flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"{backend.name!r}: {package} 99.0 does not load: "):
        device_attention(backend)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingPackageError, match=f"{backend.name!r}: needs the package triton 3.6"):
        device_attention(backend)


def test_the_libraries_of_flash_attention_are_looked_for_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that is none is said to be none; what else is in the package is not run."""
    library = tmp_path / "vllm" / packages._FA3
    library.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('is imported')\n")
    library.write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages.Package, "installed", lambda _: "0.24.0")
    with pytest.raises(ConfigError, match=r"'flash_attention': vllm 0\.24\.0 does not load: "):
        packages.flash_attention_op()
    assert "vllm" not in sys.modules


def test_heads_that_a_backends_kernels_do_not_take_are_refused() -> None:
    for dim in (64, 96, 128, 256):
        heads: Any = types.SimpleNamespace(head_dim=dim)
        for backend in (NativeCuda(), FlashAttentionCuda(), TritonCuda()):
            Wanted._check_heads(backend, heads)
    small: Any = types.SimpleNamespace(head_dim=64)
    odd: Any = types.SimpleNamespace(head_dim=96)
    with pytest.raises(
        ConfigError, match=r"'flashinfer': head_dim = 96: it takes 64, 128, 256 on a GPU; 'native' takes"
    ):
        Wanted._check_heads(FlashInferCuda(), small, odd)


class Renamed(Triton):
    """A user's own, under the name of specrs's."""


class Namesake:
    """A user's own that is no subclass, under the name of specrs's."""

    name = format = "triton"
    prepare = attend = Triton().prepare


@pytest.mark.parametrize("mine", [Renamed(), Namesake()], ids=["subclass", "namesake"])
def test_a_users_class_is_not_replaced_by_one_of_its_name(mine: Any) -> None:
    assert on_device(mine, "cpu") is mine
    assert on_device(mine, "cuda") is None


def test_what_is_missing_can_be_pickled() -> None:
    error = MissingPackageError("triton", "triton", "3.6", None)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.oldest, again.found) == (str(error), "3.6", None)


@pytest.mark.parametrize("backend", [FlashInferCuda(), FlashAttentionCuda(), TritonCuda()], ids=lambda b: b.name)
def test_operands_that_kernels_cannot_read_are_refused(backend: Any) -> None:
    half, pool = torch.float16, torch.zeros(8, 2, 2, 64, dtype=torch.float16)
    q, keys = torch.zeros(1, 4, 64, dtype=half), torch.zeros(8, 2, 64, dtype=half)
    odd, turned = torch.zeros(8, 2, 80, dtype=half), torch.zeros(8, 64, 2, dtype=half).transpose(1, 2)
    step: Any = types.SimpleNamespace(page_size=16)
    wrong = [
        ((q.float(), keys, keys), "q = float32: must be bfloat16 or float16"),
        ((q, keys.float(), keys), "keys, values = torch.float32, torch.float16: must be torch.float16"),
        ((q, keys, keys[:4]), r"shapes of q, keys, values = \[1, 4, 64\], \[8, 2, 64\], \[4, 2, 64\]"),
        ((odd[:1], odd, odd), "head_dim of q, keys = 80, 80: must be equal, and one of 64"),
        ((q[:, :3], keys, keys), "heads of q, keys = 3, 2"),
        ((q, pool[:, 0], keys), "strides of keys, values = "),
        ((q, turned, turned), "strides of keys, values = "),
    ]
    if backend.name == "flash_attention":
        wrong.append(((q, keys, keys), "slots of keys, values = 8: must be a multiple of 16"))
    for operands, words in wrong:
        with pytest.raises(ConfigError, match=f"{backend.name!r}: {words}"):
            backend.attend(step, *operands[1:], operands[0], 1.0)


def test_a_mask_that_a_gpu_does_not_read_is_refused_there_by_name() -> None:
    bytes_of_mask = FlashInfer(mask="bool")
    assert on_device(bytes_of_mask, "cpu") is bytes_of_mask
    assert isinstance(on_device(FlashInfer(), "cuda"), FlashInferCuda)
    with pytest.raises(ConfigError, match=r"FlashInfer\(mask='bool'\): .* mask='packed' runs there"):
        on_device(bytes_of_mask, "cuda")
    with pytest.raises(ConfigError, match="mask='packed' runs there"):
        resolve(bytes_of_mask, Combination(device="cuda", kv_dtype="float16"))


@pytest.mark.parametrize(
    ("package", "installed", "fits"),
    [
        (packages.TRITON, "3.6.0", True), (packages.TRITON, "3.6.0+git12ab", True),
        (packages.TRITON, "3.6.0rc1", False), (packages.TRITON, "3.10", True),
        (packages.FLASHINFER, "0.7+cu130", False), (packages.FLASHINFER, "0.7.2", False),
        (packages.FLASHINFER, "0.7.2rc1", False),
        (packages.FLASHINFER, "0.7.2.post1+cu130", True), (packages.FLASHINFER, "0.8.0", True),
        (packages.VLLM, "0.24.0.dev12", False), (packages.VLLM, "0.24.0", True), (packages.VLLM, "mine", False),
    ],
)  # fmt: skip
def test_versions_are_compared_with_their_suffixes(package: packages.Package, installed: str, fits: bool) -> None:
    if fits:
        package.check(installed)
        return
    with pytest.raises(MissingPackageError, match=f"{re.escape(installed)} is installed"):
        package.check(installed)


def test_a_triton_that_does_not_load_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))  # without a version
    with pytest.raises(ConfigError, match=r"'flashinfer': triton .* does not load: .*__version__"):
        packages.triton("flashinfer")

    def fails(name: str) -> None:
        raise OSError("libtriton.so: no such file")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ConfigError, match=r"'triton': triton .* does not load: libtriton.so"):
        packages.triton("triton")


def test_an_operator_with_other_arguments_is_refused() -> None:
    packages.check_arguments("0.24.0", packages.FA3_ARGUMENTS)
    with pytest.raises(
        ConfigError, match=r"vllm 0.25.0 does not load: its operator has other arguments: cp_rank, sink"
    ):
        packages.check_arguments("0.25.0", [*(n for n in packages.FA3_ARGUMENTS if n != "cp_rank"), "sink"])
