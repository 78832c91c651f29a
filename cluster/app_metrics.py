"""Request counters of one router, with vLLM's names where vLLM has the metric. Labels never hold a request's words."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from orcaserve.cluster.wire import ClusterStatus

logger = logging.getLogger(__name__)

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/version"})


class RequestMetrics:
    """Made once per router, on a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        model = ["model_name"]

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, model, buckets=_SECONDS, registry=self.registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, model, registry=self.registry).labels(model_name)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of answered requests.")
        self._generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self._success = Counter(
            "vllm:request_success", "Choices, by how they ended.", [*model, "finished_reason"], registry=self.registry
        )
        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._inter_token = histogram("vllm:inter_token_latency_seconds", "Between two chunks of a stream.")
        self._latency = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last byte.")
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to being scheduled first.")
        self._refused = Counter(
            "orcaserve:requests_refused", "Requests refused, by reason.", [*model, "code"], registry=self.registry
        )
        self._http = Counter(
            "orcaserve:http_requests", "By route and status.", ["path", "status"], registry=self.registry
        )
        self._running = Gauge("vllm:num_requests_running", "On the engine.", model, registry=self.registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "In the queue.", model, registry=self.registry)

    def request_ended(self, path: str, status: int, duration_s: float) -> None:
        """An HTTP request, whatever became of it."""
        route = path if path in _ROUTES else "other"
        self._http.labels(route, str(status or 499)).inc()
        if route in ("/v1/chat/completions", "/v1/completions") and status == 200:
            self._latency.observe(_sound(duration_s))

    def refused(self, code: str) -> None:
        """A generation request that got an error."""
        self._refused.labels(self._model_name, code).inc()

    def first_token(self, seconds: float, queue_s: float) -> None:
        """The first piece of a request is there."""
        self._first_token.observe(_sound(seconds))
        self._queue.observe(_sound(queue_s))

    def next_token(self, seconds: float) -> None:
        """One more piece of a stream."""
        self._inter_token.observe(_sound(seconds))

    def generated(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """A generation request has ended, well or not."""
        self._prompt_tokens.inc(_sound(num_prompt_tokens))
        self._generation_tokens.inc(_sound(num_tokens))

    def choice_ended(self, finish_reason: str) -> None:
        """stop, length, or abort when the client left or an error came first."""
        self._success.labels(self._model_name, finish_reason).inc()

    def render(self, status: ClusterStatus | None) -> bytes:
        """The exposition text; without a status the engine's gauges keep their last value."""
        if status is not None:
            self._running.labels(self._model_name).set(status.scheduler.running)
            self._waiting.labels(self._model_name).set(status.scheduler.waiting)
        return generate_latest(self.registry)


def _sound(value: float) -> float:
    """A figure that a counter can take. One that it cannot is a fault somewhere, but never the request's."""
    if value >= 0 and value != float("inf"):
        return value
    logger.error("a metric was given %r", value)
    return 0.0
