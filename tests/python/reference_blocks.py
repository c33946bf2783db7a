"""Heads that draft blocks (DFlash, DFlash2, JetSpec, DSpark, Domino), restated: plain torch in f64, dense,
without cache or plan.

It shares nothing with specrs. `Block` says what a head is, `Weights` are its tensors by the names of this file,
`logits_of` is a block's pass over a context, and `biases_of` what scores change by behind a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Block:
    """A head as it was trained.

    Attributes:
        streams: residual streams of the target that are features: 0 is the embedding, i enters layer i.
        anchor: the first row predicts the token behind it, as every row does.
        markov: kind of the Markov head; `None` without one.
        free: of Domino, the levels that its network does not correct; `None` of others. `rank` is its inner width.
        state: of Domino, the width of its network's state.
        taps: of DFlash2, the rows that its convolutions mix; 0 of others. `group` columns share a kernel.
        candidates: of DFlash2, the tokens of a level that its selector chooses from; `rank` is its width.
    """

    rows: int = 5
    mask: int = 7
    hidden: int = 64
    target_hidden: int = 64
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 10
    inner: int = 70
    vocab: int = 300
    draft_vocab: int | None = None
    layers: int = 2
    streams: tuple[int, ...] = (2, 3)
    causal: bool = False
    anchor: bool = False
    qk_norm: bool = True
    biases: bool = False
    own_embedding: bool = False
    own_scores: bool = False
    markov: str | None = None
    rank: int = 12
    free: int | None = None
    state: int = 9
    taps: int = 0
    group: int = 4
    candidates: int = 0
    confidence: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    cap: float | None = None
    eps: float = 1e-6
    theta: float = 10000.0

    @property
    def depth(self) -> int:
        return self.rows if self.anchor else self.rows - 1


def random_block(b: Block, seed: int) -> Weights:
    """Weights that keep activations at about unit size, and norms that are clearly not ones."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def vector(size: int, mean: float = 1.0) -> torch.Tensor:
        return mean + 0.3 * torch.randn(size, generator=generator)

    w = {"fc": matrix(b.hidden, len(b.streams) * b.target_hidden), "context": vector(b.hidden),
         "last": vector(b.hidden)}  # fmt: skip
    if b.own_embedding:
        w["embed"] = torch.randn(b.vocab, b.hidden, generator=generator)
    if b.own_scores or b.draft_vocab is not None:
        w["scores"] = matrix(b.draft_vocab or b.vocab, b.hidden)
    for i in range(b.layers):
        q, kv = b.heads * b.head_dim, b.kv_heads * b.head_dim
        shapes = {"q": (q, b.hidden), "k": (kv, b.hidden), "v": (kv, b.hidden), "o": (b.hidden, q),
                  "gate": (b.inner, b.hidden), "up": (b.inner, b.hidden), "down": (b.hidden, b.inner)}  # fmt: skip
        for name, shape in shapes.items():
            w[f"{i}.{name}"] = matrix(*shape)
            if b.biases:
                w[f"{i}.{name}.bias"] = vector(shape[0], 0.0)
        w[f"{i}.first"], w[f"{i}.second"] = vector(b.hidden), vector(b.hidden)
        if b.qk_norm:
            w[f"{i}.q_norm"], w[f"{i}.k_norm"] = 2 * vector(b.head_dim), 2 * vector(b.head_dim)
    if b.markov is not None:
        w["w1"] = torch.randn(b.vocab, b.rank, generator=generator)
        w["w2"] = 2 * matrix(b.draft_vocab or b.vocab, b.rank)
    if b.markov == "gated":
        w["gate"], w["gate.bias"] = 3 * matrix(b.rank, b.hidden + b.rank), vector(b.rank, 0.0)
    if b.markov == "rnn":
        w["joint"], w["joint.bias"] = 2 * matrix(3 * b.rank, 2 * b.rank + b.hidden), vector(3 * b.rank, 0.0)
    if b.free is not None:
        w["gru.token"], w["gru.state"] = matrix(3 * b.state, b.hidden), matrix(3 * b.state, b.state)
        w["inner"], w["outer"] = matrix(b.rank, b.hidden + b.state), 3 * matrix(b.vocab, b.rank)
    for i in range(b.layers if b.taps else 0):
        for part in ("attention", "mlp"):
            w[f"{i}.{part}.base"] = 0.6 * torch.randn(2, b.taps, b.hidden, generator=generator)
            w[f"{i}.{part}.kernel"] = 0.4 * matrix(2 * b.taps * b.hidden // b.group, b.hidden)
    if b.candidates:
        w["selector"] = matrix(b.rank, b.hidden)
        w["before"], w["behind"] = (torch.randn(b.vocab, b.rank, generator=generator) for _ in range(2))
    if b.confidence:
        w["confidence"] = matrix(1, b.hidden + (b.rank if b.markov else 0))
        w["confidence.bias"] = vector(1, 0.0)
    return w


def logits_of(
    b: Block, weights: Weights, embedding: torch.Tensor, scores: torch.Tensor, features: torch.Tensor, token: int,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(logits [levels, draft vocabulary], normalised rows [levels, hidden]) of a block behind a context.

    Args:
        embedding, scores: the target's, where the head has none.
        features: [L, streams * target_hidden], of the context's positions 0..L.
        token: the token at L.
    """
    w = {name: value.double() for name, value in weights.items()}
    n, length, d = rows or b.rows, len(features), b.head_dim
    context = _normed(features.double() @ w["fc"].T, w["context"], b.eps)
    table = w.get("embed", embedding.double())
    x = table[[token, *[b.mask] * (n - 1)]] * b.embedding_scale
    places = torch.arange(length + n)
    seen = torch.ones(n, length + n, dtype=torch.bool)
    if b.causal:
        seen = seen.tril(length)
    for i in range(b.layers):
        u = _normed(x, w[f"{i}.first"], b.eps)
        y = _convolved(b, w, f"{i}.attention", 0, u, u)
        q = _product(y, w, f"{i}.q").reshape(n, b.heads, d)
        k, v = (
            torch.cat((_product(context, w, f"{i}.{name}"), _product(y, w, f"{i}.{name}"))).reshape(length + n, -1, d)
            for name in "kv"
        )
        if b.qk_norm:
            q, k = _normed(q, w[f"{i}.q_norm"], b.eps), _normed(k, w[f"{i}.k_norm"], b.eps)
        q, k = _turned(q, places[length:], b.theta), _turned(k, places, b.theta)
        out = torch.zeros(n, b.heads, d, dtype=torch.float64)
        for head in range(b.heads):
            of = head // (b.heads // b.kv_heads)
            weighed = torch.where(seen, q[:, head] @ k[:, of].T / d**0.5, -torch.inf).softmax(-1)
            out[:, head] = weighed @ v[:, of]
        x = x + _convolved(b, w, f"{i}.attention", 1, u, _product(out.reshape(n, -1), w, f"{i}.o"))
        u = _normed(x, w[f"{i}.second"], b.eps)
        y = _convolved(b, w, f"{i}.mlp", 0, u, u)
        gated = torch.nn.functional.silu(_product(y, w, f"{i}.gate")) * _product(y, w, f"{i}.up")
        x = x + _convolved(b, w, f"{i}.mlp", 1, u, _product(gated, w, f"{i}.down"))
    x = _normed(x, w["last"], b.eps)
    if not b.anchor:
        x = x[1:]
    logits = x @ w.get("scores", scores.double()).T * b.logit_scale
    logits = logits if b.cap is None else b.cap * (logits / b.cap).tanh()
    return logits, x


def chosen_from(b: Block, logits: torch.Tensor) -> torch.Tensor:
    """The logits of the tokens that have a chance, and -inf of others: a selector chooses among the likeliest."""
    logits = logits.clone()
    for row in logits if b.candidates else ():
        row[row.argsort(descending=True)[b.candidates :]] = -torch.inf
    return logits


def biases_of(
    b: Block, weights: Weights, rows: torch.Tensor, path: Sequence[int], embedding: torch.Tensor
) -> torch.Tensor:
    """What the head's own network adds to the logits of the level behind a path.

    Args:
        embedding: the target's, where the head has none.
        rows: [levels, hidden], normalised.
        path: the request's last token, then a draft token of each level before; target ids.
    """
    w = {name: value.double() for name, value in weights.items()}
    if b.free is not None:
        gru = torch.nn.GRU(b.hidden, b.state, bias=False, dtype=torch.float64)
        gru.weight_ih_l0.data, gru.weight_hh_l0.data = w["gru.token"], w["gru.state"]
        _, state = gru(w.get("embed", embedding.double())[list(path)])
        x = torch.cat((rows[len(path) - 1], state[0]))
        return (w["outer"] @ torch.nn.functional.silu(w["inner"] @ x)).detach() * (len(path) > b.free)
    if b.candidates:
        return w["behind"] @ (w["before"][path[-1]] * (w["selector"] @ rows[len(path) - 1]))
    state = torch.zeros(b.rank, dtype=torch.float64)
    made = state
    for level, token in enumerate(path):
        m = w["w1"][token]
        if b.markov == "vanilla":
            made = m
        elif b.markov == "gated":
            made = (w["gate"] @ torch.cat((rows[level], m)) + w["gate.bias"]).sigmoid() * m
        else:
            gate, change, out = (w["joint"] @ torch.cat((state, m, rows[level])) + w["joint.bias"]).split(b.rank)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * change.tanh()
            made = out.tanh()
    return w["w2"] @ made


def _convolved(b: Block, w: Weights, name: str, side: int, u: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A block's rows x mixed with those before them, by kernels that follow from the rows u."""
    if not b.taps:
        return x
    y = torch.zeros_like(x)
    for row in range(len(x)):
        of_row = (w[f"{name}.kernel"] @ u[row]).reshape(2, b.taps, b.hidden // b.group)[side]
        for tap in range(min(b.taps, row + 1)):
            for column in range(b.hidden):
                kernel = w[f"{name}.base"][side, tap, column] + of_row[tap, column // b.group]
                y[row, column] += kernel * x[row - tap, column]
    return y


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _product(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    return x @ w[name].T + w.get(f"{name}.bias", torch.zeros(1, dtype=torch.float64))


def _turned(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotated by position: element i of the first half with element i of the second."""
    d = x.shape[-1]
    angles = torch.outer(positions.double(), theta ** (-torch.arange(0, d, 2).double() / d))
    turned = torch.polar(torch.ones_like(angles), angles)[:, None] * torch.complex(x[..., : d // 2], x[..., d // 2 :])
    return torch.cat((turned.real, turned.imag), dim=-1)
