"""What the figures depend on: processor, cores, memory, versions, and what else ran meanwhile."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from fastgen.core.machine import processor

__all__ = ["Meter", "machine"]


def machine(threads: int) -> dict[str, Any]:
    """Processor, cores this process may use, threads, memory in GiB, system, versions, load before the run."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("fastgen", "torch", "transformers")},
    }


class Meter:
    """How many cores other processes kept busy, from its making to `read`."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), _busy(), _own()

    def read(self) -> float:
        """Cores, on average. Own are this process and its children; a server elsewhere on the machine is not."""
        seconds = time.perf_counter() - self._began
        return max(0.0, (_busy() - self._busy - (_own() - self._own)) / max(seconds, 1e-6))


def _busy() -> float:
    """CPU seconds of the machine since it started."""
    times = psutil.cpu_times()
    # A guest's time is counted as its host's user time already.
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle)


def _own() -> float:
    """CPU seconds of this process and its children."""
    total = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it just ended
        total += times.user + times.system
    return total


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
