"""Texts and records of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specrs.drawing.terminal import aligned
from specrs.measuring.cases import Answers, Row

_HEAD = ("batch", "context", "plain ms", "floor ms", "of floor", "tokens/s", "tree K,S,V", "tree ms", "floor ms",
         "of floor", "pays from")  # fmt: skip
_ABOUT = (
    "ms: a steady round, median. floor: reading weights and KV at the bandwidth above. pays from: tokens a round from\n"
    "which drafting with this tree is faster than plain decoding."
)
_MEMORY = ("batch", "context", "weights MB", "KV MB a request", "other MB")


@dataclass
class Report:
    """Everything that a run of the command measured.

    Attributes:
        machine: device, driver, versions, commit and date, by name.
        model: name, layers, dtypes and whether weights are random, by name.
        bytes_per_second: bandwidth of the device's memory.
        rows: plain rounds and rounds with trees.
        answers: whole answers; ``None`` where weights are random, or the model has no tokenizer.
        kernels: GPU time by kernel for each case; empty where it was not asked for.
        answers_error: the reason why answers that were asked for could not be given.
    """

    machine: dict[str, Any]
    model: dict[str, Any]
    bytes_per_second: float
    rows: list[Row] = field(default_factory=list)
    answers: Answers | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    answers_error: str | None = None

    @property
    def identical(self) -> bool:
        """False if drafts changed a token, which they never may."""
        return all(row.same_tokens is not False for row in self.rows) and (
            self.answers is None or self.answers.same_tokens
        )

    def record(self) -> dict[str, Any]:
        """Return everything as values for programs."""
        return {
            **self.machine, "model": self.model, "bytes_per_second": round(self.bytes_per_second),
            "cases": [row.record() for row in self.rows],
            "answers": None if self.answers is None else self.answers.record(),
            "answers_error": self.answers_error, "kernels": self.kernels,
        }  # fmt: skip

    def text(self) -> str:
        """Return everything as text for a terminal."""
        m, model = self.machine, self.model
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        driver = f", driver {m['driver']}" if m["driver"] else ""
        weights = "random weights, " if model["random_weights"] else ""
        lines = [
            f"specrs {m['specrs']}, commit {m['commit']}, {versions}",
            f"{m['device']}{driver}, memory {self.bytes_per_second / 1e9:.0f} GB/s",
            f"{model['name']}: {weights}{model['layers']} layers, weights {model['weights_dtype']}, "
            f"draft head: {model['draft'] or 'none'}",
            "",
            *aligned([_HEAD, *map(_cells, self.rows)], ">" * len(_HEAD)),
            *(f"batch {r.case.batch}, context {r.case.context}: {r.error}" for r in self.rows if r.error),
            _ABOUT,
            "",
            *aligned([_MEMORY, *map(_memory, self.rows)], ">" * len(_MEMORY)),
        ]
        if any(row.error is None and not row.in_turns for row in self.rows):
            lines.append("Memory held one engine at a time: plain and tree rounds of some rows did not run in turns.")
        if self.answers is not None:
            lines += ["", _answers(self.answers)]
        elif self.answers_error is not None:
            lines += ["", f"answers: {self.answers_error}"]
        if self.kernels:
            lines += ["", "GPU time of a round by kernel, microseconds", *_kernels(self.kernels)]
        lines += ["", f"tokens {'identical' if self.identical else 'DIFFERENT'} with drafts and without"]
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    plain, tree, ratio, speed = row.plain, row.tree, row.pays_from, row.tokens_per_second
    return (
        str(row.case.batch),
        str(row.case.context),
        *(("-",) * 3 if plain is None else (f"{plain.ms:.3f}", f"{plain.floor_ms:.3f}", f"{plain.of_floor:.0%}")),
        "-" if speed is None else f"{speed:.0f}",
        "-" if row.case.tree is None else ",".join(map(str, row.case.tree)),
        *(("-",) * 3 if tree is None else (f"{tree.ms:.3f}", f"{tree.floor_ms:.3f}", f"{tree.of_floor:.0%}")),
        "-" if ratio is None else f"{ratio:.2f}",
    )


def _memory(row: Row) -> tuple[str, ...]:
    sizes = (row.memory.get(name) for name in ("weights", "kv_per_request", "other"))
    cells = ("-" if size is None else f"{size / 1e6:.0f}" for size in sizes)
    return (str(row.case.batch), str(row.case.context), *cells)


def _answers(a: Answers) -> str:
    return (
        f"{len(a.plain)} answers of {a.tokens // len(a.plain)} tokens, one at a time, default options: plain "
        f"{a.tokens / sum(a.plain):.0f} tokens/s, drafting {a.tokens / sum(a.drafting):.0f} tokens/s, "
        f"{a.speed_up:.2f}x, {a.tokens / max(a.rounds, 1):.2f} tokens a round"
    )


def _kernels(found: Sequence[dict[str, Any]]) -> list[str]:
    """A column for each case and kind of round, a line for each class of kernel."""
    columns = [
        (f"{one['batch']} x {one['context']} {kind}", one[kind])
        for one in found
        for kind in ("plain", "tree")
        if kind in one
    ]
    missed = [f"{name}: {told['error']}" for name, told in columns if "error" in told]
    columns = [(name, told) for name, told in columns if "classes" in told]
    if not columns:
        return missed
    names = list(columns[0][1]["classes"])
    rows = [("class", *(name for name, _ in columns))]
    rows += [(c, *(f"{told['classes'][c]['us']:.1f}" for _, told in columns)) for c in names]
    rows.append(("other kernels", *(f"{sum(told['unknown_us'].values()):.1f}" for _, told in columns)))
    rows.append(("sum", *(f"{told['sum_us']:.1f}" for _, told in columns)))
    rows.append(("device busy", *(f"{told['busy_us']:.1f}" for _, told in columns)))
    rows.append(("launches", *(f"{told['launches']:.0f}" for _, told in columns)))
    return [*aligned(rows, "<" + ">" * len(columns)), *missed]
