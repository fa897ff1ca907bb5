"""The files and commands that a page of the documentation prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastgen.testing.distributions import FakeSite

_CAPTIONED = re.compile(r"^`([\w./-]+)`[^\n`]*:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Console:
    """One command (without its prompt), and the lines that the page prints below it."""

    command: str
    output: tuple[str, ...]


class Page:
    """A page of `docs/`. A code block whose caption is a line like ```` `package/module.py`: ```` is that file; in
    ``console`` blocks a line after ``$`` is a command and what follows is its output."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")

    def versions(self, file: str) -> list[str]:
        """Every version of one file that the page prints, in order."""
        found = [source for name, source in _CAPTIONED.findall(self.text) if name == file]
        assert found, f"the page prints no {file}"
        return found

    def file(self, file: str) -> str:
        """The one version of a file."""
        (source,) = self.versions(file)
        return source

    @property
    def files(self) -> list[str]:
        return [name for name, _ in _CAPTIONED.findall(self.text)]

    @property
    def consoles(self) -> list[Console]:
        found = []
        for block in _CONSOLE.findall(self.text):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append(Console(command, tuple(line for line in output.splitlines() if line.strip())))
        return found


@pytest.fixture
def page(repository: Path) -> Callable[[str], Page]:
    return lambda name: Page(repository / "docs" / name)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A fake site-packages that this process and its children see."""
    for variable in ("FASTGEN_PLUGINS", "FASTGEN_DISABLE_PLUGINS", "FASTGEN_PLUGINS_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    yield FakeSite(directory)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(directory)):
            del sys.modules[name]
