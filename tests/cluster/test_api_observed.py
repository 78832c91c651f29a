"""What the operator sees: spans, log lines, and that prompts are in neither unless asked for."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orcaserve.cluster.app_config import AppConfig
from orcaserve.cluster.app_trace import Tracer
from tests.cluster.live import LiveServer
from tests.waiting import eventually


def test_spans_join_the_callers_trace(make_server: Callable[..., LiveServer]) -> None:
    server = make_server()
    exporter = InMemorySpanExporter()
    server.surface.generator.tracer = Tracer(SimpleSpanProcessor(exporter), server.model.name)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    answer = server.client.post("/v1/completions", json={"prompt": "SAY:a secret"}, headers=headers)
    assert answer.status_code == 200
    assert server.client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    eventually(lambda: len(exporter.get_finished_spans()) == 2)
    good, bad = exporter.get_finished_spans()
    assert good.name == "POST /v1/completions"
    assert good.context is not None
    assert f"{good.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert good.attributes is not None
    assert good.attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert good.attributes["orcaserve.request_id"] == answer.headers["x-request-id"]
    assert not bad.status.is_ok
    assert "secret" not in good.to_json() + bad.to_json()


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(_unzipped(body, self.headers["content-encoding"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join(5)
    server.server_close()


def _unzipped(body: bytes, encoding: str | None) -> bytes:
    import gzip

    return gzip.decompress(body) if encoding == "gzip" else body


def test_spans_reach_a_collector(
    make_server: Callable[..., LiveServer], collector: tuple[str, list[ExportTraceServiceRequest]]
) -> None:
    url, received = collector
    server = make_server(AppConfig(otlp_endpoint=url))
    assert server.chat("SAY:x").status_code == 200
    server.wait(server.surface.close())  # hands over what is left
    eventually(lambda: bool(received))
    [span] = received[0].resource_spans[0].scope_spans[0].spans
    assert span.name == "POST /v1/chat/completions"


def test_log_lines(make_server: Callable[..., LiveServer], caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "orcaserve.access"]

    quiet, loud = make_server(), make_server(AppConfig(log_prompts=True, log_format="json"))
    with caplog.at_level(logging.INFO, "orcaserve.access"):
        quiet.chat("SAY:my secret", extra_field=1)
        quiet.client.get("/health")
        quiet.client.get("/nope with space%0A")
        loud.chat("SAY:no secret")
        eventually(lambda: len(lines()) == 3)

    first, second, third = lines()
    assert "secret" not in first
    assert " status=200 " in first
    assert " prompt_tokens=" in first
    assert "\n" not in second
    assert json.loads(third)["prompt"] == [{"role": "user", "content": "SAY:no secret"}]
