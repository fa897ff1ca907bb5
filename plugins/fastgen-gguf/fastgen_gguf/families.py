"""Family by family: what a GGUF header says of a model and transformers' loader does not read, and what llama.cpp's
converter does to weights and the loader does not undo.

The sources are llama.cpp's ``convert_hf_to_gguf.py`` (what is written) and its model code (what is meant where nothing
is written), against transformers' config classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel

from fastgen.api import UnsupportedModelError
from fastgen_gguf.header import Header

__all__ = ["complete_family", "mend_weights"]

# Scalars that change the maths, with the value that means off; a family that has a place for one takes it over.
_OFF = {
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
    "expert_weights_scale": 1,
    "expert_group_count": 1,
}
_UNDERSTOOD = {
    "gemma2": {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": {"attention.sliding_window"},
    "phi3": {"attention.sliding_window"},
    "qwen2moe": {"expert_count"},
    "qwen3moe": {"expert_count", "expert_weights_scale"},
}


def complete_family(config: Any, header: Header, source: Path) -> None:
    """Add to a transformers config what its family needs.

    Raises:
        UnsupportedModelError: the file asks for something the config cannot express.
    """
    for key, off in _OFF.items():
        if key not in _UNDERSTOOD.get(header.architecture, ()) and header.get(key, off) not in (off, 0):
            raise UnsupportedModelError(
                f"{source}: {header.architecture}.{key} = {header.get(key)} has no counterpart in transformers"
            )
    complete = _FAMILIES.get(header.architecture)
    if complete is not None:
        complete(config, header, source)


def mend_weights(model: PreTrainedModel, header: Header) -> None:
    """Undo what the converter did to the weights and the loader left so."""
    if header.architecture == "falcon":
        _fuse_by_key_head(model)


# ---- one function for each family that needs one -------------------------------------------------------------------


def _llama(config: Any, header: Header, source: Path) -> None:
    width = header.get("attention.key_length", config.head_dim)
    if width != config.head_dim or header.get("attention.value_length", width) != width:
        raise UnsupportedModelError(
            f"{source}: heads of {width} dimensions of which {config.head_dim} are rotated have no counterpart in "
            "transformers"
        )
    config.attention_bias = "blk.0.attn_q.bias" in header.tensors
    config.mlp_bias = "blk.0.ffn_up.bias" in header.tensors


def _qwen3(config: Any, header: Header, source: Path) -> None:
    config.head_dim = header.get("attention.key_length", config.hidden_size // config.num_attention_heads)
    config.attention_bias = "blk.0.attn_q.bias" in header.tensors


def _qwen2_moe(config: Any, header: Header, source: Path) -> None:
    config.moe_intermediate_size = header.get("expert_feed_forward_length", config.moe_intermediate_size)
    config.shared_expert_intermediate_size = header.get(
        "expert_shared_feed_forward_length", config.shared_expert_intermediate_size
    )


def _qwen3_moe(config: Any, header: Header, source: Path) -> None:
    _qwen3(config, header, source)
    config.moe_intermediate_size = header.get("expert_feed_forward_length", config.moe_intermediate_size)


def _gemma2(config: Any, header: Header, source: Path) -> None:
    config.attn_logit_softcapping = header.get("attn_logit_softcapping")
    config.final_logit_softcapping = header.get("final_logit_softcapping")
    config.query_pre_attn_scalar = _gemma_scalar(config, largest=46)


def _gemma3(config: Any, header: Header, source: Path) -> None:
    config.query_pre_attn_scalar = _gemma_scalar(config, largest=62)
    local, whole = config.rope_parameters["sliding_attention"], config.rope_parameters["full_attention"]
    local["rope_theta"] = header.get("rope.freq_base_swa", 10_000.0)  # fixed where it is not written
    whole["rope_theta"] = header.get("rope.freq_base", 1_000_000.0)


def _gemma_scalar(config: Any, *, largest: int) -> int:
    """Not written: the largest model of the generation divides by another number than its head's width."""
    if config.num_hidden_layers == largest:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)


def _phi3(config: Any, header: Header, source: Path) -> None:
    config.sliding_window = header.get("attention.sliding_window") or None
    head_dim = config.hidden_size // config.num_attention_heads
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": header.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": header.get("rope.dimension_count", head_dim) / head_dim,
    }
    original = int(header.get("rope.scaling.original_context_length", config.max_position_embeddings))
    if {"rope_factors_long.weight", "rope_factors_short.weight"} <= header.tensors:
        rope |= {
            "rope_type": "longrope",
            "short_factor": _numbers(source, "rope_factors_short.weight"),
            "long_factor": _numbers(source, "rope_factors_long.weight"),
            "original_max_position_embeddings": original,
        }
        factor = header.get("rope.scaling.attn_factor")
        if factor is not None:
            rope["attention_factor"] = factor
    config.original_max_position_embeddings = original
    config.rope_parameters = rope


def _stablelm(config: Any, header: Header, source: Path) -> None:
    head_dim = config.hidden_size // config.num_attention_heads
    rotated = header.get("rope.dimension_count", head_dim // 4)
    config.rope_parameters |= {
        "partial_rotary_factor": rotated / head_dim,
        "rope_theta": header.get("rope.freq_base", 10_000.0),
    }
    if any("attn_q_norm" in name for name in header.tensors):
        raise UnsupportedModelError(f"{source}: StableLM with norms of its own for each head cannot be read from GGUF")


def _gpt2(config: Any, header: Header, source: Path) -> None:
    config.n_positions = header.get("context_length", config.n_positions)
    width = header.get("feed_forward_length", 4 * config.n_embd)
    config.n_inner = None if width == 4 * config.n_embd else width


def _falcon(config: Any, header: Header, source: Path) -> None:
    key_heads = header.get("attention.head_count_kv", 1)
    two_norms = "blk.0.attn_norm_2.weight" in header.tensors
    config.layer_norm_epsilon = header.get("attention.layer_norm_epsilon", config.layer_norm_epsilon)
    config.bias = "blk.0.attn_qkv.bias" in header.tensors
    config.alibi = False
    config.multi_query = True
    config.new_decoder_architecture = two_norms or key_heads > 1
    config.num_kv_heads = key_heads
    config.num_ln_in_parallel_attn = (2 if two_norms else 1) if config.new_decoder_architecture else None
    config.ffn_hidden_size = header.get("feed_forward_length", 4 * config.hidden_size)
    config.max_position_embeddings = header.get("context_length", config.max_position_embeddings)


_FAMILIES: dict[str, Callable[[Any, Header, Path], None]] = {
    "falcon": _falcon,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "stablelm": _stablelm,
}


def _numbers(source: Path, name: str) -> list[float]:
    tensor = next(tensor for tensor in gguf.GGUFReader(source).tensors if tensor.name == name)
    values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    return [float(value) for value in values.flatten()]


@torch.no_grad()
def _fuse_by_key_head(model: PreTrainedModel) -> None:
    """The converter writes all queries, all keys, all values; the model wants them key head by key head."""
    config = model.config
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    head_dim = config.hidden_size // config.num_attention_heads
    for name, parameter in model.named_parameters():
        if not re.search(r"query_key_value\.(weight|bias)$", name):
            continue
        rest = parameter.shape[1:]
        q, k, v = parameter.data.split([config.num_attention_heads * head_dim, groups * head_dim, groups * head_dim])
        parts = [part.view(groups, -1, head_dim, *rest) for part in (q, k, v)]
        parameter.data = torch.cat(parts, 1).reshape(parameter.shape).contiguous()
