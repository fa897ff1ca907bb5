"""Places where two sources in a checkpoint say different things: what is done is what transformers does, where that is
sane; else the error names both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastgen import api as fg
from fastgen.config import EngineConfig
from fastgen.core import blueprint, family
from fastgen.core.blueprint import Blueprint, draw
from fastgen.core.checkpoint import Checkpoint
from fastgen.core.plugin import registry
from fastgen.errors import FastgenError
from fastgen.models.llama import LlamaConfig
from fastgen.testing.checkpoints import split_shards, tiny_llama
from fastgen.testing.driver import HandDriver, load_decoder

Tensors = dict[str, torch.Tensor]
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
IDS = list(range(3, 30))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether head and embedding are tied."""
    return {
        tied: tiny_llama(tmp_path_factory.mktemp("saved"), tokenizer=False, tie_word_embeddings=tied)
        for tied in (False, True)
    }


@pytest.fixture
def make(saved: dict[bool, Path], tmp_path: Path) -> Callable[..., Path]:
    def make(
        change: Callable[[Tensors], Tensors] = dict, *, tied: bool = False, without: str = "", **fields: Any
    ) -> Path:
        directory = shutil.copytree(saved[tied], tmp_path / "model", dirs_exist_ok=True)
        file = directory / "model.safetensors"
        tensors = {name: tensor.contiguous().clone() for name, tensor in change(load_file(file)).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        raw = {**json.loads((directory / "config.json").read_text()), **fields}
        raw.pop(without, None)
        (directory / "config.json").write_text(json.dumps(raw))
        return directory

    return make


def sketch(directory: Path, **options: Any) -> Blueprint:
    return draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 1, **options}))


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(FastgenError) as caught:
        sketch(directory, **options)
    return str(caught.value)


@torch.inference_mode()
def same_as_transformers(directory: Path) -> bool:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    driver = HandDriver(load_decoder(directory))
    got, want = driver.read(driver.add(IDS), len(IDS)), model(torch.tensor([IDS])).logits[0]
    return (got - want).abs().max().item() < 1e-4


# ---- head and embedding ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tied_and_the_file_holds_the_head_alone(make: Callable[..., Path]) -> None:
    """Writers that keep one name of a shared tensor may keep the other one."""
    directory = make(lambda tensors: {HEAD if name == TABLE else name: t for name, t in tensors.items()}, tied=True)
    assert TABLE not in load_file(directory / "model.safetensors")
    assert same_as_transformers(directory)


@pytest.mark.slow
@pytest.mark.parametrize("root", ["model.language_model.", "transformer."])
def test_tied_and_the_head_alone_under_another_root(make: Callable[..., Path], root: str) -> None:
    def moved(tensors: Tensors) -> Tensors:
        named = {name.replace("model.", root, 1): tensor for name, tensor in tensors.items() if name != TABLE}
        return named | {HEAD: tensors[TABLE]}

    driver = HandDriver(load_decoder(make(tied=True)))
    want = driver.read(driver.add(IDS), len(IDS))
    driver = HandDriver(load_decoder(make(moved, tied=True)))
    assert torch.equal(driver.read(driver.add(IDS), len(IDS)), want)


@pytest.mark.parametrize(
    ("change", "tied", "named"),
    [
        (lambda t: {n: x for n, x in t.items() if n != HEAD}, False, "no tensor fills: head.proj.weight"),
        (lambda t: {n: x for n, x in t.items() if n != TABLE}, False, "no tensor fills: embed.tokens.weight"),
        (lambda t: {n: x for n, x in t.items() if n != TABLE}, True, "no tensor fills: embed.tokens.weight"),
        (lambda t: t | {HEAD: torch.ones(72, 32)}, True, "lm_head.weight is [72, 32], the model wants [64, 32]"),
        (lambda t: t | {HEAD: torch.ones(72, 32)}, False, "lm_head.weight is [72, 32], the model wants [64, 32]"),
        (lambda t: t | {TABLE: torch.ones(72, 32)}, False, "embed_tokens.weight is [72, 32], the model wants [64, 32]"),
        (lambda t: t | {"score.weight": torch.ones(2, 32)}, False, "nothing in the model takes: score.weight"),
        (lambda t: t | {"model.lm_head.weight": t[HEAD]}, False, "nothing in the model takes: model.lm_head.weight"),
    ],
    ids=[
        *("untied, no head", "untied, no table", "tied, neither", "tied, a head of other rows", "a head of other rows"),
        *("a table of other rows", "a classifier's head", "the head twice"),
    ],
)
def test_heads_and_tables_that_do_not_fit(make: Any, change: Any, tied: bool, named: str) -> None:
    assert named in refusal(make(change, tied=tied))


# ---- sizes -----------------------------------------------------------------------------------------------------------

SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "fewer layers": ({"num_hidden_layers": 1}, "nothing in the model takes: model.layers.1."),
    "more layers": ({"num_hidden_layers": 3}, "no tensor fills: blocks.2."),
    "another vocabulary": ({"vocab_size": 60}, "lm_head.weight is [64, 32], the model wants [60, 32]"),
    "more key heads": ({"num_key_value_heads": 4}, "k_proj.weight is [16, 32], the model wants [32, 32]"),
    "fewer key heads": ({"num_key_value_heads": 1}, "k_proj.weight is [16, 32], the model wants [8, 32]"),
    "another head_dim": ({"head_dim": 16}, "k_proj.weight is [16, 32], the model wants [32, 32]"),
    "a head_dim left from before": (
        {"num_attention_heads": 8, "num_key_value_heads": 4},
        "q_proj.weight is [32, 32], the model wants [64, 32]",
    ),
    "another width": ({"intermediate_size": 48}, "down_proj.weight is [32, 64], the model wants [32, 48]"),
    "a wider stream": ({"hidden_size": 64, "head_dim": 8}, "is [64, 32], the model wants [64, 64]"),
    "two names of the layers": ({"n_layer": 1}, "num_hidden_layers = 2 and n_layer = 1; they must agree"),
    "two names of the length": ({"n_ctx": 99}, "max_position_embeddings = 512 and n_ctx = 99; they must agree"),
    "two dtypes": ({"dtype": "bfloat16", "torch_dtype": "float16"}, "they must agree"),
    "a window that nothing reads": ({"sliding_window": 4}, "sliding_window = 4 changes the model's maths"),
    "half of each head turned": ({"partial_rotary_factor": 0.5}, "4 of 8 dimensions of a head are to be turned"),
    "biases denied": ({"attention_bias": True}, "no tensor fills: blocks.0.attn.out.bias"),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_in_the_config_that_are_not_the_files(make: Callable[..., Path], case: str) -> None:
    fields, named = SIZES[case]
    assert named in refusal(make(**fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 77.0}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"rope_parameters": {"rope_type": "default", "type": "linear", "factor": 2.0, "rope_theta": 77.0}},
        {"rope_scaling": {}, "rope_theta": 77.0},
        {
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
            "original_max_position_embeddings": 16,
        },
    ],
    ids=["both dictionaries", "theta twice", "type twice", "an empty dictionary", "two original lengths"],
)
def test_rope_settings_in_two_places(make: Callable[..., Path], fields: dict[str, Any]) -> None:
    assert same_as_transformers(make(**fields))


# ---- names of the family ---------------------------------------------------------------------------------------------


def test_architecture_and_model_type_of_two_families(make: Callable[..., Path]) -> None:
    """transformers goes by one, other engines by the other: what they differ in is not seen in the weights."""
    directory = make(model_type="mistral")
    text = refusal(directory)
    assert "'LlamaForCausalLM' and the model_type 'mistral', which is that of 'MistralForCausalLM'" in text
    assert "correct the one that is wrong" in text
    assert sketch(directory, adapter={"LlamaForCausalLM": "llama"}).spec.plugin == "llama"  # as the message says


@pytest.mark.parametrize("kind", [None, "llama", "tower", "Yi", "", "no_such-type"])
def test_types_that_are_of_no_other_family(make: Callable[..., Path], kind: str | None) -> None:
    assert sketch(make(model_type=kind)).spec.plugin == "llama"


def test_every_familys_own_type_is_taken_for_its_own() -> None:
    """What transformers saves for each served architecture raises no doubt."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    checked = 0
    for kind, architectures in NAMES.items():
        for name in [architectures] if isinstance(architectures, str) else architectures:
            claims = [row.spec for row in registry().claims_on(name) if not row.spec.fallback]
            for spec in claims:
                raw = {"architectures": [name], "model_type": kind}
                family._check_model_type(raw, [name], spec, registry(), {})
                checked += 1
    assert checked > 15


def test_a_strangers_architecture_may_go_by_any_type(make: Callable[..., Path]) -> None:
    served = registry().find_model(["LlamaForCausalLM"]).load()

    @fg.hookimpl
    def fastgen_models() -> list[fg.ModelSpec]:
        return [fg.ModelSpec(("TowerForCausalLM",), served.config, served.build, served.weights)]

    with fg.registered(SimpleNamespace(fastgen_models=fastgen_models), name="tower"):
        assert sketch(make(architectures=["TowerForCausalLM"])).spec.plugin == "tower"


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification", "LlamaForTokenClassification"])
def test_a_family_without_its_language_models_head(make: Callable[..., Path], name: str) -> None:
    text = refusal(make(architectures=[name]))
    assert f"no plugin for {name!r}. 'LlamaForCausalLM' of the same family is served" in text
    assert "Give the checkpoint of the language model" in text


def test_the_first_of_two_architectures_that_is_served(make: Callable[..., Path]) -> None:
    assert sketch(make(architectures=["LlamaModel", "LlamaForCausalLM"])).spec.plugin == "llama"


# ---- number formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("said", ["float32", "bfloat16", None])
def test_dtype_of_config_and_tensors(make: Callable[..., Path], said: str | None, stored: torch.dtype) -> None:
    """Where an accelerator serves the file's own format: what the config says, else what most bytes are, as
    transformers' ``dtype="auto"``. A norm in another format changes nothing."""

    def change(tensors: Tensors) -> Tensors:
        kept = {"model.norm.weight": tensors["model.norm.weight"].double()}
        return {name: tensor.to(stored) for name, tensor in tensors.items()} | kept

    directory = make(change, dtype=said)
    raw = json.loads((directory / "config.json").read_text())
    config, device = fg.HFConfig.from_raw(raw), torch.device("cuda")
    dtype, _, _ = blueprint._dtype(EngineConfig(), config, Checkpoint.open(directory), device)
    assert dtype == (stored if said is None else getattr(torch, said))
    assert sketch(directory).dtype == torch.float32


def test_a_silent_config_of_a_bfloat16_file_warns_as_a_saying_one(make: Callable[..., Path]) -> None:
    directory = make(lambda tensors: {name: t.bfloat16() for name, t in tensors.items()}, without="dtype")
    assert any("overflow" in warning for warning in sketch(directory, dtype="float16").warnings)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_an_index_goes_before_the_whole_file(make: Callable[..., Path], saved: dict[bool, Path]) -> None:
    directory = make()
    split_shards(directory, 2)
    save_file({"model.norm.weight": torch.full([32], float("nan"))}, directory / "model.safetensors")
    drawn = sketch(directory)
    assert any("model.safetensors" in warning for warning in drawn.warnings)
    assert {info.file.name for info in drawn.checkpoint.tensors.values()}.isdisjoint({"model.safetensors"})


def test_auto_map_beside_a_served_architecture_is_data(make: Callable[..., Path]) -> None:
    """F5: no code is looked for, let alone run."""
    assert sketch(make(auto_map={"AutoConfig": "configuration_x.Config"})).spec.plugin == "llama"


def test_this_module_changes_what_it_says_it_does(make: Callable[..., Path]) -> None:
    """The control: the file that all these are made from is served, with nothing to say."""
    drawn = sketch(make())
    assert not drawn.warnings
    assert isinstance(drawn.model_config, LlamaConfig)
