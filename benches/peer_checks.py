"""The closed forms of every format's arrays for a round, straight from the definitions; peers' arrays and specrs's are
both compared with them. Plain numpy, one request after another; for the formats' meaning see ``docs/`` and the Rust
module ``plan::formats``."""

from __future__ import annotations

from typing import Any

import numpy as np

from peer_rounds import Inputs, K, S, V


def indptr(counts: np.ndarray) -> np.ndarray:
    """Offsets of parts of these sizes."""
    return np.concatenate([[0], np.cumsum(counts)])


def per_request(inputs: Inputs, extra: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and slots of each request's first ``L_i + extra`` positions."""
    slots = [inputs.table[i, : n + extra] for i, n in enumerate(inputs.lens)]
    return indptr(inputs.lens + extra), np.concatenate(slots)


def per_branch(inputs: Inputs, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and slots of draft step ``step``: each branch's prefix, then its own lane's slots of steps
    0..step."""
    own = inputs.draft_slots()
    slots = [
        np.concatenate([inputs.table[i, :n], own[i, b, : step + 1]])
        for i, n in enumerate(inputs.lens)
        for b in range(K)
    ]
    return indptr(np.repeat(inputs.lens + step + 1, K)), np.concatenate(slots)


def mask(inputs: Inputs) -> list[np.ndarray]:
    """Return each request's mask over its context and its tree, bool [V, L_i + V]."""
    return [
        np.concatenate([np.ones((V, n), dtype=bool), inputs.ancestors[i]], axis=1) for i, n in enumerate(inputs.lens)
    ]


def flashinfer(inputs: Inputs) -> dict[str, np.ndarray]:
    """FlashInfer's arrays."""
    batch, out = len(inputs.lens), {}
    for t in range(S - 1):
        out[f"draft{t}.kv_indptr"], out[f"draft{t}.kv_indices"] = per_branch(inputs, t)
    for phase in ("verify", "extend"):
        out[f"{phase}.qo_indptr"] = np.arange(batch + 1) * V
        out[f"{phase}.kv_indptr"], out[f"{phase}.kv_indices"] = per_request(inputs, V)
    masks = mask(inputs)
    packed = [np.packbits(m.reshape(-1), bitorder="little") for m in masks]
    out["verify.custom_mask"] = np.concatenate([m.reshape(-1) for m in masks]).astype(np.uint8)
    out["verify.mask_indptr"] = indptr(np.array([m.size for m in masks]))
    out["verify.packed_custom_mask"] = np.concatenate(packed)
    out["verify.packed_mask_indptr"] = indptr(np.array([len(p) for p in packed]))
    return out


def triton(inputs: Inputs) -> dict[str, np.ndarray]:
    """Triton's arrays: verify and draft_extend read only the prefix through their indices."""
    batch, out = len(inputs.lens), {}
    for t in range(S - 1):
        out[f"draft{t}.kv_indptr"], out[f"draft{t}.kv_indices"] = per_branch(inputs, t)
    for phase in ("verify", "extend"):
        out[f"{phase}.qo_indptr"] = np.arange(batch + 1) * V
        out[f"{phase}.kv_indptr"], out[f"{phase}.kv_indices"] = per_request(inputs, 0)
        slots = [inputs.table[i, n : n + V] for i, n in enumerate(inputs.lens)]
        out[f"{phase}.extend_slots"] = np.concatenate(slots)
    masks = [m.reshape(-1) for m in mask(inputs)]
    out["verify.custom_mask"] = np.concatenate(masks).astype(np.uint8)
    out["verify.mask_indptr"] = indptr(np.array([len(m) for m in masks]))
    return out


def flash_attention(inputs: Inputs) -> dict[str, np.ndarray]:
    """Return FlashAttention's arrays; of each table only the entries that the lengths cover, row after row."""
    page, out = inputs.page, {}
    rest = inputs.lens % page
    base = inputs.lens - rest if inputs.holey else inputs.lens

    def put(phase: str, lens: np.ndarray) -> None:
        """A pass over the first ``lens`` positions, by pages."""
        out[f"{phase}.cache_seqlens"] = lens
        rows = [inputs.table[i, : -(-n // page) * page : page] // page for i, n in enumerate(lens)]
        out[f"{phase}.page_table"] = np.concatenate(rows)

    for t in range(S - 1):
        put(f"draft{t}", base)
        out[f"draft{t}.expand_cache_seqlens"] = np.repeat(
            rest + t + 1 if inputs.holey else np.full_like(rest, t + 1), K
        )
        # A branch's slots lie in consecutive pages; the first holds the copy of the prefix's tail as well.
        rows = [
            list(dict.fromkeys((own[: t + 1] // page).tolist()))
            for branches in inputs.draft_slots()
            for own in branches
        ]
        out[f"draft{t}.expand_page_table"] = np.concatenate(rows)
    put("verify", inputs.lens)
    out["verify.expand_cache_seqlens"] = inputs.ancestors.sum(2).reshape(-1)
    tree = [inputs.table[i, n : n + V] for i, n in enumerate(inputs.lens)]
    rows = [tree[i][inputs.ancestors[i, q]] for i in range(len(tree)) for q in range(V)]
    out["verify.expand_page_table"] = np.concatenate(rows)
    put("extend", inputs.lens + V)
    return out


def closed_form(name: str, inputs: Inputs) -> dict[str, np.ndarray]:
    """A format's arrays by name."""
    return {"flashinfer": flashinfer, "triton": triton, "flash_attention": flash_attention}[name](inputs)


def differences(got: dict[str, Any], want: dict[str, np.ndarray]) -> list[str]:
    """Return the differences in words; every array of either side must be on the other."""
    said = [f"{n} is on one side only" for n in sorted(set(got) ^ set(want))]
    for name in sorted(set(got) & set(want)):
        a, b = np.asarray(got[name]).reshape(-1), want[name].reshape(-1)
        if len(a) != len(b):
            said.append(f"{name}: {len(a)} entries, want {len(b)}")
        elif not np.array_equal(a, b):
            at = int(np.argmax(a != b))
            said.append(f"{name}[{at}]: {a[at]}, want {b[at]}")
    return said
