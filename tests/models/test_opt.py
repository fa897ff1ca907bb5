"""OPT: both layouts against transformers, and the end of its positions."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from fastgen.core.engine import Engine
from fastgen.errors import CheckpointError, ConfigError, InvalidRequestError
from fastgen.testing import ModelConformance
from fastgen.types import SamplingParams

PLAIN = {"model_type": "opt", "ffn_dim": 64}
NARROW = {**PLAIN, "do_layer_norm_before": False, "word_embed_proj_dim": 16}


class TestOPT(ModelConformance):
    entry = "fastgen.models.opt"
    hf_config = {
        "125m": PLAIN,
        "narrow_pre_norm": {**PLAIN, "word_embed_proj_dim": 48},
        "no_final_norm": {**PLAIN, "_remove_final_layer_norm": True},
        "no_biases": {**PLAIN, "enable_bias": False},
        "unscaled_norms": {**PLAIN, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    }


class TestOPTPostNorm(ModelConformance):
    entry = "fastgen.models.opt"
    hf_config = {"350m": NARROW, "untied": {**NARROW, "tie_word_embeddings": False}}
    not_applicable: ClassVar = {"wrong eps": "a norm of a sum with a branch sees no small numbers"}


def test_a13_positions_end(save):
    """A request past the table is refused when it comes; one that fits exactly is served."""
    saved = save(**PLAIN, max_position_embeddings=16)
    with Engine.load(saved.directory, device="cpu", num_blocks=8, block_size=4) as engine:
        engine.add(list(range(3, 13)), SamplingParams(max_new_tokens=6, ignore_eos=True))
        tokens = [output for _ in range(20) if engine.has_work for output in engine.step()]
        assert len(tokens) == 6
        with pytest.raises(InvalidRequestError, match="16"):
            engine.add(list(range(3, 13)), SamplingParams(max_new_tokens=7, ignore_eos=True))
    with pytest.raises(ConfigError, match="17 is more than the 16 positions"):
        Engine.load(saved.directory, device="cpu", num_blocks=8, block_size=4, max_model_len=17)


def test_a13_the_last_position_is_right(save, prompt):
    saved = save(**PLAIN, max_position_embeddings=16)
    assert (saved.logits(prompt[:16]) - saved.expected(prompt[:16])).abs().max() < 1e-4
    table = saved.tensors["model.decoder.embed_positions.weight"]
    assert len(table) == 18
    assert not torch.equal(table[-1], table[-2])


@pytest.mark.parametrize("config", [PLAIN, NARROW], ids=["125m", "350m"])
def test_a13_the_other_order_of_norms_does_not_load(save, config):
    """The final norm that only one of them has tells them apart before a weight is read."""
    saved = save(**config)
    saved.config = saved.config | {"do_layer_norm_before": not saved.config["do_layer_norm_before"]}
    with pytest.raises(CheckpointError, match=r"final_layer_norm|fills: norm\."):
        saved.logits([5])


def test_optional_keys_may_be_absent(save, prompt):
    saved = save(**PLAIN)
    keys = "architectures", "vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads"
    want = saved.logits(prompt)
    saved.config = {"model_type": "opt"} | {key: saved.config[key] for key in keys}
    tensors = saved.tensors
    positions = "model.decoder.embed_positions.weight"
    saved.tensors = tensors | {positions: torch.cat([tensors[positions], torch.zeros(2048 - 512, 32)])}
    assert torch.equal(saved.logits(prompt), want)
    assert (saved.expected(prompt) - want).abs().max() < 1e-4


def test_files_of_torch_hold_the_tied_head_too(save, prompt):
    saved = save(**NARROW)
    want = saved.logits(prompt)
    saved.tensors = saved.tensors | {"lm_head.weight": saved.tensors["model.decoder.embed_tokens.weight"]}
    assert torch.equal(saved.logits(prompt), want)


def test_a_different_head_is_used_beside_narrow_embeddings(save, prompt):
    """transformers does not tie what the file holds twice; the head it reads is as narrow."""
    saved = save(**NARROW)
    saved.tensors = saved.tensors | {"lm_head.weight": torch.randn(64, 16, generator=torch.Generator().manual_seed(1))}
    assert (saved.logits(prompt) - saved.expected(prompt)).abs().max() < 1e-4
