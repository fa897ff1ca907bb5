"""What a plugin does to a process, found out in processes of its own: ``python -m fastgen.cli.plugins.probe``.

Each probe is given the plugin's entries and writes what it saw as JSON. Nothing here may load torch before the plugin
had its chance to.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["HEAVY", "PROBES", "main"]

HEAVY = ("torch", "transformers", "triton")
"""What an entry module must not load: every command would wait for it."""
SPAWN_SECONDS = 120


class _Watch:
    """Sees the first import of each heavy module, and by which line of the plugin."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = tuple(roots)
        self.first: dict[str, str] = {}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in HEAVY and name not in self.first:
            frames = [f for f in traceback.extract_stack()[:-1] if "importlib" not in f.filename]
            own = [f for f in frames if f.filename.startswith(self.roots)] if self.roots else []
            frame = (own or frames)[-1]
            self.first[name] = f"{frame.filename}:{frame.lineno}"
        return None


def light(entries: Sequence[EntryPoint], roots: Sequence[str]) -> dict[str, Any]:
    """Import each entry and call its hooks: which heavy modules did that load, which devices did it open?"""
    watch = _Watch(roots)
    sys.meta_path.insert(0, watch)
    errors = {}
    from fastgen.core.plugin.describe import describe_error
    from fastgen.core.plugin.hooks import collect

    for entry in entries:
        try:
            collect(entry.load(), entry.name, [])
        except BaseException as error:
            errors[entry.name] = describe_error(error)
    heavy = {name: watch.first.get(name, "") for name in HEAVY if name in sys.modules}
    return {"heavy": heavy, "devices": _devices(), "errors": errors}


def _devices() -> list[str]:
    """Device files and driver libraries that this process holds; known on Linux."""
    found = set()
    try:
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
            except OSError:
                continue
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        found |= {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    except OSError:
        return []
    marks = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "libcuda.so", "libamdhip64.so", "libze_loader.so")
    return sorted(path for path in found if any(mark in path for mark in marks))


def registry(entries: Sequence[EntryPoint], roots: Sequence[str]) -> dict[str, Any]:
    """Load all installed plugins as fastgen does, these twice, and once more in a spawned process."""
    from fastgen.core.plugin import ModelSpec, Spec, collect, load_registry
    from fastgen.core.plugin.describe import describe_error

    loaded = load_registry()
    found = {}
    for entry in entries:
        record = next(r for r in loaded.plugins if (r.name, r.entry) == (entry.name, entry.value))
        facts: dict[str, Any] = {
            "status": record.status,
            "error": record.error,
            "traceback": record.traceback,
            "architectures": [
                name
                for spec in record.specs
                if isinstance(spec, ModelSpec) and not spec.fallback
                for name in spec.architectures
            ],
            "claims": [[type(spec).__name__, list(spec.claims())] for spec in record.specs],
        }
        if record.status == "loaded":
            again: list[Spec] = []
            count = len(loaded.plugins)
            try:
                plugin = entry.load()
                collect(plugin, entry.name, again)
                if not entry.attr:
                    loaded.register(plugin)
            except (Exception, SystemExit) as error:
                facts["again"] = describe_error(error)
            else:
                claims = [[type(spec).__name__, list(spec.claims())] for spec in again]
                if claims != facts["claims"]:
                    facts["again"] = f"it registers {claims} the second time, {facts['claims']} the first"
                elif len(loaded.plugins) != count:
                    facts["again"] = "its module is taken for another plugin the second time"
            facts["clashes"] = [
                [row.architecture, row.note]
                for row in loaded.model_rows()
                if row.plugin is record and "clash" in row.note
            ]
        found[entry.name] = facts
    return {"plugins": found, "spawn": _spawned(load_registry().fingerprint())}


def _spawned(fingerprint: tuple[str, ...]) -> str | None:
    """What is wrong with a spawned process, if anything."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_verify, args=(fingerprint, writer), daemon=True)
    process.start()
    writer.close()
    try:
        if not reader.poll(SPAWN_SECONDS):
            process.kill()
            return f"it did not answer within {SPAWN_SECONDS} s"
        told: str | None = reader.recv()
    except EOFError:
        process.join(10)
        return f"it died with exit code {process.exitcode}"
    process.join(10)
    return told


def _verify(fingerprint: tuple[str, ...], answer: Any) -> None:
    from fastgen.core.plugin import registry

    try:
        registry().verify(fingerprint)
    except Exception as error:
        answer.send(str(error))
    else:
        answer.send(None)


def references(entries: Sequence[EntryPoint], roots: Sequence[str]) -> dict[str, Any]:
    """Load what the specs name: config classes, builders, weight maps, kernels, functions."""
    from fastgen.core.plugin import load_registry

    loaded = load_registry()
    wrong = []
    for entry in entries:
        for record in loaded.plugins:
            if (record.name, record.entry, record.status) == (entry.name, entry.value, "loaded"):
                for spec in record.specs:
                    try:
                        spec.load()  # type: ignore[attr-defined]
                    except Exception as error:
                        wrong.append(str(error).partition("\n")[0])
    return {"wrong": wrong}


PROBES: dict[str, Callable[[Sequence[EntryPoint], Sequence[str]], dict[str, Any]]] = {
    "light": light,
    "registry": registry,
    "references": references,
}


def main(arguments: Sequence[str]) -> None:
    """``PROBE OUT ROOTS NAME=VALUE...``: ROOTS is a JSON list of paths."""
    probe, out, roots, *pairs = arguments
    entries = [EntryPoint(name, value, "fastgen") for name, _, value in (pair.partition("=") for pair in pairs)]
    facts = PROBES[probe](entries, json.loads(roots))
    Path(out).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
