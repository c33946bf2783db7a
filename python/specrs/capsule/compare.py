"""Two replays side by side, told to a reader or a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any, TypedDict

from specrs._specrs import ConfigError
from specrs.backends.base import DraftAttention, Format, Layout
from specrs.capsule.log import Comparison, Divergence, Run, compare
from specrs.capsule.replay import TOLERANCE, replay
from specrs.capsule.schema import Capsule


class Options(TypedDict, total=False):
    """Options of all comparisons: a format, draft layout and draft attention other than the recorded ones."""

    format: Format | None
    layout: Layout | None
    mode: DraftAttention | None


@dataclass(frozen=True)
class Result:
    """Two runs and what their comparison found.

    Attributes:
        runs: the two.
        found: the comparison.
        across: true if the runs are of two formats, so that only the arrays that both formats share were compared.
    """

    runs: tuple[Run, Run]
    found: Comparison
    across: bool

    @property
    def equal(self) -> bool:
        """True if the runs agree, to the end."""
        return self.found.first is None and all(run.guard is None for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON value."""
        f = self.found
        return {
            "equal": self.equal,
            "runs": [
                {
                    "name": run.name,
                    "arrays": len(run.segments),
                    "writes": sum(s.writes for s in run.segments),
                    "notes": run.notes,
                    "guard": None if run.guard is None else run.guard.__dict__,
                }
                for run in self.runs
            ],
            "compared": {"arrays": f.arrays, "writes": f.writes, "not_shared": list(f.skipped)},
            "tolerance": TOLERANCE if self.across else 0.0,
            "largest_difference": f.largest,
            "first": _json(f.first),
            "beyond": _json(f.beyond),
        }

    def lines(self) -> list[str]:
        """The result as text."""
        out = []
        for run in self.runs:
            writes = sum(s.writes for s in run.segments)
            notes = "".join(f"; {note}" for note in run.notes)
            out.append(f"{run.name}: {writes:,} writes of {len(run.segments)} arrays{notes}")
        f = self.found
        if f.first is not None:
            out += self._told("FIRST DIVERGENT WRITE", f.first)
        for run in self.runs:
            if run.guard is not None:
                g = run.guard
                out.append(f"{run.name} was stopped in {g.phase}: {g.kind}: {g.error}")
        if f.beyond is not None:
            out += self._told("first write without room, which the guard kept from being made", f.beyond)
        if self.equal:
            within = f", attention within {TOLERANCE:g} (largest difference {f.largest:.1e})" if self.across else ""
            out.append(f"NO DIVERGENCE: {f.writes:,} writes of {f.arrays} arrays agree{within}")
            if f.skipped:
                whose = "one format" if self.across else "the host"
                out.append(f"  not compared, of {whose} alone: {', '.join(f.skipped)}")
        else:
            out.append(f"  before it {f.writes:,} writes of {f.arrays} arrays agree")
        return out

    def _told(self, title: str, d: Divergence) -> list[str]:
        index = ", ".join(map(str, d.index))
        return [
            title,
            f"  where   {d.phase}: {d.array}[{index}]",
            f"  owner   {d.owner}",
            *(f"  value   {run.name}: {shown}" for run, shown in zip(self.runs, d.shown, strict=True)),
        ]


def _json(d: Divergence | None) -> dict[str, Any] | None:
    if d is None:
        return None
    return {"phase": d.phase, "array": d.array, "index": list(d.index), "owner": d.owner, "values": list(d.values),
            "shown": list(d.shown)}  # fmt: skip


def replay_reverted(capsule: Capsule, reverts: Sequence[int], **options: Any) -> Result:
    """The plain run, and the run with historical faults put back."""
    if not reverts:
        raise ConfigError("revert: no id given")
    runs = replay(capsule, **options), replay(capsule, reverts=reverts, **options)
    return Result(runs, compare(*runs), False)


def replay_device(capsule: Capsule, name: str, **options: Any) -> Result:
    """Compare the host's run with the run in which a GPU decides (`specrs.capsule.on_device`).

    Args:
        name: ``cuda`` or ``cuda:N``.

    Raises:
        CudaError: no such GPU, or no kernels for it; the message says why.
    """
    from specrs.capsule.on_device import find, replay_on

    cuda = find(name)
    run = replay(capsule, **options)
    other, lacks = replay_on(capsule, cuda, **options)
    left_out = [s for s in run.segments if s.array in lacks or s.phase in lacks]
    run.segments = [s for s in run.segments if s not in left_out]
    skipped = tuple(dict.fromkeys(s.phase if s.phase in lacks else s.array for s in left_out if s.writes))
    return Result((run, other), changed(compare(run, other), skipped=skipped), False)


def replay_against(capsule: Capsule, other: Capsule, **options: Any) -> Result:
    """The runs of two capsules."""
    runs = replay(capsule, **options), replay(other, **options)
    across = (options.get("format") or capsule.format) != (options.get("format") or other.format)
    return Result(runs, compare(*runs, across=across), across)


def replay_formats(capsule: Capsule, **options: Any) -> Result:
    """Compare native with another format; if the capsule is native, compare the kernels with their plain references.

    Native has the dense layout alone; a holey round is compared with native's dense one, where the drafts' slots
    differ and what is attended to does not.
    """
    format = options.get("format") or capsule.format
    rest = {k: v for k, v in options.items() if k not in ("format", "layout")}
    if format == "native":
        runs = replay(capsule, **options), replay(capsule, reference=True, **options)
    else:
        runs = replay(capsule, format="native", layout="dense", **rest), replay(capsule, **options)
    return Result(runs, compare(*runs, across=True), True)
