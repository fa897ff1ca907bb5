"""OpenTelemetry spans, if asked for: one for each HTTP request to the API, and in it one for each prompt the model
answers, with the ``gen_ai.*`` attributes of OpenTelemetry's conventions. No span holds text of a prompt or an answer.

Needs the packages of the extra ``otel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.core.loop import Submission
from fastgen.errors import ConfigError
from fastgen.server.observe import Ended
from fastgen.types import SamplingParams
from fastgen.wire.info import ModelInfo

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

__all__ = ["HttpSpans", "Tracing", "grpc_context"]

_MISSING = (
    "traces were asked for and the packages that send them are not installed ({error}); install them from your "
    "checkout of fastgen: pip install '.[otel]'"
)
_TRACED = ("/v1/",)


class Tracing:
    """Makes spans and sends them in the background. A ``Tracer`` for ``Observed``."""

    def __init__(self, model: str, info: ModelInfo, *, endpoint: str | None = None, exporter: Any = None) -> None:
        """
        Args:
            model: the name clients use.
            endpoint: URL of an OTLP collector that takes HTTP, such as ``http://localhost:4318``. Headers, certificates
                and sampling are read from OpenTelemetry's own environment variables.
            exporter: a ``SpanExporter`` instead of an endpoint; spans are handed to it at once.

        Raises:
            ConfigError: the packages are missing, or the endpoint is no URL.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(_MISSING.format(error=error)) from None
        self._model = model
        resource = Resource.create({"service.name": "fastgen", "service.version": info.version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(_processor(endpoint, exporter))
        self._tracer = self._provider.get_tracer("fastgen", info.version)
        self._propagator = TraceContextTextMapPropagator()

    def context_of(self, carrier: Mapping[str, str]) -> Context:
        """The running task's context, in the trace that ``traceparent`` in the headers (or gRPC's metadata) names, if
        any. Keys in lower case."""
        from opentelemetry import context

        return self._propagator.extract(carrier, context.get_current())

    @contextmanager
    def within(self, carrier: Mapping[str, str]) -> Iterator[None]:
        """Spans made inside belong to ``context_of(carrier)``."""
        from opentelemetry import context

        token = context.attach(self.context_of(carrier))
        try:
            yield
        finally:
            context.detach(token)

    @contextmanager
    def serving(self, method: str, path: str, carrier: Mapping[str, str]) -> Iterator[Span]:
        """A span for one request to a door."""
        from opentelemetry.trace import SpanKind

        attributes = {"http.request.method": method, "url.path": path}
        with (
            self.within(carrier),
            self._tracer.start_as_current_span(
                f"{method} {path}", kind=SpanKind.SERVER, attributes=attributes, record_exception=False
            ) as span,
        ):
            yield span

    def begin(self, submission: Submission) -> Callable[[Ended], None]:
        """A span for one prompt, in the caller's trace. It ends with the request."""
        operation = "chat" if submission.chat else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "fastgen",
                "gen_ai.request.model": submission.params.lora or self._model,
                "gen_ai.response.model": submission.params.lora or self._model,
                "gen_ai.response.id": submission.request_id,
                **_asked(submission.params),
            },
        )
        return lambda ended: _finish(span, ended)

    def shutdown(self) -> None:
        """Send what is left, and stop."""
        self._provider.shutdown()


class HttpSpans:
    """Middleware: a span for each request to the API, in the trace that its ``traceparent`` header names."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(_TRACED):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        with self.tracing.serving(scope["method"], "/v1", carrier) as span:

            async def watch(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _answered(span, scope, message["status"])
                await send(message)

            await self.app(scope, receive, watch)


def grpc_context(tracing: Tracing) -> Any:
    """An interceptor for ``grpc.aio.server``: what a call submits belongs to the trace that ``traceparent`` in its
    metadata names."""
    import grpc

    class Continue(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: Any) -> Any:
            from opentelemetry import context

            metadata = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
            context.attach(tracing.context_of(metadata))  # ends with the call's task
            return await continuation(details)

    return Continue()


def _answered(span: Span, scope: Scope, status: int) -> None:
    from opentelemetry.trace import StatusCode

    route = getattr(scope.get("route"), "path", None)  # the app's own text; the path is the client's
    if route is not None:
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
        span.set_attribute("url.path", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


def _processor(endpoint: str | None, exporter: SpanExporter | None) -> SpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

    if exporter is not None:
        return SimpleSpanProcessor(exporter)
    parts = urlsplit(endpoint or "")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"the endpoint for traces must be a URL such as http://localhost:4318, got {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(_MISSING.format(error=error)) from None
    url = endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url))


def _asked(params: SamplingParams) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.seed": params.seed,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _finish(span: Span, ended: Ended) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("gen_ai.usage.input_tokens", ended.usage.prompt_tokens)
    span.set_attribute("gen_ai.usage.output_tokens", ended.usage.completion_tokens)
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", ended.usage.cached_tokens)
    if ended.reasons:
        span.set_attribute("gen_ai.response.finish_reasons", ended.reasons)
    if ended.first_token is not None:
        span.set_attribute("gen_ai.response.time_to_first_chunk", ended.first_token)
    if ended.error is not None or "error" in ended.reasons:
        span.set_attribute("error.type", "error" if ended.reasons else "refused")
        span.set_status(Status(StatusCode.ERROR))  # without the text, which may quote the request
    span.end()
