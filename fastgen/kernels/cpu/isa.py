"""Instruction sets: what this processor has, and how the library is compiled for each."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from fastgen.errors import ConfigError

__all__ = ["LEVELS", "Level", "best_level", "level_named"]


@dataclass(frozen=True)
class Level:
    """A set of instructions that the library can be compiled for.

    ``needs``: processor features, as Linux names them, that must all be there.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    machines: tuple[str, ...] = ()
    """``platform.machine()`` of processors it is for; empty: any."""


_V3 = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_X86 = ("x86_64", "AMD64")

LEVELS: tuple[Level, ...] = (
    Level("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}, _X86),
    Level("x86-64-v4", ("-march=x86-64-v4",), _V4, _X86),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3, _X86),
    Level("generic", (), frozenset()),
)
"""Best first; the last runs anywhere."""


def best_level() -> Level:
    """The best that this processor runs; ``generic`` where its features cannot be read."""
    features = _features()
    machine = platform.machine()
    return next(one for one in LEVELS if one.needs <= features and (not one.machines or machine in one.machines))


def level_named(name: str) -> Level:
    """The level of this name.

    Raises:
        ConfigError: no such level, or this processor does not run it.
    """
    for level in LEVELS:
        if level.name == name:
            missing = sorted(level.needs - _features())
            if missing or (level.machines and platform.machine() not in level.machines):
                raise ConfigError(
                    f"FASTGEN_CPU_LEVEL={name}: this processor has no {', '.join(missing) or name}; its best level is "
                    f"{best_level().name}"
                )
            return level
    raise ConfigError(f"FASTGEN_CPU_LEVEL={name} is unknown: choose from {', '.join(level.name for level in LEVELS)}")


def _features() -> frozenset[str]:
    """Processor features by Linux's names; none where they cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
