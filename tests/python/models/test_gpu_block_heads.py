"""A head that drafts blocks on a GPU computes what was trained: against a restatement in f64 over the same weights and
features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reference_blocks
from blockrun import Driven
from modelrun import random_tokens
from reference_blocks import Block
from specrs import _specrs as core
from specrs import device
from specrs.models import Placement
from specrs.models.pairs import cuda_ops

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

PLAIN = Block(heads=4, kv_heads=2, head_dim=64, inner=96, vocab=304, rank=16, state=24)
FORMS: dict[str, tuple[str, Block]] = {
    "DFlash": ("DFlash", PLAIN),
    "DFlash, wide": ("DFlash", replace(PLAIN, layers=4, rows=16, streams=(1, 2, 3, 4, 5), biases=True, theta=1e6)),
    "DFlash, 64 rows": ("DFlash", replace(PLAIN, rows=64, kv_heads=1, head_dim=128, qk_norm=False)),
    "DFlash, scales": ("DFlash", replace(PLAIN, embedding_scale=8.0, logit_scale=0.25, cap=3.0)),
    "DFlash of speculators": ("speculators", replace(PLAIN, draft_vocab=80, own_embedding=True)),
    "JetSpec": ("JetSpec", replace(PLAIN, causal=True, rows=16)),
    "DSpark": ("DSpark", replace(PLAIN, anchor=True, markov="vanilla", confidence=True)),
    "DSpark, gated": ("DSpark", replace(PLAIN, anchor=True, markov="gated", draft_vocab=80)),
    "DSpark of DeepSpec": (
        "DeepSpec",
        replace(PLAIN, anchor=True, markov="rnn", rows=7, own_embedding=True, own_scores=True),
    ),
    "Domino": ("Domino", replace(PLAIN, free=1, anchor=True)),
    "DFlash2": ("DFlash2", replace(PLAIN, taps=2, candidates=16)),
    "DFlash2, three taps": (
        "DFlash2", replace(PLAIN, taps=3, group=8, candidates=5, rows=7, own_embedding=True, cap=4.0),
    ),
    "DFlash2 of speculators": ("speculators", replace(PLAIN, taps=3, group=1, candidates=32, causal=False, rows=33)),
}  # fmt: skip


def driven_on_gpu(directory: Path, name: str, dtype: torch.dtype) -> Driven:
    there = Placement(torch.device("cuda", torch.cuda.current_device()), dtype, dtype, torch.float32)
    return Driven(directory, cuda_ops(there, core.TreeShape(1, 31, 32)), *FORMS[name])


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root of the mean square of the errors, by the deviation of what is wanted."""
    return float((got.cpu().double() - want.double()).square().mean().sqrt() / want.double().std())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_a_block_gives_the_trained_logits(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Behind contexts that were written in chunks, and behind one position; a part that is left out is seen."""
    driven = driven_on_gpu(tmp_path, name, dtype)
    tokens, error = random_tokens(42, seed=1), 0.0
    for length, chunks in ((41, (1, 4, 7, 30)), (1, ())):
        seq, features = driven.begin(tokens[:length], chunks)
        got, rows = driven.draft([seq], [length], [tokens[length]])
        want, normed = driven.reference(features.cpu().float(), tokens[length])
        error = max(error, off(got, want), off(rows, normed))
        driven.pool.release([seq])
    print(f"{name} {dtype}: {error:.4f}")
    assert error < (0.12 if dtype == torch.bfloat16 else 0.02), error
    seq, features = driven.begin(tokens[:41])
    got, _ = driven.draft([seq], [41], [tokens[41]])
    for part in ("context", "0.k", "1.v", *(("1.attention.kernel", "0.mlp.base") if driven.block.taps else ())):
        changed = {**driven.weights, part: torch.ones_like(driven.weights[part])}
        driven_weights, driven.weights = driven.weights, changed
        assert off(got, driven.reference(features.cpu().float(), tokens[41])[0]) > 2 * error, part
        driven.weights = driven_weights


@pytest.mark.parametrize("name", ["DFlash, wide", "JetSpec", "DSpark, gated", "DFlash2, three taps"])
def test_a_block_has_the_same_bits_whatever_the_batch_and_the_chunks(tmp_path: Path, name: str) -> None:
    driven = driven_on_gpu(tmp_path, name, torch.bfloat16)
    texts = [random_tokens(n + 1, seed=n) for n in (3, 29, 64)]
    seqs = [driven.begin(text[:-1], chunks)[0] for text, chunks in zip(texts, ((), (2, 9), (33,)), strict=True)]
    lens, roots = [len(text) - 1 for text in texts], [text[-1] for text in texts]
    together = driven.draft(seqs, lens, roots)[0].split(driven.block.depth)
    for i, got in enumerate(together):
        assert torch.equal(got, driven.draft([seqs[i]], [lens[i]], [roots[i]])[0])


@pytest.mark.parametrize(
    "name", [name for name, (_, b) in FORMS.items() if b.markov or b.candidates or b.free is not None]
)
def test_what_depends_on_the_path_gives_the_trained_biases(tmp_path: Path, name: str) -> None:
    driven = driven_on_gpu(tmp_path, name, torch.float16)
    b, path_head, there = driven.block, driven.head.path_head, driven.head.placement.device
    assert path_head is not None
    contexts = [driven.begin(random_tokens(n, seed=n)) for n in (5, 9)]
    _, hidden = driven.draft([seq for seq, _ in contexts], [5, 9], [3, 4])
    rows, generator = hidden.view(2, b.depth, -1), torch.Generator().manual_seed(0)
    paths = [[[3]], [[4]]]  # of each request, its prefixes
    state, parents = None, torch.zeros(2, 1, dtype=torch.long)
    for level in range(b.depth):
        tokens = torch.tensor([[path[-1] for path in each] for each in paths])
        ids = torch.randint(b.draft_vocab or b.vocab, (2, 9), generator=generator)
        got, state = path_head.bias(level, tokens.to(there), rows[:, level], ids.to(there), state, parents.to(there))
        for i, each in enumerate(paths):
            for j, path in enumerate(each):
                want = reference_blocks.biases_of(
                    b, driven.weights, rows[i].double().cpu(), path, driven.tables[0].float()
                )
                torch.testing.assert_close(got[i, j].double().cpu(), want[ids[i]], rtol=0.02, atol=0.05)
        parents = torch.randint(len(paths[0]), (2, 3), generator=generator)
        drawn = torch.randint(b.vocab, (2, 3), generator=generator).tolist()
        paths = [
            [[*each[p], t] for p, t in zip(parents[i].tolist(), drawn[i], strict=True)] for i, each in enumerate(paths)
        ]
