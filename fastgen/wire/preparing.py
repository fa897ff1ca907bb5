"""Requests that take long to take in, since a plugin has to prepare for them: in a thread, while steps go on."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from fastgen.core.plugin import registry
from fastgen.core.plugin.describe import describe_error
from fastgen.core.processors import checked_already
from fastgen.types import SamplingParams
from fastgen.wire.messages import Abort, Submit

__all__ = ["Checking", "Commands", "Preparing"]

logger = logging.getLogger("fastgen")

THREADS = 2
"""Preparing at once: one that takes long does not hold up all others."""
POLL_SECONDS = 0.002
"""How often an engine without other work looks whether one is ready."""


class Checking(Protocol):
    """An engine that says whether it would take a request."""

    def check(
        self, prompt_token_ids: list[int], params: SamplingParams | None = None, *, chat: bool = False
    ) -> object: ...


class Commands(Protocol):
    """Where commands come from: ``None`` is "none now"; ``EOFError`` is the end."""

    def __call__(self, *, wait: bool) -> Submit | Abort | None: ...


class Preparing:
    """Commands as they come, except that requests with logits processors come when these have been made once, for
    nobody, in a thread: what takes long about that, a plugin keeps (see ``LogitsProcessorSpec``). Whoever aborts one of
    them comes after it. What is wrong with one shows when it is added.

    At its start it does the same with the examples of the plugins.
    """

    def __init__(self, commands: Commands, engine: Checking) -> None:
        self._commands = commands
        self._engine = engine
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fastgen-preparing")
        self._prepared: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        self._held: dict[int, list[Abort]] = {}  # by the number of a request that is being prepared
        self._numbers: dict[str, int] = {}  # of their ids
        self._ready: deque[Submit | Abort] = deque()
        for spec in registry().logits_processors:
            if spec.example is not None:
                self._threads.submit(self._try, [0], {"logits_processors": {spec.name: spec.example}})

    def __call__(self, *, wait: bool) -> Submit | Abort | None:
        while True:
            self._collect()
            if self._ready:
                return self._ready.popleft()
            command = self._commands(wait=wait and not self._held)
            if isinstance(command, Submit) and any(new.params.get("logits_processors") for new in command.requests):
                self._hold(command)
            elif isinstance(command, Abort) and command.request_id in self._numbers:
                self._held[self._numbers[command.request_id]].append(command)
            elif command is not None or not wait:
                return command
            else:
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """What is being prepared goes on, and nothing comes of it."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _hold(self, command: Submit) -> None:
        self._held[command.number] = []
        self._numbers |= {new.request_id: command.number for new in command.requests}
        self._threads.submit(self._prepare, command)

    def _prepare(self, command: Submit) -> None:
        for new in command.requests:
            self._try(new.prompt_token_ids, new.params, chat=new.chat)
        self._prepared.put(command)

    def _try(self, prompt_token_ids: list[int], params: dict[str, Any], *, chat: bool = False) -> None:
        try:
            with checked_already():
                self._engine.check(prompt_token_ids, SamplingParams.of(**params), chat=chat)
        except (Exception, SystemExit) as error:  # a plugin's code: anything may come, and adding the request says it
            logger.debug("a request will be refused: %s", describe_error(error))

    def _collect(self) -> None:
        while not self._prepared.empty():
            command = self._prepared.get()
            for new in command.requests:
                self._numbers.pop(new.request_id, None)
            self._ready += [command, *self._held.pop(command.number)]
