"""The `fastgen` command in this process and in one of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fastgen.testing.distributions import FakeSite

Run = Callable[..., subprocess.CompletedProcess[str]]

# What `fastgen.cli:main` installs as the console script.
MAIN = "import sys; sys.argv[0] = 'fastgen'; from fastgen.cli import main; main()"


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    directory = tmp_path / "site"
    directory.mkdir()
    return FakeSite(directory)


@pytest.fixture
def fastgen(site: FakeSite) -> Run:
    """``fastgen ARGUMENTS`` in a process that sees the fake site."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return site.run("-c", MAIN, *arguments, **environment)

    return run
