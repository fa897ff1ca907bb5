"""``RemoteLoop``: the ``Loop`` of an engine in another process."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from fastgen.core.collector import Collector
from fastgen.core.delivery import Delivery, Running
from fastgen.core.loop import Submission, in_batch
from fastgen.core.plugin.describe import describe_error
from fastgen.core.request import DEFAULT_MAX_NEW_TOKENS
from fastgen.core.stats import EngineStats
from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams
from fastgen.wire.channel import Channel, ChannelClosedError, FrameError
from fastgen.wire.info import Pass
from fastgen.wire.messages import (
    Abort,
    Accepted,
    Beat,
    Ended,
    FromEngine,
    FromFront,
    Output,
    Refused,
    Step,
    decode_from_engine,
    encode,
    error_of,
)
from fastgen.wire.outgoing import frame_of, request_of

__all__ = ["RefusedError", "RemoteLoop"]

logger = logging.getLogger(__name__)

ASIDE_SECONDS = 1.0
"""How long the end waits for prompt log-probabilities that are being prepared."""

PassWatcher: TypeAlias = Callable[[Sequence[Pass]], None]


class RefusedError(InvalidRequestError):
    """A request of several that was refused. ``place`` is its place among them."""

    place: int = 0


@dataclass(slots=True)
class _Running(Running):
    left_of_prompt: int
    left_of_answers: int
    scored: bool
    """Whether its prompt's log-probabilities were asked for."""
    accepted: bool = False

    @classmethod
    def of(cls, collector: Collector, new: Submission) -> _Running:
        prompt = len(new.prompt_token_ids)
        answers = new.params.n * expected_tokens(new.params, prompt)
        return cls(collector, new.sink, prompt, answers, new.params.prompt_logprobs is not None)

    @property
    def left(self) -> int:
        return self.left_of_prompt + self.left_of_answers

    def count(self) -> None:
        """An output came."""
        self.left_of_prompt = 0
        self.left_of_answers = max(0, self.left_of_answers - 1)


class _Batch:
    """What was submitted together."""

    __slots__ = ("count", "future", "places", "request_ids")

    def __init__(self, request_ids: list[str], places: Sequence[int], count: int) -> None:
        self.request_ids = request_ids
        self.places = places
        self.count = count
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # it is on its way, and cannot be called back by cancelling this

    def refuse(self, error: FastgenError, at: int) -> None:
        """``at``: which of its requests is at fault."""
        place = self.places[at] if at < len(self.places) else 0
        if isinstance(error, InvalidRequestError):
            told = in_batch(error, place, self.count) if self.count > 1 else error
            error = RefusedError(str(told), field=error.field)
            error.place = place
        self.future.set_exception(error)


class RemoteLoop:
    """Hands requests to an engine process and its tokens to sinks. Tokens become text, and stop strings end their
    choice, in the thread that reads the connection; requests that want their prompt's log-probabilities, which can be a
    million, have a thread of their own, so that nobody else's tokens wait for that.

    It has no lock: ``abort`` may be called by a finaliser in the middle of any line. Dictionaries change by single
    operations, and whoever takes an entry out settles it.
    """

    def __init__(self, channel: Channel, tokenizer: Tokenizer | None, *, label: str = "engine") -> None:
        """``channel`` is its own to read and to write from here on; whoever made it closes it, after ``join``."""
        self._channel = channel
        self._tokenizer = tokenizer
        self._label = label
        self._ids = itertools.count()
        self._numbers = itertools.count()
        self._batches: dict[int, _Batch] = {}
        self._delivery: Delivery[_Running] = Delivery(self._abort)
        self._requests = self._delivery.requests
        self._aside: queue.SimpleQueue[tuple[_Running, Output] | None] = queue.SimpleQueue()
        self._aside_thread: threading.Thread | None = None
        self._watchers: tuple[PassWatcher, ...] = ()
        self._end: EngineClosedError | None = None
        self._over = threading.Event()
        self.stats: EngineStats | None = None
        """The latest counts it told of."""
        self.reading = False
        """Whether a message is being worked on; meanwhile others may lie there unread."""
        self.in_step = 0.0
        """Seconds that the step in flight had taken when it said so last."""
        self._reader = threading.Thread(target=self._read, name=f"fastgen-{label}-reader", daemon=True)
        self._reader.start()

    # ---- any thread ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._end is not None

    @property
    def why_closed(self) -> str:
        return "" if self._end is None else str(self._end)

    @property
    def heard(self) -> float:
        """When it said anything last, in seconds of the monotonic clock."""
        return self._channel.heard

    @property
    def outstanding_tokens(self) -> int:
        """Prompt and answer tokens that its requests may still take, as far as they say how many they want."""
        return sum(running.left for running in list(self._requests.values()))

    @property
    def in_flight(self) -> int:
        """Requests."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def new_request_id(self) -> str:
        return f"request-{next(self._ids)}"

    def submit(
        self, submissions: Sequence[Submission], *, places: Sequence[int] | None = None, count: int | None = None
    ) -> Future[None]:
        """Hand in requests, all or none. As ``Loop.submit``; ``places`` and ``count`` say where in a larger batch they
        stand, for the error's words."""
        if self._end is not None:
            raise EngineClosedError(str(self._end)) from self._end
        ids = [new.request_id for new in submissions]
        batch = _Batch(ids, range(len(ids)) if places is None else places, len(ids) if count is None else count)
        number = next(self._numbers)
        made: list[str] = []
        try:
            requests = []
            for new in submissions:
                collector = Collector(new.request_id, new.prompt_token_ids, new.params, self._tokenizer)
                if new.request_id in self._requests:
                    raise InvalidRequestError(
                        f"request id {new.request_id!r} is in use by a request in flight", field="request_id"
                    )
                requests.append(request_of(new))
                self._requests[new.request_id] = _Running.of(collector, new)
                made.append(new.request_id)
            frame = frame_of(number, requests)
            self._batches[number] = batch
            self._channel.send(frame)
        except (InvalidRequestError, FrameError) as error:
            self._batches.pop(number, None)
            for request_id in made:
                self._requests.pop(request_id, None)
            refusal = error if isinstance(error, InvalidRequestError) else InvalidRequestError(str(error))
            batch.refuse(refusal, min(len(made), len(ids) - 1))
        if (
            self._end is not None
        ):  # set before the reader looked for batches the last time, which may have been just now
            self._fail_batch(number, self._end)
        return batch.future

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._say(Abort(request_id))

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self._say(Abort(request_id))

    def watch(self, watcher: PassWatcher) -> Callable[[], None]:
        """Have ``watcher`` called, in the reading thread, with each pass. Call what is returned to end that."""
        self._watchers = (*self._watchers, watcher)

        def end() -> None:
            self._watchers = tuple(one for one in self._watchers if one is not watcher)

        return end

    def stop(self, why: str) -> None:
        """Take nothing any more, and fail what is in flight, for this reason. Does not wait."""
        if self._end is None:
            self._end = EngineClosedError(why)
        self._channel.shut()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Whether everybody has been told of the end within ``timeout`` seconds; those whose prompt's log-probabilities
        are being prepared hear of it after that."""
        return self._over.wait(timeout)

    def join(self) -> None:
        """Wait for the reading thread, once it was stopped or the process has died."""
        self._reader.join()
        if self._aside_thread is not None:
            self._aside_thread.join(ASIDE_SECONDS)

    def _abort(self, request_id: str, index: int | None) -> None:
        self._say(Abort(request_id, index))

    def _say(self, message: FromFront) -> None:
        with suppress(FrameError):
            self._channel.send(encode(message))

    # ---- the reading thread ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        why = "the engine was closed before the request ended"
        try:
            while self._end is None:
                frame = self._channel.receive()
                self.reading = True
                self._take(decode_from_engine(frame))
                self.reading = False
        except ChannelClosedError:
            why = f"the {self._label} process died before the request ended"
        except (FrameError, msgspec.MsgspecError) as error:
            why = f"the {self._label} process sent what is no message: {error}"
            logger.error("%s", why)
        except _Died as error:
            why = f"the engine stopped on an unexpected error: {error}"
        except BaseException as error:
            why = f"reading from the {self._label} process failed: {describe_error(error)}"
            logger.exception("%s", why)
        finally:
            self._finish(why)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self.in_step = 0.0
            self._step(message)
        elif isinstance(message, Beat):
            self.in_step = message.in_step
            self.stats = message.stats or self.stats
        elif isinstance(message, Accepted):
            self._accepted(message.number)
        elif isinstance(message, Refused):
            self._refused(message)
        elif isinstance(message, Ended):
            raise _Died(message.text)
        else:
            raise FrameError(f"{type(message).__name__} came from an engine that is ready")

    def _accepted(self, number: int) -> None:
        batch = self._batches.pop(number, None)
        if batch is not None:
            for request_id in batch.request_ids:
                self._requests[request_id].accepted = True
            batch.future.set_result(None)

    def _refused(self, message: Refused) -> None:
        batch = self._batches.pop(message.number, None)
        if batch is not None:
            for request_id in batch.request_ids:
                self._requests.pop(request_id, None)
            batch.refuse(error_of(message.kind, message.text, message.field), message.place)

    def _step(self, message: Step) -> None:
        for output in message.outputs:
            running = self._requests.get(output.request_id)
            if running is None or not running.accepted:
                continue
            running.count()
            if running.scored:
                self._put_aside(running, output)
            else:
                self._delivery.deliver(output.to())
        if message.stats is not None:
            self.stats = message.stats
        if message.ran is not None:
            for watcher in self._watchers:
                try:
                    watcher((message.ran,))
                except Exception:
                    logger.exception("a watcher of passes failed")

    def _finish(self, why: str) -> None:
        if self._end is None:
            self._end = EngineClosedError(why)
        end = self._end
        for number in list(self._batches):
            self._fail_batch(number, end)
        self._aside.put(None)
        for request_id, running in list(self._requests.items()):
            if not running.accepted:  # its batch tells of it
                self._requests.pop(request_id, None)
            elif not running.scored or self._aside_thread is None:
                self._delivery.fail(request_id, end)
        self._over.set()

    def _fail_batch(self, number: int, end: EngineClosedError) -> None:
        """In any thread: each batch is taken out by one alone."""
        batch = self._batches.pop(number, None)
        if batch is not None:
            for request_id in batch.request_ids:
                self._requests.pop(request_id, None)
            error = EngineClosedError(str(end))  # one each: raising writes a traceback into it
            error.__cause__ = end
            batch.future.set_exception(error)

    # ---- the thread for requests with prompt log-probabilities -------------------------------------------------------

    def _put_aside(self, running: _Running, output: Output) -> None:
        """In the reading thread."""
        self._aside.put((running, output))
        if self._aside_thread is None:
            name = f"fastgen-{self._label}-scores"
            self._aside_thread = threading.Thread(target=self._work_aside, name=name, daemon=True)
            self._aside_thread.start()

    def _work_aside(self) -> None:
        while (item := self._aside.get()) is not None:
            running, output = item
            if self._end is None and self._requests.get(output.request_id) is running:
                self._delivery.deliver(output.to())
        end = self._end or EngineClosedError("the engine was closed before the request ended")
        for request_id, running in list(self._requests.items()):
            if running.accepted and running.scored:
                self._delivery.fail(request_id, end)


class _Died(Exception):
    """The engine said what it died of."""


def expected_tokens(params: SamplingParams, prompt: int) -> int:
    """The answer's tokens, most of them where the request says how many, else a guess."""
    if params.max_new_tokens is not None:
        return params.max_new_tokens
    if params.max_length is not None:
        return max(1, params.max_length - prompt)
    return DEFAULT_MAX_NEW_TOKENS
