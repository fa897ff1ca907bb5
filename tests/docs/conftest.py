"""The files and commands that a page of the documentation prints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_BLOCK = re.compile(r"^(?:(In )?`([\w./-]+)`[^\n`]*:\n\n)?```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class File:
    """A file that the page prints whole."""

    name: str
    source: str


@dataclass(frozen=True)
class Change:
    """Lines to put in the place of others, once, in a file printed before."""

    name: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        assert source.count(self.old) == 1, f"{self.name} has the changed lines {source.count(self.old)} times"
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Command:
    """A command (without its prompt), and what the page prints below it."""

    line: str
    output: str

    def assert_printed(self, real: str) -> None:
        """Every piece of the printed output between dots is in the real one, in this order, whatever the spacing."""
        rest = _spaced(real)
        for piece in map(_spaced, self.output.split("...")):
            assert piece in rest, f"$ {self.line}\nprints nothing like\n{piece}\n(in this order) but\n{real}"
            rest = rest[rest.index(piece) + len(piece) :]


def _spaced(text: str) -> str:
    return " ".join(text.split())


class Page:
    """A page of `docs/`. A code block after a line ```` `package/module.py`: ```` is that file; a ``diff`` after a line
    ```` In `package/module.py`: ```` changes it; in ``console`` blocks a line after ``$`` is a command, and what
    follows is its output."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")

    @property
    def steps(self) -> Iterator[File | Change | Command]:
        """In the page's order."""
        for inside, name, language, content in _BLOCK.findall(self.text):
            if language == "console":
                for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                    line, _, output = part.partition("\n")
                    yield Command(line, output)
            elif inside:
                lines = [(line[:1], line[1:]) for line in content.splitlines(keepends=True)]
                old, new = ("".join(text for sign, text in lines if sign in f" {which}") for which in "-+")
                yield Change(name, old, new)
            elif name:
                yield File(name, content)

    @property
    def files(self) -> dict[str, str]:
        """``{name: source}`` of the files that the page prints."""
        return {step.name: step.source for step in self.steps if isinstance(step, File)}


@pytest.fixture
def page(repository: Path) -> Callable[[str], Page]:
    return lambda name: Page(repository / "docs" / name)


@pytest.fixture
def up_to_date(repository: Path) -> Callable[[str, str, str], None]:
    """``up_to_date(page, name, current)``: what the page prints between the comments ``name: ...`` and ``end`` is
    ``current``. With WRITE_DOCS=1 in the environment it is written there."""

    def check(page: str, name: str, current: str) -> None:
        path = repository / "docs" / page
        text = path.read_text(encoding="utf-8")
        found = re.search(rf"<!-- {name}: [^>]*-->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
        assert found is not None, f"{page} has no place for {name}"
        if os.environ.get("WRITE_DOCS"):
            path.write_text(text[: found.start(1)] + current + text[found.end(1) :], encoding="utf-8")
            return
        assert found[1] == current, f"{page} is out of date: run `WRITE_DOCS=1 pytest tests/docs`, or write\n{current}"

    return check
