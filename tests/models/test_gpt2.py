"""GPT-2: matrices stored the other way round, and its files as they were published."""

from __future__ import annotations

import pytest
import torch

from fastgen.errors import ConfigError, UnsupportedModelError
from fastgen.testing import ModelConformance


class TestGPT2(ModelConformance):
    entry = "fastgen.models.gpt2"
    hf_config = {
        "plain": {"model_type": "gpt2"},
        "scaled_by_layer": {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True, "n_inner": 96},
        "unscaled": {"model_type": "gpt2", "scale_attn_weights": False, "activation_function": "gelu"},
        "untied": {"model_type": "gpt2", "tie_word_embeddings": False, "n_layer": 3},
    }


def test_a11_the_published_file(save, prompt):
    """No root, masks beside the weights, no head: as the first GPT-2 lies on the hub."""
    saved = save(model_type="gpt2", n_positions=64)
    want = saved.logits(prompt)
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 64, 64).tril() for n in range(2)}
    masks |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    saved.tensors = {name.removeprefix("transformer."): t for name, t in saved.tensors.items()} | masks
    assert "wte.weight" in saved.tensors
    assert torch.equal(saved.logits(prompt), want)
    assert (saved.expected(prompt) - want).abs().max() < 1e-4


def test_n_ctx_may_say_something_else(save):
    """transformers does not read it; ``n_positions`` is the size of the table."""
    saved = save(model_type="gpt2", n_positions=64)
    saved.config = saved.config | {"n_ctx": 32}
    saved.logits([5])
    saved.config = saved.config | {"max_position_embeddings": 32}
    with pytest.raises(ConfigError, match="n_positions = 64 and max_position_embeddings = 32"):
        saved.logits([5])


def test_cross_attention_is_refused(save):
    saved = save(model_type="gpt2")
    saved.config = saved.config | {"add_cross_attention": True}
    with pytest.raises(UnsupportedModelError, match="add_cross_attention = True"):
        saved.logits([5])
