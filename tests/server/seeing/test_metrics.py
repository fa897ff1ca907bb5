"""``/metrics`` as Prometheus reads it, beside what was sent."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from fastgen.server import metrics
from fastgen.server.service import Replica

USED_BY_DASHBOARDS = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_sum",
    "vllm:iteration_tokens_total_bucket",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
    "process_resident_memory_bytes",
)
"""Series that the Grafana dashboards in vLLM's repository and the community's query."""


class Scraped:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in parse(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def all(self, name: str) -> list[Any]:
        return [sample for sample in self.samples if sample.name == name]

    def value(self, name: str, **labels: str) -> float:
        (found,) = [one for one in self.all(name) if labels.items() <= one.labels.items()]
        return found.value


@pytest.fixture
def client(seen: Any) -> Iterator[TestClient]:
    app = FastAPI(openapi_url=None)
    app.include_router(metrics.router(seen.service, seen.observed))

    @app.get("/items/{name}")
    def item(name: str) -> str:
        if name == "broken":
            raise RuntimeError("broken")
        return name

    app.add_middleware(metrics.HttpCounts, observed=seen.observed)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def scrape(client: TestClient) -> Scraped:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return Scraped(answer.text)


def test_counts_are_what_was_sent(client: TestClient, seen: Any) -> None:
    before = seen.backend.replicas()[0].stats
    prompts = ["a" * 40, "b" * 3, "a" * 40]
    answers = []
    for prompt in prompts:  # one after the other: the third finds the first's prefix
        answers.append(seen.service.verbs(prompt, max_new_tokens=6, ignore_eos=True, temperature=1.0, seed=1, n=2))
    with seen.service.verbs.stream("c" * 5, max_new_tokens=400, ignore_eos=True) as stream:
        next(stream)
    while seen.observed.in_flight:
        pass
    got = scrape(client)
    whole = [answer.usage for answer in answers]
    assert got.value("vllm:prompt_tokens_total") == sum(usage.prompt_tokens for usage in whole) + 5
    assert got.value("fastgen:cached_prompt_tokens_total") == sum(usage.cached_tokens for usage in whole) > 0
    reasons = {one.labels["finished_reason"]: one.value for one in got.all("vllm:request_success_total")}
    assert reasons == {"stop": 0, "length": 6, "abort": 1, "error": 0}
    assert got.value("vllm:e2e_request_latency_seconds_count") == 4
    assert got.value("vllm:time_to_first_token_seconds_count") == 4
    assert got.value("vllm:request_params_n_bucket", le="1.0") == 1
    assert got.value("vllm:request_params_n_bucket", le="2.0") == 4
    assert got.value("vllm:request_params_max_tokens_sum") == 3 * 6 + 400
    assert got.value("vllm:request_prompt_tokens_bucket", le="10.0") == 2
    generated = got.value("vllm:generation_tokens_total")
    assert got.value("vllm:request_generation_tokens_sum") == generated >= sum(u.completion_tokens for u in whole) + 1
    assert got.value("vllm:inter_token_latency_seconds_count") == generated - 7  # seven choices had a first token
    after = seen.backend.replicas()[0].stats
    assert got.value("fastgen:passes_total", engine="0") == after.passes
    assert got.value("vllm:iteration_tokens_total_count") == after.passes - before.passes
    assert got.value("vllm:iteration_tokens_total_sum") == after.tokens - before.tokens
    assert got.value("vllm:prefix_cache_queries_total", engine="0") == after.prefix_queried_tokens
    assert got.value("vllm:prefix_cache_hits_total", engine="0") == after.prefix_hit_tokens > 0
    assert got.value("vllm:num_requests_running", engine="0") == 0
    assert got.value("vllm:kv_cache_usage_perc", engine="0") == after.used_blocks / 64
    blocks = {one.labels["state"]: one.value for one in got.all("fastgen:cache_blocks")}
    assert blocks["used"] == after.used_blocks
    assert blocks["cached"] == after.cached_blocks > 0
    assert sum(blocks.values()) == 64
    assert got.value("fastgen:pass_budget_tokens") == 64
    assert got.value("fastgen:requests_in_flight") == 0


def test_names_that_dashboards_ask_for(client: TestClient, seen: Any) -> None:
    got = scrape(client)
    assert [name for name in USED_BY_DASHBOARDS if not got.all(name)] == []
    for sample in got.samples:
        if sample.name.startswith("vllm:"):
            assert sample.labels["model_name"] == "tiny"
    for name, family in got.families.items():
        assert family.documentation or not name.startswith(("vllm:", "fastgen:")), name
        assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name)
    assert got.families["vllm:time_to_first_token_seconds"].type == "histogram"
    assert got.families["vllm:prompt_tokens"].type == "counter"
    assert got.families["vllm:num_requests_running"].type == "gauge"


def test_histograms_are_well_formed(client: TestClient, seen: Any) -> None:
    seen.service.verbs("abc", max_new_tokens=3)
    got = scrape(client)
    histograms = [family for family in got.families.values() if family.type == "histogram"]
    assert len(histograms) > 10
    for family in histograms:
        buckets = [one for one in family.samples if one.name.endswith("_bucket")]
        values, edges = [one.value for one in buckets], [float(one.labels["le"]) for one in buckets]
        assert edges == sorted(edges)
        assert edges[-1] == float("inf")
        assert all(low <= high for low, high in itertools.pairwise(values))
        (count,) = [one.value for one in family.samples if one.name.endswith("_count")]
        assert values[-1] == count


def test_openmetrics_where_it_is_asked_for(client: TestClient) -> None:
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert any(family.name == "vllm:num_requests_running" for family in parse_openmetrics(answer.text))


def test_http_is_counted_by_route_not_by_path(client: TestClient) -> None:
    for path in ("/items/1", "/items/2", "/items/broken", "/nowhere/1", "/nowhere/2?x=1"):
        client.get(path)
    client.request("BREW", "/items/1")
    got = scrape(client)
    found = {
        (one.labels["method"], one.labels["route"], one.labels["status"]): one.value
        for one in got.all("fastgen:http_requests_total")
    }
    assert found == {
        ("GET", "/items/{name}", "200"): 2,
        ("GET", "/items/{name}", "500"): 1,
        ("GET", "unmatched", "404"): 2,
        ("other", "/items/{name}", "405"): 1,
    }


def test_replicas_and_their_states(client: TestClient, seen: Any) -> None:
    seen.backend.faked = [Replica(1, "restarting", None, restarts=3, outstanding_tokens=17, stats=None, detail="died")]
    got = scrape(client)
    states = {(one.labels["engine"], one.labels["state"]) for one in got.all("fastgen:replica_state") if one.value == 1}
    assert states == {("0", "ready"), ("1", "restarting")}
    assert len(got.all("fastgen:replica_state")) == 2 * len(metrics.STATES)
    assert got.value("fastgen:replica_restarts_total", engine="1") == 3
    assert got.value("fastgen:replica_outstanding_tokens", engine="1") == 17
    assert [one.labels["engine"] for one in got.all("vllm:num_requests_running")] == ["0"]
    # An engine that has run nothing has counts of zero, not none; so has its dashboard something to draw.
    seen.backend.faked = [Replica(1, "ready", 7, restarts=4, outstanding_tokens=0, stats=None)]
    assert scrape(client).value("vllm:num_requests_running", engine="1") == 0


def test_a_strange_model_name_is_escaped(pipe: Any, look: Any) -> None:
    from fastgen.server.settings import ServerConfig

    name = 'a"b\\c\nvllm:num_requests_running 99'
    seen = look(settings=ServerConfig(served_model_name=name))
    app = FastAPI()
    app.include_router(metrics.router(seen.service, seen.observed))
    got = scrape(TestClient(app))
    assert got.value("vllm:num_requests_running", model_name=name) == 0


def test_two_apps_have_a_registry_each(seen: Any) -> None:
    for _ in range(2):
        app = FastAPI()
        app.include_router(metrics.router(seen.service, seen.observed))
        assert scrape(TestClient(app)).value("vllm:prompt_tokens_total") == 0
    assert len(seen.backend.watchers) == 1
