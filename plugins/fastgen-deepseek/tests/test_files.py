"""What DeepSeek's files hold and leave out, and what is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fastgen_deepseek import DeepseekV2Config, DeepseekV3Config, build
from fastgen_deepseek.router import SigmoidRouter, SoftmaxRouter
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import DeepseekV2Config as TransformersV2
from transformers import DeepseekV3Config as TransformersV3
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from fastgen.api import CheckpointError, ConfigError
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, draw_model, load_decoder, without_memory

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 0.9}
IDS = [3 + number * 7 % 60 for number in range(50)]


@torch.inference_mode()
def difference(directory: Path) -> float:
    """Of the logits, from transformers' own reading of the same directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    driver = HandDriver(load_decoder(directory))
    return float((driver.read(driver.add(IDS), 7) - model(torch.tensor([IDS])).logits[0]).abs().max())


def rewrite(directory: Path, **written: Any) -> None:
    file = directory / "config.json"
    raw = {**json.loads(file.read_text()), **written}
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))


@pytest.mark.parametrize("config", [TransformersV2, TransformersV3])
def test_files_of_transformers_4(tmp_path, config):
    """Flat rope settings, and none of the keys that transformers 5 adds."""
    tiny_checkpoint(tmp_path, config(**SIZES), tokenizer=False)
    plain = difference(tmp_path)
    rewrite(tmp_path, rope_parameters=..., rope_theta=500.0, rope_scaling=YARN, head_dim=..., rope_interleave=...)
    assert max(plain, difference(tmp_path)) < 1e-4


def test_a7_the_temperature_of_yarn_matters(tmp_path):
    """A control: without ``mscale_all_dim`` in the scale of the scores the comparison above fails."""
    tiny_checkpoint(tmp_path, TransformersV3(**SIZES), tokenizer=False)
    rewrite(tmp_path, rope_parameters=..., rope_theta=500.0, rope_scaling=YARN)
    decoder = load_decoder(tmp_path)
    for one in decoder.attentions():
        assert one.scores.scale > 16**-0.5
        object.__setattr__(one.scores, "scale", 16**-0.5)
    driver = HandDriver(decoder)
    got = driver.read(driver.add(IDS), 7)
    driver = HandDriver(load_decoder(tmp_path))
    assert (got - driver.read(driver.add(IDS), 7)).abs().max() > 1e-2


def test_a_token_keeps_one_latent_and_one_key():
    """Of the published sizes: 576 numbers a layer, for 128 heads."""
    raw = {**SIZES, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "num_key_value_heads": 128}
    (first, _) = build(DeepseekV3Config.from_raw(raw)).attentions()
    assert first.cache_spec.width == 576


def test_a8_what_turns_is_qk_rope_head_dim():
    """Whatever ``head_dim`` says, which some files have and some have not."""
    for written in ({}, {"head_dim": 192}, {"head_dim": None}):
        assert DeepseekV3Config.from_raw({**SIZES, **written}).rope.rotary_dim == 8
    silent = {name: value for name, value in SIZES.items() if name != "qk_rope_head_dim"}
    assert DeepseekV3Config.from_raw(silent).rope.rotary_dim == 64


@pytest.mark.parametrize(("ours", "theirs"), [(DeepseekV2Config, TransformersV2), (DeepseekV3Config, TransformersV3)])
def test_defaults_are_those_of_transformers(ours, theirs):
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {name: SIZES[name] for name in (*needed, "num_experts_per_tok")}
    c, other = ours.from_raw(raw), theirs(**raw)
    names = set(ours.model_fields) & set(vars(other)) - {
        "rope_interleave",
        "num_key_value_heads",
        "bos_token_id",
        "architectures",
    }
    assert len(names) > 20
    assert {name: getattr(c, name) for name in names} == {name: getattr(other, name) for name in names}
    assert c.norm_eps == other.rms_norm_eps


def test_dense_and_sparse_layers():
    """``first_k_dense_replace``, and the step that the original code has and transformers leaves out."""

    def sparse(**written):
        decoder = build(DeepseekV3Config.from_raw({**SIZES, "num_hidden_layers": 6, **written}))
        return [hasattr(block.mlp, "routed") for block in decoder.blocks]

    assert sparse(first_k_dense_replace=2) == [False, False, True, True, True, True]
    assert sparse(first_k_dense_replace=1, moe_layer_freq=2) == [False, False, True, False, True, False]


LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3 = LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
MOONLIGHT = V3 | {
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}


@pytest.mark.parametrize("raw", [LITE, V3, MOONLIGHT], ids=["V2-Lite", "V3", "Moonlight"])
def test_published_config(raw):
    """Five layers of each, without memory: as large as transformers', and its scale and frequencies."""
    raw = raw | {"num_hidden_layers": 5}
    told = AutoConfig.for_model(**deepcopy(raw))  # which writes into the rope's
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(told)
    ours_config = DeepseekV3Config if raw["model_type"] == "deepseek_v3" else DeepseekV2Config
    ours = without_memory(build, ours_config.from_raw(raw))
    corrections = [tensor for name, tensor in theirs.named_buffers() if name.endswith("correction_bias")]
    assert sum(p.numel() for p in ours.parameters()) == sum(t.numel() for t in (*theirs.parameters(), *corrections))
    turned = type(theirs.model.rotary_emb)(told)  # not on the meta device
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        assert block.attn.cached.scores.scale == pytest.approx(layer.self_attn.scaling, rel=1e-12)
        assert torch.equal(block.attn.rope.inverse, turned.inv_freq)
        assert block.attn.rope.scale == turned.attention_scaling
        assert block.attn.norm.eps == layer.self_attn.kv_a_layernorm.variance_epsilon
        assert block.norm1.eps == layer.input_layernorm.variance_epsilon


# ---- routers ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def chosen(ours: Any, theirs: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What both give each expert, ``[tokens, experts]``, for the same numbers."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in theirs.state_dict().items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
        ours.get_parameter(name).copy_(tensor)
    x = torch.randn(200, 32, generator=generator).to(dtype)
    _, weights, indices = theirs(x)
    want = torch.zeros(200, 8).scatter_(1, indices, weights)
    indices, weights = ours(x)
    return torch.zeros(200, 8).scatter_(1, indices, weights), want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalise", [True, False])
def test_a14_v3_router(dtype, normalise):
    config = TransformersV3(**SIZES, norm_topk_prob=normalise, routed_scaling_factor=2.5)
    router = SigmoidRouter(32, 8, 3, 4, 2, 2.5, normalise=normalise)
    torch.testing.assert_close(*chosen(router, DeepseekV3TopkRouter(config), dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("method", "groups", "kept"), [("greedy", 1, 1), ("group_limited_greedy", 4, 2)])
def test_a14_v2_router(dtype, method, groups, kept):
    config = TransformersV2(**SIZES, topk_method=method, routed_scaling_factor=16.0)
    router = SoftmaxRouter(32, 8, 3, groups, kept, 16.0)
    torch.testing.assert_close(*chosen(router, DeepseekV2TopkRouter(config), dtype))


def test_routers_keep_float32(tmp_path):
    """A correction of 7.03 and one of 7.02 are not the same in bfloat16, and would choose other experts."""
    tiny_checkpoint(tmp_path, TransformersV3(**SIZES), tokenizer=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = 7 + torch.arange(8) / 1000
    save_file(tensors, file, metadata={"format": "pt"})
    decoder = load_decoder(tmp_path, dtype="bfloat16")
    router = decoder.blocks[1].mlp.routed.router
    assert torch.equal(router.e_score_correction_bias, tensors[name])
    assert decoder.blocks[1].attn.out.weight.dtype == torch.bfloat16
    driver = HandDriver(decoder)
    assert driver.read(driver.add(IDS), 7).isfinite().all()


# ---- left unread, and refused ----------------------------------------------------------------------------------------


def test_layers_that_predict_further_are_left_unread_aloud(tmp_path):
    tiny_checkpoint(tmp_path, TransformersV3(**SIZES), tokenizer=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    further = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    further["model.layers.2.shared_head.head.weight"] = torch.ones(64, 32)
    save_file({**tensors, **further}, file, metadata={"format": "pt"})
    (warning,) = draw_model(tmp_path).warnings
    assert warning.startswith(f"{len(further)} tensors of the checkpoint")
    assert "model.layers.2." in warning
    assert difference(tmp_path) < 1e-4

    rewrite(tmp_path, num_nextn_predict_layers=0, num_mtp_layers=...)
    with pytest.raises(CheckpointError, match=r"nothing in the model takes: .*model\.layers\.2\."):
        draw_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "written"),
    [
        (DeepseekV2Config, {"topk_method": "noaux_tc"}),
        (DeepseekV2Config, {"scoring_func": "sigmoid"}),
        (DeepseekV2Config, {"norm_topk_prob": True}),
        (DeepseekV2Config, {"rope_interleave": False}),
        (DeepseekV3Config, {"topk_method": "greedy"}),
        (DeepseekV3Config, {"scoring_func": "softmax"}),
        (DeepseekV3Config, {"n_shared_experts": 0}),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(config, written):
    ((name, value),) = written.items()
    with pytest.raises(ConfigError, match=rf"config\.json: {name}.*got {value!r}"):
        config.from_raw({**SIZES, **written})


@pytest.mark.parametrize("written", [{"n_group": 3}, {"topk_group": 5}, {"num_experts_per_tok": 5}, {"n_group": 8}])
def test_groups_that_do_not_fit_are_refused(written):
    with pytest.raises(ConfigError, match="n_group"):
        build(DeepseekV3Config.from_raw({**SIZES, **written}))
