"""What the families' own tests share, beside the conformance kit: tiny checkpoints whose files can be changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, load_decoder
from fastgen.testing.subject import transformers_config


class Saved:
    """A checkpoint directory, as transformers wrote it, and what may be done to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.directory / "config.json").read_text())

    @config.setter
    def config(self, raw: Mapping[str, Any]) -> None:
        (self.directory / "config.json").write_text(json.dumps(raw))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "model.safetensors")

    @tensors.setter
    def tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(tensors, self.directory / "model.safetensors", metadata={"format": "pt"})

    def logits(self, ids: list[int], chunk: int | None = None) -> torch.Tensor:
        """fastgen's, ``[tokens, vocab]``, in passes of ``chunk`` tokens or all at once."""
        driver = HandDriver(load_decoder(self.directory))
        return driver.read(driver.add(ids), chunk or len(ids))

    @torch.inference_mode()
    def expected(self, ids: list[int], attention: str = "eager") -> torch.Tensor:
        """transformers', from the files as they are now."""
        options = {"dtype": torch.float32, "attn_implementation": attention}
        model = AutoModelForCausalLM.from_pretrained(self.directory, **options)
        return model.eval()(torch.tensor([ids])).logits[0]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Saved]:
    """``save(model_type=..., ...)`` writes a tiny random checkpoint; the conformance kit's sizes fill the gaps."""

    def make(**fields: Any) -> Saved:
        return Saved(tiny_checkpoint(tmp_path, transformers_config(fields), tokenizer=False))

    return make


@pytest.fixture
def prompt() -> list[int]:
    """50 tokens."""
    return [(7 * n * n + 5 * n + 11) % 61 + 3 for n in range(50)]
