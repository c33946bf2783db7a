"""specrs's core under another engine: its own model, its own KV tensor, and attention over FlashInfer's arrays.

The engine below is a small torch transformer. The core gives it pages (`Pool`), what each pass reads and writes
(`Planner`, format "flashinfer": kv_indptr, kv_indices, custom_mask), the walk over a verified tree (`verify`), and the
moves that make the accepted KV dense. Drafts come from the text itself: what followed the last token before. The tokens
are those of plain decoding, which `main` checks against a model without cache and without specrs.

    python examples/foreign_engine.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from specrs import Geometry, Plan, Planner, Pool, Sampler, TreeBatch, TreeShape, verify
from specrs._specrs import Moves

VOCAB, HIDDEN, LAYERS, HEADS, DIM = 32, 64, 2, 4, 16
SHAPE = TreeShape(3, 4, 13)  # up to 3 branches of 4 drafts each; 13 nodes with the root


class Model:
    """A model of random weights; the caller computes attention."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        make = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=make).to(device)
        self.place = torch.randn(512, HIDDEN, generator=make).to(device) * 0.02
        self.qkv = torch.randn(LAYERS, HIDDEN, 3 * HIDDEN, generator=make).to(device) * HIDDEN**-0.5
        self.out = torch.randn(LAYERS, HIDDEN, HIDDEN, generator=make).to(device) * HIDDEN**-0.5

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend) -> torch.Tensor:
        """Scores [rows, VOCAB]; ``attend(layer, q, k, v)`` works on [rows, HEADS, DIM]."""
        x = self.embed[tokens] + self.place[positions]
        for layer in range(LAYERS):
            q, k, v = (layer_norm(x, (HIDDEN,)) @ self.qkv[layer]).view(-1, 3, HEADS, DIM).unbind(1)
            x = x + attend(layer, q, k, v).reshape(-1, HIDDEN) @ self.out[layer]
        return layer_norm(x, (HIDDEN,)) @ self.embed.T

    def plain(self, prompt: list[int], count: int) -> list[int]:
        """Greedy decoding without cache, pages or drafts: the reference."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:

            def causal(_, q, k, v):
                q, k, v = (t.transpose(0, 1) for t in (q, k, v))
                return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

            device = self.embed.device
            scores = self.forward(torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), causal)
            tokens.append(int(scores[-1].argmax()))
        return tokens[len(prompt) :]


def attention(plan: Plan, cache: torch.Tensor):
    """Compute what FlashInfer's kernels do with these arrays: write the new KV, then read each request's slots,
    masked."""
    a = {name: torch.from_dlpack(array).long() for name, array in plan.arrays().items()}
    slots, starts, masks = torch.from_dlpack(plan.out_slots).long(), a["kv_indptr"], a.get("mask_indptr")

    def attend(layer, q, k, v):
        cache[layer, 0, slots], cache[layer, 1, slots] = k, v
        out = torch.empty_like(q)
        for i in range(plan.batch):
            rows = slice(int(a["qo_indptr"][i]), int(a["qo_indptr"][i + 1]))
            keys = a["kv_indices"][starts[i] : starts[i + 1]]  # pages of one token: slots
            n = rows.stop - rows.start
            if masks is None:  # causal, aligned at the end
                seen = torch.ones(n, len(keys), dtype=torch.bool).tril(len(keys) - n)
            else:
                seen = a["custom_mask"][masks[i] : masks[i + 1]].view(n, len(keys)).bool()
            parts = (q[rows], cache[layer, 0, keys], cache[layer, 1, keys])
            mixed = scaled_dot_product_attention(*(t.transpose(0, 1) for t in parts), attn_mask=seen)
            out[rows] = mixed.transpose(0, 1)
        return out

    return attend


def lookup(tokens: list[int]) -> tuple[list[int], list[int]]:
    """A tree of what followed earlier occurrences of the last token: parents (-1 for the root) and tokens."""
    parents, nodes = [-1], [tokens[-1]]
    places = [i for i in range(len(tokens) - 2, -1, -1) if tokens[i] == tokens[-1]][: SHAPE.topk]
    for place in places:
        at = 0
        for token in tokens[place + 1 : place + 1 + SHAPE.steps]:
            known = [i for i in range(len(nodes)) if parents[i] == at and nodes[i] == token]
            if not known:
                parents.append(at)
                nodes.append(token)
            at = known[0] if known else len(nodes) - 1
    return parents, nodes


def move(cache: torch.Tensor, moves: Moves) -> None:
    """Make accepted KV the end of the prefix. Each source lies at or behind its destination, so reading all first is
    as good as one by one."""
    moves.claim(cache.data_ptr(), cache.nbytes)  # refuses moves that have run, or whose pages have changed
    src, dst = (torch.from_dlpack(slots).long().to(cache.device) for slots in (moves.src, moves.dst))
    cache[:, :, dst] = cache[:, :, src]


def decode(
    model: Model, prompts: list[list[int]], count: int, attention=attention, form: str = "flashinfer"
) -> tuple[list[list[int]], int]:
    """Greedy continuations of at least ``count`` tokens, cut to it, and the rounds that they took.

    ``attention(plan, cache)`` gives the attention of a pass, over arrays of the planner's ``form``.
    """
    geometry = Geometry(len(prompts), 256, 4, SHAPE)
    pool = Pool(geometry.pages_for_full_load + 1, 4, len(prompts), geometry.row_pages)  # page 0 is the sink
    planner = Planner(geometry, pool, format=form, mask="bool")
    device = model.embed.device
    cache = torch.zeros(LAYERS, 2, pool.num_pages * 4, HEADS, DIM, device=device)
    seqs = [pool.create() for _ in prompts]
    samplers = [Sampler(VOCAB, p) for p in prompts]  # greedy
    texts = [list(p) for p in prompts]

    lens = [len(p) for p in prompts]  # committed: positions whose KV is final
    with pool.reserve(list(zip(seqs, lens))) as lease:  # all or nothing; leaving without commit rolls back
        plan = planner.extend(seqs, [0] * len(seqs), lens)
        rows = torch.tensor([t for p in prompts for t in p], device=device)
        positions = torch.from_dlpack(plan.positions).long().to(device)
        scores = model.forward(rows, positions, attention(plan, cache)).cpu()
        lease.commit(lens)
    last = torch.tensor(lens).cumsum(0) - 1
    for text, sampler, row, n in zip(texts, samplers, last, lens):
        text.append(sampler.draw(scores[row], n))
        sampler.commit(text[-1:])

    rounds = 0
    while min(len(t) - len(p) for t, p in zip(texts, prompts)) < count:
        trees = TreeBatch.from_parents(*map(list, zip(*(lookup(t) for t in texts))))
        need = geometry.alloc_len_per_decode
        with pool.reserve([(s, n + need) for s, n in zip(seqs, lens)]) as lease:
            plan = planner.verify(seqs, lens, trees)
            nodes = torch.from_dlpack(trees.tokens).long().to(device)
            positions = torch.from_dlpack(plan.positions).long().to(device)
            scores = model.forward(nodes, positions, attention(plan, cache)).cpu()
            accepts = verify(trees, scores, samplers, lens)
            move(cache, planner.commit(lease, seqs, lens, accepts))
            lens = [n + len(drawn) for n, drawn in zip(lens, accepts.tokens)]
            lease.commit(lens)
        for text, sampler, drawn in zip(texts, samplers, accepts.tokens):
            text.extend(drawn)
            sampler.commit(drawn)
        rounds += 1
    pool.release(seqs)
    pool.audit()  # every page is accounted for
    return [t[len(p) : len(p) + count] for t, p in zip(texts, prompts)], rounds


def main() -> None:
    torch.manual_seed(0)
    model, count = Model(seed=3), 48
    prompts = [[1, 2, 3, 1, 2, 3, 1], [7] * 5, [11, 4, 9, 30, 4, 9]]
    outputs, rounds = decode(model, prompts, count)
    assert outputs == [model.plain(p, count) for p in prompts], "speculation must not change the tokens"
    print(f"{len(prompts)} requests, {count} tokens each in {rounds} rounds; the tokens are those of plain decoding")


if __name__ == "__main__":
    main()
