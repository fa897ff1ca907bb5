"""Running what an HTTP request asks for: whole answers or events, for as long as its client is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.types import Receive

from fastgen.core.collector import ResponseBuilder
from fastgen.core.loop import Loop, Sink
from fastgen.errors import FastgenError, RequestFailedError
from fastgen.front.answers import async_answers, submissions
from fastgen.front.events import AsyncInbox
from fastgen.front.prompts import Call
from fastgen.server.admission import Entry
from fastgen.server.http.errors import ClientGone, RequestAborted
from fastgen.server.service import Service
from fastgen.types import Chunk, Completion, Response, TokenLogprob

__all__ = ["ClientGone", "Event", "Run", "answer", "failure", "loop_of", "start", "while_connected"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

Event = tuple[int, "Chunk | list[TokenLogprob | None] | FastgenError"]
"""The place of a prompt among those of the request, and what came of it: a chunk, its prompt's log-probabilities, or
the engine's end."""


def loop_of(service: Service) -> Loop:
    """Who runs the service's requests."""
    return service.verbs.loop


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """What ``work`` gives; it is cancelled when the client goes, of which ``receive`` tells: the request's body must
    have been read.

    Raises:
        ClientGone: it went.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


async def answer(service: Service, entry: Entry, call: Call, *, tellings: int = 1) -> list[Response]:
    """The whole answers to a call. ``tellings``: as ``Entry.add_call``.

    Raises:
        InvalidRequestError: refused; nothing has run.
        RequestFailedError, RequestAborted, EngineClosedError: no whole answer came of it.
    """
    entry.add_call(call, tellings=tellings)
    responses = await async_answers(loop_of(service), call)
    for response in responses:
        for choice in response.choices:
            error = failure(choice)
            if error is not None:
                raise error
    return responses


def failure(ended: Completion | Chunk) -> FastgenError | None:
    """What to tell of a choice that did not end by itself."""
    if ended.finish_reason == "error":
        return RequestFailedError(f"the request failed while it ran: {ended.error or 'no reason was given'}")
    if ended.finish_reason == "abort":
        return RequestAborted("the server ended the request before its answer was whole")
    return None


class Run:
    """Requests that were accepted and whose events are read here, in order, as they come.

    What is not read waits here and nowhere else: a slow reader holds up nobody, and keeps at most its own answer.
    """

    def __init__(self, loop: Loop, call: Call, entry: Entry) -> None:
        self.call = call
        self._loop, self._entry = loop, entry
        self._inbox = AsyncInbox[Event]()
        self._made = submissions(loop, call, self._sink)
        self._open = len(self._made)

    def _sink(self, index: int, builder: ResponseBuilder) -> Sink:
        return _Forward(index, self._inbox.put)

    async def _submit(self) -> None:
        await asyncio.wrap_future(self._loop.submit(self._made))

    async def events(self) -> list[Event]:
        """All that came since the last time, at least one; empty once all has been read."""
        if not self._open:
            return []
        events = await self._inbox.get_all()
        for _, event in events:
            self._open -= isinstance(event, FastgenError) or (isinstance(event, Chunk) and event.usage is not None)
        return events

    def close(self) -> None:
        """End what still runs, and leave the server's count of requests. Closing twice is harmless."""
        if self._open:
            self._open = 0
            for one in self._made:
                self._loop.abort(one.request_id)
        self._entry.leave()

    async def aclose(self) -> None:
        """As ``close``."""
        self.close()

    def __del__(self) -> None:
        self.close()


async def start(service: Service, entry: Entry, call: Call, *, tellings: int = 1) -> Run:
    """Hand the requests of a call in. The run takes ``entry`` over. ``tellings``: as ``Entry.add_call``.

    Raises:
        InvalidRequestError: refused; nothing has run.
        EngineClosedError: the engine takes none.
    """
    entry.add_call(call, tellings=tellings)
    run = Run(loop_of(service), call, entry)
    try:
        await run._submit()
    except BaseException:
        run.close()
        raise
    return run


class _Forward:
    """A sink that passes events on. It does not know the run, which may be dropped unread."""

    __slots__ = ("_index", "_put")

    def __init__(self, index: int, put: Callable[[Event], None]) -> None:
        self._index, self._put = index, put

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        self._put((self._index, entries))

    def chunk(self, chunk: Chunk) -> None:
        self._put((self._index, chunk))

    def fail(self, error: FastgenError) -> None:
        self._put((self._index, error))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """End tasks and wait for that, so that what they hold is given back."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
