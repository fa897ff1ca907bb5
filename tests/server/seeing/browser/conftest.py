"""The page in a real browser: Debian's Chromium, without a window, driven by playwright.

The model's answers are written down beforehand and come a token at a time, as fast as the test lets them.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, expect, sync_playwright

from fastgen.core.loop import EngineLoop, Submission
from fastgen.core.stats import EngineStats
from fastgen.front.verbs import Verbs
from fastgen.server.admission import Admission
from fastgen.server.http.app import create_app
from fastgen.server.observe import Observed
from fastgen.server.service import Replica, Service, State, Watcher
from fastgen.server.settings import ServerConfig
from fastgen.testing.scripted import ScriptedEngine
from fastgen.testing.tokenizers import byte_tokenizer
from fastgen.text import Tokenizer
from fastgen.wire.info import ModelInfo, Pass

LONGEST = 20_000
"""Milliseconds that anything may take on the page."""
expect.set_options(timeout=LONGEST)


class Model:
    """What the model says, and how fast."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.say = "Hello, you."
        self.prompts: list[str] = []
        self.allowed = threading.Semaphore(0)
        self.free = True
        self.pause = 0.0
        self.watchers: list[Watcher] = []
        self.engine = ScriptedEngine(tokenizer, script=self._script, on_step=self._step, max_model_len=2000)

    def hold(self) -> None:
        """Nothing comes from now on but what ``let`` lets through."""
        self.free = False

    def let(self, tokens: int) -> None:
        for _ in range(tokens):
            self.allowed.release()

    def release(self) -> None:
        self.free = True
        self.allowed.release()

    def _script(self, prompt: list[int], index: int) -> Sequence[int]:
        self.prompts.append(self.tokenizer.decode(prompt))
        return [*self.say.encode(), *self.tokenizer.eos_token_ids]

    def _step(self) -> None:
        if not self.free:
            self.allowed.acquire()
        time.sleep(self.pause)
        running = len(self.engine._choices)
        for watcher in self.watchers:
            watcher(0, [Pass(time.time(), 0.01, min(8 * running, 64), running, 1, 10, 20)])


class Backend:
    """The model as one engine of two, the other one dead."""

    state: State = "ready"

    def __init__(self, model: Model) -> None:
        self.model = model
        self.loop = EngineLoop(model.engine)
        self.detail = "it was killed"

    closed = property(lambda self: self.loop.closed)

    def new_request_id(self) -> str:
        return self.loop.new_request_id()

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        return self.loop.submit(submissions)

    def abort(self, request_id: str) -> None:
        self.loop.abort(request_id)

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        self.model.watchers.append(watcher)
        return lambda: None

    def replicas(self) -> list[Replica]:
        running = len(self.model.engine._choices)
        stats = EngineStats(
            self.model.engine.steps, 0, 0, 0, 0.0, running, min(running, 1), 0, 100, 10 + running, 20, 30, 0, 0
        )
        return [Replica(0, "ready", 1, 0, 5, stats), Replica(1, "restarting", None, 2, 0, None, detail=self.detail)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def model(tokenizer: Tokenizer) -> Model:
    return Model(tokenizer)


@pytest.fixture
def backend(model: Model) -> Iterator[Backend]:
    made = Backend(model)
    yield made
    model.release()
    made.loop.close()


@pytest.fixture
def make_app(model: Model, backend: Backend) -> Callable[..., FastAPI]:
    def make(**settings: Any) -> FastAPI:
        config = ServerConfig(**{"served_model_name": ("scripted", "other name"), **settings})
        info = ModelInfo("m", "Scripted", "float32", "cpu", None, 2000, 64, 8, 16, 100, 259, (), "0.1")
        verbs = Verbs(Observed(backend), tokenizer=model.tokenizer, config=model.engine.config, max_model_len=2000)
        return create_app(Service(verbs, backend, info, config, 1), Admission(config, 8))

    return make


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("FASTGEN_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.fail(
            "no Chromium is installed, which the tests of the page need: run `apt-get install --no-install-recommends "
            "chromium` (Debian, as root), or name one in FASTGEN_CHROMIUM"
        )
    with sync_playwright() as playwright:
        flags = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


class Watched:
    """What the browser complained of, and whom it called."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()
        self.hosts: set[str] = set()

    def watch(self, page: Page) -> None:
        page.set_default_timeout(LONGEST)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        page.on("request", lambda request: self.hosts.add(re.sub(r"^(\w+://[^/]*).*", r"\1", request.url)))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    assert [text for text in made.complaints if not any(each in text for each in made.expected)] == []
    assert len(made.hosts) <= 1


@pytest.fixture
def contexts(browser: Browser) -> Iterator[Callable[..., BrowserContext]]:
    opened: list[BrowserContext] = []

    def open_one(**options: Any) -> BrowserContext:
        opened.append(browser.new_context(**options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def visit(
    make_app: Any, serve: Callable[..., str], contexts: Callable[..., BrowserContext], watched: Watched
) -> Callable[..., Page]:
    """Opens the page of a server of its own: ``visit(settings={...}, **context options)``."""

    def open_one(settings: dict[str, Any] | None = None, at: str = "/", **options: Any) -> Page:
        page = contexts(**options).new_page()
        watched.watch(page)
        page.goto(serve(make_app(**(settings or {}))) + at)
        return page

    return open_one


@pytest.fixture
def ask() -> Callable[[Page, str], None]:
    """Types a message and sends it."""

    def send(page: Page, text: str) -> None:
        page.get_by_label("Your message").fill(text)
        page.keyboard.press("Enter")

    return send


@pytest.fixture
def answered() -> Callable[[Page], Locator]:
    """Where the latest answer stands."""
    return lambda page: page.locator(".message.assistant .body").last
