"""The processor's name."""

from __future__ import annotations

from pathlib import Path

from fastgen.core import machine
from fastgen.core.machine import processor


def test_as_linux_names_it(monkeypatch):
    text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: avx\n\nmodel name\t: Some CPU @ 2 GHz\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert processor() == "Some CPU @ 2 GHz"


def test_elsewhere_as_the_system_does(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "riscv64")
    assert processor() == "riscv64"
