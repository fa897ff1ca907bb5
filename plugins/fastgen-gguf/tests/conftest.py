"""A writer of tiny GGUF files, as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>"]
WORDS = ["ĠĠ", "Ġt", "he", "Ġthe"]
TOKENS = [*SPECIALS, *bytes_to_unicode().values(), *WORDS]
MERGES = ["Ġ Ġ", "Ġ t", "h e", "Ġt he"]


@dataclass
class TinyGguf:
    """What goes into the file; change a part, then ``write``."""

    config: dict[str, Any] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=lambda: {"attn": "Q8_0", "ffn": "Q4_1"})
    """Number format by a part of the tensor's name; F32 for the rest."""
    architecture: str = "llama"
    extra_scalars: dict[str, Any] = field(default_factory=dict)
    extra_tensors: dict[str, np.ndarray] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    bias: bool = False
    round_to: torch.dtype = torch.float32

    def model(self) -> LlamaForCausalLM:
        """The model whose weights are written."""
        settings = {
            "vocab_size": len(TOKENS),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "attention_bias": self.bias,
            "mlp_bias": self.bias,
        }
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **self.config}))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.copy_(((1 + noise) if "norm" in name else noise).to(self.round_to))
        return model.eval()

    def write(self, path: Path) -> LlamaForCausalLM:
        """Write the file; returns the model it was made from (before its weights were quantised)."""
        model = self.model()
        config = model.config
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name("tiny")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
        self._add_tokenizer(writer)
        for key, value in self.extra_scalars.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
        self._add_tensors(writer, model)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return model

    def _add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        if "tokenizer" in self.without:
            return
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3 if token in SPECIALS else 1 for token in TOKENS])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)

    def _add_tensors(self, writer: gguf.GGUFWriter, model: LlamaForCausalLM) -> None:
        config = model.config
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        tensors = {}
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            for part, count in heads.items():
                if part in name:
                    tensor = interleave(tensor, count)
            module, _, tail = name.rpartition(".")
            tensors[f"{names.get_name(module)}.{tail}"] = tensor.numpy()
        for name, values in {**tensors, **self.extra_tensors}.items():
            if name in self.without:
                continue
            wanted = next((kind for part, kind in self.formats.items() if part in name and values.ndim > 1), "F32")
            kind = gguf.GGMLQuantizationType[wanted]
            writer.add_tensor(name, gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind)


def interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows, transformers rows half a head apart."""
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape).contiguous()


@pytest.fixture
def tiny_gguf() -> type[TinyGguf]:
    """The writer, for tests that want the model it was made from too."""
    return TinyGguf


@pytest.fixture(name="interleave")
def interleave_fixture() -> Callable[[torch.Tensor, int], torch.Tensor]:
    return interleave


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny GGUF file with these parts changed."""

    def do(**changes: Any) -> Path:
        path = tmp_path / "tiny.gguf"
        TinyGguf(**changes).write(path)
        return path

    return do
