"""Entries of the user's cache: made by one process at a time, seen whole or not at all, tidied once superseded.

Torch-free."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["LOCK", "PARTIAL", "is_full", "locked", "sync", "tidy"]

LOCK, PARTIAL = ".lock", ".partial"
"""Suffixes beside an entry: of the file that locks it, and of what will become it."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def locked(entry: Path, *, wait: bool = True) -> Iterator[bool]:
    """The lock of an entry: held by one process at a time, and let go when it dies, whatever way; its file is gone
    afterwards.

    Yields:
        Whether it is held: always, if ``wait``.
    """
    path = entry.with_suffix(LOCK)
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if not _is_open(file, path):  # its holder deleted it meanwhile: a lock that nobody else would meet
                continue
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)
            return


def _is_open(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def tidy(cache: Path, superseded: Callable[[Path], bool]) -> None:
    """Delete what is superseded, and what processes that died left behind. What is being made stays."""
    for entry in list(cache.iterdir()):
        if entry.suffix in (PARTIAL, LOCK) or superseded(entry):
            with locked(entry, wait=False) as held:
                if held and entry.suffix != LOCK:
                    _delete(entry)


def _delete(entry: Path) -> None:
    """A directory is never seen in part under its own name. An entry that cannot be deleted takes room, and no more."""
    partial = entry.with_suffix(PARTIAL)
    with suppress(OSError):
        if not entry.is_dir():
            entry.unlink()
            return
        if entry != partial:
            shutil.rmtree(partial, ignore_errors=True)
            entry.rename(partial)
        shutil.rmtree(partial)


def sync(*paths: Path) -> None:
    """Onto the disk, so that a power cut after a rename leaves no empty files under the final name."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_full(error: BaseException) -> bool:
    """Whether the disk was full, whichever library says so (safetensors wraps the system's error in its own)."""
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in _FULL) or "No space left on device" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
