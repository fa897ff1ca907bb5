"""The main program of a peer: ``serve.py DRIVE.py ADAPTER.py``. One JSON object a line, in on stdin, out on stdout.

In first: the row's settings (``model``, ``dtype``, ``threads``, ``budget`` and the engine's own). Out: ``{"ready":
{"versions": {...}, "note": ...}}``. Then in, for each run: a workload, as `Workload.as_json` wrote it; out: ``{"tick":
tokens}`` now and then, at last ``{"run": {...}}`` as `Run.from_json` reads it. A failure is ``{"error": text}``, and
ends the process. The end of stdin, or of the process that started this one, ends it too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any, Protocol, TextIO

TICK_SECONDS = 0.25
"""Between two words about progress: each wakes the benchmark up, which shares the cores."""


class Adapter(Protocol):
    """A peer's engine, which `drive.drive` drives step by step."""

    note: str
    """A line on how it is driven."""

    versions: dict[str, str]
    """The packages its figures depend on."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Loads the model."""

    def begin(self, requests: list[Any], clients: int | None) -> None:
        """Before every run, untimed: room for these `drive.Request`, nothing left of the run before."""

    def add(self, row: int, prompt: list[int], out: int) -> None:
        """Accept request ``row``: greedy, exactly ``out`` tokens, end tokens ignored."""

    def step(self) -> list[tuple[int, list[int]]]:
        """Run a little; ``(row, new token ids)`` of what came. Raises if a request ends before it has all tokens."""


def main(drive_path: str, adapter_path: str) -> None:
    # Libraries may print: what they write to stdout goes to stderr, and the protocol gets a descriptor of its own.
    said = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sys.path.pop(0)  # this folder: nothing here may hide a package
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    try:
        drive = load("fastgen_drive", drive_path)
        settings = json.loads(sys.stdin.readline())
        engine: Adapter = load("fastgen_adapter", adapter_path).Engine(settings)
        say(said, ready={"versions": engine.versions, "note": engine.note})
        for line in sys.stdin:
            say(said, run=run(drive, engine, json.loads(line), said))
    except Exception as error:
        traceback.print_exc()
        say(said, error=f"{type(error).__name__}: {error}")
        sys.exit(1)


def run(drive: ModuleType, engine: Adapter, workload: dict[str, Any], said: TextIO) -> dict[str, Any]:
    """One workload, as `Run.from_json` reads it."""
    requests = [drive.Request.from_json(raw) for raw in workload["requests"]]
    engine.begin(requests, workload["clients"])
    waiting, told = 0, time.perf_counter()

    def tick(tokens: int) -> None:
        nonlocal waiting, told
        waiting += tokens
        if time.perf_counter() - told >= TICK_SECONDS:
            say(said, tick=waiting)
            waiting, told = 0, time.perf_counter()

    lines = drive.drive(engine, requests, clients=workload["clients"], tick=tick)
    say(said, tick=waiting)
    return {"lines": [{"sent": line.sent, "times": line.times, "tokens": line.tokens} for line in lines]}


def end_with(parent: int) -> None:
    """Ends this process and what it started when the benchmark is gone, however that ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def load(name: str, path: str) -> ModuleType:
    """A module from a file, wherever that is."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def say(said: TextIO, **words: Any) -> None:
    said.write(json.dumps(words) + "\n")
    said.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
