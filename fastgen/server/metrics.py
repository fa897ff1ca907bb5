"""``/metrics`` for Prometheus: vLLM's names where the meaning is the same, so that dashboards for it serve here, and
``fastgen:`` for what is our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastgen.core.stats import EngineStats
from fastgen.server import tally as edges
from fastgen.server.observe import Observed
from fastgen.server.service import Replica, Service, State
from fastgen.server.tally import Histogram, Tally, one_two_five

__all__ = ["HttpCounts", "ServerCollector", "router"]

STATES: tuple[State, ...] = ("starting", "ready", "draining", "restarting", "failed")
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def router(service: Service, observed: Observed) -> APIRouter:
    """The route, with a registry of its own."""
    observed.follow(service.backend)
    registry = CollectorRegistry()
    registry.register(ServerCollector(service, observed))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    routes = APIRouter()

    @routes.get("/metrics", include_in_schema=False)
    def metrics(request: Request) -> Response:  # no coroutine: asking an engine for its counts may wait for a pass
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    return routes


class HttpCounts:
    """Middleware that counts the answers by method, route and status. Routes are the app's own, not what clients write;
    so there are no more series than routes."""

    def __init__(self, app: ASGIApp, observed: Observed) -> None:
        self.app = app
        self.observed = observed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500  # of a handler that raised before it answered

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.observed.count_http(method, route, status)


class ServerCollector(Collector):
    """Reads the service and what was observed of it whenever Prometheus asks."""

    def __init__(self, service: Service, observed: Observed) -> None:
        self._service = service
        self._observed = observed
        self._model = service.names[0]
        self._latest: dict[int, EngineStats] = {}

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are known, and registering must not ask the engines."""
        return ()

    def collect(self) -> Iterator[Metric]:
        tally, replicas = self._observed.tally(), self._service.backend.replicas()
        engines = self._counts(replicas)
        yield from self._engines(engines)
        yield from self._requests(tally)
        yield from self._times(tally)
        yield from self._lengths(tally)
        yield from self._passes(tally, engines)
        yield from self._replicas(replicas)
        yield from self._doors()

    def _counts(self, replicas: Sequence[Replica]) -> list[tuple[str, EngineStats]]:
        """Of each engine that runs, by its label: zeros before its first pass, and what it said last while it is in the
        middle of one."""
        found = []
        for one in replicas:
            if one.stats is not None:
                self._latest[one.index] = one.stats
            elif one.state != "ready":
                self._latest.pop(one.index, None)
            if one.stats is not None or one.state == "ready":
                nothing = EngineStats(0, 0, 0, 0, 0.0, 0, 0, 0, self._service.info.total_blocks, 0, 0, 0, 0, 0)
                found.append((str(one.index), self._latest.setdefault(one.index, nothing)))
        return found

    # ---- vLLM's names ----------------------------------------------------------------------------------------------

    def _engines(self, known: Sequence[tuple[str, EngineStats]]) -> Iterator[Metric]:
        def usage(stats: EngineStats) -> float:
            return stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0

        for name, text, value in (
            ("vllm:num_requests_running", "Choices that run.", lambda stats: stats.running),
            ("vllm:num_requests_waiting", "Choices that wait to run.", lambda stats: stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the K/V cache's blocks in use, 0 to 1.", usage),
            ("vllm:gpu_cache_usage_perc", "The same by its older name.", usage),
        ):
            yield self._gauge(name, text, ((engine, value(stats)) for engine, stats in known))
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", _queried),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", _hit),
            ("vllm:gpu_prefix_cache_queries", "vllm:prefix_cache_queries by its older name.", _queried),
            ("vllm:gpu_prefix_cache_hits", "vllm:prefix_cache_hits by its older name.", _hit),
            ("vllm:num_preemptions", "Times a choice lost its blocks to others.", lambda stats: stats.preemptions),
        ):
            yield self._counter(name, text, ((engine, value(stats)) for engine, stats in known))
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The K/V cache.",
            labels=["model_name", "engine", "block_size", "num_gpu_blocks"],
        )
        for engine, stats in known:
            config.add_metric([self._model, engine, str(self._service.info.block_size), str(stats.total_blocks)], 1)
        yield config

    def _requests(self, tally: Tally) -> Iterator[Metric]:
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts, those found in the prefix cache too.", tally.prompt_tokens),
            ("vllm:generation_tokens", "Tokens of answers.", tally.answer_tokens),
            ("fastgen:cached_prompt_tokens", "Tokens of prompts found in the prefix cache.", tally.cached_tokens),
            ("fastgen:requests_refused", "Requests the engine did not take.", self._observed.refused),
        ):
            one = CounterMetricFamily(name, text, labels=["model_name"])
            one.add_metric([self._model], value)
            yield one
        flying = GaugeMetricFamily("fastgen:requests_in_flight", "Requests that have not ended.", labels=["model_name"])
        flying.add_metric([self._model], self._observed.in_flight)
        yield flying
        ended = CounterMetricFamily(
            "vllm:request_success", "Choices that ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in tally.ended.items():
            ended.add_metric([self._model, reason], count)
        yield ended

    def _times(self, tally: Tally) -> Iterator[Metric]:
        for name, text, histogram, buckets in (
            (
                "time_to_first_token",
                "From a request's arrival to its first token.",
                tally.first_token,
                edges.FIRST_TOKEN_EDGES,
            ),
            ("inter_token_latency", "Between two tokens of a choice.", tally.gap, edges.GAP_EDGES),
            (
                "time_per_output_token",
                "vllm:inter_token_latency_seconds by its older name.",
                tally.gap,
                edges.GAP_EDGES,
            ),
            ("request_time_per_output_token", "The mean of each request.", tally.mean_gap, edges.GAP_EDGES),
            ("e2e_request_latency", "From a request's arrival to its end.", tally.whole, edges.REQUEST_EDGES),
            ("request_decode_time", "From a request's first token to its end.", tally.answering, edges.REQUEST_EDGES),
        ):
            yield self._histogram(f"vllm:{name}_seconds", f"{text} In seconds.", histogram, buckets)

    def _lengths(self, tally: Tally) -> Iterator[Metric]:
        lengths = one_two_five(self._service.info.max_model_len)
        for name, text, histogram, buckets in (
            ("request_prompt_tokens", "Tokens of a request's prompt.", tally.prompt_lengths, lengths),
            ("request_generation_tokens", "Tokens of a request's answer.", tally.answer_lengths, lengths),
            ("request_params_max_tokens", "max_tokens of a request that set it.", tally.max_tokens, lengths),
            ("request_params_n", "Choices a request asked for.", tally.choices, (1, 2, 5, 10, 20)),
            ("iteration_tokens_total", "Tokens of a forward pass.", tally.pass_tokens, edges.PASS_TOKEN_EDGES),
        ):
            yield self._histogram(f"vllm:{name}", text, histogram, buckets)

    # ---- our own ---------------------------------------------------------------------------------------------------

    def _passes(self, tally: Tally, known: Sequence[tuple[str, EngineStats]]) -> Iterator[Metric]:
        budget = GaugeMetricFamily(
            "fastgen:pass_budget_tokens", "Most tokens of a forward pass.", labels=["model_name"]
        )
        budget.add_metric([self._model], self._service.info.max_batch_tokens)
        yield budget
        yield self._histogram(
            "fastgen:pass_seconds", "Seconds a forward pass took.", tally.pass_seconds, edges.FIRST_TOKEN_EDGES
        )
        yield self._counter("fastgen:passes", "Forward passes.", ((engine, one.passes) for engine, one in known))
        yield self._counter(
            "fastgen:pass_tokens",
            "Tokens run through the model, of prompts and answers, recomputed ones too.",
            ((engine, one.tokens) for engine, one in known),
        )
        blocks = GaugeMetricFamily(
            "fastgen:cache_blocks", "Blocks of the K/V cache, by state.", labels=["model_name", "engine", "state"]
        )
        for engine, one in known:
            free = one.total_blocks - one.used_blocks - one.cached_blocks
            for state, count in (("used", one.used_blocks), ("cached", one.cached_blocks), ("free", free)):
                blocks.add_metric([self._model, engine, state], count)
        yield blocks

    def _replicas(self, replicas: Sequence[Replica]) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "fastgen:replica_state", "1 for the state an engine is in.", labels=["model_name", "engine", "state"]
        )
        for one in replicas:
            for state in STATES:
                states.add_metric([self._model, str(one.index), state], float(one.state == state))
        yield states
        yield self._counter(
            "fastgen:replica_restarts",
            "Times an engine was restarted.",
            ((str(one.index), one.restarts) for one in replicas),
        )
        yield self._gauge(
            "fastgen:replica_outstanding_tokens",
            "Tokens that an engine's requests may still take.",
            ((str(one.index), one.outstanding_tokens) for one in replicas),
        )

    def _doors(self) -> Iterator[Metric]:
        answers = CounterMetricFamily("fastgen:http_requests", "Answers by HTTP.", labels=["method", "route", "status"])
        for (method, route, status), count in list(self._observed.http.items()):
            answers.add_metric([method, route, str(status)], count)
        yield answers
        info = self._service.info
        about = InfoMetricFamily("fastgen:model", "What is served.", labels=["model_name"])
        about.add_metric(
            [self._model],
            {
                "version": info.version,
                "architecture": info.architecture,
                "dtype": info.dtype,
                "device": info.device,
                "quantization": info.quantization or "none",
                "max_model_len": str(info.max_model_len),
            },
        )
        yield about

    # ---- families --------------------------------------------------------------------------------------------------

    def _gauge(self, name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
        return self._each(GaugeMetricFamily(name, text, labels=["model_name", "engine"]), values)

    def _counter(self, name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
        return self._each(CounterMetricFamily(name, text, labels=["model_name", "engine"]), values)

    def _each(self, family: Any, values: Iterable[tuple[str, float]]) -> Metric:
        for engine, value in values:
            family.add_metric([self._model, engine], value)
        assert isinstance(family, Metric)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram, buckets: Sequence[float]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], histogram.at(buckets), histogram.total)
        return family


def _queried(stats: EngineStats) -> float:
    return stats.prefix_queried_tokens


def _hit(stats: EngineStats) -> float:
    return stats.prefix_hit_tokens
