"""Stage 4: trains the EAGLE-3 head by training-time test (arXiv:2503.01840, section 3)."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .config import SEED, HeadConfig
from .head import Head
from .muon import MuonAdamW, learning_rate, split_parameters
from .rows import Corpus, pack
from .store import load_target, save_head
from .target import Target


def frequent_tokens(docs: list[np.ndarray], generated: np.ndarray, vocab: int, size: int) -> tuple[Tensor, float]:
    """The `size` tokens most frequent in generated text and corpus; and the share of generated text they cover."""
    own = np.bincount(generated.ravel(), minlength=vocab).astype(np.float64)
    corpus = np.bincount(np.concatenate(docs), minlength=vocab).astype(np.float64)
    score = own / own.sum() + 0.3 * corpus / corpus.sum()
    ids = np.argsort(-score, kind="stable")[:size]
    return torch.from_numpy(np.sort(ids)), float(own[ids].sum() / own.sum())


def mixture(docs: list[np.ndarray], generated: np.ndarray, length: int, batch: int, total: int) -> Iterator[Tensor]:
    """`total` batches [batch, length] of the corpus and of generated rows laid end to end, shuffled together."""
    per_row = length // generated.shape[1]
    done, epoch = 0, 0
    while done < total:
        rng = np.random.default_rng(SEED + epoch)
        order = rng.permutation(len(generated))[: len(generated) // per_row * per_row]
        own = torch.from_numpy(generated[order].reshape(-1, length).astype(np.int64))
        rows = torch.cat([own, pack(docs, length, seed=SEED + epoch)])
        rows = rows[torch.from_numpy(rng.permutation(len(rows)))]
        epoch += 1
        for start in range(0, len(rows) - batch + 1, batch):
            if done == total:
                return
            done += 1
            yield rows[start : start + batch]


@torch.no_grad()
def teach(
    model: Target, rows: Tensor, target_ids: Tensor, t2d: Tensor, hard: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs and targets that the head learns from rows [B, T]: embeds, feats, the distribution to match,
    the target's argmax.

    The distribution is the target's over the draft vocabulary, renormalised, with a share `hard` moved to its argmax: a
    greedy verifier asks for the argmax alone, a sampling one for the whole distribution.

    All are aligned to draft positions: embeds of the next token, features of the position itself, and the target's
    answer one position on. The argmax is -1 where it lies outside the draft vocabulary and at the last position, which
    has no next.
    """
    hidden, feats = model(rows)
    logits = model.logits(hidden).roll(-1, dims=1)
    best = logits.argmax(-1)
    best = torch.where(t2d[best], best, -1)
    best[:, -1] = -1
    embeds = model.model.embed_tokens(rows.roll(-1, dims=1))
    wanted = torch.softmax(logits[..., target_ids].float(), dim=-1) * (1 - hard)
    peak = wanted.argmax(-1, keepdim=True)
    wanted.scatter_add_(-1, peak, torch.full_like(peak, hard, dtype=wanted.dtype))
    return embeds, feats, wanted, best


def step_loss(head: Head, hidden: Tensor, wanted: Tensor, best: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(mean soft cross-entropy where the target's argmax is draftable, top-1 agreement over all positions)."""
    logits = head.logits(hidden).float()
    scored = best >= 0
    ce = -(wanted * F.log_softmax(logits, dim=-1)).sum(-1)
    right = (target_ids[logits.argmax(-1)] == best).float().mean()
    return (ce * scored).sum() / scored.sum(), right


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--work", type=Path, required=True)
    args.add_argument("--model", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--steps", type=int, default=3500)
    args.add_argument("--length", type=int, default=1024)
    args.add_argument("--batch", type=int, default=32)
    args.add_argument("--peak-lr", type=float, default=3e-3)
    args.add_argument("--decay", type=float, default=0.9, help="weight of step j is decay**j")
    args.add_argument("--hard", type=float, default=0.5, help="share of the wanted distribution moved to its argmax")
    args.add_argument("--intermediate", type=int, default=HeadConfig.intermediate_size)
    args.add_argument("--draft-vocab", type=int, default=HeadConfig.draft_vocab_size)
    args.add_argument("--log", default="head.json")
    opts = args.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(opts.model, device).requires_grad_(False)
    docs = Corpus(opts.work / "tokens.npz").documents(held_out=False)
    generated = np.load(opts.work / "generated.npy")

    shape = HeadConfig(opts.draft_vocab, opts.intermediate)
    head = Head(model.cfg, shape).to(device)
    ids, coverage = frequent_tokens(docs, generated, model.cfg.vocab_size, opts.draft_vocab)
    head.set_vocab(ids.to(device))
    target_ids = head.target_ids
    with torch.no_grad():  # the target's own output layer is where the head's starts
        head.lm_head.weight.copy_(model.model.embed_tokens.weight[target_ids])
        head.norm.weight.copy_(model.model.norm.weight)

    objective = step_loss
    if device.type == "cuda":
        for block in model.model.layers:
            block.compile()
        head.compile_parts()
        objective = torch.compile(step_loss)
    at = torch.arange(opts.length, device=device)
    weights = [opts.decay**j for j in range(shape.ttt_steps)]
    optimiser = MuonAdamW(*split_parameters(head), weight_decay=0.05)
    curve: list[dict[str, object]] = []
    seen: list[Tensor] = []
    start = time.perf_counter()
    for i, rows in enumerate(mixture(docs, generated, opts.length, opts.batch, opts.steps)):
        with torch.autocast(device.type, torch.bfloat16):
            embeds, feats, wanted, best = teach(model, rows.to(device), target_ids, head.t2d, opts.hard)
            outputs = head.unroll(embeds, feats, shape.ttt_steps)
            scores = [
                objective(head, h, wanted, torch.where(at >= j, best, -1), target_ids) for j, h in enumerate(outputs)
            ]
        loss = sum((w * ce for w, (ce, _) in zip(weights, scores, strict=True)), torch.zeros((), device=device))
        loss.backward()
        optimiser.step(learning_rate(i, opts.steps, opts.peak_lr))
        seen.append(torch.stack([torch.stack([ce.detach(), right]) for ce, right in scores]))
        if (i + 1) % max(opts.steps // 10, 1) == 0 or i + 1 == opts.steps:
            ce, right = torch.stack(seen).mean(0).unbind(-1)
            seen = []
            right = right * opts.length / (opts.length - 1 - torch.arange(len(right), device=device))  # void positions
            curve.append({"step": i + 1, "loss": ce.tolist(), "top1": right.tolist()})
            text = " ".join(f"{x:.3f}" for x in right.tolist())
            print(f"  step {i + 1}/{opts.steps} loss {ce[0]:.3f} top-1 by step {text}", flush=True)
            save_head(head, opts.out)
    seconds = time.perf_counter() - start
    log = {
        "steps": opts.steps, "batch": opts.batch, "length": opts.length, "peak_lr": opts.peak_lr, "decay": opts.decay,
        "hard": opts.hard,
        "ttt_steps": shape.ttt_steps, "intermediate": opts.intermediate, "draft_vocab": opts.draft_vocab,
        "coverage_of_generated_text": coverage, "generated_tokens": int(generated.size), "seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in head.parameters()), "curve": curve,
    }  # fmt: skip
    (opts.work / opts.log).write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
