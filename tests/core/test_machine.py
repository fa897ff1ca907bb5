"""The processor's name."""

from __future__ import annotations

from pathlib import Path

from fastgen.core import machine
from fastgen.core.machine import processor


def test_as_linux_names_it(monkeypatch):
    text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: avx\n\nmodel name\t: Some CPU @ 2 GHz\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert processor() == "Some CPU @ 2 GHz"


def test_a_processor_without_a_name_is_told_by_its_numbers(monkeypatch):
    core = "processor\t: {}\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: {}\n\n"
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: core.format(0, "0xd0c") + core.format(1, "0xd0c"))
    assert processor() == "aarch64 implementer 0x41 part 0xd0c"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: core.format(0, "0xd05") + core.format(1, "0xd0a"))
    assert processor() == "aarch64 implementer 0x41 part 0xd05 and implementer 0x41 part 0xd0a"


def test_elsewhere_as_the_system_does(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "riscv64")
    assert processor() == "riscv64"
