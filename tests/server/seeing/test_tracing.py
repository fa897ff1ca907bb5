"""Spans, read back through OpenTelemetry's own exporters."""

from __future__ import annotations

import asyncio
import http.server
import sys
import threading
from typing import Any

import grpc
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names
from opentelemetry.trace import SpanKind, StatusCode

from fastgen.errors import ConfigError, InvalidRequestError
from fastgen.server.tracing import HttpSpans, Tracing, grpc_context

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(seen: Any, spans: InMemorySpanExporter) -> Any:
    made = Tracing("tiny", seen.service.info, exporter=spans)
    yield made
    made.shutdown()


def test_a_request_is_one_span_with_the_conventions_attributes(
    look: Any, tracing: Tracing, spans: InMemorySpanExporter
) -> None:
    verbs = look(tracer=tracing).service.verbs
    answer = verbs("secret words", max_new_tokens=5, ignore_eos=True, temperature=0.5, top_p=0.9, n=2, seed=3)
    (span,) = spans.get_finished_spans()
    assert span.name == "text_completion tiny"
    got = dict(span.attributes or {})
    assert got.pop(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK) > 0
    assert got == {
        names.GEN_AI_OPERATION_NAME: "text_completion",
        names.GEN_AI_PROVIDER_NAME: "fastgen",
        names.GEN_AI_REQUEST_MODEL: "tiny",
        names.GEN_AI_RESPONSE_MODEL: "tiny",
        names.GEN_AI_RESPONSE_ID: answer.request_id,
        names.GEN_AI_REQUEST_CHOICE_COUNT: 2,
        names.GEN_AI_REQUEST_MAX_TOKENS: 5,
        names.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        names.GEN_AI_REQUEST_TOP_P: 0.9,
        names.GEN_AI_REQUEST_SEED: 3,
        names.GEN_AI_USAGE_INPUT_TOKENS: answer.usage.prompt_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: answer.usage.completion_tokens,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: answer.usage.cached_tokens,
        names.GEN_AI_RESPONSE_FINISH_REASONS: ("length", "length"),
    }
    assert "secret" not in span.to_json()


def test_refused_requests_end_their_span(look: Any, tracing: Tracing, spans: InMemorySpanExporter) -> None:
    with pytest.raises(InvalidRequestError):
        look(tracer=tracing).service.verbs(prompt_token_ids=[5] * 5000)
    (span,) = spans.get_finished_spans()
    assert span.status.status_code == StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "refused"


def test_http_spans_are_the_parents_and_continue_the_clients_trace(
    look: Any, tracing: Tracing, spans: InMemorySpanExporter
) -> None:
    verbs = look(tracer=tracing).service.verbs
    app = FastAPI()

    @app.post("/v1/things/{name}")
    async def thing(name: str) -> str:
        if name == "broken":
            raise HTTPException(503)
        return (await verbs.acall("abc", max_new_tokens=2)).request_id

    @app.get("/health")
    async def health() -> str:
        return "fine"

    app.add_middleware(HttpSpans, tracing=tracing)
    client = TestClient(app)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    client.post("/v1/things/one?secret=x", headers=headers)
    client.get("/health", headers=headers)
    inner, outer = spans.get_finished_spans()
    assert (outer.name, outer.kind) == ("POST /v1/things/{name}", SpanKind.SERVER)
    assert outer.context.trace_id == int(TRACE, 16)
    assert outer.parent is not None
    assert outer.parent.span_id == int(PARENT, 16)
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert (outer.attributes or {})["http.response.status_code"] == 200
    assert "secret" not in outer.to_json()
    client.post("/v1/things/broken", headers={"traceparent": "nonsense"})
    last = spans.get_finished_spans()[-1]
    assert last.parent is None
    assert last.status.status_code == StatusCode.ERROR


def test_grpc_calls_continue_the_clients_trace(look: Any, tracing: Tracing, spans: InMemorySpanExporter) -> None:
    verbs = look(tracer=tracing).service.verbs

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return (await verbs.acall("abc", max_new_tokens=2)).request_id.encode()

    async def call() -> None:
        server = grpc.aio.server(interceptors=[grpc_context(tracing)])
        handlers = {"Do": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("some.Service", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                do = channel.unary_unary("/some.Service/Do")
                await do(b"", metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),))
                await do(b"")
        finally:
            await server.stop(None)

    asyncio.run(asyncio.wait_for(call(), 60))
    first, second = spans.get_finished_spans()
    assert (first.context.trace_id, first.parent and first.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert second.parent is None  # the one before has left nothing behind


def test_a_collector_gets_them(seen: Any, look: Any) -> None:
    came: list[ExportTraceServiceRequest] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            came.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        tracing = Tracing("tiny", seen.service.info, endpoint=f"http://127.0.0.1:{server.server_port}")
        look(tracer=tracing).service.verbs("abc", max_new_tokens=2)
        tracing.shutdown()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    (resource,) = came[0].resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == "fastgen"
    assert [one.name for one in resource.scope_spans[0].spans] == ["text_completion tiny"]


@pytest.mark.parametrize("endpoint", [None, "", "localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_no_url(seen: Any, endpoint: str | None) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        Tracing("tiny", seen.service.info, endpoint=endpoint)


@pytest.mark.parametrize("module", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"])
def test_without_the_packages(seen: Any, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        Tracing("tiny", seen.service.info, endpoint="http://localhost:4318")
