"""For tests of engine processes: a plugin that misbehaves in them, and what a process holds."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fastgen.core.plugin import process
from fastgen.testing.distributions import FakeSite

__all__ = ["FAULTY", "Holdings", "faulty_plugin", "wait_until"]

FAULTY = '''
import os
import time

from fastgen import api


@api.hookimpl
def fastgen_logits_processors():
    names = ("sleeps", "raises", "leaves", "breaks")
    return [api.LogitsProcessorSpec(name, globals()["make_" + name]) for name in names]


def at(options, act):
    """Calls ``act`` when so many tokens are there."""

    def process(output_ids, logits):
        if len(output_ids) >= options.get("after", 0):
            act()
        return logits

    return process


def make_sleeps(options, *, vocab_size, prompt_token_ids):
    return at(options, lambda: time.sleep(options["seconds"]))


def make_raises(options, *, vocab_size, prompt_token_ids):
    def act():
        raise ValueError("a fault of the plugin")

    return at(options, act)


def make_leaves(options, *, vocab_size, prompt_token_ids):
    return at(options, lambda: os._exit(options["code"]))


def make_breaks(options, *, vocab_size, prompt_token_ids):
    def act():
        from fastgen.core.policy.scheduler import Scheduler

        def commit(*arguments):
            raise RuntimeError("the step is broken")

        Scheduler.commit = commit

    return at(options, act)
'''
"""Logits processors, each from the token ``after`` on: ``sleeps`` for ``seconds``, ``raises``, ``leaves`` by
``os._exit(code)``, and ``breaks`` the engine for good."""


@contextmanager
def faulty_plugin(directory: Path, *, name: str = "faulty", source: str = FAULTY) -> Iterator[FakeSite]:
    """A plugin installed for this process and for those it starts meanwhile."""
    site = FakeSite(directory)
    site.add(f"fastgen-{name}", entries={name: f"fastgen_{name}"}, modules={f"fastgen_{name}": source})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setattr(process, "_registry", None)
        yield site
    sys.modules.pop(f"fastgen_{name}", None)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """
    Raises:
        AssertionError: it did not come true.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


class Holdings:
    """What this process holds besides memory, to be the same later."""

    def __init__(self) -> None:
        me = psutil.Process()
        gc.collect()
        self.children = {child.pid for child in me.children(recursive=True)}
        self.files = sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in _files())
        # Without the numbers of those that nobody named: grpc makes its one anew now and then.
        self.threads = sorted(re.sub(r"Thread-\d+", "Thread", thread.name) for thread in threading.enumerate())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holdings) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{vars(self)}"


def _files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the one that lists them
            continue
        found.append(fd)
    return found
