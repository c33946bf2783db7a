"""A torch module of your own in CUDA graphs, with specrs's pages, plans and buffers around it.

The module below is a step of decoding in plain torch: it embeds a token of each request, writes its key and value into
the slots that a plan names, and attends over the request's pages. `GraphRuntime` captures it once for each bucket of
batch sizes. Requests join and leave, so the batch grows and shrinks across buckets; seats without a request are dead
and write slot 0, the pool's sink. The tokens are those of the module without graphs, pages or cache. An output that
is held for too long is refused. SPECRS_POISON=1 checks every replay.

    python examples/graph_runtime.py
"""

from __future__ import annotations

import sys

import torch

from specrs import Geometry, Planner, Pool, StaleOutputError, TreeShape, cuda_available
from specrs.device import cuda_unavailable_reason
from specrs.graph import Buffers, GraphRuntime, Region, graph_bytes

VOCAB, HIDDEN, HEADS, PAGE, CONTEXT = 48, 64, 4, 4, 64
DIM = HIDDEN // HEADS
BUCKETS = [1, 2, 4, 8]


class Step(torch.nn.Module):
    """One step of a model: scores [batch, VOCAB] from tokens, positions, slots and pages, a token a request. In
    float64, so that only a mistake changes a token."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(11)
        self.embed = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=make).double())
        self.place = torch.nn.Parameter(torch.randn(CONTEXT, HIDDEN, generator=make).double() * 0.3)
        self.qkv = torch.nn.Parameter(torch.randn(HIDDEN, 3 * HIDDEN, generator=make).double() * HIDDEN**-0.5)
        self.register_buffer("cache", torch.zeros(2, num_slots, HEADS, DIM, dtype=torch.float64))

    def parts(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows, and their queries, keys and values [rows, HEADS, DIM]."""
        x = self.embed[tokens] + self.place[positions]
        return x, *(x @ self.qkv).view(-1, 3, HEADS, DIM).unbind(1)

    def forward(self, at: Buffers) -> None:
        tokens, positions, slots = (at[name].long() for name in ("tokens", "positions", "slots"))
        x, q, k, v = self.parts(tokens, positions)
        self.cache[0].index_copy_(0, slots, k)
        self.cache[1].index_copy_(0, slots, v)
        pages = at["pages"].long().view(at.seats, -1)  # a seat's row of the page table
        keys = (pages[:, :, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten(1)
        seen = torch.arange(keys.shape[1], device=pages.device) <= positions[:, None]
        weights = torch.einsum("bhd,bkhd->bhk", q, self.cache[0][keys]) * DIM**-0.5
        weights = weights.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("bhk,bkhd->bhd", weights, self.cache[1][keys]).flatten(1)
        scores = (x + mixed) @ self.embed.T
        at["scores"].copy_(scores)
        at["chosen"].copy_(scores.argmax(-1))

    def plain(self, prompt: list[int], count: int) -> list[int]:
        """Greedy decoding without graphs, pages or cache: the reference."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            rows = torch.tensor(tokens, device=self.embed.device)
            x, q, k, v = self.parts(rows, torch.arange(len(tokens), device=rows.device))
            weights = (torch.einsum("hd,khd->hk", q[-1], k) * DIM**-0.5).softmax(-1)
            scores = (x[-1] + torch.einsum("hk,khd->hd", weights, v).flatten()) @ self.embed.T
            tokens.append(int(scores.argmax()))
        return tokens[len(prompt) :]


def main() -> None:
    if not (torch.cuda.is_available() and cuda_available()):
        sys.exit(f"this example needs a CUDA GPU: {cuda_unavailable_reason() or 'torch sees none'}")
    geometry = Geometry(BUCKETS[-1], CONTEXT, PAGE, TreeShape(1, 1, 2))
    pool = Pool(geometry.pages_for_full_load + 1, PAGE, BUCKETS[-1], geometry.row_pages)  # page 0 is the sink
    planner = Planner(geometry, pool)
    step = Step(pool.num_pages * PAGE).cuda()
    regions = [
        Region("tokens", "int32", dead=0),
        Region("positions", "int32", dead=0),
        Region("slots", "int32", dead=0),  # the sink's first: a dead seat's key goes where nobody reads
        Region("pages", "int32", (geometry.row_pages,), dead=0),
        Region("scores", "float32", (1, VOCAB), role="output"),
        Region("chosen", "int32", role="output"),
    ]
    print(f"{len(BUCKETS)} buckets need {graph_bytes(BUCKETS, regions)} bytes")
    runtime = GraphRuntime(step, BUCKETS, regions, modules=[step, pool, planner])

    prompts = [[i + 1, 7 * i % VOCAB, 3, i + 1] for i in range(10)]
    ends = [6, 26, 3, 11, 9, 17, 5, 8, 14, 4]  # tokens to make
    waiting, live, texts = list(range(10)), {}, [list(p) for p in prompts]
    batches, first = [], None
    with torch.no_grad():
        while waiting or live:
            # Three join a step, as long as there is room.
            for i in waiting[: min(3, BUCKETS[-1] - len(live))]:
                live[i] = (pool.create(), 0)
                waiting.remove(i)
            order = sorted(live)
            seqs, lens = [live[i][0] for i in order], [live[i][1] for i in order]
            with pool.reserve([(seq, n + 1) for seq, n in zip(seqs, lens)]) as lease:
                plan = planner.decode(seqs, lens)  # says where each token goes, audited before anything is launched
                table = torch.zeros(len(order), geometry.row_pages, dtype=torch.int32)
                pages = torch.from_dlpack(plan.page_table())
                table[:, : pages.shape[1]] = pages
                done = runtime.replay(
                    len(order),
                    {
                        "tokens": torch.tensor([texts[i][n] for i, n in zip(order, lens)], dtype=torch.int32),
                        "positions": torch.from_dlpack(plan.positions).clone(),  # the planner writes its own again
                        "slots": torch.from_dlpack(plan.out_slots).clone(),
                        "pages": table.view(-1),
                    },
                )
                lease.commit([n + 1 for n in lens])
            batches.append(len(order))
            first = first or done.output("scores")
            chosen = done.output("chosen").tensor().tolist()
            for i, seq, n, token in zip(order, seqs, lens, chosen):
                live[i] = (seq, n + 1)
                if n + 1 == len(texts[i]):  # the last known token was fed: this one is new
                    texts[i].append(token)
                if len(texts[i]) == len(prompts[i]) + ends[i]:
                    pool.release([live.pop(i)[0]])
        for prompt, text, count in zip(prompts, texts, ends):
            assert text[len(prompt) :] == step.plain(prompt, count), "graphs must not change the tokens"
    pool.audit()  # every page is accounted for
    assert first is not None
    try:
        first.tensor()
    except StaleOutputError as error:
        print(f"refused: {error}")
    print(f"{len(batches)} replays of batches {min(batches)} to {max(batches)}; the tokens are those of plain decoding")


if __name__ == "__main__":
    main()
