"""From what a user types to a directory: local directories and files, formats and sources of plugins, and mistakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, get_token

from fastgen.config import EngineConfig
from fastgen.core.plugin import CheckpointFormatSpec, ModelSourceSpec, Registry
from fastgen.core.plugin.specs import Spec
from fastgen.core.source import resolve
from fastgen.errors import ConfigError, ModelNotFoundError, PluginError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def model(here: Path) -> Path:
    (here / "models" / "tiny").mkdir(parents=True)
    (here / "models" / "tiny" / "config.json").write_text("{}")
    return here / "models" / "tiny"


def write_model(source: Path, target: Path, *, dtype: str | None) -> None:
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(source.read_bytes())


def plugins(*specs: Spec) -> Registry:
    class Plugin:
        pass

    plugin: Any = Plugin()
    from fastgen.core.plugin import hookimpl

    formats = [spec for spec in specs if isinstance(spec, CheckpointFormatSpec)]
    sources = [spec for spec in specs if isinstance(spec, ModelSourceSpec)]
    plugin.fastgen_checkpoint_formats = hookimpl(lambda: formats)
    plugin.fastgen_model_sources = hookimpl(lambda: sources)
    registry = Registry([])
    registry.register(plugin, "toy-plugin")
    return registry


TOY = CheckpointFormatSpec("toy", (".toy",), write_model)


def refused(model: str | Path, match: str, specs: Sequence[Spec] = (TOY,), **options: Any) -> None:
    with pytest.raises(ModelNotFoundError, match=match) as error:
        resolve(model, registry=plugins(*specs), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spelling", ["models/tiny", "./models/tiny", "models/tiny/", "models/../models/tiny"])
def test_directories(model: Path, spelling: str) -> None:
    for given in (spelling, Path(spelling)):
        files = resolve(given)
        assert files.directory.samefile(model)
        assert (files.name, files.origin, files.revision) == (str(given), "directory", None)
        files.fetch_weights()  # nothing to do


def test_home(model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert resolve("~/models/tiny").directory.samefile(model)


def test_a_file_is_converted_once(here: Path) -> None:
    (here / "m.toy").write_bytes(b"weights")
    first = resolve("m.toy", registry=plugins(TOY))
    assert (first.origin, first.name) == ("format toy", "m.toy")
    assert (first.directory / "model.safetensors").read_bytes() == b"weights"
    second = resolve(here / "m.toy", registry=plugins(TOY))
    assert (second.origin, second.directory) == ("format toy, converted before", first.directory)


def test_a_source_of_a_plugin(model: Path) -> None:
    calls: list[Any] = []

    def fetch(name: str, **options: Any) -> Path:
        calls.append((name, options))
        return model

    registry = plugins(ModelSourceSpec("store", "store://", fetch))
    files = resolve("store://a/b/c", revision="r", token="t", offline=True, registry=registry)
    assert (files.directory, files.origin) == (model, "source store")
    assert calls == [("store://a/b/c", {"revision": "r", "token": "t", "offline": True})]
    with pytest.raises(ModelNotFoundError, match=r"no plugin fetches 'stor://a'.*Did you mean 'store://'"):
        resolve("stor://a", registry=registry)


def test_a_source_gets_a_token_that_was_given_and_no_saved_login(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("saved")
    monkeypatch.setenv("HF_TOKEN", "environment")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    assert get_token() == "environment"  # negative control: there is a login to be found
    tokens: list[str | None] = []

    def fetch(name: str, *, token: str | None, **_: Any) -> Path:
        tokens.append(token)
        return model

    registry = plugins(ModelSourceSpec("store", "store://", fetch))
    for token in (EngineConfig().token, "given"):
        resolve("store://a", token=token, registry=registry)
    assert tokens == [None, "given"]


def test_a_source_that_returns_nonsense() -> None:
    registry = plugins(ModelSourceSpec("store", "store://", lambda name, **_: None))  # type: ignore[arg-type,return-value]
    with pytest.raises(PluginError, match="returned None"):
        resolve("store://a", registry=registry)


def test_revision_of_a_directory_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        resolve(model, revision="main")


@pytest.mark.parametrize("name", ["", "  ", "a\0b"])
def test_names_that_are_none(name: str) -> None:
    refused(name, "is not a model")


@pytest.mark.parametrize(
    "name",
    ["/nowhere/at/all", "./nowhere", "../nowhere", "~/nowhere", "a/b/c", "model.gguf", "o/m.toy", "model.safetensors"],
)
def test_paths_that_are_not_there(name: str) -> None:
    refused(name, "there is no file or directory")
    refused(Path(name), "there is no file or directory")


def test_misspelt_paths_get_a_suggestion(model: Path, here: Path) -> None:
    (here / "model.gguf").write_bytes(b"")
    refused("./models/tinny", "Did you mean 'models/tiny'")
    refused(str(here / "models" / "tinny"), f"Did you mean '{model}'")
    refused("mode.gguf", "Did you mean 'model.gguf'")
    refused("./nodels/tiny", "There is no directory nodels either")


def test_a_name_that_is_almost_a_directory(model: Path) -> None:
    refused("models/tinny", "offline, and models/tinny is not in the hub's cache.*Did you mean 'models/tiny'")


def test_directories_that_are_no_models(model: Path, here: Path) -> None:
    (here / "empty").mkdir()
    refused("empty", "no config.json.*empty$")
    refused("models", "no config.json.*models/tiny has one")
    (here / "empty" / "m.toy").write_bytes(b"")
    refused("empty", r"give the file itself: empty/m\.toy")
    cached = here / "models--o--m" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    refused("models--o--m", r"hub's cache: give models--o--m/snapshots/abc")


def test_files_of_no_known_format(model: Path, here: Path) -> None:
    (here / "notes.md").write_text("")
    refused("notes.md", r"no plugin reads notes\.md; known file formats are \.toy")
    (model / "model.safetensors").write_bytes(b"")
    refused(model / "model.safetensors", "one file of a model; give its directory")


def test_names_too_long_for_the_file_system() -> None:
    refused("x" * 5000, "cannot look at x+: File name too long")


def test_needs_no_torch(model: Path) -> None:
    """`fastgen models` and shell completion may ask for a model's directory."""
    code = "import sys; from fastgen.core.source import resolve; resolve(sys.argv[1]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
