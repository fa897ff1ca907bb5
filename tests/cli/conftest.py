"""The `fastgen` command in this process, in one of its own, and on a terminal of its own."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.distributions import FakeSite

Run = Callable[..., subprocess.CompletedProcess[str]]

# What `fastgen.cli:main` installs as the console script.
MAIN = "import sys; sys.argv[0] = 'fastgen'; from fastgen.cli import main; main()"
# Before that, the process makes its standard input the terminal that Ctrl-C is typed at.
OWN_TERMINAL = "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + MAIN


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    directory = tmp_path / "site"
    directory.mkdir()
    return FakeSite(directory)


@pytest.fixture
def fastgen(site: FakeSite) -> Run:
    """``fastgen ARGUMENTS`` in a process that sees the fake site."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return site.run("-c", MAIN, *arguments, **environment)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with a byte tokenizer and a chat template; 512 positions."""
    return str(tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with room for an answer that takes a while."""
    return str(tiny_llama(tmp_path_factory.mktemp("models") / "endless", max_position_embeddings=100_000))


class Terminal:
    """``fastgen`` on a pseudo-terminal of 200 columns."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", OWN_TERMINAL, *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "NO_COLOR": "1"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.shown = ""
        self._read_to = 0

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Read until ``pattern`` is shown after what was expected before; returns what lies between."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown[self._read_to :])) is None:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            data = b""
            if ready:
                try:
                    data = os.read(self._master, 65536)
                except OSError:  # Linux's way to say that the other side is closed
                    data = b""
            assert data, f"{pattern!r} did not come in {seconds} s; shown: {self.shown[-2000:]!r}"
            self.shown += data.decode("utf-8", "replace")
        start, self._read_to = self._read_to, self._read_to + found.end()
        return self.shown[start : start + found.start()]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self, seconds: float = 30) -> int:
        """Wait for the process; its exit code."""
        return self.process.wait(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal() -> type[Terminal]:
    return Terminal
