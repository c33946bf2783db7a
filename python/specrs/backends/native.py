"""specrs's own kernels, which read the pool's page table and the tree's bits in place."""

from __future__ import annotations

from types import MappingProxyType

from specrs.backends.base import AttentionBackend


class Native(AttentionBackend):
    """The Rust kernels. They take plans themselves, and models have rotary embedding and KV write fused in
    (`specrs.models.HostAttention`), so that there are no arrays to prepare. Results do not depend on the batch, on
    paging or on threads, bit for bit."""

    name = "native"
    format = "native"
    reads = "the pool's page table and the tree's bits in place; a prefix once for all queries"
    topk_above_1 = True
    page_size_above_1 = True
    draft_attention = MappingProxyType({"dense": ("ancestors", "lane")})
    kv_dtypes = ("float32", "bfloat16")
    needs_cpu_seq_lens = False


class NativeCuda(AttentionBackend):
    """The same on a CUDA device (`specrs.models.CudaAttention`), over KV of two bytes an element."""

    name = Native.name
    format = Native.format
    reads = Native.reads
    topk_above_1 = True
    page_size_above_1 = True
    draft_attention = Native.draft_attention
    kv_dtypes = ("bfloat16", "float16")
    needs_cpu_seq_lens = False
