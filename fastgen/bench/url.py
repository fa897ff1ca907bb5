"""Any server that speaks OpenAI's completions API, as a row of a benchmark: token ids in, a stream of tokens out.

Asks for ``ignore_eos``, which vLLM, SGLang, TGI, llama.cpp and others know beside OpenAI's own fields.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastgen.bench.drive import Arrivals
from fastgen.bench.protocol import Run, Tick, Timeline, Workload
from fastgen.errors import ConfigError, RequestFailedError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["UrlTarget", "check_url"]


def check_url(text: str) -> tuple[str, str]:
    """``(row's name, base URL)`` of ``URL`` or ``NAME=URL``.

    Raises:
        ConfigError: not an http URL.
    """
    name, equals, url = text.partition("=")
    if not equals or "://" in name:
        name, url = "", text
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {text}: give a server's address, such as http://127.0.0.1:8000/v1, or NAME=address")
    return name or parts.netloc, url.rstrip("/").removesuffix("/completions")


class UrlTarget:
    """A server at ``url`` (the part before ``/completions``). ``model``: as the server calls it; None: the first that
    it lists. The server's own cache of prompt beginnings should be off: there is no field that all of them know."""

    def __init__(self, name: str, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        try:
            import aiohttp
        except ImportError:
            raise ConfigError("--url needs aiohttp: pip install '.[bench]' in your checkout of fastgen") from None
        self.name = name
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._aiohttp = aiohttp
        self._model = model or asyncio.run(self._first_model())
        self.note = f"{name}: {url}, model {self._model}, streamed over HTTP; what it caches between rounds is its own."
        self.versions: Mapping[str, str] = {"aiohttp": aiohttp.__version__}

    def run(self, workload: Workload, tick: Tick) -> Run:
        """
        Raises:
            RequestFailedError: the server refused a request, broke off, or gave fewer tokens than asked for.
        """
        return asyncio.run(self._run(workload, tick))

    def close(self) -> None:
        """The server goes on."""

    def _session(self) -> aiohttp.ClientSession:
        # No limit on connections, and none on time: a server under load may let requests wait long.
        return self._aiohttp.ClientSession(
            connector=self._aiohttp.TCPConnector(limit=0),
            timeout=self._aiohttp.ClientTimeout(total=None, sock_connect=10),
            headers=self._headers,
        )

    async def _first_model(self) -> str:
        try:
            async with self._session() as session, session.get(f"{self._url}/models") as response:
                await _check(response, self._url)
                return str((await response.json(content_type=None))["data"][0]["id"])
        except (self._aiohttp.ClientError, TimeoutError) as error:
            raise ConfigError(f"cannot reach {self._url}/models: {error}") from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{self._url}/models lists no model; name one with --url-model") from None

    async def _run(self, workload: Workload, tick: Tick) -> Run:
        arrivals = Arrivals(workload.requests, workload.clients)
        lines = [Timeline() for _ in workload.requests]
        moved = asyncio.Event()  # tokens came: something else may be due
        began = time.perf_counter()
        inexact = cached = 0

        async def one(row: int) -> None:
            nonlocal inexact, cached
            counter, request, given = _Counter(), workload.requests[row], 0

            def tell(total: int, now: float) -> None:
                nonlocal given
                fresh = min(total, request.out) - given
                if fresh > 0:
                    given += fresh
                    arrivals.came(row, fresh, now)
                    tick(fresh)
                    moved.set()

            async with aclosing(self._stream(session, request.prompt, request.out)) as chunks:
                async for chunk in chunks:
                    now = time.perf_counter() - began
                    # The last one counts when the answer has ended: only then is a client free.
                    tell(min(counter.feed(chunk, now), request.out - 1), now)
            times, exact = counter.finish()
            if len(times) != request.out:
                raise RequestFailedError(
                    f"{self.name} gave {len(times)} tokens for request {row}, {request.out} were asked for: it must "
                    "know 'ignore_eos', and its context must be long enough"
                )
            tell(request.out, time.perf_counter() - began)
            lines[row].times, lines[row].tokens = times, counter.tokens
            inexact += not exact
            cached += counter.cached

        try:
            async with self._session() as session, asyncio.TaskGroup() as tasks:
                while not arrivals.done:
                    moved.clear()
                    for row, at in arrivals.due(time.perf_counter() - began):
                        lines[row].sent = at
                        tasks.create_task(one(row))
                    with suppress(TimeoutError):  # then the clock made something due
                        await asyncio.wait_for(moved.wait(), arrivals.wait(time.perf_counter() - began))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the first request that failed ended the others
        return Run(lines, inexact=inexact, cached=cached)

    async def _stream(
        self, session: aiohttp.ClientSession, prompt: list[int], out: int
    ) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of one answer, as objects."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": out,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        try:
            async with session.post(f"{self._url}/completions", json=body) as response:
                await _check(response, self._url)
                async for line in response.content:
                    text = line.decode("utf-8", "replace").strip()
                    if not text.startswith("data:"):
                        continue  # blank lines and comments of the event stream
                    data = text.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise RequestFailedError(f"{self._url} ended a request with an error: {chunk['error']}")
                    yield chunk
        except (self._aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailedError(f"{self._url} broke off: {type(error).__name__}: {error}") from None
        except ValueError as error:
            raise RequestFailedError(f"{self._url} sent a chunk that is not JSON: {error}") from None


class _Counter:
    """Counts tokens in the chunks of one answer: by their ids or a running ``usage`` where chunks say so, else one a
    chunk; and puts the count right by the ``usage`` at the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cached = 0
        """Prompt tokens that the server found in a cache, if it tells."""
        self._times: list[float] = []  # one a token, as counted so far
        self._texts: list[float] = []  # one a chunk with text
        self._usage: int | None = None

    def feed(self, chunk: dict[str, Any], now: float) -> int:
        """How many tokens seem to have come with this chunk and those before it."""
        usage, choices = chunk.get("usage"), chunk.get("choices")
        if usage:
            self._usage = int(usage["completion_tokens"])
            self.cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if choices:
            text, ids = choices[0].get("text"), choices[0].get("token_ids")
            if text:
                self._texts.append(now)
            if ids is not None:
                fresh = len(ids)
                self.tokens += ids
            elif usage:
                fresh = int(usage["completion_tokens"]) - len(self._times)
            else:
                # A chunk without text may hold the first bytes of a letter, or only say why the answer ended.
                fresh = int(bool(text) or choices[0].get("finish_reason") is None)
            self._times += [now] * fresh
        return len(self._times)

    def finish(self) -> tuple[list[float], bool]:
        """``(a time a token, whether they are exact)``."""
        counted, total = len(self._times), self._usage
        if total is None or counted == total:
            return self._times, True
        if len(self._texts) == total:
            return self._texts, True
        # Several tokens a chunk: spread evenly over the chunks.
        return [self._times[token * counted // total] for token in range(total if counted else 0)], False


async def _check(response: aiohttp.ClientResponse, url: str) -> None:
    if response.status != 200:
        text = (await response.text())[:300].strip()
        raise RequestFailedError(f"{url} answered {response.status} {response.reason}: {text}")
