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
from fastgen.core.plugin import registry
from fastgen.core.plugin.bounds import current_bounds
from fastgen.core.plugin.loader import discover, distribution_name, normalise
from fastgen.errors import PluginError, did_you_mean

__all__ = ["new"]


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What the new plugin is to serve."""

    name: str
    model_type: str
    reference: str | None
    """Its config class in transformers; ``None``: there is none."""

    @property
    def family(self) -> str:
        return re.sub(r"(For[A-Z]\w*|LMHeadModel)$", "", self.name) or self.name


@dataclass(frozen=True, slots=True)
class _Kind:
    """A template: the real family it serves until its author changes that, and its files beside the common ones."""

    example: _Architecture
    text: str
    files: Mapping[str, str]
    """``{template: path}``, in which ``PACKAGE`` stands for the package's directory."""


_COMMON = {
    "common/pyproject.toml.txt": "pyproject.toml",
    "common/README.md.txt": "README.md",
    "common/gitignore.txt": ".gitignore",
}
_CONFORMANCE, _DEFAULTS = "tests/test_conformance.py", "tests/test_defaults.py"
_KINDS = {
    "llama": _Kind(
        _Architecture("SeedOssForCausalLM", "seed_oss", "SeedOssConfig"),
        "like Llama, with biases of its own",
        {"llama/init.txt": "PACKAGE/__init__.py", "llama/conformance_test.txt": _CONFORMANCE},
    ),
    "moe": _Kind(
        _Architecture("OlmoeForCausalLM", "olmoe", "OlmoeConfig"),
        "a mixture of experts",
        {"moe/init.txt": "PACKAGE/__init__.py", "moe/conformance_test.txt": _CONFORMANCE},
    ),
    "custom-block": _Kind(
        _Architecture("BitNetForCausalLM", "bitnet", "BitNetConfig"),
        "a block, an attention and an MLP of its own",
        {
            "custom_block/init.txt": "PACKAGE/__init__.py",
            "custom_block/parts.txt": "PACKAGE/parts.py",
            "custom_block/conformance_test.txt": _CONFORMANCE,
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
    "--architecture",
    metavar="CLASS",
    help="What it is to serve, as config.json names it: fills in the names, and model_type where transformers has the "
    "class. [the template's real family]",
)
@click.option(
    "--dir",
    "parent",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="Where to put it. [this directory]",
)
def new(name: str, template: str, architecture: str | None, parent: Path) -> None:
    """Begin a plugin called NAME: a directory fastgen-NAME with a distribution that serves a real family of
    transformers' and passes its own tests at once. Change it, with the tests as a guide, until it is yours. With
    --architecture it bears your family's names from the beginning, and its tests say what is left to change.
    """
    name = _checked(name)
    target = parent / f"fastgen-{name}"
    if target.exists():
        raise PluginError(
            f"{target} exists already and is left as it is; choose another name, or another place (--dir)"
        )
    kind, package = _KINDS[template], f"fastgen_{name.replace('-', '_')}"
    served = kind.example if architecture is None else _architecture(architecture)
    own = served != kind.example
    values = {
        "name": name,
        "distribution": f"fastgen-{name}",
        "package": package,
        "family": "".join(part.capitalize() for part in name.split("-")) if architecture is None else served.family,
        "architecture": served.name,
        "model_type": served.model_type,
        "reference": str(served.reference),
        "template": template,
        "asked": "" if architecture is None else f" --architecture {architecture}",
        "begun": (_BEGUN if own else _EXAMPLE).format(architecture=served.name, package=package, example=kind.text),
        "requirement": f"fastgen{current_bounds(fastgen.__version__)}",
    }
    templates = {**_COMMON, **kind.files}
    if own:
        templates = {t: path for t, path in templates.items() if path != _CONFORMANCE}
        templates["common/conformance_test.txt"] = _CONFORMANCE
    if served.reference is not None:
        templates["common/defaults_test.txt"] = _DEFAULTS
    _write(target, templates, values)
    what = f"is to serve {served.name}" if own else f"serves {served.name}, as an example"
    more = ("", "") if own else ("the architecture, ", ", the keywords in pyproject.toml")
    click.echo(
        f"{target} {what}. Next:\n"
        f"  cd {target}\n"
        f"  pytest                     # {'says what to change' if own else 'passes now; keep it so'}\n"
        "  fastgen plugins check .    # what to mend before others install it\n"
        "  pip install -e .           # only now `fastgen models` knows it\n"
        f"Make it yours: {more[0]}config, parts and weights in {package}/__init__.py, the cases in\n"
        f"{_CONFORMANCE}{more[1]}. docs/AddingAModel.md goes through all of it."
    )
    for remark in _remarks(served):
        click.echo(f"note: {remark}", err=True)


_EXAMPLE = """\
It serves {architecture}, which transformers has a class for. To make it yours, change

- the architecture, the config and the parts in `{package}/__init__.py`,
- the architecture among the keywords in `pyproject.toml`,
- the class in `tests/test_defaults.py`,
- `model_type` and the cases in `tests/test_conformance.py`: one for every switch in `config.json` that changes the
  maths."""
_BEGUN = """\
Its parts are still the template's ({example}); the tests say where {architecture} differs.
Change

- the config, the parts and the weights in `{package}/__init__.py`,
- the cases in `tests/test_conformance.py`: one for every switch in `config.json` that changes the maths."""


def _architecture(name: str) -> _Architecture:
    """What transformers knows of it.

    Raises:
        PluginError: no class could have this name.
    """
    if not re.fullmatch(r"[A-Z][A-Za-z0-9_]*", name):
        raise PluginError(
            f"--architecture {name!r} cannot be the name of a class; write what config.json has in architectures: "
            "FooForCausalLM"
        )
    import transformers

    config = getattr(getattr(transformers, name, None), "config_class", None)
    if config is not None:
        return _Architecture(name, config.model_type, config.__name__)
    unknown = _Architecture(name, "", None)
    kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", unknown.family).lower()
    return _Architecture(name, kind, None)


def _remarks(served: _Architecture) -> list[str]:
    """What its author should know before anything else."""
    remarks = []
    if served.reference is None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

        remarks.append(
            f"transformers has no {served.name}.{did_you_mean(served.name, set(KNOWN.values()))} If that is right, "
            f"{_CONFORMANCE} needs write_checkpoint and reference (`help(fastgen.testing.ModelConformance)`)"
        )
    owners = [row.plugin for row in registry().claims_on(served.name) if not row.spec.fallback]
    if owners:
        remarks.append(
            f"{served.name} is served already, by the plugin {owners[0].label}: write overrides=({owners[0].name!r},) "
            "in the ModelSpec if yours is to replace it"
        )
    return remarks


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
