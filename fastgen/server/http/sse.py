"""Streams as server-sent events: one write for all that is ready, an error as the last event."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Protocol, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastgen.errors import FastgenError
from fastgen.server.aside import LARGE_ENTRIES, aside, weight
from fastgen.server.http.errors import INTERNAL, ClientGone, RequestRefused, body_of, refusal
from fastgen.server.http.run import Event, Run, failure, while_connected
from fastgen.types import Chunk, TokenLogprob, Usage

__all__ = ["EventStream", "Line", "Writer", "data_line", "named_line", "run_bodies"]

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

Line: TypeAlias = Callable[[str, bytes], bytes]
"""Writes an event of a name and JSON."""

_encoder = msgspec.json.Encoder()


def data_line(name: str, data: bytes) -> bytes:
    """As OpenAI has it: without the name."""
    return b"data: " + data + b"\n\n"


def named_line(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class Source(Protocol):
    """What the events come from."""

    def aclose(self) -> Awaitable[None]:
        """End it, if it still runs. Closing twice is harmless."""


class EventStream(Response):
    """Sends events for as long as the client is there, and ends what they come from. What goes wrong on the way is the
    last event, in the shape of every error here."""

    def __init__(self, source: Source, bodies: AsyncGenerator[bytes, None], line: Line) -> None:
        """
        Args:
            bodies: whole events; reads from ``source``.
            line: writes the error.
        """
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._source, self._bodies, self._line = source, bodies, line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source):
            try:
                await while_connected(receive, self._send(send))
            except (ClientGone, OSError):
                return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._with_error()) as bodies:
            async for body in bodies:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await self._source.aclose()  # before the client knows: who asks again at once finds room
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_error(self) -> AsyncGenerator[bytes, None]:
        error: FastgenError
        try:
            async with aclosing(self._bodies) as bodies:
                async for body in bodies:
                    yield body
            return
        except FastgenError as known:
            error = known
        except Exception:
            logger.exception("a stream broke")
            error = RequestRefused(500, INTERNAL, code="internal_error", kind="server_error")
        yield self._line("error", _encoder.encode(body_of(refusal(error))))


class Writer(Protocol):
    """Makes the events of one kind of stream. Called from one thread at a time."""

    def prompt(self, prompt: int, entries: list[TokenLogprob | None]) -> None:
        """A prompt's log-probabilities, before its first chunk."""

    def chunk(self, prompt: int, chunk: Chunk) -> Iterable[msgspec.Struct]:
        """What to tell of a chunk: mostly one event, or none."""

    def usage(self, usages: list[Usage]) -> msgspec.Struct | None:
        """The last event, if the client asked for it."""


async def run_bodies(run: Run, writer: Writer) -> AsyncGenerator[bytes, None]:
    """The events of a run, as ``writer`` makes them, and ``[DONE]``.

    Raises:
        FastgenError: why one of its answers did not end by itself.
    """
    usages: list[Usage] = []
    told_of_prompts = sum(len(prompt.token_ids) for prompt in run.call.prompts)  # and so their first chunks may be
    begun: set[tuple[int, int]] = set()
    while events := await run.events():
        size = 0
        for prompt, event in events:
            if isinstance(event, list):
                told_of_prompts += weight(event)
            elif isinstance(event, Chunk):
                size += weight(event)
                if (prompt, event.index) not in begun:
                    begun.add((prompt, event.index))
                    size += told_of_prompts
        lines, error = await aside(size > LARGE_ENTRIES, lambda events=events: _lines(events, writer, usages))  # type: ignore[misc]
        if lines:
            yield lines
        if error is not None:
            raise error
    last = writer.usage(usages)
    yield DONE if last is None else _line(last) + DONE


def _lines(events: Iterable[Event], writer: Writer, usages: list[Usage]) -> tuple[bytes, Exception | None]:
    """What to write for these events, and the error that ends the stream after it."""
    lines: list[bytes] = []
    try:
        for prompt, event in events:
            if isinstance(event, list):
                writer.prompt(prompt, event)
                continue
            error = event if isinstance(event, FastgenError) else failure(event)
            if error is not None:
                return b"".join(lines), error
            assert isinstance(event, Chunk)
            lines += map(_line, writer.chunk(prompt, event))
            if event.usage is not None:
                usages.append(event.usage)
    except Exception as error:
        return b"".join(lines), error
    return b"".join(lines), None


def _line(event: msgspec.Struct) -> bytes:
    return data_line("", _encoder.encode(event))
