"""Chunks as they are generated, for threads and for event loops."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

from fastgen.core.collector import ResponseBuilder
from fastgen.core.loop import Loop, Sink, Submission
from fastgen.errors import EngineClosedError, FastgenError
from fastgen.front.answers import submissions
from fastgen.front.events import AsyncInbox
from fastgen.front.prompts import Call
from fastgen.types import Chunk, Response, TokenLogprob

__all__ = ["AsyncChunkStream", "ChunkStream"]

Event = Chunk | FastgenError


class _Forward:
    """A sink that passes events on, one by one. It does not know the stream, which may be dropped unread."""

    __slots__ = ("_builder", "_put")

    def __init__(self, builder: ResponseBuilder, put: Callable[[Event], None]) -> None:
        self._builder = builder
        self._put = put

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        self._builder.prompt_logprobs = entries

    def chunk(self, chunk: Chunk) -> None:
        self._put(chunk)

    def fail(self, error: FastgenError) -> None:
        self._put(error)


class _Stream:
    """What both kinds of stream share: the state of one request and the way to end it."""

    def __init__(self, loop: Loop, owner: object) -> None:
        self._loop = loop
        self._owner = owner  # must not know the stream: a dropped one ends its request at once, not at a collection
        self._builder: ResponseBuilder | None = None
        self._request_id: str | None = None
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

    def _submission(self, call: Call, put: Callable[[Event], None]) -> Submission:
        def make_sink(_: int, builder: ResponseBuilder) -> Sink:
            self._builder = builder
            return _Forward(builder, put)

        (made,) = submissions(self._loop, call, make_sink)
        self._request_id = made.request_id
        return made

    def _read(self, event: Event) -> Chunk:
        """The chunk of an event; or raises what it says."""
        if isinstance(event, FastgenError):
            self._finish()
            raise EngineClosedError(str(event)) from event
        assert self._builder is not None
        if self._builder.add(event):
            self._response = self._builder.build()
            self._finish()
        return event

    def _end(self) -> None:
        if not self._over:
            if self._request_id is not None:
                self._loop.abort(self._request_id)
            self._finish()

    def _finish(self) -> None:
        self._over = True
        self._owner = None

    def __del__(self) -> None:
        self._end()


class ChunkStream(_Stream, Iterator[Chunk]):
    """The chunks of one request as they are generated. Closing or dropping it early aborts the request."""

    def __init__(self, loop: Loop, call: Call, owner: object = None) -> None:
        """Hands the request in.

        Args:
            owner: whoever ends ``loop`` when it is dropped; kept until the stream's end.

        Raises:
            InvalidRequestError, EngineClosedError: it was not accepted.
        """
        super().__init__(loop, owner)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            loop.submit([self._submission(call, self._events.put)]).result()
        except BaseException:
            self._end()
            raise

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        try:
            event = self._events.get()
        except BaseException:  # Ctrl-C
            self._end()
            raise
        return self._read(event)

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

    def __init__(self, loop: Loop, prepare: Callable[[], Call], owner: object = None) -> None:
        """``owner``: as for ``ChunkStream``."""
        super().__init__(loop, owner)
        self._prepare: Callable[[], Call] | None = prepare  # may hold the owner, too
        self._inbox: AsyncInbox[Event] | None = None

    async def __anext__(self) -> Chunk:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._inbox is None:
                self._inbox = await self._start()
            event = await self._inbox.get()
        except BaseException:
            self._end()
            raise
        return self._read(event)

    async def _start(self) -> AsyncInbox[Event]:
        assert self._prepare is not None
        call = await asyncio.to_thread(self._prepare)
        if self._over:  # closed meanwhile
            raise StopAsyncIteration
        inbox = AsyncInbox[Event]()
        await asyncio.wrap_future(self._loop.submit([self._submission(call, inbox.put)]))
        return inbox

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
