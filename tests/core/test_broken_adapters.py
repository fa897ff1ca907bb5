"""F1, F2: adapters that load and then fail on a model: the error names the plugin or the tensor, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen import api as fg
from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.plugin import registry
from fastgen.testing.checkpoints import tiny_llama

LLAMA = registry().find_model(["LlamaForCausalLM"]).load()
WEIGHTS = fg.DECODER_WEIGHTS


class NeedsMore(fg.HFConfig):
    depth: int


def raises(config: Any) -> Any:
    return config.no_such_field


def forgets_layers(config: Any) -> Any:
    return LLAMA.build(config.model_copy(update={"num_hidden_layers": 1}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tower"), tokenizer=False)


@pytest.fixture
def attempt(saved: Path, tmp_path: Path) -> Callable[..., str]:
    """What is said where the tiny model is served by an adapter of these parts; empty if it is served."""
    raw = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["TowerForCausalLM"]}))
    (tmp_path / "model.safetensors").symlink_to(saved / "model.safetensors")

    def attempt(config: Any = LLAMA.config, build: Any = LLAMA.build, weights: Any = WEIGHTS) -> str:
        @fg.hookimpl
        def fastgen_models() -> list[fg.ModelSpec]:
            return [fg.ModelSpec(("TowerForCausalLM",), config, build, weights)]

        with fg.registered(SimpleNamespace(fastgen_models=fastgen_models), name="tower"):
            try:
                draw(tmp_path, EngineConfig.of({"device": "cpu", "num_blocks": 1}))
            except fg.FastgenError as error:
                return str(error)
        return ""

    return attempt


def test_the_control_is_served(attempt: Callable[..., str]) -> None:
    assert attempt() == ""


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"model.norm": None}, ["takes: model.norm.weight", "fills: norm.weight"]),
        ({"lm_head": "head.prj"}, ["takes: lm_head.weight", "fills: head.proj.weight"]),
        ({"model.layers.*.mlp.up_proj": "blocks.*.mlp.up[upp]"}, ["mlp.up_proj.weight", "blocks.0.mlp.up[up].weight"]),
        ({"model.layers.*.mlp.up_proj": "blocks.*.mlp.up[gate]"}, ["a second time", "blocks.0.mlp.up[up].weight"]),
    ],
    ids=["a rule too few", "a misspelt part", "a misspelt slot", "two rules for one slot"],
)
def test_a_weight_map_that_misses_a_tensor(attempt: Callable[..., str], rules: Any, named: list[str]) -> None:
    text = attempt(weights=WEIGHTS.but(rules))
    for words in (*named, "the plugin's weight map"):
        assert words in text


def test_a_rule_with_too_few_numbers(attempt: Callable[..., str]) -> None:
    text = attempt(weights=WEIGHTS.but({"model.layers.*.mlp.up_proj": "mlp.up"}))
    assert "plugin 'tower' is broken: the weight map" in text
    assert "'model.layers.*.mlp.up_proj' -> 'mlp.up' has a different number of *" in text


def test_a_transform_that_fails(attempt: Callable[..., str]) -> None:
    text = attempt(weights=WEIGHTS.but({"model.norm": ("norm", lambda tensor, config: tensor.nonsense())}))
    assert "model.norm.weight is [32], which the weight map cannot take apart" in text


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (raises, "'tower' cannot build this model: AttributeError"),
        (lambda config: None, "'tower' built None; build(config) must return a fastgen.api.Decoder"),
        (forgets_layers, "takes: model.layers.1."),
    ],
    ids=["raises", "forgotten return", "too few layers"],
)
def test_a_build_that_fails(attempt: Callable[..., str], build: Any, named: str) -> None:
    assert named in attempt(build=build)


def test_a_build_that_fails_shows_where(attempt: Callable[..., str]) -> None:
    assert "config.no_such_field" in attempt(build=raises)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (NeedsMore, "config.json has no depth, which NeedsMore needs"),
        (dict, "config of ModelSpec(TowerForCausalLM) must be a subclass of fastgen.api.HFConfig"),
    ],
)
def test_a_config_that_does_not_fit(attempt: Callable[..., str], config: Any, named: str) -> None:
    assert named in attempt(config=config)
