"""One round of sglang's FlashInfer backend, with FlashInfer's own ``plan`` and its copies into the wrappers' buffers.

``plan`` also schedules the kernel's work on the GPU, by a C++ function that needs one. Its arrays are no part of the
format (who brings indices of specrs's calls it as well), so on CPU tensors this function is left out and everything
around it runs; on a GPU it runs, and `Round.stages` times it apart.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any, Optional, Union

import numpy as np
import torch

from common import unpack, wheel
from peer_rounds import K, Round, S, V
from peer_sources import FLASHINFER, FLASHINFER_FILES, Sglang, extract

HEADS, KV_HEADS, DIM = 32, 8, 128


class _Torch:
    """A stand-in for torch whose ``torch.cuda.device`` selects nothing."""

    cuda = SimpleNamespace(device=lambda _: contextlib.nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _pack(mask: torch.Tensor, indptr: torch.Tensor, packed_indptr: torch.Tensor, order: str, out: torch.Tensor) -> None:
    """numpy in the place of the kernel of ``segment_packbits``, whose documentation names numpy's as its meaning."""
    bits, bounds, target = mask.numpy(), indptr.tolist(), out.numpy()
    for first, last, at in zip(bounds, bounds[1:], packed_indptr.tolist(), strict=False):
        packed = np.packbits(bits[first:last], bitorder="little" if order == "little" else "big")
        target[at : at + len(packed)] = packed


class Functions:
    """FlashInfer's planning functions on CPU tensors, unchanged but for the GPU scheduler."""

    def __init__(self) -> None:
        root = unpack(wheel("flashinfer-python", FLASHINFER), FLASHINFER_FILES) / "flashinfer"
        scheduler = SimpleNamespace(plan=lambda *_: None)
        names: dict[str, Any] = {
            "torch": torch,
            "functools": functools,
            "Optional": Optional,
            "Union": Union,
            "PosEncodingMode": {"NONE": SimpleNamespace(value=0)},
            "get_batch_prefill_module": lambda *_: scheduler,
            "_nvfp4_kv_requires_disabled_split_kv": lambda *_: False,
            "_eagle_verify_fp8kv_sm90_prepare": lambda *_, **__: None,  # for fp8 caches only
            "_cache_buf": {},
            "get_quantization_module": lambda: SimpleNamespace(segment_packbits=_pack),
        }
        extract(
            root / "utils.py",
            ["_ceil_pow2", "_get_range_buf", "canonicalize_torch_dtype", "_check_workspace_buffer_alignment"],
            names,
        )
        extract(root / "page.py", ["get_seq_lens"], names)
        extract(root / "quantization" / "packbits.py", ["segment_packbits"], names)
        helpers = ["_compute_page_mask_indptr", "_resolve_uniform_q_len", "_host_uniform_q_len"]
        extract(root / "prefill.py", helpers, names)
        self.prefill_plan = extract(root / "prefill.py", ["plan"], names, "BatchPrefillWithPagedKVCacheWrapper").plan
        self.fast_decode_plan = extract(
            root / "decode.py", ["fast_decode_plan"], {**names, "torch": _Torch()}
        ).fast_decode_plan
        self.mask_indptr = names["_compute_page_mask_indptr"]
        self.scheduler = scheduler

    def _wrapper(self, rows: int, **buffers: Any) -> SimpleNamespace:
        """Return the attributes that the planning functions read of a wrapper that was made for CUDA graphs, its first
        plan behind it."""
        work = torch.empty(0, dtype=torch.uint8)
        return SimpleNamespace(
            device=torch.device("cpu"),
            is_cuda_graph_enabled=True,
            use_tensor_cores=True,
            _backend="fa2",
            _requested_backend="fa2",
            _cudnn_auto=False,
            _cached_module=self.scheduler,
            _jit_module=None,
            _variant_owns_mask=False,
            _fixed_batch_size=rows,
            _max_total_num_rows=None,
            _float_workspace_buffer=work,
            _int_workspace_buffer=work,
            _pin_memory_int_workspace_buffer=work,
            _kv_lens_buffer=torch.empty(32768, dtype=torch.int32),
            **buffers,
        )

    def decoder(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> Any:
        """A wrapper of a draft step."""
        return self._wrapper(
            len(last), _paged_kv_indptr_buf=indptr, _paged_kv_indices_buf=indices, _paged_kv_last_page_len_buf=last
        )

    def prefill(
        self, qo: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *mask: torch.Tensor
    ) -> Any:
        """A wrapper of verify (with the buffers of the packed mask and its offsets) or of draft_extend."""
        bits, bounds = mask or (None, None)
        wrapper = self._wrapper(
            len(last),
            _qo_indptr_buf=qo,
            _paged_kv_indptr_buf=indptr,
            _paged_kv_indices_buf=indices,
            _paged_kv_last_page_len_buf=last,
            _custom_mask_buf=bits,
            _mask_indptr_buf=bounds,
        )
        wrapper.begin_forward = functools.partial(self.prefill_plan, wrapper)
        return wrapper


class Device:
    """FlashInfer's real wrappers on a GPU."""

    def __init__(self) -> None:
        from flashinfer import decode, prefill

        self._decode, self._prefill = decode, prefill
        self.fast_decode_plan = decode.fast_decode_plan
        self.mask_indptr = prefill._compute_page_mask_indptr
        self._work = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")

    def decoder(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> Any:
        """A wrapper of a draft step."""
        return self._decode.BatchDecodeWithPagedKVCacheWrapper(
            self._work,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
            backend="fa2",
        )

    def prefill(
        self, qo: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *mask: torch.Tensor
    ) -> Any:
        """A wrapper of verify (with the buffers of the packed mask and its offsets) or of draft_extend."""
        extra = {"custom_mask_buf": mask[0], "mask_indptr_buf": mask[1]} if mask else {}
        return self._prefill.BatchPrefillWithPagedKVCacheWrapper(
            self._work,
            "NHD",
            use_cuda_graph=True,
            backend="fa2",
            qo_indptr_buf=qo,
            paged_kv_indptr_buf=indptr,
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last,
            **extra,
        )


class FlashInfer(Round):
    """sglang's FlashInfer backend: indices per branch, int32, and a mask over the context."""

    name = "flashinfer"
    mask_dtype = None  # a new tensor each round

    def __init__(self, peer: Sglang, *args: Any, functions: Functions | Device | None = None, **kwargs: Any) -> None:
        super().__init__(peer, *args, **kwargs)
        b, f = self.batch, functions or Functions()
        self.plans, self.mask_indptr = peer.flashinfer, f.mask_indptr
        self.plans.names["fast_decode_plan"] = f.fast_decode_plan
        self.last = torch.ones(b * K, dtype=torch.int32, device=self.device)
        width = (
            K * self.lens_sum + b * K * S
        )  # the least that its kernel writes; its own buffer is K * B * context wide
        self.kv_indices = self.zeros(S, width)
        self.multi = SimpleNamespace(
            topk=K,
            speculative_num_steps=S,
            kv_indptr=self.zeros(S, b * K + 1),
            page_size=self.page,
            pool_len=self.table.shape[1],
            draft_window_size=0,
            draft_sink_size=0,
            kv_index_translator=self.translator,
            generate_draft_decode_kv_indices=peer.kernels.locs.generate_draft_decode_kv_indices,
        )
        self.updater = SimpleNamespace(
            attn_backend=SimpleNamespace(kv_index_translator=self.translator),
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            kv_last_page_len=self.last,
            q_data_type=torch.bfloat16,
            data_type=torch.bfloat16,
        )
        tokens = self.lens_sum + b * V
        self.packed = self.zeros(V * tokens // 8 + b, dtype=torch.uint8)
        self.packed_indptr = self.zeros(b + 1)

        def prefill(*mask: torch.Tensor) -> Any:
            ones = self.last[:b].clone()
            return f.prefill(self.zeros(b + 1), self.zeros(b + 1), self.zeros(tokens), ones, *mask)

        self.decoders = [f.decoder(self.multi.kv_indptr[t], self.kv_indices[t], self.last) for t in range(S - 1)]
        self.verifier, self.extender = prefill(self.packed, self.packed_indptr), prefill()
        self.mask = None
        if isinstance(f, Device):  # the first plans are full ones, at the capture of the graphs
            self.prepare()
            self.tree()
            self.draft()
            self.verify()
            self.extend()
        for wrapper in self.decoders:
            wrapper.begin_forward = functools.partial(f.fast_decode_plan, wrapper)
        self.extender.begin_forward = functools.partial(self.plans.fast_prefill_plan, self.extender)

    def _draft_step(self, step: int, forward: Any) -> None:
        """Use the indices that `common_template` made as a step's backend does: plan its wrapper."""
        self.plans.decode(
            self.updater,
            self.decoders[step],
            self.lens,
            self.lens_sum,
            None,
            None,
            forward.spec_info,
            self.host_lens,
            disable_split_kv=False,
            plan=None,
            req_pool_indices=self.rows,
        )

    def draft(self) -> None:
        self.plans.draft(self.multi, self.forward, self.kv_indices, self._draft_step)

    def draft_indptr(self) -> object:
        """The host's own copy of the draft's offsets; on CPU tensors the option that asks for it is off."""
        return self.plans.draft_indptr(self.host_lens, K, S)

    def _prefill(self, wrapper: Any, lens: torch.Tensor, total: int, host_lens: torch.Tensor, info: Any) -> None:
        self.plans.prefill(
            self.updater,
            None,
            wrapper,
            self.rows,
            lens,
            total,
            lens,
            None,
            None,
            None,
            None,
            False,
            info,
            seq_lens_cpu=host_lens,
            plan=None,
        )

    def verify(self) -> None:
        info = SimpleNamespace(spec_input_type="verify", num_tokens_per_req=V, draft_token_num=V, custom_mask=self.mask)
        info.generate_attn_arg_prefill = functools.partial(self.peer.verify_args, info)
        self._prefill(self.verifier, self.lens, self.lens_sum, self.host_lens, info)

    def extend(self) -> None:
        info = SimpleNamespace(spec_input_type="extend", num_tokens_per_req=V, num_correct_drafts=self.rows)
        info.generate_attn_arg_prefill = functools.partial(self.peer.extend_args, info)
        self._prefill(self.extender, self.lens + V, self.lens_sum + V * self.batch, self.host_lens + V, info)

    def arrays(self) -> dict[str, np.ndarray]:
        self.run()
        out = {}
        for t in range(S - 1):
            used = self.peer.used_len(self.lens_sum, K, self.batch * K, t + 1)
            out[f"draft{t}.kv_indptr"] = self.multi.kv_indptr[t]
            out[f"draft{t}.kv_indices"] = self.kv_indices[t, :used]
        for phase, wrapper in (("verify", self.verifier), ("extend", self.extender)):
            out[f"{phase}.qo_indptr"] = wrapper._qo_indptr_buf
            out[f"{phase}.kv_indptr"] = wrapper._paged_kv_indptr_buf
            out[f"{phase}.kv_indices"] = wrapper._paged_kv_indices_buf
        qo, kv = out["verify.qo_indptr"], out["verify.kv_indptr"]
        out["verify.mask_indptr"] = self.mask_indptr(qo, kv, self.last[: self.batch], 1)  # lives in plan() alone
        out["verify.custom_mask"] = self.mask.view(torch.uint8)
        out["verify.packed_mask_indptr"] = self.packed_indptr
        out["verify.packed_custom_mask"] = self.packed[: int(self.packed_indptr[-1])]
        return {name: x.cpu().numpy() for name, x in out.items()}
