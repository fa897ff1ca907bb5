"""A connection, and how requests are sent over it: retried where that is safe, many at a time, within a deadline."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastgen.client.background import Background
from fastgen.client.errors import NotBegun, RequestTimeoutError, ServerUnreachableError
from fastgen.client.prompts import Call
from fastgen.client.retry import Deadline, retrying
from fastgen.client.streams import Events
from fastgen.client.transport import Transport
from fastgen.core.loop import in_batch
from fastgen.errors import ConfigError, InvalidRequestError, did_you_mean
from fastgen.types import Response
from fastgen.wire.info import ModelInfo
from fastgen.wire.requests import GenerateRequest, StreamEvent

__all__ = ["Options", "Session"]

T = TypeVar("T")

HEALTH_SECONDS = 10.0
"""Longest wait for an answer about health, whatever the client's timeout."""


@dataclass(frozen=True, slots=True)
class Options:
    """See ``Client``."""

    model: str | None
    timeout: float | None
    retries: int
    concurrency: int

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: one of them cannot be used.
        """
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError(f"model must be a name, got {self.model!r}")
        timeout = self.timeout
        if timeout is not None and not (
            isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < math.inf
        ):
            raise ConfigError(f"timeout must be seconds above 0, or None for no end; got {timeout!r}")
        for name, least in (("retries", 0), ("concurrency", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")

    def but(self, **others: Any) -> Options:
        for name in others:
            if name not in Options.__dataclass_fields__:
                known = Options.__dataclass_fields__
                raise ConfigError(f"unknown option {name!r}; there are {', '.join(known)}.{did_you_mean(name, known)}")
        return replace(self, **others)


class _Connection:
    """Whoever holds it keeps the connection; the last one that lets go of it ends it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.background = Background(transport.close)
        weakref.finalize(self, self.background.stop).atexit = False  # background.py sees to that


class Session:
    """Its coroutines run in the background loop, by ``run`` or ``arun``."""

    def __init__(self, transport: Transport, options: Options) -> None:
        self._connection = _Connection(transport)
        self.options = options

    def but(self, **options: Any) -> Session:
        """The same connection, with other options."""
        other = Session.__new__(Session)
        other._connection, other.options = self._connection, self.options.but(**options)
        return other

    @property
    def background(self) -> Background:
        return self._connection.background

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.background.run(work)

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.background.arun(work)

    async def answers(self, call: Call, done: Callable[[Response], object] = lambda _: None) -> list[Response]:
        """The responses to a call, in the order of its prompts. ``done`` hears of each as it comes. Whatever ends this
        early ends what still runs."""
        deadline = Deadline(self.options.timeout)
        room = asyncio.Semaphore(self.options.concurrency)

        async def one(index: int, request: GenerateRequest) -> Response:
            try:
                async with room:
                    response = await self._tried(lambda: self._transport.generate(request, deadline), deadline)
            except InvalidRequestError as error:
                if len(call.requests) == 1:
                    raise
                raise in_batch(error, index, len(call.requests)) from error
            done(response)
            return response

        tasks = [asyncio.create_task(one(index, request)) for index, request in enumerate(call.requests)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def events(self, call: Call) -> Events:
        """What streams the answer to a call of one prompt."""
        deadline = Deadline(self.options.timeout)
        (request,) = call.requests
        return lambda: self._stream(request, deadline)

    async def health(self) -> bool:
        timeout = self.options.timeout
        deadline = Deadline(HEALTH_SECONDS if timeout is None else min(timeout, HEALTH_SECONDS))
        try:
            return await self._timed(self._transport.ready(deadline), deadline)
        except NotBegun as refused:
            if isinstance(refused.error, ServerUnreachableError):
                return False
            raise refused.error from None
        except (ServerUnreachableError, TimeoutError):
            return False

    async def model_info(self) -> ModelInfo:
        deadline = Deadline(self.options.timeout)
        return await self._tried(lambda: self._transport.model_info(deadline), deadline)

    async def _stream(self, request: GenerateRequest, deadline: Deadline) -> AsyncGenerator[StreamEvent, None]:
        async def begin() -> tuple[StreamEvent, AsyncGenerator[StreamEvent, None]]:
            events = self._transport.stream(request, deadline)
            try:
                return await anext(events), events
            except BaseException:
                await events.aclose()
                raise

        first, events = await self._tried(begin, deadline)
        async with aclosing(events):
            yield first
            async for event in events:
                yield event

    async def _tried(self, attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
        return await self._timed(retrying(attempt, self.options.retries, deadline), deadline)

    async def _timed(self, work: Awaitable[T], deadline: Deadline) -> T:
        """The deadline holds whatever the transport does about it."""
        try:
            async with asyncio.timeout(deadline.left):
                return await work
        except RequestTimeoutError:
            raise
        except TimeoutError:
            raise deadline.error() from None

    @property
    def _transport(self) -> Transport:
        return self._connection.transport
