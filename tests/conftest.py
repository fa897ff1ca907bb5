"""Fixtures every folder may use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.testing.distributions import FakeSite

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The top folder of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The demo model as a directory in Hugging Face layout; without it the tests that ask for it fail, saying why."""
    from fastgen.testing.demo_model import model_directory

    return model_directory(ROOT / ".cache")


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
