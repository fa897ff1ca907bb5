"""Specs check themselves where their author wrote them, and load what they name when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click
import pytest

from fastgen import api as fg
from fastgen.core.plugin import Spec
from fastgen.testing.distributions import FakeSite

WRONG: dict[str, tuple[Callable[[], Spec], str]] = {
    "bare string": (lambda: model("FooForCausalLM"), r"write a tuple: \('FooForCausalLM',\)"),
    "no architecture": (lambda: model(()), "architectures is empty"),
    "not a sequence": (lambda: model(7), "must be a tuple of strings, got 7"),
    "not a name": (lambda: model(("Foo For",)), "'Foo For' cannot be an architecture"),
    "pattern without fallback": (lambda: model(("*LM",)), "only a fallback may claim by pattern"),
    "twice": (lambda: model(("A", "A")), "names something twice"),
    "no colon": (lambda: model(("A",), config="pkg.mod.Config"), "written 'module:attribute'"),
    "two colons": (lambda: model(("A",), build="pkg:a:b"), "written 'module:attribute'"),
    "space": (lambda: model(("A",), weights="pkg: W"), "written 'module:attribute'"),
    "config object": (lambda: model(("A",), config=object()), "config must be an HFConfig subclass"),
    "build object": (lambda: model(("A",), build=3), "build must be a function"),
    "no weights": (lambda: model(("A",), weights=None), "weights must be a WeightMap"),
    "description": (lambda: model(("A",), description=5), "description must be a string, got 5"),
    "fallback": (lambda: model(("A",), fallback="no"), "fallback must be True or False, got 'no'"),
    "format's description": (
        lambda: fg.CheckpointFormatSpec("g", (".g",), "x:y", description=None),  # type: ignore[arg-type]
        "description must be a string, got None",
    ),
    "overrides string": (lambda: model(("A",), overrides="llama"), "overrides is the string 'llama'"),
    "suffix": (lambda: fg.CheckpointFormatSpec("g", ("gguf",), "x:y"), "must start with a dot"),
    "suffixes string": (lambda: fg.CheckpointFormatSpec("g", ".gguf", "x:y"), "write a tuple"),  # type: ignore[arg-type]
    "format name": (lambda: fg.CheckpointFormatSpec("", (".g",), "x:y"), "name must be a string"),
    "prefix": (lambda: fg.ModelSourceSpec("s3", "s3", "x:y"), "write it as 's3://'"),
    "operation": (lambda: fg.KernelSpec("", "fast", "x:y"), "operation must be a string"),
    "factory": (lambda: fg.LogitsProcessorSpec("p", 3), "factory must be a function"),  # type: ignore[arg-type]
    "command name": (lambda: fg.CommandSpec("My Command", "x:y"), "cannot be a command's name"),
    "command object": (lambda: fg.CommandSpec("mine", print), "must be a click command"),  # type: ignore[arg-type]
}


def model(architectures: Any, *, config: Any = "x:C", build: Any = "x:b", weights: Any = "x:W", **more: Any) -> Spec:
    return fg.ModelSpec(architectures, config, build, weights, **more)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_spec_is_refused(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(fg.PluginError, match=message):
        make()


def test_right_specs_are_accepted() -> None:
    assert model(["A", "B_2"]).claims() == ("A", "B_2")
    assert model(("*LM",), fallback=True).claims() == ("*LM",)
    assert fg.CheckpointFormatSpec("g", (".GGUF",), print).claims() == (".gguf",)
    assert fg.CommandSpec("mine", click.Command("mine")).claims() == ("mine",)


class FooConfig(fg.HFConfig):
    pass


def build(config: FooConfig) -> Any:
    return config


def test_model_loads_objects_as_they_are() -> None:
    loaded = fg.ModelSpec(("A",), FooConfig, build, fg.DECODER_WEIGHTS).load()
    assert loaded[1:] == (build, fg.DECODER_WEIGHTS)
    assert issubclass(loaded.config, FooConfig)


HEAVY = """
    from fastgen import api as fg

    class Config(fg.HFConfig):
        pass

    class Outer:
        @staticmethod
        def build(config):
            return config

    WEIGHTS = fg.DECODER_WEIGHTS.but({"model.norm": "norm"})
"""


def test_model_loads_references_lazily(site: FakeSite) -> None:
    import sys

    site.add("fastgen-foo", modules={"foo_heavy": HEAVY})
    spec = fg.ModelSpec(("A",), "foo_heavy:Config", "foo_heavy:Outer.build", "foo_heavy:WEIGHTS")
    assert "foo_heavy" not in sys.modules
    assert spec.load().config.__name__ == "Config"
    assert isinstance(spec.load().weights, fg.WeightMap)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": "foo_heavy:Outer"}, "must be a subclass of fastgen.api.HFConfig"),
        ({"config": "foo_heavy:Confg"}, "(?s)cannot load config 'foo_heavy:Confg'.*AttributeError"),
        ({"build": "foo_heavy:WEIGHTS"}, "must be something callable"),
        ({"weights": "foo_heavy:Config"}, "must be a fastgen.api.WeightMap"),
        ({"build": "foo_gone:build"}, "(?s)plugin 'foo' is broken.*No module named 'foo_gone'"),
        ({"build": "foo_bad:build"}, "(?s)ZeroDivisionError.*foo_bad.py"),
        ({"build": "foo_exit:build"}, "it called sys.exit"),
    ],
)
def test_reference_that_leads_nowhere_is_the_plugins_fault(
    site: FakeSite, changes: dict[str, str], message: str
) -> None:
    site.add("fastgen-foo", modules={"foo_heavy": HEAVY, "foo_bad": "1 / 0", "foo_exit": "raise SystemExit"})
    right = fg.ModelSpec(("A",), "foo_heavy:Config", "foo_heavy:Outer.build", "foo_heavy:WEIGHTS", plugin="foo")
    with pytest.raises(fg.PluginError, match=message):
        replace(right, **changes).load()  # type: ignore[arg-type]


def test_kernel_must_be_the_one_it_is_called() -> None:
    kernel = fg.Implementation("linear", "mine", function=print)
    assert fg.KernelSpec("linear", "mine", kernel).load() is kernel
    with pytest.raises(fg.PluginError, match="must be that of 'linear' called 'yours'"):
        fg.KernelSpec("linear", "yours", kernel).load()
    with pytest.raises(fg.PluginError, match=r"must be a fastgen.api.Implementation"):
        fg.KernelSpec("linear", "mine", print).load()  # type: ignore[arg-type]


def test_other_specs_load() -> None:
    command = click.Command("mine")
    assert fg.CommandSpec("mine", command).load() is command
    assert fg.CheckpointFormatSpec("json", (".json",), "json:dumps").load().__name__ == "dumps"
    assert fg.ModelSourceSpec("s3", "s3://", "json:loads").load().__name__ == "loads"
    assert fg.LogitsProcessorSpec("p", "json:loads").load().__name__ == "loads"
    with pytest.raises(fg.PluginError, match="must be a click command"):
        fg.CommandSpec("mine", "json:loads").load()
