"""What is refused, before any weights are read, and what the message says."""

from __future__ import annotations

from typing import Any

import pytest
from fastgen_transformers import fastgen_models
from tiny_configs import tiny_config

from fastgen import ConfigError, FastgenError, UnsupportedModelError


def refusal(architecture: str, raw: dict[str, Any]) -> FastgenError:
    with pytest.raises(FastgenError) as caught:
        made(architecture, raw)
    return caught.value


def made(architecture: str, raw: dict[str, Any]) -> Any:
    """The decoder, its parameters unfilled."""
    parts = fastgen_models()[0].load()
    return parts.build(parts.config.from_raw({**raw, "architectures": [architecture]}))


def tiny(model_type: str, **overrides: Any) -> dict[str, Any]:
    return tiny_config(model_type, **overrides).to_dict()


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder and decoder": ("T5ForConditionalGeneration", {"model_type": "t5"}, "an encoder and a decoder"),
    "images": ("Gemma3ForConditionalGeneration", {"model_type": "gemma3"}, "reads images or sound"),
    "no causal model": ("ViTForCausalLM", {"model_type": "vit"}, "no causal language model of model_type 'vit'"),
    "state space": ("MambaForCausalLM", {"model_type": "mamba"}, "it has no number of attention heads"),
    "not in transformers": ("FooForCausalLM", {"model_type": "foo"}, "no plugin for FooForCausalLM"),
    "remote code": (
        "FooForCausalLM",
        {"model_type": "foo", "auto_map": {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}},
        "code of its own (auto_map), which is not run",
    ),
    "two names": ("FooForCausalLM", {"model_type": "glm"}, "takes its model_type 'glm' for GlmForCausalLM"),
}
BUILT: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "convolution": ("Lfm3ForCausalLM", "lfm3", {}, "keep"),
    "hybrid": ("JambaForCausalLM", "jamba", {}, "keep"),
    "sinks": ("GptOssForCausalLM", "gpt_oss", {}, "is given s_aux"),
    "sparse": ("DeepseekV32ForCausalLM", "deepseek_v32", {}, "is given indices"),
    "own mask": ("DogeForCausalLM", "doge", {}, "makes or changes its mask by itself"),
    "chunked": ("Llama4ForCausalLM", "llama4_text", {}, "mask that depends on more than two positions"),
    "alibi": ("BloomForCausalLM", "bloom", {}, "takes no position_ids"),
    "own attention": ("XGLMForCausalLM", "xglm", {}, "calls the attention function"),
    "sees the future": ("BertLMHeadModel", "bert", {"is_decoder": False}, "sees tokens that come after"),
    "cross-attention": ("BertLMHeadModel", "bert", {"add_cross_attention": True}, "add_cross_attention"),
    "dynamic rope": (
        "GlmForCausalLM",
        "glm",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "the longest sequence in the batch",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_by_the_config(case):
    architecture, raw, told = CASES[case]
    error = refusal(architecture, raw)
    assert isinstance(error, UnsupportedModelError)
    assert told in str(error)
    assert architecture in str(error) or "MambaForCausalLM" in str(error)


@pytest.mark.parametrize("case", BUILT)
def test_by_its_code(case):
    architecture, model_type, overrides, told = BUILT[case]
    error = refusal(architecture, tiny(model_type, **overrides))
    assert isinstance(error, UnsupportedModelError)
    assert str(error).startswith(f"{architecture} cannot run over fastgen's paged cache: ")
    assert told in str(error)


def test_quantised_weights():
    raw = {**tiny("glm"), "quantization_config": {"quant_method": "fp8"}}
    assert "quantised (quantization_config, method 'fp8')" in str(refusal("GlmForCausalLM", raw))


def test_values_that_transformers_refuses():
    error = refusal("GlmForCausalLM", {**tiny("glm"), "num_hidden_layers": "two"})
    assert isinstance(error, ConfigError)
    assert "transformers' config class of 'glm' refuses it" in str(error)


def test_what_is_not_refused_builds():
    """The control: the same two steps, of a model that can be served."""
    decoder = made("GlmForCausalLM", tiny("glm"))
    assert len(list(decoder.attentions())) == 4
    assert {a.scores.window for a in decoder.attentions()} == {None}


def test_windows_and_soft_caps_are_found():
    """Of Cohere 2, three layers of four are local; VaultGemma's scores are capped; DeepSeek's values are narrower."""

    def attentions(architecture: str, model_type: str) -> list[Any]:
        return list(made(architecture, tiny(model_type)).attentions())

    assert [a.scores.window for a in attentions("Cohere2ForCausalLM", "cohere2")] == [8, 8, 8, None]
    assert {a.scores.softcap for a in attentions("VaultGemmaForCausalLM", "vaultgemma")} == {50.0}
    latent = attentions("DeepseekV3ForCausalLM", "deepseek_v3")[0]
    assert (latent.cache_spec.head_dim, latent.cache_spec.value_dim) == (24, 12)
