"""Heads that draft blocks, in every form that trainers write, against a restatement of each (`reference_blocks`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import blockzoo
import modelzoo
import reference_blocks
from blockrun import LAYERS as TARGET_LAYERS
from blockrun import Driven
from modelrun import random_tokens
from reference_blocks import Block
from specrs.engine.devices.memory_plan import Head, head_elements
from specrs.models import (
    BlockConfig,
    ModelConfig,
    check_draft,
    ops_for,
    torch_ops,
)
from specrs.models.layer import Workspace

OPS: dict[str, Any] = {"torch": torch_ops, "host": ops_for}
PLAIN = Block()
FORMS: dict[str, tuple[str, Block]] = {
    "DFlash": ("DFlash", PLAIN),
    "DFlash, one layer": ("DFlash", replace(PLAIN, layers=1, rows=2, streams=(0,), qk_norm=False)),
    "DFlash, wide": ("DFlash", replace(PLAIN, layers=4, rows=16, streams=(1, 2, 3, 4, 5), biases=True, theta=1e6)),
    "DFlash, scales": ("DFlash", replace(PLAIN, embedding_scale=8.0, logit_scale=0.25, cap=3.0)),
    "DFlash of speculators": ("speculators", replace(PLAIN, draft_vocab=77, own_embedding=True)),
    "DFlash, other width": (
        "DFlash",
        replace(PLAIN, hidden=44, draft_vocab=77, own_embedding=True, streams=(1, 4, 5)),
    ),
    "DFlash2": ("DFlash2", replace(PLAIN, taps=2, candidates=16)),
    "DFlash2, three taps": (
        "DFlash2",
        replace(PLAIN, taps=3, group=64, candidates=5, layers=1, rows=7, own_embedding=True, logit_scale=0.5, cap=4.0),
    ),
    "DFlash2 of speculators": ("speculators", replace(PLAIN, taps=5, group=1, candidates=300, causal=False)),
    "JetSpec": ("JetSpec", replace(PLAIN, causal=True, rows=8)),
    "DSpark": ("DSpark", replace(PLAIN, anchor=True, markov="vanilla", confidence=True)),
    "DSpark, gated": ("DSpark", replace(PLAIN, anchor=True, markov="gated", draft_vocab=77)),
    "DSpark of speculators": (
        "speculators",
        replace(PLAIN, anchor=True, markov="rnn", draft_vocab=77, own_embedding=True, confidence=True),
    ),
    "DSpark of DeepSpec": (
        "DeepSpec",
        replace(PLAIN, anchor=True, markov="rnn", rows=7, own_embedding=True, own_scores=True),
    ),
    "Domino": ("Domino", replace(PLAIN, free=1, anchor=True)),
    "Domino, filling in": ("Domino", replace(PLAIN, free=0, rows=7)),
    "DeepSpec without Markov": ("DeepSpec", replace(PLAIN, anchor=True, rows=1)),
}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("name", FORMS)
def test_the_configuration_says_what_was_trained(tmp_path: Path, name: str) -> None:
    form, b = FORMS[name]
    target = modelzoo.write_target(tmp_path / "target", num_hidden_layers=TARGET_LAYERS)
    blockzoo.write_block(tmp_path / "head", form, b, TARGET_LAYERS)
    config, _ = check_draft(tmp_path / "head", ModelConfig.from_directory(target))
    assert isinstance(config, BlockConfig)
    assert config.form_name == name.split()[0].rstrip(",") or name.startswith("DeepSpec")
    assert config.aux_layers_for(ModelConfig.from_directory(target)) == b.streams
    assert (config.block_size, config.mask_token, config.causal, config.anchor) == (b.rows, b.mask, b.causal, b.anchor)
    assert (config.markov, config.depth, config.num_layers) == (b.markov, b.depth, b.layers)
    assert [note for note in config.notes if "nothing here reads" in note] == []


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", FORMS)
def test_a_block_gives_the_trained_logits(tmp_path: Path, ops: str, name: str) -> None:
    """Behind contexts that were written in chunks, at the beginning of a page and within one, and behind none."""
    driven = Driven(tmp_path, OPS[ops](), *FORMS[name])
    tokens = random_tokens(42, seed=1)
    for length, chunks in ((41, (1, 4, 7, 30)), (40, ()), (1, ())):
        seq, features = driven.begin(tokens[:length], chunks)
        got, rows = driven.draft([seq], [length], [tokens[length]])
        want, normed = driven.reference(features, tokens[length])
        close(got, want)
        close(rows, normed)
        assert len(got) == driven.block.depth and got.shape[1] == driven.head.vocab_size
        driven.pool.release([seq])


@pytest.mark.parametrize("name", ["DFlash", "JetSpec", "DSpark", "DFlash2", "DFlash2 of speculators"])
def test_a_shorter_block_is_a_block_of_fewer_rows(tmp_path: Path, name: str) -> None:
    driven = Driven(tmp_path, ops_for(), *FORMS[name])
    tokens = random_tokens(12, seed=2)
    seq, features = driven.begin(tokens[:11])
    close(driven.draft([seq], [11], [tokens[11]], 3)[0], driven.reference(features, tokens[11], 3)[0])


@pytest.mark.parametrize("name", ["DFlash", "JetSpec", "DSpark, gated", "DFlash2"])
def test_a_block_has_the_same_bits_whatever_the_batch_the_pages_and_the_chunks(tmp_path: Path, name: str) -> None:
    texts = [random_tokens(n + 1, seed=n) for n in (3, 29, 64)]
    alone: dict[int, torch.Tensor] = {}
    for page, chunks in ((1, ()), (4, (2,)), (16, (1, 3))):
        driven = Driven(tmp_path, ops_for(), *FORMS[name], page)
        seqs = [driven.begin(text[:-1], chunks)[0] for text in texts]
        lens, roots = [len(text) - 1 for text in texts], [text[-1] for text in texts]
        together = driven.draft(seqs, lens, roots)[0].split(driven.block.depth)
        for i, got in enumerate(together):
            one = driven.draft([seqs[i]], [lens[i]], [roots[i]])[0]
            assert torch.equal(got, one) and torch.equal(alone.setdefault(i, one), one)
            again = driven.draft([seqs[i]], [lens[i]], [roots[i]])[0]
            assert torch.equal(again, one), "a block that was not accepted leaves no trace"


@pytest.mark.parametrize(
    "name", [name for name, (_, b) in FORMS.items() if b.markov or b.candidates or b.free is not None]
)
def test_what_depends_on_the_path_gives_the_trained_biases(tmp_path: Path, name: str) -> None:
    driven = Driven(tmp_path, ops_for(), *FORMS[name])
    b, path_head = driven.block, driven.head.path_head
    assert path_head is not None
    contexts = [driven.begin(random_tokens(n, seed=n)) for n in (5, 9)]
    _, hidden = driven.draft([seq for seq, _ in contexts], [5, 9], [3, 4])
    rows = hidden.view(2, b.depth, -1)
    generator = torch.Generator().manual_seed(0)
    paths = [[[3]], [[4]]]  # of each request, its prefixes
    state, parents = None, torch.zeros(2, 1, dtype=torch.long)
    for level in range(b.depth):
        tokens = torch.tensor([[path[-1] for path in each] for each in paths])
        ids = torch.randint(b.draft_vocab or b.vocab, (2, 9), generator=generator)
        got, state = path_head.bias(level, tokens, rows[:, level], ids, state, parents)
        for i, each in enumerate(paths):
            for j, path in enumerate(each):
                want = reference_blocks.biases_of(b, driven.weights, rows[i].double(), path, driven.tables[0])
                close(got[i, j], want[ids[i]])
        parents = torch.randint(len(paths[0]), (2, 3), generator=generator)
        drawn = torch.randint(b.vocab, (2, 3), generator=generator).tolist()
        paths = [
            [[*each[p], t] for p, t in zip(parents[i].tolist(), drawn[i], strict=True)] for i, each in enumerate(paths)
        ]


@pytest.mark.parametrize("name", FORMS)
def test_scratch_memory_of_a_head_is_counted(tmp_path: Path, name: str) -> None:
    driven = Driven(tmp_path, ops_for(), *FORMS[name])
    planned = Head(*check_draft(tmp_path / "head", driven.target.config))
    driven.head.reserve(64, 16)
    have, blocks = 0, [each for each in vars(driven.head).values() if isinstance(each, Workspace)]
    for block in blocks:
        rows = 64 if block is driven.head._write_work else 16
        have += rows * sum(row.shape[1] for at, row in block.rows(rows).items() if at != "logits")
    assert have <= head_elements(planned, 64, 16) < 1.3 * have
