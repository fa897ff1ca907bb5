"""docs/AddingAModel.md works as printed, in a process of its own."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fastgen.testing.distributions import FakeSite

CHECK_RULES = "import rules; assert len(rules.WEIGHTS.rules) == len(rules.fg.DECODER_WEIGHTS.rules)"


def blocks(repository: Path, language: str) -> list[str]:
    page = (repository / "docs" / "AddingAModel.md").read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


@pytest.mark.slow
def test_the_tutorial_works(repository: Path, tmp_path: Path):
    adapter, rules, test = blocks(repository, "python")
    project = tomllib.loads(blocks(repository, "toml")[0])["project"]
    site = FakeSite(tmp_path)
    site.add(
        project["name"],
        version=project["version"],
        requires=project["dependencies"],
        keywords=",".join(project["keywords"]),
        entries=project["entry-points"]["fastgen"],
        modules={
            "fastgen_qwen2/model": "",
            "rules": f"from fastgen import api as fg\n{rules}",
            "test_qwen2": test,
        },
    )
    (tmp_path / "fastgen_qwen2" / "__init__.py").write_text(adapter)

    listed = site.run("-m", "fastgen", "models")
    light = site.run("-c", "import fastgen_qwen2, sys; assert 'torch' not in sys.modules")
    assert light.returncode == 0, light.stderr
    assert re.search(r"Qwen2ForCausalLM +qwen2 +fastgen-qwen2 +0\.1\.0 +Qwen2", listed.stdout), listed.stderr
    tested = site.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), f"{tmp_path}/test_qwen2.py"
    )
    assert "1 passed" in tested.stdout, tested.stdout + tested.stderr
    assert site.run("-c", CHECK_RULES).returncode == 0


def test_adapters_are_short(repository: Path):
    assert len(blocks(repository, "python")[0].splitlines()) < 60
    assert len((repository / "fastgen" / "models" / "llama.py").read_text().splitlines()) < 60
