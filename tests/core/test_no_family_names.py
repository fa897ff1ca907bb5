"""The core names no model family: what one needs is a part that any can use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastgen.core.plugin import registry

# A value of `rope_type` and a method of quantisation, which config.json may hold: the core has to spell them.
VALUES = re.compile(r"_?llama3|GPTQ(?:Model)?")
OTHERS = {
    "baichuan",
    "bert",
    "bloom",
    "cohere",
    "deepseek",
    "exaone",
    "glm",
    "internlm",
    "mamba",
    "mpt",
    "smollm",
    "stablelm",
}
WORDS = {"q", "stable"}  # what some architectures begin with: too little, or a word like any other


def family_names() -> set[str]:
    """The leading word of every architecture that is served here, and families that are not, or by plugins."""
    served = [name for spec in registry().models for name in spec.architectures if "*" not in name]
    heads = [re.match(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name) for name in served]
    return {found[0].lower() for found in heads if found} - WORDS | OTHERS


def names_in(source: str, names: set[str]) -> list[str]:
    """Names that begin a word or a part of one, in any case."""
    pattern = "|".join(sorted(names, key=len, reverse=True))
    return re.findall(rf"(?<![a-z])(?i:{pattern})(?![a-z])", VALUES.sub("", source))


def test_core_names_no_family(repository: Path):
    names = family_names()
    assert {"llama", "mistral", "qwen", "falcon", "gpt", "opt", "phi"} <= names
    files = sorted((repository / "fastgen" / "core").rglob("*.py"))
    assert len(files) > 40
    found = {str(path.relative_to(repository)): names_in(path.read_text(), names) for path in files}
    assert not {path: hits for path, hits in found.items() if hits}


@pytest.mark.parametrize(
    "line", ["LlamaThing", "# as in Llama", "model_type == 'qwen2'", "OPTConfig", "phi3", "gpt_neox"]
)
def test_the_search_would_find_one(line):
    assert names_in(line, {"llama", "qwen", "opt", "phi", "gpt"})


@pytest.mark.parametrize("line", ["options = {}", "optional", "rope_type = 'llama3'", "graphics", "adopt"])
def test_and_nothing_else(line):
    assert not names_in(line, {"llama", "qwen", "opt", "phi", "gpt"})
