"""A stranger's plugin from its wheel, beside fastgen from its own, in an environment that holds neither's sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Exaone4Config

from fastgen.testing.checkpoints import tiny_checkpoint, tiny_llama
from fastgen.testing.tokenizers import BOS, EOS, build_byte_tokenizer

pytestmark = pytest.mark.thorough

PROMPT = "Once upon a time"
PLUGIN = "fastgen-exaone4"


class Clean:
    """A virtual environment with everything this one has but fastgen and its plugins, to install wheels into."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory / "env", with_pip=False, symlinks=True)
        self.bin = directory / "env" / "bin"
        self.directory, borrowed = directory, directory / "borrowed"
        borrowed.mkdir()
        for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(site).iterdir():  # editable installs are found by files called after them, and .pth files
                if "fastgen" not in entry.name and entry.suffix != ".pth" and not (borrowed / entry.name).exists():
                    (borrowed / entry.name).symlink_to(entry)
        (self.site,) = (directory / "env").glob("lib/python*/site-packages")
        (self.site / "borrowed.pth").write_text(f"{borrowed}\n")

    def pip(self, *arguments: str | Path) -> None:
        pip("--python", self.bin / "python", *arguments)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """A program of the environment, in an empty folder, whatever it returns."""
        hidden = ("PYTHON", "FASTGEN_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.directory / "env",
            env={**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    def generate(self, model: Path) -> subprocess.CompletedProcess[str]:
        options = ("--device", "cpu", "--num-blocks", "8", "--max-new-tokens", "12", "--temperature", "0")
        return self.run("fastgen", "generate", *options, model, PROMPT)


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheels(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of fastgen and of the plugin, built from copies without fetching anything."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("__pycache__", ".*cache", ".venv", ".git", "build", "dist")
    for name in ("fastgen", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        copy = shutil.copytree if (repository / name).is_dir() else shutil.copy
        copy(repository / name, sources / "core" / name, **({"ignore": ignored} if copy is shutil.copytree else {}))
    shutil.copytree(repository / "plugins" / PLUGIN, sources / "plugin", ignore=ignored)
    for source in ("core", "plugin"):
        pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, sources / source)
    return out


@pytest.fixture(scope="module")
def clean(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    environment = Clean(tmp_path_factory.mktemp("clean"))
    environment.pip("install", "--no-deps", "--no-index", *wheels.glob("*.whl"))
    return environment


@pytest.fixture(scope="module")
def exaone4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_byte_tokenizer()
    config = Exaone4Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    return tiny_checkpoint(tmp_path_factory.mktemp("exaone4"), config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@torch.inference_mode()
def by_transformers(directory: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(PROMPT, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


@pytest.fixture
def without_plugin(clean: Clean, wheels: Path) -> Iterator[None]:
    clean.pip("uninstall", "--yes", PLUGIN)
    yield
    clean.pip("install", "--no-deps", "--no-index", *wheels.glob("fastgen_exaone4*.whl"))


@pytest.fixture
def broken_plugin(clean: Clean) -> Iterator[None]:
    module = clean.site / "fastgen_exaone4" / "__init__.py"
    source = module.read_text()
    module.write_text(f"{source}\nraise RuntimeError('the reason')\n")
    yield
    module.write_text(source)


def test_nothing_comes_from_the_sources(clean: Clean) -> None:
    code = "import fastgen, fastgen_exaone4, torch; print(fastgen.__file__, fastgen_exaone4.__file__)"
    result = clean.run("python", "-c", code)
    assert result.returncode == 0, result.stderr
    assert all(Path(file).is_relative_to(clean.site) for file in result.stdout.split())
    assert (
        clean.run("python", "-c", "import fastgen_gguf").returncode == 1
    )  # the plugins of this environment are hidden


def test_runs_end_to_end(clean: Clean, exaone4: Path) -> None:
    result = clean.generate(exaone4)
    assert result.returncode == 0, result.stderr
    assert by_transformers(exaone4).strip()
    assert by_transformers(exaone4).strip() in result.stdout


def test_is_listed(clean: Clean) -> None:
    result = clean.run("fastgen", "models")
    (line,) = (line for line in result.stdout.splitlines() if "Exaone4ForCausalLM" in line)
    assert "exaone4" in line.replace("Exaone4ForCausalLM", "")
    assert not result.stderr


@pytest.mark.usefixtures("without_plugin")
def test_removed(clean: Clean, exaone4: Path) -> None:
    result = clean.generate(exaone4)
    assert result.returncode != 0
    assert "no plugin for 'Exaone4ForCausalLM'" in result.stderr
    assert "pip install fastgen-FAMILY" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("broken_plugin")
def test_broken_costs_a_line_and_its_own_models(clean: Clean, exaone4: Path, llama: Path) -> None:
    other = clean.generate(llama)
    assert other.returncode == 0, other.stderr
    assert by_transformers(llama).strip() in other.stdout
    (line,) = (line for line in other.stderr.splitlines() if "exaone4" in line)
    assert "RuntimeError: the reason" in line

    own = clean.generate(exaone4)
    assert own.returncode != 0
    text = " ".join(own.stderr.split())
    assert "Exaone4ForCausalLM belongs to the plugin" in text
    assert "fastgen-exaone4 0.1.0" in text
    assert "Traceback (most recent call last)" in text
    assert "raise RuntimeError('the reason')" in text
