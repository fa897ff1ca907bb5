"""A tiny model, and adapters for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastgen.testing.checkpoints import tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 64 ids, untied."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny", tokenizer=False, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def reference(model: Path) -> PreTrainedModel:
    """The same model in transformers. Not to be changed."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def sizes(reference: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """``(out, in)`` of every linear module, by its name."""
    linear = {name: m for name, m in reference.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: (module.out_features, module.in_features) for name, module in linear.items()}
