"""Building and loading the library, and what happens where that cannot be done."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import fastgen
from fastgen.errors import ConfigError
from fastgen.kernels.cpu import build, compiler, isa
from fastgen.kernels.cpu import library as loaded
from fastgen.kernels.cpu.build import BuildError, binding_file, library_file
from fastgen.kernels.cpu.library import Library, library, unavailable
from fastgen.kernels.cpu.linear import linear
from fastgen.testing.checkpoints import tiny_llama

TINY = 'extern "C" long fg_answer(const long* a) { return a[0]; }\nextern "C" void fg_set_threads(long) {}\n'


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile at once, and a cache of their own."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "answer.cpp").write_text(TINY)
    (sources / "binding.c").write_text((build.SOURCES / "binding.c").read_text())
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "cache"))
    return sources


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What was found out about the library is forgotten before and after."""
    unavailable.cache_clear()
    library.cache_clear()
    yield
    unavailable.cache_clear()
    library.cache_clear()


def test_built_once_for_its_sources(elsewhere: Path) -> None:
    first = library_file(isa.best_level())
    made = first.stat().st_mtime_ns
    assert library_file(isa.best_level()) == first
    assert first.stat().st_mtime_ns == made
    (elsewhere / "answer.cpp").write_text(TINY + "// changed\n")
    assert library_file(isa.best_level()) != first
    assert not [path for path in first.parent.iterdir() if path.suffix != ".so"]  # nothing else is left


def test_several_at_once_build_one(elsewhere: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(lambda _: library_file(isa.best_level()), range(4)))
    assert len(files) == 1
    assert Library(isa.best_level()).op("fg_answer")


def test_no_compiler(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler is installed \(looked for no-such-compiler\)"):
        library_file(isa.best_level())


def test_a_compiler_that_fails(elsewhere: Path) -> None:
    (elsewhere / "answer.cpp").write_text("this is not C++")
    with pytest.raises(BuildError, match=r"failed: .*answer.cpp:1:1: error"):
        library_file(isa.best_level())


def test_a_cache_that_cannot_be_written(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="file/kernels cannot be written: Not a directory"):
        library_file(isa.best_level())


def test_without_pythons_headers(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match=r"Python's headers are not installed"):
        binding_file()
    assert Library(isa.best_level()).call is loaded._call_by_ctypes


def test_ctypes_and_the_binding_pass_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(3, 40), torch.randn(8, 40), torch.randn(8)
    quick = linear(x, weight, bias)
    monkeypatch.setattr(library(), "call", loaded._call_by_ctypes)
    assert torch.equal(linear(x, weight, bias), quick)


def test_arguments_of_calls(elsewhere: Path, tmp_path: Path) -> None:
    source = '#include <cstring>\nextern "C" void fg_copy(const long* a) { std::memcpy((void*)a[0], a, 32); }\n'
    (elsewhere / "answer.cpp").write_text(source)
    lib = Library(isa.best_level())
    for call in (lib.call, loaded._call_by_ctypes):
        out = torch.zeros(4, dtype=torch.int64)
        call(lib.op("fg_copy"), out.data_ptr(), -5, 0.1, 2**62)
        assert out.tolist() == [out.data_ptr(), -5, struct.unpack("q", struct.pack("d", 0.1))[0], 2**62]
    with pytest.raises(OverflowError):
        lib.call(lib.op("fg_copy"), 2**64)
    with pytest.raises(TypeError):
        lib.call(lib.op("fg_copy"), "x")
    with pytest.raises(AttributeError):
        lib.op("fg_no_such_operation")


def test_calls_written_down_and_made_again() -> None:
    lib = library()
    x, weight, out = torch.randn(2, 16), torch.randn(4, 16), torch.zeros(2, 4)

    def run() -> None:
        lib.call(lib.op("fg_linear"), x.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), 2, 16, 4, x.stride(0), 4, 0)

    lib.binding.record()
    with pytest.raises(RuntimeError, match="recording already"):
        lib.binding.record()
    run()
    program = lib.binding.stop()
    with pytest.raises(RuntimeError, match="not recording"):
        lib.binding.stop()
    x.mul_(2)
    lib.binding.replay(program)
    torch.testing.assert_close(out, x @ weight.T)
    with pytest.raises(ValueError, match="PyCapsule"):
        lib.binding.replay(x)


@pytest.mark.usefixtures("forgetful")
def test_torch_serves_where_there_is_no_library(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (elsewhere / "answer.cpp").write_text("this is not C++")
    model = tiny_llama(tmp_path / "tiny", tokenizer=False)
    for _ in range(2):
        with fastgen.Engine.load(model, device="cpu", num_blocks=8) as engine:
            assert {choice.chosen for choice in engine.blueprint.kernels.choices} == {"torch"}
    assert len([line for line in caplog.messages if "cannot be built" in line]) == 1  # said once


@pytest.mark.usefixtures("forgetful")
def test_levels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CPU_LEVEL", "x86-64-v9")
    with pytest.raises(ConfigError, match="x86-64-v9 is unknown: choose from x86-64-v4-vnni, "):
        unavailable()
    monkeypatch.setattr(isa, "_features", lambda: frozenset({"sse2"}))
    monkeypatch.setenv("FASTGEN_CPU_LEVEL", "x86-64-v3")
    with pytest.raises(ConfigError, match=r"this processor has no abm, avx, .* its best level is generic"):
        unavailable()
    monkeypatch.setenv("FASTGEN_CPU_KERNELS", "0")
    assert unavailable() == "turned off by FASTGEN_CPU_KERNELS=0"


def test_levels_by_features(monkeypatch: pytest.MonkeyPatch) -> None:
    features: frozenset[str] = frozenset()
    monkeypatch.setattr(isa, "_features", lambda: features)
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    for level in reversed(isa.LEVELS):
        features = level.needs
        assert isa.best_level() is level
    monkeypatch.setattr(isa.platform, "machine", lambda: "aarch64")
    assert isa.best_level().name == "generic"


def test_a_forked_child_makes_its_own_threads() -> None:
    code = """
        import os, torch
        from fastgen.kernels.cpu.library import library
        from fastgen.kernels.cpu.linear import linear
        library().set_threads(3)
        x, weight = torch.randn(1, 4096), torch.randn(512, 4096)
        wanted = linear(x, weight, None)
        child = os.fork()
        if not child:
            os._exit(0 if torch.equal(linear(x, weight, None), wanted) else 1)
        assert torch.equal(linear(x, weight, None), wanted)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done.stderr


def test_prebuilt_files_of_no_use_are_compiled(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a wheel was made on a newer system."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    (tmp_path / "prebuilt").mkdir()
    for name in (build.LIBRARY.format(isa.best_level().name), build.BINDING):
        (tmp_path / "prebuilt" / name).write_bytes(b"not a library")
    with caplog.at_level("INFO", "fastgen"):
        lib = Library(isa.best_level())
    assert lib.op("fg_answer")
    assert lib.binding is not None
    assert sum("came with the package" in record.message for record in caplog.records) == 2
