"""A19: end tokens from each file of a checkpoint, by a model that says one known token after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastgen
from fastgen.testing.checkpoints import tiny_llama

pytestmark = pytest.mark.slow


def counting(directory: Path) -> list[int]:
    """A tiny checkpoint that answers each of these ids with the next; the last but one is the tokenizer's end."""
    tiny_llama(directory)
    file = directory / "model.safetensors"
    end = json.loads((directory / "config.json").read_text())["eos_token_id"]
    said = [10, 11, 12, end, 13]
    tensors = {name: torch.zeros_like(t) if "_proj" in name else t for name, t in load_file(file).items()}
    table, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    table.zero_()
    head.zero_()
    tensors["model.norm.weight"].fill_(1)
    for place, (now, after) in enumerate(pairwise(said)):
        table[now, place], head[after, place] = 1, 1
    save_file(tensors, file, metadata={"format": "pt"})
    return said


@pytest.fixture
def answer(tmp_path: Path) -> Callable[..., list[int]]:
    said = counting(tmp_path)

    def answer(config: Any, generation: dict[str, Any] | None, **options: Any) -> list[int]:
        """What comes after the first id, with these end tokens in config.json and this generation_config.json."""
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": config}))
        other = tmp_path / "generation_config.json"
        other.unlink(missing_ok=True)
        if generation is not None:
            other.write_text(json.dumps(generation))
        with fastgen.pipeline(tmp_path, device="cpu", num_blocks=8, progress=False) as pipe:
            response = pipe(prompt_token_ids=[said[0]], max_new_tokens=4, skip_special_tokens=False, **options)
            return list(response.token_ids)

    return answer


def test_a19_each_file_stops_by_itself(answer: Callable[..., list[int]]) -> None:
    end = answer(None, None)[-1]
    assert answer(None, None) == [11, 12, end]  # the tokenizer's
    assert answer(12, None) == [11, 12]
    assert answer([60, 12], {}) == [11, 12]
    assert answer(None, {"eos_token_id": 11}) == [11]
    assert answer(12, {"eos_token_id": [61, 11]}) == [11]
    assert answer(11, {"eos_token_id": [61, 12]}) == [11]  # the one file does not replace the other
    assert answer(12, {"eos_token_id": 11}, ignore_eos=True) == [11, 12, end, 13]
    assert answer(12, {"eos_token_id": 11}, ignore_eos=True, stop_token_ids=[12]) == [11, 12]


def test_a19_an_override_of_one_key_keeps_the_files_ends(answer: Callable[..., list[int]]) -> None:
    """Its top_k of 1 among them, without which a temperature as high would draw other tokens."""
    file = {"eos_token_id": 11, "do_sample": True, "temperature": 0.5, "top_k": 1}
    assert answer(None, file) == [11]
    assert answer(None, file, temperature=1.5) == [11]
