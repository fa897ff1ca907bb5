"""A20: adapters that must not be served, because what they answered would not be what was trained."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.engine import Engine
from fastgen.errors import CheckpointError, ConfigError, FastgenError, ModelNotFoundError, UnsupportedModelError
from fastgen.testing.adapters import random_lora
from fastgen.testing.checkpoints import tiny_llama

Q, V = "model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.v_proj"
MODULES = {Q.format(0): (32, 32), Q.format(1): (32, 32), V.format(0): (16, 32), V.format(1): (16, 32)}
PREFIX = "base_model.model."


def load(model: Path, directory: Path | str, **options):
    """As far as the blueprint: nothing of a model's weights is read before its adapters are known to fit."""
    return draw(model, EngineConfig(lora={"sql": directory}, device="cpu", num_blocks=8, **options))


def refused(model: Path, directory: Path | str, kind: type[FastgenError], *says: str, **options) -> None:
    with pytest.raises(kind) as caught:
        load(model, directory, **options)
    message = str(caught.value)
    assert message.startswith(f"LoRA adapter 'sql' ({directory}): ")
    assert [part for part in says if part not in message] == [], message


def rewrite(directory: Path, change) -> Path:
    """The adapter with other tensors."""
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: t.contiguous() for name, t in change(tensors).items()}, file)
    return directory


def test_control_the_adapter_all_these_are_made_from_is_fine(model, tmp_path):
    (plan,) = load(model, random_lora(tmp_path / "a", MODULES)).loras
    assert sorted(target.module for target in plan.targets) == sorted(MODULES)
    assert (plan.ranks, plan.warnings) == ([4], [])


def test_names_of_a_model_without_its_head(model, tmp_path):
    """As peft saves what was trained on the bare model; patterns speak of its names too."""
    modules = {name.removeprefix("model."): size for name, size in MODULES.items()}
    adapter = random_lora(
        tmp_path / "a", modules, rank_pattern={"^layers.0.self_attn.q_proj": 2}, ranks={"layers.0.self_attn.q_proj": 2}
    )
    (plan,) = load(model, adapter).loras
    assert {target.path for target in plan.targets} == {"blocks.0.attn.qkv", "blocks.1.attn.qkv"}
    assert plan.ranks == [2, 4]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, ["use_dora is True", "(DoRA)", "merge_and_unload"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save is ['lm_head']", "retrained modules"]),
        ({"bias": "all"}, ["bias is 'all'", "retrains the model's biases"]),
        ({"bias": "lora_only"}, ["bias is 'lora_only'"]),
        ({"lora_bias": True}, ["lora_bias is True"]),
        ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices is [1, 2]"]),
        ({"target_parameters": ["experts.down_proj"]}, ["target_parameters", "not linear modules"]),
        ({"layer_replication": [[0, 2], [0, 2]]}, ["layer_replication"]),
        ({"alora_invocation_tokens": [5]}, ["alora_invocation_tokens is [5]"]),
        ({"use_qalora": True}, ["use_qalora"]),
        ({"use_bdlora": {"a": 1}}, ["use_bdlora"]),
        ({"arrow_config": {"a": 1}}, ["arrow_config"]),
        ({"kasa_config": {"a": 1}}, ["kasa_config"]),
        ({"monteclora_config": {"a": 1}}, ["monteclora_config"]),
        ({"velora_config": {"a": 1}}, ["velora_config"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights is 'pissa_niter_4'", "path_initial_model_for_"]),
        ({"init_lora_weights": "OLoRA"}, ["init_lora_weights is 'OLoRA'"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out", "is stored [out, in]"]),
        ({"peft_type": "IA3"}, ["its peft_type is 'IA3', and only LORA is supported"]),
        ({"peft_type": None}, ["its peft_type is None"]),
        ({"use_fancy": 0.5}, ["sets use_fancy to 0.5, which fastgen does not know", "take it out of the file"]),
    ],
    ids=str,
)
def test_a20_settings_that_are_not_done(model, tmp_path, settings, says):
    refused(model, random_lora(tmp_path / "a", MODULES, **settings), UnsupportedModelError, *says)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_fancy": False, "other": None, "more": {}},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False, "peft_version": "0.21.2", "auto_mapping": {"parent_library": "x"}},
        {"bias": None, "lora_dropout": 0.1, "megatron_core": "megatron.core", "qalora_group_size": 16},
    ],
    ids=str,
)
def test_settings_that_change_nothing(model, tmp_path, settings):
    assert load(model, random_lora(tmp_path / "a", MODULES, **settings)).loras


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"r": None}, "r is None, not a whole number above 0"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "8"}, "lora_alpha is '8', not a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern['q_proj'] is 2.5"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj'], not an object"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj'] is None"),
        ({"alpha_pattern": {"(q_proj": 2}}, "alpha_pattern holds '(q_proj', no regular expression"),
        ({"use_rslora": "false"}, "use_rslora is 'false', not true or false"),
        ({"target_modules": 3}, "target_modules is 3, not a list of names"),
        ({"target_modules": "*"}, "target_modules holds '*', no regular expression"),
        ({"layers_to_transform": "0"}, "layers_to_transform is '0'"),
    ],
    ids=str,
)
def test_settings_that_are_no_values(model, tmp_path, settings, says):
    refused(model, random_lora(tmp_path / "a", MODULES, **settings), CheckpointError, says)


@pytest.mark.parametrize(
    ("extra", "kind", "says"),
    [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", UnsupportedModelError, "DoRA"),
        ("model.embed_tokens.lora_embedding_A", UnsupportedModelError, "LoRA on an embedding"),
        ("lm_head.modules_to_save.weight", UnsupportedModelError, "a whole retrained module (modules_to_save)"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", UnsupportedModelError, "a bias of its own (lora_bias)"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", UnsupportedModelError, "trainable_token_indices"),
        ("model.layers.0.self_attn.q_proj.bias", CheckpointError, "nothing in the model takes its tensor"),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", CheckpointError, "nothing in the model takes its"),
        ("model.norm.weight", CheckpointError, "nothing in the model takes its tensor"),
        ("model.layers.0.self_attn.q_proj.lora_C.weight", CheckpointError, "nothing in the model takes its tensor"),
        ("model.layers.0.self_attn.k_proj.lora_A.weight", CheckpointError, "the other factor is missing"),
    ],
)
def test_a20_every_tensor_must_have_its_place(model, tmp_path, extra, kind, says):
    """Whatever the config says, a tensor that is not used is not dropped in silence."""
    adapter = random_lora(tmp_path / "a", MODULES, extra={PREFIX + extra: torch.zeros(4, 32)})
    refused(model, adapter, kind, says, extra.rpartition(".lora_A")[0] or extra)


def test_a20_modules_the_model_does_not_have(model, tmp_path):
    modules = {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.7.mlp.w1": (64, 32), "score": (2, 32)}
    adapter = random_lora(tmp_path / "a", modules)
    refused(model, adapter, CheckpointError, "does not have: model.layers.7.mlp.w1, score. Was it trained on another")


def test_a20_an_adapter_that_matches_nothing(model, tmp_path):
    modules = {f"transformer.h.{layer}.attn.c_attn": (96, 32) for layer in range(8)}
    refused(
        model, random_lora(tmp_path / "a", modules), CheckpointError, "does not have: transformer.h.0", "and 3 more"
    )
    empty = random_lora(tmp_path / "b", {}, extra={"lm_head.weight": torch.zeros(64, 32)})
    refused(model, empty, CheckpointError, "it changes nothing")


def test_a20_an_adapter_that_lost_a_part(model, tmp_path):
    adapter = random_lora(tmp_path / "a", MODULES, target_modules=["q_proj", "v_proj", "of_another_family"])
    assert load(model, adapter).loras
    rewrite(adapter, lambda tensors: {name: t for name, t in tensors.items() if "layers.1.self_attn.v" not in name})
    refused(model, adapter, CheckpointError, "targets model.layers.1.self_attn.v_proj, and there are no tensors")
    # One that was never trained there is whole.
    config = json.loads((adapter / "adapter_config.json").read_text())
    for more in ({"exclude_modules": ["layers.1.self_attn.v_proj"]}, {"target_modules": r".*q_proj|.*\.0\..*\.v_proj"}):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, **more}))
        assert load(model, adapter).loras


@pytest.mark.parametrize(
    "settings", [{"layers_to_transform": 1}, {"layers_to_transform": [1], "layers_pattern": "layers"}]
)
def test_layers_to_transform(model, tmp_path, settings):
    only = {name: size for name, size in MODULES.items() if "layers.1." in name}
    adapter = random_lora(tmp_path / "a", only, target_modules=["q_proj", "v_proj"], **settings)
    (plan,) = load(model, adapter).loras
    assert {target.path for target in plan.targets} == {"blocks.1.attn.qkv"}
    settings = {key: 0 if key == "layers_to_transform" else value for key, value in settings.items()}
    wrong = random_lora(tmp_path / "b", only, target_modules=["q_proj", "v_proj"], **settings)
    refused(
        model, wrong, CheckpointError, "layers.0.self_attn.q_proj, model.layers.0.self_attn.v_proj, and there are no"
    )


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ((33, 32), "its factors for model.layers.0.self_attn.q_proj map 32 -> 33, the model's 32 -> 32"),
        ((32, 64), "map 64 -> 32, the model's 32 -> 32"),
    ],
)
def test_wrong_shapes(model, tmp_path, size, says):
    refused(model, random_lora(tmp_path / "a", {**MODULES, Q.format(0): size}), CheckpointError, says)


def test_ranks_that_contradict_the_config(model, tmp_path):
    adapter = random_lora(tmp_path / "a", MODULES, rank=4, ranks={V.format(1): 2})
    refused(
        model, adapter, CheckpointError, "model.layers.1.self_attn.v_proj have rank 2", "adapter_config.json says 4"
    )
    adapter = random_lora(tmp_path / "b", MODULES)
    bad = {f"{PREFIX}{Q.format(0)}.lora_B.weight": torch.zeros(32, 3)}
    rewrite(adapter, lambda tensors: {**tensors, **bad})
    refused(model, adapter, CheckpointError, "do not fit each other: A is [4, 32], B is [32, 3]")


def test_tensors_that_are_no_numbers(model, tmp_path):
    adapter = random_lora(tmp_path / "a", MODULES)
    rewrite(adapter, lambda tensors: {name: t.to(torch.int8) for name, t in tensors.items()})
    refused(model, adapter, CheckpointError, "is stored as int8")


def test_the_same_module_under_two_names(model, tmp_path):
    adapter = random_lora(tmp_path / "a", MODULES)
    twice = f"{PREFIX}{Q.format(0)}.lora_A.weight"
    rewrite(adapter, lambda tensors: {**tensors, twice.removeprefix(PREFIX): tensors[twice].clone()})
    refused(model, adapter, CheckpointError, "are the same tensor twice")


# ---- vocabulary, embedding and head --------------------------------------------------------------------------------


def test_a20_extra_vocabulary(model, tmp_path):
    """peft saves embedding and head with the adapter when tokens were added."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        adapter = random_lora(tmp_path / name, MODULES, extra={PREFIX + name: torch.zeros(70, 32)})
        refused(model, adapter, UnsupportedModelError, name, "holds 70 tokens and the model 64: extra vocabulary")


def test_an_embedding_beside_the_factors_must_be_the_models_own(model, tmp_path):
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    name = f"{PREFIX}model.embed_tokens.weight"
    assert load(model, random_lora(tmp_path / "a", MODULES, extra={name: table})).loras
    assert load(model, random_lora(tmp_path / "b", MODULES, extra={name: table.to(torch.float16)})).loras
    other = table.clone()
    other[5, 5] += 1
    refused(
        model,
        random_lora(tmp_path / "c", MODULES, extra={name: other}),
        UnsupportedModelError,
        "differs from the model's: a retrained embedding or head",
    )


def test_a_head_of_another_size(model, tmp_path):
    adapter = random_lora(tmp_path / "a", {"lm_head": (70, 32)})
    refused(
        model, adapter, CheckpointError, "map 32 -> 70, the model's 32 -> 64 (tokens were added to its vocabulary?)"
    )


def test_a_head_that_is_the_embedding(tmp_path):
    tied = tiny_llama(tmp_path / "tied", tokenizer=False, tie_word_embeddings=True)
    refused(
        tied, random_lora(tmp_path / "a", {"lm_head": (64, 32)}), CheckpointError, "lm_head (tied to the embedding)"
    )
    table = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    assert load(tied, random_lora(tmp_path / "b", MODULES, extra={f"{PREFIX}lm_head.weight": table})).loras


def test_the_embedding_itself(model, tmp_path):
    adapter = random_lora(tmp_path / "a", {"model.embed_tokens": (64, 32)})
    refused(model, adapter, UnsupportedModelError, "model.embed_tokens, which is no linear part", "Table embed.tokens")


# ---- files ---------------------------------------------------------------------------------------------------------


def test_files_that_are_not_there(model, tmp_path):
    random_lora(tmp_path / "sql-lora", MODULES)
    near = f"there is no such directory. Did you mean '{tmp_path / 'sql-lora'}'?"
    refused(model, tmp_path / "sql-lroa", ModelNotFoundError, near)
    file = tmp_path / "sql-lora" / "adapter_model.safetensors"
    refused(model, file, CheckpointError, "it is a file; give the directory that holds adapter_config.json")
    refused(model, tmp_path, CheckpointError, "has no adapter_config.json, so it is no adapter")
    adapter = random_lora(tmp_path / "a", MODULES)
    (adapter / "adapter_model.safetensors").unlink()
    refused(model, adapter, CheckpointError, "has no adapter_model.safetensors")
    adapter = random_lora(tmp_path / "b", MODULES)
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    refused(model, adapter, CheckpointError, str(file))
    (adapter / "adapter_config.json").write_text("[]")
    refused(model, adapter, CheckpointError, "must hold a JSON object")


def test_bin_only_where_allowed(model, tmp_path):
    adapter = random_lora(tmp_path / "a", MODULES)
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    wanted = load(model, adapter).loras[0].targets
    file.unlink()
    refused(model, adapter, CheckpointError, ".bin weights only", "load_bin=True (--load-bin)")
    (plan,) = load(model, adapter, load_bin=True).loras
    assert plan.targets == wanted
    with Engine.load(model, lora={"a": adapter}, load_bin=True, device="cpu", num_blocks=8) as engine:
        assert engine.limits.loras == ("a",)


def test_a_pickle_that_runs_code(model, tmp_path):
    adapter = random_lora(tmp_path / "a", MODULES)
    (adapter / "adapter_model.safetensors").unlink()
    trap = tmp_path / "trap"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (trap,))

    with (adapter / "adapter_model.bin").open("wb") as file:
        pickle.dump({"x": Evil()}, file)
    refused(model, adapter, CheckpointError, load_bin=True)
    assert not trap.exists()


# ---- around --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "warns"), [(None, False), ("someone/TINY", False), ("/elsewhere/tiny/", False), ("meta/other-7b", True)]
)
def test_another_base_model_is_a_warning(model, tmp_path, base, warns):
    adapter = random_lora(tmp_path / "a", MODULES, base_model_name_or_path=base)
    warnings = [text for text in load(model, adapter).warnings if "LoRA" in text]
    wanted = (
        f"LoRA adapter 'sql' was trained on {base}, and is served on {model}: right only if these are the same model"
    )
    assert warnings == ([wanted] if warns else [])


@pytest.mark.parametrize("lora", [{"": "a"}, {"a": ""}, {" ": "a"}, {"a": 3}, ["a"]])
def test_the_option_itself(lora):
    with pytest.raises(ConfigError, match="lora"):
        EngineConfig(lora=lora)
