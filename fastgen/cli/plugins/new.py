"""`fastgen plugins new`: a plugin's distribution from a template, which passes its own tests as it is."""

from __future__ import annotations

import keyword
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

import click

import fastgen
from fastgen.core.plugin.bounds import current_bounds
from fastgen.core.plugin.loader import discover, distribution_name, normalise
from fastgen.errors import PluginError

__all__ = ["new"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A template: the real family it serves until its author changes that, and its files beside the common ones."""

    architecture: str
    text: str
    files: Mapping[str, str]
    """``{template: path}``, in which ``PACKAGE`` stands for the package's directory."""


_COMMON = {
    "common/pyproject.toml.txt": "pyproject.toml",
    "common/README.md.txt": "README.md",
    "common/gitignore.txt": ".gitignore",
}
_KINDS = {
    "llama": _Kind(
        "SeedOssForCausalLM",
        "like Llama, with biases of its own",
        {"llama/init.txt": "PACKAGE/__init__.py", "llama/conformance_test.txt": "tests/test_conformance.py"},
    ),
    "moe": _Kind(
        "OlmoeForCausalLM",
        "a mixture of experts",
        {"moe/init.txt": "PACKAGE/__init__.py", "moe/conformance_test.txt": "tests/test_conformance.py"},
    ),
    "custom-block": _Kind(
        "BitNetForCausalLM",
        "a block, an attention and an MLP of its own",
        {
            "custom_block/init.txt": "PACKAGE/__init__.py",
            "custom_block/parts.txt": "PACKAGE/parts.py",
            "custom_block/conformance_test.txt": "tests/test_conformance.py",
        },
    ),
}


@click.command()
@click.argument("name")
@click.option(
    "--from",
    "template",
    type=click.Choice(list(_KINDS)),
    default="llama",
    show_default=True,
    help="What to begin with: " + "; ".join(f"{name}: {kind.text}" for name, kind in _KINDS.items()) + ".",
)
@click.option(
    "--dir",
    "parent",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="Where to put it. [this directory]",
)
def new(name: str, template: str, parent: Path) -> None:
    """Begin a plugin called NAME: a directory fastgen-NAME with a distribution that serves a real family of
    transformers' and passes its own conformance test at once. Change it, with the tests as a guide, until it is yours.
    """
    name = _checked(name)
    target = parent / f"fastgen-{name}"
    if target.exists():
        raise PluginError(
            f"{target} exists already and is left as it is; choose another name, or another place (--dir)"
        )
    kind, package = _KINDS[template], f"fastgen_{name.replace('-', '_')}"
    values = {
        "name": name,
        "distribution": f"fastgen-{name}",
        "package": package,
        "family": "".join(part.capitalize() for part in name.split("-")),
        "architecture": kind.architecture,
        "template": template,
        "requirement": f"fastgen{current_bounds(fastgen.__version__)}",
    }
    _write(target, {**_COMMON, **kind.files}, values)
    module = target / package / "__init__.py"
    click.echo(
        f"{target} serves {kind.architecture}, as an example. Next:\n"
        f"  cd {target}\n"
        "  pip install -e '.[testing]'\n"
        "  pytest                     # passes now; keep it so\n"
        "  fastgen plugins check .    # what to mend before others install it\n"
        f"Make it yours: {module.relative_to(target)} (architecture, config, parts, weights), the keywords in\n"
        "pyproject.toml, the cases in tests/test_conformance.py. docs/AddingAModel.md goes through all of it."
    )


def _checked(name: str) -> str:
    """``name`` without the prefix that every distribution has.

    Raises:
        PluginError: it cannot be the name of a plugin, or is one's already.
    """
    short = normalise(name).removeprefix("fastgen-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", short) or keyword.iskeyword(short):
        raise PluginError(
            f"{name!r} cannot be a plugin's name; write letters, digits and dashes, beginning with a letter: my-family"
        )
    owners = sorted({distribution_name(p) for p in discover() if normalise(p.name) == short})
    if owners:
        raise PluginError(
            f"the plugin name {short!r} belongs to {' and '.join(owners)}, which is installed, and a plugin's name "
            f"must be its own; choose another, {short}2 or my-{short} for example"
        )
    return short


def _write(target: Path, templates: Mapping[str, str], values: Mapping[str, str]) -> None:
    """All files or, should writing fail, none."""
    source = files("fastgen.cli.plugins").joinpath("templates")
    try:
        with tempfile.TemporaryDirectory(prefix=".fastgen-new-", dir=target.parent) as folder:
            made = Path(folder) / target.name
            for template, path in templates.items():
                file = made / path.replace("PACKAGE", values["package"])
                file.parent.mkdir(parents=True, exist_ok=True)
                text = source.joinpath(*template.split("/")).read_text(encoding="utf-8")
                file.write_text(Template(text).substitute(values), encoding="utf-8")
            shutil.move(made, target)
    except OSError as error:
        raise PluginError(f"cannot write {target}: {error.strerror or error}") from None
