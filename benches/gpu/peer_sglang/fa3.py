"""FlashAttention-3 from vLLM 0.24.0 (`_vllm_fa3_C.abi3.so`) in place of sgl_kernel's own build.

Both are forks of FlashAttention-3 with the same functions up to a few arguments, which are mapped here. In the bundle
this file is ``sgl_kernel/flash_ops.py``. ``SGLANG_PAGE_TABLE_WIDTH`` has the tokens that a row of the page table can
hold: vLLM's fork leaves the splits out of metadata for lengths that take one split, sgl_kernel's never does, so
metadata is made for the length that attention takes from the page table.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

torch.ops.load_library(str(Path(__file__).with_name("_vllm_fa3_C.abi3.so")))
_FWD = torch.ops._vllm_fa3_C.fwd.default
_METADATA = torch.ops._vllm_fa3_C.get_scheduler_metadata.default
_WIDTH = int(os.environ["SGLANG_PAGE_TABLE_WIDTH"])
_ONE_RANK = (1, 0, None)  # context parallelism, which is vLLM's alone


def fwd(
    q: Any, k: Any, v: Any, k_new: Any, v_new: Any, q_v: Any, out: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    cu_seqlens_k_new: Any, seqused_q: Any, seqused_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, page_table: Any,
    kv_batch_idx: Any, leftpad_k: Any, rotary_cos: Any, rotary_sin: Any, seqlens_rotary: Any, q_descale: Any,
    k_descale: Any, v_descale: Any, softmax_scale: Any, causal: Any, window_left: Any, window_right: Any,
    attention_chunk: Any, softcap: Any, is_rotary_interleaved: Any, scheduler_metadata: Any, num_splits: Any,
    pack_gqa: Any, sm_margin: Any, sinks: Any = None, sparse_mask: Any = None, only_qv: bool = False,
) -> Any:  # fmt: skip
    """Attention, as ``torch.ops.sgl_kernel.fwd`` is called."""
    assert attention_chunk == 0 and sparse_mask is None and not only_qv
    if page_table is None or page_table.shape[1] * k.shape[1] != _WIDTH:
        scheduler_metadata = None  # made for another width
    return _FWD(
        q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_left, window_right, softcap,
        is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, sinks, *_ONE_RANK,
    )  # fmt: skip


def get_scheduler_metadata(
    batch_size: Any, max_seqlen_q: Any, max_seqlen_k: Any, num_heads: Any, num_heads_k: Any, headdim: Any,
    headdim_v: Any, qkv_dtype: Any, seqused_k: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, cu_seqlens_k_new: Any,
    seqused_q: Any, leftpad_k: Any, page_size: Any, max_seqlen_k_new: Any, causal: Any, window_left: Any,
    window_right: Any, attention_chunk: Any, has_softcap: Any, num_splits: Any, pack_gqa: Any, sm_margin: Any,
) -> Any:  # fmt: skip
    """The tiles of a step, for all its layers, as ``torch.ops.sgl_kernel.get_scheduler_metadata`` is called."""
    assert attention_chunk == 0
    return _METADATA(
        batch_size, max_seqlen_q, _WIDTH, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype, seqused_k,
        cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, page_size, max_seqlen_k_new, causal,
        window_left, window_right, has_softcap, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip
