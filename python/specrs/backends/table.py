"""The table of backends in README.md, made from what the classes declare by asking `check` about every cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrs._specrs import ConfigError
from specrs.backends.base import DRAFT_ATTENTIONS, KV_DTYPES, AttentionBackend, Capabilities, Layout
from specrs.backends.matrix import on_device, row_of, why_not_gpu_only
from specrs.backends.routing import Combination, check

BEGIN = "<!-- backends: written by `make backends-table` from python/specrs/backends; do not edit -->"
END = "<!-- backends: end -->"

_HEADINGS = (
    "`attention_backend`", "reads", "chains (K = 1)", "trees, P = 1", "trees, P > 1, dense", "trees, P > 1, holey",
    "recurrent state", "KV", "lengths on the host", "on a GPU",
)  # fmt: skip


def table(backends: Sequence[AttentionBackend]) -> str:
    """Markdown: a row for each backend."""
    rows = [_HEADINGS, ("---",) * len(_HEADINGS), *(_row(backend) for backend in backends)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(backend: AttentionBackend) -> tuple[str, ...]:
    capabilities = Capabilities.of(backend)

    def works(**asked: Any) -> bool:
        return check(capabilities, Combination(**{"kv_dtype": capabilities.kv_dtypes[0], **asked})) is None

    def modes(page_size: int, layout: Layout | None) -> str:
        able = [
            mode for mode in DRAFT_ATTENTIONS if works(topk=2, page_size=page_size, layout=layout, draft_attention=mode)
        ]
        return ", ".join(able) or "no"

    chains = [works(topk=1, page_size=page_size) for page_size in (1, 2)]
    recurrent = [works(topk=topk, recurrent_state=True) for topk in (None, 1)]
    return (
        f"`{capabilities.name}`",
        capabilities.reads,
        "yes" if all(chains) else "P = 1" if chains[0] else "no",
        modes(1, None),
        modes(2, "dense"),
        modes(2, "holey"),
        "drafted for" if all(recurrent) else "decoded plainly" if recurrent[0] else "no",
        ", ".join(dtype for dtype in KV_DTYPES if works(kv_dtype=dtype)),
        "needed" if capabilities.needs_cpu_seq_lens else "not needed",
        _on_a_gpu(backend),
    )


def _on_a_gpu(backend: AttentionBackend) -> str:
    there = on_device(backend, "cuda")
    if there is None:
        return "no"
    capabilities = Capabilities.of(there)
    row = row_of(capabilities, "cuda")
    assert row is not None, "it runs there"
    ahead = why_not_gpu_only(capabilities, "cuda", recurrent_state=False) is None
    return f"{', '.join(capabilities.kv_dtypes)}; graphs {', '.join(row.graphs)}{'; gpu-only rounds' if ahead else ''}"


def rewritten(text: str, block: str) -> str:
    """A document with what stands between its markers replaced.

    Raises:
        ConfigError: a marker is missing, is there twice, or they are in the wrong order.
    """
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            raise ConfigError(f"marker {marker!r}: {text.count(marker)} times in the document, must be once")
    head, rest = text.split(BEGIN)
    if END not in rest:
        raise ConfigError(f"marker {END!r}: before {BEGIN!r}")
    return f"{head}{BEGIN}\n{block}{END}{rest.split(END)[1]}"


def rewrite(path: Path, backends: Sequence[AttentionBackend]) -> bool:
    """Bring the block in a file up to date; whether it was not. The errors of `rewritten`."""
    text = path.read_text(encoding="utf-8")
    new = rewritten(text, table(backends))
    if new != text:
        path.write_text(new, encoding="utf-8")
    return new != text
