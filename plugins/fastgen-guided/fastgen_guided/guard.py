"""Whether a grammar from a stranger can be compiled at all, found out at a safe distance.

llguidance bounds most of its work, but not all: ``{"type": "integer", "multipleOf": 1000003}`` keeps it busy for
minutes. So a grammar is compiled first in a process that may be killed (``checker.py``), and in a process with
anything to lose only after that has worked, and was quick. No model and no tokenizer are needed.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from fastgen.api import FastgenError, OverloadedError
from fastgen_guided.grammar import grammar_of
from fastgen_guided.limits import ADDRESS_SPACE, ANSWER_SECONDS, COMPILE_SECONDS, PARSER_LIMITS, WAIT_SECONDS

__all__ = ["Guard", "check", "checked_grammar"]


def check(options: object) -> None:
    """Refuse options that no model can serve. Takes milliseconds, or half a second or so for hostile ones.

    Raises:
        ValueError: says what is wrong.
        OverloadedError: there is no telling just now.
        FastgenError: there is no telling on this machine.
    """
    checked_grammar(options)


def checked_grammar(options: object) -> str:
    """The grammar of the options, which compiles.

    Raises:
        ValueError, FastgenError: as ``check``.
    """
    grammar = grammar_of(options)
    problem = _guard.problem(grammar)
    if problem:
        raise ValueError(problem)
    return grammar


class Guard:
    """Compiles grammars in processes of its own, which live on for the next and end with this one. For any thread.

    Args:
        seconds: longest time of a processor for one grammar.
        answer: longest wait for what comes of it, in seconds.
        turn: longest wait for a process, in seconds.
        processes: how many at once.
    """

    def __init__(
        self,
        *,
        seconds: float = COMPILE_SECONDS,
        answer: float = ANSWER_SECONDS,
        turn: float = WAIT_SECONDS,
        processes: int = 2,
        remember: int = 1024,
    ) -> None:
        self._seconds, self._answer, self._turn = seconds, answer, turn
        self._processes = processes
        self._turns = threading.BoundedSemaphore(processes)
        self._lock = threading.Lock()
        self._idle: list[_Checker] = []
        self._known: OrderedDict[bytes, str] = OrderedDict()  # what is wrong with grammars seen before
        self._remember = remember
        os.register_at_fork(after_in_child=self._forget_processes)

    def problem(self, grammar: str) -> str:
        """What is wrong with a grammar; empty for nothing.

        Raises:
            OverloadedError: others are being compiled, or the machine is too busy.
            FastgenError: no process can be started.
        """
        key = sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        if not self._turns.acquire(timeout=self._turn):
            raise OverloadedError("too many new grammars are being compiled just now; try again", retry_after=1.0)
        try:
            problem = self._ask(grammar)
        finally:
            self._turns.release()
        with self._lock:
            self._known[key] = problem
            while len(self._known) > self._remember:
                self._known.popitem(last=False)
        return problem

    def close(self) -> None:
        """End the processes. A later question starts new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for checker in idle:
            checker.end()

    def _ask(self, grammar: str) -> str:
        checker = self._take()
        try:
            answer = checker.ask(grammar, self._answer)
        except TimeoutError:
            checker.end()
            raise OverloadedError("the machine is too busy to compile a grammar; try again", retry_after=1.0) from None
        except (OSError, EOFError):
            if checker.end() == -signal.SIGPROF:
                return f"it takes more than {self._seconds:g} s to compile, which is too long; make it simpler"
            return "it takes too much memory to compile, or crashes the compiler"
        except BaseException:
            checker.end()
            raise
        with self._lock:
            self._idle.append(checker)
        return answer

    def _take(self) -> _Checker:
        with self._lock:
            checker = self._idle.pop() if self._idle else None
        if checker is not None:
            if checker.lives:
                return checker
            checker.end()  # which no grammar has to answer for
        try:
            return _Checker(self._seconds)
        except (OSError, EOFError) as error:  # TimeoutError is one
            raise FastgenError(
                f"the process that tries grammars out does not start: {error or type(error).__name__}"
            ) from error

    def _forget_processes(self) -> None:
        """A fork has its parent's pipes, and must not speak into them."""
        self._lock, self._turns, self._idle = threading.Lock(), threading.BoundedSemaphore(self._processes), []


class _Checker:
    """One process running ``checker.py``.

    Raises:
        OSError, EOFError: it does not start.
    """

    def __init__(self, seconds: float) -> None:
        program = Path(__file__).with_name("checker.py")
        limits = [str(ADDRESS_SPACE), str(seconds), json.dumps(PARSER_LIMITS)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C is for who asked
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        try:
            self._read_line(WAIT_SECONDS)  # it has started
        except BaseException:
            self.end()
            raise

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, grammar: str, seconds: float) -> str:
        """
        Raises:
            TimeoutError: no answer in time.
            OSError, EOFError: it died.
        """
        self._in.write(json.dumps(grammar).encode() + b"\n")
        self._in.flush()
        return str(json.loads(self._read_line(seconds)))

    def end(self) -> int:
        """How it ended: its exit code, or a signal's number below zero."""
        self._process.kill()  # changes nothing for one that ended by itself
        for pipe in (self._in, self._out):
            with suppress(OSError):
                pipe.close()
        return self._process.wait()

    def _read_line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                piece = os.read(self._out.fileno(), 65536)
                if not piece:
                    raise EOFError
                line += piece
        return line


_guard = Guard()
