"""The plugins of a process: what they registered, what became of them, and which of them serves a thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TypeVar

from fastgen.core.plugin.claims import ModelClaims, ModelRow, choose, failures_note
from fastgen.core.plugin.hooks import collect
from fastgen.core.plugin.loader import PluginRecord, distribution_name, likely_architectures
from fastgen.core.plugin.specs import (
    CheckpointFormatSpec,
    CommandSpec,
    KernelSpec,
    LogitsProcessorSpec,
    ModelSourceSpec,
    ModelSpec,
    Spec,
)
from fastgen.errors import PluginError, did_you_mean

__all__ = ["Registry"]

S = TypeVar("S", bound=Spec)


class Registry:
    """All plugins and what they registered; nothing depends on the order in which they were loaded."""

    def __init__(self, plugins: Iterable[PluginRecord], points: Iterable[EntryPoint] = ()) -> None:
        self._installed = tuple(plugins)
        self._points = {(p.name, p.value, distribution_name(p)): p for p in points}
        self._likely: dict[PluginRecord, tuple[str, ...]] = {}
        self._local: dict[str, PluginRecord] = {}

    # ---- what there is ---------------------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[PluginRecord, ...]:
        """A record of every plugin, failed and disabled ones too, by name."""
        return tuple(sorted((*self._installed, *self._local.values()), key=lambda r: (r.name, r.distribution)))

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        return self._specs(ModelSpec)

    @property
    def formats(self) -> tuple[CheckpointFormatSpec, ...]:
        return self._specs(CheckpointFormatSpec)

    @property
    def sources(self) -> tuple[ModelSourceSpec, ...]:
        return self._specs(ModelSourceSpec)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        """Of several with one operation and name, the one that overrides the others.

        Raises:
            PluginError: two plugins call an implementation of one operation the same, and none overrides the other.
        """
        specs = self._specs(KernelSpec)
        found = (self._find_named(specs, claim, "the kernel") for claim in dict.fromkeys(s.claims()[0] for s in specs))
        return tuple(spec for spec in found if spec is not None)

    @property
    def logits_processors(self) -> tuple[LogitsProcessorSpec, ...]:
        return self._specs(LogitsProcessorSpec)

    @property
    def commands(self) -> tuple[CommandSpec, ...]:
        return self._specs(CommandSpec)

    def record(self, name: str) -> PluginRecord:
        """The record of the plugin called ``name``; the loaded one where several have the name.

        Raises:
            PluginError: there is none.
        """
        found = [r for r in self.plugins if r.name == name]
        if not found:
            raise PluginError(f"no plugin {name!r}.{did_you_mean(name, [r.name for r in self.plugins])}")
        return next((r for r in found if r.status == "loaded"), found[0])

    def failures(self) -> tuple[PluginRecord, ...]:
        return tuple(r for r in self.plugins if r.status == "failed")

    def failures_note(self) -> str:
        """A suffix for "nobody provides this" errors: the broken plugins with their reasons, or an empty string."""
        return failures_note(self.plugins)

    # ---- who serves it ---------------------------------------------------------------------------------------------

    def find_model(self, architectures: str | Sequence[str], *, adapter: Mapping[str, str] | None = None) -> ModelSpec:
        """The family that serves a ``config.json``'s ``architectures``: of the first of them that somebody claims.

        ``adapter`` pins: ``{architecture: plugin}``. The key may also name the plugin that would serve otherwise, the
        value the plugin's distribution.

        Raises:
            UnsupportedModelError: nobody claims any of them.
            PluginError: several plugins do; a broken plugin seems to (with its traceback); a pin names nothing.
        """
        names = [architectures] if isinstance(architectures, str) else list(architectures)
        return self._model_claims().find(names, dict(adapter or {}))

    def model_rows(self) -> list[ModelRow]:
        """Every claim on every architecture and what becomes of it; fallbacks last, sorted by architecture."""
        return self._model_claims().rows()

    def claims_on(self, architecture: str) -> list[ModelRow]:
        """Every claim on one architecture and what becomes of it, fallbacks' patterns too."""
        return self._model_claims().on(architecture)

    def absent(self, architectures: Sequence[str]) -> list[PluginRecord]:
        """Plugins that failed or are switched off, and seem to serve one of these."""
        return self._model_claims().absent(architectures)

    def find_format(self, path: str | Path) -> CheckpointFormatSpec | None:
        """The format of a file, by the longest suffix that fits its name; ``None``: nobody's.

        Raises:
            PluginError: several plugins claim the suffix.
        """
        name = Path(path).name.lower()
        suffix = max((x for s in self.formats for x in s.suffixes if name.endswith(x)), key=len, default=None)
        if suffix is None:
            return None
        return self._choose(self.formats, lambda s: suffix in s.suffixes, f"the checkpoint format {suffix!r}")

    def find_source(self, model: str) -> ModelSourceSpec | None:
        """The source of a model's name, by the longest prefix that fits it; ``None``: nobody's.

        Raises:
            PluginError: several plugins claim the prefix.
        """
        prefix = max((s.prefix for s in self.sources if model.startswith(s.prefix)), key=len, default=None)
        if prefix is None:
            return None
        return self._choose(self.sources, lambda s: s.prefix == prefix, f"the model source {prefix!r}")

    def find_logits_processor(self, name: str) -> LogitsProcessorSpec | None:
        """Raises PluginError when several plugins claim the name."""
        return self._find_named(self.logits_processors, name, "the logits processor")

    def find_command(self, name: str) -> CommandSpec | None:
        """Raises PluginError when several plugins claim the name."""
        return self._find_named(self.commands, name, "the command")

    def _find_named(self, specs: Sequence[S], name: str, what: str) -> S | None:
        if not any(name in s.claims() for s in specs):
            return None
        return self._choose(specs, lambda s: name in s.claims(), f"{what} {name!r}")

    def _choose(self, specs: Iterable[S], fits: Callable[[S], bool], thing: str) -> S:
        loaded = {r.name: r for r in self.plugins if r.status == "loaded"}
        return choose([s for s in specs if fits(s)], loaded, thing)

    def _specs(self, kind: type[S]) -> tuple[S, ...]:
        return tuple(s for r in self.plugins for s in r.specs if isinstance(s, kind))

    def _model_claims(self) -> ModelClaims:
        return ModelClaims(self.plugins, self._likely_architectures)

    def _likely_architectures(self, record: PluginRecord) -> tuple[str, ...]:
        if record.status == "loaded":
            return record.architectures
        if record not in self._likely:
            point = self._points.get((record.name, record.entry, record.distribution))
            likely = likely_architectures(point) if point is not None else ()
            self._likely[record] = tuple(dict.fromkeys((*record.architectures, *likely)))
        return self._likely[record]

    # ---- in-process plugins ----------------------------------------------------------------------------------------

    def register(self, plugin: object, name: str | None = None) -> PluginRecord:
        """Add a module or object that implements hooks, to this process alone.

        Registering an installed plugin's own module is harmless; another one under a name that was registered in this
        process before replaces it.

        Raises:
            PluginError: it is broken, or the name belongs to an installed plugin.
        """
        module = getattr(plugin, "__name__", None)
        name = name or module or type(plugin).__name__
        for record in self._installed:
            if record.status == "loaded" and record.entry == module:
                return record
            if record.status == "loaded" and record.name == name:
                raise PluginError(f"the name {name!r} belongs to the installed plugin {record.label}; choose another")
        specs: list[Spec] = []
        collect(plugin, name, specs)
        architectures = tuple(dict.fromkeys(a for s in specs if isinstance(s, ModelSpec) for a in s.architectures))
        record = PluginRecord(
            name, "", "", "loaded", module or repr(plugin), specs=tuple(specs), architectures=architectures
        )
        self._local[name] = record
        return record

    def unregister(self, name: str) -> None:
        """Take out a plugin registered in this process.

        Raises:
            PluginError: there is none of that name.
        """
        if self._local.pop(name, None) is None:
            raise PluginError(f"no plugin {name!r} was registered in this process.{did_you_mean(name, self._local)}")

    # ---- other processes -------------------------------------------------------------------------------------------

    def fingerprint(self) -> tuple[str, ...]:
        """What this process has loaded, as lines ``name distribution==version``, to be verified by its children."""
        return tuple(
            f"{r.name} {f'{r.distribution}=={r.version}' if r.distribution else '(in process)'}"
            for r in self.plugins
            if r.status == "loaded"
        )

    def verify(self, expected: Iterable[str]) -> None:
        """Check, in a child process, that its plugins are the parent's.

        Raises:
            PluginError: they differ, or the parent had plugins that exist in its process only.
        """
        theirs, ours = set(expected), set(self.fingerprint())
        local = sorted(line.removesuffix(" (in process)") for line in theirs - ours if line.endswith("(in process)"))
        if local:
            raise PluginError(
                f"the plugin {', '.join(map(repr, local))} was registered by a call in the parent process, so this "
                "process does not have it; make it a distribution with an entry point in the group 'fastgen'"
            )
        sides = (("only in the parent", theirs - ours), ("only here", ours - theirs))
        parts = [f"{where}: {', '.join(sorted(lines))}" for where, lines in sides if lines]
        if parts:
            raise PluginError(f"this process has other plugins than its parent ({'; '.join(parts)})")
