"""Plain rounds and rounds with trees of a model side by side, for a batch and a context; and whole answers.

Both engines live in one process and run in turns where memory holds them, else one after the other. Their tokens are
compared: drafts never change one.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specrs import assets
from specrs._specrs import ConfigError, DeviceMemoryError, SpecrsError
from specrs.engine import LLM
from specrs.engine.config import EngineConfig
from specrs.engine.devices.memory_plan import Head
from specrs.engine.devices.placing import Wanted
from specrs.measuring.floors import Reads
from specrs.measuring.kernels import kernels, reason
from specrs.measuring.rounds import CHUNK, EDGE, Steady, random_prompts, rounds
from specrs.models import Checkpoint, ModelConfig, Placement, cache_bytes, check_draft, locate
from specrs.models.dense import kept_dtype
from specrs.models.host_memory import head_bytes, target_bytes
from specrs.models.loader import dtype_of
from specrs.sampling_params import SamplingParams

TURNS = 3
PAGE = 16
Tree = tuple[int, int, int]
# Trees by the largest batch that takes them: some 64 to 192 rows to verify. On a CPU every row costs: a chain.
TREES: Mapping[int, Tree] = {1: (8, 6, 64), 4: (4, 5, 24), 16: (2, 4, 8), 64: (1, 2, 3)}
HOST_TREE: Tree = (1, 4, 5)
_PROMPTS = (
    "Write a Python function that parses an ISO 8601 date without any library, and explain every step.",
    "Summarise the causes of the French Revolution in five short paragraphs.",
    "List ten differences between TCP and UDP as a table with three columns.",
    "Tell the story of a lighthouse keeper who finds a message in a bottle.",
)


def usual_tree(batch: int) -> Tree:
    """Return the tree that a GPU's rounds of so many requests are measured with."""
    return next((tree for most, tree in TREES.items() if batch <= most), TREES[64])


def check_room(llm: LLM, batch: int, context: int, tokens: int) -> None:
    """Check that the pool holds a whole batch at once.

    Args:
        tokens: tokens that each request may get behind a prompt of ``context``.

    Raises:
        ConfigError: some requests would wait for others to end.
    """
    have, need = (llm.config.num_pages or 0) * llm.config.page_size, batch * (context + tokens)
    if have < need:
        raise ConfigError(
            f"batch = {batch}, context = {context}: needs KV of {need} tokens, the memory that is free holds {have}"
        )


@dataclass(frozen=True)
class Subject:
    """A model that is measured, on its device.

    Attributes:
        name: name of the model for people.
        model, draft: directories of the model, and of its head; ``None`` without one.
        sizes, head: their configurations.
        place: device and dtypes.
        device: name of the device, with the GPU's model.
        random: true if the weights are drawn; whoever uses the subject does so within `random_weights`.
    """

    name: str
    model: Path
    draft: Path | None
    sizes: ModelConfig
    head: Head | None
    place: Placement
    device: str
    random: bool = False

    @classmethod
    def of(
        cls,
        model: str | Path | None,
        draft: str | Path | None,
        device: str | None,
        name: str = "",
        random: bool = False,
    ) -> Subject:
        """Find the files and the device; no weight is read.

        Args:
            model, draft, device: as `specrs.LLM` takes them.

        Raises:
            ConfigError: as `specrs.LLM`, and where weights to draw do not fit into the host's memory.
        """
        if model is None:
            model, draft = assets.model_dir(), assets.draft_dir() if draft is None else draft
        found = locate(model, "model")
        head_at = None if draft is None else locate(draft, "draft")
        sizes = ModelConfig.from_directory(found)
        head = None if head_at is None else Head(*check_draft(head_at, sizes))
        config = EngineConfig.of({"device": device, "max_batch": 1, "max_context_len": min(64, sizes.max_context_len)})
        site = Wanted(config.drafting(head is not None), found, sizes, head_at, False).site()
        self = cls(name or Path(found).name, found, head_at, sizes, head, site.place, site.name, random)
        if random and self.on_host:
            need, have = 2 * self.weight_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if need > have:
                raise ConfigError(
                    f"shape = {self.name!r} on the CPU: weights of two engines take {need} bytes, this machine has "
                    f"{have}; --layers N keeps fewer of the {sizes.num_layers} layers"
                )
        return self

    @property
    def on_host(self) -> bool:
        """True if the device is the CPU."""
        return self.place.is_host

    @property
    def weight_bytes(self) -> int:
        """Bytes of host memory that the weights take."""
        head = 0 if self.head is None or self.draft is None else head_bytes(self.head.config, self.draft, self.place)
        return target_bytes(self.sizes, self.model, self.place) + head

    @property
    def weight_size(self) -> int:
        """Bytes of an element of the matrices, as products read them."""
        if not self.on_host or self.random:
            return 2
        return kept_dtype(self.place, dtype_of(Checkpoint(self.model).dtype("model.embed_tokens.weight"))).itemsize

    def open(self, case: Case, kind: str, graphs: Any = None) -> LLM:
        """Make the engine of a case: ``plain`` or ``tree``."""
        gc.collect()  # memory of closed engines
        if not self.on_host:
            torch.cuda.empty_cache()
        more: dict[str, Any] = {"speculative": False} if kind == "plain" else {"tree": case.tree}
        llm = LLM(
            self.model, self.draft, device=str(self.place.device), max_batch=case.batch,
            max_context_len=case.context + case.tokens, prefill_chunk=CHUNK, prefix_cache=False, page_size=PAGE,
            graphs=graphs, progress=False, **more,
        )  # fmt: skip
        try:
            check_room(llm, case.batch, case.context, case.tokens)
        except ConfigError:
            llm.close()
            raise
        return llm


@dataclass(frozen=True)
class Case:
    """One batch of requests behind one context.

    Attributes:
        tree: tree of the rounds with drafts; ``None``: plain rounds alone.
        turn: steps of a turn.
        tokens: tokens that a request may get.
    """

    batch: int
    context: int
    tree: Tree | None
    turn: int
    tokens: int

    @classmethod
    def of(cls, batch: int, context: int, tree: Tree | None, counted: int) -> Case:
        """Return the case in which ``counted`` rounds of each engine count."""
        turn = -(-counted // TURNS) + 2 * EDGE
        path = 1 if tree is None else tree[1] + 1
        # While prompts are written in turn, the first requests decode already.
        return cls(batch, context, tree, turn, path * (batch * context // CHUNK + TURNS * turn + 16))


def cases_of(
    subject: Subject, batches: Sequence[int] | None, contexts: Sequence[int] | None, tree: Tree | None, counted: int
) -> list[Case]:
    """Return the cases of all batches and contexts; ``None`` for the usual ones, as far as the model goes.

    Raises:
        ConfigError: numbers below 1, a tree without a head, a context that is too long for the model.
    """
    if tree is not None and subject.head is None:
        raise ConfigError(
            f"tree = {','.join(map(str, tree))}: rounds with trees need a draft head, and {subject.name} was given "
            "without one; --draft HEAD"
        )
    limit, found = subject.sizes.max_context_len, []
    given = contexts is not None
    for name, numbers in (("batch", batches or ()), ("context", contexts or ()), ("rounds", (counted,))):
        for n in numbers:
            if n < 1:
                raise ConfigError(f"{name} = {n}: must be at least 1")
    for batch in batches or ((1, 4) if subject.on_host else (1, 8)):
        if tree is not None or subject.head is None:
            shape = tree
        elif subject.on_host:
            shape = HOST_TREE
        else:
            shape = usual_tree(batch)
        for context in contexts or ((256, 1024) if subject.on_host else (1024, 8192)):
            case = Case.of(batch, context, shape, counted)
            if context + case.tokens <= limit:
                found.append(case)
            elif given:
                raise ConfigError(
                    f"context = {context}: with {case.tokens} tokens that its rounds may draw at batch {batch}, it is "
                    f"beyond the {limit} of {subject.name}; at most {max(limit - case.tokens, 0)} work"
                )
    if not found:
        raise ConfigError(f"{subject.name} has a context of {limit}, too short for the usual cases; --context N")
    return found


@dataclass
class RoundTimes:
    """Times of one kind of round.

    Attributes:
        ms: milliseconds from step to step, median.
        host_ms: the host's part of a step.
        period_ms: from end to end of rounds by a GPU's clock; ``None`` on a CPU.
        floor_ms: milliseconds that memory takes for what a round reads.
    """

    ms: float
    host_ms: float
    period_ms: float | None
    floor_ms: float

    @property
    def of_floor(self) -> float:
        """Share of the floor's speed that is reached."""
        return self.floor_ms / self.ms

    def record(self) -> dict[str, Any]:
        """Return the times as values for programs."""
        return {**asdict(self), "floor_ms": round(self.floor_ms, 4), "of_floor": round(self.of_floor, 4)}


@dataclass
class Row:
    """Result of a case.

    Attributes:
        plain, tree: times of both kinds of rounds.
        same_tokens: true if both engines gave the same tokens; ``None`` where one kind ran.
        in_turns: true if both engines ran in turns; false: memory held one at a time.
        memory: bytes by use: ``weights``, ``kv_per_request``, and on a GPU ``other``, at most.
        error: the reason why the case was not measured.
    """

    case: Case
    plain: RoundTimes | None = None
    tree: RoundTimes | None = None
    same_tokens: bool | None = None
    in_turns: bool = True
    memory: dict[str, int | None] = field(default_factory=dict)
    error: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second of plain decoding, all requests together."""
        return None if self.plain is None else self.case.batch * 1e3 / self.plain.ms

    @property
    def pays_from(self) -> float | None:
        """Tokens a round from which rounds with this tree are faster than plain ones."""
        return None if self.plain is None or self.tree is None else self.tree.ms / self.plain.ms

    def record(self) -> dict[str, Any]:
        """Return the result as values for programs."""
        speed, ratio = self.tokens_per_second, self.pays_from
        return {
            "batch": self.case.batch, "context": self.case.context, "tree_shape": self.case.tree,
            "plain": None if self.plain is None else self.plain.record(),
            "tree": None if self.tree is None else self.tree.record(),
            "pays_from": None if ratio is None else round(ratio, 4),
            "tokens_per_second": None if speed is None else round(speed, 2),
            "same_tokens": self.same_tokens, "in_turns": self.in_turns, "memory": self.memory, "error": self.error,
        }  # fmt: skip


def together(openers: Mapping[str, Callable[[], LLM]]) -> Iterator[dict[str, LLM]]:
    """Yield all engines at once where memory holds them, else one after the other.

    Raises:
        DeviceMemoryError: one alone does not fit.
    """
    with ExitStack() as stack:
        try:
            engines = {name: stack.enter_context(opened()) for name, opened in openers.items()}
        except DeviceMemoryError:
            if len(openers) == 1:
                raise
        else:
            yield engines
            return
    for name, opened in openers.items():
        yield from together({name: opened})


def measured(subject: Subject, case: Case, bytes_per_second: float) -> Row:
    """Measure a case; a case that does not run has its error in the row."""
    row = Row(case)
    prompts = random_prompts(case.batch, case.context, subject.sizes.vocab_size)
    kinds = ("plain",) if case.tree is None else ("plain", "tree")
    tokens: dict[str, list[list[int]]] = {}
    try:
        for engines in together({kind: lambda kind=kind: subject.open(case, kind) for kind in kinds}):  # type: ignore[misc]
            row.in_turns = len(engines) == len(kinds)
            runs = {}
            for kind, llm in engines.items():
                rounds(llm, [p[:64] for p in prompts], 8)  # makes the rounds' graphs
                runs[kind] = Steady(llm, prompts, case.tokens)
            order = list(runs)
            for _ in range(TURNS):
                for kind in order:
                    runs[kind].turn(case.turn)
                order.reverse()  # neither always comes after the other
            for kind, run in runs.items():
                tokens[kind] = run.tokens
                run.drop()
                found, llm = run.figures(), engines[kind]
                floor = _floor(subject, case, kind, llm) / bytes_per_second * 1e3
                times = RoundTimes(found["step_ms"], found["host_ms"], found.get("period_ms"), floor)
                setattr(row, kind, times)
                row.memory = memory_of(subject, case, llm)
    except (SpecrsError, RuntimeError) as error:  # torch's own errors are of the latter
        row.error = reason(error)
        return row
    if len(tokens) == 2:
        pairs = zip(tokens["plain"], tokens["tree"], strict=True)
        row.same_tokens = all(a[: min(len(a), len(b))] == b[: min(len(a), len(b))] for a, b in pairs)
    return row


def _floor(subject: Subject, case: Case, kind: str, llm: LLM) -> int:
    """Bytes that a round reads."""
    assert llm.config.kv_dtype is not None
    reads = Reads.of(subject.sizes, subject.head, subject.weight_size, getattr(torch, llm.config.kv_dtype).itemsize)
    if kind == "plain" or case.tree is None:
        return reads.plain(case.batch, case.context)
    return reads.tree(case.batch, case.context, case.tree[1])


def memory_of(subject: Subject, case: Case, llm: LLM) -> dict[str, int | None]:
    """Bytes of an engine by use; on a GPU as its budget has them, which is exact for weights and KV."""
    assert llm.config.kv_dtype is not None
    pages = math.ceil(case.context / PAGE)
    kv = cache_bytes(subject.sizes, subject.sizes.num_layers, pages, PAGE, llm.config.kv_dtype)
    if subject.head is not None and llm.speculative:
        kv += cache_bytes(subject.head.config, subject.head.config.num_layers, pages, PAGE, llm.config.kv_dtype)
    if llm.budget is None:
        return {"weights": subject.weight_bytes, "kv_per_request": kv, "other": None}
    other = stated_beside(llm)
    return {"weights": llm.budget.fixed - other, "kv_per_request": kv, "other": other}


def stated_beside(llm: LLM) -> int:
    """Bytes that an engine on a GPU has stated for everything but weights and KV."""
    assert llm.budget is not None
    return sum(size for name, size in llm.budget.lines if not name.startswith("weights "))


def profiled_case(subject: Subject, case: Case) -> dict[str, Any]:
    """GPU time of the rounds of a case by kernel; see `specrs.measuring.kernels`."""
    prompts = random_prompts(case.batch, case.context, subject.sizes.vocab_size)
    kinds = ("plain",) if case.tree is None else ("plain", "tree")
    path = 1 if case.tree is None else case.tree[1] + 1
    found = kernels(lambda kind, graphs: subject.open(case, kind, graphs), prompts, 16 * path, kinds)
    return {"batch": case.batch, "context": case.context, "tree_shape": case.tree, **found}


@dataclass
class Answers:
    """Whole answers, prompt by prompt in turns: seconds, prompt and output together.

    Attributes:
        tokens: tokens of all answers together.
        plain, drafting: seconds of each answer.
        rounds: rounds of the drafting engine.
        same_tokens: true if both engines gave the same tokens.
    """

    tokens: int = 0
    plain: list[float] = field(default_factory=list)
    drafting: list[float] = field(default_factory=list)
    rounds: int = 0
    same_tokens: bool = True

    @property
    def speed_up(self) -> float:
        """Time of all plain answers over that of all drafting ones."""
        return sum(self.plain) / sum(self.drafting)

    def record(self) -> dict[str, Any]:
        """Return the result as values for programs."""
        ratios = [round(p / d, 4) for p, d in zip(self.plain, self.drafting, strict=True)]
        return {
            "prompts": len(self.plain), "tokens": self.tokens,
            "plain_tokens_per_second": round(self.tokens / sum(self.plain), 2),
            "drafting_tokens_per_second": round(self.tokens / sum(self.drafting), 2),
            "speed_up": round(self.speed_up, 4), "speed_ups": ratios,
            "tokens_a_round": round(self.tokens / max(self.rounds, 1), 4), "same_tokens": self.same_tokens,
        }  # fmt: skip


def answered(subject: Subject, count: int = 128) -> Answers:
    """Answer some prompts with default options, one request at a time, plainly and with drafts.

    Raises:
        DeviceMemoryError: an engine does not fit.
    """
    own = subject.model == assets.model_dir()
    prompts: Sequence[str] = assets.heldout_prompts()[: len(_PROMPTS)] if own else _PROMPTS
    limit = min(subject.sizes.max_context_len, 2048)
    count = min(count, limit // 2)
    out = Answers()
    texts: dict[str, list[list[int]]] = {"plain": [], "drafting": []}

    def opener(name: str) -> Callable[[], LLM]:
        return lambda: LLM(
            subject.model, subject.draft, speculative=name == "drafting", device=str(subject.place.device),
            max_batch=1, max_context_len=limit, progress=False,
        )  # fmt: skip

    for engines in together({name: opener(name) for name in texts}):
        order = list(engines)
        for llm in engines.values():
            llm.generate([prompts[0]], SamplingParams(max_tokens=min(16, count), temperature=0.0), progress=False)
        for prompt in prompts:
            for name in order:
                params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                began = time.perf_counter()
                [output] = engines[name].generate([prompt], params, progress=False)
                seconds: list[float] = getattr(out, name)
                seconds.append(time.perf_counter() - began)
                texts[name].append(output.token_ids)
                out.rounds += output.rounds if name == "drafting" else 0
            order.reverse()
    out.tokens = sum(map(len, texts["plain"]))
    out.same_tokens = texts["plain"] == texts["drafting"]
    return out
