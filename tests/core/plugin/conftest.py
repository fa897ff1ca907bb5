"""A fake site-packages that this process and its children see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.testing.distributions import FakeSite


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    for variable in ("FASTGEN_PLUGINS", "FASTGEN_DISABLE_PLUGINS", "FASTGEN_PLUGINS_STRICT"):
        monkeypatch.delenv(variable, raising=False)
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    yield FakeSite(directory)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(directory)):
            del sys.modules[name]


def family(architecture: str, arguments: str = "") -> str:
    """The source of a plugin that claims one architecture."""
    return f"""
        from fastgen import api as fg

        @fg.hookimpl
        def fastgen_models():
            return [fg.ModelSpec(("{architecture}",), "x:Config", "x:build", "x:WEIGHTS"{arguments})]
    """


@pytest.fixture
def add_family(site: FakeSite) -> object:
    def add(name: str, architecture: str, arguments: str = "", **options: object) -> None:
        module = f"plugin_{name.replace('-', '_')}"
        source = {module: family(architecture, arguments)}
        site.add(f"fastgen-{name}", entries={name: module}, modules=source, **options)  # type: ignore[arg-type]

    return add
