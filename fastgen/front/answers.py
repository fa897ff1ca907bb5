"""Whole responses: hand in the prompts of a call, wait for all answers."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from fastgen.core.collector import ResponseBuilder
from fastgen.core.loop import Loop, Sink, Submission
from fastgen.errors import EngineClosedError, FastgenError
from fastgen.front.events import Doorbell
from fastgen.front.progress import Bar
from fastgen.front.prompts import Call
from fastgen.types import Chunk, Response, TokenLogprob

__all__ = ["answers", "async_answers", "submissions"]

Answer = Response | FastgenError


class WholeResponse:
    """A sink that adds a request up and hands over the response, or why there is none."""

    __slots__ = ("_builder", "_done", "tokens")

    def __init__(self, builder: ResponseBuilder, done: Callable[[Answer], None]) -> None:
        self._builder = builder
        self._done = done
        self.tokens = 0
        """Generated so far."""

    def prompt_logprobs(self, entries: list[TokenLogprob | None]) -> None:
        self._builder.prompt_logprobs = entries

    def chunk(self, chunk: Chunk) -> None:
        self.tokens += len(chunk.token_ids)
        if self._builder.add(chunk):
            self._done(self._builder.build())

    def fail(self, error: FastgenError) -> None:
        self._done(error)


def submissions(loop: Loop, call: Call, make_sink: Callable[[int, ResponseBuilder], Sink]) -> list[Submission]:
    """A submission for each prompt of a call; ``make_sink`` gets the prompt's place and its builder."""
    made = []
    for index, prompt in enumerate(call.prompts):
        request_id = loop.new_request_id()
        builder = ResponseBuilder(request_id, prompt.token_ids, n=call.params.n, prompt=prompt.text)
        sink = make_sink(index, builder)
        made.append(Submission(request_id, prompt.token_ids, call.params, sink, chat=call.chat))
    return made


def answers(loop: Loop, call: Call, *, progress: bool = False) -> list[Response]:
    """The responses to a call, in the order of its prompts. Whatever ends the wait early, Ctrl-C too, aborts what still
    runs.

    Raises:
        InvalidRequestError: a prompt was refused; none has run.
        EngineClosedError: the engine was closed, or died.
    """
    came: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()

    def make_sink(index: int, builder: ResponseBuilder) -> Sink:
        return WholeResponse(builder, lambda answer: came.put((index, answer)))

    requests = submissions(loop, call, make_sink)
    responses: dict[int, Response] = {}
    try:
        loop.submit(requests).result()
        bar: AbstractContextManager[Bar | None] = Bar(requests) if progress else nullcontext()
        with bar as shown:
            while len(responses) < len(requests):
                index, answer = shown.wait(came) if shown is not None else came.get()
                responses[index] = _unwrap(answer)
    except BaseException:
        _abort(loop, requests)
        raise
    return [responses[index] for index in range(len(requests))]


async def async_answers(loop: Loop, call: Call) -> list[Response]:
    """As ``answers``, in the running event loop. Cancelling aborts what still runs."""
    running, doorbell = asyncio.get_running_loop(), Doorbell.here()
    futures: list[asyncio.Future[Answer]] = [running.create_future() for _ in call.prompts]

    def settle(index: int, answer: Answer) -> None:
        if not futures[index].done():  # it is if the caller was cancelled
            futures[index].set_result(answer)

    def make_sink(index: int, builder: ResponseBuilder) -> Sink:
        def done(answer: Answer) -> None:
            doorbell.call(settle, index, answer)

        return WholeResponse(builder, done)

    requests = submissions(loop, call, make_sink)
    try:
        await asyncio.wrap_future(loop.submit(requests))
        return [_unwrap(await future) for future in futures]
    except BaseException:
        _abort(loop, requests)
        raise


def _abort(loop: Loop, requests: list[Submission]) -> None:
    for request in requests:
        loop.abort(request.request_id)


def _unwrap(answer: Answer) -> Response:
    if isinstance(answer, FastgenError):
        raise EngineClosedError(str(answer)) from answer
    return answer
