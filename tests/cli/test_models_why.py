"""`fastgen models --why`: claims, overrides, pins, failures, the answer or the reason why there is none."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastgen import api as fg
from fastgen.cli import main
from fastgen.testing.distributions import FakeSite

Run = Callable[..., subprocess.CompletedProcess[str]]

CONFIG = {
    "architectures": ["FooForCausalLM"],
    "model_type": "foo",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class FooConfig(fg.HFConfig):
    pass


def plugin(*architectures: str, **more: Any) -> SimpleNamespace:
    @fg.hookimpl
    def fastgen_models() -> list[fg.ModelSpec]:
        return [fg.ModelSpec(architectures, FooConfig, len, fg.DECODER_WEIGHTS, **more)]

    return SimpleNamespace(fastgen_models=fastgen_models)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """A directory with a config.json, and no weights."""

    def write(**fields: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **fields}), encoding="utf-8")
        return str(tmp_path)

    return write


def why(model: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["models", "--why", model, *options])


def facts(model: str, *options: str) -> dict[str, Any]:
    result = why(model, "--json", *options)
    found: dict[str, Any] = json.loads(result.stdout)
    assert (result.exit_code == 0) == (found["error"] is None)
    assert (result.stderr == "") == (found["error"] is None)
    found["claims"] = [row for row in found["claims"] if row["standing"] != "fallback"]
    return found


def test_the_only_claim(model: Callable[..., str]) -> None:
    directory = model()
    with fg.registered(plugin("FooForCausalLM"), name="foo"):
        found = facts(directory)
        shown = why(directory).stdout
    assert found["model"] == {
        "name": directory,
        "config": f"{directory}/config.json",
        "from": "directory",
        "revision": None,
        "architectures": ["FooForCausalLM"],
        "model_type": "foo",
    }
    assert [(row["plugin"], row["standing"]) for row in found["claims"]] == [("foo", "stands")]
    assert found["choice"]["why"] == "the only claim"
    assert found["config"] == {"class": "FooConfig", "accepted": True}
    assert "  plugin  foo (in this process)\n  why     the only claim\n  config  FooConfig reads it\n" in shown


def test_overriding(model: Callable[..., str]) -> None:
    rival = plugin("FooForCausalLM", overrides=("foo",))
    with fg.registered(plugin("FooForCausalLM"), name="foo"), fg.registered(rival, name="better"):
        found = facts(model())
    standing = {row["plugin"]: row["standing"] for row in found["claims"]}
    assert standing == {"foo": "overridden by better", "better": "stands"}
    assert (found["choice"]["plugin"], found["choice"]["why"]) == ("better", "it overrides foo")


def test_clash_and_the_pin_that_ends_it(model: Callable[..., str]) -> None:
    directory = model()
    with fg.registered(plugin("FooForCausalLM"), name="foo"), fg.registered(plugin("FooForCausalLM"), name="rival"):
        clash = facts(directory)
        pinned = facts(directory, "--adapter", "FooForCausalLM=rival")
        wrong = facts(directory, "--adapter", "FooForCausalLM=rivla")
    assert {row["standing"] for row in clash["claims"]} == {"clashes with rival", "clashes with foo"}
    assert (clash["choice"], clash["error"].startswith("the architecture 'FooForCausalLM' is claimed")) == (None, True)
    assert (pinned["choice"]["plugin"], pinned["choice"]["why"]) == ("rival", "pinned by --adapter")
    assert pinned["pins"] == {"FooForCausalLM": "rival"}
    assert "no such plugin is installed. Did you mean 'rival'?" in wrong["error"]


def test_config_that_its_plugin_refuses(model: Callable[..., str]) -> None:
    directory = model(quantization_config={"quant_method": "gptq"})
    with fg.registered(plugin("FooForCausalLM"), name="foo"):
        found, shown = facts(directory), why(directory)
    assert found["choice"]["plugin"] == "foo"
    assert found["config"] == {"class": "FooConfig", "accepted": False}
    assert "FooConfig refuses it; the reason follows" in shown.stdout
    assert "error: config.json: the weights are quantised" in shown.stderr


def test_nobody_and_no_architecture(fastgen: Run, model: Callable[..., str]) -> None:
    result = fastgen("models", "--why", model(), FASTGEN_PLUGINS="llama")
    assert result.returncode == 1
    assert "no plugin that is loaded claims it" in result.stdout
    assert "error: no plugin for 'FooForCausalLM'" in result.stderr
    result = fastgen("models", "--why", model(architectures=None), FASTGEN_PLUGINS="llama")
    assert "none are named" in result.stdout
    assert "names no architecture" in result.stderr


def test_broken_plugin_that_may_be_the_one(fastgen: Run, site: FakeSite, model: Callable[..., str]) -> None:
    broken = {"foo_plugin": "import missing_thing"}
    site.add("fastgen-foo", keywords="FooForCausalLM", entries={"foo": "foo_plugin"}, modules=broken)
    site.add("fastgen-bar", entries={"bar": "bar_plugin"}, modules={"bar_plugin": "1 / 0"})
    result = fastgen("models", "--why", model(), "--json", FASTGEN_DISABLE_PLUGINS="transformers")
    assert result.returncode == 1
    absent = {row["plugin"]: (row["status"], row["names_it"]) for row in json.loads(result.stdout)["absent"]}
    assert absent == {"foo": ("failed", True), "bar": ("failed", False)}
    assert "FooForCausalLM belongs to the plugin 'foo' (fastgen-foo 1.0), which is broken" in result.stderr


def test_there_is_no_such_model_and_wrong_usage(tmp_path: Path) -> None:
    result = why(str(tmp_path))
    assert (result.exit_code, "has no config.json" in result.stderr) == (1, True)
    assert why("x", "--adapter", "FooForCausalLM").exit_code == 2
    result = CliRunner().invoke(main, ["models", "--adapter", "a=b"])
    assert (result.exit_code, "go with --why MODEL" in result.stderr) == (2, True)


def test_weights_are_not_fetched(model: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fastgen.core import source

    files = source.ModelFiles(Path(model()), "owner/foo", "hub", "abc")
    monkeypatch.setattr(source, "resolve", lambda *_, **__: files)
    monkeypatch.setattr(source.ModelFiles, "fetch_weights", lambda _: pytest.fail("fetched"))
    with fg.registered(plugin("FooForCausalLM"), name="foo"):
        found = facts("owner/foo")
    assert (found["model"]["from"], found["model"]["revision"]) == ("hub", "abc")
