"""Stage 3: text that the target itself writes, which is what the head will see at work.

Prompts are beginnings of training documents (files, and functions cut out of them) and places inside files where a line
starts. A row is decoded from its BOS on, its prompt's tokens forced, so that prompts of any length share a batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .config import BOS_ID, SEED, TargetConfig
from .rows import Corpus
from .store import load_target
from .target import KVCache, Target


def draw_prompts(docs: list[np.ndarray], newline: int, count: int, longest: int) -> tuple[Tensor, Tensor]:
    """(ids [count, longest], lengths [count]); short beginnings are as frequent as long ones."""
    rng = np.random.default_rng(SEED)
    ids = np.full((count, longest), BOS_ID, dtype=np.int64)
    lengths = np.zeros(count, dtype=np.int64)
    for i, d in enumerate(rng.integers(0, len(docs), count)):
        doc = docs[d]
        n = min(int(np.exp(rng.uniform(np.log(4), np.log(longest)))), len(doc))
        start = 1
        if len(doc) > 1000:  # a file: begin anywhere a line begins, or at its top
            lines = np.flatnonzero(doc[: len(doc) - n] == newline) + 1
            start = 1 if rng.random() < 0.3 or not len(lines) else int(rng.choice(lines))
        body = doc[start : start + n - 1]
        ids[i, 1 : 1 + len(body)] = body
        lengths[i] = 1 + len(body)
    return torch.from_numpy(ids), torch.from_numpy(lengths)


@torch.no_grad()
def generate(model: Target, prompts: Tensor, lengths: Tensor, temperature: Tensor, total: int) -> Tensor:
    """Rows [B, total]; temperature [B] is 0 for greedy rows."""
    device = prompts.device
    batch = len(prompts)
    cache = KVCache(model.cfg, batch, total, device, torch.bfloat16)
    out = torch.zeros(batch, total, dtype=torch.int64, device=device)
    out[:, : prompts.shape[1]] = prompts
    sampled = temperature > 0
    warmth = temperature.clamp(min=1e-3)[:, None]
    with torch.autocast(device.type, torch.bfloat16):
        for t in range(total - 1):
            at = torch.tensor([t], device=device)
            hidden, _ = model.step(out[:, t : t + 1], at, at, cache, t + 1, None)
            logits = model.logits(hidden[:, 0]).float()
            noise = torch.empty_like(logits).exponential_().log_().neg_()  # Gumbel: its argmax is a sample
            token = torch.where(sampled, (logits / warmth + noise).argmax(-1), logits.argmax(-1))
            out[:, t + 1] = torch.where(lengths > t + 1, out[:, t + 1], token)
    return out


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--work", type=Path, required=True)
    args.add_argument("--model", type=Path, required=True)
    args.add_argument("--rows", type=int, default=32768)
    args.add_argument("--batch", type=int, default=4096)
    args.add_argument("--total", type=int, default=512, help="tokens of a row, prompt included")
    args.add_argument("--longest", type=int, default=200, help="tokens of the longest prompt")
    opts = args.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(opts.model, device)
    assert model.cfg.vocab_size == TargetConfig.vocab_size
    newline = Tokenizer.from_file(str(opts.model / "tokenizer.json")).encode("\n", add_special_tokens=False).ids[0]
    docs = Corpus(opts.work / "tokens.npz").documents(held_out=False)
    prompts, lengths = draw_prompts(docs, newline, opts.rows, opts.longest)
    choice = torch.arange(opts.rows) % 8
    temperature = torch.where(choice < 4, 0.0, torch.where(choice < 7, 0.8, 1.0))
    start = time.perf_counter()
    parts = []
    for i in range(0, opts.rows, opts.batch):
        p, n, warmth = (x[i : i + opts.batch].to(device) for x in (prompts, lengths, temperature))
        parts.append(generate(model, p, n, warmth, opts.total).cpu())
    rows = torch.cat(parts)
    np.save(opts.work / "generated.npy", rows.numpy().astype(np.uint16))
    seconds = time.perf_counter() - start
    print(f"  {rows.numel()} tokens in {seconds:.0f} s, prompts {int(lengths.sum()) / rows.numel():.1%}", flush=True)


if __name__ == "__main__":
    main()
