"""GPT-NeoX and Pythia."""

from __future__ import annotations

import pytest
import torch

from fastgen.testing import ModelConformance

PYTHIA = {"model_type": "gpt_neox", "hidden_size": 64}


class TestGPTNeoX(ModelConformance):
    entry = "fastgen.models.gptneox"
    hf_config = {
        "pythia": PYTHIA,  # a quarter of each head turns
        "in_sequence": {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0},
        "no_attention_bias": {**PYTHIA, "attention_bias": False, "rotary_emb_base": 500, "hidden_act": "gelu_fast"},
    }


def test_a11_the_published_file(save, prompt):
    """The head is called ``embed_out``, and masks and frequencies lie beside the weights."""
    saved = save(**PYTHIA)
    want = saved.logits(prompt)
    tensors = saved.tensors
    head = next(name for name in tensors if name in ("lm_head.weight", "embed_out.weight"))
    layers = [f"gpt_neox.layers.{n}.attention." for n in range(2)]
    buffers = {f"{layer}bias": torch.ones(1, 1, 64, 64).tril() for layer in layers}
    buffers |= {f"{layer}masked_bias": torch.tensor(-1e9) for layer in layers}
    buffers |= {f"{layer}rotary_emb.inv_freq": torch.ones(2) for layer in layers}
    weight = tensors.pop(head)
    for name in ("embed_out.weight", "lm_head.weight"):
        saved.tensors = tensors | buffers | {name: weight}
        assert torch.equal(saved.logits(prompt), want)
        assert (saved.expected(prompt) - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    "keys",
    [
        {"rotary_pct": 0.5, "rotary_emb_base": 123},
        {"rotary_pct": 0.5, "partial_rotary_factor": 0.25, "rotary_emb_base": 123, "rope_theta": 10000},
        {"partial_rotary_factor": 0.5, "rope_theta": 123},
        {},
    ],
    ids=["transformers 4", "both names", "names of other families", "neither"],
)
def test_which_name_of_the_rope_counts(save, prompt, keys):
    """Only its own names, as in transformers; a quarter and 10000 where they are absent."""
    saved = save(**PYTHIA)
    saved.config = {key: value for key, value in saved.config.items() if key != "rope_parameters"} | keys
    assert (saved.logits(prompt) - saved.expected(prompt)).abs().max() < 1e-4
