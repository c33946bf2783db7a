"""What a confidence head could bring a block drafter beyond the probabilities of its drafts.

A confidence head (DSpark's) says from a block's row, and from the Markov embedding of the token before, whether the
draft of a level is accepted if those above it were. This fits one on a DSpark head for the package's model that `specrs
train-head --form dspark` wrote, over chains that the head drafts from places of a text, and tells on the model's own
greedy answers how well chains are cut by what it says. Counted: a round costs 1 for the pass, ``--block`` for the head,
and a share for each draft that is verified; the chain is cut where the product of what its levels are given falls below
a threshold. Thresholds and calibrations are fitted on half of the answers, and judged on the other half.

    specrs train-head --out HEAD --form dspark --text SOME/CODE --minutes 10
    python benches/confidence.py HEAD --text SOME/CODE [--pieces 600] [--answers 96] [--tokens 192] [--block 0.2]

`q` is the probability of the draft, calibrated by level (a logistic regression on its logit); `confidence` what the
fitted head says, calibrated likewise; `both` a regression on both; `known` cuts where the first draft is wrong.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from common import write_result
from gate_texts import KINDS
from specrs import LLM, SamplingParams, assets
from specrs.models import ModelConfig, ops_for
from specrs.train.block import BlockHead
from specrs.train.checkpoint import model_digest
from specrs.train.heads import HeadSizes
from specrs.train.rows import anchors_of, pack
from specrs.train.teacher import Teacher

SHARES = (0.01, 0.05, 0.1, 0.2, 0.4)  # what verifying a draft costs of a pass
LENGTH, EVERY = 256, 4


def head_of(directory: Path, model: Path, config: ModelConfig) -> BlockHead:
    """The head in training that its files are of."""
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    layer = raw["transformer_layer_config"]
    sizes = HeadSizes.of(config, raw["draft_vocab_size"], layer["intermediate_size"], layer["num_hidden_layers"])
    head = BlockHead(sizes, LENGTH, 0, raw["block_size"], raw["markov_rank"])
    kept = load_file(directory / "model.safetensors")
    head.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in kept.items()})
    head.mask_token = raw["mask_token_id"]
    return head


def answers(count: int, tokens: int) -> list[np.ndarray[Any, Any]]:
    """Greedy answers of the package's model, each behind its prompt."""
    prompts = [*assets.heldout_prompts(), *(text for texts in KINDS.values() for text in texts)]
    with LLM(drafters=["suffix"]) as llm:
        ids = [llm.encode(text) for text in prompts[:count]]
        outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        return [np.array([*prompt[-32:], *out.token_ids]) for prompt, out in zip(ids, outputs, strict=True)]


@torch.no_grad()
def chains(
    head: BlockHead, teacher: Teacher, config: ModelConfig, docs: list[np.ndarray[Any, Any]]
) -> dict[str, Tensor]:
    """The head's own chains from places of the text: of each place and level [N, levels] the draft's probability,
    whether it is right, whether its answer is in the text, and what a confidence head reads [N, levels, h + rank]."""
    assert head.markov_head is not None
    ids, drafts = head.target_ids, torch.full((config.vocab_size,), -1)
    drafts[ids] = torch.arange(len(ids))
    rows = pack(docs, LENGTH, np.random.default_rng(0))
    found: dict[str, list[Tensor]] = {name: [] for name in ("q", "right", "there", "read")}
    for first in range(0, len(rows), 4):
        part = rows[slice(first, first + 4)]
        lesson = teacher.lesson(part, anchors_of(part, EVERY, [first]), ids, drafts, 1.0)
        hidden = head.blocks(lesson.embeds, lesson.features, lesson.pieces, lesson.anchors).flatten(0, 1)
        pieces = lesson.pieces.flatten()
        begins = (lesson.anchors + LENGTH * torch.arange(len(part))[:, None]).flatten()
        before, levels = lesson.tokens.flatten()[begins], []
        for k in range(head.levels):
            at = (begins + k).clamp(max=len(pieces) - 2)
            there = (begins + k + 1 < len(pieces)) & (pieces[at + 1] == pieces[begins])
            q, draft = head.logits(hidden[:, k], before).softmax(-1).max(-1)
            read = torch.cat((hidden[:, k], head.markov_head.markov_w1(before)), 1)
            levels.append((q, draft == lesson.best[at], there, read))
            before = ids[draft]
        for name, each in zip(found, zip(*levels, strict=True), strict=True):
            found[name].append(torch.stack(each, 1))
    return {name: torch.cat(parts) for name, parts in found.items()}


def fitted(read: Tensor, right: Tensor, rows: Tensor, steps: int = 1500) -> Tensor:
    """Probabilities of all rows by a logistic regression on some of them."""
    generator = torch.Generator().manual_seed(0)
    mean, std = read[rows].mean(0), read[rows].std(0) + 1e-6
    x, y = (read - mean) / std, right.float()
    line = torch.nn.utils.skip_init(torch.nn.Linear, read.shape[1], 1)
    with torch.no_grad():
        line.weight.zero_(), line.bias.zero_()
    optimiser = torch.optim.AdamW(line.parameters(), 1e-2, weight_decay=1e-2)
    some = rows.nonzero().flatten()
    for step in range(steps):
        batch = some[torch.randint(0, len(some), (2048,), generator=generator)]
        loss = F.binary_cross_entropy_with_logits(line(x[batch])[:, 0], y[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        optimiser.step()
    with torch.no_grad():
        found: Tensor = line(x)[:, 0].sigmoid()
        return found


def text_of(directory: Path, tokens: int) -> list[np.ndarray[Any, Any]]:
    """Documents of a directory, so many tokens in all at most."""
    with LLM(speculative=False) as llm:
        found, left = [], tokens
        for path in sorted(directory.rglob("*.py")):
            ids = llm.encode(path.read_text(encoding="utf-8"))[: min(left, 4000)]
            found.append(np.array(ids))
            left -= len(ids)
            if left <= 0:
                break
    return found


def reached(right: Tensor) -> Tensor:
    """Levels [N, levels] above which all drafts are right."""
    return torch.cat((torch.ones(len(right), 1, dtype=torch.bool), right[:, :-1].cumprod(1).bool()), 1)


def logit(p: Tensor) -> Tensor:
    p = p.clamp(1e-5, 1 - 1e-5)
    return (p / (1 - p)).log()


def speed(claims: Tensor, accepted: Tensor, threshold: float, block: float, share: float) -> tuple[float, float, float]:
    """Tokens by cost, tokens a round, and drafts a round of chains that are cut by a threshold."""
    cut = (claims.cumprod(1) >= threshold).sum(1)
    tokens = 1 + torch.minimum(cut, accepted).float()
    return float(tokens.sum() / (1 + block + share * cut).sum()), float(tokens.mean()), float(cut.float().mean())


def main() -> None:
    """Fit, cut, count, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a directory of text to fit the confidence head on")
    parser.add_argument("--pieces", type=int, default=600, help="of so many tokens times 256 of it")
    parser.add_argument("--answers", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--block", type=float, default=0.2, help="what drafting costs of a pass")
    parser.add_argument("--name", default="confidence")
    args = parser.parse_args()
    model = assets.model_dir()
    config = ModelConfig.from_directory(model)
    head, teacher = head_of(args.head, model, config), Teacher(model, ops_for(), LENGTH)
    head.mask_by(head.mask_token, teacher.embedded(torch.tensor([head.mask_token]))[0])
    docs = answers(args.answers, args.tokens)
    learnt = chains(head, teacher, config, text_of(args.text, args.pieces * LENGTH))
    first, second = (chains(head, teacher, config, docs[half::2]) for half in (0, 1))
    both = {name: torch.cat((first[name], second[name])) for name in first}
    whole = both["there"].all(1)  # places whose chain ends within the text
    train = (torch.arange(len(whole)) < len(first["q"])) & whole
    test = ~(torch.arange(len(whole)) < len(first["q"])) & whole
    right = both["right"]
    alive = reached(right)
    count, levels = right.shape
    of_level = torch.eye(levels).expand(count, -1, -1)

    def calibrated(*claims: Tensor) -> Tensor:
        columns = [of_level, *(logit(p)[:, :, None] for p in claims)]
        rows = (alive & train[:, None]).flatten()
        return fitted(torch.cat(columns, 2).flatten(0, 1), right.flatten(), rows).view(count, levels)

    fit = (reached(learnt["right"]) & learnt["there"]).flatten()
    fit = torch.cat((fit, torch.zeros(count * levels, dtype=torch.bool)))
    read, taken = (torch.cat((learnt[name].flatten(0, 1), both[name].flatten(0, 1))) for name in ("read", "right"))
    said = fitted(read, taken, fit)[-count * levels :].view(count, levels)
    claims = {"q": calibrated(both["q"]), "confidence": calibrated(said), "both": calibrated(both["q"], said)}
    accepted = right.cumprod(1).sum(1)
    judged = (alive & test[:, None]).flatten()
    losses = {
        name: float(F.binary_cross_entropy(p.flatten()[judged].clamp(1e-6, 1 - 1e-6), right.flatten()[judged].float()))
        for name, p in claims.items()
    }
    costs: dict[str, Any] = {}
    for share in SHARES:
        row: dict[str, Any] = {}
        for name, p in claims.items():
            grid = [0.0, *np.geomspace(0.005, 1.0, 60).tolist()]
            best = max(grid, key=lambda t, p=p: speed(p[train], accepted[train], t, args.block, share)[0])
            row[name] = [round(x, 4) for x in speed(p[test], accepted[test], best, args.block, share)]
        known = right.cumprod(1).float()
        row["known"] = [round(x, 4) for x in speed(known[test], accepted[test], 0.5, args.block, share)]
        costs[str(share)] = row
        print(share, row)
    record = {
        "head": {"directory": args.head.name, "digest": model_digest(args.head)}, "answers": len(docs),
        "fitted_on": int(fit.sum()),
        "tokens": args.tokens, "block": args.block, "places": [int(train.sum()), int(test.sum())],
        "right_by_level": [round(float(right[test & alive[:, k], k].float().mean()), 4) for k in range(levels)],
        "log_loss": {name: round(loss, 4) for name, loss in losses.items()},
        "columns": "tokens by cost, tokens a round, drafts a round", "by_share": costs,
    }  # fmt: skip
    print(record["right_by_level"], record["log_loss"])
    write_result(args.name, record)


if __name__ == "__main__":
    main()
