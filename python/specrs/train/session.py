"""`specrs train-head` from options to report: reads text, has the model answer, trains, exports, measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError

from specrs import progress
from specrs._specrs import ConfigError, __version__
from specrs.engine import LLM
from specrs.engine.config import EngineConfig
from specrs.engine.devices.placing import Site, Wanted
from specrs.engine.prompts import load_tokenizer
from specrs.measuring import machine
from specrs.models import ModelConfig, check_draft, follow_torch, has_recurrent_state, locate
from specrs.models.cuda import why_not
from specrs.train.answers import Answer, Prompt, Writer, beginnings
from specrs.train.card import Report
from specrs.train.checkpoint import Checkpoint, CheckpointError, model_digest
from specrs.train.documents import Document, Documents, in_turns, read_text
from specrs.train.heads import feature_layers
from specrs.train.measured import Engines, measured
from specrs.train.rows import Tokens
from specrs.train.teacher import Teacher
from specrs.train.trainer import Interrupts, Options, Texts, Trainer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_AT_ONCE = {"cpu": 8, "cuda": 128}  # answers that are written at once
_ANSWERS = 3  # tokens of answers for each token of the text from which their prompts are cut
_ANSWER_TIME = 0.25  # share of `Options.minutes` for answers
_KINDS = 8  # kinds of text that the report measures
_TOKENS = {"cpu": 64, "cuda": 256}  # tokens of an answer in the report, at most
_HELD_OUT_ANSWERS = 64  # held-out prompts that are answered for the held-out loss, at most


@dataclass(frozen=True)
class Asked:
    """A training as the user asks for it.

    Attributes:
        model: as `specrs.LLM` takes it; ``None``: the small model in the package.
        out: directory of the head.
        text: files and directories with text.
        prompts: prompts, whose content is what `answers.Prompt` has.
        device: as `specrs.LLM` takes it.
        resume: go on from the checkpoint in ``out``.
        report_prompts: held-out prompts of each kind in the report.
        options: those of `Options` that are given.
        progress: bars on stderr.
    """

    model: str | None
    out: Path
    text: Sequence[str]
    prompts: Sequence[Document[Any]]
    device: str | None
    resume: bool
    report_prompts: int
    options: dict[str, Any]
    progress: bool | None = None


class Session:
    """One training. It reads no weights before `run`.

    Attributes:
        model: directory of the model.
        device: name of the device, as options have it.
        measured_on: that of the report, the CPU where a GPU does not run such heads; known once the head is there.

    Raises:
        ConfigError: options, files, or a model that will not do, or a folder that cannot be written; nothing has been
            written then.
    """

    def __init__(self, asked: Asked, log: Callable[[str], None]) -> None:
        from specrs import assets

        self._asked, self._log = asked, log
        self.model = locate(asked.model or assets.model_dir(), "model", progress=asked.progress)
        self._sizes = ModelConfig.from_directory(self.model)
        self._site = self._placed()
        self.device = self.measured_on = str(self._site.place.device)
        self._options = Options.of(self._sizes, self._site.place.is_host, **asked.options)
        if asked.report_prompts < 1:
            raise ConfigError(f"report_prompts = {asked.report_prompts}: must be at least 1")
        tokenizer = load_tokenizer(self.model)
        if tokenizer is None:
            raise ConfigError(f"model = {str(self.model)!r}: has no tokenizer.json, so no text can be read")
        self._tokenizer: Tokenizer = tokenizer
        if not asked.text and not asked.prompts:
            raise ConfigError(
                "text and prompts: neither is given, and a head learns from text or from answers to prompts"
            )
        self._documents, self._prompts = read_text(asked.text), Documents.of(asked.prompts)
        if self._documents.left_out:
            log(f"files left out, since they are not UTF-8: {self._documents.left_out}")
        for name, found in (("text", self._documents), ("prompts", self._prompts)):
            if len(found) and not found.held_out:
                raise ConfigError(
                    f"{name}: {len(found)} document, of which none can be held out; two or more of a kind are needed"
                )
        if not self._documents.kept and not self._options.answer_tokens:
            raise ConfigError("answer_tokens = 0: prompts alone teach nothing without answers")
        self._digests = {
            "model": model_digest(self.model), "text": self._documents.digest, "prompts": self._prompts.digest
        }  # fmt: skip
        self._checkpoint = Checkpoint(asked.out, {**self._digests, **asdict(self._options)})
        self._kept = self._checkpoint.load() if asked.resume else None
        if asked.out.exists() and not asked.out.is_dir():
            raise ConfigError(f"out = {str(asked.out)!r}: is a file; give a directory that is empty or not there")
        if not asked.resume and asked.out.exists() and any(asked.out.iterdir()):
            has = "a checkpoint, with which --resume goes on" if self._checkpoint.exists else "files"
            raise ConfigError(f"out = {str(asked.out)!r}: has {has}; give a directory that is empty or not there")
        self._checkpoint.check()

    def _placed(self) -> Site:
        """The device, as an engine without drafts gets it."""
        if has_recurrent_state(self.model):
            raise ConfigError(f"model = {str(self.model)!r}: has recurrent layers, which are decoded plainly")
        options = {
            "device": self._asked.device,
            "max_batch": 1,
            "max_context_len": min(64, self._sizes.max_context_len),
        }
        config = replace(EngineConfig.of(options), drafters=())
        return Wanted(config, self.model, self._sizes, None, False).site()

    def run(self) -> Report:
        """Train, and return the report; everything is in ``out`` then. Ctrl-C ends the training, and the report is of
        what there is; `Report.record` says whether it is ``finished``.

        Raises:
            TrainingError: the training diverged.
            CheckpointError: a checkpoint or the head cannot be written.
        """
        asked, o = self._asked, self._options
        follow_torch()
        interrupts = Interrupts()
        with interrupts.watched():
            kept = self._kept
            if kept is None:
                began = time.perf_counter()
                answers = self._answers(interrupts)
                spent = time.perf_counter() - began
            else:
                answers = [Answer(a["kind"], a["tokens"].tolist(), a["held_out"]) for a in kept["answers"]]
                spent = kept["answer_seconds"]
            texts = self._texts(answers)
            written = {
                "answers": [
                    {"kind": a.kind, "tokens": torch.tensor(a.tokens, dtype=torch.int32), "held_out": a.held_out}
                    for a in answers
                ],
                "answer_seconds": spent,
            }
            self._log(f"training on {self._site.name}: {self._counted(texts)}")
            trainer = Trainer(self.model, self._sizes, Teacher(self.model, self._site.ops, o.length), texts, o, spent)
            if kept is not None:
                trainer.load(kept)
            with progress.shares("training", asked.progress) as tell:
                trainer.train(lambda state: self._checkpoint.save({**written, **state}), lambda: interrupts.came, tell)
            try:
                trainer.head.save(self._sizes, asked.out)
            except (OSError, SafetensorError) as error:
                why = "the training is over, and --resume writes the head once there is room"
                raise CheckpointError(f"out = {str(asked.out)!r}: cannot be written: {error}; {why}") from error
        record = self._record(trainer, texts, spent)
        del trainer
        report = self._report(record)
        report.write(asked.out)
        if record["finished"]:
            self._checkpoint.remove()
        return report

    def _encode(self, documents: Sequence[Document[str]]) -> list[tuple[str, Tokens]]:
        """Kind and tokens of documents; those with a token that the model lacks are left out."""
        encoded = zip(documents, self._tokenizer.encode_batch([d.content for d in documents]), strict=True)
        found = [(document.kind, _tokens(e.ids)) for document, e in encoded if e.ids]
        return [(kind, tokens) for kind, tokens in found if tokens.max() < self._sizes.vocab_size]

    @cached_property
    def _encoded(self) -> list[Tokens]:
        """Tokens of the documents to train on."""
        return [tokens for _, tokens in self._encode(self._documents.kept)]

    def _answers(self, interrupts: Interrupts) -> list[Answer]:
        """Have the model answer the prompts, held-out ones first, and then beginnings of the text."""
        o, given = self._options, self._prompts
        if not o.answer_tokens:
            return []
        written, text = 0, sum(map(len, self._encoded))

        def of_text() -> Iterator[Prompt]:
            for prompt in beginnings(self._documents.kept, self._tokenizer, o.length // 2, o.seed):
                if written >= _ANSWERS * text:
                    return
                yield prompt

        # Time may end the answers, and those that are there should be of every kind.
        held = islice((Prompt(d.kind, d.content, True) for d in in_turns(given.held_out)), _HELD_OUT_ANSWERS)
        prompts = chain(held, (Prompt(d.kind, d.content) for d in in_turns(given.kept)), of_text())
        began, seconds = time.perf_counter(), 60 * _ANSWER_TIME * (o.minutes or float("inf"))
        context = min(self._sizes.max_context_len, max(2048, o.length + o.answer_tokens))
        with LLM(
            self.model, speculative=False, device=self.device, max_batch=_AT_ONCE[self._site.place.device.type],
            max_context_len=context, progress=self._asked.progress,
        ) as llm, progress.shares("answers", self._asked.progress) as tell:  # fmt: skip
            writer = Writer(llm, o.answer_tokens, o.seed)

            def ended(tokens: int) -> bool:
                nonlocal written
                written, spent = tokens, time.perf_counter() - began
                tell(min(max(spent / seconds, tokens / (o.tokens or float("inf"))), 1.0), f"{tokens} tokens")
                return interrupts.came or spent > seconds or tokens >= (o.tokens or float("inf"))

            found = writer.write(prompts, ended)
        if writer.refused:
            self._log(f"{len(writer.refused)} prompts were refused, the first with: {writer.refused[0]}")
        return found

    def _texts(self, answers: Sequence[Answer]) -> Texts:
        """Everything as tokens."""
        texts = Texts([_tokens(a.tokens) for a in answers if not a.held_out], self._encoded)
        answered = [(answer.kind, _tokens(answer.tokens)) for answer in answers if answer.held_out]
        for kind, tokens in self._encode(self._documents.held_out) + answered:
            texts.held_out.setdefault(kind, []).append(tokens)
        if not texts.answers and not texts.text:
            raise ConfigError("text and prompts: no text that the model has tokens for, and no time for an answer")
        return texts

    def _counted(self, texts: Texts) -> str:
        def count(docs: Sequence[Tokens]) -> str:
            return f"{len(docs)} ({sum(map(len, docs)):,} tokens)"

        held = [one for docs in texts.held_out.values() for one in docs]
        return f"answers {count(texts.answers)}, documents {count(texts.text)}, held out {count(held)}"

    def _record(self, trainer: Trainer, texts: Texts, spent: float) -> dict[str, Any]:
        return {
            "specrs": __version__, "commit": machine.commit_of(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "form": trainer.head.title, "published": trainer.head.published, "finished": trainer.share >= 1,
            "options": asdict(self._options), "digests": self._digests,
            "feature_layers": list(feature_layers(self._sizes.num_layers)), "coverage": trainer.coverage,
            "counts": {
                "parameters": sum(p.numel() for p in trainer.head.parameters()), "tokens trained on": trainer.seen,
                "answers": len(texts.answers), "tokens of answers": sum(map(len, texts.answers)),
                "documents": len(texts.text), "tokens of documents": sum(map(len, texts.text)),
                "documents held out": len(self._documents.held_out), "prompts held out": len(self._prompts.held_out),
            },
            "answer_seconds": round(spent, 1), "seconds": round(trainer.seconds, 1), "curve": trainer.curve,
            "versions": {**machine.versions(), "driver": machine.driver()},
        }  # fmt: skip

    def _report(self, record: dict[str, Any]) -> Report:
        asked = self._asked
        if not self._site.place.is_host and (why := why_not(check_draft(asked.out, self._sizes)[0])) is not None:
            self._log(f"measuring on the CPU: {why}")
            self.measured_on = "cpu"
        prompts = self._held_out_prompts()
        context = min(self._sizes.max_context_len, 2048)
        options = {"device": self.measured_on, "max_context_len": context}
        tokens = min(_TOKENS[self.measured_on.split(":")[0]], context // 2)
        engines = Engines(self.model, asked.out, prompts, tokens, options)
        self._log(f"measuring on {len(prompts)} held-out prompts")
        named = asked.model is not None and not Path(asked.model).is_dir()  # by the hub's name
        return Report(str(asked.model) if named else self.model.resolve().name, record, measured(engines))

    def _held_out_prompts(self) -> list[Prompt]:
        """Held-out prompts of each kind: those that are given, and beginnings of the text."""
        each, found = self._asked.report_prompts, list[Prompt]()
        for kind in islice(dict.fromkeys(d.kind for d in self._prompts.held_out), _KINDS):
            found += islice((Prompt(d.kind, d.content) for d in self._prompts.held_out if d.kind == kind), each)
        for kind in islice(dict.fromkeys(d.kind for d in self._documents.held_out), _KINDS):
            documents = [d for d in self._documents.held_out if d.kind == kind]
            found += islice(beginnings(documents, self._tokenizer, self._options.length // 2, self._options.seed), each)
        return found


def _tokens(ids: Sequence[int]) -> Tokens:
    return np.array(ids, dtype=np.int32)
