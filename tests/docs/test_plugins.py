"""docs/Plugins.md: every example is a plugin that works, every promise about errors holds."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgen
from fastgen import api as fg
from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.plugin import HOOKS, Registry, load_registry, registry
from fastgen.core.plugin.loader import PluginRecord
from fastgen.core.source import resolve
from fastgen.testing.checkpoints import tiny_checkpoint, tiny_llama
from fastgen.testing.distributions import FakeSite
from fastgen.testing.driver import HandDriver, load_decoder

PLUGINS = {
    "arcee": ["fastgen_arcee"],
    "hfzip": ["fastgen_hfzip", "fastgen_hfzip_convert"],
    "shelf": ["fastgen_shelf"],
    "inplace": ["fastgen_inplace", "fastgen_inplace_kernels"],
    "only": ["fastgen_only"],
    "tensors": ["fastgen_tensors", "fastgen_tensors_command"],
}
"""The page's plugins and their modules; the first is the entry."""


@pytest.fixture
def text(repository: Path) -> str:
    return (repository / "docs" / "Plugins.md").read_text()


@pytest.fixture
def install(page: Callable[[str], Any], site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Install plugins of the page in the fake site, as printed; this process's registry is loaded anew."""

    def install(*names: str, **changes: Any) -> Registry:
        for name in names:
            modules = {module: page("Plugins.md").files[f"{module}.py"] for module in PLUGINS[name]}
            site.add(f"fastgen-{name}", entries={name: PLUGINS[name][0]}, modules=modules, **changes)
        if "FASTGEN_PLUGINS" not in os.environ:  # whatever else this environment has
            monkeypatch.setenv("FASTGEN_PLUGINS", ",".join(["fastgen", *names]))
        monkeypatch.setattr("fastgen.core.plugin.process._registry", None)
        return registry()

    return install


def test_every_printed_file_is_tested(page: Callable[[str], Any]) -> None:
    modules = [f"{module}.py" for modules in PLUGINS.values() for module in modules]
    assert sorted(page("Plugins.md").files) == sorted([*modules, "pyproject.toml"])


def test_every_hook_has_an_example(install: Callable[..., Registry], text: str) -> None:
    plugins = install(*PLUGINS)
    offered = {type(spec) for name in PLUGINS for spec in plugins.record(name).specs}
    assert offered == set(HOOKS.values())
    assert re.findall(r"^### `(fastgen_\w+)`", text, re.MULTILINE) == list(HOOKS)


@pytest.mark.slow
def test_entry_modules_are_light(install: Callable[..., Registry], site: FakeSite) -> None:
    install(*PLUGINS)
    code = (
        "import sys; from fastgen.core.plugin import load_registry; r = load_registry(); "
        f"assert all(r.record(n).status == 'loaded' for n in {list(PLUGINS)}); "
        "assert not {'torch', 'transformers', 'triton', 'pydantic'} & sys.modules.keys()"
    )
    done = site.run("-c", code)
    assert done.returncode == 0, done.stderr


# ---- the examples' effects -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_model_example_equals_transformers(install: Callable[..., Registry], tmp_path: Path, tied: bool) -> None:
    from transformers import ArceeConfig, AutoModelForCausalLM

    install("arcee")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ArceeConfig(
        vocab_size=64, num_key_value_heads=2, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, **sizes
    )
    directory = tiny_checkpoint(tmp_path / "model", config, tokenizer=False)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = list(range(3, 40))
    driver = HandDriver(load_decoder(directory))
    with torch.inference_mode():
        want = reference(torch.tensor([tokens])).logits[0]
    assert (driver.read(driver.add(tokens), 5) - want).abs().max() < 1e-4


def test_model_example_has_transformers_defaults(install: Callable[..., Registry]) -> None:
    from transformers import ArceeConfig as Theirs

    from fastgen.core.config_class import realise

    spec = next(spec for spec in install("arcee").record("arcee").specs if isinstance(spec, fg.ModelSpec))
    sizes = {"vocab_size": 64, "hidden_size": 1920, "num_hidden_layers": 2, "num_attention_heads": 80}
    full = Theirs(**sizes).to_dict()
    whole = dict(realise(spec.config).from_raw(full))
    for key in full.keys() - sizes.keys() - {"intermediate_size", "architectures", "model_type", "bos_token_id"}:
        assert dict(realise(spec.config).from_raw({k: v for k, v in full.items() if k != key})) == whole, key


def test_model_examples_pyproject(page: Callable[[str], Any], install: Callable[..., Registry]) -> None:
    project = tomllib.loads(page("Plugins.md").files["pyproject.toml"])["project"]
    assert project["entry-points"]["fastgen"] == {"arcee": "fastgen_arcee"}
    plugins = install("arcee", version=project["version"], requires=project["dependencies"])
    assert plugins.record("arcee").status == "loaded"
    assert tuple(project["keywords"]) == plugins.record("arcee").architectures


def packed(directory: Path, target: Path, prefix: str = "model/") -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for file in directory.iterdir():
            archive.write(file, prefix + file.name)
    return target


def test_format_example(install: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("hfzip")
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "cache"))
    directory = tiny_llama(tmp_path / "model", tokenizer=False)
    files = resolve(packed(directory, tmp_path / "model.hfzip"))
    assert files.origin == "format hfzip"
    assert (files.directory / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert resolve(tmp_path / "model.hfzip").origin == "format hfzip, converted before"


def test_format_example_takes_care(
    install: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("hfzip")
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "cache"))
    directory = tiny_llama(tmp_path / "model", tokenizer=False)
    climbing = resolve(packed(directory, tmp_path / "climbs.hfzip", prefix="../../../"))
    assert climbing.directory.is_relative_to(tmp_path / "cache")
    assert (climbing.directory / "config.json").is_file()
    (tmp_path / "no.hfzip").write_bytes(b"not a zip file")
    with pytest.raises(fg.CheckpointError, match="is no zip file"):
        resolve(tmp_path / "no.hfzip")
    with zipfile.ZipFile(tmp_path / "bomb.hfzip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", " " * 10**6)
    with pytest.raises(fg.CheckpointError, match="more than 100 times its size"):
        resolve(tmp_path / "bomb.hfzip")


def test_source_example(install: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("shelf")
    with pytest.raises(fg.ConfigError, match="MODEL_SHELF"):
        resolve("shelf://tiny")
    tiny_llama(tmp_path / "shelf" / "tiny", tokenizer=False)
    tiny_llama(tmp_path / "secret", tokenizer=False)
    monkeypatch.setenv("MODEL_SHELF", str(tmp_path / "shelf"))
    files = resolve("shelf://tiny", offline=True)
    assert (files.directory, files.origin) == (tmp_path / "shelf" / "tiny", "source shelf")
    with pytest.raises(fg.ModelNotFoundError, match="Did you mean 'tiny'"):
        resolve("shelf://tinny")
    with pytest.raises(fg.ModelNotFoundError, match="outside the shelf"):
        resolve("shelf://../secret")
    with pytest.raises(fg.ConfigError, match="revision: 'main'"):
        resolve("shelf://tiny", revision="main")


def test_kernel_example(install: Callable[..., Registry], tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "model", tokenizer=False)
    ids = list(range(3, 20))
    before = HandDriver(load_decoder(directory))
    want = before.read(before.add(ids), 5)
    install("inplace")
    drawn = draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 1}))
    (choice,) = (c for c in drawn.kernels.choices if c.need.operation == "gated_activation")
    assert choice.chosen == "inplace"
    assert choice.rejected == (("cpu", "ranked below inplace"), ("torch", "ranked below inplace"))
    after = HandDriver(load_decoder(directory))
    assert torch.allclose(after.read(after.add(ids), 5), want, atol=1e-5)


def test_kernel_example_says_why_not(install: Callable[..., Registry], tmp_path: Path) -> None:
    install("inplace")
    directory = tiny_llama(tmp_path / "model", tokenizer=False, hidden_act="gelu")
    drawn = draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 1}))
    (choice,) = (c for c in drawn.kernels.choices if c.need.operation == "gated_activation")
    assert choice.chosen == "cpu"
    assert choice.rejected == (("inplace", "silu only, this is gelu"), ("torch", "ranked below cpu"))


def test_logits_processor_example(install: Callable[..., Registry], tmp_path: Path) -> None:
    install("only")
    directory = tiny_llama(tmp_path / "model", tokenizer=False)
    with fastgen.Engine.load(directory, device="cpu") as engine:

        def answer(**options: Any) -> list[int]:
            params = fastgen.SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, **options)
            engine.add([3, 4, 5], params)
            found = []
            while engine.has_work:
                found += [output.token_id for output in engine.step()]
            return found

        assert set(answer(logits_processors={"only": {"allow": [9, 10]}})) <= {9, 10}
        assert not set(answer()) <= {9, 10}
        with pytest.raises(fg.InvalidRequestError, match=r"'only' refused its options.*allow must be a list"):
            answer(logits_processors={"only": {"allow": [10**6]}})


@pytest.mark.slow
def test_command_example(install: Callable[..., Registry], site: FakeSite, tmp_path: Path) -> None:
    install("tensors")
    file = tiny_llama(tmp_path / "model", tokenizer=False) / "model.safetensors"
    done = site.run("-m", "fastgen", "tensors", str(file))
    assert "model.layers.1.mlp.down_proj.weight [32, 64]" in done.stdout.splitlines(), done.stderr
    assert "tensors" in site.run("-m", "fastgen", "--help").stdout


# ---- what the page says about choosing and failing -----------------------------------------------------------------


def family(*claims: str, arguments: str = "", head: str = "") -> str:
    return (
        f"from fastgen import api as fg\n{head}\n@fg.hookimpl\ndef fastgen_models():\n"
        f"    return [fg.ModelSpec({claims!r}, 'x:C', 'x:b', 'x:W'{arguments})]\n"
    )


def add(site: FakeSite, name: str, source: str, **changes: Any) -> None:
    site.add(f"fastgen-{name}", entries={name: f"{name}_module"}, modules={f"{name}_module": source}, **changes)


def test_lists_of_plugins(install: Callable[..., Registry], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`FASTGEN_PLUGINS=llama,fastgen-arcee`" in text
    monkeypatch.setenv("FASTGEN_PLUGINS", "llama,fastgen-arcee")
    plugins = install("arcee", "shelf")
    assert [r.name for r in plugins.plugins if r.status == "loaded"] == ["arcee", "llama"]
    monkeypatch.delenv("FASTGEN_PLUGINS")
    assert "`FASTGEN_DISABLE_PLUGINS=arcee`" in text
    monkeypatch.setenv("FASTGEN_DISABLE_PLUGINS", "arcee")
    assert load_registry().record("arcee").status == "disabled"
    assert load_registry().record("shelf").status == "loaded"


def test_who_wins(site: FakeSite) -> None:
    def winner(*architectures: str, **adapter: str) -> str:
        plugins = load_registry(allow=["llama", "mine", "better", "last"])
        return plugins.find_model(architectures, adapter=adapter).plugin

    add(site, "mine", family("LlamaForCausalLM"))
    with pytest.raises(fg.PluginError, match="claimed by the plugins"):
        winner("LlamaForCausalLM")
    assert winner("LlamaForCausalLM", LlamaForCausalLM="mine") == "mine"
    assert winner("LlamaForCausalLM", llama="fastgen-mine") == "mine"
    add(site, "better", family("LlamaForCausalLM", arguments=", overrides=('llama', 'mine')"))
    add(site, "last", family("*ForCausalLM", arguments=", fallback=True"))
    assert winner("LlamaForCausalLM") == "better"
    assert winner("NobodysForCausalLM") == "last"
    assert winner("Nobodys", "LlamaForCausalLM") == "better"


def test_a_broken_one_costs_the_printed_line(site: FakeSite, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    add(site, "oops", family("OopsForCausalLM", head="import missing\n"))
    plugins = load_registry()
    (line,) = capfd.readouterr().err.splitlines()
    assert line in text
    assert plugins.find_model("LlamaForCausalLM").plugin == "llama"
    with pytest.raises(fg.PluginError, match=r"(?s)belongs to the plugin 'oops'.*Traceback"):
        plugins.find_model("OopsForCausalLM")


def broken(site: FakeSite, source: str, **changes: Any) -> PluginRecord:
    add(site, "foo", source, **changes)
    return load_registry().record("foo")


def test_misspelt_hook(site: FakeSite, text: str) -> None:
    record = broken(site, family("FooForCausalLM").replace("fastgen_models", "fastgen_model"))
    assert record.error is not None
    assert record.error.startswith(told := "fastgen has no hook 'fastgen_model'. Did you mean 'fastgen_models'")
    assert told in text


def test_optional_hook_of_another_version(site: FakeSite, text: str) -> None:
    block = re.search(r"```python\n(@fg.hookimpl\(optionalhook=True\).*?)```", text, re.DOTALL)
    assert block is not None
    assert broken(site, family("FooForCausalLM") + block[1]).status == "loaded"


def test_other_versions_are_refused_before_the_import(site: FakeSite) -> None:
    record = broken(site, "raise SystemExit('imported')", requires=["fastgen>=0.2"])
    assert record.status == "failed"
    assert "it needs fastgen >=0.2, this is fastgen 0.1" in (record.error or "")
    assert "pip install --upgrade fastgen-foo" in (record.error or "")


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_print_what_the_page_says(
    page: Callable[[str], Any],
    install: Callable[..., Registry],
    site: FakeSite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = tomllib.loads(page("Plugins.md").files["pyproject.toml"])["project"]
    keywords = ",".join(project["keywords"])
    install("arcee", version=project["version"], requires=project["dependencies"], keywords=keywords)
    add(site, "mine", family("LlamaForCausalLM"))
    model = str(tiny_llama(tmp_path / "model", tokenizer=False))
    commands = [step for step in page("Plugins.md").steps if hasattr(step, "line")]
    assert len(commands) >= 5
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = shlex.split(command.line.replace("MODEL", model))[1:]
        ran = site.run("-m", "fastgen", *words, COLUMNS="200", FASTGEN_PLUGINS="fastgen,arcee,mine")
        if "LlamaForCausalLM=mine" not in words:
            assert ran.returncode == 0, ran.stderr
        command.assert_printed(ran.stdout)
    assert (tmp_path / "fastgen-my-family" / "fastgen_my_family" / "__init__.py").is_file()
