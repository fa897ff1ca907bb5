"""A peer: a child process that runs an engine in its own virtual environment, and answers in JSON lines.

Whatever such a process can do wrong (not start, die, hang, talk nonsense, give too few tokens) becomes one error that
names the peer and shows the end of what it wrote to stderr; the whole of that is kept in a file then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fastgen.bench import drive
from fastgen.bench.peers.lines import Ended, Lines, Silent
from fastgen.bench.protocol import Run, Tick, Workload
from fastgen.errors import ConfigError, EngineClosedError, RequestFailedError

__all__ = ["CHILDREN", "Launch", "PeerTarget"]

CHILDREN = Path(__file__).parent / "children"
TAIL_LINES = 12
"""Of a peer's stderr, shown with its failure."""

_LEFT_BEHIND = ("PYTHON", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "GOMP_", "VIRTUAL_ENV")
"""Variables that begin so are this environment's own, and would change or break another's."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a peer. ``settings``: what its adapter is told first. ``env``: variables it gets besides."""

    python: Path
    adapter: Path
    settings: Mapping[str, Any]
    env: Mapping[str, str]
    load_seconds: float
    quiet_seconds: float


class PeerTarget:
    """A row of a benchmark that runs in another process, from its making to `close`."""

    def __init__(self, name: str, launch: Launch) -> None:
        """
        Raises:
            ConfigError: the process cannot be started, or the engine in it not loaded.
        """
        self.name = name
        self._launch = launch
        self._failure: str | None = None
        descriptor, path = tempfile.mkstemp(prefix=f"fastgen-peer-{_plain(name)}-", suffix=".log")
        self._log = Path(path)
        command: list[str | Path] = [launch.python, "-u", CHILDREN / "serve.py", drive.__file__, launch.adapter]
        try:
            # A session of its own: whatever it starts ends with it, and Ctrl-C is ours to handle.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=descriptor,
                env=_environment(launch),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._log.unlink()
            raise ConfigError(f"{name}: cannot start {launch.python}: {error.strerror or error}") from None
        finally:
            os.close(descriptor)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lines = Lines(self._process.stdin, self._process.stdout)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        try:
            ready = self._ask(self._launch.settings, "ready", self._launch.load_seconds)
            try:
                self.versions: Mapping[str, str] = {
                    str(name): str(number) for name, number in ready["versions"].items()
                }
                self.note = str(ready["note"])
            except (LookupError, TypeError, AttributeError):
                self._fail("did not say which versions it loaded")
        except RequestFailedError as error:
            raise ConfigError(str(error)) from None

    def run(self, workload: Workload, tick: Tick) -> Run:
        """
        Raises:
            RequestFailedError: the peer died, hung, broke the protocol, or gave other numbers of tokens than asked for,
                now or in an earlier run.
            EngineClosedError: it was closed.
        """
        if self._failure is not None:
            raise RequestFailedError(self._failure)
        if self._lines.closed:
            raise EngineClosedError(f"the peer {self.name} was closed")
        raw = self._ask(workload.as_json(), "run", self._launch.quiet_seconds, tick)
        try:
            run = Run.from_json(raw)
            problem = _problem(run, workload)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problem = f"described its run in a way that cannot be read ({type(error).__name__}: {error})"
        if problem:
            self._fail(problem)
        return run

    def close(self) -> None:
        """Ends the process and whatever it started, at once."""
        self._kill()
        if self._failure is None:
            self._log.unlink(missing_ok=True)

    def _ask(self, message: Mapping[str, Any], answer: str, patience: float, tick: Tick = lambda _: None) -> Any:
        """Send a line, and wait for the line that holds ``answer``. ``patience``: seconds between two lines."""
        try:
            self._lines.send(json.dumps(message), patience)
            while True:
                line = self._lines.receive(patience)
                said = _parse(line)
                if said is None:
                    self._fail(f"wrote {line[:200]!r} to stdout instead of an answer")
                if "error" in said:
                    self._fail(f"failed: {said['error']}")
                if answer in said:
                    return said[answer]
                if isinstance(said.get("tick"), int):
                    tick(said["tick"])
        except Silent:
            doing = "loading" if answer == "ready" else "running"
            self._fail(f"said nothing for {patience:g} s while {doing}, and was ended")
        except Ended:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._fail(f"ended by itself, {_how(self._process.poll())}")

    def _fail(self, what: str) -> NoReturn:
        self._kill()
        tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        shown = "".join(f"\n    {line[:300]}" for line in tail)
        heard = f" The end of its stderr (whole: {self._log}):{shown}" if tail else " It wrote nothing to stderr."
        self._failure = f"the peer {self.name} ({self._launch.python}) {what}.{heard}"
        if not tail:
            self._log.unlink(missing_ok=True)
        raise RequestFailedError(self._failure)

    def _kill(self) -> None:
        if self._lines.closed:
            return
        self._lines.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # helpers outlive the process: the group, not it alone
        self._process.wait()


def _parse(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _problem(run: Run, workload: Workload) -> str | None:
    """Why these are not the timelines of the workload's requests; None: they are."""
    if len(run.lines) != len(workload.requests):
        return f"answered {len(run.lines)} requests, {len(workload.requests)} were asked"
    for row, (line, request) in enumerate(zip(run.lines, workload.requests, strict=True)):
        if len(line.times) != request.out or len(line.tokens) not in (0, request.out):
            counts = f"{len(line.times)} token times and {len(line.tokens)} tokens"
            return f"gave {counts} for request {row}, {request.out} were asked for"
        if not all(a <= b for a, b in zip([line.sent, *line.times], line.times, strict=False)):
            return f"gave tokens of request {row} at times that run backwards"
    return None


def _environment(launch: Launch) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_BEHIND)}
    threads = str(launch.settings["threads"])
    return {**kept, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", **launch.env}


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)[:40]
