"""Peers that need no engine: adapters of a few lines, and programs that are no peers at all."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastgen.bench.peers import PeerTarget, read
from fastgen.bench.protocol import Settings

ADAPTER = '''
"""Counts up from a prompt's last token."""
import os, subprocess, sys, time

class Engine:
    note = "counts up"

    def __init__(self, settings):
        self.settings = settings
        self.versions = {"counter": "1.5"}
        self.running = []
        {at_load}

    def begin(self, requests, clients):
        {at_begin}

    def add(self, row, prompt, out):
        self.running.append([row, prompt[-1], out])

    def step(self):
        {at_step}
        came = [(entry[0], [entry[1] + 1]) for entry in self.running]
        self.running = [[row, last + 1, left - 1] for row, last, left in self.running if left > 1]
        return came
'''

Start = Callable[..., PeerTarget]


@pytest.fixture(autouse=True)
def _kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed peers wrote to stderr."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """Writes the counting adapter, with lines of Python put in."""

    def write(*, at_load: str = "pass", at_begin: str = "pass", at_step: str = "pass") -> Path:
        path = tmp_path / "counter.py"
        text = ADAPTER
        for name, line in {"at_load": at_load, "at_begin": at_begin, "at_step": at_step}.items():
            text = text.replace("{" + name + "}", line)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def start(tmp_path: Path, adapter: Callable[..., Path]) -> Iterator[Start]:
    """Starts a peer by a TOML file, as a user does. ``python``: a program's text, in place of the interpreter."""
    targets: list[PeerTarget] = []

    def begin(*, python: str | None = None, lines: str = "", threads: int = 1, **put_in: Any) -> PeerTarget:
        interpreter = Path(sys.executable)
        if python is not None:
            interpreter = tmp_path / "program"
            interpreter.write_text(python)
            interpreter.chmod(0o755)
        file = tmp_path / "peers.toml"
        table = f'["a peer"]\nengine = "{adapter(**put_in).name}"\npython = "{interpreter}"\n'
        file.write_text(table + "load_seconds = 20\nquiet_seconds = 20\n" * ("_seconds" not in lines) + lines)
        targets.append(read(file)["a peer"](Settings(tmp_path, threads=threads)))
        return targets[-1]

    yield begin
    for target in targets:
        target.close()
