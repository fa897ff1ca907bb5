"""Keys of ``config.json``: the names each field goes by, and those that change a model's maths."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from fastgen.core.quantised import refuse_quantised
from fastgen.errors import UnsupportedModelError

__all__ = ["NEUTRAL", "SPELLINGS", "refuse_unknown_maths"]

SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    "norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_eps",
        "norm_epsilon",
    ),
    "hidden_act": ("hidden_act", "hidden_activation", "activation_function"),
    "torch_dtype": ("dtype", "torch_dtype"),
}
"""Names each field goes by in the wild. Two that are present and disagree are an error."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "sliding_window": (0,),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (0,),
    "attn_logit_softcap": (0,),
    "final_logit_softcapping": (0,),
    "final_logit_softcap": (0,),
    "logits_soft_cap": (0,),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "lm_head_multiplier": (1,),
    "key_multiplier": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "embedding_scale": (1,),
    "scale_embedding": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "alibi": (False,),
    "use_alibi": (False,),
    "use_cache_quantization": (False,),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "attn_temperature_tuning": (False, 0),
    "num_kv_shared_layers": (0,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "n_group": (0, 1),
    "layer_types": (),
    "block_configs": (),
    "per_layer_config": ({},),
}
"""Keys that change the maths without leaving a tensor in the checkpoint to notice, with the values (besides ``null``)
at which they do nothing. ``layer_types`` is neutral where every entry is ``"full_attention"``."""


def refuse_unknown_maths(raw: Mapping[str, Any], fields: Container[str], reader: str) -> None:
    """Refuse a config.json that asks for maths its reader does not know.

    Args:
        fields: the names that the reader does know.
        reader: its class's name, for the message.

    Raises:
        UnsupportedModelError: names the key, its value and the reader.
    """
    if "quantization_config" not in fields:
        refuse_quantised(raw)
    if "hidden_size" not in raw and isinstance(raw.get("text_config"), dict):
        raise UnsupportedModelError(
            "config.json: the language model is nested under text_config, as in multimodal models; this family reads "
            "a flat config"
        )
    if raw.get("use_sliding_window") is False and "use_sliding_window" not in fields:
        raw = {name: value for name, value in raw.items() if name != "sliding_window"}
    for name, neutral in NEUTRAL.items():
        value = raw.get(name)
        if value is None or name in fields or value in neutral:
            continue
        if name == "layer_types" and isinstance(value, list) and all(kind == "full_attention" for kind in value):
            continue
        raise UnsupportedModelError(
            f"config.json: {name} = {value!r} changes the model's maths, and {reader} does not support it"
        )
