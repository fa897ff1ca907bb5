"""Converting a file into the user's cache: once, whole or not at all, whoever else tries."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fastgen.config import cache_directory
from fastgen.core import conversion
from fastgen.core.conversion import convert
from fastgen.core.plugin import CheckpointFormatSpec
from fastgen.errors import CheckpointError, UnsupportedModelError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "a model.Q4.toy"
    file.write_bytes(b"content")
    return file


def write_model(source: Path, target: Path, *, dtype: str | None) -> None:
    (target / "config.json").write_text(json.dumps({"from": source.read_text(), "dtype": dtype}))
    save_file({"a": torch.ones(2)}, target / "model.safetensors")


def toy(run: Callable[..., None] = write_model) -> CheckpointFormatSpec:
    return CheckpointFormatSpec("toy", (".toy",), run, plugin="toy-plugin")


def failing(error: Exception) -> CheckpointFormatSpec:
    def run(source: Path, target: Path, *, dtype: str | None) -> None:
        write_model(source, target, dtype=dtype)
        raise error

    return toy(run)


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_once(source: Path, cache: Path) -> None:
    directory, before = convert(source, toy(), version="1")
    assert not before
    assert json.loads((directory / "config.json").read_text()) == {"from": "content", "dtype": None}
    assert json.loads((directory / "fastgen.json").read_text())["source"] == str(source)
    assert convert(source, failing(RuntimeError("not again")), version="1") == (directory, True)
    assert left_over(cache) == [directory.name]
    assert directory.name.startswith("a-model-Q4-")


@pytest.mark.parametrize("change", ["content", "date", "version", "format"])
def test_again_when_something_changed(source: Path, cache: Path, change: str) -> None:
    first, _ = convert(source, toy(), version="1")
    if change == "content":
        stat = source.stat()
        source.write_bytes(b"CONTENT")
        os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "date":
        os.utime(source, (1, 1))
    spec = CheckpointFormatSpec("toy2", (".toy",), write_model) if change == "format" else toy()
    second, before = convert(source, spec, version="2" if change == "version" else "1")
    assert not before
    assert second != first
    assert left_over(cache) == [second.name]  # the older one made room


def test_what_came_from_another_path_stays(source: Path, cache: Path) -> None:
    first, _ = convert(source, toy(), version="1")
    other = source.with_name("other.toy")
    other.write_bytes(b"other")
    second, _ = convert(other, toy(), version="1")
    third, _ = convert(other, toy(), version="2")
    assert left_over(cache) == sorted([first.name, third.name])
    assert second.name not in left_over(cache)


def test_the_path_may_be_spelt_differently(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, toy(), version="1")
    monkeypatch.chdir(tmp_path)
    second, _ = convert(Path(f"../{tmp_path.name}/{source.name}"), toy(), version="2")
    assert left_over(cache) == [second.name]


def test_a_failed_conversion_leaves_the_older_one(source: Path, cache: Path) -> None:
    first, _ = convert(source, toy(), version="1")
    with pytest.raises(CheckpointError):
        convert(source, failing(ValueError("bad")), version="2")
    assert left_over(cache) == [first.name]
    assert convert(source, toy(), version="1") == (first, True)


@pytest.mark.parametrize("note", [None, "{", "[]", "{}"])
def test_folders_of_unknown_origin_stay(source: Path, cache: Path, note: str | None) -> None:
    (cache / "mine").mkdir(parents=True)
    if note is not None:
        (cache / "mine" / "fastgen.json").write_text(note)
    directory, _ = convert(source, toy(), version="1")
    assert left_over(cache) == sorted([directory.name, "mine"])


def test_what_another_process_converts_is_left_alone(source: Path, cache: Path) -> None:
    """An older plugin works on the same file while a newer one is done with it; then the older one is done."""
    context = multiprocessing.get_context("fork")
    go, begun = context.Event(), context.Event()

    def run(source: Path, target: Path, *, dtype: str | None) -> None:
        write_model(source, target, dtype=dtype)
        begun.set()
        assert go.wait(60)

    child = context.Process(target=convert, args=(source, toy(run)), kwargs={"version": "1"})
    child.start()
    assert begun.wait(60)
    newer, _ = convert(source, toy(), version="2")
    assert {Path(name).suffix for name in left_over(cache)} == {"", ".lock", ".partial"}
    assert newer.is_dir()
    go.set()
    child.join()
    assert child.exitcode == 0
    assert convert(source, failing(RuntimeError("not again")), version="1")[1]


def test_files_in_use_stay_readable(source: Path) -> None:
    first, _ = convert(source, toy(), version="1")
    with safe_open(first / "model.safetensors", "pt") as file:
        convert(source, toy(), version="2")
        assert not first.exists()
        assert torch.equal(file.get_tensor("a"), torch.ones(2))


def test_a_copy_with_its_date_is_the_same_file(source: Path, tmp_path: Path) -> None:
    first, _ = convert(source, toy(), version="1")
    (tmp_path / "elsewhere").mkdir()
    copy = Path(shutil.copy2(source, tmp_path / "elsewhere"))
    assert convert(copy, toy(), version="1") == (first, True)


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (UnsupportedModelError("a bird"), UnsupportedModelError, "^a bird$"),
        (ValueError("bad magic"), CheckpointError, r"'toy-plugin' could not convert .*bad magic"),
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "no space left.*FASTGEN_CACHE"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), CheckpointError, "no space left"),
        (PermissionError(errno.EACCES, "Permission denied"), CheckpointError, "Permission denied"),
    ],
)
def test_failures_leave_nothing(
    source: Path, cache: Path, error: Exception, raised: type[Exception], match: str
) -> None:
    with pytest.raises(raised, match=match):
        convert(source, failing(error), version="1")
    assert left_over(cache) == []
    assert convert(source, toy(), version="1")[1] is False


def test_interrupted_by_the_user(source: Path, cache: Path) -> None:
    def run(source: Path, target: Path, *, dtype: str | None) -> None:
        (target / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, toy(run), version="1")
    assert left_over(cache) == []


@pytest.mark.parametrize(("lost", "match"), [("config.json", "wrote no config.json"), ("model.safetensors", "weights")])
def test_a_converter_that_forgets_something(source: Path, cache: Path, lost: str, match: str) -> None:
    def run(source: Path, target: Path, *, dtype: str | None) -> None:
        write_model(source, target, dtype=dtype)
        (target / lost).unlink()

    with pytest.raises(CheckpointError, match=f"'toy-plugin' converted .* wrongly.*{match}"):
        convert(source, toy(run), version="1")
    assert left_over(cache) == []


def test_no_room_for_the_file_itself(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 8, 2))
    with pytest.raises(CheckpointError, match="no space left"):
        convert(source, failing(RuntimeError("never called")), version="1")


def test_a_cache_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot convert .* into the cache"):
        convert(source, toy(), version="1")


def slowly(source: Path, target: Path, *, dtype: str | None) -> None:
    with (source.parent / "runs").open("a") as runs:
        runs.write("x")
    (target / "half").write_text("")
    time.sleep(0.3)
    write_model(source, target, dtype=dtype)


def convert_in_child(source: Path, results: Any) -> None:
    directory, before = convert(source, toy(slowly), version="1")
    results.put((str(directory), before, (directory / "model.safetensors").exists()))


def die_in_child(source: Path) -> None:
    def run(source: Path, target: Path, *, dtype: str | None) -> None:
        (target / "half").write_text("")
        os._exit(1)

    convert(source, toy(run), version="1")


def test_concurrent_converters(source: Path, cache: Path) -> None:
    """One works, the others wait for it; all see the whole result."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=convert_in_child, args=(source, results)) for _ in range(4)]
    for child in children:
        child.start()
    answers = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert (source.parent / "runs").read_text() == "x"
    assert len({directory for directory, _, _ in answers}) == 1
    assert sorted(before for _, before, _ in answers) == [False, True, True, True]
    assert all(whole for _, _, whole in answers)
    assert [name for name in left_over(cache) if "." in name] == []


@pytest.mark.parametrize("other_first", [False, True])
def test_leftovers_of_a_process_that_died(source: Path, cache: Path, other_first: bool) -> None:
    """The next conversion, of this file or another, takes them away."""
    child = multiprocessing.get_context("fork").Process(target=die_in_child, args=(source,))
    child.start()
    child.join()
    assert [Path(name).suffix for name in left_over(cache)] == [".lock", ".partial"]
    other = source.with_name("other.toy")
    other.write_bytes(b"other")
    for wanted in (other, source) if other_first else (source,):
        directory, before = convert(wanted, toy(), version="1")
        assert not before
        assert [name for name in left_over(cache) if "." in name] == []
    assert not (directory / "half").exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", "~/own")
    assert cache_directory() == Path.home() / "own"
    monkeypatch.delenv("FASTGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "fastgen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "fastgen"
