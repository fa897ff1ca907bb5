"""Every family that transformers' GGUF loader and fastgen share: written as llama.cpp's converter writes it, converted
back, and equal to the model it was written from, in transformers and in fastgen."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from fastgen_gguf.convert import convert
from transformers import AutoConfig, AutoModelForCausalLM

from fastgen.api import UnsupportedModelError
from fastgen.testing.driver import HandDriver, load_decoder

Tensors = dict[str, torch.Tensor]

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
COMMON = {"freq_base": "rope.freq_base"}


def plus_one(config: Any, tensors: Tensors) -> Tensors:
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


def transpose(config: Any, tensors: Tensors) -> Tensors:
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return {name: tensor.t() if name.endswith(conv1d) else tensor for name, tensor in tensors.items()}


def stack_experts(config: Any, tensors: Tensors) -> Tensors:
    """One tensor for all gates, one for all ups; a gate of one row loses its dimension."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            found[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            found[name.replace("gate_up_proj", "up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
    return found


def unfuse_by_key_head(config: Any, tensors: Tensors) -> Tensors:
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    found: Tensors = {}
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            split = tensor.view(groups, -1, config.hidden_size // config.num_attention_heads, tensor.shape[-1])
            tensor = torch.cat([split[:, :-2].flatten(0, 2), split[:, -2].flatten(0, 1), split[:, -1].flatten(0, 1)])
        found[name] = tensor
    return found


def same(config: Any, tensors: Tensors) -> Tensors:
    return tensors


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 32,
}

# name: (model type, config, llama.cpp's architecture, scalars, what the converter does to the weights)
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], Callable[[Any, Tensors], Tensors]]] = {
    "qwen2": ("qwen2", {**TINY, "tie_word_embeddings": True}, "qwen2", {"rope.freq_base": 5000.0}, same),
    "qwen3": ("qwen3", {**TINY, "head_dim": 32}, "qwen3", {"rope.freq_base": 5000.0, "attention.key_length": 32}, same),
    "qwen2moe": (
        "qwen2_moe",
        {
            **TINY,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
        "qwen2moe",
        {
            "rope.freq_base": 5000.0,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
            "expert_shared_feed_forward_length": 80,
        },
        stack_experts,
    ),
    "qwen3moe": (
        "qwen3_moe",
        {
            **TINY,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
        "qwen3moe",
        {
            "rope.freq_base": 5000.0,
            "attention.key_length": 32,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
        },
        stack_experts,
    ),
    "gemma2": (
        "gemma2",
        {**TINY, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 2},
        "gemma2",
        {
            "rope.freq_base": 5000.0,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        plus_one,
    ),
    "gemma3": (
        "gemma3_text",
        {
            **TINY,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "gemma3",
        {
            "rope.freq_base": 100000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 8,
        },
        plus_one,
    ),
    "phi3": (
        "phi3",
        {**TINY, "rope_parameters": {**TINY["rope_parameters"], "partial_rotary_factor": 0.5}, "sliding_window": 9},
        "phi3",
        {"rope.freq_base": 5000.0, "rope.dimension_count": 8, "attention.sliding_window": 9},
        same,
    ),
    "phi3_long": (
        "phi3",
        {**TINY, "rope_parameters": LONG, "original_max_position_embeddings": 32},
        "phi3",
        {
            "rope.freq_base": 10000.0,
            "rope.dimension_count": 16,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": (1 + np.log(256 / 32) / np.log(32)) ** 0.5,
        },
        same,
    ),
    "stablelm": (
        "stablelm",
        {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        "stablelm",
        {"rope.dimension_count": 4},
        same,
    ),
    "stablelm_parallel": (
        "stablelm",
        {
            **TINY,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "use_qkv_bias": True,
            "use_parallel_residual": True,
        },
        "stablelm",
        {"rope.dimension_count": 8},
        same,
    ),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}, "gpt2", {}, transpose),
    "falcon_7b": (
        "falcon",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True, "alibi": False},
        "falcon",
        {"attention.head_count_kv": 1},
        unfuse_by_key_head,
    ),
    "falcon_40b": (
        "falcon",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "alibi": False,
        },
        "falcon",
        {"attention.head_count_kv": 2},
        unfuse_by_key_head,
    ),
}


class Written:
    """A random model of one family, and the file llama.cpp's converter would make of it."""

    def __init__(self, path: Path, family: str, add_tokenizer: Callable[[gguf.GGUFWriter], int], **extra: Any) -> None:
        kind, settings, architecture, scalars, to_gguf = FAMILIES[family]
        writer = gguf.GGUFWriter(path, architecture)
        vocabulary = add_tokenizer(writer)
        config = AutoConfig.for_model(kind, vocab_size=vocabulary, pad_token_id=0, **settings)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        self.randomise()
        self.add_scalars(writer, config, {**scalars, **extra})
        self.add_tensors(writer, config, architecture, to_gguf)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @torch.no_grad()
    def randomise(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for name, parameter in self.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            one = 1 if parameter.ndim == 1 and "norm" in name + type(self.model).__name__.lower() else 0
            parameter.copy_(one + 0.3 * noise if parameter.ndim == 1 else 1.5 * noise / parameter.shape[-1] ** 0.5)

    def add_scalars(self, writer: gguf.GGUFWriter, config: Any, scalars: dict[str, Any]) -> None:
        text = config.get_text_config()
        writer.add_block_count(text.num_hidden_layers)
        writer.add_context_length(getattr(text, "max_position_embeddings", 2048))
        writer.add_embedding_length(text.hidden_size)
        width = getattr(text, "intermediate_size", None) or getattr(text, "ffn_hidden_size", None)
        writer.add_feed_forward_length(width or 4 * text.hidden_size)
        writer.add_head_count(text.num_attention_heads)
        if hasattr(text, "num_key_value_heads"):
            writer.add_head_count_kv(text.num_key_value_heads)
        for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
            if hasattr(text, name):
                value = getattr(text, name)
                (writer.add_layer_norm_rms_eps if "rms" in name else writer.add_layer_norm_eps)(value)
        for key, value in scalars.items():
            add = {
                int: writer.add_uint32,
                float: writer.add_float32,
                np.float64: writer.add_float32,
                str: writer.add_string,
            }
            add[type(value)](f"{writer.arch}.{key}", value)

    def add_tensors(
        self, writer: gguf.GGUFWriter, config: Any, architecture: str, to_gguf: Callable[[Any, Tensors], Tensors]
    ) -> None:
        kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        tied = config.tie_word_embeddings
        state = {name: t for name, t in self.model.state_dict().items() if not (tied and name == "lm_head.weight")}
        for name, tensor in to_gguf(config, state).items():
            module, _, tail = name.rpartition(".")
            values = tensor.contiguous().float().numpy()
            writer.add_tensor(f"{names.get_name(module)}.{tail}", values)
        rope = getattr(config, "rope_parameters", None) or {}
        for which in ("short", "long"):
            if f"{which}_factor" in rope:
                writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], dtype=np.float32))

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return found


@pytest.fixture
def add_tokenizer(tiny_gguf: Any) -> Callable[[gguf.GGUFWriter], int]:
    def add(writer: gguf.GGUFWriter) -> int:
        tiny = tiny_gguf()
        tiny._add_tokenizer(writer)
        writer.add_pad_token_id(0)
        return int(tiny.model().config.vocab_size)

    return add


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "converted").mkdir()
    return tmp_path / "converted"


def some_ids(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(4, 260) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_converted_model_is_the_one_written(
    family: str, tmp_path: Path, target: Path, add_tokenizer: Callable[[gguf.GGUFWriter], int]
) -> None:
    written = Written(tmp_path / "model.gguf", family, add_tokenizer)
    convert(tmp_path / "model.gguf", target)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
    ours = load_decoder(target)
    for length in (20, 50):  # the second is past the windows and the original length of rope
        ids = some_ids(length)
        want = written.logits(ids)
        with torch.no_grad():
            assert (theirs(torch.tensor([ids])).logits[0] - want).abs().max() < 1e-4
        driver = HandDriver(ours)
        assert (driver.read(driver.add(ids), length) - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("qwen2", {"attention.clamp_kqv": 8.0}, "attention.clamp_kqv = 8.0 has no counterpart"),
        ("qwen3", {"attention.sliding_window": 8}, "attention.sliding_window = 8 has no counterpart"),
        ("gpt2", {"logit_scale": 0.5}, "logit_scale = 0.5 has no counterpart"),
        ("falcon_7b", {"attention.max_alibi_bias": 8.0}, "max_alibi_bias = 8.0 has no counterpart"),
    ],
)
def test_what_the_config_cannot_say_is_refused(
    family: str,
    extra: dict[str, Any],
    message: str,
    tmp_path: Path,
    target: Path,
    add_tokenizer: Callable[[gguf.GGUFWriter], int],
) -> None:
    Written(tmp_path / "model.gguf", family, add_tokenizer, **extra)
    with pytest.raises(UnsupportedModelError, match=message):
        convert(tmp_path / "model.gguf", target)
