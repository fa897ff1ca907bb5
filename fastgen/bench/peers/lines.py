"""Lines to and from a process through two pipes, with a limit on every wait: a process that hangs blocks nobody."""

from __future__ import annotations

import os
import selectors
import time
from typing import IO

__all__ = ["Ended", "Lines", "Silent"]


class Silent(Exception):
    """Nothing came, or nothing was taken, in the time allowed."""


class Ended(Exception):
    """The other side has closed its pipe."""


class Lines:
    """Both pipes of a child process, which must be unbuffered."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._rest = b""
        self.closed = False
        os.set_blocking(stdin.fileno(), False)
        os.set_blocking(stdout.fileno(), False)

    def send(self, line: str, patience: float) -> None:
        """If the other side is gone, nothing is raised: `receive` first gives what it said before.

        Raises:
            Silent: the other side took nothing for ``patience`` seconds.
        """
        left = memoryview(line.encode() + b"\n")
        while left:
            _await(self._stdin, selectors.EVENT_WRITE, patience)
            try:
                left = left[os.write(self._stdin.fileno(), left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return

    def receive(self, patience: float) -> str:
        """The next line. Bytes that are not UTF-8 are replaced.

        Raises:
            Silent: no whole line within ``patience`` seconds.
            Ended: the other side is gone.
        """
        until = time.monotonic() + patience
        while b"\n" not in self._rest:
            _await(self._stdout, selectors.EVENT_READ, until - time.monotonic())
            try:
                more = os.read(self._stdout.fileno(), 1 << 16)
            except BlockingIOError:
                continue
            if not more:
                raise Ended
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode("utf-8", "replace")

    def close(self) -> None:
        self.closed = True
        self._stdin.close()
        self._stdout.close()


def _await(pipe: IO[bytes], event: int, seconds: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        if seconds <= 0 or not selector.select(seconds):
            raise Silent
