"""Files of other formats, converted once by a plugin into Hugging Face directories in the user's cache. Torch-free."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fastgen.config import cache_directory
from fastgen.core.json_file import read_json_object
from fastgen.core.plugin import CheckpointFormatSpec
from fastgen.core.weight_files import choose_files
from fastgen.errors import CheckpointError, FastgenError

__all__ = ["convert"]

NOTE = "fastgen.json"
_LOCK, _PARTIAL = ".lock", ".partial"
_SAMPLE_BYTES = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)


def convert(source: Path, spec: CheckpointFormatSpec, *, version: str) -> tuple[Path, bool]:
    """The directory that ``source`` was converted to; converts it if that has not been done.

    A converted directory belongs to the file's content (its size, date, first and last bytes), the converter and its
    ``version``. It appears whole or not at all; of several processes that want it, one converts and the others wait.
    Once it is there, what was converted from the same path before is deleted (files that are open stay readable).

    Returns:
        The directory, and whether it was there before.

    Raises:
        CheckpointError: the file or the cache cannot be used, the disk is full, or the converter failed.
        FastgenError: whatever the converter says about the file.
    """
    cache = cache_directory() / "converted"
    try:
        target = cache / _key(source, spec.name, version)
        if target.is_dir():
            return target, True
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(_LOCK)):
            if target.is_dir():  # another process was faster
                return target, True
            _convert(source, spec, target, version)
        with suppress(OSError):  # room that cannot be made free is no reason to fail
            _tidy(cache, source, target)
    except OSError as error:
        if _is_full(error):
            raise _disk_full(source, cache) from None
        raise CheckpointError(f"cannot convert {source} into the cache {cache}: {error}") from error
    return target, False


def _key(source: Path, name: str, version: str) -> str:
    """A directory name for the file's content and the converter; a copy of the file with its date gives the same."""
    digest = hashlib.sha256()
    with source.open("rb") as file:
        stat = os.fstat(file.fileno())
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, stat.st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    digest.update(json.dumps([stat.st_size, stat.st_mtime_ns, name, version]).encode())
    stem = re.sub(r"[^\w-]+", "-", source.stem)[:64].strip("-")
    return f"{stem or 'model'}-{digest.hexdigest()[:20]}"


@contextmanager
def _lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Held by one process at a time, and let go when it dies, whatever way; the file is gone afterwards.

    Yields:
        Whether it is held: always, if ``wait``.
    """
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


def _tidy(cache: Path, source: Path, target: Path) -> None:
    """Delete what ``target`` supersedes, and what processes that died left behind. What is being converted stays."""
    for entry in list(cache.iterdir()):
        superseded = entry != target and _source_of(entry) == _path(source)
        if superseded or entry.suffix in (_PARTIAL, _LOCK):
            with _lock(entry.with_suffix(_LOCK), wait=False) as held:
                if held and entry.suffix != _LOCK:
                    _delete(entry)


def _delete(entry: Path) -> None:
    """Never seen in part under its own name. An entry that cannot be deleted takes room, and no more."""
    partial = entry.with_suffix(_PARTIAL)
    with suppress(OSError):
        if entry != partial:
            shutil.rmtree(partial, ignore_errors=True)
            entry.rename(partial)
        shutil.rmtree(partial)


def _path(source: Path) -> str:
    return os.path.abspath(source)


def _source_of(entry: Path) -> str | None:
    """The path that a converted directory was made from."""
    try:
        return str(read_json_object(entry / NOTE)["source"])
    except (FastgenError, KeyError):
        return None


def _convert(source: Path, spec: CheckpointFormatSpec, target: Path, version: str) -> None:
    scratch = target.with_suffix(_PARTIAL)
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that died; the lock says that nobody works on it
    if shutil.disk_usage(target.parent).free < source.stat().st_size:
        raise _disk_full(source, target.parent)
    run = spec.load()
    if sys.stderr.isatty():
        print(f"Converting {source.name} with {spec.name} (once; kept in {target})", file=sys.stderr, flush=True)
    scratch.mkdir()
    try:
        run(source, scratch, dtype=None)
        _check(scratch, source, spec)
        note = {"source": _path(source), "format": spec.name, "plugin": spec.plugin, "version": version}
        (scratch / NOTE).write_text(json.dumps(note, indent=2))
        _sync(scratch)
        scratch.rename(target)
    except FastgenError:
        raise
    except Exception as error:
        if _is_full(error):
            raise _disk_full(source, target.parent) from None
        if isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"the plugin {spec.plugin!r} could not convert {source} ({type(error).__name__}: {error}); the file may be "
            "damaged, or the plugin too old for it"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check(directory: Path, source: Path, spec: CheckpointFormatSpec) -> None:
    by = f"the plugin {spec.plugin!r} converted {source} wrongly"
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{by}: it wrote no config.json")
    try:
        choose_files(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{by}: {error}") from None


def _sync(directory: Path) -> None:
    """Onto the disk, so that a power cut after the rename leaves no empty files under the final name."""
    for path in (*directory.rglob("*"), directory):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _is_full(error: BaseException) -> bool:
    """Whether the disk was full, whichever library says so (safetensors wraps the system's error in its own)."""
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in _FULL) or "No space left on device" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _disk_full(source: Path, cache: Path) -> CheckpointError:
    size = source.stat().st_size / 1e9
    return CheckpointError(
        f"no space left in {cache} to convert {source.name} ({size:.1f} GB, and the result may be several times "
        "larger); free some, or set FASTGEN_CACHE to another disk"
    )
