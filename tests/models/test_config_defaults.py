"""Every key of every family's config.json taken away, and set to null: the answer is then what transformers makes of
the same files, or both refuse."""

from __future__ import annotations

import json
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastgen.core.config_class import realise
from fastgen.core.plugin import registry
from fastgen.errors import FastgenError
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.driver import HandDriver, load_decoder
from fastgen.testing.subject import transformers_config

pytestmark = pytest.mark.thorough

IDS = [(7 * n * n + 5 * n + 11) % 61 + 3 for n in range(40)]
ALL = {"hidden_act": "gelu", "rms_norm_eps": 1e-3}
LAYER_NORM = {"hidden_act": "gelu", "layer_norm_eps": 1e-3}
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
PARTIAL = {
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.75}
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.5,
    "beta_fast": 4.0,
    "beta_slow": 2.0,
    "truncate": False,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 3.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [3.0, 4.0, 5.0, 6.0],
    "attention_factor": 1.25,
}
MOE = {"num_experts_per_tok": 3, "norm_topk_prob": True, "moe_intermediate_size": 24}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
BY_KIND = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**ALL, "attention_bias": True, "mlp_bias": True, "head_dim": 16, "rope_parameters": LLAMA3},
    "llama_tied": {"model_type": "llama", **ALL, **LINEAR, "tie_word_embeddings": True},
    "mistral": {**ALL, **THETA, "sliding_window": 8, "head_dim": 16},
    "ministral": {**ALL, "rope_parameters": YARN, "sliding_window": 8, "head_dim": 16},
    "mixtral": {**ALL, **THETA, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 16},
    "qwen2": {**ALL, "rope_parameters": YARN, **WINDOW},
    "qwen3": {**ALL, "rope_parameters": YARN, **WINDOW, "head_dim": 16, "attention_bias": True},
    "qwen2_moe": {
        **ALL,
        **THETA,
        **WINDOW,
        **MOE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        **ALL,
        **THETA,
        **MOE,
        "use_sliding_window": True,
        "sliding_window": 8,
        "num_experts": 4,
        "decoder_sparse_step": 2,
        "attention_bias": True,
        "head_dim": 16,
    },
    "gemma": {**ALL, "hidden_act": "relu", **THETA, "head_dim": 16, "attention_bias": True},
    "gemma2": {
        **ALL,
        **THETA,
        "hidden_activation": "relu",
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 8,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 1.0,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        **ALL,
        **BY_KIND,
        "hidden_activation": "relu",
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "final_logit_softcapping": 3.0,
    },
    "gpt2": {
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-3,
        "n_inner": 48,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "gpt_neox": {
        "hidden_act": "relu",
        "layer_norm_eps": 1e-3,
        "use_parallel_residual": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
        **PARTIAL,
    },
    "granite": {
        **ALL,
        **LINEAR,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
    },
    "granitemoe": {
        **ALL,
        **LINEAR,
        "attention_bias": True,
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
    },
    "olmo2": {**ALL, **LINEAR, "attention_bias": True},
    "olmo3": {
        **ALL,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},  # transformers loses a flat theta here
        },
        "attention_bias": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "opt": {
        "activation_function": "gelu",
        "ffn_dim": 48,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
        "tie_word_embeddings": False,
    },
    "opt_no_bias": {
        "model_type": "opt",
        "ffn_dim": 48,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "_remove_final_layer_norm": True,
    },
    "phi": {**LAYER_NORM, **PARTIAL, "qk_layernorm": True},
    "phi3": {
        **ALL,
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 16,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "falcon": {
        "activation": "relu",
        "layer_norm_epsilon": 1e-3,
        "bias": True,
        "ffn_hidden_size": 48,
        "parallel_attn": False,
        "multi_query": False,
        "tie_word_embeddings": False,
        **THETA,
    },
    "falcon_alibi": {"model_type": "falcon", "alibi": True, "multi_query": False},
    "falcon_new": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        **LINEAR,
    },
    "stablelm": {
        **LAYER_NORM,
        **PARTIAL,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": True,
    },
}
"""For each family (``model_type``, where it is not said) a file in which what it reads has another value than its
class's own."""
UNREAD = {
    *("architectures", "model_type", "transformers_version", "dtype", "initializer_range", "init_std", "use_cache"),
    *("attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "layerdrop", "resid_pdrop"),
    *("embd_pdrop", "attn_pdrop", "classifier_dropout", "pad_token_id", "output_router_logits"),
    *("router_aux_loss_coef", "bos_token_id", "eos_token_id", "is_decoder", "reorder_and_upcast_attn"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
}
"""Keys that do not change what a language model answers to given ids."""
PASSED_OVER = {
    ("gemma3_text", "4: rope_scaling.factor absent"): "transformers does not read it where no layer is a full one",
    ("olmo3", "4: rope_scaling.factor absent"): "the same",
    ("falcon_new", "parallel_attn null"): "transformers then makes norms that no file has and no layer uses",
}
"""Where there is a reason to say something else."""
AS_READ = {"max_window_layers", "sliding_window", "use_sliding_window"}
"""Keys that count for more where a file has no ``layer_types``."""
NULLABLE = {"sliding_window"}
"""Keys whose null is a value here, also where transformers fails on it."""


class Family:
    """A checkpoint, and what either side answers to its weights under other config files; each config once."""

    def __init__(self, directory: Path, name: str) -> None:
        config = transformers_config({"model_type": name, **FAMILIES[name]})
        self.directory = tiny_checkpoint(directory, config, tokenizer=False)
        self.raw: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        self.architecture: str = self.raw["architectures"][0]
        self.parameters = count(config)
        self._theirs: dict[str, torch.Tensor | str] = {}
        self._ours: dict[str, torch.Tensor | str] = {}

    def ours(self, raw: dict[str, Any]) -> torch.Tensor | str:
        """Logits ``[tokens, vocab]``, or why they are refused."""
        try:
            read = registry().find_model([self.architecture]).load().config.from_raw(raw)
            if repr(read) not in self._ours:
                driver = HandDriver(load_decoder(self._with(raw)))
                self._ours[repr(read)] = driver.read(driver.add(IDS), len(IDS))
        except FastgenError as error:
            return str(error)
        return self._ours[repr(read)]

    def theirs(self, raw: dict[str, Any]) -> torch.Tensor | str:
        """transformers' logits; or why there are none: it raises, or fills another model than the file's in part and
        leaves the rest of it random."""
        try:
            config = AutoConfig.for_model(**json.loads(json.dumps(raw)))
            key = config.to_json_string(use_diff=False)
            if key not in self._theirs:
                self._theirs[key] = self._answer(config, self._with(raw))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return self._theirs[key]

    @torch.inference_mode()
    def _answer(self, config: Any, directory: Path) -> torch.Tensor | str:
        if config.num_hidden_layers > 8 or count(config) > 2 * self.parameters:  # sizes of the class
            return "a larger model"
        # Eager attention adds ALiBi's biases twice.
        attention = "sdpa" if getattr(config, "alibi", False) else "eager"
        options = {"dtype": torch.float32, "attn_implementation": attention, "output_loading_info": True}
        model, found = AutoModelForCausalLM.from_pretrained(directory, **options)
        wrong = {name: value for name, value in found.items() if value}
        return str(wrong) if wrong else model.eval()(torch.tensor([IDS])).logits[0]

    def _with(self, raw: dict[str, Any]) -> Path:
        (self.directory / "config.json").write_text(json.dumps(raw))
        return self.directory

    def complaint(self, raw: dict[str, Any], absent: dict[str, Any] | None = None) -> str | None:
        """What is wrong with our answer, if anything.

        Args:
            absent: the same file without the key that is null in ``raw``, which transformers may refuse: here a null
                stands for nothing, then.
        """
        want, got = self.theirs(raw), self.ours(raw)
        if isinstance(want, str) and isinstance(got, str):
            return None
        if isinstance(want, str) and absent is not None:
            want = self.ours(absent)
        if isinstance(want, str):
            return f"answered, where transformers says {want}"
        if isinstance(got, str):
            return f"refused, where transformers answers: {got}"
        difference = (got - want).abs().max().item()
        return None if difference < 1e-3 else f"logits differ by {difference}"


def count(config: Any) -> int:
    """The parameters of the model that transformers makes of a config; none of their memory is taken."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def old(raw: dict[str, Any]) -> dict[str, Any]:
    """The same file as transformers 4 wrote it."""
    raw = json.loads(json.dumps(raw))
    raw.pop("layer_types", None)
    raw["torch_dtype"] = raw.pop("dtype")
    rope = raw.pop("rope_parameters", {})
    if "full_attention" in rope:
        if raw["model_type"].startswith("gemma3"):
            raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            raw["sliding_window_pattern"] = raw.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    theta, partial = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}.get(
        raw["model_type"], ("rope_theta", "partial_rotary_factor")
    )
    if rope:
        raw[theta] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        raw[partial] = rope.pop("partial_rotary_factor")
    if rope.get("rope_type", "default") != "default":
        raw["rope_scaling"] = rope
    return raw


def without(raw: dict[str, Any], path: tuple[str, ...], *, null: bool = False) -> dict[str, Any]:
    raw = deepcopy(raw)
    inner = raw
    for name in path[:-1]:
        inner = inner[name]
    if null:
        inner[path[-1]] = None
    else:
        del inner[path[-1]]
    return raw


def paths(raw: dict[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key, and those inside of the rope dictionaries."""
    found = []
    for name, value in raw.items():
        if name in UNREAD:
            continue
        found.append((*before, name))
        if isinstance(value, dict):
            found += paths(value, (*before, name))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_each_key_absent_or_null(name: str, tmp_path: Path) -> None:
    family = Family(tmp_path, name)
    wrong = {"whole": family.complaint(family.raw)}
    for path in paths(family.raw):
        key, absent = ".".join(path), without(family.raw, path)
        wrong[f"{key} absent"] = family.complaint(absent)
        if path[-1] not in NULLABLE:
            wrong[f"{key} null"] = family.complaint(without(family.raw, path, null=True), absent)
    before = old(family.raw)
    wrong["4: whole"] = family.complaint(before)
    for path in paths(before):
        if path[0] not in family.raw or path[0] in AS_READ:
            wrong[f"4: {'.'.join(path)} absent"] = family.complaint(without(before, path))
    passed = {key for family_name, key in PASSED_OVER if family_name == name}
    wrong = {key: text for key, text in wrong.items() if text and key not in passed}
    assert wrong == {}


def test_the_comparison_notices_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: one default of one family, changed."""
    family = Family(tmp_path, "mixtral")
    raw = without(family.raw, ("num_key_value_heads",))
    assert family.complaint(raw) is None
    config = realise(import_module("fastgen.models.mixtral").MixtralConfig)
    monkeypatch.setattr(config, "default_rope_theta", 10_000.0)
    text = family.complaint(without(family.raw, ("rope_parameters",)))
    assert text is not None
    assert text.startswith("logits differ")
