"""One round's attention metadata as sglang makes it, per format, on CPU or CUDA tensors: what `bench_formats.py` and
``gpu/formats.py`` time, and the closed forms that its arrays are checked against.

A round is what specrs plans as well: the slots of the draft region, the metadata of draft steps 0..S-2 (step S-1 runs
no model), the verification's slots, mask and metadata, and draft_extend's. The configuration is sglang's own with
CUDA graphs: static buffers, host lengths given, every request extended by V tokens in draft_extend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from peer_sources import Sglang

K, S, V, L = 8, 6, 64, 8192


@dataclass
class Inputs:
    """A batch in the middle of a round."""

    page: int
    table: np.ndarray
    """Slots by row position, int32 [B, width]."""
    lens: np.ndarray
    """Committed lengths, int64 [B]."""
    ancestors: np.ndarray
    """True where node j is node i or above it, bool [B, V, V]."""

    @classmethod
    def random(cls, batch: int, page: int, length: int = L) -> Inputs:
        """Lengths within 500 of ``length``, pages in no order, trees of V nodes of depth up to S."""
        rng = np.random.default_rng(batch)
        lens = rng.integers(max(length - 500, length // 2), length + 500, batch)
        branch = -(-(page - 1 + S) // page) * page
        reserve = 2 * max(branch * K if page > 1 else K * S, V)
        pages = -(-(length + 500 + reserve + page) // page)
        order = rng.permutation(batch * pages).reshape(batch, pages) + 1
        table = (order[:, :, None] * page + np.arange(page)).reshape(batch, -1).astype(np.int32)
        ancestors = np.zeros((batch, V, V), dtype=bool)
        for i in range(batch):
            depth = np.zeros(V, dtype=int)
            ancestors[i, 0, 0] = True
            for j in range(1, V):
                parent = rng.integers(j)
                while depth[parent] >= S:
                    parent = rng.integers(j)
                depth[j] = depth[parent] + 1
                ancestors[i, j] = ancestors[i, parent]
                ancestors[i, j, j] = True
        return cls(page, table, lens, ancestors)

    @property
    def holey(self) -> bool:
        """True if branches start at pages of their own."""
        return self.page > 1

    def draft_slots(self) -> np.ndarray:
        """Slots of each branch's steps by the closed forms of the two layouts, int32 [B, K, S]."""
        rest = self.lens % self.page
        stride = -(-(rest + S) // self.page) * self.page if self.holey else np.full_like(rest, S)
        first = self.lens[:, None] + np.arange(K) * stride[:, None]
        columns = (first[:, :, None] + np.arange(S)).reshape(len(self.lens), -1)
        return np.take_along_axis(self.table, columns, 1).reshape(-1, K, S)


class Mode:
    """A forward mode as the backends ask for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode_or_idle(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "extend"

    def is_idle(self) -> bool:
        return False


class Round(ABC):
    """The parts of a round that all formats share: the batch, the draft's slots, the tree's mask, the verification's
    slots."""

    name = ""
    mask_dtype: torch.dtype | None = torch.bool
    """Type of the mask's static buffer; None where the backend has none and a tensor is made for each round."""

    def __init__(self, peer: Sglang, inputs: Inputs, device: str = "cpu", context: int = 2 * L) -> None:
        self.peer, self.inputs, self.device = peer, inputs, device
        self.batch, self.page, self.context = len(inputs.lens), inputs.page, context
        self.table = torch.from_numpy(inputs.table).to(device)
        self.host_lens = torch.from_numpy(inputs.lens)
        self.lens = self.host_lens.to(device)
        self.lens_sum = int(inputs.lens.sum())
        self.rows = torch.arange(self.batch, device=device)
        self.positions = self.lens.repeat_interleave(K)
        branch = -(-(self.page - 1 + S) // self.page) * self.page
        self.reserve = 2 * max(branch * K if inputs.holey else K * S, V)
        self.reqs = [
            SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n, kv_allocated_len=-(-n // self.page) * self.page))
            for n in inputs.lens.tolist()
        ]
        self.schedule = SimpleNamespace(
            forward_mode=Mode("decode"),
            seq_lens=self.lens,
            seq_lens_cpu=self.host_lens,
            req_pool_indices=self.rows,
            token_to_kv_pool_allocator=SimpleNamespace(page_size=self.page),
            device=device,
            multimodal_inputs=[],
            out_cache_loc=None,
        )
        self.runner = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(move_kv_cache=lambda *_: None),  # the KV copy itself is left out
            spec_algorithm=SimpleNamespace(is_standalone=lambda: False),
            model_config=SimpleNamespace(model_is_mrope=False),
        )
        self.translator = peer.translator()
        self.translator.req_to_token = self.table
        # The buffer is as large as the batch needs; the backends' own buffers span the whole context.
        cells = V * (self.lens_sum + V * self.batch)
        self.mask_buf = torch.zeros(cells, dtype=self.mask_dtype, device=device) if self.mask_dtype else None
        self.lists = self._draft_lists()
        self.forward = SimpleNamespace(
            batch_size=self.batch,
            seq_lens=self.lens,
            seq_lens_sum=self.lens_sum,
            seq_lens_cpu=self.host_lens,
            req_pool_indices=self.rows,
            positions=self.positions,
            kv_loc_plan=None,
            spec_info=SimpleNamespace(is_draft_input=lambda: True),
        )

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A static buffer."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def stages(self) -> dict[str, Callable[[], object]]:
        """The round's functions in their order, under the peer's own names."""
        return {
            "page_aligned_decode_alloc_lens": self.alloc_lens,
            "prepare_for_draft": self.prepare,
            "draft metadata": self.draft,
            "build_tree_kernel_efficient": self.tree,
            "assign_extend_cache_locs_uniform": self.verify_slots,
            "verify metadata": self.verify,
            "draft_extend metadata": self.extend,
        }

    def run(self) -> None:
        """The whole round."""
        for stage in self.stages().values():
            stage()

    def alloc_lens(self) -> object:
        return self.peer.alloc_lens(self.reqs, reserve=self.reserve, page_size=self.page)

    def prepare(self) -> None:
        pool = SimpleNamespace(req_to_token=self.table)
        self.peer.prepare_for_draft(SimpleNamespace(), pool, self.schedule, None, self.runner, K, S)
        self.slots = self.schedule.out_cache_loc

    def _draft_lists(self) -> tuple[Any, ...]:
        """Parents, scores and tokens that a draft leaves behind; on a CPU the tree itself is given (see `tree`)."""
        tokens = torch.zeros(self.batch, V - 1, dtype=torch.int64, device=self.device)
        if self.device == "cpu":
            return torch.empty(0), torch.empty(0), tokens
        generator = torch.Generator().manual_seed(self.batch)
        # Step 0 has K nodes, each later step K of K*K candidates, which the lists number from one to the next.
        parents = [torch.arange(-1, K).expand(self.batch, -1)]
        scores = torch.rand(self.batch, K + (S - 1) * K * K, generator=generator)
        heads, first = torch.arange(K).expand(self.batch, -1), K
        for t in range(1, S):
            # A node scores below its parent, which is therefore among the chosen where the node is.
            scores[:, first : first + K * K] *= scores.gather(1, heads).repeat_interleave(K, 1)
            picks = [torch.randperm(K * K, generator=generator)[:K].sort().values for _ in range(self.batch)]
            heads, first = torch.stack(picks) + first, first + K * K
            if t < S - 1:
                parents.append(heads)
        chosen = scores.topk(V - 1, 1).indices.sort(1).values
        return torch.cat(parents, 1).to(self.device), chosen.to(self.device), tokens

    def adopt_tree(self) -> None:
        """Take the ancestors from the mask that the peer's kernel builds on a GPU."""
        self.tree()
        mask, first = self.mask.cpu().numpy().view(bool), 0
        for i, n in enumerate(self.inputs.lens.tolist()):
            size = V * (n + V)
            self.inputs.ancestors[i] = mask[first : first + size].reshape(V, n + V)[:, n:]
            first += size

    def tree(self) -> None:
        """Links, positions and the mask over the context. On a CPU the kernel's walk is spared: its part of the mask
        and its positions are copied from the inputs."""
        if self.device == "cpu":
            self.peer.tree_names["build_tree_kernel_efficient_func"] = self._tree_cells
        lists, chosen, tokens = self.lists
        bonus = tokens[:, 0]
        self.mask, self.tree_positions = self.peer.build_tree(
            bonus,
            lists,
            chosen,
            tokens,
            self.lens,
            self.lens_sum,
            K,
            S,
            V,
            self.peer.tree.TreeMaskMode.FULL_MASK,
            self.mask_buf,
        )[:2]

    def _tree_cells(
        self, lists: Any, chosen: Any, lens: Any, mask: torch.Tensor, positions: torch.Tensor, *_: Any
    ) -> None:
        if not hasattr(self, "_cells"):
            self._cells = self.inputs.ancestors
            self._depths = torch.from_numpy(self._cells.sum(2) - 1)
        first, cells = 0, mask.numpy()
        for i, n in enumerate(lens.tolist()):
            size = V * (n + V)
            cells[first : first + size].reshape(V, n + V)[:, n:] = self._cells[i]
            first += size
        torch.add(self._depths, lens[:, None], out=positions.view(-1, V))

    def verify_slots(self) -> None:
        self.verify_locs = self.peer.extend_locs(
            req_pool_indices=self.rows,
            req_to_token=self.table,
            start_offset=self.lens,
            batch_size=self.batch,
            draft_token_num=V,
            device=self.device,
        )

    @abstractmethod
    def draft(self) -> None:
        """The arrays of this pass."""

    @abstractmethod
    def verify(self) -> None:
        """The arrays of this pass."""

    @abstractmethod
    def extend(self) -> None:
        """The arrays of this pass."""

    @abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that the round left, under specrs's names: ``phase.array``."""


def live(table: torch.Tensor, counts: torch.Tensor) -> np.ndarray:
    """The entries of a table's rows that its lengths cover, row after row."""
    counts = counts.cpu().long()
    columns = torch.arange(table.shape[1])
    return table.cpu()[columns < counts[:, None]].numpy()


class FlashAttention(Round):
    """sglang's FA3 backend: prefix pass and expand pass."""

    name = "flash_attention"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        b, page = self.batch, self.page
        pages = -(-self.context // page)
        strided = torch.arange(0, self.context, page, device=self.device)
        meta = lambda **k: SimpleNamespace(max_seq_len_k=0, max_seq_len_q=0, swa_page_table=None, **k)  # noqa: E731
        base: dict[str, Any] = {
            "topk": K,
            "page_size": page,
            "speculative_num_steps": S,
            "speculative_num_draft_tokens": V,
            "req_to_token": self.table,
            "max_context_len": self.context,
            "is_prefill_aware_swa": False,
            "has_swa": False,
            "local_attn_builder": None,
            "use_sliding_window_kv_pool": False,
            "kv_index_translator": SimpleNamespace(reads_are_translated=False),
            "decode_cuda_graph_metadata": {"strided_indices": strided},
        }
        self.steps = []
        for t in range(S - 1):
            step = SimpleNamespace(**base, speculative_step_id=t)
            step.draft_decode_metadata_topk_normal = {
                b: meta(cache_seqlens_int32=self.zeros(b), page_table=self.zeros(b, pages))
            }
            step.draft_decode_metadata_topk_expand = {
                b: meta(cache_seqlens_int32=self.zeros(b * K) + t + 1, page_table=self.zeros(b * K, t + 2))
            }
            self.steps.append(step)
        target = self.target = SimpleNamespace(**base, speculative_step_id=0)
        target.target_verify_metadata_topk_normal = {
            b: meta(cache_seqlens_int32=self.zeros(b), cu_seqlens_k=self.zeros(b + 1), page_table=self.zeros(b, pages))
        }
        target.target_verify_metadata_topk_expand = {
            b: meta(
                cache_seqlens_int32=self.zeros(b * V),
                cu_seqlens_k=self.zeros(b * V + 1),
                page_table=self.zeros(b * V, V),
            )
        }
        target.draft_extend_metadata = {
            "strided_indices": strided,
            b: meta(
                cache_seqlens_int32=self.zeros(b),
                cu_seqlens_k=self.zeros(b + 1),
                cu_seqlens_q=self.zeros(b + 1),
                page_table=self.zeros(b, pages),
            ),
        }

    def _apply(
        self, backend: Any, mode: str, lens: torch.Tensor, host_lens: torch.Tensor, info: Any, locs: Any
    ) -> None:
        self.peer.flash_attention(backend, None, self.batch, self.rows, lens, None, Mode(mode), info, host_lens, locs)

    def draft(self) -> None:
        for step in self.steps:
            self._apply(step, "decode", self.lens, self.host_lens, SimpleNamespace(), self.slots)

    def verify(self) -> None:
        info = SimpleNamespace(custom_mask=self.mask, positions=self.tree_positions)
        self._apply(self.target, "verify", self.lens, self.host_lens, info, self.verify_locs)

    def extend(self) -> None:
        # draft_extend's ForwardBatch has the lengths after the extension.
        self._apply(
            self.target, "extend", self.lens + V, self.host_lens + V, SimpleNamespace(num_tokens_per_req=V), None
        )

    def arrays(self) -> dict[str, np.ndarray]:
        self.run()
        b, page, out = self.batch, self.page, {}

        def put(phase: str, meta: Any, unit: int, prefix: str = "") -> None:
            lens = meta.cache_seqlens_int32
            out[f"{phase}.{prefix}cache_seqlens"] = lens.cpu().numpy()
            out[f"{phase}.{prefix}page_table"] = live(meta.page_table, -(-lens // unit))

        for t, step in enumerate(self.steps):
            put(f"draft{t}", step.draft_decode_metadata_topk_normal[b], page)
            put(f"draft{t}", step.draft_decode_metadata_topk_expand[b], page, "expand_")
        put("verify", self.target.target_verify_metadata_topk_normal[b], page)
        put("verify", self.target.target_verify_metadata_topk_expand[b], 1, "expand_")
        put("extend", self.target.draft_extend_metadata[b], page)
        return out


class Triton(Round):
    """sglang's Triton backend: indices per branch, int64."""

    name = "triton"
    mask_dtype = torch.uint8

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        b = self.batch
        width = (
            K * self.lens_sum + b * K * S
        )  # the least that its kernel writes; its own buffer is K * B * context wide
        self.multi = SimpleNamespace(
            topk=K,
            speculative_num_steps=S,
            kv_indptr=self.zeros(S, b * K + 1),
            cuda_graph_kv_indices=self.zeros(S, width, dtype=torch.int64),
            cuda_graph_window_kv_indices=None,
            page_size=self.page,
            draft_window_size=0,
            draft_sink_size=0,
            kv_index_translator=self.translator,
            window_rail=False,
            max_context_len=self.context,
        )
        target = self.target = self.peer.triton()
        self.extended = torch.full((b,), V, device=self.device)
        target.device, target.num_draft_tokens, target.speculative_num_steps = self.device, V, S
        target.target_verify_num_tokens_per_req, target.sliding_window_size = V, None
        target.window_kv_indptr = None
        target.kv_index_translator = self.translator
        target.qo_indptr, target.kv_indptr = self.zeros(b + 1, dtype=torch.int64), self.zeros(b + 1)
        target.mask_indptr = self.zeros(b + 1, dtype=torch.int64)
        target.cuda_graph_kv_indices = self.zeros(self.lens_sum, dtype=torch.int64)
        # The mask is built in the backend's own buffer, so that the copy of the branch below does not happen.
        target._verify_mask = SimpleNamespace(buffer=self.mask_buf)

    def draft(self) -> None:
        self.peer.triton_draft(self.multi, self.forward, None, None)

    def verify(self) -> None:
        info = SimpleNamespace(num_tokens_per_req=V, custom_mask=self.mask)
        self.verified = self.target._update_target_verify_buffers(None, self.batch, self.lens, info, self.rows)
        if self.keep:
            self.copies["verify"] = [
                x.clone() for x in (*self.verified[:2], self.target.cuda_graph_kv_indices, self.verified[3])
            ]

    keep = False

    def extend(self) -> None:
        info = SimpleNamespace(extend_seq_lens_tensor=self.extended)
        self.target._update_draft_extend_buffers(None, self.batch, self.lens + V, Mode("extend"), info, self.rows)

    def arrays(self) -> dict[str, np.ndarray]:
        self.keep, self.copies = True, {}  # verify and extend share buffers
        self.run()
        self.keep = False
        out = {}
        for t in range(S - 1):
            used = self.peer.used_len(self.lens_sum, K, self.batch * K, t + 1)
            out[f"draft{t}.kv_indptr"] = self.multi.kv_indptr[t].cpu().numpy()
            out[f"draft{t}.kv_indices"] = self.multi.cuda_graph_kv_indices[t, :used].cpu().numpy()
        names = ("qo_indptr", "kv_indptr", "kv_indices", "mask_indptr")
        out |= {f"verify.{n}": x.cpu().numpy() for n, x in zip(names, self.copies["verify"], strict=True)}
        out["verify.custom_mask"] = self.mask.cpu().numpy().view(np.uint8)
        for name in ("qo_indptr", "kv_indptr"):
            out[f"extend.{name}"] = getattr(self.target, name).cpu().numpy()
        out["extend.kv_indices"] = self.target.cuda_graph_kv_indices.cpu().numpy()
        # The peer calls it out_cache_loc; draft_extend writes the verification's window again.
        out["verify.extend_slots"] = out["extend.extend_slots"] = self.verify_locs.cpu().numpy()
        return out
