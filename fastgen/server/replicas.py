"""Several engines behind one ``Backend``: who runs which request.

A request goes where the fewest tokens are outstanding, unless another engine has seen the beginning of its prompt (with
the same LoRA adapter and cache salt) and is not much busier: that one has it in its cache.

A request is run by one engine, once. If that dies, it fails with ``EngineClosedError`` and is not tried elsewhere, even
if no token had come: whether it had begun to run cannot be known, and clients know whether they want to repeat it.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from fastgen.config import EngineConfig
from fastgen.core.loop import Submission
from fastgen.errors import EngineClosedError, FastgenError
from fastgen.server.admission import DrainingError
from fastgen.server.gate import Gate
from fastgen.server.service import Replica, State, Watcher
from fastgen.server.settings import ServerConfig
from fastgen.server.supervisor import Supervisor
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams
from fastgen.wire.info import ModelInfo
from fastgen.wire.launching import WORKER, Plan
from fastgen.wire.messages import Ready
from fastgen.wire.remote import RefusedError, RemoteLoop, expected_tokens

__all__ = ["Affinity", "Replicas"]

REMEMBERED = 2**14
"""Beginnings of prompts whose engine is known."""
BUSIER = 4
"""A beginning is worth as many more outstanding tokens as fit into so many passes."""


class Affinity:
    """Which engine saw the beginning of a prompt last. Beginnings are of 1, 2, 4, ... blocks."""

    def __init__(self, block_size: int, *, most: int = REMEMBERED) -> None:
        self._block_size = block_size
        self._most = most
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, prompt: Sequence[int], params: SamplingParams) -> int | None:
        """The engine that saw the longest beginning; ``None``: none did."""
        with self._lock:
            for key in reversed(list(self._keys(prompt, params))):
                if (found := self._seen.get(key)) is not None:
                    return found
        return None

    def remember(self, prompt: Sequence[int], params: SamplingParams, index: int) -> None:
        with self._lock:
            for key in self._keys(prompt, params):
                self._seen[key] = index
                self._seen.move_to_end(key)
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)

    def forget(self, index: int) -> None:
        """An engine has died, and its cache with it."""
        with self._lock:
            for key in [key for key, one in self._seen.items() if one == index]:
                del self._seen[key]

    def _keys(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Hashable]:
        """Hashes: that two beginnings share one costs a cache miss and nothing else."""
        length = self._block_size
        while length <= len(prompt):
            yield hash((params.lora, params.cache_salt, tuple(prompt[:length])))
            length *= 2


class Replicas:
    """The engines of a server, each in a process with a supervisor."""

    def __init__(self, model: str, config: EngineConfig, settings: ServerConfig, *, module: str = WORKER) -> None:
        count = settings.replicas
        self._draining = False
        self._cut_off = False
        self.trusts_code = config.trust_remote_code
        self._ids = itertools.count()
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_known = False
        self._tokenizer_lock = threading.Lock()
        self._affinity: Affinity | None = None if count == 1 else Affinity(config.block_size)
        self._supervisors = [
            Supervisor(Plan(model, config, place, count), settings, self._tokenizer_of, index=place, module=module)
            for place in range(count)
        ]

        if self._affinity is not None:
            for supervisor in self._supervisors:
                supervisor.on_death = partial(self._affinity.forget, supervisor.index)

    # ---- beginning and end -----------------------------------------------------------------------------------------

    def start(self) -> ModelInfo:
        """Start every engine and wait until each is ready or given up. The first is ready before the others begin:
        what it fetches, compiles, packs or measures is there for them.

        Raises:
            FastgenError: one could not be loaded, with its reason; none is left.
        """
        first, *others = self._supervisors
        for group in ([first], others):
            for supervisor in group:
                supervisor.start(first.ready)
            for supervisor in group:
                supervisor.wait_settled()
                if supervisor.error is not None:
                    error = supervisor.error
                    self.close()
                    raise error
        return self.info

    @property
    def info(self) -> ModelInfo:
        """Of the first engine; the others are like it."""
        ready = self._supervisors[0].ready
        if ready is None:
            raise EngineClosedError("the engine is not ready")
        return ready.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @property
    def detail(self) -> str:
        """What the engines are doing, or why they do not, for people."""
        return "; ".join(dict.fromkeys(s.detail for s in self._supervisors if s.detail))

    def close(self) -> None:
        """End every engine, and wait for that. What is in flight fails. Closing twice is harmless."""
        for supervisor in self._supervisors:
            supervisor.stop()
        for supervisor in self._supervisors:
            supervisor.join()

    # ---- Loop ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return all(supervisor.state == "failed" for supervisor in self._supervisors)

    def new_request_id(self) -> str:
        return f"request-{next(self._ids)}"

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        """As ``Loop.submit``.

        Raises:
            DrainingError: everything in flight is being cut off.
        """
        if self._cut_off:
            raise DrainingError
        loops = {s.index: loop for s in self._supervisors if (loop := s.loop) is not None}
        if not loops:
            why = "the server is shutting down" if self._draining else "the engine's process has just died"
            raise EngineClosedError(f"no engine is ready: {self.detail or why}")
        shares = self._shares(submissions, loops)
        if len(shares) == 1:
            ((index, _),) = shares.items()
            future = loops[index].submit(submissions)
        else:
            future = self._spread(submissions, shares, loops)
        if self._cut_off:  # since then: whoever cut off may not have seen these
            for new in submissions:
                self.abort(new.request_id)
        return future

    def abort(self, request_id: str) -> None:
        for supervisor in self._supervisors:
            if (loop := supervisor.loop) is not None and request_id in loop:
                loop.abort(request_id)

    def abort_all(self) -> None:
        """End everything in flight, with last chunks of reason ``abort``."""
        for supervisor in self._supervisors:
            if (loop := supervisor.loop) is not None:
                loop.abort_all()

    def cut_off(self) -> None:
        """End everything in flight, and what was let in and is not handed in yet."""
        self._cut_off = True
        self.abort_all()

    @property
    def in_flight(self) -> int:
        """Requests."""
        return sum(loop.in_flight for s in self._supervisors if (loop := s.loop) is not None)

    # ---- Backend ---------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Call it draining from now on; whoever lets requests in sees to the rest."""
        self._draining = True

    @property
    def state(self) -> State:
        states = {supervisor.state for supervisor in self._supervisors}
        if states == {"failed"}:
            return "failed"
        order: tuple[State, ...] = ("ready", "starting", "restarting")
        return "draining" if self._draining else next(state for state in order if state in states)

    def replicas(self) -> list[Replica]:
        return [supervisor.replica() for supervisor in self._supervisors]

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        ends = [s.watch(lambda passes, index=s.index: watcher(index, passes)) for s in self._supervisors]  # type: ignore[misc]

        def end() -> None:
            for one in ends:
                one()

        return end

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _tokenizer_of(self, ready: Ready) -> Tokenizer | None:
        """One for all engines: they load the same files."""
        with self._tokenizer_lock:
            if not self._tokenizer_known:
                directory = Path(ready.directory)
                if Tokenizer.is_in(directory):
                    self._tokenizer = Tokenizer.load(directory, trust_remote_code=self.trusts_code)
                self._tokenizer_known = True
            return self._tokenizer

    def _shares(self, submissions: Sequence[Submission], loops: dict[int, RemoteLoop]) -> dict[int, list[int]]:
        """For each engine that gets any: the places of its requests in the batch."""
        if len(loops) == 1:
            return {next(iter(loops)): list(range(len(submissions)))}
        loads = {index: loop.outstanding_tokens for index, loop in loops.items()}
        slack = BUSIER * self.info.max_batch_tokens
        shares: dict[int, list[int]] = {}
        for place, new in enumerate(submissions):
            index = min(loads, key=lambda one: (loads[one], one))
            if self._affinity is not None:
                seen = self._affinity.find(new.prompt_token_ids, new.params)
                if seen in loads and loads[seen] <= loads[index] + slack:
                    index = seen
                self._affinity.remember(new.prompt_token_ids, new.params, index)
            prompt = len(new.prompt_token_ids)
            loads[index] += prompt + new.params.n * expected_tokens(new.params, prompt)
            shares.setdefault(index, []).append(place)
        return shares

    def _spread(
        self, submissions: Sequence[Submission], shares: dict[int, list[int]], loops: dict[int, RemoteLoop]
    ) -> Future[None]:
        """All or none, over several engines: what one sends is held back until every one has accepted."""
        gate = Gate(self.abort)
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        answers: list[BaseException | None] = []
        lock = threading.Lock()

        def answered(future: Future[None]) -> None:
            with lock:
                answers.append(future.exception())
                if len(answers) < len(shares):
                    return
            errors = [error for error in answers if error is not None]
            if not errors:
                done.set_result(None)
                gate.open()
                return
            gate.shut()
            for new in submissions:
                self.abort(new.request_id)
            done.set_exception(_first(errors))

        for index, places in shares.items():
            part = [gate.guard(submissions[place]) for place in places]
            try:
                future = loops[index].submit(part, places=places, count=len(submissions))
            except FastgenError as error:
                future = Future()
                future.set_exception(error)
            future.add_done_callback(answered)
        return done


def _first(errors: Sequence[BaseException]) -> BaseException:
    """The one to tell: that of the first request refused, if it was requests that were at fault."""
    refused = [error for error in errors if isinstance(error, RefusedError)]
    return min(refused, key=lambda error: error.place) if refused else errors[0]
