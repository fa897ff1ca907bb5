"""Gemma 3: five local layers with a rope of their own to each global one; of multimodal files, the language model."""

from __future__ import annotations

from typing import ClassVar

from fastgen import api as fg
from fastgen.models import gemma2


class Gemma3Config(gemma2.Gemma2Config):
    nested_in = "text_config"  # in multimodal files, which leave out what is as in transformers' class
    default_rope_theta = 1_000_000.0
    local_rope_theta = ("rope_local_base_freq", 10_000.0)
    defaults: ClassVar = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    }
    attn_logit_softcapping: None = None  # transformers does not cap scores, whatever the file says
    final_logit_softcapping: float | None = None
    sliding_window_pattern: fg.Count = 6


def build(c: Gemma3Config) -> fg.Decoder:
    ropes = {kind: fg.Rope(rope) for kind, rope in c.rope_by_layer_type.items()}

    def norm() -> fg.RMSNorm:
        return fg.RMSNorm(c.head_dim, c.norm_eps, offset=1.0)

    def attention(window: int | None) -> fg.Attention:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return fg.Attention(
            c.hidden_size,
            *heads,
            rope=ropes["sliding_attention" if window else "full_attention"],
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            q_norm=norm(),
            k_norm=norm(),
            scale=c.query_pre_attn_scalar**-0.5,
            window=window,
        )

    windows = c.layer_windows(lambda layer: (layer + 1) % c.sliding_window_pattern > 0)
    return gemma2.decoder(c, [attention(window) for window in windows])


def of_vision(tensor: str, _: object) -> bool:
    return tensor.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))


@fg.hookimpl
def fastgen_models() -> list[fg.ModelSpec]:
    names = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
    weights = fg.DECODER_WEIGHTS.but(gemma2.NORMS, unused=of_vision)
    return [fg.ModelSpec(names, Gemma3Config, build, weights, description="Gemma 3, text only")]
