"""What transformers' GGUF loader leaves out and a model's answers depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastgen.api import UnsupportedModelError
from fastgen_gguf.families import complete_family
from fastgen_gguf.header import Header

__all__ = ["complete_config", "end_token_ids", "split_digits", "unused_tensors"]

ROPE_FACTORS = "rope_freqs.weight"

# Vocabularies whose merges were learned with every digit on its own, by `tokenizer.ggml.pre`; then as GPT-2.
_SPLIT_DIGITS = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}

# Their rope settings are read with the rest of the family's.
_OWN_ROPE = {"gpt2", "phi3"}
_READ_AS_SETTINGS = {ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight"}


def complete_config(config: Any, header: Header, source: Path) -> None:
    """Add to a transformers config what the loader did not read: what its family needs, and rope scaling.

    Raises:
        UnsupportedModelError: the file asks for something the config cannot express.
    """
    complete_family(config, header, source)
    if header.architecture not in _OWN_ROPE:
        _rope_scaling(config, header, source)


def _rope_scaling(config: Any, header: Header, source: Path) -> None:
    settings = config.rope_parameters
    if settings is not None and "full_attention" in settings:  # one for each kind of layer: the scaled one
        settings = settings["full_attention"]
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor", 0.0) or header.get("rope.scale_linear", 0.0)
    if ROPE_FACTORS in header.tensors:
        settings |= _llama3(config, source)
    elif header.architecture == "gpt-oss" or kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return
    elif kind == "linear":
        settings |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        extra = [key for key in header.metadata if ".rope.scaling.yarn_" in key or key.endswith("scaling.attn_factor")]
        if extra:
            raise UnsupportedModelError(f"{source}: {extra[0]} = {header.metadata[extra[0]]} is not understood")
        original = header.get("rope.scaling.original_context_length", config.max_position_embeddings)
        settings |= {
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
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    used = set(get_gguf_hf_weights_map(model, processor)) | _READ_AS_SETTINGS
    if model.get_output_embeddings() is not None:
        used.add("output.weight")  # some loaders rename it before they look it up
    return sorted(name for name in header.tensors if name not in used and name.removesuffix(".weight") not in used)
