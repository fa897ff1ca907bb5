"""From a started engine process to a loop that takes requests."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from fastgen import __version__
from fastgen.config import EngineConfig
from fastgen.core.plugin import registry
from fastgen.errors import ConfigError, EngineClosedError, FastgenError
from fastgen.wire.channel import ChannelClosedError, FrameError
from fastgen.wire.messages import (
    PROTOCOL,
    Beat,
    Failed,
    FromEngine,
    Hello,
    Progress,
    Ready,
    Start,
    decode_from_engine,
    encode,
    error_of,
)
from fastgen.wire.process import Child

__all__ = ["ModelChangedError", "Plan", "check_same", "pinned", "start_engine"]

WORKER = "fastgen.wire.worker"
_SAME = ("name", "architecture", "dtype", "quantization", "block_size", "vocab_size", "loras")
"""What engines of one server have in common; limits may differ with the memory that was free."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an engine process is to load."""

    model: str
    config: EngineConfig
    place: int = 0
    """Which of the ``places`` engines on this machine it is, from 0."""
    places: int = 1


class ModelChangedError(ConfigError):
    """An engine loaded another model than the first one of its server."""


def pinned(plan: Plan, first: Ready) -> Plan:
    """The plan for an engine that is to load what the first one did: of a model of the hub that very commit, whatever
    its branch points to by now."""
    directory = Path(first.directory)
    if directory.parts[-3:-1] != (f"models--{plan.model.replace('/', '--')}", "snapshots"):
        return plan
    return replace(plan, config=plan.config.model_copy(update={"revision": directory.name}))


def check_same(first: Ready, ready: Ready) -> None:
    """
    Raises:
        ModelChangedError: what was loaded is not what the first engine loaded, whose tokenizer and limits the server
            goes by.
    """
    pairs = [("directory", first.directory, ready.directory)]
    pairs += [(name, getattr(first.info, name), getattr(ready.info, name)) for name in _SAME]
    different = [f"{name} is {now!r} and was {before!r}" for name, before, now in pairs if now != before]
    if different:
        raise ModelChangedError(
            f"the model is not the one that the server started with: {'; '.join(different)}. Start the server again"
        )


def start_engine(
    child: Child, plan: Plan, *, timeout: float, progress: Callable[[str], None] = lambda text: None
) -> Ready:
    """Have a process of the module ``WORKER`` load a model, and wait for that.

    Raises:
        EngineClosedError: the process died, was closed, said nonsense or took more than ``timeout`` seconds. It is its
            caller's to end.
        FastgenError: what it could not do, as loading in this process would raise it.
    """
    waiting = _Handshake(child, plan, progress)
    try:
        result = waiting.result(timeout)
    except queue.Empty:
        child.kill()
        waiting.join()
        raise EngineClosedError(
            f"the {child.label} process was not ready within {timeout:g} seconds (start_timeout)"
        ) from None
    waiting.join()
    if isinstance(result, FastgenError):
        raise result
    return result


class _Handshake:
    """Reads in a thread of its own: whoever waits may lose patience."""

    def __init__(self, child: Child, plan: Plan, progress: Callable[[str], None]) -> None:
        self._child = child
        self._plan = plan
        self._progress = progress
        self._result: queue.SimpleQueue[Ready | FastgenError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"fastgen-{child.label}-handshake", daemon=True)
        self._thread.start()

    def result(self, timeout: float) -> Ready | FastgenError:
        """Raises ``queue.Empty`` when it takes longer."""
        return self._result.get(timeout=timeout)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._result.put(self._shake())
        except ChannelClosedError:
            self._result.put(EngineClosedError(self._obituary()))
        except (FrameError, msgspec.MsgspecError) as error:
            self._result.put(EngineClosedError(f"the {self._child.label} process sent what is no message: {error}"))
        except FastgenError as error:
            self._result.put(error)
        except Exception as error:
            self._result.put(EngineClosedError(f"starting the {self._child.label} process failed: {error}"))

    def _shake(self) -> Ready | FastgenError:
        hello = self._next()
        if not isinstance(hello, Hello):
            raise FrameError(f"{type(hello).__name__} came where Hello must")
        if (hello.protocol, hello.version) != (PROTOCOL, __version__):
            raise ConfigError(
                f"the engine process is fastgen {hello.version} (protocol {hello.protocol}) and this process is "
                f"{__version__} (protocol {PROTOCOL}); both must come from one installation"
            )
        plan = self._plan
        start = Start(
            PROTOCOL,
            __version__,
            list(registry().fingerprint()),
            plan.model,
            plan.config.model_dump(mode="json", exclude_unset=True),
            plan.place,
            plan.places,
        )
        self._child.channel.send(encode(start))
        while True:
            message = self._next()
            if isinstance(message, Ready):
                return message
            if isinstance(message, Failed):
                error = error_of(message.kind, message.text)
                # What was none of ours, a plugin's say: it would come again.
                return error if type(error).__name__ == message.kind else FastgenError(message.text)
            if isinstance(message, Progress):
                self._progress(message.text)
            elif not isinstance(message, Beat):
                raise FrameError(f"{type(message).__name__} came from an engine that is not ready")

    def _next(self) -> FromEngine:
        return decode_from_engine(self._child.channel.receive())

    def _obituary(self) -> str:
        if not self._child.wait(5.0):
            return f"the {self._child.label} process closed its connection before it was ready"
        time.sleep(0.05)  # its last lines come through another pipe
        words = self._child.last_words()
        last = f"\nIts last lines were:\n{words}" if words else ""
        return f"the {self._child.label} process ended before it was ready: {self._child.how_it_ended()}{last}"
