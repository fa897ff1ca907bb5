"""Streams as server-sent events: one write for all that is ready, an error as an event, ``[DONE]`` at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastgen.errors import FastgenError
from fastgen.server.http.errors import INTERNAL, RequestRefused, body_of, refusal
from fastgen.server.http.run import Run, failure
from fastgen.types import Chunk, TokenLogprob, Usage

__all__ = ["EventStream", "Writer"]

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class Writer(Protocol):
    """Makes the events of one kind of stream."""

    def prompt(self, prompt: int, entries: list[TokenLogprob | None]) -> None:
        """A prompt's log-probabilities, before its first chunk."""

    def chunk(self, prompt: int, chunk: Chunk) -> Iterable[msgspec.Struct]:
        """What to tell of a chunk: mostly one event, or none."""

    def usage(self, usages: list[Usage]) -> msgspec.Struct | None:
        """The last event, if the client asked for it."""


class EventStream(Response):
    """Sends a run's events. Its client's going ends the run."""

    def __init__(self, run: Run, writer: Writer) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._run, self._writer = run, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._run.close()
            for task in (sending, gone):
                task.cancel()
            results = await asyncio.gather(sending, gone, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for body in self._bodies():
            await send({"type": "http.response.body", "body": body, "more_body": True})
        self._run.close()  # before the client knows: who asks again at once finds room
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _bodies(self) -> AsyncIterator[bytes]:
        usages: list[Usage] = []
        while events := await self._run.events():
            lines: list[bytes] = []
            for prompt, event in events:
                try:
                    if isinstance(event, list):
                        self._writer.prompt(prompt, event)
                        continue
                    error = event if isinstance(event, FastgenError) else failure(event)
                    if error is None:
                        assert isinstance(event, Chunk)
                        lines += map(_line, self._writer.chunk(prompt, event))
                        if event.usage is not None:
                            usages.append(event.usage)
                except Exception:
                    logger.exception("a stream broke")
                    error = RequestRefused(500, INTERNAL, code="internal_error", kind="server_error")
                if error is not None:
                    yield b"".join([*lines, _line(body_of(refusal(error)))])
                    return
            if lines:
                yield b"".join(lines)
        last = self._writer.usage(usages)
        yield DONE if last is None else _line(last) + DONE


def _line(event: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(event) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
