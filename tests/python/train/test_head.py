"""A head in training computes what the engine computes of its files, and its teacher what the engine serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import modelzoo
from modelrun import Driver, random_tokens
from specrs import _specrs as core
from specrs.models import Eagle3Head, LlamaModel, ModelConfig, ops_for
from specrs.train.eagle3 import Eagle3
from specrs.train.heads import HeadSizes, Lesson, feature_layers, wanted_of
from specrs.train.rows import anchors_of, pack
from specrs.train.teacher import Teacher

STEPS = 5


def random_head(target: Path, layers: int, draft_vocab: int = 61) -> Eagle3:
    """Weights large enough that a wrong key or feature shows."""
    config = ModelConfig.from_directory(target)
    head = Eagle3(HeadSizes.of(config, draft_vocab, 40, layers), 64, levels=STEPS)
    generator = torch.Generator().manual_seed(3)
    head.begin_at(target, config, torch.randperm(config.vocab_size, generator=generator)[:draft_vocab].sort().values)
    with torch.no_grad():
        for p in head.parameters():
            scale = 1.5 / p.shape[-1] ** 0.5 if p.ndim == 2 else 0.2
            p.copy_(torch.randn(p.shape, generator=generator) * scale + (p.ndim == 1))
    return head


@pytest.mark.parametrize("layers", [1, 3])
def test_unrolled_steps_are_the_drafts_of_the_engine(tmp_path: Path, layers: int) -> None:
    """Every chain, drafted alone by the exported head through the engine's cache, gives the unrolled logits."""
    at = modelzoo.write_target(tmp_path / "target", num_hidden_layers=6)
    trained = random_head(at, layers)
    config = ModelConfig.from_directory(at)
    trained.save(config, tmp_path / "head", torch.float32)
    target = LlamaModel.load(at, ops_for())
    served = Eagle3Head.load(tmp_path / "head", ops_for(), target)
    assert served.aux_layers == feature_layers(6) and torch.equal(served.target_ids, trained.target_ids)
    driver = Driver(target, served, shape=(1, STEPS, STEPS + 1))
    assert driver.draft_kv is not None
    tokens, length = random_tokens(15, seed=1), 14
    first = driver.new()
    _, aux = driver.extend([first], [0], [tokens[:length]], aux=True)
    assert aux is not None
    embeds = modelzoo.read_weights(at)["model.embed_tokens.weight"][tokens[1:]]
    with torch.no_grad():
        outputs = trained.unroll(embeds[None], aux[None], torch.zeros(1, length, dtype=torch.int64), STEPS)
        logits = [trained.logits(x)[0] for x in outputs]
    for start in range(length - STEPS + 1):  # step 0 of this chain stands at `start`
        seq = driver.new()
        driver.extend([seq], [0], [tokens[: start + 1]])
        got, hidden = driver.head_extend(seq, 0, tokens[1 : start + 2], aux[: start + 1])
        torch.testing.assert_close(got[-1], logits[0][start], rtol=1e-3, atol=1e-4)
        beams = core.DraftBeams(1, driver.shape, served.d2t, config.vocab_size)
        beams.start(got[-1:])
        hidden = hidden[-1:]
        with driver.pool.reserve([(seq, start + 1 + driver.reserve)]):
            for j in range(1, STEPS):
                plan = driver.planner.draft([seq], [start + 1], j - 1, beams, "ancestors")
                said = torch.tensor([tokens[start + 1 + j]])  # the text's token, as in training
                one, hidden = served.step(said, hidden, plan, driver.draft_kv)
                torch.testing.assert_close(one[0], logits[j][start + j], rtol=1e-3, atol=1e-4)
                beams.advance(one)
        driver.pool.release([seq])


def test_pieces_do_not_see_each_other(tmp_path: Path) -> None:
    at = modelzoo.write_target(tmp_path / "target", num_hidden_layers=6)
    head, config = random_head(at, 2), ModelConfig.from_directory(at)
    generator = torch.Generator().manual_seed(5)
    embeds = torch.randn(1, 12, config.hidden_size, generator=generator)
    features = torch.randn(1, 12, 3 * config.hidden_size, generator=generator)
    pieces = torch.tensor([[0] * 5 + [1] * 7])
    with torch.no_grad():
        both = head.unroll(embeds, features, pieces, STEPS)
        alone = head.unroll(embeds[:, 5:], features[:, 5:], pieces[:, 5:], STEPS)
    for j in range(STEPS):
        torch.testing.assert_close(both[j][:, 5 + j :], alone[j][:, j:], rtol=1e-3, atol=1e-4)


def test_scores_count_chained_rows_alone(tmp_path: Path) -> None:
    """Sums by rows one by one: a row counts at step j if its chain and its answer are in its piece."""
    at = modelzoo.write_target(tmp_path / "target", num_hidden_layers=6)
    head, config = random_head(at, 1), ModelConfig.from_directory(at)
    generator = torch.Generator().manual_seed(6)
    rows, length = 2, 9
    pieces = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [3] * 9])
    wanted = torch.softmax(torch.randn(rows * length, 61, generator=generator), -1)
    best = torch.randint(-1, 61, (rows * length,), generator=generator)
    places = torch.arange(length).expand(rows, length)
    lesson = Lesson(
        places, torch.randn(rows, length, config.hidden_size, generator=generator),
        torch.randn(rows, length, 3 * config.hidden_size, generator=generator), pieces, places, wanted, best,
    )  # fmt: skip
    got = head.scores(lesson).detach()
    with torch.no_grad():
        outputs = head.unroll(lesson.embeds, lesson.features, pieces, STEPS)
    for j, hidden in enumerate(outputs):
        want = [0.0] * 4
        for r in range(rows):
            for p in range(length - 1):
                if p < j or pieces[r, p - j] != pieces[r, p] or pieces[r, p] != pieces[r, p + 1]:
                    continue
                at_flat = r * length + p
                logits = head.logits(hidden[r, p]).detach()
                want[3] += 1
                want[2] += int(logits.argmax()) == int(best[at_flat])
                if best[at_flat] >= 0:
                    want[0] -= float((wanted[at_flat] * logits.log_softmax(-1)).sum())
                    want[1] += 1
        torch.testing.assert_close(got[j], torch.tensor(want), rtol=1e-4, atol=1e-4)
    parts = torch.stack([head.scores(part).detach() for part in lesson.split(1)]).sum(0)
    torch.testing.assert_close(parts, got, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_the_teacher_is_the_served_model(tmp_path: Path, architecture: str) -> None:
    at = modelzoo.write_target(tmp_path, architecture, num_hidden_layers=6)
    target = LlamaModel.load(at, ops_for())
    target.set_aux_layers(feature_layers(6))
    vocab = target.config.vocab_size
    docs = [np.array(random_tokens(n, seed=n, vocab=vocab), dtype=np.int32) for n in (3, 30, 1, 17, 70)]
    rows = pack(docs, 20, np.random.default_rng(0))
    ids = torch.arange(0, vocab, 3)
    drafts = torch.full((vocab,), -1)
    drafts[ids] = torch.arange(len(ids))
    lesson = Teacher(at, ops_for(), 20).lesson(rows, anchors_of(rows, 4, [0]), ids, drafts, 0.25)
    driver = Driver(target)
    flat = lesson.pieces.flatten()
    tokens, features = rows.tokens.flatten(), lesson.features.flatten(0, 1)
    for piece in flat.unique():
        where = (flat == piece).nonzero().flatten()
        seq = driver.new()
        scores, aux = driver.extend([seq], [0], [tokens[where].tolist()], aux=True)
        driver.pool.release([seq])
        assert aux is not None and torch.equal(features[where], aux)
        wanted, best = wanted_of(scores, ids, drafts, 0.25)
        torch.testing.assert_close(wanted.sum(-1), torch.ones(len(where)))
        assert torch.equal(lesson.wanted[where[:-1]], wanted[1:]) and torch.equal(lesson.best[where[:-1]], best[1:])
        assert all((b < 0) == (int(s.argmax()) % 3 > 0) for b, s in zip(best.tolist(), scores, strict=True))
    table = torch.empty(len(tokens) - 1, target.config.hidden_size)
    target.embedding.lookup(tokens[1:], table)
    assert torch.equal(lesson.embeds.flatten(0, 1)[:-1], table)
    assert torch.equal(lesson.tokens.flatten()[:-1], tokens[1:])
