"""Fixtures every folder may use."""

from __future__ import annotations

from pathlib import Path

import pytest

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
