"""The training of a head: options, the loop, checkpoints, the loss on held-out text."""

from __future__ import annotations

import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrs._specrs import ConfigError, SpecrsError
from specrs.models import ModelConfig
from specrs.train.block import EVERY, BlockHead
from specrs.train.eagle3 import Eagle3
from specrs.train.heads import Head, HeadSizes, Lesson
from specrs.train.muon import MuonAdamW, learning_rate, split_parameters
from specrs.train.rows import Rows, Stream, Tokens, anchors_of, pack
from specrs.train.teacher import Teacher

FORMS = ("eagle3", "dspark", "dflash")
"""Forms of heads that can be trained."""

_HARD, _WEIGHT_DECAY = 0.5, 0.05
_SAVE_SECONDS = 120.0
_CURVE = 10  # evaluations of a training, beside the one at its beginning
_SCORES = {"cpu": 1 << 27, "cuda": 1 << 31}  # attention scores of all unrolled steps that are in memory at once
_HELD_ROWS = {"cpu": 4, "cuda": 32}  # rows of a kind on which the held-out loss is measured, at most
_LEAST_VOCABULARY, _MOST_VOCABULARY = 4096, 32_768


@dataclass(frozen=True)
class Options:
    """Options of a training.

    Attributes:
        form: one of `FORMS`.
        tokens: tokens to train on; ``None``: `minutes` decide.
        minutes: time to train for, the writing of answers included.
        layers: decoder layers of the head.
        length: tokens of a row of text.
        batch: rows of a step.
        rate: highest learning rate.
        seed: seed of weights, order and answers.
        draft_vocab: tokens that the head can draft.
        intermediate: inner width of the head's MLPs.
        answer_tokens: most tokens of an answer; 0: the model writes nothing.
        block: levels of a block; 0 of EAGLE-3.
        markov_rank: width of DSpark's Markov head; 0 of the others.
    """

    form: str
    tokens: int | None
    minutes: float | None
    layers: int
    length: int
    batch: int
    rate: float
    seed: int
    draft_vocab: int
    intermediate: int
    answer_tokens: int
    block: int
    markov_rank: int

    @classmethod
    def of(cls, sizes: ModelConfig, on_host: bool, **given: Any) -> Options:
        """Fill the options that are not given, and check all of them.

        Raises:
            ConfigError: a value out of range, by option, value and limit; a model that no such head fits.
        """
        if sizes.num_layers < 3:
            why = "a head reads inputs of layers 2, n/2 and n-3, so a model has at least 3"
            raise ConfigError(f"num_hidden_layers = {sizes.num_layers}: {why}")
        vocabulary = min(max(sizes.vocab_size // 256 * 64, _LEAST_VOCABULARY), _MOST_VOCABULARY, sizes.vocab_size)
        form = given.get("form") or FORMS[0]
        if form not in FORMS:
            raise ConfigError(f"form = {form!r}: must be one of {', '.join(FORMS)}")
        blocks = form != "eagle3"
        usual = {
            "form": form, "tokens": None, "minutes": None, "layers": 2 if blocks else 1,
            "block": 7 if blocks else 0, "markov_rank": 128 if form == "dspark" else 0,
            "batch": 4 if on_host else 32, "rate": 3e-3, "seed": 0, "draft_vocab": vocabulary,
            "intermediate": sizes.intermediate_size, "answer_tokens": min(256, sizes.max_context_len // 2),
            "length": min(256 if on_host else 1024, sizes.max_context_len),
        }  # fmt: skip
        values = {**usual, **{name: value for name, value in given.items() if value is not None}}
        if values["tokens"] is None and values["minutes"] is None:
            values["minutes"] = 10.0
        limits = {
            "tokens": (1, 10**15), "minutes": (0.01, 10**6), "layers": (1, 16), "batch": (1, 4096), "rate": (1e-7, 1.0),
            "length": (16, sizes.max_context_len), "seed": (0, 2**32 - 1), "draft_vocab": (8, sizes.vocab_size),
            "intermediate": (8, 10**6), "answer_tokens": (0, sizes.max_context_len - 1),
            "block": (1, 31) if blocks else (0, 0), "markov_rank": (8, 1024) if form == "dspark" else (0, 0),
        }  # fmt: skip
        if values["tokens"] is not None and values["minutes"] is not None:
            raise ConfigError(f"minutes = {values['minutes']} with tokens = {values['tokens']}: one of the two")
        for name, (least, most) in limits.items():
            value = values[name]
            if value is not None and not least <= value <= most:
                of = f" for {form}" if name in ("block", "markov_rank") else ""
                raise ConfigError(f"{name} = {value}: must be {least}{f' to {most}' * (most > least)}{of}")
        for name in () if on_host else ("draft_vocab", "intermediate", "markov_rank"):
            if values[name] % 8:
                raise ConfigError(f"{name} = {values[name]}: products on a GPU take multiples of 8")
        return cls(**values)

    def sizes(self, target: ModelConfig) -> HeadSizes:
        """Return the sizes of the head."""
        return HeadSizes.of(target, self.draft_vocab, self.intermediate, self.layers)

    def head(self, target: ModelConfig) -> Head:
        """Return a head with random weights."""
        sizes = self.sizes(target)
        if self.form == "eagle3":
            return Eagle3(sizes, self.length, self.seed)
        return BlockHead(sizes, self.length, self.seed, self.block, self.markov_rank)


class TrainingError(SpecrsError):
    """A training that cannot go on; the checkpoint before is kept."""


@dataclass
class Interrupts:
    """Notes the first Ctrl-C within a ``with`` block; a second one comes as ever."""

    came: bool = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch for it. Outside of the main thread nothing is watched, since Ctrl-C goes to that alone."""

        def note(number: int, frame: FrameType | None) -> None:
            self.came = True
            signal.signal(signal.SIGINT, before)

        try:
            before = signal.signal(signal.SIGINT, note)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@dataclass
class Texts:
    """What is trained on, and what is held out.

    Attributes:
        answers, text: tokens of the model's answers, and of the user's documents.
        held_out: tokens of held-out documents, and of answers to held-out prompts, by kind.
    """

    answers: list[Tokens] = field(default_factory=list)
    text: list[Tokens] = field(default_factory=list)
    held_out: dict[str, list[Tokens]] = field(default_factory=dict)


def frequent_tokens(texts: Texts, vocab: int, size: int) -> tuple[Tensor, float, int]:
    """Return the ``size`` tokens most frequent in answers and text, ascending, the share of both that they cover, and
    the first of the tokens that are least frequent.

    The answers count more: they are what is drafted.
    """
    own, theirs = (
        np.bincount(np.concatenate(some), minlength=vocab).astype(np.float64) if some else np.zeros(vocab)
        for some in (texts.answers, texts.text)
    )
    score = own / max(own.sum(), 1) + 0.3 * theirs / max(theirs.sum(), 1)
    ids = np.sort(np.argsort(-score, kind="stable")[:size])
    counted = own if own.any() else theirs
    return torch.from_numpy(ids), float(counted[ids].sum() / counted.sum()), int(score.argmin())


class Trainer:
    """A head in training.

    Args:
        spent: seconds that went before, for writing answers; they count where `Options.minutes` decides.

    Attributes:
        head: the head.
        coverage: share of the text that the draft vocabulary has.
        seen: tokens that were trained on.
        seconds: time that steps took, in all parts of a training that was resumed.
        curve: held-out loss and agreement by kind, as training went on.
    """

    def __init__(
        self, model: Path, target: ModelConfig, teacher: Teacher, texts: Texts, options: Options, spent: float = 0.0
    ) -> None:
        self._teacher, self._options = teacher, options
        self._device = teacher.place.device
        self.head = options.head(target)
        ids, self.coverage, rare = frequent_tokens(texts, target.vocab_size, options.draft_vocab)
        self.head.begin_at(model, target, ids)
        if isinstance(self.head, BlockHead):
            self.head.mask_by(rare, teacher.embedded(torch.tensor([rare], device=self._device))[0])
        drafts = torch.full((target.vocab_size,), -1)
        drafts[ids] = torch.arange(len(ids))
        self.head.to(self._device)
        self._ids, self._drafts = self.head.target_ids, drafts.to(self._device)
        self._optimiser = MuonAdamW(*split_parameters(self.head), weight_decay=_WEIGHT_DECAY)
        self._stream = Stream(texts.answers, texts.text, options.length, options.batch, options.seed)
        self._held = {kind: self._held_rows(docs) for kind, docs in texts.held_out.items()}
        self._rows = min(options.batch, max(_SCORES[self._device.type] // self.head.attended(options.length), 1))
        levels = self.head.levels
        self._weights = torch.tensor([self.head.decay**j for j in range(levels)], device=self._device)
        self._budget = max(60 * (options.minutes or 0) - spent, 1.0)
        self.seen, self.seconds = 0, 0.0
        self.curve: list[dict[str, Any]] = []
        if self._device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            self.head.compile_parts()

    def _held_rows(self, docs: Sequence[Tokens]) -> Rows:
        """Rows of held-out documents, which are there several times where they would not fill one."""
        length, most = self._options.length, _HELD_ROWS[self._device.type]
        times = -(-length // max(sum(map(len, docs)), 1))
        return pack([*docs] * times, length, None)[slice(most)]

    @property
    def share(self) -> float:
        """The share of the training that is over."""
        tokens = self._options.tokens
        return self.seen / tokens if tokens is not None else self.seconds / self._budget

    def train(
        self,
        save: Callable[[dict[str, Any]], None],
        stopped: Callable[[], bool],
        tell: Callable[[float, str], None],
    ) -> None:
        """Train until the end, or until ``stopped`` says so.

        Args:
            save: keeps what `state` returns; called now and then, and at the end.
            tell: called with the share that is over, and the loss in words.

        Raises:
            TrainingError: the loss is not finite.
        """
        if self._device.type == "cuda" and self.share < 1:
            self._warm_up()
        began, before = time.perf_counter(), self.seconds
        saved, last = began, None
        if not self.curve:
            self.evaluate()
        while self.share < 1 and not stopped():
            share, loss = self.share, self._step()
            if last is not None:  # a step late, so that a GPU computes meanwhile
                tell(min(share, 1.0), f"loss {self._checked(last):.3f}")
            last = loss
            self.seconds = before + time.perf_counter() - began
            if int(self.share * _CURVE) > int(share * _CURVE):
                self.evaluate()
            if time.perf_counter() - saved > _SAVE_SECONDS:
                self._checked(last)
                save(self.state())
                saved = time.perf_counter()
        if last is not None:
            tell(min(self.share, 1.0), f"loss {self._checked(last):.3f}")
        save(self.state())

    def _checked(self, loss: Tensor) -> float:
        found = float(loss)
        if not math.isfinite(found):
            raise TrainingError(
                f"loss = {found} after {self.seen} tokens: the training diverged; a smaller rate than "
                f"{self._options.rate} may help"
            )
        return found

    def _warm_up(self) -> None:
        """Compile, by gradients of the next batch that are dropped; a schedule by the clock begins behind that."""
        began, at = time.perf_counter(), self._stream.at
        self._gradients()
        self.head.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self._device)
        self._stream.at = at
        self._budget = max(self._budget - (time.perf_counter() - began), 1.0)

    def _step(self) -> Tensor:
        """One step of the optimiser; returns the loss of the first level."""
        rate = learning_rate(self.share, self._options.rate)
        loss = self._gradients()
        self._optimiser.step(rate)
        self.seen += self._options.batch * self._options.length
        return loss

    def _gradients(self) -> Tensor:
        """Add the gradients of the next batch; returns the loss of the first level."""
        parts = list(self._lesson(self._stream.next(), self.seen).split(self._rows))
        first = torch.zeros((), device=self._device)
        for part in parts:
            scores = self._scores(part)
            each = scores[:, 0] / scores[:, 1].clamp(min=1)
            ((each * self._weights).sum() / len(parts)).backward()  # type: ignore[no-untyped-call]
            first += each[0].detach() / len(parts)
        return first

    def _lesson(self, rows: Rows, draw: int) -> Lesson:
        anchors = anchors_of(rows, EVERY, [self._options.seed, draw])
        return self._teacher.lesson(rows, anchors, self._ids, self._drafts, _HARD)

    def _scores(self, lesson: Lesson) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self.head.scores(lesson)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Add losses and agreement by level on held-out text to the curve."""
        found: dict[str, dict[str, list[float]]] = defaultdict(dict)
        for kind, rows in self._held.items():
            total = torch.zeros(len(self._weights), 4, device=self._device)
            for part in self._lesson(rows, 0).split(self._rows):
                with torch.compiler.set_stance(
                    "force_eager"
                ):  # other numbers of rows, which are not worth a compilation
                    total += self._scores(part)
            loss, right = total[:, 0] / total[:, 1].clamp(min=1), total[:, 2] / total[:, 3].clamp(min=1)
            found[kind] = {"loss": loss.tolist(), "agreement": right.tolist()}
        self.curve.append({"tokens": self.seen, "seconds": round(self.seconds, 1), "held_out": dict(found)})

    def state(self) -> dict[str, Any]:
        """Return everything that the training goes on from, beside the texts."""
        return {
            "head": {name: p.cpu() for name, p in self.head.state_dict().items()},
            "optimiser": self._optimiser.state_dict(), "at": list(self._stream.at), "seen": self.seen,
            "seconds": self.seconds, "curve": self.curve,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
        self.head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        turn, batch = state["at"]
        self._stream.at = (turn, batch)
        self.seen, self.seconds, self.curve = state["seen"], state["seconds"], state["curve"]
