"""Peers' functions, read from their wheels and compiled unchanged: sglang's host preparation and FlashInfer's ``plan``.

sglang's modules import a whole server, so each wanted function is compiled from its file's syntax tree (decorators and
annotations dropped) among the names that it uses; a name that is missing fails with NameError when it is used. Modules
that hold Triton kernels are imported as they are, under a few stub packages.

On CUDA tensors everything runs as there. On CPU tensors a Triton kernel cannot run (Triton's interpreter is thousands
of times slower, so it would be no peer): `StandIn` puts numpy's slice assignment (one memcpy per contiguous run,
faster here than torch's ``copy_``) or torch's gather in its place, the least that a Python program can do for the same
result.
The interpreter serves as a check: ``bench_formats.py --check`` runs the kernels themselves against the closed forms.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import torch

from common import peers_dir, unpack, wheel

SGLANG = "0.5.23"
FLASHINFER = "0.7.2.post1"
TVM_FFI = "0.1.11"  # loads FlashInfer's and sglang's compiled modules, on a GPU alone
SGLANG_FILES = (
    "sglang/kernels/ops/speculative/*.py",
    "sglang/kernels/ops/attention/kv_indices.py",
    "sglang/kernels/ops/attention/trtllm_mha_page_table.py",
    "sglang/kernels/ops/attention/utils.py",
    "sglang/srt/layers/attention/flashattention_backend.py",
    "sglang/srt/layers/attention/flashinfer_backend.py",
    "sglang/srt/layers/attention/triton_backend.py",
    "sglang/srt/mem_cache/allocation_sizing.py",
    "sglang/srt/mem_cache/kv_index_translator.py",
    "sglang/srt/speculative/eagle_info.py",
    "sglang/srt/speculative/eagle_utils.py",
    "sglang/srt/speculative/eagle_worker_common.py",
    "sglang/srt/speculative/spec_utils.py",
)
FLASHINFER_FILES = (
    "flashinfer/prefill.py",
    "flashinfer/decode.py",
    "flashinfer/page.py",
    "flashinfer/utils.py",
    "flashinfer/quantization/packbits.py",
)


def extract(path: Path, wanted: Iterable[str], names: dict[str, Any], cls: str | None = None) -> SimpleNamespace:
    """The named functions of one file (of one class), compiled with ``names`` as their globals, which they share."""
    wanted = set(wanted)
    body = ast.parse(path.read_text()).body
    if cls:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == cls).body
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted and node.name not in found:
            node.decorator_list = []
            flags = __future__.annotations.compiler_flag
            exec(compile(ast.Module([node], []), str(path), "exec", flags=flags, dont_inherit=True), names)
            found[node.name] = names[node.name]
    missing = wanted - set(found)
    if missing:
        raise KeyError(f"{path.name}: no {', '.join(sorted(missing))}")
    return SimpleNamespace(**found)


class StandIn:
    """Takes the place of a Triton kernel on CPU tensors: ``kernel[grid](...)`` calls the function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.function, grid)


def _draft_kv_indices(
    grid: Any, rows: Any, table: Any, lens: Any, out: Any, indptr: Any, positions: Any, *args: Any, **_: Any
) -> None:
    """``generate_draft_decode_kv_indices``: per step, request and branch the prefix, then the branch's own slots."""
    page, batch, topk, steps = args[6], grid[1], grid[2], len(indptr)
    ends = torch.arange(1, batch * topk + 1, dtype=torch.int32)
    sums = torch.cumsum(positions, 0, dtype=torch.int32)
    for t in range(steps):
        torch.add(sums, ends, alpha=t + 1, out=indptr[t, 1 : batch * topk + 1])
    total, slots, target = 0, table.numpy(), out.numpy()
    for i, (row, n) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        line = slots[row]
        if page == 1 or topk == 1:
            own = line[n : n + topk * steps].reshape(topk, steps)
        else:
            rest = n % page
            branch = -(-(rest + steps) // page) * page
            own = line[n - rest :][: topk * branch].reshape(topk, branch)[:, rest : rest + steps]
        for t in range(steps):
            start = total * topk + i * (t + 1) * topk
            block = target[t, start : start + topk * (n + t + 1)].reshape(topk, n + t + 1)
            block[:, :n] = line[:n]
            block[:, n:] = own[:, : t + 1]
        total += n


def _csr_kv_indices(
    grid: Any, table: Any, rows: Any, lens: Any, indptr: Any, start: Any, out: Any, *_: Any, **__: Any
) -> None:
    """``create_flashinfer_kv_indices_triton``: each request's slots, one after another."""
    assert start is None
    slots, target = table.numpy(), out.numpy()
    for row, n, first in zip(rows.tolist(), lens.tolist(), indptr.tolist(), strict=False):
        target[first : first + n] = slots[row, :n]


def _draft_locs(grid: Any, rows: Any, table: Any, lens: Any, out: Any, pool: int, topk: int, steps: int, **_: Any):
    """``assign_draft_cache_locs_contiguous``: the dense draft region's slots."""
    columns = lens[:, None] + torch.arange(topk * steps)
    out.view(len(rows), -1).copy_(table[rows[:, None], columns])


def _extend_locs(grid: Any, rows: Any, table: Any, starts: Any, out: Any, pool: int, width: int, **_: Any) -> None:
    """``assign_extend_cache_locs_uniform``: the slots of the next ``width`` tokens."""
    out.view(len(rows), width).copy_(table[rows[:, None], starts[:, None] + torch.arange(width)])


def _page_table(req_to_token: Any, req_pool_indices: Any, cache_seqlens: Any, page_table: Any, page_size: int) -> None:
    """``build_trtllm_mha_page_table``, as the draft branch of the same backend does it by torch's indexing."""
    pages = -(-int(cache_seqlens.max()) // page_size)
    strided = torch.arange(0, pages * page_size, page_size)
    page_table[:, :pages].copy_(req_to_token[req_pool_indices[:, None], strided[None, :]] // page_size)


def _package(name: str, path: Path | None = None) -> Any:
    module: Any = types.ModuleType(name)
    module.__path__ = [str(path)] if path else []
    sys.modules[name] = module
    return module


def _stub_sglang(root: Path) -> None:
    """Make ``sglang.kernels.ops.*`` importable without the server's own imports."""
    for name in ("", ".kernels", ".kernels.ops", ".kernels.ops.speculative", ".kernels.ops.attention"):
        _package("sglang" + name, root.joinpath("sglang", *name.split(".")[1:]))
    _package("sglang.srt")
    utils = _package("sglang.srt.utils")
    for name in ("is_cpu", "is_hip", "is_musa", "is_npu", "is_xpu", "is_gfx95_supported", "is_gfx1250_supported"):
        setattr(utils, name, lambda: False)
    utils.is_cuda = lambda: True
    utils.next_power_of_2 = lambda n: 1 if n <= 0 else 1 << (n - 1).bit_length()
    platforms = _package("sglang.srt.platforms")
    platforms.current_platform = SimpleNamespace(is_out_of_tree=lambda: False)
    _package("sglang.srt.platforms.interface").reject_out_of_tree_path = lambda *_, **__: None
    _package("sglang.kernels.kernel_api_logging").debug_kernel_api = lambda f: f
    _package("sglang.kernels.jit")
    jit = _package("sglang.kernels.jit.utils")
    jit.cache_once = functools.cache
    jit.load_jit = None
    jit.is_arch_support_pdl = lambda: True


class Sglang:
    """sglang's functions by name; ``stand_ins`` puts torch in the place of its Triton kernels."""

    def __init__(self, stand_ins: bool) -> None:
        root = unpack(wheel("sglang", SGLANG), SGLANG_FILES)
        _stub_sglang(root)
        load = lambda name: importlib.import_module("sglang.kernels.ops." + name)  # noqa: E731
        locs, kv, tables = (
            load("speculative.cache_locs"),
            load("attention.kv_indices"),
            load("attention.trtllm_mha_page_table"),
        )
        self.tree = load("speculative.spec_tree")
        if not stand_ins:
            tree = load("speculative.tree")
            tree._jit_tree_module = functools.cache(_tree_module)
        self.kernels = SimpleNamespace(locs=locs, kv=kv, tables=tables)
        if stand_ins:
            locs.generate_draft_decode_kv_indices = StandIn(_draft_kv_indices)
            locs.assign_draft_cache_locs_contiguous = StandIn(_draft_locs)
            locs.assign_extend_cache_locs_uniform = StandIn(_extend_locs)
            kv.create_flashinfer_kv_indices_triton = StandIn(_csr_kv_indices)
            tables.build_trtllm_mha_page_table = _page_table
        srt = root / "sglang" / "srt"
        attention, speculative = srt / "layers" / "attention", srt / "speculative"
        fits = extract(root / "sglang/kernels/ops/attention/utils.py", ["assert_buffer_fits"], {}).assert_buffer_fits
        used = extract(speculative / "spec_utils.py", ["draft_kv_indices_used_len"], {}).draft_kv_indices_used_len
        base: dict[str, Any] = {
            "torch": torch,
            "math": math,
            "_is_cpu": False,
            "assert_buffer_fits": fits,
            "draft_kv_indices_used_len": used,
            "Optional": Optional,
            "Union": Union,
            "next_power_of_2": sys.modules["sglang.srt.utils"].next_power_of_2,
        }
        self.used_len = used
        self.alloc_lens = extract(
            srt / "mem_cache/allocation_sizing.py", ["page_aligned_decode_alloc_lens"], {}
        ).page_aligned_decode_alloc_lens
        self.extend_locs = locs.assign_extend_cache_locs_uniform_func
        common = {
            **base,
            "ForwardBatch": SimpleNamespace(init_new=lambda *_, **__: None),
            "CaptureHiddenMode": SimpleNamespace(NULL=0, LAST=1),
            "assign_draft_cache_locs_contiguous_func": locs.assign_draft_cache_locs_contiguous_func,
        }
        self.prepare_for_draft = extract(
            speculative / "eagle_worker_common.py",
            ["prepare_for_draft", "duplicate_prefix_tail_to_draft_branches"],
            common,
        ).prepare_for_draft
        self.tree_names = {
            **base,
            "TreeMaskMode": self.tree.TreeMaskMode,
            "build_tree_kernel_efficient_func": self.tree.build_tree_kernel_efficient_func,
        }
        self.build_tree = extract(
            speculative / "eagle_utils.py", ["build_tree_kernel_efficient"], self.tree_names
        ).build_tree_kernel_efficient
        self.organize = extract(
            speculative / "eagle_utils.py", ["organize_draft_results"], dict(base)
        ).organize_draft_results

        kinds = SimpleNamespace(FULL=0, SLIDING_WINDOW=1)
        names = {
            "IdSpaceKind": kinds,
            "KVIndexTable": lambda **k: SimpleNamespace(**{"v2p": None, **k}),
            "spec_kv_index_token_blocks": kv.spec_kv_index_token_blocks,
            "create_flashinfer_kv_indices_triton": kv.create_flashinfer_kv_indices_triton,
        }
        methods = ("pack_read_stream", "read_source", "_passthrough_table", "_reads_translated")
        self.translator = type(
            "Translator",
            (),
            {
                **vars(extract(srt / "mem_cache/kv_index_translator.py", methods, names, "KVIndexTranslator")),
                "_spaces": {},
                "reads_are_translated": False,
            },
        )
        info = {**base, "IdSpaceKind": kinds}

        def arguments(cls: str) -> Callable[..., Any]:
            path = speculative / "eagle_info.py"
            return extract(path, ["generate_attn_arg_prefill"], dict(info), cls).generate_attn_arg_prefill

        self.verify_args, self.extend_args = arguments("EagleVerifyInput"), arguments("EagleDraftExtendInput")

        path = attention / "flashattention_backend.py"
        expand = extract(path, ["draft_decode_set_expand_metadata"], {"torch": torch}).draft_decode_set_expand_metadata
        names = {
            **base,
            "build_trtllm_mha_page_table": tables.build_trtllm_mha_page_table,
            "draft_decode_set_expand_metadata": torch.compile(expand, dynamic=True),
        }  # compiled there as well
        self.flash_attention = extract(
            path, ["_apply_cuda_graph_metadata"], names, "FlashAttentionBackend"
        )._apply_cuda_graph_metadata

        path = attention / "triton_backend.py"
        names = {**base, "generate_draft_decode_kv_indices": locs.generate_draft_decode_kv_indices}
        self.triton_draft = extract(
            path, ["common_template"], dict(names), "TritonMultiStepDraftBackend"
        ).common_template
        methods = (
            "_fill_kv_indptr_and_indices",
            "_target_verify_num_tokens_per_req",
            "_update_target_verify_buffers",
            "_update_draft_extend_buffers",
        )
        self.triton = type("TritonBackend", (), vars(extract(path, methods, dict(base), "TritonAttnBackend")))

        path = attention / "flashinfer_backend.py"
        self.host_indptr = False
        names = {
            **base,
            "IdSpaceKind": kinds,
            "SpecInput": object,
            "global_override_indptr_cpu": None,
            "spec_kv_index_token_blocks": kv.spec_kv_index_token_blocks,
            "SpecInputType": SimpleNamespace(
                EAGLE_VERIFY="verify", DFLASH_VERIFY="dflash", EAGLE_DRAFT_EXTEND="extend"
            ),
            "envs": SimpleNamespace(
                SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR=SimpleNamespace(get=lambda: self.host_indptr)
            ),
        }
        extract(path, ["fast_prefill_plan", "_build_draft_indptr_host"], names)
        draft = extract(path, ["common_template"], names, "FlashInferMultiStepDraftBackend").common_template
        decode = extract(path, ["call_begin_forward"], names, "FlashInferIndicesUpdaterDecode").call_begin_forward
        prefill = extract(path, ["call_begin_forward"], names, "FlashInferIndicesUpdaterPrefill").call_begin_forward
        self.flashinfer = SimpleNamespace(
            names=names,
            draft=draft,
            decode=decode,
            prefill=prefill,
            fast_prefill_plan=names["fast_prefill_plan"],
            draft_indptr=names["_build_draft_indptr_host"],
        )
        if stand_ins:
            pack = _package("sglang.kernels.ops.speculative.pack_verify_mask")
            pack.pack_verify_mask_into = None  # only reached with a mask, and draft_extend has none


def _tree_module() -> Any:
    import tvm_ffi

    return tvm_ffi.load_module(str(peers_dir() / "tree.so"))
