"""Engine processes without models, and with a tiny one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.children import faulty_plugin
from fastgen.testing.tokenizers import build_byte_tokenizer, save_tokenizer


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a scripted model with a byte tokenizer and a chat template."""
    directory = save_tokenizer(build_byte_tokenizer(), tmp_path_factory.mktemp("bytes"), eos_token="<eos>")
    return f"echo {directory}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The logits processors of `fastgen.testing.children.FAULTY` are there."""
    with faulty_plugin(tmp_path_factory.mktemp("site")):
        yield
