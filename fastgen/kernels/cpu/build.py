"""The library for this machine: what the wheel brought, or compiled once for each state of its sources, compiler and
instruction set, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fastgen.config import cache_directory
from fastgen.kernels.cpu.compiler import CXX_FLAGS, BuildError, binding_flags, compile_to, compiler
from fastgen.kernels.cpu.isa import Level

__all__ = ["BINDING", "LIBRARY", "BuildError", "binding_file", "library_file", "prebuilt"]

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Filled by hatch_build.py in wheels that are made for publishing; missing in a source checkout."""
LIBRARY, BINDING = "fastgen_cpu-{}.so", "fastgen_cpu_binding.abi3.so"


def prebuilt(name: str) -> Path | None:
    """The file of this name that came with the package, if one did."""
    return file if (file := PREBUILT / name).is_file() else None


def library_file(level: Level, *, lanes: int | None = None) -> Path:
    """The library of the operations for this instruction set, built if it is not there.

    Args:
        lanes: floats in a vector, to test code for registers that the processor has not.

    Raises:
        BuildError: no compiler, it fails, or the cache cannot be written.
    """
    extra = (f"-DFG_LANES={lanes}",) if lanes else ()
    sources = sorted(SOURCES.glob("*.cpp"))
    return _built(f"fastgen_cpu-{level.name}", compiler("c++"), sources, (*CXX_FLAGS, *level.flags, *extra))


def binding_file() -> Path:
    """The extension module that calls the operations, built if it is not there.

    Raises:
        BuildError: as `library_file`; also where Python's headers are not installed.
    """
    return _built("fastgen_cpu_binding", compiler("cc"), [SOURCES / "binding.c"], binding_flags())


def _built(name: str, program: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    directory = cache_directory() / "kernels"
    file = directory / f"{name}-{_key(program, flags)}.so"
    if file.is_file():
        return file
    if sys.stderr.isatty():
        print(f"fastgen: building {name} for this processor, once; it takes some seconds", file=sys.stderr)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / file.name
            compile_to(made, program, sources, flags)
            os.replace(made, file)  # whole or not at all, whoever else builds it now
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error.strerror or error}") from error
    return file


def _key(program: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".c", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    stat = os.stat(program)
    digest.update(repr((program, stat.st_size, stat.st_mtime_ns, tuple(flags))).encode())
    return digest.hexdigest()[:16]
