"""Tiny checkpoints, and the greedy answers to a few prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastgen import Engine, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))  # for the survey, which lies beside this file

from survey import save_random
from tiny_configs import tiny_config


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """A random checkpoint of a model type, made once for the same arguments."""
    made: dict[str, Path] = {}

    def make(model_type: str, **overrides: Any) -> Path:
        key = json.dumps([model_type, overrides], default=str)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type)
            save_random(tiny_config(model_type, **overrides), made[key], seed=0)
        return made[key]

    return make


@pytest.fixture
def load() -> Callable[..., Engine]:
    """An engine with this plugin pinned, whoever else claims the architecture."""

    def do(directory: Path, **options: Any) -> Engine:
        architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
        defaults = {"device": "cpu", "num_blocks": 96, "block_size": 4, "max_batch_tokens": 64}
        return Engine.load(directory, **{**defaults, "adapter": {architecture: "transformers"}, **options})

    return do


@pytest.fixture
def answer() -> Callable[..., list[list[int]]]:
    """The answers to prompts that are added together, greedy."""

    def do(engine: Engine, prompts: list[list[int]], *, tokens: int = 12) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        ids = [engine.add(prompt, params) for prompt in prompts]
        answers: dict[str, list[int]] = {one: [] for one in ids}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                if output.token_id is not None:
                    answers[output.request_id].append(output.token_id)
        return [answers[one] for one in ids]

    return do
