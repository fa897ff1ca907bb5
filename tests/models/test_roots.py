"""A11: the same weights under other names, and buffers that are no weights."""

from __future__ import annotations

import pytest
import torch

from fastgen.errors import CheckpointError

pytestmark = pytest.mark.slow

NAMES = {  # the root its class writes, other roots that are known, buffers found in files
    "llama": ("model.", ["", "transformer.", "model.language_model."], ["layers.0.self_attn.rotary_emb.inv_freq"]),
    "phi": ("model.", ["", "transformer."], ["layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached"]),
    "phi3": ("model.", ["", "language_model.model."], ["layers.1.self_attn.rotary_emb.inv_freq"]),
    "stablelm": ("model.", ["", "transformer."], ["layers.0.self_attn.rotary_emb.sin_cached"]),
    "opt": ("model.decoder.", ["decoder."], []),
    "falcon": ("transformer.", [""], ["h.0.self_attention.maybe_rotary.inv_freq"]),
    "gpt2": ("transformer.", [""], ["h.0.attn.bias", "h.1.attn.masked_bias"]),
    "gpt_neox": (
        "gpt_neox.",
        [""],
        ["layers.0.attention.bias", "layers.1.attention.masked_bias", "layers.0.attention.rotary_emb.inv_freq"],
    ),
}


@pytest.fixture(params=NAMES)
def family(request, save):
    root, others, buffers = NAMES[request.param]
    return save(model_type=request.param), root, others, buffers


def under(root, found, tensors):
    """Moved from one root to another; what lies beside the root (the head) stays, unless all of it moves."""
    if found == "language_model.model.":
        return {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    return {
        found + name.removeprefix(root) if name.startswith(root) else name: tensor for name, tensor in tensors.items()
    }


def test_a11_other_roots(family, prompt):
    saved, root, others, _ = family
    want, tensors = saved.logits(prompt), saved.tensors
    assert any(name.startswith(root) for name in tensors)
    for found in others:
        saved.tensors = under(root, found, tensors)
        assert torch.equal(saved.logits(prompt), want), found


def test_a11_buffers(family, prompt):
    saved, root, others, buffers = family
    want, tensors = saved.logits(prompt), saved.tensors
    tensors |= {root + name: torch.ones(3) for name in buffers}
    for found in (root, *others[:1]):
        saved.tensors = under(root, found, tensors)
        assert torch.equal(saved.logits(prompt), want), found


def test_a11_an_unknown_root_is_refused(family):
    saved, _, _, _ = family
    saved.tensors = {f"foo.{name}": tensor for name, tensor in saved.tensors.items()}
    with pytest.raises(CheckpointError, match=r"no tensor of the checkpoint has a name.*foo\.\S+, foo\.\S+.*more"):
        saved.logits([5])


def test_a11_a_buffer_of_another_name_is_refused(family):
    """The control: nothing is skipped because it looks harmless."""
    saved, root, _, _ = family
    saved.tensors = saved.tensors | {f"{root}rotary_cache": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"nothing in the model takes: \S+rotary_cache"):
        saved.logits([5])
