"""Who may come in: how many choices and prompt tokens are in flight at once, for all doors together."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from fastgen.errors import FastgenError, InvalidRequestError, OverloadedError
from fastgen.front.prompts import Call
from fastgen.server.settings import ServerConfig

__all__ = ["Admission", "DrainingError", "Entry"]

MOST_PROMPT_LOGPROBS = 2_000_000
"""Log-probabilities of prompt tokens that one request may ask for: some 400 MB while its answer is written."""
SHORTEST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Bounds, in seconds, of what a refused client is told to wait."""


class DrainingError(FastgenError):
    """The server is shutting down and takes nothing new. HTTP: 503; gRPC: UNAVAILABLE."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no new requests")


class Admission:
    """Counts what is in flight and refuses at once what would go over the limits. Every method may be called from any
    thread.

    ::

        with admission.enter(choices=params.n * len(prompts)) as entry:
            call = await asyncio.to_thread(tokenize)
            entry.add_call(call)
            ...
    """

    def __init__(self, settings: ServerConfig, max_sequences: int) -> None:
        """``max_sequences``: choices that run at once, on all replicas together."""
        self.most_choices = max_sequences + settings.max_queue
        self.most_prompt_tokens = settings.max_waiting_tokens
        self._lock = threading.RLock()  # a collected entry leaves, in the middle of any line
        self._choices = 0
        self._prompt_tokens = 0
        self._draining = False
        self._refused = 0
        self._idle: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._last_end = time.monotonic()
        self._seconds_between_ends = SHORTEST_WAIT  # of one choice and the next, a running mean

    @property
    def choices(self) -> int:
        """In flight, waiting or running."""
        return self._choices

    @property
    def prompt_tokens(self) -> int:
        """Of the requests in flight."""
        return self._prompt_tokens

    @property
    def refused(self) -> int:
        """Requests refused for want of room since the start."""
        return self._refused

    @property
    def draining(self) -> bool:
        return self._draining

    def enter(self, *, choices: int = 1, prompt_tokens: int = 0) -> Entry:
        """Let a request in until the ``with`` block it is given to ends. It counts from now on.

        Args:
            choices: the answers it asks for, of all its prompts.
            prompt_tokens: of all its prompts; ``Entry.add_call`` where they are not known yet.

        Raises:
            OverloadedError: no room now; says when there may be.
            InvalidRequestError: there is never room for so much.
            DrainingError: nothing is let in any more.
        """
        entry = Entry(self)
        self._take(entry, choices, prompt_tokens)
        return entry

    def drain(self) -> None:
        """Let nobody in from now on."""
        self._draining = True

    async def wait_idle(self, timeout: float | None = None) -> bool:
        """Whether nothing is in flight any more, within ``timeout`` seconds."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if not self._choices:
                return True
            self._idle.append(waiter)
        try:
            await asyncio.wait_for(waiter[1].wait(), timeout)
        except TimeoutError:
            return not self._choices
        finally:
            with self._lock, suppress(ValueError):
                self._idle.remove(waiter)
        return True

    def _take(self, entry: Entry, choices: int, prompt_tokens: int) -> None:
        with self._lock:
            if self._draining and choices:
                raise DrainingError
            self._check(entry.choices + choices, self._choices + choices, self.most_choices, "choices", "n")
            self._check(
                entry.prompt_tokens + prompt_tokens,
                self._prompt_tokens + prompt_tokens,
                self.most_prompt_tokens,
                "prompt tokens",
                "prompt",
            )
            entry.choices += choices
            entry.prompt_tokens += prompt_tokens
            self._choices += choices
            self._prompt_tokens += prompt_tokens

    def _check(self, own: int, total: int, most: int, what: str, field: str) -> None:
        """With the lock."""
        if own > most:
            raise InvalidRequestError(
                f"the request has {own} {what} and the server takes {most} at once, of all requests together; split it",
                field=field,
            )
        if total > most:
            self._refused += 1
            wait = (total - most) * self._seconds_between_ends if what == "choices" else self._seconds_between_ends
            raise OverloadedError(
                f"the server is full: {total - own} {what} are in flight, and it takes {most}; try again later",
                retry_after=min(max(wait, SHORTEST_WAIT), LONGEST_WAIT),
            )

    def _give_back(self, entry: Entry) -> None:
        with self._lock:
            if not entry.choices:
                return
            now = time.monotonic()
            seconds = (now - self._last_end) / entry.choices
            self._seconds_between_ends += 0.1 * (min(seconds, LONGEST_WAIT) - self._seconds_between_ends)
            self._last_end = now
            self._choices -= entry.choices
            self._prompt_tokens -= entry.prompt_tokens
            entry.choices = entry.prompt_tokens = 0
            waiting = self._idle if not self._choices else []
            for events, event in waiting:
                with suppress(RuntimeError):  # its loop is closed
                    events.call_soon_threadsafe(event.set)


class Entry:
    """One request that was let in. Leaving it twice is harmless."""

    __slots__ = ("_admission", "choices", "prompt_tokens")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.choices = 0
        self.prompt_tokens = 0

    def add(self, *, prompt_tokens: int) -> None:
        """The prompts turned out to have so many tokens more; raises as ``Admission.enter``."""
        self._admission._take(self, 0, prompt_tokens)

    def add_call(self, call: Call, *, tellings: int = 1) -> None:
        """The prompts have been read. Every door calls this before it hands a request in.

        Args:
            tellings: how many times the answer holds the log-probabilities of the prompts.

        Raises:
            InvalidRequestError, OverloadedError: as ``Admission.enter``; the former also for more log-probabilities of
                prompt tokens than an answer may hold.
        """
        tokens = sum(len(prompt.token_ids) for prompt in call.prompts)
        top = call.params.prompt_logprobs
        if top is not None and (entries := tokens * (1 + top) * tellings) > MOST_PROMPT_LOGPROBS:
            times = f", {tellings} times" if tellings > 1 else ""
            raise InvalidRequestError(
                f"prompt_logprobs is {top} for {tokens} prompt tokens{times}: {entries} log-probabilities, and a "
                f"request may have {MOST_PROMPT_LOGPROBS}; ask for fewer, or of shorter prompts",
                field="prompt_logprobs",
            )
        self.add(prompt_tokens=tokens)

    def leave(self) -> None:
        self._admission._give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()
