"""The engine process: ``python -m fastgen.wire.worker --fd N``, where ``N`` is its end of a socket pair.

It ends when the other end closes, whatever that end died of, and takes no signals from the terminal or from service
managers: when it ends is for the front to say, which lets requests finish first.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeAlias

import msgspec

from fastgen import __version__
from fastgen.config import EngineConfig
from fastgen.core.plugin import registry
from fastgen.core.plugin.describe import describe_error
from fastgen.errors import ConfigError, FastgenError
from fastgen.wire.channel import Channel, ChannelClosedError, FrameError
from fastgen.wire.messages import (
    PROTOCOL,
    Abort,
    Ended,
    Failed,
    FromEngine,
    FromFront,
    Hello,
    Progress,
    Ready,
    Start,
    Submit,
    decode_from_front,
    encode,
    kind_of,
)
from fastgen.wire.pulse import Pulse
from fastgen.wire.serving import Counting, Serving

__all__ = ["Load", "leave", "main"]

Load: TypeAlias = Callable[[Start], tuple[Counting, Ready]]

logger = logging.getLogger("fastgen")

LAST_STEP_SECONDS = 2.0
"""How long a step may go on after the front is gone."""
LAST_WORDS_SECONDS = 5.0
"""How long the last message may take to be read."""


def main(arguments: Sequence[str] | None = None, *, load: Load | None = None) -> int:
    """The exit code: 0 when the front ended it, 1 when it could not load or the engine died.

    Args:
        load: makes the engine. Unset: a model's.
    """
    parser = argparse.ArgumentParser(prog="python -m fastgen.wire.worker", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the connected socket's file descriptor")
    options = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    channel = Channel(socket.socket(fileno=options.fd), name="engine")
    try:
        return _work(channel, load)
    except (ChannelClosedError, FrameError, msgspec.MsgspecError) as error:
        logger.error("the front cannot be understood: %s", error)
        return 1
    finally:
        channel.close(LAST_WORDS_SECONDS)


def _work(channel: Channel, load: Load | None) -> int:
    def say(message: FromEngine) -> None:
        channel.send(encode(message))

    pulse = Pulse(say, os.getppid(), on_orphaned=lambda: os._exit(1))
    say(Hello(PROTOCOL, __version__, os.getpid()))
    start = decode_from_front(channel.receive())
    pulse.start()
    try:
        if not isinstance(start, Start):
            raise FastgenError(f"the first message must be Start, and {type(start).__name__} came")
        _check_versions(start)
        inbox = _Inbox(channel)
        inbox.start()
        if load is None:
            say(Progress("loading torch"))
            from fastgen.wire.loading import load as load_model

            load = load_model
        say(Progress("loading the model"))
        engine, ready = load(start)
    except (Exception, SystemExit) as error:
        if not isinstance(error, FastgenError):
            logger.exception("the model could not be loaded")
        text = str(error) if isinstance(error, FastgenError) else describe_error(error)
        say(Failed(kind_of(error), text))
        return 1
    say(ready)
    try:
        Serving(engine, say, pulse).run(inbox.next)
        engine.close()
    except BaseException as error:
        logger.exception("the engine stopped; every request in flight fails")
        say(Ended(describe_error(error)))
        return 1
    return 0


def _check_versions(start: Start) -> None:
    """Raises ConfigError or PluginError where the front is not of this installation."""
    if (start.protocol, start.version) != (PROTOCOL, __version__):
        raise ConfigError(
            f"the engine process is fastgen {__version__} (protocol {PROTOCOL}) and its front is {start.version} "
            f"(protocol {start.protocol}); both must come from one installation"
        )
    EngineConfig.of(start.config)
    registry().verify(start.plugins)


class _Inbox:
    """Reads commands in a thread, so that the front's end is noticed during a load and during a step too."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._commands: queue.SimpleQueue[Submit | Abort | None] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._read, name="fastgen-inbox", daemon=True).start()

    def next(self, *, wait: bool) -> Submit | Abort | None:
        """The next command; ``None`` where there is none now (without ``wait``).

        Raises:
            EOFError: the front is gone.
        """
        try:
            command = self._commands.get(wait)
        except queue.Empty:
            return None
        if command is None:
            raise EOFError
        return command

    def _read(self) -> None:
        try:
            while True:
                self._take(decode_from_front(self._channel.receive()))
        except ChannelClosedError:
            pass
        except Exception as error:
            logger.error("the front cannot be understood: %s", error)
        self._commands.put(None)
        time.sleep(LAST_STEP_SECONDS)
        os._exit(0)

    def _take(self, command: FromFront) -> None:
        if isinstance(command, Start):
            raise FrameError("Start came twice")
        self._commands.put(command)


def leave(code: int) -> NoReturn:
    """End this process without taking torch and the model apart, which can take seconds."""
    atexit._run_exitfuncs()  # plugins' temporary files, say
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
