"""Files of other formats, converted once by a plugin into Hugging Face directories in the user's cache. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from fastgen.config import cache_directory
from fastgen.core.cache_entries import PARTIAL, is_full, locked, sync, tidy
from fastgen.core.json_file import read_json_object
from fastgen.core.plugin import CheckpointFormatSpec
from fastgen.core.weight_files import choose_files
from fastgen.errors import CheckpointError, FastgenError

__all__ = ["convert"]

NOTE = "fastgen.json"
_SAMPLE_BYTES = 2**20


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
        with locked(target):
            if target.is_dir():  # another process was faster
                return target, True
            _convert(source, spec, target, version)
        with suppress(OSError):  # room that cannot be made free is no reason to fail
            tidy(cache, lambda entry: entry != target and _source_of(entry) == _path(source))
    except OSError as error:
        if is_full(error):
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


def _path(source: Path) -> str:
    return os.path.abspath(source)


def _source_of(entry: Path) -> str | None:
    """The path that a converted directory was made from."""
    try:
        return str(read_json_object(entry / NOTE)["source"])
    except (FastgenError, KeyError):
        return None


def _convert(source: Path, spec: CheckpointFormatSpec, target: Path, version: str) -> None:
    scratch = target.with_suffix(PARTIAL)
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
        sync(*scratch.rglob("*"), scratch)
        scratch.rename(target)
    except FastgenError:
        raise
    except Exception as error:
        if is_full(error):
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


def _disk_full(source: Path, cache: Path) -> CheckpointError:
    size = source.stat().st_size / 1e9
    return CheckpointError(
        f"no space left in {cache} to convert {source.name} ({size:.1f} GB, and the result may be several times "
        "larger); free some, or set FASTGEN_CACHE to another disk"
    )
