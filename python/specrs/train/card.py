"""The report of a training: a table for people, a plot, a record for programs, and the head's model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrs.drawing import figure
from specrs.drawing.terminal import aligned
from specrs.train.measured import BUSH, CHAIN, Measured

PLOT, RECORD = "acceptance.svg", "training.json"


@dataclass(frozen=True)
class Report:
    """Everything that is worth knowing of a head.

    Attributes:
        name: name of the model.
        record: plain values: options, digests, counts, times, versions and the curve.
        found: what the engine measured.
    """

    name: str
    record: dict[str, Any]
    found: Measured

    def table(self) -> list[tuple[str, ...]]:
        """Rows of the table of acceptance, the first of them the heading."""
        chain, bush = (",".join(map(str, shape)) for shape in (CHAIN, BUSH))
        heading = ("held-out text", "prompts", f"tokens a round, {chain}", bush, "speed over plain", "without the head")
        rows = [
            (kind, str(k.prompts), f"{k.chain:.2f}", f"{k.bush:.2f}", f"{k.head:.2f}x", f"{k.text:.2f}x")
            for kind, k in self.found.kinds.items()
        ]
        return [heading, *rows]

    def text(self) -> str:
        """Return the table and the verdict for a terminal."""
        return "\n".join([*aligned(self.table(), "<>>>>>"), "", self.verdict()])

    def verdict(self) -> str:
        """Return what the head is worth, in a sentence."""
        f = self.found
        speed = (
            f"{f.head:.0f} tokens/s with the head, {f.plain:.0f} by plain decoding, one request at a time on {f.device}"
        )
        if not f.identical:
            return f"tokens DIFFER from those of plain decoding; {speed}"
        return f"{'pays' if f.pays else 'does not pay'} on this machine: {speed}; tokens identical"

    def write(self, folder: Path) -> None:
        """Write the plot, the record and the card into the head's directory."""
        found = self.found
        curve: dict[str, list[tuple[float, float]]] = {}
        for point in self.record["curve"]:
            for kind, held in point["held_out"].items():
                curve.setdefault(kind, []).append((point["tokens"], held["loss"][0]))
        bars = {kind: (k.chain, k.bush) for kind, k in found.kinds.items()}
        names = [f"tree {','.join(map(str, shape))}" for shape in (CHAIN, BUSH)]
        title = f"{self.record['form']} head of {self.name}, greedy"
        figure.save_head(curve, bars, names, title, folder / PLOT)
        said = {**self.record, "measured": asdict(found)}
        (folder / RECORD).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(self._card(), encoding="utf-8")

    def _card(self) -> str:
        record, found = self.record, self.found
        last = record["curve"][-1]["held_out"]
        levels = range(1, 1 + max((len(held["loss"]) for held in last.values()), default=0))
        losses = [
            ["held-out text", *(f"level {level}" for level in levels)],
            *([kind, *(f"{x:.3f}" for x in held["loss"])] for kind, held in last.items()),
            *([f"{kind}, agreement", *(f"{x:.3f}" for x in held["agreement"])] for kind, held in last.items()),
        ]
        heats = [["temperature", "temper", "levels"]] + [
            [heat, f"{said['temper']:.2f}", ", ".join(f"{level:.2f}" for level in said["levels"])]
            for heat, said in found.acceptance.items()
        ]
        facts = {
            **record["counts"], **record["options"], "seconds of writing answers": record["answer_seconds"],
            "seconds of training": record["seconds"], "device": found.device, **record["versions"],
        }  # fmt: skip
        about = [["", ""], *([str(name), str(value)] for name, value in facts.items() if value is not None)]
        digests = [["", "SHA-256"], *([name, f"`{value}`"] for name, value in record["digests"].items())]
        features = ", ".join(map(str, record["feature_layers"]))
        cut = "" if record["finished"] else " It was ended before its time."
        return f"""---
base_model: {self.name}
tags: [{record["options"]["form"]}, speculative-decoding]
---

# {record["form"]} head of {self.name}

A draft head in the published form (`{record["published"]}`), by `specrs train-head`.{cut} Its features are the inputs
of layers {features} of the model. It drafts {record["options"]["draft_vocab"]} tokens,
which are {record["coverage"]:.1%} of the text that it was trained on.

## Acceptance

Greedy, on prompts that training never saw; tokens a round with the bonus token counted, for drafts of the shapes K,S,V.
Speeds are of one request at a time, with trees as the engine picks them, over plain decoding; the last column is of
drafts from the text itself, without a head. {self.verdict()[0].upper()}{self.verdict()[1:]}.

{markdown(self.table())}

![loss and tokens a round]({PLOT})

`acceptance.json`, by which an engine begins:

{markdown(heats)}

## Loss

Cross-entropy to the model's distribution over the draft vocabulary, half of its mass moved to its first choice, after
{record["curve"][-1]["tokens"]:,} tokens, and the share of positions at which head and model have the same first choice.

{markdown(losses)}

## Training

{markdown(about)}

{markdown(digests)}

`{RECORD}` has everything, the curve too.
"""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of which the first row is the heading."""
    heading, *rest = rows
    lines = [heading, ["---"] * len(heading), *rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
