"""Which processor this is."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["processor"]


def processor() -> str:
    """Its model, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), []).append(value.strip())
    if names := facts.get("model name"):
        return names[0]
    # Where there is no name (aarch64), numbers say who designed each core, and which it is.
    cores = dict.fromkeys(zip(facts.get("CPU implementer", []), facts.get("CPU part", []), strict=False))
    if cores:
        told = " and ".join(f"implementer {implementer} part {part}" for implementer, part in cores)
        return f"{platform.machine()} {told}"
    return platform.processor() or platform.machine()
