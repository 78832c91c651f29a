"""OpenTelemetry spans: one a generation request, a child of the caller's where a `traceparent` came with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from orcaserve.cluster.app_edge import Call

# The names of OpenTelemetry's conventions for generative AI, where a note has one.
_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reason": "gen_ai.response.finish_reasons",
    "cached_tokens": "orcaserve.cached_tokens",
    "ttft_ms": "orcaserve.time_to_first_token_ms",
    "error": "error.type",
}


class Tracer:
    """With no processor nothing is recorded, at the cost of one `if`."""

    def __init__(self, processor: SpanProcessor | None, model_name: str) -> None:
        self._model_name = model_name
        self._tracer: trace.Tracer | None = None
        self._processor = processor
        if processor is not None:
            provider = TracerProvider(resource=Resource.create({"service.name": "orcaserve"}), shutdown_on_exit=False)
            provider.add_span_processor(processor)
            self._tracer = provider.get_tracer("orcaserve")

    def close(self) -> None:
        """Hand over what has not been sent. Blocks while it does."""
        if self._processor is not None:
            self._processor.shutdown()

    @contextmanager
    def span(self, call: Call) -> Iterator[None]:
        """Around one request; what the log line says of it becomes attributes."""
        if self._tracer is None:
            yield
            return
        carrier = {"traceparent": call.header(b"traceparent").decode("latin-1")}
        parent = TraceContextTextMapPropagator().extract(carrier)
        with self._tracer.start_as_current_span(f"{call.method} {call.path}", parent, kind=SpanKind.SERVER) as span:
            try:
                yield
            finally:
                span.set_attributes({"gen_ai.request.model": self._model_name, "orcaserve.request_id": call.request_id})
                for note, attribute in _ATTRIBUTES.items():
                    if note in call.notes:
                        span.set_attribute(attribute, call.notes[note])
                if call.status >= 500 or "error" in call.notes:
                    span.set_status(Status(StatusCode.ERROR))


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans in batches to a collector. Raises ImportError where the exporter is not installed."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces"))
