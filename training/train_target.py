"""Stage 2: trains the target, keeping the recipe with the lowest held-out loss."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specrs.train.muon import MuonAdamW, learning_rate, split_parameters

from .config import SEED, TargetConfig
from .rows import Corpus, batches, shuffled
from .store import save_target
from .target import Target


@dataclass(frozen=True)
class Recipe:
    """The settings that a candidate run varies."""

    epochs: float = 18.0
    dropout: float = 0.25
    weight_decay: float = 1.0
    peak_lr: float = 3e-3


def token_loss(hidden: Tensor, embedding: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross-entropy of the next tokens."""
    return F.cross_entropy(F.linear(hidden, embedding).float().flatten(0, 1), wanted.flatten())


def loss_of(model: Target, rows: Tensor, objective: Callable[..., Tensor] = token_loss) -> Tensor:
    """Mean next-token cross-entropy of rows [B, T + 1]."""
    return objective(model(rows[:, :-1]), model.model.embed_tokens.weight, rows[:, 1:])


@torch.no_grad()
def evaluate(model: Target, rows: Tensor, batch: int) -> float:
    """Mean loss over held-out rows."""
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        losses = [loss_of(model, part) * len(part) for part in rows.split(batch)]
    model.train()
    return float(torch.stack(losses).sum()) / len(rows)


def train(
    recipe: Recipe, cfg: TargetConfig, corpus: Corpus, length: int, batch: int, device: torch.device, limit: int | None
) -> tuple[Target, dict[str, object]]:
    """One run from scratch: the model (rounded to bfloat16, as shipped) and its log."""
    torch.manual_seed(SEED)
    model = Target(cfg, recipe.dropout).to(device)
    if device.type == "cuda":
        for block in model.model.layers:
            block.compile()
    objective = torch.compile(token_loss) if device.type == "cuda" else token_loss
    docs = corpus.documents(held_out=False)
    held = shuffled(corpus.documents(held_out=True), length + 1, seed=0).to(device)
    held = held[:4] if limit else held
    tokens = sum(map(len, docs))
    total = limit or int(recipe.epochs * tokens / (batch * length))
    optimiser = MuonAdamW(*split_parameters(model), recipe.weight_decay)
    curve: list[dict[str, float]] = []
    seen: list[Tensor] = []
    start = time.perf_counter()
    for i, rows in enumerate(batches(docs, length + 1, batch, total, device)):
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(model, rows, objective)
        loss.backward()
        optimiser.step(learning_rate((i + 0.5) / total, recipe.peak_lr))
        seen.append(loss.detach())
        if (i + 1) % max(total // 8, 1) == 0:
            train_loss = float(torch.stack(seen).mean())
            with torch.autocast(device.type, torch.bfloat16):
                held_loss = evaluate(model, held, batch)
            curve.append({"step": i + 1, "train": train_loss, "held_out": held_loss})
            seen = []
            print(f"  step {i + 1}/{total} train {train_loss:.4f} held-out {held_loss:.4f}", flush=True)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    final = evaluate(model, held, max(batch // 4, 1))  # float32 arithmetic on the bfloat16 weights
    log: dict[str, object] = {
        "recipe": asdict(recipe), "steps": total, "batch": batch, "length": length, "seconds": round(seconds, 1),
        "tokens_per_second": round(total * batch * length / seconds), "curve": curve, "held_out_bf16_weights": final,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    print(f"  {recipe} {seconds:.0f} s, held-out {final:.4f}", flush=True)
    return model, log


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--work", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True, help="the target's folder")
    args.add_argument("--recipes", default="[{}]", help="JSON list of Recipe fields; the best is kept")
    args.add_argument("--length", type=int, default=1024)
    args.add_argument("--batch", type=int, default=64)
    args.add_argument("--limit", type=int, help="steps, for a trial on a CPU")
    args.add_argument("--stop-after", type=float, default=1e9, help="seconds after which no further recipe starts")
    args.add_argument("--layers", type=int, default=TargetConfig.num_hidden_layers)
    opts = args.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cfg = TargetConfig(num_hidden_layers=opts.layers)
    corpus = Corpus(opts.work / "tokens.npz")
    best, logs = float("inf"), []
    start = time.perf_counter()
    for fields in json.loads(opts.recipes):
        if time.perf_counter() - start > opts.stop_after:
            break
        model, log = train(Recipe(**fields), cfg, corpus, opts.length, opts.batch, device, opts.limit)
        logs.append(log)
        if float(str(log["held_out_bf16_weights"])) < best:
            best = float(str(log["held_out_bf16_weights"]))
            save_target(model, opts.out)
        (opts.work / "target.json").write_text(json.dumps(logs, indent=1) + "\n")


if __name__ == "__main__":
    main()
