"""Compiles the library, once for each state of its sources, compiler and instruction set, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastgen.config import cache_directory
from fastgen.errors import FastgenError
from fastgen.kernels.cpu.isa import Level

__all__ = ["BuildError", "binding_file", "library_file"]

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
FLAGS = ("-O3", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
TIMEOUT = 300
"""Seconds that one file may take to compile."""


class BuildError(FastgenError):
    """The library cannot be built here; torch's operations serve instead."""


def library_file(level: Level, *, lanes: int | None = None) -> Path:
    """The library of the operations for this instruction set, built if it is not there.

    Args:
        lanes: floats in a vector, to test code for registers that the processor has not.

    Raises:
        BuildError: no compiler, it fails, or the cache cannot be written.
    """
    prebuilt = PREBUILT / f"fastgen_cpu-{level.name}.so"
    if lanes is None and prebuilt.is_file():
        return prebuilt
    extra = (f"-DFG_LANES={lanes}",) if lanes else ()
    sources = sorted(SOURCES.glob("*.cpp"))
    return _built(f"fastgen_cpu-{level.name}", _compiler("c++"), sources, ("-std=c++17", *FLAGS, *level.flags, *extra))


def binding_file() -> Path:
    """The extension module that calls the operations, built if it is not there.

    Raises:
        BuildError: as `library_file`; also where Python's headers are not installed.
    """
    prebuilt = PREBUILT / "fastgen_cpu_binding.abi3.so"
    if prebuilt.is_file():
        return prebuilt
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        raise BuildError(f"Python's headers are not installed ({include}/Python.h is missing)")
    return _built("fastgen_cpu_binding", _compiler("cc"), [SOURCES / "binding.c"], (*FLAGS, f"-I{include}"))


def _compiler(name: str) -> str:
    """``$CXX`` or ``$CC``, or what the system calls its compiler."""
    wanted = os.environ.get("CXX" if name == "c++" else "CC")
    candidates = [wanted] if wanted else [name, *(("g++", "clang++") if name == "c++" else ("gcc", "clang"))]
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    raise BuildError(f"no C++ compiler is installed (looked for {', '.join(candidates)})")


def _built(name: str, compiler: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    key = _key(compiler, flags)
    directory = cache_directory() / "kernels"
    file = directory / f"{name}-{key}.so"
    if file.is_file():
        return file
    if sys.stderr.isatty():
        print(f"fastgen: building {name} for this processor, once; it takes some seconds", file=sys.stderr)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            objects = _compile(compiler, sources, flags, Path(scratch))
            made = Path(scratch) / file.name
            _run([compiler, "-shared", "-pthread", "-o", str(made), *objects])
            os.replace(made, file)  # whole or not at all, whoever else builds it now
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error.strerror or error}") from error
    return file


def _compile(compiler: str, sources: Sequence[Path], flags: Sequence[str], scratch: Path) -> list[str]:
    def one(source: Path) -> str:
        target = str(scratch / f"{source.stem}.o")
        _run([compiler, *flags, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(one, sources))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {TIMEOUT} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0].strip() if lines else f'exit code {done.returncode}'}")


def _key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".c", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    stat = os.stat(compiler)
    digest.update(repr((compiler, stat.st_size, stat.st_mtime_ns, tuple(flags))).encode())
    return digest.hexdigest()[:16]
