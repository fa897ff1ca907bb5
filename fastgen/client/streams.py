"""Chunks of a server as they are generated, for threads and for event loops: as the pipeline's streams."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Protocol, Self

from fastgen.client.background import CLOSED, Background
from fastgen.client.prompts import Call
from fastgen.core.collector import ResponseBuilder
from fastgen.errors import EngineClosedError, FastgenError
from fastgen.types import Chunk, Response, TokenLogprob
from fastgen.wire.requests import PromptLogprobs, StreamEvent, StreamStart

__all__ = ["AsyncChunkStream", "ChunkStream", "Events"]

Events = Callable[[], AsyncGenerator[StreamEvent, None]]
"""Sends a request, once it is iterated in the background loop."""


class Sender(Protocol):
    """Who sends the requests: ``Session``."""

    @property
    def background(self) -> Background: ...

    def events(self, call: Call) -> Events: ...


Item = StreamEvent | BaseException


async def _pump(events: Events, put: Callable[[Item], None]) -> None:
    """In the background loop. Knows the inbox and not the stream, which may be dropped unread."""
    try:
        async with aclosing(events()) as came:
            async for event in came:
                put(event)
    except asyncio.CancelledError:
        with suppress(RuntimeError):
            put(EngineClosedError(CLOSED))
        raise
    except BaseException as error:
        with suppress(RuntimeError):  # nobody is left to hear
            put(error)


class _Stream:
    """What both kinds of stream share: the state of one request and the way to end it."""

    def __init__(self, sender: Sender) -> None:
        self._sender: Sender | None = sender
        self._builder: ResponseBuilder | None = None
        self._pumping: Future[None] | None = None
        self._response: Response | None = None
        self._over = False

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Of the prompt's tokens, if they were asked for; known from the first chunk on."""
        return None if self._builder is None else self._builder.prompt_logprobs

    def response(self) -> Response:
        """The whole answer, the same as without streaming, once the last chunk has been read.

        Raises:
            ValueError: it has not.
        """
        if self._response is None:
            raise ValueError("the stream has not been read to its end")
        return self._response

    def _begin(self, call: Call, put: Callable[[Item], None]) -> None:
        assert self._sender is not None
        self._pumping = self._sender.background.start(_pump(self._sender.events(call), put))

    def _read(self, item: Item) -> Chunk | None:
        """The chunk of an event, if it is one; or raises what it says."""
        if isinstance(item, StreamStart):
            self._builder = ResponseBuilder(item.request_id, item.prompt_token_ids, n=item.n, prompt=item.prompt)
            return None
        if isinstance(item, BaseException):
            self._end()
            raise item
        builder = self._builder
        if builder is None:
            self._end()
            raise FastgenError("the server's stream began without saying what it made of the prompt")
        if isinstance(item, PromptLogprobs):
            builder.prompt_logprobs = item.prompt_logprobs
            return None
        if builder.add(item):
            self._response = builder.build()
            self._finish()
        return item

    def _end(self) -> None:
        if not self._over:
            if self._pumping is not None:
                with suppress(RuntimeError):  # the loop is closed, and everything in it
                    self._pumping.cancel()
            self._finish()

    def _finish(self) -> None:
        self._over = True
        self._sender = None

    def __del__(self) -> None:
        self._end()


class ChunkStream(_Stream, Iterator[Chunk]):
    """The chunks of one request as they are generated. Closing or dropping it early aborts the request."""

    def __init__(self, sender: Sender, call: Call) -> None:
        """Hands the request in, and waits for the server to accept it.

        Raises:
            FastgenError: it did not.
        """
        super().__init__(sender)
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._begin(call, self._inbox.put)
        self._take()  # the start

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        while True:
            chunk = self._take()
            if chunk is not None:
                return chunk

    def _take(self) -> Chunk | None:
        try:
            item = self._inbox.get()
        except BaseException:  # Ctrl-C
            self._end()
            raise
        return self._read(item)

    def close(self) -> None:
        """Abort the request unless it is over. Further reading finds the end."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncChunkStream(_Stream, AsyncIterator[Chunk]):
    """The same for ``async for``, in any event loop. The request is handed in when the first chunk is asked for;
    what is wrong with it is raised there. Cancelling, closing or dropping it aborts the request."""

    def __init__(self, sender: Sender, prepare: Callable[[], Call]) -> None:
        super().__init__(sender)
        self._prepare: Callable[[], Call] | None = prepare
        self._inbox: _AsyncInbox | None = None

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._inbox is None:
                assert self._prepare is not None
                call = self._prepare()
                self._inbox = _AsyncInbox()
                self._begin(call, self._inbox.put)
            while True:
                chunk = self._read(await self._inbox.get())
                if chunk is not None:
                    return chunk
        except BaseException:
            self._end()
            raise

    def _finish(self) -> None:
        super()._finish()
        self._prepare = None

    async def aclose(self) -> None:
        """Abort the request unless it is over. Further reading finds the end."""
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _AsyncInbox:
    """A queue from the background loop to one task of the caller's. The task is woken once, however many events come
    before it runs."""

    def __init__(self) -> None:
        self._events = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._ready = asyncio.Event()
        self._woken = False

    def put(self, item: Item) -> None:
        """In the background loop's thread.

        Raises:
            RuntimeError: the caller's loop is closed: nobody is left to hear.
        """
        if self._events.is_closed():  # asked each time: one that has been woken may close unheard
            raise RuntimeError("Event loop is closed")
        self._items.append(item)
        if not self._woken:
            self._woken = True
            self._events.call_soon_threadsafe(self._ready.set)

    async def get(self) -> Item:
        """The next, in the task."""
        while True:
            with suppress(IndexError):
                return self._items.popleft()
            await self._ready.wait()
            self._ready.clear()
            self._woken = False  # before looking again: what is put from here on wakes anew
