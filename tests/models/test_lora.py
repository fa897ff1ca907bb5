"""A20: adapters that peft itself makes and saves, for every kind of checkpoint module there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fastgen.core.engine import Engine
from fastgen.errors import FastgenError
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.types import SamplingParams

# peft and transformers warn about each other.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]

PROMPT = [7, 20, 33, 46, 59, 12, 25, 38, 51, 4, 17, 30]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITH_MLP = {**SIZES, "intermediate_size": 48}
GROUPED = {**WITH_MLP, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": SIZES,  # stored [in, out], queries, keys and values fused
    "phi3": GROUPED,  # both fused
    "gpt_neox": WITH_MLP,  # fused head by head
    "falcon": {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},  # fused by groups
    "mixtral": {**GROUPED, "num_local_experts": 4},  # attention beside experts
    "qwen2_moe": {
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "gemma2": {**GROUPED, "head_dim": 8},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
}


def saved(directory: Path, reference: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """A random adapter, saved by peft; and peft's model with it."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    tuned = get_peft_model(reference, LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    tuned.save_pretrained(directory)
    return tuned


@torch.inference_mode()
def logprobs(reference: torch.nn.Module) -> torch.Tensor:
    rows = reference(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    return rows[range(len(PROMPT) - 1), PROMPT[1:]]


def served(engine: Engine, name: str | None) -> torch.Tensor:
    engine.add(PROMPT, SamplingParams(max_new_tokens=1, prompt_logprobs=0, lora=name))
    (output,) = engine.step()
    assert output.error is None
    assert output.prompt_logprobs is not None
    return torch.tensor([one.logprob for one in output.prompt_logprobs if one is not None])


def check(tmp_path: Path, family: str, fields: dict[str, Any], **settings: Any) -> None:
    config = CONFIG_MAPPING[family](**fields)
    model = tiny_checkpoint(tmp_path / "model", config, tokenizer=False)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    base = logprobs(reference)
    tuned = logprobs(saved(tmp_path / "a", reference, **settings))
    engine = Engine.load(model, lora={"a": tmp_path / "a"}, device="cpu", num_blocks=32)
    torch.testing.assert_close(served(engine, None), base, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(served(engine, "a"), tuned, atol=2e-4, rtol=1e-4)
    assert (base - tuned).abs().max() > 0.2


@pytest.mark.parametrize("family", FAMILIES)
def test_a20_every_linear_module(tmp_path, family):
    # To peft, "all-linear" of some mixtures means their experts too.
    attention = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]} if family == "mixtral" else {}
    check(tmp_path, family, FAMILIES[family], **attention)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"0.self_attn.q_proj": 6, r"layers\.\d\..*q_proj": 2, "proj": 8}},
        {"rank_pattern": {"^model.layers.1.mlp.up_proj": 1}, "alpha_pattern": {"(up|k)_proj": 1.5}, "use_rslora": True},
        {"target_modules": ["v_proj", "lm_head"]},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*\.1\..*_proj", "exclude_modules": r".*k_proj"},
        {"init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_a20_settings_that_are_done(tmp_path, settings):
    check(tmp_path, "llama", GROUPED, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"trainable_token_indices": [3, 4]}, "trainable_token_indices is"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "LoRA on an embedding"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is"),
    ],
    ids=str,
)
def test_a20_settings_that_are_not_done(tmp_path, settings, message):
    """As peft writes them, which need not be how the tests of the refusals do."""
    model = tiny_checkpoint(tmp_path / "model", CONFIG_MAPPING["llama"](**GROUPED), tokenizer=False)
    saved(tmp_path / "a", AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), **settings)
    with pytest.raises(FastgenError, match="LoRA adapter 'a'") as caught:
        Engine.load(model, lora={"a": tmp_path / "a"}, device="cpu", num_blocks=32)
    assert message in str(caught.value)


def test_patterns_mean_what_they_mean_to_peft():
    """Both of its matchers, on names and patterns that nearly match."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    from fastgen.core.lora.adapter_config import AdapterConfig

    def ours(**fields: Any) -> AdapterConfig:
        defaults = {
            "rank": 1,
            "alpha": 1.0,
            "rslora": False,
            "ranks": {},
            "alphas": {},
            "target_modules": (),
            "exclude_modules": (),
            "layers": None,
            "layers_pattern": (),
            "fan_in_fan_out": False,
            "base_model": None,
        }
        return AdapterConfig(**{**defaults, **fields})

    names = [
        *(f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1, 10, 11) for x in "qkvo"),
        *(f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in (0, 1) for e in (0, 1)),
        "q_proj",
        "lm_head",
        "xlm_head",
        "transformer.h.1.attn.c_attn",
    ]
    patterns = [
        "q_proj",
        "1.self_attn.q_proj",
        "^model.layers.1",
        r"layers\.1\..*",
        "(q|v)_proj",
        "proj",
        "lm_head",
        "x",
    ]
    for first in patterns:
        for second in patterns:
            table = {first: 2, second: 3}
            for name in names:
                assert ours(ranks=table).rank_of(name) == table.get(get_pattern_key(table.keys(), name), 1)

    targets: list[Any] = [
        ["q_proj"],
        ["proj"],
        ["self_attn.q_proj", "lm_head"],
        r".*\.1\..*proj",
        "q_proj",
        ["up_proj"],
    ]
    excludes: list[Any] = [None, ["layers.1.self_attn.q_proj"], r".*10.*"]
    for target in targets:
        for exclude in excludes:
            for layers in (None, 1, [0, 11], []):
                for pattern in (None, "layers", ["h", "layers"]):
                    if isinstance(target, str) and (layers is not None or pattern is not None):
                        continue  # peft refuses the combination
                    if layers is None and pattern is not None:
                        continue
                    theirs = LoraConfig(
                        target_modules=target,
                        exclude_modules=exclude,
                        layers_to_transform=layers,
                        layers_pattern=pattern,
                    )
                    mine = ours(
                        target_modules=target if isinstance(target, str) else tuple(target),
                        exclude_modules=exclude if isinstance(exclude, str) else tuple(exclude or ()),
                        layers=None if layers in (None, []) else frozenset([layers] if layers == 1 else layers),
                        layers_pattern=(pattern,) if isinstance(pattern, str) else tuple(pattern or ()),
                    )
                    for name in names:
                        found = check_target_module_exists(theirs, name)
                        wanted = bool(found) and type(found).__name__ != "_ExcludedModule"
                        assert mine.targets(name) == wanted, (name, target, exclude, layers, pattern)
