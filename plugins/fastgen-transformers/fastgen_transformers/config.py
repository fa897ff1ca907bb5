"""A ``config.json`` as transformers reads it, and the class that transformers has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from fastgen import api as fg

__all__ = ["TIES", "TransformersConfig", "resolve"]

TIES = fg.WeightMap(
    {
        **dict.fromkeys(
            (
                "model.embed_tokens",
                "model.decoder.embed_tokens",
                "model.language_model.embed_tokens",
                "transformer.wte",
                "transformer.word_embeddings",
                "gpt_neox.embed_in",
            ),
            "embed.tokens",
        ),
        **dict.fromkeys(("lm_head", "embed_out", "output"), "head.proj"),
    }
)
"""Where a head and its embedding may both lie in a checkpoint whose config ties them. All else is found by
`weights.Matching`, from transformers' own tables."""

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_STEMS = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "ForConditionalGeneration", "Decoder")


class TransformersConfig(fg.HFConfig):
    """What fastgen needs to know, taken from transformers' own config class; the model is built from `raw`.

    Keys that change the maths are not refused here: transformers' code implements them.
    """

    has_rope: ClassVar[bool] = False

    raw: dict[str, Any]

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> Self:
        """See `fastgen.api.HFConfig.from_raw`.

        Raises:
            UnsupportedModelError: transformers has no class for it, or one that is no plain decoder.
        """
        config, model = resolve(raw)
        heads = _get(config, "num_attention_heads")
        if not isinstance(heads, int):
            told = "no number of attention heads" if heads is None else f"attention heads {heads!r}"
            raise fg.UnsupportedModelError(f"{model.__name__} cannot run over fastgen's paged cache: it has {told}")
        hidden = _get(config, "hidden_size")
        fields = {
            "architectures": raw.get("architectures"),
            "model_type": raw.get("model_type"),
            "quantization_config": raw.get("quantization_config"),
            "compression_config": raw.get("compression_config"),
            "vocab_size": _get(config, "vocab_size"),
            "hidden_size": hidden,
            "num_hidden_layers": _get(config, "num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": _get(config, "num_key_value_heads") or heads,
            "head_dim": _get(config, "head_dim") or (hidden // heads if hidden and heads else None),
            "max_position_embeddings": _longest(config),
            "tie_word_embeddings": bool(_get(config, "tie_word_embeddings")),
            "torch_dtype": raw.get("dtype") or raw.get("torch_dtype") or _nested(raw, "dtype", "torch_dtype"),
            "bos_token_id": _token(_get(config, "bos_token_id")),
            "eos_token_id": raw["eos_token_id"] if "eos_token_id" in raw else _get(config, "eos_token_id"),
        }
        return super().from_raw({**{k: v for k, v in fields.items() if v is not None}, "raw": dict(raw)})


def resolve(raw: Mapping[str, Any]) -> tuple[Any, type[Any]]:
    """transformers' config of the language model (the nested one where the file describes several models), and the
    class that its ``AutoModelForCausalLM`` would make of it.

    Raises:
        UnsupportedModelError: the installed transformers does not know it, or it is no decoder of text alone, or not
            the one that config.json names.
        ConfigError: the config class refuses the values.
    """
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    names = [str(name) for name in raw.get("architectures") or []]
    told, kind = " or ".join(names) or "this model", raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        remote = " The checkpoint brings code of its own (auto_map), which is not run." if raw.get("auto_map") else ""
        raise fg.UnsupportedModelError(
            f"no plugin for {told}, and transformers {transformers.__version__} has no model_type {kind!r}.{remote} "
            "`fastgen models` lists what plugins serve; a newer transformers may know this one."
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(_floats(dict(raw)))
    except Exception as error:
        raise fg.ConfigError(f"config.json: transformers' config class of {kind!r} refuses it: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise fg.UnsupportedModelError(f"{told} has an encoder and a decoder; fastgen serves decoders alone")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise fg.UnsupportedModelError(
            f"no plugin for {told}, and transformers {transformers.__version__} has no causal language model of "
            f"model_type {kind!r}"
        )
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cls: type[Any] = found[0] if isinstance(found, tuple) else found
    if any(name.endswith("ForConditionalGeneration") for name in (cls.__name__, *names)):
        raise fg.UnsupportedModelError(
            f"{told} reads images or sound as well as text; fastgen serves decoders of text alone"
        )
    if cls.__name__ not in names and _plain(str(kind)) not in {_plain(_stem(name)) for name in names}:
        raise fg.UnsupportedModelError(
            f"config.json names {told}, and transformers takes its model_type {kind!r} for {cls.__name__}; they may "
            "differ, so neither is run"
        )
    nested = config.sub_configs.get("text_config")
    if nested is not None and getattr(cls, "config_class", None) is not nested:
        raise fg.UnsupportedModelError(
            f"{told} reads images or sound as well as text; fastgen serves decoders of text alone"
        )
    return (config if nested is None else config.get_text_config()), cls


def _floats(value: Any) -> Any:
    """``{"__float__": "Infinity"}``, as transformers writes what JSON has no word for, is read as the number."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and isinstance(value["__float__"], str):
            return float(value["__float__"])
        return {name: _floats(one) for name, one in value.items()}
    return [_floats(one) for one in value] if isinstance(value, list) else value


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # values that differ from layer to layer may not be asked for as one
        return None


def _longest(config: Any) -> int | None:
    return next((value for name in _LENGTHS if isinstance(value := _get(config, name), int)), None)


def _nested(raw: Mapping[str, Any], *names: str) -> Any:
    inner = raw.get("text_config")
    return next((inner[n] for n in names if inner.get(n)), None) if isinstance(inner, dict) else None


def _token(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _stem(name: str) -> str:
    return next((name.removesuffix(end) for end in _STEMS if name.endswith(end)), name)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
