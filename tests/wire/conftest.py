"""A tiny model, and a plugin whose logits processors misbehave, for this process and its children."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.children import faulty_plugin


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The logits processors of `FAULTY` are there."""
    with faulty_plugin(tmp_path_factory.mktemp("site")):
        yield
