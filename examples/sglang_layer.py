"""sglang's own attention layer over specrs's pages and plans.

The engine is that of `foreign_engine.py`; its attention is sglang's `RadixAttention`, run by sglang's Triton backend.
specrs owns the pages: each pass's arrays of the format "triton" (kv_indptr, kv_indices, custom_mask) take the place of
the metadata that sglang makes out of its own tables of requests, and the layer writes keys and values to the slots that
the plan gives. With the same greedy tokens as a model without cache, which `main` checks.

sglang's backend is made as sglang makes it, out of the few sizes of a model runner that it reads. Seen to run with
sglang 0.5.14 on an H200 with `--device cuda`, and on the CPU by Triton's interpreter (TRITON_INTERPRET=1). It needs
sglang and its dependencies, on the CPU without sglang-kernel.

    TRITON_INTERPRET=1 python examples/sglang_layer.py
    python examples/sglang_layer.py --device cuda
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch
from foreign_engine import DIM, HEADS, LAYERS, Model, decode
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.triton_backend import ForwardMetadata, TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel

from specrs import Plan

MODES = {"extend": ForwardMode.EXTEND, "verify": ForwardMode.TARGET_VERIFY}  # a root alone decodes plainly


class Slots:
    """The methods of a pool of keys and values that sglang's layers call, over an engine's one tensor."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache = cache

    def set_kv_buffer(self, layer: RadixAttention, where, k: torch.Tensor, v: torch.Tensor, *scales: None) -> None:
        slots = getattr(where, "loc", where)
        self.cache[layer.layer_id, 0, slots], self.cache[layer.layer_id, 1, slots] = k, v

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.cache[layer, 0]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.cache[layer, 1]


class Layers:
    """sglang's layers of a model and their backend, for plans of the format "triton"."""

    def __init__(self, requests: int, context: int, device: str) -> None:
        options = SimpleNamespace(
            speculative_num_draft_tokens=None, speculative_num_steps=None, speculative_eagle_topk=None,
            triton_attention_num_kv_splits=8, triton_attention_split_tile_size=None, chunked_prefill_size=8192,
            enable_deterministic_inference=False,
        )  # fmt: skip
        sizes = SimpleNamespace(
            attention_arch=AttentionArch.MHA, num_attention_heads=HEADS, get_num_kv_heads=lambda _: HEADS,
            v_head_dim=DIM, swa_v_head_dim=None, context_len=context, is_encoder_decoder=False,
        )  # fmt: skip
        runner = SimpleNamespace(
            server_args=options, model_config=sizes, sliding_window_size=None, device=device, gpu_id=0,
            hybrid_gdn_config=None, kimi_linear_config=None, linear_attn_model_spec=None,
            req_to_token_pool=SimpleNamespace(size=requests, req_to_token=None), token_to_kv_pool_allocator=None,
            token_to_kv_pool=SimpleNamespace(get_value_buffer=lambda _: torch.empty(0, HEADS, DIM)),
        )  # fmt: skip
        with get_parallel().override(attn_tp_size=1):
            self.backend = TritonAttnBackend(runner)
        self.layers = [RadixAttention(HEADS, DIM, DIM**-0.5, HEADS, layer) for layer in range(LAYERS)]
        self.device = device

    def attention(self, plan: Plan, cache: torch.Tensor):
        """The attention of a pass, as `foreign_engine.decode` calls it."""
        arrays = {name: torch.from_dlpack(a).to(self.device) for name, a in plan.arrays().items()}
        mask = arrays.get("custom_mask")  # an extend is causal
        self.backend.token_to_kv_pool = Slots(cache)
        self.backend.forward_metadata = ForwardMetadata(
            kv_indptr=arrays["kv_indptr"], kv_indices=arrays["kv_indices"], qo_indptr=arrays["qo_indptr"],
            custom_mask=None if mask is None else mask.bool(), mask_indptr=arrays.get("mask_indptr"),
            max_extend_len=plan.queries, attn_logits=None, attn_lse=None, num_kv_splits=None, window_kv_indptr=None,
            window_kv_indices=None, window_num_kv_splits=None, window_kv_offsets=None,
        )  # fmt: skip
        slots = torch.from_dlpack(plan.out_slots).long().to(self.device)
        batch = SimpleNamespace(forward_mode=MODES[plan.phase], out_cache_loc=slots)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with forward_context(ForwardContext(self.backend)):
                return self.layers[layer](q.reshape(len(q), -1), k.contiguous(), v.contiguous(), batch)

        return attend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    model = Model(seed=3, device=args.device)
    prompts = [[1, 2, 3, 1, 2, 3, 1], [7] * 5, [11, 4, 9, 30, 4, 9]]
    layers = Layers(len(prompts), 256, args.device)
    outputs, rounds = decode(model, prompts, args.tokens, layers.attention, "triton")
    assert outputs == [model.plain(p, args.tokens) for p in prompts], "speculation must not change the tokens"
    print(
        f"{len(prompts)} requests, {args.tokens} tokens each in {rounds} rounds; the tokens are those of plain decoding"
    )


if __name__ == "__main__":
    main()
