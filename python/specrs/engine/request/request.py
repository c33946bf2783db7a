"""A request: its state while it runs, the only function that commits tokens to it, and the user's output."""

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
from specrs.engine.request.head_state import HeadState
from specrs.engine.request.logprobs import TokenLogprobs
from specrs.engine.request.seeds import split
from specrs.engine.request.text import OutputText
from specrs.engine.request.traces import DraftTree, Round

if TYPE_CHECKING:
    from specrs._specrs import Sequence as KvSequence
    from specrs.sampling_params import ResolvedSampling


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt that is already tokenized, with its text.

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
        """Number of tokens of prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class RequestOutput:
    """Result of a finished request.

    Attributes:
        request_id: id that ``LLM.add`` returned.
        prompt: the prompt's text, if it was given as text.
        prompt_token_ids: tokens of the prompt that ``truncate_prompt_tokens`` kept.
        token_ids: generated tokens; EOS or a stop token is the last of them if it ended the output.
        text: generated text, without special tokens, cut at a stop string.
        finish_reason: see `FinishReason`.
        stop_reason: the stop string or token id that ended the output, else ``None``.
        usage: token counts.
        params: parameters that the request ran with: its own, and the model's for those that it left unset.
        seed: the seed that sampling used.
        rounds: number of decoding rounds (target passes after the prompt's).
        accepted_lengths: ``accepted_lengths[n]`` is the number of rounds that yielded n tokens, bonus token included.
        drafted: for each token of ``token_ids``, True if it was an accepted draft token.
        seconds: wall time from the request's first admission to its end; 0 if it was aborted while it waited.
        error: with ``finish_reason`` ``"error"``, the reason why the request could not go on: a `NonFiniteError` whose
            ``request`` is the request's id, ``position`` the absolute position of the token that could not be drawn,
            ``index`` the token id of the first bad logit; or a `GrammarFailedError`, with ``request``, ``position`` and
            ``why``. Tokens and text end before that position. Else ``None``.
        draft_error: reason why the draft head was given up for this request, which does not change the request's
            tokens; ``None`` if the head was not given up. Its fields are as in ``error``.
        index: number of this output among the prompt's ``n`` outputs.
        logprobs: scores by token id for each token of ``token_ids``: first the token itself, then the most probable
            ones; ``None`` if the user did not ask for them.
        prompt_logprobs: the same for each token of the prompt, with ``None`` for its first token; shorter if the
            request ended before its prompt was read.
        drafting_rounds: number of ``rounds`` that verified drafts.
        proposed: draft tokens that those rounds verified, accepted or not.
        accepted_drafts: ``accepted_drafts[n]`` is the number of rounds that kept n draft tokens; if a stop ends a round
            among its drafts, only those up to the stop count.
        cumulative_logprob: sum of the log-probabilities of ``token_ids``; ``None`` without ``logprobs``.
        others: the prompt's other outputs; only ``LLM.generate`` sets it, in output 0.
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
        """All ``n`` outputs of the prompt in order, this one first, for an output that ``LLM.generate`` returned."""
        return [self, *self.others]

    @property
    def mean_accepted(self) -> float:
        """Tokens per round, like vLLM's mean acceptance length.

        Accepted drafts and the bonus token count, so the value is 1.0 if no draft was accepted, and 0 if no round
        ran.
        """
        return sum(n * c for n, c in enumerate(self.accepted_lengths)) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class StreamEvent:
    """Progress of one request: the tokens of a prefill or of one round.

    ``pieces`` is the released text as ``(text, drafted)`` runs. Text that may be the beginning of a stop string, or
    that a later token may change (an unfinished character, a row of byte tokens), comes with a later event. The last
    event of a request carries its ``output``. With ``n`` outputs the last event of each output does, and ``index`` is
    the number of that output. ``logprobs`` has the scores of ``token_ids``, as in `RequestOutput.logprobs`. ``rounds``
    are the rounds that the event reports, if the request has `SamplingParams.trace`.
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
class Passed:
    """Results of a pass for one request: output, usage and metrics all read this.

    Attributes:
        request: the request.
        tokens: the tokens that the pass drew.
        kept: number of these tokens that the request kept.
        pieces: released text, as in `StreamEvent.pieces`.
        finished: True if the request has ended.
        logprobs: scores of the kept tokens, if they are wanted.
        rounds: the round of the pass, if the request is traced.
    """

    request: Request
    tokens: list[int]
    kept: int
    pieces: Sequence[tuple[str, bool]] = ()
    finished: bool = False
    logprobs: list[TokenLogprobs] | None = None
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True)
class Ending:
    """Token ids that end a request and its length limits, fixed at admission."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_total: int  # prompt and output together: min(max_context_len, prompt + max_tokens)


@dataclass
class Request:
    """A live request. ``tokens`` holds prompt and output; the last token is the root, whose KV is not written yet.

    Invariant between rounds of a running request: ``committed == len(tokens) - 1``, the target's KV is valid on ``[0,
    committed)``, and the draft KV on the range that ``head`` has.

    A prompt with ``n`` outputs has one request for each. ``request_id`` is the request's own id, ``asked_id`` the id of
    the first request, which users know. The other requests wait until the first has its first token, and share its
    pages.
    """

    request_id: int
    prompt: str | None
    tokens: list[int]
    prompt_len: int
    params: ResolvedSampling
    seed: int
    ending: Ending
    draws: Draws
    spoken: OutputText | None  # None without a tokenizer, since there is no text then
    prediction: list[int] = field(default_factory=list)  # tokens that the output is expected to contain
    leader: Request | None = None  # the first of the prompt's requests, if this is another one
    index: int = 0  # number among the prompt's requests
    arrival: int = 0  # number among the scheduler's requests
    started: float | None = None  # time of the first admission, on the performance counter

    row: KvSequence | None = None  # row of the page table, while admitted
    committed: int = 0  # target KV valid on [0, committed)
    cached_tokens: int = 0
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
    logprobs: list[TokenLogprobs] | None = None  # scores of the output, if the user wants them
    # Scores of the prompt's tokens so far, if the user wants them.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    _last: float = 0.0  # time of the last tokens, if the request is traced

    head: HeadState = field(default_factory=HeadState)
    draft_error: NonFiniteError | None = None  # the fault that ended drafting by the head, if a fault did

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
        """Return a request before its admission. ``LLM.add`` has checked the arguments."""
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
            head=HeadState(followed=params.speculative),
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
        """True if the next round can begin only after the host has read this round's result."""
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
    def lag(self) -> int:
        """Number of committed positions that the head has not run over; 0 if it does not follow the request."""
        return max(self.committed - self.head.end, 0) if self.head.followed else 0

    @property
    def can_draft(self) -> bool:
        """True if the head can draft in the next round.

        If a root was lost, the head cannot before a plain round has committed a position: it writes no position twice,
        because the position's page may be shared by now.
        """
        return self.head.followed and self.head.warm and (self.head.root is not None or self.lag > 0)

    @property
    def produced(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.ending.max_total - len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest draft node that can still be used: a round of depth d yields at most d + 1 tokens."""
        return max(min(self.remaining, self.draws.room) - 1, 0)

    @property
    def unscored(self) -> int:
        """Number of the prompt's positions, from 0 on, whose logits are known or not wanted."""
        known = self.prompt_logprobs
        return self.prompt_len - 1 if known is None else len(known) - 1

    def scored_rows(self, count: int) -> range:
        """Return which of the next ``count`` positions of prefill give wanted log-probabilities of the prompt."""
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
    ) -> Passed:
        """Append the tokens that a prefill or a round drew, up to the first reason to stop.

        This is the only place that decides a request's output; text, usage and the accepted-length histogram follow
        from the tokens that it keeps.

        Args:
            new: the drawn tokens. All but the last are accepted draft tokens, and with ``error`` or ``cut`` also the
                last.
            round_: True for a round, False for a prefill.
            error: reason why the token after ``new`` could not be drawn. The request ends there unless it stops before.
            cut: True if the token after ``new`` is to be drawn again.
            logprobs: scores of ``new``, if the request wants them.
            tree: the round's tree, if the request is traced.
        """
        drafts = len(new) if error is not None or cut else len(new) - 1
        kept, pieces = self._append(new, drafts)
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
        return Passed(self, new, kept, pieces, self.finish_reason is not None, scored, rounds)

    def _append(self, new: Sequence[int], drafts: int) -> tuple[int, list[tuple[str, bool]]]:
        """Append tokens up to the first one that ends the request. Returns how many, and the text that they release.

        Args:
            drafts: the number of tokens in front that are accepted drafts.
        """
        pieces: list[tuple[str, bool]] = []
        for i, token in enumerate(new):
            if self.finish_reason is not None or self.remaining <= 0:
                return i, pieces
            self.tokens.append(token)
            self.drafted.append(i < drafts)
            if token in self.ending.eos_ids or token in self.ending.stop_ids:
                self._finish(FinishReason.STOP, token if token in self.ending.stop_ids else None)
            elif self.spoken is not None:
                released, hit = self.spoken.push(token, self._may_stop)
                if released:
                    pieces.append((released, i < drafts))
                if hit is not None:
                    self._finish(FinishReason.STOP, hit)
            if self.finish_reason is None and self.remaining <= 0:
                self._finish(FinishReason.LENGTH, None)
        return len(new), pieces

    def _traced(
        self, tree: DraftTree | None, kept: Sequence[int], drafts: int, pieces: Sequence[tuple[str, bool]]
    ) -> tuple[Round, ...]:
        """Return the trace of a round that kept these tokens, after ``drafts`` accepted drafts; empty for a prefill."""
        last, self._last = self._last, time.perf_counter()
        if tree is None:
            return ()
        own = kept[drafts] if len(kept) > drafts else None
        accepted, seconds = tree.path[: min(len(kept), drafts)], self._last - last
        told = (tree.sources, tree.proposed, tuple(pieces))
        return (Round(tree.tokens, tree.parents, accepted, own, seconds, *told),)

    def event(self, passed: Passed) -> StreamEvent:
        """Return the event that reports a pass to the user."""
        output = self.output() if passed.finished else None
        kept, pieces = passed.tokens[: passed.kept], list(passed.pieces)
        return StreamEvent(self.asked_id, kept, pieces, output, self.index, passed.logprobs, passed.rounds)

    def abort(self) -> list[tuple[str, bool]]:
        """End the request early and return the held text, which is released."""
        self._finish(FinishReason.ABORT, None)
        pieces = self._flush(may_stop=False)
        self.text.extend(text for text, _ in pieces)
        return pieces

    def admit(self, row: KvSequence, shared: int, drafted: int) -> None:
        """Begin, or begin again, with ``shared`` cached positions; the first ``drafted`` of them have draft KV, too."""
        self.row, self.committed = row, shared
        self.cached_tokens = min(shared, self.prompt_len)
        self.head.admit(shared, drafted)

    def give_up_drafts(self, sound: int, error: NonFiniteError | None = None) -> None:
        """Stop drafting with the head; the draft KV of the first ``sound`` positions is sound."""
        self.head.give_up(sound)
        self.draft_error = None if error is None else self._named(error)

    def _stuck(self, error: GrammarFailedError) -> GrammarFailedError:
        """Return the error for a request whose grammar is stuck, named as `_named` does."""
        position = len(self.tokens)
        named = GrammarFailedError(f"request {self.asked_id}: grammar: {error.why} at position {position}")
        named.kind, named.why = error.kind, error.why
        named.request, named.row, named.position = self.asked_id, -1, position
        return named

    def _named(self, error: NonFiniteError) -> NonFiniteError:
        """Return a pass's error as an error of this request, with its id and position instead of rows of a batch."""
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
        """Release the held text. If a stop string ends in it, that is why the request ended, before any other
        reason."""
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
    """Count one more occurrence of ``value``."""
    histogram.extend([0] * (value + 1 - len(histogram)))
    histogram[value] += 1
