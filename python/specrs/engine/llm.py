"""``specrs.LLM``, which users call."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from specrs import assets
from specrs import progress as bars
from specrs._specrs import Accepts, ConfigError, Grammar, Pool, PoolExhaustedError, TreeBatch, __version__
from specrs.backends import Capabilities
from specrs.capsule.file import save
from specrs.capsule.recorder import RoundRecorder
from specrs.engine.config import EngineConfig
from specrs.engine.conversing import Conversing
from specrs.engine.devices.cuda import CudaExecutor
from specrs.engine.devices.host import HostExecutor
from specrs.engine.devices.placing import Wanted
from specrs.engine.errors import EngineBusyError, EngineClosedError
from specrs.engine.interrupts import Uninterrupted
from specrs.engine.prompts import Chats, Given, Prompt, load_eos, load_tokenizer, spellings, truncated
from specrs.engine.request.decoding import TokenDecoder
from specrs.engine.request.grammars import Grammars
from specrs.engine.request.request import Request, RequestOutput, StreamEvent
from specrs.engine.request.token_bytes import TokenTable
from specrs.engine.rounds.observer import RoundObserver, Watching
from specrs.engine.rounds.runner import Runner
from specrs.engine.rounds.scheduler import Scheduler
from specrs.engine.rounds.stats import EngineStats
from specrs.engine_options import EngineOptions
from specrs.models import (
    LiveModel,
    ModelConfig,
    default_sampling,
    follow_torch,
    has_recurrent_state,
    load_draft,
    load_target,
    locate,
    numerics,
    stated_sampling,
    weight_bytes,
)
from specrs.sampling_params import ResolvedSampling, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Init = TypeVar("_Init", bound=Callable[..., None])


def _writable(init: _Init) -> _Init:
    """Out of inference mode, whose tensors could not be written to where the caller is not in that mode.

    A function, so that a type checker that does not read torch sees the arguments of ``init`` all the same.
    """
    return torch.inference_mode(False)(init)


class LLM(Conversing):
    """A model, its draft head and the engine that runs them on the CPU or a GPU.

    One thread at a time may use an engine (EngineBusyError otherwise); several engines may run in as many threads.
    ``close``, or a ``with`` block, frees weights and caches.

    Args:
        model: Hugging Face directory (``config.json``, safetensors, ``tokenizer.json``), or ``org/name``, of the local
            hub cache or downloaded into it (``org/name@revision``: of a branch, a tag or a commit); a `LiveModel` is
            one in memory, as `specrs.hf.from_model` makes it; ``None`` is the small model in the package, with its
            draft head unless ``draft`` says otherwise.
        draft: directory (or ``org/name``) of a draft head for the model; ``None`` with a model given: drafts come
            from the text itself (``drafters``).
        speculative: ``False`` decodes plainly, whatever sources there are.
        progress: bars on stderr while files are downloaded and weights are loaded; ``None``: on a terminal alone.
        options: fields of `EngineConfig`, typed by `EngineOptions`; docs/options.md has what each one does. Without
            ``device``, the engine runs on a GPU where one is that runs the model and holds it, and else on the CPU;
            `LLM.device` says which, and why.

    Raises:
        ConfigError: an option or a file that does not fit, with the value and the limit.
        UnsupportedCombinationError: a `ConfigError`: what the attention backend cannot do, and what would work.
        CudaError: a GPU was asked for and none can be used; the message has what was found and what is needed.
        DeviceMemoryError: a GPU was asked for and has too little free memory; raised before any of it is taken, with
            `need`, `have`, and in `hint` every line and the numbers that would fit.

    Example:
        >>> llm = LLM()
        >>> for event in llm.stream(["def fibonacci(n):"], SamplingParams(max_tokens=64)):
        ...     print(event.text, end="")
    """

    @_writable
    def __init__(
        self,
        model: str | Path | LiveModel | None = None,
        draft: str | Path | None = None,
        *,
        speculative: bool = True,
        progress: bool | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        config = EngineConfig.of(options)
        if not isinstance(speculative, bool):
            raise ConfigError(f"speculative = {speculative!r}: must be a bool")
        bars.wanted(progress)
        if model is None:
            model, draft = assets.model_dir(), assets.draft_dir() if draft is None else draft
        for name, path in (("model", None if isinstance(model, LiveModel) else model), ("draft", draft)):
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise ConfigError(f"{name} = {path!r}: must be the path of a directory")
        model = model if isinstance(model, LiveModel) else locate(model, "model", progress=progress)
        draft = None if draft is None else locate(draft, "draft", progress=progress)
        config = config.drafting(draft is not None) if speculative else replace(config, drafters=())
        if not config.drafts_by_head:
            draft = None
        # Options and sizes that cannot run are refused before weights are read; files are checked after them.
        recurrent = has_recurrent_state(model)
        if recurrent:
            config.route(speculative)  # refuses impossible options, before errors that no options help
        shapes = ModelConfig.from_directory(model)
        context = config.max_context_len or shapes.max_context_len
        shapes.check_context(context)
        config.check_vocabulary(shapes.vocab_size)
        #: Parameters for requests that leave their own unset: from the model's generation_config.json, else greedy.
        self.default_sampling = default_sampling(model).resolved()
        #: Parameters that this file states itself, for servers, whose API has other defaults; fields that the file
        #: leaves out are unset.
        self.stated_sampling = stated_sampling(model)
        wanted = Wanted(config, model, shapes, draft, speculative and recurrent)
        site = wanted.site()
        self.config, geometry, ops = site.config, site.geometry, site.ops
        assert self.config.num_pages is not None
        follow_torch()
        with bars.loading(weight_bytes(model, draft if site.drafts else None), progress):
            target = load_target(model, ops, max_context_len=context)
            head = load_draft(draft, target) if draft is not None and site.drafts else None
        self.tokenizer = load_tokenizer(model)
        self._decoder = None if self.tokenizer is None else TokenDecoder(self.tokenizer)
        self._chats = Chats(model)
        self.vocab_size: int = target.config.vocab_size
        #: Tokens that end an output: of config.json, of generation_config.json, and the tokenizer's own.
        self.eos_ids = frozenset(target.config.eos_token_ids)
        if (eos := load_eos(model, self.tokenizer)) is not None and eos < self.vocab_size:
            self.eos_ids |= {eos}
        self._grammars = Grammars(self.tokenizer, self.vocab_size, self.eos_ids)
        self._by_path = site.place.is_host
        # Page 0 is the sink.
        pool = Pool(self.config.num_pages + 1, config.page_size, config.max_batch, geometry.row_pages)
        make = HostExecutor if site.place.is_host else CudaExecutor
        executor = make(target, head, self.config, geometry, pool)
        runner = Runner(executor, pool, self.config, geometry, self.vocab_size)
        runner.spell = None if self.tokenizer is None else TokenTable(self.tokenizer)
        if config.sources or (runner.head is not None and not runner.executor.launched):
            runner.drafting.gathering.grammars = self._grammars
        self._parts: tuple[Runner, Scheduler] | None = (runner, Scheduler(runner))  # None: closed
        draft = None if head is None else str(draft)
        self._numerics = {
            "specrs": __version__,
            **numerics(ops, target.products()),
            "kv_dtype": self.config.kv_dtype,
            "attention": Capabilities.of(self.config.backend).name,
            "draft": None if head is None else numerics(ops, head.products())["weights"],
        }
        #: Device of the engine: ``cuda:0 (NVIDIA H200)``, or the CPU and why, as ``cpu (the driver sees no GPU)``.
        self.device = site.name
        #: Memory of the GPU that the engine takes, line by line; ``None`` on the CPU.
        self.budget = site.budget
        self._name = f"model={str(model)!r}, draft={draft!r}, device={str(site.place.device)!r}"
        self._lock = threading.Lock()  # held by whoever works; nobody waits for it
        self._left: deque[Request] = deque()  # requests of streams that were closed, still to be aborted
        self._owner: threading.Thread | None = None  # thread of an AsyncLLM
        self._next_id = 0
        self._inboxes: dict[int, deque[StreamEvent]] = {}  # events of requests that a stream waits for
        # Tokens for the words of the last request that had some.
        self._bad_words: tuple[tuple[str, ...], list[tuple[int, ...]]] = ((), [])
        self._unclaimed: list[StreamEvent] = []  # events of requests added by `add`, seen while a stream stepped
        with executor.entered():
            runner.calibrate()

    def __repr__(self) -> str:
        c = self.config
        tree = "auto" if c.adaptive else f"({c.shape.topk}, {c.shape.steps}, {c.shape.draft_tokens})"
        pages = f"pages={c.num_pages} of {c.page_size} tokens"
        return f"LLM({self._name}, tree={tree}, {pages}{', closed' if self._parts is None else ''})"

    # -- lifetime -----------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._parts is None

    def close(self) -> None:
        """Free weights and caches; requests that still run are dropped. Closing again does nothing.

        Any later use raises EngineClosedError.
        """
        if self._parts is None:
            return
        with Uninterrupted():
            if not self._lock.acquire(blocking=False):
                raise EngineBusyError
            try:
                # Rounds in flight end first. Their errors concern nobody any more.
                with suppress(Exception), self._runner.executor.entered():
                    self._runner.close()
            finally:
                self._parts, self.tokenizer = None, None
                self._inboxes.clear()
                self._unclaimed.clear()
                self._left.clear()
                self._lock.release()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _runner(self) -> Runner:
        if self._parts is None:
            raise EngineClosedError
        return self._parts[0]

    @property
    def _scheduler(self) -> Scheduler:
        if self._parts is None:
            raise EngineClosedError
        return self._parts[1]

    @property
    def lent(self) -> bool:
        """True if an `AsyncLLM` has the engine; the thread of that alone may then call `add`, `step` and `abort`."""
        return self._owner is not None and self._owner.is_alive()

    def _check_owner(self) -> None:
        """Refuse who would take events, or queue requests, that another thread's readers wait for ever for."""
        if self.lent and threading.current_thread() is not self._owner:
            raise EngineBusyError

    @contextmanager
    def _turn(self) -> Iterator[Uninterrupted]:
        """Work on the engine alone; refused at once while another call works. Ctrl-C waits for the end."""
        with Uninterrupted() as held:
            if not self._lock.acquire(blocking=False):
                raise EngineBusyError
            try:
                if self._parts is None:
                    raise EngineClosedError
                with self._parts[0].executor.entered():
                    self._drop_left()
                    yield held
            finally:
                self._lock.release()

    def _drop_left(self) -> None:
        """Abort what closed streams left; the caller has the turn."""
        while self._left:
            request = self._left[0]
            self._scheduler.abort(request.asked_id)  # may raise what came of a round in flight: then once more
            self._inboxes.pop(request.asked_id, None)
            self._left.popleft()

    # -- whole requests -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt] | str | Mapping[str, Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Literal["raise", "return"] = "raise",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; outputs in the order of the prompts, ``n`` of one as its `RequestOutput.outputs`.

        A request that cannot go on ends alone, with ``finish_reason`` ``"error"`` and its ``error`` on its output; the
        others run to their ends.

        Args:
            prompts: texts, sequences of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; an empty list
                gives an empty list. A text or a mapping by itself is a list of one.
            params: one for all prompts, or one for each; a field that is unset takes the model's value
                (`default_sampling`).
            on_error: effect of a request that could not go on, once all have ended. ``"raise"``: the first such error
                is raised, in the order of the prompts, with every output as its ``outputs``. ``"return"``: nothing is
                raised; look at ``finish_reason``.
            progress: a bar on stderr; ``None``: on a terminal, of several prompts.

        Raises:
            ConfigError: a prompt without tokens, a token outside the vocabulary, a prompt that leaves no room in the
                context; the message says which, as ``prompts[1][0]``.
            PoolExhaustedError: a request that the pool could not hold even alone.
            EngineBusyError: another thread uses this engine.
            EngineClosedError: the engine was closed.
            NonFiniteError: with ``on_error="raise"``: the model's scores, or the scores after bias and penalties, held
                NaN or +inf, or allowed no token. Fields: see `RequestOutput`.
            Nothing of the call stays behind after an error.
        """
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error = {on_error!r}: must be 'raise' or 'return'")
        bars.wanted(progress)
        with self._turn() as held:
            requests = self._requests(prompts, params)
            ended = {}
            with closing(self._drain(requests, held)) as events, bars.requests(len(requests), progress) as tell:
                for event in events:
                    if event.output is not None:
                        ended[event.request_id, event.index] = event.output
                    tell(len(event.token_ids), event.output is not None)
        outputs = [ended[r.asked_id, r.index] for r in requests]
        error = next((o.error for o in outputs if o.error is not None), None)
        ordered = [
            replace(o, others=tuple(outputs[i + 1 : i + o.params.n])) for i, o in enumerate(outputs) if not o.index
        ]
        if error is not None and on_error == "raise":
            error.outputs = ordered  # type: ignore[union-attr]
            raise error
        return ordered

    def stream(
        self,
        prompts: Sequence[Prompt] | str | Mapping[str, Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamEvent]:
        """Generate as ``generate`` does, but yield each request's progress; ``request_id`` counts up in the order of
        the prompts.

        A request that cannot go on raises nothing: its last event's ``output`` has the ``error``. Of a prompt with
        ``n`` outputs, all events have one ``request_id``, and ``index`` says whose they are.

        Prompts and parameters are checked at once; the requests are queued by the first ``next``. Closing the
        iterator early aborts what still runs. Several streams of one engine may be read in turn.
        """
        with self._turn():
            requests = self._requests(prompts, params)
        return self._drain(requests)

    def _requests(
        self,
        prompts: Sequence[Prompt] | str | Mapping[str, Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if isinstance(prompts, (str, Mapping)):
            prompts = [prompts]
        if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
            raise ConfigError(f"prompts is a {type(prompts).__name__}: give a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            one = self._request_params(params or SamplingParams(), "params")
            return [r for i, p in enumerate(prompts) for r in self._request(p, one, f"prompts[{i}]")]
        if not isinstance(params, Sequence):
            raise ConfigError(f"params is a {type(params).__name__}: give SamplingParams, or a list of them")
        if len(params) != len(prompts):
            raise ConfigError(f"params has {len(params)} entries for {len(prompts)} prompts")
        checked = [self._request_params(p, f"params[{i}]") for i, p in enumerate(params)]
        each = enumerate(zip(prompts, checked, strict=True))
        return [r for i, (p, c) in each for r in self._request(p, c, f"prompts[{i}]")]

    def _drain(self, requests: list[Request], held: Uninterrupted | None = None) -> Generator[StreamEvent]:
        """Events of ``requests`` until all have ended.

        It takes a turn for each step, unless the caller has one (``held``). A generator may be closed anywhere, by the
        garbage collector in the midst of a step too: what still runs is noted, and aborted at once where the engine is
        idle, else by whoever uses it next.
        """

        def turn() -> AbstractContextManager[Uninterrupted]:
            return self._turn() if held is None else nullcontext(held)

        inbox: deque[StreamEvent] = deque()
        live = {(r.asked_id, r.index) for r in requests}
        try:
            with turn():
                for request in requests:
                    self._inboxes[request.asked_id] = inbox
                    self._scheduler.add(request)
            while live:
                while not inbox:
                    with turn() as holding:
                        self._step()
                        holding.check()
                event = inbox.popleft()
                if event.output is not None:
                    live.discard((event.request_id, event.index))
                yield event
        finally:
            self._left.extend(requests)
            if held is not None:
                self._drop_left()
            else:
                with suppress(EngineBusyError, EngineClosedError), self._turn():
                    pass  # it has dropped what is left

    # -- an engine's loop ---------------------------------------------------------------------------------------

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request and return its id; ``step`` makes it progress."""
        self._check_owner()
        return self._enqueue(prompt, params)[0].request_id

    def _enqueue(self, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        with self._turn():
            requests = self._request(prompt, self._request_params(params or SamplingParams(), "params"), "prompt")
            for request in requests:
                self._scheduler.add(request)
            return requests

    def step(self) -> list[StreamEvent]:
        """Make one step of everything that runs: admission, a chunk of prefill, a round.

        A request that cannot go on (NaN scores) ends alone: its last event's ``output`` has ``finish_reason``
        ``"error"`` and the ``error``. What is raised concerns the whole step, and leaves every request as it was before
        the failed pass; abort one, or free pages, and step again. Ctrl-C comes at the end of a step, and loses no
        event; a second Ctrl-C comes at once.
        """
        self._check_owner()
        with self._turn():
            self._step()
        events, self._unclaimed = self._unclaimed, []
        return events

    def _step(self) -> None:
        """Step, and hand each event to the inbox of its stream, or keep it for the next `step`."""
        for event in self._scheduler.step():
            self._inboxes.get(event.request_id, self._unclaimed).append(event)

    def abort(self, request_id: int) -> StreamEvent | None:
        """End a request early, with the output that it has; ``None`` where it is not live.

        The event carries whatever of the request ``step`` has not returned yet, its own end included. A stream that
        waits for the request gets the event too, and goes on with its others. Of a request with several outputs
        (``n``), this is the event of the first that has one; the next ``step`` returns the others.
        """
        self._check_owner()
        with self._turn():
            news = [e for e in self._unclaimed if e.request_id == request_id]
            self._unclaimed = [e for e in self._unclaimed if e.request_id != request_id]
            news += self._scheduler.abort(request_id)
            each = [[e for e in news if e.index == i] for i in sorted({e.index for e in news})]
            events = [event for some in each if (event := StreamEvent.joined(some)) is not None]
            inbox = self._inboxes.get(request_id)
            if inbox is not None:
                inbox.extend(events)
            else:
                self._unclaimed += events[1:]
            return events[0] if events else None

    @property
    def unfinished(self) -> int:
        """Requests that wait or run, or whose output ``step`` has not returned yet."""
        return self._scheduler.unfinished + sum(e.output is not None for e in self._unclaimed)

    def stats(self) -> EngineStats:
        """Return how many requests run and wait, and how full the pool is, between two steps."""
        return self._stats(None)

    def _stats(self, draft_bytes: int | None) -> EngineStats:
        """draft_bytes: as they were lately, where asking every drafting would take too long."""
        with self._turn():
            runner = self._runner
            held = runner.draft_bytes() if draft_bytes is None else draft_bytes
            return self._scheduler.stats(runner.pages.pool.stats(), held)

    @property
    def numerics(self) -> dict[str, Any]:
        """Facts on which the bits of tokens and logits depend, beside model, input and seed; plain values for JSON.

        Two engines with equal values give equal bits, whatever their batches, trees, pages, chunks and threads. On a
        GPU: its name and compute capability, the driver's CUDA, cublasLt's version and path, the number of the rule
        that attention follows, and for each product its class of bits (`split` of K and `fingerprint`). On the CPU: the
        dtype that each weight is kept in; `instructions` are told, and change nothing. Drafts change no token, so the
        head's products (``draft``) stand apart. With an ``attention`` other than ``"native"``, bits may depend on the
        batch and the tree as well.
        """
        return self._numerics

    @property
    def speculative(self) -> bool:
        """True if drafts are in use: a head's, or those of other sources."""
        return self._runner.drafting.drafts

    @property
    def max_tokens_per_round(self) -> int:
        """Most tokens that a round yields: the tree's depth and the bonus token."""
        return self._runner.config.deepest + 1

    @contextmanager
    def watching(self, watch: Callable[[TreeBatch, Accepts], None]) -> Iterator[None]:
        """Within the context, call ``watch`` with each round's verified trees and the accepted paths in them."""
        with self._observed_by(Watching(watch)):
            yield

    @contextmanager
    def recording(self, path: str | os.PathLike[str] | None = None, round: int = 1) -> Iterator[RoundRecorder]:
        """Within the context, keep the inputs of the ``round``-th round that runs, for ``specrs replay``.

        Plain decoding counts as rounds too. The recorder's ``capsule`` has the round once it has run; with ``path`` it
        is also written there when the context is left.

        Raises:
            ConfigError: a round below 1; on leaving, fewer rounds ran.
        """
        if isinstance(round, bool) or not isinstance(round, int) or round < 1:
            raise ConfigError(f"round = {round!r}: must be an integer of at least 1")
        runner = self._runner
        recorder = RoundRecorder(runner.executor.planner, runner.pages.pool, self.config.branches_attend, round)
        with self._observed_by(recorder):
            yield recorder
        if recorder.capsule is None:
            raise ConfigError(f"round = {round}: only {recorder.rounds} ran")
        if path is not None:
            save(recorder.capsule, path)

    @contextmanager
    def _observed_by(self, observer: RoundObserver) -> Iterator[None]:
        observers = self._runner.observers
        observers.append(observer)
        try:
            yield
        finally:
            observers.remove(observer)

    def audit(self) -> dict[str, int]:
        """Check the page ledger against every sequence; raises LedgerError on a leak. Returns the pool's counts."""
        with self._turn():
            return self._runner.pages.pool.audit()

    def _request_params(self, params: object, where: str) -> ResolvedSampling:
        """Check a request's parameters against the model, and fill unset ones from the model's."""
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"{where} is a {type(params).__name__}: must be SamplingParams")
        try:
            for name in ("stop", "bad_words"):
                texts = getattr(params, name)
                if texts and self.tokenizer is None:
                    raise ConfigError(f"SamplingParams.{name} = {texts!r}: the model directory has no tokenizer.json")
            params.check_vocabulary(self.vocab_size)
            self._grammar(params)
            self._spellings(params)
            return params.resolved(self.default_sampling)
        except ConfigError as e:
            e.args = (f"{where}: {e}",)
            raise

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar that the output must follow; any thread may call this."""
        return None if params.structured_outputs is None else self._grammars.compile(params.structured_outputs)

    def _spellings(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Token ids of bad words, each as it is and behind a space."""
        if not params.bad_words:
            return []
        words = tuple(params.bad_words)
        if self._bad_words[0] != words:
            assert self.tokenizer is not None
            self._bad_words = words, spellings(self.tokenizer, words, self.vocab_size)
        return self._bad_words[1]

    def _request(self, prompt: Prompt, params: ResolvedSampling, where: str) -> list[Request]:
        """Check everything about a prompt before anything is allocated for it. A request for each of its outputs."""
        given = Given.of(prompt, where)
        text, ids = given.text, given.ids
        if ids is None:
            assert text is not None
            ids = self._encode(text, where)
        context = self.config.max_context_len
        assert context is not None
        ids = truncated(ids, params.truncate_prompt_tokens, context - params.max_tokens)
        if not ids:
            raise ConfigError(f"{where}: empty, there is nothing to continue")
        for i, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"{where}[{i}] = {token}: outside the vocabulary 0..{self.vocab_size - 1}")
        if len(ids) >= context:
            raise ConfigError(f"{where}: {len(ids)} tokens leave no room to generate in max_context_len = {context}")
        prediction = self._prediction(params.prediction, where)[:context]
        if isinstance(params.prediction, str):  # made tokens once, here or by an `AsyncLLM` before
            params = replace(params, prediction=tuple(prediction))
        requests: list[Request] = []
        for index in range(params.n):
            request = Request.create(
                self._next_id + index,
                text,
                ids,
                params,
                vocab_size=self.vocab_size,
                eos_ids=self.eos_ids,
                max_context_len=context,
                decoder=self._decoder,
                bad_words=self._spellings(params),
                grammar=self._grammar(params),
                by_path=self._by_path,
                prediction=prediction,
                leader=requests[0] if requests else None,
                index=index,
            )
            try:
                self._scheduler.check(request)
            except PoolExhaustedError as e:
                e.args = (f"{where}: {e}",)
                raise
            requests.append(request)
        self._next_id += params.n
        return requests

    def _prediction(self, expected: str | Sequence[int] | None, where: str) -> list[int]:
        """Tokens that the user expects in the output."""
        if expected is None:
            return []
        if not isinstance(expected, str):
            return list(expected)
        return self._encode(expected, f"{where}: SamplingParams.prediction", special=False)
