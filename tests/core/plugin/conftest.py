"""Plugins of a few lines, in the fake site-packages."""

from __future__ import annotations

import pytest

from fastgen.testing.distributions import FakeSite


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
