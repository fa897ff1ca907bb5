"""The page's files and its live events, without a browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import islice
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from fastgen.server import page
from fastgen.server.admission import Admission
from fastgen.server.http.app import create_app
from fastgen.server.page import live
from fastgen.server.service import Replica
from fastgen.server.settings import ServerConfig

STATIC = {one.name: one.read_text() for one in files("fastgen.server.page").joinpath("static").iterdir()}


def app_of(seen: Any) -> FastAPI:
    app = FastAPI()
    app.include_router(page.router(seen.service, seen.observed))
    return app


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in lines:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def test_every_file_is_served_with_its_type_and_policy(seen: Any) -> None:
    client = TestClient(app_of(seen))
    assert {path.removeprefix("/page/") for path in page.PATHS} == {"/", "about", *STATIC} - {"index.html"}
    for path in page.PATHS:
        answer = client.get(path)
        assert answer.status_code == 200
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == "'self'"
        assert policy["trusted-types"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        if path != "/page/about":
            assert answer.text == STATIC["index.html" if path == "/" else path.removeprefix("/page/")]
            again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b"")
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("/page/app.js").headers["content-type"].startswith("text/javascript")
    for path in ("/page/index.html", "/page/", "/page/../live.py", "/page/%2e%2e/live.py", "/page/routes.py"):
        assert client.get(path).status_code == 404


def test_nothing_comes_from_elsewhere_and_nothing_is_parsed_as_markup() -> None:
    for name, text in STATIC.items():
        addresses = re.findall(r"https?://(?!www\.w3\.org/2000/svg)\w", text)
        assert not addresses, f"{name} names another site"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
        assert not re.search(r"\sstyle=|<style|\son\w+=\"", text) or not name.endswith(".html"), name
        for imported in re.findall(r"from \"\./([^\"]+)\"", text):
            assert imported in STATIC
    assert len(STATIC) == 15


def test_scripts_ask_for_elements_that_are_there() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', STATIC["index.html"]))
    for name, text in STATIC.items():
        if name.endswith(".js"):
            assert set(re.findall(r'\$\("([^"]+)"\)', text)) <= ids, name
    labels = set(re.findall(r'<label[^>]*for="([^"]+)"', STATIC["index.html"]))
    controls = re.findall(r'aria-(?:controls|labelledby)="([^"]+)"', STATIC["index.html"])
    assert {*labels, *controls} <= ids


def test_live_shows_what_happens(seen: Any, serve: Callable[[FastAPI], str]) -> None:
    app = app_of(seen)
    seen.service.verbs("before anybody looked", max_new_tokens=3, ignore_eos=True)
    before = seen.backend.replicas()[0].stats
    seen.backend.faked = [Replica(1, "restarting", None, 2, 0, None, detail="it died <b>")]
    with httpx.stream("GET", serve(app) + "/live", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        read = events(answer.iter_lines())
        kind, hello = next(read)
        assert kind == "hello"
        assert (hello["names"], hello["budget"], hello["max_model_len"]) == (["tiny"], 64, 512)
        assert sum(count for *_, count in hello["history"]) == 3
        seen.service.verbs(["x" * 150, "y" * 20], max_new_tokens=9, ignore_eos=True)
        ended, bars = time.time(), []
        for kind, last in read:
            assert kind == "frame"
            bars += last["passes"]
            if last["now"] > ended:  # what is there now is in it
                break
    after = seen.backend.replicas()[0].stats
    assert sum(count for *_, count in bars) == after.passes - before.passes
    assert sum(mean * count for *_, mean, count in bars) == after.tokens - before.tokens
    assert max(most for _, _, _, most, _, _ in bars) == 64
    assert all(0 < mean <= most <= 64 for _, _, _, most, mean, _ in bars)
    assert last["state"] == "ready"
    assert last["total"] == 64
    assert 0 < last["cached"] <= 64
    assert last["latency"]["first"]["count"] == 3
    assert 0 < last["latency"]["gap"]["p50"] <= last["latency"]["gap"]["p99"]
    assert last["rates"]["answer"] > 0
    assert [(one["index"], one["state"], one["restarts"]) for one in last["replicas"]] == [
        (0, "ready", 0),
        (1, "restarting", 2),
    ]


def test_viewers_share_a_snapshot_and_none_is_made_for_nobody(
    seen: Any, serve: Callable[[FastAPI], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[live.Live] = []
    original = live.Live.__init__
    monkeypatch.setattr(live.Live, "__init__", lambda self, *args: (made.append(self), original(self, *args))[1])
    address = serve(app_of(seen)) + "/live"
    (view,) = made
    with httpx.stream("GET", address, timeout=30) as one, httpx.stream("GET", address, timeout=30) as other:
        first, second = events(one.iter_lines()), events(other.iter_lines())
        left = {frame["now"] for kind, frame in islice(first, 6) if kind == "frame"}
        right = {frame["now"] for kind, frame in islice(second, 6) if kind == "frame"}
        assert left & right
        assert view._viewers == 2
    while view._viewers:
        pass
    assert view._ticker is None
    with httpx.stream("GET", address, timeout=30) as one:
        assert [kind for kind, _ in islice(events(one.iter_lines()), 3)] == ["hello", "frame", "frame"]


def test_too_many_viewers_are_told_so(seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "VIEWERS", 0)
    answer = TestClient(app_of(seen)).get("/live")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_viewers")
    assert answer.headers["retry-after"]


def test_streams_end_when_the_server_goes(
    seen: Any, serve: Callable[[FastAPI], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(app_of(seen)) + "/live"
    with httpx.stream("GET", address, timeout=30) as answer:
        read = events(answer.iter_lines())
        next(read)
        monkeypatch.setattr(type(seen.backend), "state", "draining")
        assert len(list(read)) < 10
    refused = httpx.get(address)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")


def test_a_snapshot_that_fails_ends_the_streams(
    seen: Any, serve: Callable[[FastAPI], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.stream("GET", serve(app_of(seen)) + "/live", timeout=30) as answer:
        read = events(answer.iter_lines())
        next(read)
        monkeypatch.setattr(seen.observed, "recent", lambda *_: 1 / 0)
        assert len(list(read)) < 10


def test_the_page_is_open_and_the_live_view_is_not(look: Any) -> None:
    seen = look(settings=ServerConfig(api_key="secret"))
    client = TestClient(create_app(seen.service, Admission(seen.service.settings, 32)))
    for path in page.PATHS:
        assert client.get(path).status_code == 200, path
        assert "secret" not in client.get(path).text
    assert client.get("/page/about").json()["needs_key"] is True
    assert client.get("/live").status_code == 401
    assert client.get("/metrics").status_code == 401


def test_the_page_can_be_left_out(look: Any) -> None:
    seen = look(settings=ServerConfig(page=False))
    client = TestClient(create_app(seen.service, Admission(seen.service.settings, 32)))
    assert {client.get(path).status_code for path in ("/", "/page/app.js", "/live")} == {404}
