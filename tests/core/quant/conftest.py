"""Tiny checkpoints whose weights are kept in every way that quantisation meets, and a cache of the tests' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from fastgen.kernels.cpu.library import unavailable
from fastgen.testing.checkpoints import TINY, tiny_checkpoint

HIDDEN, WIDTH = 96, 160  # neither is a multiple of a group
SIZES = {**TINY, "hidden_size": HIDDEN, "intermediate_size": WIDTH}
MIXTURE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}

FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "gpt2: tied, transposed, biases": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "opt: tied through a projection": lambda: transformers.OPTConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        word_embed_proj_dim=64,
        ffn_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=1,
    ),
    "phi3: fused": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
    "gptneox: fused by head": lambda: transformers.GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 4}),
    "mixtral: a router": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=40, num_experts_per_tok=2),
    "qwen2 moe: a shared expert": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **MIXTURE, num_experts=4, shared_expert_intermediate_size=64
    ),
}
"""Mixtral's has so many experts that only its mark keeps the router out."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family by its name above, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp("quantised") / "model"
            made[family] = tiny_checkpoint(directory, FAMILIES[family](), tokenizer=False)
        return made[family]

    return make


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each of them in turn."""
    return str(request.param)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, empty and for this test alone."""
    unavailable()  # the library is built into the usual cache, if it must be
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"
