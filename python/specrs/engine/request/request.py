"""A request: its state while it runs, the one function that commits tokens to it, and the user's output."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specrs._specrs import Grammar, GrammarFailedError, NonFiniteError, Sampler
from specrs.engine.request.decoding import Detokenizer, TokenDecoder
from specrs.engine.request.draws import Draws
from specrs.engine.request.logprobs import TokenLogprobs
from specrs.engine.request.seeds import split
from specrs.engine.request.text import OutputText
from specrs.engine.request.traces import DraftTree, Round

if TYPE_CHECKING:
    from specrs._specrs import Sequence as KvSequence
    from specrs.models.features import Features
    from specrs.sampling_params import ResolvedSampling


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt whose tokens are settled, with the text that they stand for.

    Attributes:
        text: text of the prompt for readers of the output; the engine does not use it.
        token_ids: tokens that the model continues.
    """

    text: str
    token_ids: Sequence[int]


class FinishReason(str, enum.Enum):
    """Reason why a request ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the caller's wish
    ERROR = "error"  # the request cannot go on; its output has the error

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Usage:
    """Token counts of a request. Accepted tokens after a stop do not count."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from a shared prefix

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class RequestOutput:
    """Result of a finished request.

    Attributes:
        request_id: id that ``LLM.add`` returned.
        prompt: the prompt's text, where it was given as text.
        prompt_token_ids: tokens of the prompt that ``truncate_prompt_tokens`` kept.
        token_ids: generated tokens; ends with EOS or the stop token where one ended it.
        text: generated text, without special tokens, cut at a stop string.
        finish_reason: see `FinishReason`.
        stop_reason: the stop string or token id that ended it, else ``None``.
        usage: token counts.
        params: parameters that the request ran with: its own fields, and the model's where it left them unset.
        seed: the seed that sampling used.
        rounds: decoding rounds (target passes after the prompt's).
        accepted_lengths: ``accepted_lengths[n]`` rounds yielded n tokens, bonus token included.
        drafted: per token of ``token_ids``, whether it was an accepted draft token.
        seconds: wall time from the request's admission (the first, where it was preempted) to its end; 0 for one that
            was aborted while it waited.
        error: with ``finish_reason`` ``"error"``, the reason why the request could not go on: a `NonFiniteError` whose
            ``request`` is the request's id, ``position`` the absolute position of the token that could not be drawn,
            ``index`` the token id of the first bad logit; or a `GrammarFailedError`, with ``request``, ``position`` and
            ``why``. Tokens and text are those before that. Else ``None``.
        draft_error: reason why the draft head was given up for this request, whose tokens do not depend on it; ``None``
            where the head was not given up. Fields as in ``error``.
        index: number of this output among the prompt's ``n`` outputs.
        logprobs: scores by token id for each token of ``token_ids``: first the token itself, then the most probable
            ones; ``None`` where they were not asked for.
        prompt_logprobs: the same per token of the prompt, ``None`` for its first; shorter where the request ended
            before its prompt was read.
        drafting_rounds: number of ``rounds`` that verified drafts.
        proposed: draft tokens that those rounds verified, accepted or not.
        accepted_drafts: ``accepted_drafts[n]`` rounds kept n draft tokens; if a stop ends a round among its drafts,
            those up to the stop.
        cumulative_logprob: sum of the log-probabilities of ``token_ids``; ``None`` without ``logprobs``.
        others: outputs behind output 0 of the prompt, in that output alone, from ``LLM.generate``.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    params: ResolvedSampling
    seed: int
    rounds: int
    accepted_lengths: list[int]
    drafted: list[bool]
    seconds: float
    error: NonFiniteError | GrammarFailedError | None = None
    draft_error: NonFiniteError | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cumulative_logprob: float | None = None
    drafting_rounds: int = 0
    proposed: int = 0
    accepted_drafts: list[int] = field(default_factory=list)
    others: tuple[RequestOutput, ...] = field(default=(), repr=False)

    @property
    def outputs(self) -> list[RequestOutput]:
        """All ``n`` of the prompt in order, this one first: of the output that ``LLM.generate`` returned."""
        return [self, *self.others]

    @property
    def mean_accepted(self) -> float:
        """Tokens per round, as vLLM's mean acceptance length: accepted drafts and the bonus token, so 1.0 where none
        was accepted; 0 where no round ran."""
        return sum(n * c for n, c in enumerate(self.accepted_lengths)) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class StreamEvent:
    """Progress of one request: the tokens of a prefill or of one round.

    ``pieces`` is the released text as ``(text, drafted)`` runs; text that may be the beginning of a stop string, or
    that a later token may change (an unfinished character, a row of byte tokens), comes with a later event. The last
    event of a request carries its ``output``; with ``n`` outputs the last event of each does, and ``index`` says which
    of them it is of. ``logprobs`` is that of ``token_ids``, as `RequestOutput.logprobs`. ``rounds`` are those that
    the event tells of, where the request has `SamplingParams.trace`.
    """

    request_id: int
    token_ids: list[int]
    pieces: list[tuple[str, bool]]
    output: RequestOutput | None = None
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    rounds: tuple[Round, ...] = ()

    @property
    def text(self) -> str:
        """The released text."""
        return "".join(text for text, _ in self.pieces)

    @classmethod
    def joined(cls, events: Sequence[StreamEvent]) -> StreamEvent | None:
        """Join successive events of a request's output into one; ``None`` for no events."""
        if len(events) < 2:
            return events[0] if events else None
        tokens, pieces = [t for e in events for t in e.token_ids], [p for e in events for p in e.pieces]
        last = events[-1]
        scored = [p for e in events for p in e.logprobs or ()] if any(e.logprobs is not None for e in events) else None
        rounds = tuple(r for e in events for r in e.rounds)
        return cls(last.request_id, tokens, pieces, last.output, last.index, scored, rounds)


@dataclass(frozen=True)
class Committed:
    """Tokens and text that one commit kept: output, usage and metrics all read this."""

    kept: int  # number of offered tokens that were kept
    pieces: list[tuple[str, bool]]
    finished: bool
    logprobs: list[TokenLogprobs] | None = None  # scores of the kept tokens
    rounds: tuple[Round, ...] = ()  # the one that it was, where the request is traced


@dataclass(frozen=True)
class Ending:
    """Token ids that end a request and its length limits, fixed at admission."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_total: int  # prompt and output together: min(max_context_len, prompt + max_tokens)


@dataclass
class Request:
    """A live request. ``tokens`` is prompt and output; the last one is the root, whose KV is not written yet.

    Invariant between rounds of a running request: ``committed == len(tokens) - 1``, the target's KV is valid on
    ``[0, committed)``, and the draft's on ``[draft_from, draft_valid)``.

    A prompt with ``n`` outputs has a request for each: ``request_id`` is the request's own, ``asked_id`` that of the
    first one, which users know. The others wait until the first one has its first token, and share its pages.
    """

    request_id: int
    prompt: str | None
    tokens: list[int]
    prompt_len: int
    params: ResolvedSampling
    seed: int
    ending: Ending
    draws: Draws
    spoken: OutputText | None  # None: without a tokenizer there is no text
    prediction: list[int] = field(default_factory=list)  # tokens that its output is expected to hold
    leader: Request | None = None  # the first one of a prompt's requests, where this is another
    index: int = 0  # among them
    arrival: int = 0  # among the scheduler's requests
    started: float | None = None  # time when it was admitted first, on the performance counter

    row: KvSequence | None = None  # row of the page table, while admitted
    committed: int = 0  # target KV valid on [0, committed)
    cached_tokens: int = 0
    draft_shared: int = 0  # positions of draft KV that the prefix cache had at its admission
    rounds: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    accepted_drafts: list[int] = field(default_factory=list)
    drafting_rounds: int = 0
    proposed: int = 0  # draft tokens that rounds verified
    drafted: list[bool] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: NonFiniteError | GrammarFailedError | None = None
    logprobs: list[TokenLogprobs] | None = None  # scores of the output, where they are wanted
    # Scores of the prompt's tokens so far, where they are wanted.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    _last: float = 0.0  # when its last tokens came, where it is traced

    # Draft state: the target's features of positions whose draft KV is not written yet, kept or not, and the last
    # result of draft_extend for the root, whose form only the executor knows.
    pending: list[Features] = field(default_factory=list)
    lag: int = 0  # number of their positions
    draft_from: int = (
        0  # first position of the draft KV in use, a multiple of the page size: the head reads none before
    )
    root: object | None = None
    followed: bool = True  # true while the head drafts for the request; once false, it stays false
    draft_error: NonFiniteError | None = None  # the fault that ended drafting by the head, if a fault did
    # If not followed, or if `draft_from` is behind them: positions from 0 on whose draft KV is sound.
    _draft_kept: int = 0

    @classmethod
    def create(
        cls,
        request_id: int,
        prompt: str | None,
        prompt_ids: list[int],
        params: ResolvedSampling,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        max_context_len: int,
        decoder: TokenDecoder | None,
        prediction: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
        by_path: bool = True,
        leader: Request | None = None,
        index: int = 0,
    ) -> Request:
        """A request before its admission. Arguments were checked by ``LLM.add``."""
        if leader is not None:
            seed = split(leader.seed, index)
        else:
            seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little")
        ending = Ending(
            eos_ids=frozenset() if params.ignore_eos else eos_ids,
            stop_ids=frozenset(params.stop_token_ids),
            max_total=min(max_context_len, len(prompt_ids) + params.max_tokens),
        )
        return cls(
            request_id=request_id,
            prompt=prompt,
            tokens=list(prompt_ids),
            prompt_len=len(prompt_ids),
            params=replace(params, seed=seed),
            seed=seed,
            ending=ending,
            draws=Draws(
                vocab_size, prompt_ids, params, seed, ending.eos_ids | ending.stop_ids, bad_words, grammar, by_path
            ),
            spoken=None
            if decoder is None
            else OutputText(
                Detokenizer(decoder, prompt_ids, params.skip_special_tokens, params.keep_special_tokens),
                params.stop,
                params.include_stop,
            ),
            leader=leader,
            index=index,
            logprobs=None if params.logprobs is None else [],
            prompt_logprobs=None if params.prompt_logprobs is None or leader is not None else [None],
            prediction=list(prediction),
            followed=params.speculative,
        )

    @property
    def asked_id(self) -> int:
        """The id that users know."""
        return self.request_id if self.leader is None else self.leader.request_id

    @property
    def held(self) -> bool:
        """True if the request waits for its prompt's first request to be prefilled."""
        return self.leader is not None and self.leader.produced == 0 and self.leader.finish_reason is None

    @property
    def sampler(self) -> Sampler:
        """The sampler by which the next round draws."""
        return self.draws.sampler

    @property
    def needs_sync(self) -> bool:
        """True if the request's next round can begin only once the result of this round has been looked at."""
        return self.logprobs is not None or self.draws.varies

    @property
    def seq(self) -> KvSequence:
        """The admitted request's row of the page table."""
        assert self.row is not None, f"request {self.request_id} is not admitted"
        return self.row

    @property
    def prefill_target(self) -> int:
        """Positions to prefill: the whole prompt, or for a preempted request all of its tokens but the root."""
        fresh = len(self.tokens) == self.prompt_len
        return len(self.tokens) if fresh else len(self.tokens) - 1

    @property
    def ready(self) -> bool:
        """True if everything before the root is prefilled, so that the request decodes."""
        return self.committed >= self.prefill_target

    @property
    def produced(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.ending.max_total - len(self.tokens)

    @property
    def draft_valid(self) -> int:
        """End of the draft KV in use, which is written and sound."""
        if not self.followed:
            return self._draft_kept
        return self.committed - self.lag

    @property
    def draft_prefix(self) -> int:
        """Positions from 0 on whose draft KV is written and sound."""
        return self._draft_kept if self.draft_from else self.draft_valid

    @property
    def max_depth(self) -> int:
        """Deepest draft node that can still be used: a round of depth d yields at most d + 1 tokens."""
        return max(min(self.remaining, self.draws.room) - 1, 0)

    @property
    def unscored(self) -> int:
        """Positions of the prompt from 0 on whose logits are known or not wanted."""
        known = self.prompt_logprobs
        return self.prompt_len - 1 if known is None else len(known) - 1

    def scored_rows(self, count: int) -> range:
        """Return which of the next ``count`` positions of prefill have logits that give log-probabilities of the
        prompt."""
        return range(max(self.unscored - self.committed, 0), min(count, self.prompt_len - 1 - self.committed))

    def commit(
        self,
        new: list[int],
        *,
        round_: bool,
        error: NonFiniteError | GrammarFailedError | None = None,
        cut: bool = False,
        logprobs: Sequence[TokenLogprobs] = (),
        tree: DraftTree | None = None,
    ) -> Committed:
        """Append what a prefill (``round_`` false) or a round drew, up to the first reason to stop.

        All of ``new`` but its last token are accepted draft tokens. With ``error`` all of it are: the token after them
        could not be drawn, and the request ends there, unless it stops before. Where it is ``cut`` all of it are too,
        and the token after them is to be drawn again. This is the only place that decides what
        a request's output is; text, usage and the accepted-length histogram follow from what it keeps.
        ``logprobs``: those of ``new``, where the request wants them. ``tree``: of the round, where it is traced.
        """
        drafts = len(new) if error is not None or cut else len(new) - 1
        pieces: list[tuple[str, bool]] = []
        kept = 0
        for i, token in enumerate(new):
            if self.remaining <= 0:
                break
            accepted = i < drafts
            kept += 1
            self.tokens.append(token)
            self.drafted.append(accepted)
            if token in self.ending.eos_ids or token in self.ending.stop_ids:
                self._finish(FinishReason.STOP, token if token in self.ending.stop_ids else None)
            elif self.spoken is not None:
                released, hit = self.spoken.push(token, self._may_stop)
                if released:
                    pieces.append((released, accepted))
                if hit is not None:
                    self._finish(FinishReason.STOP, hit)
            if self.finish_reason is not None:
                break
            if self.remaining <= 0:
                self._finish(FinishReason.LENGTH, None)
        self.draws.commit(new[:kept])
        if self.finish_reason is None and self.draws.complete:
            self._finish(FinishReason.STOP, None)
        if error is not None and self.finish_reason is None:
            self.error = self._stuck(error) if isinstance(error, GrammarFailedError) else self._named(error)
            self._finish(FinishReason.ERROR, None)
        scored = None
        if self.logprobs is not None:
            scored = list(logprobs[:kept])
            self.logprobs += scored
        if round_:
            self.rounds += 1
            _count(self.accepted_lengths, kept)
            _count(self.accepted_drafts, min(kept, drafts))
        if self.finish_reason is not None and not isinstance(self.stop_reason, str):
            pieces.extend(self._flush(self._may_stop))
        self.text.extend(text for text, _ in pieces)
        rounds = self._traced(tree, new[:kept], drafts, pieces) if self.params.trace else ()
        return Committed(kept, pieces, self.finish_reason is not None, scored, rounds)

    def _traced(
        self, tree: DraftTree | None, kept: Sequence[int], drafts: int, pieces: Sequence[tuple[str, bool]]
    ) -> tuple[Round, ...]:
        """Return the trace of a round whose commit kept these tokens, of so many drafts; nothing for a prefill."""
        last, self._last = self._last, time.perf_counter()
        if tree is None:
            return ()
        own = kept[drafts] if len(kept) > drafts else None
        accepted, seconds = tree.path[: min(len(kept), drafts)], self._last - last
        told = (tree.sources, tree.proposed, tuple(pieces))
        return (Round(tree.tokens, tree.parents, accepted, own, seconds, *told),)

    def event(self, tokens: Sequence[int], committed: Committed) -> StreamEvent:
        """Return the event that tells the user of a commit."""
        output = self.output() if committed.finished else None
        scored, rounds = committed.logprobs, committed.rounds
        return StreamEvent(self.asked_id, list(tokens), committed.pieces, output, self.index, scored, rounds)

    def abort(self) -> list[tuple[str, bool]]:
        """End the request as the caller wishes; held text is released."""
        self._finish(FinishReason.ABORT, None)
        pieces = self._flush(may_stop=False)
        self.text.extend(text for text, _ in pieces)
        return pieces

    def admit(self, row: KvSequence, shared: int, drafted: int) -> None:
        """Begin, or begin again, with ``shared`` positions of target KV that the prefix cache has, and draft KV of the
        first ``drafted`` of them. A head that reads requests from their beginning can follow one only where both are
        equal."""
        self.row, self.committed, self.draft_shared, self._draft_kept = row, shared, drafted, drafted
        self.draft_from = 0
        self.cached_tokens = min(shared, self.prompt_len)
        self.forget_features()

    def wait(self, features: Features) -> None:
        """Features of positions just committed wait for the draft head."""
        self.lag += len(features)
        self.root = None
        if features.memory is None and self.unkept:
            features = self.pending.pop().longer(len(features))
        self.pending.append(features)

    @property
    def unkept(self) -> bool:
        """True if nobody kept the features of the last positions that wait."""
        return bool(self.pending) and self.pending[-1].memory is None

    def recall(self, features: Features) -> None:
        """Replace all features that wait, now that the target has run over their positions again."""
        self.pending[:] = [features]

    def oldest(self, count: int) -> list[Features]:
        """Return the waiting features of the first ``count`` positions."""
        some: list[Features] = []
        for features in self.pending:
            if count <= 0:
                break
            some.append(features if len(features) <= count else features[:count])
            count -= len(features)
        return some

    def drop_oldest(self, count: int) -> None:
        """The draft's KV is written for the first ``count`` positions that waited."""
        self.lag -= count
        while self.pending and count >= len(self.pending[0]):
            count -= len(self.pending.pop(0))
        if count:
            self.pending[0] = self.pending[0][count:]

    def begin_drafts(self, position: int) -> None:
        """Let the head begin at a position, a multiple of the page size. Features of earlier positions are dropped.
        Sound draft KV from 0 on is remembered for the cache."""
        skipped = position - self.draft_valid
        if skipped > 0:
            self._draft_kept = self.draft_prefix
            self.draft_from = position
            if self.lag:
                self.drop_oldest(skipped)

    def drop_pending(self) -> None:
        """The draft head has run over the features that waited, or never will."""
        self.pending.clear()
        self.lag = 0

    def forget_features(self) -> None:
        """Drop the features that the draft head was to run over, and its last result."""
        self.drop_pending()
        self.root = None

    def give_up_drafts(self, valid: int, error: NonFiniteError | None = None) -> None:
        """No drafts of the head from now on; ``valid`` positions of draft KV are sound."""
        self.followed, self._draft_kept = False, min(valid, self._draft_kept) if self.draft_from else valid
        self.draft_from = 0
        self.draft_error = None if error is None else self._named(error)
        self.forget_features()

    def _stuck(self, error: GrammarFailedError) -> GrammarFailedError:
        """Return the error for a request whose grammar is stuck, named as `_named` does."""
        position = len(self.tokens)
        named = GrammarFailedError(f"request {self.asked_id}: grammar: {error.why} at position {position}")
        named.kind, named.why = error.kind, error.why
        named.request, named.row, named.position = self.asked_id, -1, position
        return named

    def _named(self, error: NonFiniteError) -> NonFiniteError:
        """An error of a pass as one of this request: by its id and position, not by rows of a batch."""
        position = len(self.tokens)
        text = f"request {self.asked_id}: {error.what}: {error.value} at position {position}, index {error.index}"
        named = NonFiniteError(text)
        named.kind, named.what, named.value, named.index = error.kind, error.what, error.value, error.index
        named.request, named.row, named.position = self.asked_id, -1, position
        return named

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def _may_stop(self) -> bool:
        return self.produced >= self.params.min_tokens

    def _flush(self, may_stop: bool) -> list[tuple[str, bool]]:
        """Release the held text. A stop string that ends in it ends the request, whatever else would have ended it."""
        if self.spoken is None:
            return []
        rest, hit = self.spoken.finish(may_stop)
        if hit is not None:
            self.error = None
            self._finish(FinishReason.STOP, hit)
        return [(rest, False)] if rest else []

    def output(self) -> RequestOutput:
        """Return the output for the user."""
        assert self.finish_reason is not None
        generated = self.tokens[self.prompt_len :]
        scored, prompt = self.logprobs, self.prompt_logprobs
        if self.leader is not None:
            prompt = self.leader.prompt_logprobs
        return RequestOutput(
            request_id=self.asked_id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens[: self.prompt_len],
            token_ids=generated,
            text="".join(self.text),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            usage=Usage(self.prompt_len, len(generated), self.cached_tokens),
            params=self.params,
            seed=self.seed,
            rounds=self.rounds,
            accepted_lengths=list(self.accepted_lengths),
            drafted=list(self.drafted),
            seconds=0.0 if self.started is None else time.perf_counter() - self.started,
            error=self.error,
            draft_error=self.draft_error,
            index=self.index,
            drafting_rounds=self.drafting_rounds,
            proposed=self.proposed,
            accepted_drafts=list(self.accepted_drafts),
            logprobs=None if scored is None else list(scored),
            prompt_logprobs=None if prompt is None else list(prompt),
            cumulative_logprob=None
            if scored is None
            else sum(p[t].logprob for p, t in zip(scored, generated, strict=True)),
        )


def _count(histogram: list[int], value: int) -> None:
    """Count one more of a value."""
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += 1
