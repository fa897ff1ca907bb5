"""One gate for code that comes with a checkpoint, shut unless the user opens it."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastgen.config import EngineConfig
from fastgen.core.engine import Engine
from fastgen.errors import ConfigError
from fastgen.testing.checkpoints import tiny_llama
from fastgen.text.tokenizer import Tokenizer

# ---- every call says what it wants ---------------------------------------------------------------------------------

MAY_RUN_CODE = {"from_pretrained", "get_class_from_dynamic_module"}
"""Functions of transformers that may run a checkpoint's code; `pipeline` is one where it is transformers' own."""


def problems(source: str) -> Iterator[str]:
    """Calls that leave the gate to transformers (which then asks on standard input), or hold it open."""
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    pipelines = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for alias in node.names
        if alias.name == "pipeline"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and risky(node.func, pipelines):
            given = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
            if not given:
                yield f"line {node.lineno}: no trust_remote_code"
            elif isinstance(given[0], ast.Constant) and given[0].value is not False:
                yield f"line {node.lineno}: trust_remote_code={given[0].value}"
        elif risky(node, pipelines) and id(node) not in called:
            yield f"line {node.lineno}: passed on, so that its calls cannot be seen"  # type: ignore[attr-defined]


def risky(node: ast.AST, pipelines: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        of_transformers = isinstance(node.value, ast.Name) and node.value.id == "transformers"
        return node.attr in MAY_RUN_CODE or (node.attr == "pipeline" and of_transformers)
    return isinstance(node, ast.Name) and node.id in MAY_RUN_CODE | pipelines


def test_f5_every_call_names_the_gate(repository: Path) -> None:
    files = [
        file
        for folder in ("fastgen", "plugins", "examples", "scripts")
        for file in sorted((repository / folder).rglob("*.py"))
        if "tests" not in file.relative_to(repository).parts
    ]
    found = [f"{file.relative_to(repository)}, {problem}" for file in files for problem in problems(file.read_text())]
    assert found == []
    assert sum("from_pretrained(" in file.read_text() for file in files) >= 3  # there is something to be found


@pytest.mark.parametrize(
    "source",
    [
        "AutoConfig.from_pretrained(place)",
        "AutoTokenizer.from_pretrained(place, **options)",
        "transformers.AutoModel.from_pretrained(place, trust_remote_code=True)",
        "Model.from_pretrained(place, trust_remote_code=None)",
        "load = AutoConfig.from_pretrained",
        "partial(AutoConfig.from_pretrained, trust_remote_code=False)",
        "from transformers import pipeline\npipeline('text-generation', model=place)",
        "from transformers import pipeline as p\np(model=place)",
        "import transformers\ntransformers.pipeline(model=place)",
        "get_class_from_dynamic_module('x.X', place)",
    ],
)
def test_the_check_finds_what_it_should(source: str) -> None:
    assert len(list(problems(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "AutoConfig.from_pretrained(place, trust_remote_code=False)",
        "AutoConfig.from_pretrained(place, trust_remote_code=config.trust_remote_code)",
        "from fastgen import pipeline\npipeline(place)",
        "from transformers import pipeline\npipeline(model=place, trust_remote_code=trust)",
    ],
)
def test_the_check_lets_the_rest_be(source: str) -> None:
    assert list(problems(source)) == []


# ---- code beside a checkpoint --------------------------------------------------------------------------------------

AUTO_MAP = {
    "AutoConfig": "configuration_x.XConfig",
    "AutoModelForCausalLM": "modeling_x.XModel",
    "AutoTokenizer": ["tokenization_x.XTokenizer", "tokenization_x.XTokenizer"],
}
CODE = """
open({marker!r}, "w").close()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
class XConfig(PreTrainedConfig): model_type = "x"
class XModel: pass
class XTokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama that brings code; importing any of it leaves ``ran`` behind."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked the user whether to run code"))
    directory = tiny_llama(tmp_path / "model")
    for module in ("configuration_x", "modeling_x", "tokenization_x"):
        (directory / f"{module}.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    return directory


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def ran(checkpoint: Path) -> bool:
    return (checkpoint.parent / "ran").exists()


@pytest.mark.parametrize("trust", [False, True])
def test_f5_auto_map_in_the_config_of_a_served_family(checkpoint: Path, trust: bool) -> None:
    """The plugin serves it, whatever the flag says: nothing needs the code."""
    edit(checkpoint / "config.json", auto_map=AUTO_MAP)
    engine = Engine.load(checkpoint, EngineConfig(num_blocks=8, device="cpu", trust_remote_code=trust))
    assert engine.tokenizer is not None
    engine.close()
    assert trust or not ran(checkpoint)


@pytest.mark.parametrize("tokenizer_class", ["XTokenizer", None])
def test_f5_a_tokenizer_that_is_code_is_refused(checkpoint: Path, tokenizer_class: str | None) -> None:
    edit(checkpoint / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class=tokenizer_class)
    with pytest.raises(ConfigError, match=r"tokenizer .* is Python code that came with the checkpoint.*trust_remote"):
        Engine.load(checkpoint, EngineConfig(num_blocks=8, device="cpu"))
    assert not ran(checkpoint)


@pytest.mark.parametrize(
    ("file", "tokenizer_class"),
    [
        ("config.json", "PreTrainedTokenizerFast"),
        ("config.json", None),
        ("tokenizer_config.json", "PreTrainedTokenizerFast"),
    ],
)
def test_f5_a_tokenizer_that_needs_no_code_loads_without(
    checkpoint: Path, file: str, tokenizer_class: str | None
) -> None:
    edit(checkpoint / "tokenizer_config.json", tokenizer_class=tokenizer_class)
    edit(checkpoint / file, auto_map=AUTO_MAP)
    assert Tokenizer.load(checkpoint).encode("a") == [97]
    assert not ran(checkpoint)


def test_f5_a_tokenizer_that_is_code_runs_where_it_may(checkpoint: Path) -> None:
    """Negative control: the marker does appear."""
    edit(checkpoint / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="XTokenizer")
    assert Tokenizer.load(checkpoint, trust_remote_code=True).encode("a")
    assert ran(checkpoint)
