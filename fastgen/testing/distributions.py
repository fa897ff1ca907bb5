"""Fake installed distributions, for tests of plugins: a directory on ``sys.path`` with modules and their metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent

__all__ = ["FakeSite"]


class FakeSite:
    """A directory that looks like ``site-packages`` to the processes and tests that have it on ``sys.path``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(
        self,
        distribution: str,
        *,
        version: str = "1.0",
        requires: Sequence[str] = ("fastgen",),
        keywords: str = "",
        entries: Mapping[str, str] | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """Install ``distribution`` with ``modules`` (``{"package/module" or "module": source}``) and the ``entries``
        (``{name: "module" or "module:attribute"}``) of the entry-point group ``fastgen``."""
        info = self.directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        lines += [f"Keywords: {keywords}"] if keywords else []
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        points = "".join(f"{name} = {value}\n" for name, value in (entries or {}).items())
        (info / "entry_points.txt").write_text(f"[fastgen]\n{points}", encoding="utf-8")
        for name, source in (modules or {}).items():
            file = self.directory / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.parent != self.directory:
                (file.parent / "__init__.py").touch()
            file.write_text(dedent(source), encoding="utf-8")

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS`` in a process of its own that sees the fake distributions, whatever it returns."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FASTGEN_")}
        path = os.pathsep.join(filter(None, (str(self.directory), inherited.get("PYTHONPATH", ""))))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**inherited, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
