"""What transformers' GGUF loader leaves out and a model's answers depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgen.api import UnsupportedModelError
from fastgen_gguf.header import Header

__all__ = ["complete_config", "end_token_ids", "split_digits", "unused_tensors"]

ROPE_FACTORS = "rope_freqs.weight"

# Vocabularies whose merges were learned with every digit on its own, by `tokenizer.ggml.pre`; then as GPT-2.
_SPLIT_DIGITS = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}

# Scalars of the llama architecture that LlamaConfig has no counterpart for, with the value that means off.
_NO_PLACE = {
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "embedding_scale": 1,
    "residual_scale": 1,
    "logit_scale": 1,
    "expert_count": 0,
}

_CHECKED_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def complete_config(config: Any, header: Header, source: Path) -> None:
    """Add to a transformers config what the loader did not read: rope scaling, and which linears have a bias.

    Raises:
        UnsupportedModelError: the file asks for something the config cannot express.
    """
    _rope_scaling(config, header, source)
    if header.architecture != "llama":
        return
    for key, off in _NO_PLACE.items():
        if header.get(key, off) not in (off, 0):
            raise UnsupportedModelError(f"{source}: llama.{key} = {header.get(key)} has no counterpart in transformers")
    width = header.get("attention.key_length", config.head_dim)
    if width != config.head_dim or header.get("attention.value_length", width) != width:
        raise UnsupportedModelError(
            f"{source}: heads of {width} dimensions of which {config.head_dim} are rotated have no counterpart in "
            "transformers"
        )
    config.attention_bias = "blk.0.attn_q.bias" in header.tensors
    config.mlp_bias = "blk.0.ffn_up.bias" in header.tensors


def _rope_scaling(config: Any, header: Header, source: Path) -> None:
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor", 0.0) or header.get("rope.scale_linear", 0.0)
    if ROPE_FACTORS in header.tensors:
        config.rope_parameters |= _llama3(config, source)
    elif header.architecture == "gpt-oss" or kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return
    elif kind == "linear":
        config.rope_parameters |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        extra = [key for key in header.metadata if ".rope.scaling.yarn_" in key or key.endswith("scaling.attn_factor")]
        if extra:
            raise UnsupportedModelError(f"{source}: {extra[0]} = {header.metadata[extra[0]]} is not understood")
        original = header.get("rope.scaling.original_context_length", config.max_position_embeddings)
        config.rope_parameters |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(original),
        }
    else:
        raise UnsupportedModelError(f"{source}: rope scaling {kind!r} is not understood")


def _llama3(config: Any, source: Path) -> dict[str, Any]:
    """Llama 3.1's rope settings, from the divisors of the frequencies that a GGUF holds in their place.

    All published models have low_freq_factor 1, high_freq_factor 4 and 8192 original positions; the factor is the
    largest divisor. Whether that gives all the divisors is checked with transformers' own function.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reader = gguf.GGUFReader(source)
    tensor = next(tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS)
    divisors = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).flatten()
    settings = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    trial = type(config)(
        **{**config.to_dict(), "rope_parameters": {"rope_theta": config.rope_parameters["rope_theta"], **settings}}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](trial)
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_parameters["rope_theta"] ** steps
    if divisors.shape != plain.shape or not torch.allclose(plain / scaled, divisors, rtol=1e-4):
        raise UnsupportedModelError(f"{source}: the divisors in {ROPE_FACTORS} are not those of Llama 3.1")
    return settings


def split_digits(tokenizer: PreTrainedTokenizerBase, header: Header) -> None:
    """Split text before merging as the vocabulary was learned, where that is digit by digit.

    Without it two spaces before a number become two tokens in place of one.
    """
    if header.metadata.get("tokenizer.ggml.pre") in _SPLIT_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def end_token_ids(header: Header) -> list[int]:
    """All tokens that end an answer: end of sequence, of turn, of message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (header.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(int(token) for token in ids if token is not None))


def unused_tensors(model: PreTrainedModel, header: Header) -> list[str]:
    """Tensors of the file that no parameter of the model was filled from."""
    if header.architecture not in _CHECKED_ARCHITECTURES:
        return []
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    used = {ROPE_FACTORS}
    for name in model.state_dict():
        module, _, tail = name.rpartition(".")
        used.add(f"{names.get_name(module)}.{tail}")
    return sorted(header.tensors - used)
