"""The engine's options, in one place: name, type, default, meaning, and spelling on the command line.

`EngineOptions` is what type checkers see of ``LLM(**options)``; `OptionFields` has the defaults, and
`specrs.EngineConfig` derives from it; `OPTIONS` says what each option is: the command line declares its flags by it,
and ``python -m specrs.engine_options FILE`` writes the table of docs/options.md. A test holds the three together.
No torch is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, TypedDict, get_args

from specrs._specrs import TreeShape
from specrs.backends import BACKENDS, GRAPH_LEVELS, AttentionBackend, GraphLevel
from specrs.backends.base import DRAFT_ATTENTIONS, KV_DTYPES, LAYOUTS, DraftAttention, KvDtype, Layout
from specrs.drafters import Drafter
from specrs.marked import write_tables

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Element types in which a user may ask a model to compute."""
DTYPES: tuple[str, ...] = get_args(Dtype)


class EngineOptions(TypedDict, total=False):
    """Named arguments of `specrs.LLM`, for type checkers; `OPTIONS` says what each one does.

    A function of yours that passes options on takes ``**options: Unpack[EngineOptions]``.
    """

    max_batch: int
    max_context_len: int | None
    page_size: int
    num_pages: int | None
    tree: TreeShape | tuple[int, int, int] | None
    drafters: Sequence[str | Drafter] | None
    draft_attention: DraftAttention | None
    draft_layout: Layout | None
    attention_backend: str | AttentionBackend | None
    prefix_cache: bool
    prefill_chunk: int
    kv_dtype: KvDtype | None
    device: str | None
    dtype: Dtype
    graphs: GraphLevel | None


class LLMOptions(EngineOptions, total=False):
    """`EngineOptions`, and the other options that `specrs.LLM` takes by name; for code that makes one on a caller's
    behalf."""

    speculative: bool
    progress: bool | None


@dataclass(frozen=True)
class Option:
    """One option, with its texts for people.

    Attributes:
        about: meaning of the option, in a line: the command line's help.
        more: further facts; the page and ``help(specrs.EngineConfig)`` go on with them.
        unset: meaning of ``None``, where that is the default.
        flags: spellings on the command line, where they are not the name's own.
        kind: type of the value there.
        metavar: name of the value there.
        choices: values there, where they can be listed.
    """

    about: str
    more: str = ""
    unset: str = ""
    flags: tuple[str, ...] = ()
    kind: type = str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class OptionFields:
    """The options of an engine, each with its default."""

    max_batch: int = 8
    max_context_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    tree: TreeShape | tuple[int, int, int] | None = None
    drafters: Sequence[str | Drafter] | None = None
    draft_attention: DraftAttention | None = None
    draft_layout: Layout | None = None
    attention_backend: str | AttentionBackend | None = "native"
    prefix_cache: bool = True
    prefill_chunk: int = 512
    kv_dtype: KvDtype | None = None
    device: str | None = None
    dtype: Dtype = "auto"
    graphs: GraphLevel | None = None


OPTIONS: Mapping[str, Option] = MappingProxyType({
    "max_batch": Option("most requests that run at once; more wait", kind=int, metavar="N"),
    "max_context_len": Option(
        "most tokens of a request, prompt and output together", unset="the model's limit",
        flags=("--max-context", "--max-context-len"), kind=int, metavar="N",
    ),
    "page_size": Option("tokens per KV page, a power of two", kind=int, metavar="P"),
    "num_pages": Option(
        "KV pages besides the sink", unset="a full load, or what the GPU holds", kind=int, metavar="N",
        more="A full load is `max_batch` requests of full context. On a GPU it is as much of that as 9 tenths of the "
        "free memory take beside the weights, at least one such request.",
    ),
    "tree": Option(
        "branches kept per draft step, draft steps, tokens verified per request with the root",
        unset="picked every round by a measured cost model", metavar="K,S,V",
        more="A `TreeShape` or `(K, S, V)`. The cost model decides whether to draft and how deep (the head: chains of "
        "up to 8 tokens; on a CPU, where every row costs, they beat the wider trees tried). K and S are the head's; V "
        "is what is verified, whoever drafted it, so that other sources reach V - 1 tokens deep.",
    ),
    "drafters": Option(
        "sources of drafts: suffix, recycling, head; an empty list decodes plainly",
        unset="the head where there is one, else suffix and recycling", metavar="NAME[,NAME]",
        more='`"suffix"`: what followed the last tokens where they stood before, in the prompt, the prediction or the '
        'output. `"recycling"`: tokens that the target lately found likely after a token. `"head"`: the draft head. '
        "From Python also objects of the protocol `specrs.drafters.Drafter` (docs/drafters.md). All that propose are "
        "merged into one tree.",
    ),
    "draft_attention": Option(
        "what a draft branch attends to: its ancestors, or its own lane",
        unset="ancestors wherever the backend can", choices=DRAFT_ATTENTIONS,
        more='`"ancestors"` is exact; with `"lane"` a branch sees its own lane, as sglang\'s draft does. No token '
        "depends on it.",
    ),
    "draft_layout": Option(
        "where a round's draft KV lies: dense, or holey, each branch on pages of its own",
        unset="the backend's first that does the rest", choices=LAYOUTS,
        more='Backends that read whole pages want `"holey"`; the two coincide with `K = 1` or `page_size = 1`.',
    ),
    "attention_backend": Option(
        f"whose attention and metadata: {', '.join(BACKENDS)}", metavar="NAME",
        more="From Python also a `specrs.backends.AttentionBackend` of your own.",
    ),
    "prefix_cache": Option(
        "share the KV pages of equal prompt prefixes between requests", flags=("--no-prefix-cache",), kind=bool
    ),
    "prefill_chunk": Option("most prompt tokens of one step", kind=int, metavar="N"),
    "kv_dtype": Option(
        "element type of the KV caches", unset="float32 on the CPU, on a GPU the model's 16 bits", choices=KV_DTYPES
    ),
    "device": Option(
        "cpu, cuda or cuda:N", metavar="NAME",
        unset="SPECRS_DEVICE, else a GPU where one is that runs the model and holds it, else the CPU",
        more="A device that is named and cannot be used is an error. `LLM.device` says which one it is, and why.",
    ),
    "dtype": Option(
        "what a model computes in", choices=DTYPES,
        more='`"auto"`: on a GPU bf16 and f16 checkpoints in their own type, f32 ones in bf16; on the CPU float32, '
        'over weights as the checkpoint has them. `"bfloat16"` or `"float16"`: a GPU in that type. `"float32"`: the '
        "CPU, and an error on a GPU.",
    ),
    "graphs": Option(
        "how much of a GPU's rounds is one launch", unset="round on a GPU, off on the CPU", choices=GRAPH_LEVELS,
        more='`"round"` replays the launches of a round as one CUDA graph, made for each size of batch, and launches '
        'the next round before the host knows what this one found; with `"loop"` the device goes on by itself, for up '
        'to 8 rounds or until a request ends; `"off"` launches kernels one by one and waits for each round. A CPU has '
        '`"off"` alone. Bits are the same.',
    ),
})  # fmt: skip
"""Every option by name, as it is told."""
_DEFAULTS = {one.name: one.default for one in fields(OptionFields)}


def flags_of(name: str) -> tuple[str, ...]:
    """Spellings on the command line; the first is the usual one."""
    return OPTIONS[name].flags or (f"--{name.replace('_', '-')}",)


def value_of(name: str) -> str:
    """Return the placeholder behind the flag, as help has it."""
    one = OPTIONS[name]
    return one.metavar or "{" + ",".join(one.choices or ()) + "}"


def default_of(name: str) -> str:
    """An option's default, as text."""
    return OPTIONS[name].unset or str(_DEFAULTS[name])


def attributes() -> str:
    """Every option as a docstring's section has it."""
    lines = []
    for name, one in OPTIONS.items():
        more = f" {one.more}" if one.more else ""
        lines.append(f"    {name}: {one.about} (default: {default_of(name)}).{more}")
    return "Attributes:\n" + "\n".join(lines)


# -- the page ---------------------------------------------------------------------------------------------------------

BEGIN = "<!-- options: written by `make options-table` from python/specrs/engine_options.py; do not edit -->\n"
END = "<!-- options: end -->\n"


def table() -> str:
    """Markdown: a row for each option."""
    rows = ["| option | on the command line | default | |", "| --- | --- | --- | --- |"]
    for name, one in OPTIONS.items():
        value = "" if one.kind is bool else f" {value_of(name)}"
        flags = ", ".join(f"`{flag}{value}`" for flag in flags_of(name))
        default = one.unset or f"`{_DEFAULTS[name]!r}`"
        about = one.about[0].upper() + one.about[1:] + "."
        rows.append(f"| `{name}` | {flags} | {default} | {about}{' ' + one.more if one.more else ''} |")
    return "".join(f"{row}\n" for row in rows)


def main(argv: Sequence[str]) -> int:
    """Print the table, or write it between the markers of pages (`write_tables`)."""
    return write_tables(argv, BEGIN, END, table())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
