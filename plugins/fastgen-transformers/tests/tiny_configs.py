"""A small config of any causal language model in transformers: its class's defaults, with every size cut down."""

from __future__ import annotations

from typing import Any

__all__ = ["config_class", "tiny_config"]

# Whichever of these fields a config class has, by meaning. The sizes fit one another.
_SIZES: dict[str, Any] = {
    name: value
    for names, value in (
        ("vocab_size padded_vocab_size vocab_size_per_layer_input", 128),
        ("hidden_size n_embd d_model dim embed_dim embedding_size decoder_hidden_size", 64),
        ("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers", 4),
        ("num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads", 4),
        ("num_key_value_heads num_kv_heads kv_n_heads", 2),
        ("head_dim attention_head_dim kv_channels swa_head_dim global_head_dim swa_v_head_dim", 16),
        ("swa_num_key_value_heads num_global_key_value_heads", 2),
        ("swa_num_attention_heads", 4),
        ("intermediate_size ffn_dim ffn_hidden_size n_inner decoder_ffn_dim encoder_ffn_dim", 96),
        ("intermediate_size_mlp dense_intermediate_size shared_intermediate_size", 96),
        ("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size", 32),
        ("num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts", 4),
        ("num_experts_per_tok num_experts_per_token num_selected_experts moe_k moe_topk top_k_experts", 2),
        ("n_shared_experts num_shared_experts moe_num_shared_experts", 1),
        ("n_group topk_group num_expert_group", 1),
        ("first_k_dense_replace num_dense_layers moe_layer_start_index", 1),
        ("q_lora_rank", 24),
        ("kv_lora_rank qk_nope_head_dim", 16),
        ("qk_rope_head_dim rotary_dim", 8),
        ("qk_head_dim", 24),
        ("v_head_dim", 12),
        ("max_position_embeddings n_positions n_ctx max_seq_len seq_length", 256),
        ("sliding_window sliding_window_size attention_window", 8),
        ("use_sliding_window is_decoder", True),
        ("max_window_layers", 2),
        ("query_pre_attn_scalar hidden_size_per_layer_input mamba_d_head", 16),
        ("dropout attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop", 0.0),
        ("hidden_dropout_prob attention_probs_dropout_prob activation_dropout layerdrop", 0.0),
        ("conv_kernel", 4),
        ("state_size mamba_n_heads mamba_d_state", 8),
    )
    for name in names.split()
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")

# What a class's own defaults or checks ask for beside that.
_SPECIAL: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "shared_experts_intermediate_size": 32,
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8, "activation_sparsity_pattern": None},
    "granitemoehybrid": {"layer_types": ["attention"] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "zaya": {"num_experts_per_tok": 1},
}


def config_class(model_type: str) -> Any:
    """The config class of a model's language part."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A config whose model has four layers and some thousand parameters.

    Args:
        overrides: fields that win over the cut ones; ``None`` leaves the class's default.

    Raises:
        Exception: the config class's own, where its defaults do not go with the cut sizes.
    """
    return _tiny(config_class(model_type), model_type, overrides)


def _tiny(cls: Any, model_type: str, overrides: dict[str, Any]) -> Any:
    nested = getattr(cls, "sub_configs", {}).get("text_config")
    if nested is not None and hasattr(nested, "model_type"):  # else it can be of any kind
        return cls(text_config=_tiny(nested, nested.model_type, overrides).to_dict())
    fields = _fields(cls)
    chosen = {name: value for name, value in _SIZES.items() if name in fields}
    if "kv_lora_rank" in fields:  # latent attention: as many keys as queries
        chosen |= {name: value for name, value in (("num_key_value_heads", 4), ("head_dim", 8)) if name in fields}
    chosen = {**chosen, **_SPECIAL.get(model_type, {}), **overrides}
    tokens: dict[str, int | None] = {name: None for name in _TOKENS if name in fields}
    if "type_vocab_size" in fields:  # BERT's kind, some of which number tokens from the padding's id on
        tokens["pad_token_id"] = 1
    try:
        return cls(**{**tokens, **chosen})
    except Exception:  # strict classes, some of which want a number
        return cls(**{**dict.fromkeys(tokens, 1), **chosen})


def _fields(cls: Any) -> set[str]:
    return set(cls().to_dict()) | set(getattr(cls, "attribute_map", {}))
