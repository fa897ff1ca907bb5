"""``fastgen.serve``: a server in a process of its own, and a client for it.

The two processes have a socket pair between them: options go through it (they may hold keys), and if this process is
gone, whatever of, the server ends.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fastgen.client import Client
from fastgen.config import EngineConfig
from fastgen.errors import ConfigError, EngineClosedError, FastgenError, did_you_mean
from fastgen.server.ending import MARGIN_SECONDS
from fastgen.server.keys import with_keys
from fastgen.server.settings import ServerConfig
from fastgen.wire.channel import Channel, ChannelClosedError, FrameError
from fastgen.wire.launching import WORKER
from fastgen.wire.messages import encode, error_of, kind_of
from fastgen.wire.process import Child

if TYPE_CHECKING:
    from fastgen.server.ending import Stop

__all__ = ["Server", "serve"]

MODULE = "fastgen.server.background"
PATIENCE_SECONDS = 5.0
"""How much longer than it should take a server's end is waited for."""
LAST_WORDS_SECONDS = 5.0
"""How long the last message may take to be read."""


class Job(msgspec.Struct, array_like=True, tag=True):
    """From the caller: what to serve."""

    model: str
    config: dict[str, Any]
    settings: dict[str, Any]
    worker: str


class Listening(msgspec.Struct, array_like=True, tag=True):
    """From the server: it is ready."""

    http: str
    grpc: str | None


class Failed(msgspec.Struct, array_like=True, tag=True):
    """From the server: it could not start."""

    kind: str
    text: str


_job = msgspec.msgpack.Decoder(Job)
_answer: msgspec.msgpack.Decoder[Listening | Failed] = msgspec.msgpack.Decoder(Listening | Failed)


# ---- the caller's process -------------------------------------------------------------------------------------------


class Server(Client):
    """A client of a server that ``fastgen.serve`` started; leaving its ``with`` block, or ``terminate``, ends both."""

    def __init__(self, child: Child, listening: Listening, settings: ServerConfig) -> None:
        """``child`` is its own to end."""
        self.url = listening.http
        """Of HTTP; OpenAI's clients take this and ``/v1``."""
        self.grpc = listening.grpc
        """Address of gRPC, if it was asked for."""
        self._child = child
        self._patience = settings.drain_timeout + MARGIN_SECONDS + PATIENCE_SECONDS
        self._ending = threading.Lock()
        key = settings.api_key[0] if settings.api_key else None
        super().__init__(self.grpc or self.url, api_key=key, ca_cert=settings.tls_cert)

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._child.pid

    def terminate(self, timeout: float | None = None) -> None:
        """End the server, and wait for that. Requests in flight get ``drain_timeout`` to finish; all is over ten
        seconds after that. A server that has not ended after ``timeout`` seconds (unset: a little more) is killed.
        Doing it twice is harmless."""
        super().close()
        with self._ending:
            self._child.signal(signal.SIGTERM)
            self._child.wait(self._patience if timeout is None else timeout)
            self._child.end()

    def close(self) -> None:
        """As ``terminate``."""
        self.terminate()


def serve(model: str | Path, *, config: EngineConfig | None = None, worker: str = WORKER, **options: Any) -> Server:
    """Start a server in a process of its own, and wait until it is ready.

    ::

        with fastgen.serve("HuggingFaceTB/SmolLM2-135M-Instruct") as server:
            print(server.url)
            print(server("The capital of France is", max_new_tokens=8).text)

    Args:
        config: engine options; or give them as keywords.
        worker: the module that the engine's process runs.
        options: engine options and server options (``fastgen serve --help``), such as ``replicas=2``. The ports are any
            that are free, unless they are given.

    Returns:
        A client of it, with ``terminate()``, ``url`` and ``grpc``.

    Raises:
        FastgenError: what is wrong with an option, or with the model.
    """
    engine, settings = _options(config, options)
    child = Child(MODULE, label="server")
    try:
        listening = _start(child, Job(str(model), _plain(engine), _plain(settings), worker))
        return Server(child, listening, settings)
    except BaseException:
        child.kill()
        child.end()
        raise


def _options(config: EngineConfig | None, options: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    engine: dict[str, Any] = config.model_dump(exclude_unset=True) if config is not None else {}
    server: dict[str, Any] = {"port": 0}
    for name, value in options.items():
        if name in ServerConfig.model_fields:
            server[name] = value
        elif name in EngineConfig.model_fields:
            engine[name] = value
        else:
            known = [*EngineConfig.model_fields, *ServerConfig.model_fields]
            raise ConfigError(f"unknown engine or server option {name!r}.{did_you_mean(name, known)}")
    return EngineConfig(**engine), with_keys(ServerConfig(**server))


def _plain(options: EngineConfig | ServerConfig) -> dict[str, Any]:
    return options.model_dump(mode="json", exclude_unset=True)


def _start(child: Child, job: Job) -> Listening:
    """Tell the server its job and hear how it went. Reads in a thread of its own: Ctrl-C must get through."""
    came: queue.SimpleQueue[Listening | FastgenError] = queue.SimpleQueue()

    def read() -> None:
        try:
            answer = _answer.decode(child.channel.receive())
            came.put(answer if isinstance(answer, Listening) else error_of(answer.kind, answer.text))
        except ChannelClosedError:
            child.wait(5.0)
            words = child.last_words()
            last = f"\nIts last lines were:\n{words}" if words else ""
            came.put(EngineClosedError(f"the server ended before it was ready: {child.how_it_ended()}{last}"))
        except (FrameError, msgspec.MsgspecError) as error:
            came.put(EngineClosedError(f"the server said what is no message: {error}"))

    thread = threading.Thread(target=read, name="fastgen-server-start", daemon=True)
    thread.start()
    try:
        child.channel.send(encode(job))
        answer = came.get()
    except BaseException:
        child.channel.shut()
        raise
    finally:
        thread.join()
    if isinstance(answer, FastgenError):
        raise answer
    return answer


# ---- the server's process -------------------------------------------------------------------------------------------


def main() -> int:
    """``python -m fastgen.server.background --fd N``."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--fd", type=int, required=True)
    channel = Channel(socket.socket(fileno=parser.parse_args().fd), name="caller")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    try:
        return _run(channel, _job.decode(channel.receive()))
    except FastgenError as error:
        channel.send(encode(Failed(kind_of(error), str(error))))
        return 1
    finally:
        channel.close(LAST_WORDS_SECONDS)


def _run(channel: Channel, job: Job) -> int:
    from fastgen.server import launch

    async def run() -> int:
        stop = launch.Stop()
        loop = asyncio.get_running_loop()
        threading.Thread(target=_watch, args=(channel, loop, stop), name="fastgen-caller", daemon=True).start()
        return await launch.serve(
            job.model,
            EngineConfig.of(job.config),
            ServerConfig(**job.settings),
            stop=stop,
            signals=(signal.SIGTERM,),
            on_ready=lambda addresses: channel.send(encode(Listening(addresses.http, addresses.grpc))),
            worker=job.worker,
        )

    return launch.run(run, ServerConfig(**job.settings))


def _watch(channel: Channel, loop: asyncio.AbstractEventLoop, stop: Stop) -> None:
    """End the server at once when its caller is gone."""
    with suppress(FastgenError):
        channel.receive()
    with suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(stop.now)


if __name__ == "__main__":
    sys.exit(main())
