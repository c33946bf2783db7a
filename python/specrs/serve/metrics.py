"""Metrics for dashboards and routers: vLLM's names, label sets and bucket edges, and specrs' own beside them.

Names and edges are those of vLLM's metrics (https://docs.vllm.ai/en/latest/usage/metrics/), so that its dashboards, and
routers that know them, work. Gauges are read from the engine when somebody asks; counters move when a request ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from specrs._specrs import __version__
from specrs.engine import EngineOverloadedError

if TYPE_CHECKING:
    from specrs.engine import AsyncLLM, RequestOutput
    from specrs.engine.loops.worker import Step
    from specrs.engine.rounds.stats import RequestTimes
    from specrs.serve.record import Record

#: Paths that have a label of their own: others are a stranger's to choose.
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens",
         "/v1/models", "/tokenize", "/detokenize", "/health", "/ready", "/metrics", "/version", "/load")  # fmt: skip
LABELS = ("model_name", "engine")
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
           960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PER_REQUEST = (1, 2, 5, 10, 20)
#: Reasons why a request ends, as vLLM calls them; all are there from the beginning, so that rates have a zero to start
#: at.
REASONS = ("stop", "length", "abort", "error")
_POSITIONS = 16  # draft positions whose acceptance is told apart; deeper ones count with the last


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to a number."""
    found: list[int] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > most:
                return tuple(found) or (1,)
            found.append(mantissa * power)
        power *= 10


class Measured(Protocol):
    """The part of `specrs.serve.service.Service` that a server shows its metrics."""

    engine: AsyncLLM
    names: tuple[str, ...]
    context: int
    fingerprint: str
    draining: bool

    @property
    def open_requests(self) -> int:
        """HTTP requests that were admitted and have not ended."""

    def healthy(self) -> str | None:
        """Return the reason why no requests can be served, or ``None`` where they can."""


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, service: Measured) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        labels = (service.names[0], "0")
        tokens = one_two_five(service.context)

        def counter(name: str, text: str) -> Any:
            return Counter(name, text, LABELS, registry=self.registry).labels(*labels)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Any:
            return Histogram(name, text, LABELS, buckets=tuple(buckets), registry=self.registry).labels(*labels)

        def labelled(name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Any]:
            family = Counter(name, text, (*LABELS, label), registry=self.registry)
            return {value: family.labels(*labels, value) for value in values}

        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.prompt_tokens_cached = counter("vllm:prompt_tokens_cached", "Of those, from the prefix cache.")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self.success = labelled("vllm:request_success", "Requests that ended, by why.", "finished_reason", REASONS)
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to first token.", FIRST_TOKEN)
        self.per_token = histogram("vllm:request_time_per_output_token_seconds", "Mean of a request.", TOKEN)
        self.latency = histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", LATENCY)
        self.queued = histogram("vllm:request_queue_time_seconds", "In the queue.", LATENCY)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From the queue to the first token.", LATENCY)
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the end.", LATENCY)
        self.inference = histogram("vllm:request_inference_time_seconds", "From the queue to the end.", LATENCY)
        self._steps = Tally("vllm:iteration_tokens_total", "Tokens of a step, read and written.", ITERATION)
        self._gaps = Tally("vllm:inter_token_latency_seconds", "Between two rounds of an output.", TOKEN)
        self.prompts = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.generated = histogram("vllm:request_generation_tokens", "Tokens generated for a request.", tokens)
        self.wanted = histogram("vllm:request_params_max_tokens", "max_tokens of a request.", tokens)
        self.outputs = histogram("vllm:request_params_n", "n of a request.", PER_REQUEST)
        self.drafts = counter("vllm:spec_decode_num_drafts", "Rounds of an output that verified drafts.")
        self.proposed = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that stayed in an output.")
        self.by_position = labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Of those, by their place in a round.", "position",
            map(str, range(_POSITIONS)),
        )  # fmt: skip
        self.rounds = counter("specrs:rounds", "Decoding rounds of requests that ended.")
        self.tokens_per_round = histogram("specrs:request_tokens_per_round", "Mean of a request.",
                                          (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16, 32))  # fmt: skip
        self.rejections = labelled("vllm:admission_rejections", "Requests that met a full queue.", "reason",
                                   ("requests", "prompt tokens", "templates"))  # fmt: skip
        self.responses: Any = Counter("specrs:http_responses", "By path and status.", ("path", "status"),
                                      registry=self.registry)  # fmt: skip
        info = {"version": __version__, "device": service.engine.llm.device, "fingerprint": service.fingerprint}
        Gauge("specrs:build_info", "1.", tuple(info), registry=self.registry).labels(*info.values()).set(1)
        tallies = (self._steps, self._gaps)
        self.registry.register(_Engine(service, dict(zip(LABELS, labels, strict=True)), tallies))

    def text(self) -> tuple[bytes, bytes]:
        """Return the answer of ``/metrics``, and its type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST.encode()

    def refused(self, error: BaseException) -> None:
        """A request met a full queue, if that is what the error says."""
        if isinstance(error, EngineOverloadedError):
            self.rejections[error.what].inc()

    def answered(self, record: Record) -> None:
        """A request of any kind is over."""
        path = record.path if record.path in PATHS else "other"
        self.responses.labels(path, str(record.status or 499)).inc()

    def step(self, step: Step) -> None:
        """Count a step, from the engine's thread: a fraction of a microsecond for each output."""
        self._steps.observe(step.tokens)
        for gap in step.gaps:
            self._gaps.observe(gap)

    def ended(self, outputs: Sequence[RequestOutput], times: RequestTimes) -> None:
        """Count a request that came to its end, with so many outputs: none if the engine refused it."""
        for output in outputs:
            self._output(output)
        if outputs:
            self._timed(times, max(len(one.token_ids) for one in outputs))

    def _output(self, output: RequestOutput) -> None:
        usage = output.usage
        self.success[str(output.finish_reason)].inc()
        if not output.index:
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.prompt_tokens_cached.inc(usage.cached_tokens)
            self.prefix_queries.inc(usage.prompt_tokens)
            self.prefix_hits.inc(usage.cached_tokens)
            self.prompts.observe(usage.prompt_tokens)
            self.outputs.observe(output.params.n)
            self.wanted.observe(output.params.max_tokens)
        self.generated.observe(usage.completion_tokens)
        self.rounds.inc(output.rounds)
        if output.rounds:
            self.tokens_per_round.observe(output.mean_accepted)
        self.drafts.inc(output.drafting_rounds)
        self.proposed.inc(output.proposed)
        self.accepted.inc(sum(output.drafted))
        for drafts, rounds in enumerate(output.accepted_drafts):
            for position in range(drafts):
                self.by_position[str(min(position, _POSITIONS - 1))].inc(rounds)

    def _timed(self, times: RequestTimes, tokens: int) -> None:
        """tokens: of the longest output."""
        came, admitted, first, end = times.submitted, times.admitted, times.first_token, times.finished
        if admitted is not None:
            self.queued.observe(admitted - came)
        if first is not None:
            self.first_token.observe(first - came)
        if first is not None and admitted is not None:
            self.prefill.observe(first - admitted)
        if end is not None:
            self.latency.observe(end - came)
            if first is not None:
                self.decode.observe(end - first)
                if tokens > 1:
                    self.per_token.observe((end - first) / (tokens - 1))
            if admitted is not None:
                self.inference.observe(end - admitted)


class Tally:
    """A histogram that one thread fills and others read, without a lock."""

    def __init__(self, name: str, text: str, edges: Sequence[float]) -> None:
        self.name, self.text, self._edges = name, text, tuple(map(float, edges))
        self._counts, self._sum = [0] * (len(edges) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count one more value."""
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return buckets as prometheus-client has them: counts up to each edge, and the sum."""
        counts, total = list(self._counts), 0
        found: list[tuple[str, float]] = []
        for edge, count in zip((*self._edges, float("inf")), counts, strict=True):
            total += count
            found.append(("+Inf" if edge == float("inf") else str(edge), total))
        return found, self._sum


class _Engine:
    """Figures that are read from the engine, or were counted in its thread, when somebody asks."""

    def __init__(self, service: Measured, labels: dict[str, str], tallies: Sequence[Tally]) -> None:
        self._service, self._labels, self._tallies = service, labels, tallies

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, as prometheus-client asks its collectors."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        service = self._service
        stats = service.engine.stats()
        pool, config = stats.engine, service.engine.llm.config
        gauges = {
            "vllm:num_requests_running": (pool.running, "Requests in the batch."),
            "vllm:num_requests_waiting": (max(pool.waiting, stats.submitted), "Requests that wait for it."),
            "vllm:kv_cache_usage_perc": (pool.kv_usage, "Share of the KV pool in use, 0 to 1."),
            "specrs:waiting_prompt_tokens": (max(pool.waiting_tokens, stats.submitted_tokens), "Of requests."),
            "specrs:cached_pages": (pool.cached_pages, "KV pages that the prefix cache has."),
            "specrs:draft_bytes": (pool.draft_bytes, "Memory of sources of drafts."),
            "specrs:open_requests": (service.open_requests, "HTTP requests that generate."),
            "specrs:step_seconds": (stats.last_step, "The last step of the engine."),
            "specrs:healthy": (float(service.healthy() is None), "1: requests can be served."),
            "specrs:draining": (float(service.draining), "1: no new requests are taken."),
        }
        for name, (value, text) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        names, values = list(self._labels), list(self._labels.values())
        counts = {
            "vllm:num_preemptions": (pool.preempted, "Requests that began again."),
            "vllm:generation_tokens": (pool.generated, "Tokens generated."),
            "specrs:prefilled_tokens": (pool.prefilled, "Tokens of prompts that passes have read."),
            "specrs:steps": (stats.steps, "Steps of the engine."),
        }  # fmt: skip
        for name, (value, text) in counts.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, value)
            yield counter
        for tally in self._tallies:
            histogram = HistogramMetricFamily(tally.name, tally.text, labels=names)
            histogram.add_metric(values, *tally.buckets())
            yield histogram
        info = {
            "block_size": str(config.page_size), "num_gpu_blocks": str(config.num_pages),
            "enable_prefix_caching": str(config.prefix_cache), "engine": "0",
        }  # fmt: skip
        family = GaugeMetricFamily("vllm:cache_config_info", "Of the KV pool.", labels=list(info))
        family.add_metric(list(info.values()), 1.0)
        yield family
