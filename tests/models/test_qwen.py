"""The first Qwen, against a plain forward written from its published modelling code; transformers has no class."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.errors import CheckpointError, ConfigError, UnsupportedModelError
from fastgen.testing import ModelConformance
from fastgen.testing.checkpoints import write_random
from fastgen.testing.driver import HandDriver, load_decoder

QWEN: dict[str, Any] = {
    "architectures": ["QWenLMHeadModel"],
    "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
    "attn_dropout_prob": 0.0,
    "bf16": False,
    "emb_dropout_prob": 0.0,
    "fp16": False,
    "fp32": False,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kv_channels": 8,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 128,
    "model_type": "qwen",
    "no_bias": True,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "onnx_safe": None,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 128,
    "tie_word_embeddings": False,
    "tokenizer_class": "QWenTokenizer",
    "transformers_version": "4.32.0",
    "use_cache": True,
    "use_cache_quantization": False,
    "use_dynamic_ntk": True,
    "use_flash_attn": "auto",
    "use_logn_attn": True,
    "vocab_size": 64,
}
"""The keys of the published files."""
SHORT = {**QWEN, "seq_length": 16}


def write(directory: Path, config: dict[str, Any]) -> None:
    hidden, half, vocab = config["hidden_size"], config["intermediate_size"] // 2, config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        modules = {
            "attn.c_attn": (3 * hidden, hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.w1": (half, hidden),
            "mlp.w2": (half, hidden),
            "mlp.c_proj": (hidden, half),
        }
        for name, shape in modules.items():
            shapes[f"transformer.h.{layer}.{name}.weight"] = shape
            if name == "attn.c_attn" or not config["no_bias"]:
                shapes[f"transformer.h.{layer}.{name}.bias"] = shape[:1]
        for name in ("ln_1", "ln_2"):
            shapes[f"transformer.h.{layer}.{name}.weight"] = (hidden,)
    shapes["transformer.ln_f.weight"] = (hidden,)
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    write_random(directory, config, shapes)


def reference(directory: Path, *, prompt: int | None = None) -> Callable[[list[int]], torch.Tensor]:
    """The published forward pass over one sequence, whose first ``prompt`` tokens (all, unless given) were the first
    call and the rest came one by one."""
    c = json.loads((directory / "config.json").read_text())
    t = load_file(directory / "model.safetensors")
    heads, dim = c["num_attention_heads"], int(c["kv_channels"] * c["rotary_pct"])

    def module(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, t[f"transformer.{name}.weight"], t.get(f"transformer.{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c["layer_norm_epsilon"])
        return scaled * t[f"transformer.{name}.weight"]

    def turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        turning, rest = x[..., :dim], x[..., dim:]
        left, right = turning.chunk(2, -1)
        half = torch.cat((-right, left), -1)
        return torch.cat((turning * angles.cos() + half * angles.sin(), rest), -1)

    def logits(ids: list[int]) -> torch.Tensor:
        alpha = 1
        if c["use_dynamic_ntk"]:
            alpha = max(2 ** math.ceil(math.log((prompt or len(ids)) / c["seq_length"], 2) + 1) - 1, 1)
        base = c["rotary_emb_base"] * alpha ** (dim / (dim - 2))
        inverse = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        angles = torch.outer(torch.arange(len(ids)).float(), inverse).repeat(1, 2)[:, None]
        logn = [math.log(i, c["seq_length"]) if i > c["seq_length"] else 1 for i in range(1, len(ids) + 1)]
        x = t["transformer.wte.weight"][ids]
        for layer in range(c["num_hidden_layers"]):
            h = f"h.{layer}"
            mixed = module(f"{h}.attn.c_attn", norm(f"{h}.ln_1", x))
            query, key, value = (part.view(len(ids), heads, -1) for part in mixed.split(c["hidden_size"], -1))
            query, key = turn(query, angles), turn(key, angles)
            if c["use_logn_attn"]:
                query = query * torch.tensor(logn)[:, None, None]
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
            seen = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1)
            x = x + module(f"{h}.attn.c_proj", seen.reshape(len(ids), -1))
            normed = norm(f"{h}.ln_2", x)
            x = x + module(f"{h}.mlp.c_proj", module(f"{h}.mlp.w1", normed) * silu(module(f"{h}.mlp.w2", normed)))
        head = t["transformer.wte.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
        return linear(norm("ln_f", x), head)

    return logits


class TestQwen(ModelConformance):
    entry = "fastgen.models.qwen"
    hf_config: ClassVar = {
        "plain": QWEN,
        "biases": {**QWEN, "no_bias": False},
        "partial_rotary": {**QWEN, "rotary_pct": 0.5},
        "base": {**QWEN, "rotary_emb_base": 1_000_000, "layer_norm_epsilon": 1e-5},
        "tied": {**QWEN, "tie_word_embeddings": True},
        "beyond": SHORT,
        "beyond_ntk_only": {**SHORT, "use_logn_attn": False},
        "beyond_logn_only": {**SHORT, "use_dynamic_ntk": False},
        "beyond_plain": {**SHORT, "use_dynamic_ntk": False, "use_logn_attn": False},
    }
    write_checkpoint = staticmethod(write)
    reference = staticmethod(reference)


IDS = [(7 * i) % 61 + 3 for i in range(60)]


def logits(directory: Path, ids: list[int], prompt: int) -> torch.Tensor:
    """A prompt of so many tokens, then one token at a time."""
    driver = HandDriver(load_decoder(directory))
    sequence = driver.add(ids, num_prompt=prompt)
    rows = driver.run([(sequence, prompt)])
    return torch.cat([*rows, *(driver.run([(sequence, 1)])[0] for _ in ids[prompt:])])


@pytest.mark.parametrize("prompt", [10, 16, 17, 32, 33])
def test_the_base_is_the_prompts(tmp_path: Path, prompt: int) -> None:
    """Steps at 16, 32, ... tokens of prompt; an answer that grows past one keeps the base that it began with."""
    write(tmp_path, SHORT)
    want = reference(tmp_path, prompt=prompt)(IDS[:40])
    assert (logits(tmp_path, IDS[:40], prompt) - want).abs().max() < 1e-4
    if prompt <= 32:  # a negative control: the same tokens as one prompt of 40 have another base
        assert (reference(tmp_path)(IDS[:40]) - want).abs().max() > 1e-2


def test_a6_a_long_request_leaves_no_trace(tmp_path: Path) -> None:
    """A short prompt after a long one, and in a pass with two of other lengths, has exactly its own rope."""
    write(tmp_path, SHORT)
    decoder = load_decoder(tmp_path)
    driver = HandDriver(decoder)
    alone = driver.read(driver.add(IDS[:8]), 8)
    driver.read(driver.add(IDS), 60)
    assert torch.equal(driver.read(driver.add(IDS[:8]), 8), alone)
    work = [(driver.add(IDS), 60), (driver.add(IDS[:8]), 8), (driver.add(IDS[:20]), 20)]
    for (sequence, _), got in zip(work, driver.run(work), strict=True):
        assert (got - reference(tmp_path)(sequence.tokens)).abs().max() < 1e-4
    assert [decoder.regime(length) for length in (8, 16, 17, 32, 33, 60)] == [(), (), (2,), (2,), (3,), (3,)]


def test_buffers_in_the_file_are_left_alone(tmp_path: Path) -> None:
    """A11: what the model computes for itself may lie in the file; anything else may not."""
    write(tmp_path, QWEN)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"transformer.rotary_emb.inv_freq": torch.ones(4), "transformer.h.0.attn.masked_bias": torch.ones(())}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    load_decoder(tmp_path)
    save_file({**tensors, "transformer.wpe.weight": torch.ones(64, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"transformer\.wpe\.weight"):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"use_cache_quantization": True}, UnsupportedModelError, "use_cache_quantization = True"),
        ({"scale_attn_weights": False}, UnsupportedModelError, "scale_attn_weights = False"),
        ({"apply_residual_connection_post_layernorm": True}, UnsupportedModelError, "apply_residual_connection_post"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, UnsupportedModelError, "'gptq'"),
        ({"kv_channels": 16}, CheckpointError, "shapes that do not fit"),
        ({"kv_channels": 2}, ConfigError, "4 dimensions or more"),
        ({"seq_length": 1}, ConfigError, "seq_length 1"),
        ({"seq_length": 0}, ConfigError, "seq_length"),
        ({"rotary_pct": 2.0}, ConfigError, "2.0"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], error: type[Exception], named: str) -> None:
    write(tmp_path, QWEN)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **changes}))
    with pytest.raises(error, match=named):
        draw(tmp_path, EngineConfig.of({"device": "cpu"}))


def test_absent_keys_are_what_the_published_class_says(tmp_path: Path) -> None:
    """And the spellings of the first release."""
    write(tmp_path, QWEN)
    config = draw(tmp_path, EngineConfig.of({"device": "cpu"})).spec.load().config
    sizes = {"vocab_size": 64, "n_embd": 256, "n_layer": 2, "n_head": 2, "ffn_hidden_size": 96}
    old = config.from_raw(sizes)
    assert (old.hidden_size, old.num_hidden_layers, old.num_attention_heads, old.intermediate_size) == (256, 2, 2, 96)
    assert (old.head_dim, old.max_position_embeddings, old.norm_eps) == (128, 8192, 1e-6)
    assert (old.rope.theta, old.rope.rotary_dim) == (10_000.0, 128)
    assert (old.no_bias, old.use_dynamic_ntk, old.use_logn_attn, old.tie_word_embeddings) == (True, True, True, False)
