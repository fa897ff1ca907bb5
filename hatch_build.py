"""Wheels that bring the CPU kernels, for people without a compiler: ``FASTGEN_PREBUILD=1 pip wheel --no-deps .``

1 stands for every instruction set of this kind of machine, names (``x86-64-v3,generic``) for these alone. Without that
variable a wheel is pure Python, and the kernels are compiled at first use.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HOME = "fastgen/kernels/cpu"


class PrebuiltKernels(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("FASTGEN_PREBUILD", "0")
        if self.target_name != "wheel" or version == "editable" or wanted == "0":
            return
        sys.path.insert(0, self.root)
        compiler, isa = self._load("compiler"), self._load("isa")
        sources = sorted((Path(self.root) / HOME / "src").glob("*.cpp"))
        self._scratch = tempfile.TemporaryDirectory()
        made = {}
        for level in isa.LEVELS:
            here = not level.machines or platform.machine() in level.machines
            if level.name in wanted.split(",") or (wanted == "1" and here):
                file = self._scratch_file(f"fastgen_cpu-{level.name}.so")
                flags = (*compiler.CXX_FLAGS, *level.flags)
                compiler.compile_to(
                    file, compiler.compiler("c++"), sources, flags, link=("-static-libstdc++", "-static-libgcc")
                )
                made[file] = f"{HOME}/prebuilt/{file.name}"
        if not made:
            raise ValueError(f"FASTGEN_PREBUILD={wanted}: give 1, or some of {[level.name for level in isa.LEVELS]}")
        binding = self._scratch_file("fastgen_cpu_binding.abi3.so")
        source = Path(self.root) / HOME / "src" / "binding.c"
        compiler.compile_to(binding, compiler.compiler("cc"), [source], compiler.binding_flags())
        made[binding] = f"{HOME}/prebuilt/{binding.name}"
        build_data["force_include"].update({str(file): target for file, target in made.items()})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()

    def _scratch_file(self, name: str) -> Path:
        directory = Path(self._scratch.name) / name.removesuffix(".so")
        directory.mkdir()
        return directory / name

    def _load(self, name: str) -> ModuleType:
        """A module by its file: its package would load torch."""
        spec = importlib.util.spec_from_file_location(f"_prebuild_{name}", Path(self.root) / HOME / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
