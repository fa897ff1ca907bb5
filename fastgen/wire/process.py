"""A child process at the other end of a socket pair: started, listened to, ended; none is left behind."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from fastgen.wire.channel import Channel

__all__ = ["Child"]

logger = logging.getLogger("fastgen.engine")

_LOGGED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): ")
_LONGEST_LINE = 2**14
_KEPT_LINES = 20
_SECRETS = ("FASTGEN_API_KEY",)
"""Variables of the front's environment that are no business of an engine."""


class Child:
    """A Python module run with ``--fd N``. What it prints goes line by line to the logger ``fastgen.engine``, at the
    level it names."""

    def __init__(self, module: str, arguments: Sequence[str] = (), *, label: str = "engine") -> None:
        """
        Raises:
            OSError, RuntimeError: the system has no process, file descriptor or thread to give; nothing is left behind.
        """
        self.label = label
        ours, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        environment = {k: v for k, v in os.environ.items() if k not in _SECRETS}
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
        try:
            self._process = subprocess.Popen(
                # -P: the folder one happens to be in holds no plugins and no other fastgen, unless it is on our path.
                [sys.executable, "-P", "-m", module, "--fd", str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        assert self._process.stdout is not None
        self._listener = threading.Thread(
            target=self._listen, args=(self._process.stdout,), name=f"fastgen-{label}-output", daemon=True
        )
        try:
            self._listener.start()
            self.channel = Channel(ours, name=label.replace(" ", "-"))
        except BaseException:  # no thread is to be had: leave no process behind
            ours.close()
            self._process.kill()
            self._process.wait()
            if self._listener.ident is not None:
                self._listener.join(1.0)
            self._process.stdout.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended within ``timeout`` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self.signal(signal.SIGKILL)

    def end(self, timeout: float = 0.0) -> str:
        """Close the connection, which tells it to end; kill it if it lives after ``timeout`` seconds. Only when nobody
        receives from its channel any more. How it ended, for people."""
        self.channel.close()
        if not self.wait(timeout):
            self.kill()
            self.wait()
        self._listener.join(1.0)  # a process that it started may hold the pipe open
        if self._process.stdout is not None and not self._listener.is_alive():
            self._process.stdout.close()
        return self.how_it_ended()

    def how_it_ended(self) -> str:
        code = self._process.poll()
        if code is None:
            return "it still runs"
        if code < 0:
            name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else str(-code)
            hint = "; the system does that where memory runs out" if -code == signal.SIGKILL else ""
            return f"it was ended by signal {name}{hint}"
        return f"it exited with code {code}"

    def last_words(self) -> str:
        """The last lines it printed, or an empty text."""
        return "\n".join(self._last_lines)

    def _listen(self, output: IO[bytes]) -> None:
        level = logging.INFO
        with suppress(ValueError):  # closed
            while line := output.readline(_LONGEST_LINE):
                text = line.decode(errors="backslashreplace").rstrip()
                self._last_lines.append(text)
                name = logger.name
                if found := _LOGGED.match(text):
                    level, name, text = logging.getLevelNamesMapping()[found[1]], found[2], text[found.end() :]
                elif text.startswith("fastgen: warning: "):
                    level = logging.WARNING
                if text:
                    logging.getLogger(name).log(level, "%s: %s", self.label, text)
