"""Checks of the training code against independent computations; a few seconds on a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from .config import HeadConfig, TargetConfig
from .evaluate import loop_onset
from .head import Head
from .target import KVCache, Target
from .tree_decode import TreeDecoder, TreeShape, greedy

CFG = TargetConfig(
    vocab_size=97, hidden_size=48, num_hidden_layers=8, num_attention_heads=3, head_dim=16, intermediate_size=64,
    max_position_embeddings=128,
)  # fmt: skip
HEAD = HeadConfig(draft_vocab_size=61, intermediate_size=40, ttt_steps=5)


@pytest.fixture
def models() -> tuple[Target, Head]:
    torch.manual_seed(3)
    model, head = Target(CFG).eval(), Head(CFG, HEAD).eval()
    with torch.no_grad():
        for p in [*model.parameters(), *head.parameters()]:
            p.copy_(torch.randn_like(p) * (0.15 if p.ndim == 2 else 0.2) + (1.0 if p.ndim == 1 else 0.0))
    head.set_vocab(torch.randperm(CFG.vocab_size)[: HEAD.draft_vocab_size])
    return model, head


@torch.no_grad()
def test_unroll_equals_step_by_step_chains(models: tuple[Target, Head]) -> None:
    """Every chain of the training-time test, drafted alone through a cache, gives the unroll's outputs."""
    model, head = models
    ids = torch.randint(1, CFG.vocab_size, (1, 20))
    embeds = model.model.embed_tokens(ids[:, 1:])
    feats = model(ids)[1][:, :-1]
    unrolled = head.unroll(embeds, feats, HEAD.ttt_steps)
    t = embeds.shape[1]
    for start in range(t - HEAD.ttt_steps + 1):  # step 0 of this chain stands at position `start`
        cache = torch.zeros(2, 1, CFG.num_key_value_heads, 64, CFG.head_dim)
        at = torch.arange(start + 1)
        out = head.step(embeds[:, at], head.fc(feats[:, at]), at, at, cache, at[:, None] >= at[None, :])[:, -1:]
        torch.testing.assert_close(out[0, 0], unrolled[0][0, start])
        for j in range(1, HEAD.ttt_steps):
            at = torch.tensor([start + j])
            out = head.step(embeds[:, at], out, at, at, cache, torch.ones(1, start + j + 1, dtype=torch.bool))
            torch.testing.assert_close(out[0, 0], unrolled[j][0, start + j], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_cached_steps_equal_whole_rows(models: tuple[Target, Head]) -> None:
    model, _ = models
    ids = torch.randint(1, CFG.vocab_size, (2, 12))
    hidden, feats = model(ids)
    cache = KVCache(CFG, 2, 12, ids.device, torch.float32)
    for t in range(12):
        at = torch.tensor([t])
        h, f = model.step(ids[:, t : t + 1], at, at, cache, t + 1, None)
        torch.testing.assert_close(h[:, 0], hidden[:, t], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(f[:, 0], feats[:, t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [TreeShape(4, 4, 16), TreeShape(1, 4, 5), TreeShape(3, 2, 6), TreeShape(2, 5, 1)])
def test_tree_decoding_equals_greedy(models: tuple[Target, Head], shape: TreeShape) -> None:
    model, head = models
    prompt = [0, 5, 9, 11]
    with torch.no_grad():
        plain = greedy(model, prompt, 40)
    decoded = TreeDecoder(model, head, shape).decode(prompt, 40)
    assert decoded.tokens[: len(plain)] == plain
    assert len(decoded.tokens) == 1 + sum(decoded.per_round)


def test_perfect_head_accepts_everything(models: tuple[Target, Head]) -> None:
    """A head that copies the target's answer from a table is accepted to the last token: S + 1 tokens a round."""
    model, head = models
    prompt = [0, 5, 9, 11]
    with torch.no_grad():
        text = prompt + greedy(model, prompt, 60)
    decoder = TreeDecoder(model, head, TreeShape(1, 4, 5))
    calls = itertools.count()

    def oracle(hidden: torch.Tensor) -> tuple[list[list[float]], list[list[int]]]:
        round_, step = divmod(next(calls), 4)
        return [[0.0]], [[text[len(prompt) + 1 + 5 * round_ + step]]]

    decoder.best_next = oracle  # type: ignore[method-assign]
    assert set(decoder.decode(prompt, 30).per_round) == {5}


def test_matches_transformers(models: tuple[Target, Head]) -> None:
    """Logits and aux features are those of Hugging Face's Llama (hidden_states[i] enters layer i)."""
    transformers = pytest.importorskip("transformers")
    model, _ = models
    config = transformers.LlamaConfig(
        **{k: getattr(CFG, k) for k in CFG.__dataclass_fields__}, tie_word_embeddings=True, attn_implementation="eager"
    )
    peer = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = peer.load_state_dict(model.state_dict(), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    peer.tie_weights()
    ids = torch.randint(1, CFG.vocab_size, (1, 15))
    with torch.no_grad():
        theirs = peer(ids, output_hidden_states=True)
        hidden, feats = model(ids)
    torch.testing.assert_close(model.logits(hidden), theirs.logits, rtol=1e-4, atol=1e-4)
    picked = torch.cat([theirs.hidden_states[i] for i in CFG.aux_layers], dim=-1)
    torch.testing.assert_close(feats, picked, rtol=1e-4, atol=1e-4)


def test_draft_vocabulary_offsets(models: tuple[Target, Head]) -> None:
    _, head = models
    ids = head.target_ids
    assert torch.equal(ids, ids.sort().values) and int(head.t2d.sum()) == len(ids) and bool(head.t2d[ids].all())


def test_loop_onset() -> None:
    assert loop_onset(list(range(50)) + [7, 8, 9] * 20) == 53
    assert loop_onset(list(range(128))) == 128
