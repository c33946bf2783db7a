"""vLLM's FlashInfer builder: the host's arrays of one forward pass over a chain, page by page.

vLLM 0.33 verifies chains alone (its tree attention is gone), so it has no branches, no mask and no slots: one pass
costs far less than a tree's round, and is timed for what it is. Its FlashAttention builder makes no array at all: it
hands on the runner's block table and lengths.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from common import peers_dir, unpack, wheel
from peer_rounds import Inputs, V
from peer_sources import StandIn, extract

VLLM = "0.33.0"
FILE = "vllm/v1/attention/backends/flashinfer.py"


class _Buffer:
    """vLLM's ``CpuGpuBuffer``: a tensor on the host, its numpy view, and one on the device."""

    def __init__(self, size: int, device: str) -> None:
        self.cpu = torch.zeros(size, dtype=torch.int32)
        self.np = self.cpu.numpy()
        self.gpu = self.cpu.to(device, copy=True)

    def copy_to_gpu(self, n: int) -> torch.Tensor:
        return self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)


def _copy_pages(grid: Any, out: torch.Tensor, table: torch.Tensor, stride: int, bounds: torch.Tensor, **_: Any) -> None:
    """``_copy_page_indices_kernel`` by numpy's slice assignment."""
    pages, rows, ends = out.numpy(), table.numpy(), bounds.tolist()
    for i, (first, last) in enumerate(itertools.pairwise(ends)):
        pages[first:last] = rows[i, : last - first]


def _kernel(path: Any) -> Any:
    """Return the Triton kernel alone, in a module of its own: Triton reads a kernel's source from its file."""
    text = path.read_text()
    found = next(n for n in ast.parse(text).body if getattr(n, "name", "") == "_copy_page_indices_kernel")
    module_file = peers_dir() / "vllm_copy_page_indices.py"
    source = ast.get_source_segment(text, found)
    module_file.write_text(f"import triton\nimport triton.language as tl\n\n\n@triton.jit\n{source}\n")
    spec = importlib.util.spec_from_file_location("vllm_copy_page_indices", module_file)
    assert spec and spec.loader
    module = sys.modules["vllm_copy_page_indices"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._copy_page_indices_kernel


class Pass:
    """The verification of a chain of V tokens for the same batch."""

    def __init__(self, inputs: Inputs, device: str = "cpu") -> None:
        path = unpack(wheel("vllm", VLLM), [FILE]) / FILE
        kernel = StandIn(_copy_pages) if device == "cpu" else _kernel(path)
        names = {"np": np, "torch": torch, "_copy_page_indices_kernel": kernel}
        method = "_compute_flashinfer_kv_metadata"
        self._compute = getattr(extract(path, [method], names, "FlashInferMetadataBuilder"), method)
        self.inputs, page = inputs, inputs.page
        self.table = torch.from_numpy(inputs.table[:, ::page] // page).to(device)
        batch = len(inputs.lens)
        self.builder = SimpleNamespace(
            paged_kv_indptr=_Buffer(batch + 1, device),
            paged_kv_last_page_len=_Buffer(batch, device),
            paged_kv_indices=torch.zeros(self.table.numel(), dtype=torch.int32, device=device),
        )
        self.lens = inputs.lens + V

    def run(self) -> None:
        """Count pages as ``build`` has them, then make the three arrays."""
        page = self.inputs.page
        blocks = (self.lens + (page - 1)) // page
        self.pages = self._compute(self.builder, blocks, self.lens, self.table, len(self.lens), page)

    def check(self) -> None:
        """The pages, spread out and cut to the last one's length, are each request's slots."""
        self.run()
        page, first = self.inputs.page, 0
        pages, last = self.pages.cpu().numpy(), self.builder.paged_kv_last_page_len.np
        for i, n in enumerate(self.lens):
            count = -(-n // page)
            assert last[i] == n - (count - 1) * page
            slots = (pages[first : first + count, None] * page + np.arange(page)).reshape(-1)[:n]
            assert np.array_equal(slots, self.inputs.table[i, :n]), i
            first += count
