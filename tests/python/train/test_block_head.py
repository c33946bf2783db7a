"""A block head in training computes what the engine computes of its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import modelzoo
from modelrun import random_tokens
from specrs import _specrs as core
from specrs.models import BlockHead as Served
from specrs.models import LlamaModel, ModelConfig, load_draft, ops_for
from specrs.train.block import BlockHead
from specrs.train.heads import HeadSizes, Lesson
from specrs.train.rows import Rows, anchors_of

LEVELS, VOCAB = 5, 61


def random_head(target: Path, rank: int) -> BlockHead:
    """Weights large enough that a wrong key, row or feature shows."""
    config = ModelConfig.from_directory(target)
    head = BlockHead(HeadSizes.of(config, VOCAB, 40, 2), 64, 0, LEVELS, rank)
    generator = torch.Generator().manual_seed(3)
    head.begin_at(target, config, torch.randperm(config.vocab_size, generator=generator)[:VOCAB].sort().values)
    with torch.no_grad():
        for p in head.parameters():
            scale = 1.5 / p.shape[-1] ** 0.5 if p.ndim == 2 else 0.2
            p.copy_(torch.randn(p.shape, generator=generator) * scale + (p.ndim == 1))
    head.mask_by(9, modelzoo.read_weights(target)["model.embed_tokens.weight"][9])
    return head


@pytest.mark.parametrize(
    ("rank", "architecture"), [(0, "LlamaForCausalLM"), (8, "LlamaForCausalLM"), (8, "Gemma2ForCausalLM")]
)
def test_blocks_are_the_drafts_of_the_engine(tmp_path: Path, rank: int, architecture: str) -> None:
    at = modelzoo.write_target(tmp_path / "target", architecture, num_hidden_layers=6)
    trained, config = random_head(at, rank), ModelConfig.from_directory(at)
    trained.save(config, tmp_path / "head", torch.float32)
    target = LlamaModel.load(at, ops_for())
    served = load_draft(tmp_path / "head", target)
    assert isinstance(served, Served)
    assert served.config.form_name == ("DSpark" if rank else "DFlash") and served.config.depth == LEVELS
    assert served.config.notes == () and torch.equal(served.target_ids, trained.target_ids)
    tokens, length = random_tokens(15, seed=1), 14
    geometry = core.Geometry(2, 64, 4, core.TreeShape(1, 15, 16))
    pages = 2 * geometry.row_pages + 1
    pool = core.Pool(pages, 4, 2, geometry.row_pages)
    planner = core.Planner(geometry, pool)
    kv, draft_kv = (model.new_cache(pages, 4) for model in (target, served))
    seq = pool.create()
    with pool.reserve([(seq, length + LEVELS + 1)]) as lease:
        _, aux = target.forward(torch.tensor(tokens[:length]), planner.extend([seq], [0], [length]), kv, aux=True)
        assert aux is not None
        embeds = modelzoo.read_weights(at)["model.embed_tokens.weight"][tokens[1:]]
        anchors = torch.tensor([[0, 3, 4, 12]])
        before = torch.tensor(tokens[1:] + [0] * LEVELS)
        with torch.no_grad():
            features = torch.cat(aux.layers, 1)[None].clone()
            rows = trained.blocks(embeds[None], features, torch.zeros(1, length, dtype=torch.int64), anchors)
        served.write([a.clone() for a in aux.layers], planner.extend([seq], [0], [length]), draft_kv)
        for i, p in enumerate(anchors[0].tolist()):
            plan = planner.extend([seq], [p + 1], [trained.rows]).attending_block()
            wanted = torch.arange(trained.rows - LEVELS, trained.rows)
            scores, hidden = served.draft(
                torch.tensor(served.block(tokens[p + 1], trained.rows)), plan, draft_kv, wanted
            )
            torch.testing.assert_close(hidden, rows[0, i], rtol=1e-3, atol=1e-4)
            path = before[p : p + LEVELS]
            with torch.no_grad():
                said = trained.logits(rows[0, i], path)
            if served.path_head is not None:
                every = torch.arange(VOCAB)[None]
                for k in range(LEVELS):
                    parents = torch.zeros(1, 1, dtype=torch.int64)
                    bias, _ = served.path_head.bias(k, path[k].view(1, 1), hidden[k : k + 1], every, None, parents)
                    scores[k] += bias[0, 0]
            torch.testing.assert_close(scores, said, rtol=1e-3, atol=1e-3)
            # The block's own rows overwrite keys of the positions behind it.
            served.write([a.clone() for a in aux.layers], planner.extend([seq], [0], [length]), draft_kv)
        lease.commit([length])


def lesson_of(head: BlockHead, pieces: torch.Tensor, seed: int) -> Lesson:
    generator = torch.Generator().manual_seed(seed)
    rows, length, h = *pieces.shape, head.sizes.hidden_size
    return Lesson(
        torch.randint(head.sizes.vocab_size, (rows, length), generator=generator),
        torch.randn(rows, length, h, generator=generator), torch.randn(rows, length, 3 * h, generator=generator),
        pieces, anchors_of(Rows(pieces, pieces), 2, [seed]),
        torch.softmax(torch.randn(rows * length, VOCAB, generator=generator), -1),
        torch.randint(-1, VOCAB, (rows * length,), generator=generator),
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 8])
def test_scores_count_levels_within_the_piece_alone(tmp_path: Path, rank: int) -> None:
    """Sums by blocks one by one: a level counts if its answer is in the piece of the block's anchor."""
    head = random_head(modelzoo.write_target(tmp_path / "target", num_hidden_layers=6), rank)
    lesson = lesson_of(head, torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [3] * 9]), 6)
    got = head.scores(lesson).detach()
    with torch.no_grad():
        rows = head.blocks(lesson.embeds, lesson.features, lesson.pieces, lesson.anchors)
    want = torch.zeros(LEVELS, 4)
    for r, anchors in enumerate(lesson.anchors.tolist()):
        for i, p in enumerate(anchors):
            for k in range(LEVELS):
                if p + k + 1 >= 9 or lesson.pieces[r, p + k + 1] != lesson.pieces[r, p]:
                    continue
                logits = head.logits(rows[r, i, k], lesson.tokens[r, p + k]).detach()
                best = int(lesson.best[r * 9 + p + k])
                want[k, 3] += 1
                want[k, 2] += int(logits.argmax()) == best
                if best >= 0:
                    want[k, 0] -= (lesson.wanted[r * 9 + p + k] * logits.log_softmax(-1)).sum()
                    want[k, 1] += 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    parts = torch.stack([head.scores(part).detach() for part in lesson.split(1)]).sum(0)
    torch.testing.assert_close(parts, got, rtol=1e-4, atol=1e-4)


def test_pieces_and_blocks_do_not_see_each_other(tmp_path: Path) -> None:
    head = random_head(modelzoo.write_target(tmp_path / "target", num_hidden_layers=6), 8)
    lesson = lesson_of(head, torch.tensor([[0] * 5 + [1] * 7]), 5)
    lesson = replace(lesson, anchors=torch.tensor([[1, 6, 9]]))
    with torch.no_grad():
        both = head.blocks(lesson.embeds, lesson.features, lesson.pieces, lesson.anchors)
        alone = head.blocks(lesson.embeds[:, 5:], lesson.features[:, 5:], lesson.pieces[:, 5:], torch.tensor([[1, 4]]))
        one = head.blocks(lesson.embeds, lesson.features, lesson.pieces, torch.tensor([[9]]))
    torch.testing.assert_close(both[:, 1:], alone, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(both[:, 2:], one, rtol=1e-3, atol=1e-4)


def test_a_block_begins_in_every_cell() -> None:
    rows = Rows(torch.zeros(3, 22, dtype=torch.int64), torch.zeros(3, 22, dtype=torch.int64))
    anchors = anchors_of(rows, 4, [1, 2])
    assert anchors.shape == (3, 5) and torch.equal(anchors // 4, torch.arange(5).expand(3, 5))
    assert torch.equal(anchors, anchors_of(rows, 4, [1, 2])) and not torch.equal(anchors, anchors_of(rows, 4, [1, 3]))
