"""The compiler on this machine, and what it makes of the library's sources. Knows nothing else of fastgen, so that the
wheel's build hook can use it where nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fastgen.errors import FastgenError

__all__ = ["FLAGS", "BuildError", "binding_flags", "compile_to", "compiler"]

FLAGS = ("-O3", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
CXX_FLAGS = ("-std=c++17", *FLAGS)
TIMEOUT = 300
"""Seconds that one file may take to compile."""


class BuildError(FastgenError):
    """The library cannot be built here; torch's operations serve instead."""


def compiler(name: str) -> str:
    """``$CXX`` for ``"c++"``, ``$CC`` for ``"cc"``, or what the system calls its compiler.

    Raises:
        BuildError: none is installed.
    """
    wanted = os.environ.get("CXX" if name == "c++" else "CC")
    candidates = [wanted] if wanted else [name, *(("g++", "clang++") if name == "c++" else ("gcc", "clang"))]
    for candidate in candidates:
        if found := shutil.which(candidate):
            return found
    raise BuildError(f"no C++ compiler is installed (looked for {', '.join(candidates)})")


def binding_flags() -> tuple[str, ...]:
    """Raises BuildError where Python's headers are not installed."""
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        raise BuildError(f"Python's headers are not installed ({include}/Python.h is missing)")
    return (*FLAGS, f"-I{include}")


def compile_to(
    target: Path, program: str, sources: Sequence[Path], flags: Sequence[str], *, link: Sequence[str] = ()
) -> None:
    """``sources`` as one shared library; objects are left beside ``target``, in a directory that the caller removes.

    Raises:
        BuildError: the compiler fails or takes too long.
    """

    def one(source: Path) -> str:
        made = str(target.parent / f"{source.stem}.o")
        _run([program, *flags, "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(one, sources))
    _run([program, "-shared", "-pthread", "-o", str(target), *objects, *link])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {TIMEOUT} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0].strip() if lines else f'exit code {done.returncode}'}")
