"""Who serves what when several claim it: overrides, pins, broken claimants. Never the order of loading."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from fastgen.core.plugin.loader import PluginRecord, normalise
from fastgen.core.plugin.specs import ModelSpec, Spec
from fastgen.errors import PluginError, UnsupportedModelError, did_you_mean

__all__ = ["ModelClaims", "ModelRow", "choose", "is_called"]

S = TypeVar("S", bound=Spec)


def is_called(record: PluginRecord, name: str) -> bool:
    """Whether ``name`` is the plugin's, or its distribution's."""
    return record.name == name or (bool(record.distribution) and normalise(record.distribution) == normalise(name))


def standing(claims: Sequence[S], plugins: Mapping[str, PluginRecord]) -> list[S]:
    """The claims that no other one overrides."""
    return [
        claim
        for claim in claims
        if not any(
            is_called(plugins[claim.plugin], name) for other in claims if other is not claim for name in other.overrides
        )
    ]


def choose(claims: Sequence[S], plugins: Mapping[str, PluginRecord], thing: str, *, pin: str = "") -> S:
    """The one of several claims on one ``thing`` that stands. ``pin`` names another way out in the error.

    Raises:
        PluginError: more than one stands, or they override each other.
    """
    left = standing(claims, plugins)
    if len(left) == 1:
        return left[0]
    owners = [plugins[claim.plugin] for claim in left or claims]
    raise PluginError(
        f"{thing} is claimed by the plugins {' and '.join(r.label for r in owners)}; {pin}"
        f"switch one off (FASTGEN_DISABLE_PLUGINS={owners[0].name}) or have one declare overrides=({owners[0].name!r},)"
    )


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One claim on one architecture, as ``fastgen models`` shows it."""

    architecture: str
    spec: ModelSpec
    plugin: PluginRecord
    note: str
    """Empty when the claim stands; else what becomes of it."""


class ModelClaims:
    """All claims on architectures. ``likely`` tells those of a plugin that is not loaded."""

    def __init__(
        self,
        records: Iterable[PluginRecord],
        likely: Callable[[PluginRecord], tuple[str, ...]],
    ) -> None:
        self.records = tuple(records)
        self.likely = likely
        self.loaded = {r.name: r for r in self.records if r.status == "loaded"}
        specs = [s for r in self.loaded.values() for s in r.specs if isinstance(s, ModelSpec)]
        self.specs = [s for s in specs if not s.fallback]
        self.fallbacks = [s for s in specs if s.fallback]

    def find(self, names: Sequence[str], pins: Mapping[str, str]) -> ModelSpec:
        """See ``Registry.find_model``."""
        if not names:
            raise UnsupportedModelError("the model's config.json names no architecture, so no plugin can be chosen")
        self._check_pins(pins)
        for name in names:
            if (found := self._find_one(name, pins)) is not None:
                return found
        for name in names:
            if found_fallbacks := self._fallbacks(name):
                return choose(found_fallbacks, self.loaded, f"the architecture {name!r}", pin=self._pin(name))
        raise self._unsupported(names)

    def rows(self) -> list[ModelRow]:
        """Every claim, fallbacks last, sorted by architecture."""
        rows = [
            ModelRow(name, spec, self.loaded[spec.plugin], self._note(spec, name))
            for spec in (*self.specs, *self.fallbacks)
            for name in spec.architectures
        ]
        return sorted(rows, key=lambda row: (row.spec.fallback, row.architecture.lower(), row.plugin.name))

    def on(self, name: str) -> list[ModelRow]:
        """Every claim on one architecture, fallbacks' patterns too."""
        specs = [*self._claims(name), *self._fallbacks(name)]
        return [ModelRow(name, spec, self.loaded[spec.plugin], self._note(spec, name)) for spec in specs]

    def absent(self, names: Sequence[str]) -> list[PluginRecord]:
        """Plugins that failed or are switched off, and seem to serve one of these."""
        return [r for r in self.records if r.status != "loaded" and set(names) & set(self.likely(r))]

    def _note(self, spec: ModelSpec, name: str) -> str:
        if spec.fallback:
            return "fallback"
        left = standing(self._claims(name), self.loaded)
        if spec not in left:
            return f"overridden by {', '.join(s.plugin for s in left) or 'another'}"
        rivals = [s.plugin for s in left if s is not spec]
        if rivals:
            return f"clashes with {', '.join(rivals)}"
        broken = self._broken(name, spec)
        return f"blocked by the broken plugin {broken[0].name}" if broken else ""

    def _claims(self, name: str) -> list[ModelSpec]:
        return [s for s in self.specs if name in s.architectures]

    def _fallbacks(self, name: str) -> list[ModelSpec]:
        return [s for s in self.fallbacks if any(fnmatchcase(name, pattern) for pattern in s.architectures)]

    def _pin(self, name: str) -> str:
        claims = self._claims(name) or self._fallbacks(name)
        return f"pin one (the engine option adapter={{{name!r}: {claims[0].plugin!r}}}), "

    def _find_one(self, name: str, pins: Mapping[str, str]) -> ModelSpec | None:
        claims = self._claims(name)
        target = pins.get(name) or next((pins[s.plugin] for s in claims if s.plugin in pins), None)
        if target is not None:
            return self._pinned(name, target)
        found = choose(claims, self.loaded, f"the architecture {name!r}", pin=self._pin(name)) if claims else None
        broken = self._broken(name, found)
        if broken:
            way_out = f"; to do without it, set FASTGEN_DISABLE_PLUGINS={broken[0].name}" if found else ""
            raise PluginError(_broken_text(broken[0], name, way_out))
        return found

    def _pinned(self, name: str, target: str) -> ModelSpec:
        claims = [*self._claims(name), *self._fallbacks(name)]
        for spec in claims:
            if is_called(self.loaded[spec.plugin], target):
                return spec
        for record in self.records:
            if record.status == "failed" and is_called(record, target):
                raise PluginError(_broken_text(record, name, ""))
        served = f"{' and '.join(s.plugin for s in claims)} would" if claims else "no plugin does"
        raise PluginError(f"adapter pins {name!r} to {target!r}, which does not serve it; {served}")

    def _check_pins(self, pins: Mapping[str, str]) -> None:
        """A pin that names nothing would be ignored for ever."""
        plugins = [n for r in self.records for n in (r.name, r.distribution) if n]
        served = [name for s in self.specs for name in s.architectures]
        for key, target in pins.items():
            if not any(is_called(r, target) for r in self.records):
                near = did_you_mean(target, plugins)
                raise PluginError(f"adapter pins {key!r} to {target!r}, but no such plugin is installed.{near}")
            known = key in served or key in plugins or self._fallbacks(key)
            if not known and not any(key in self.likely(r) for r in self.records):
                near = did_you_mean(key, [*served, *plugins])
                raise PluginError(f"adapter pins {key!r}, which no plugin serves and none is called.{near}")

    def _broken(self, name: str, found: ModelSpec | None) -> list[PluginRecord]:
        """Broken plugins that ``name`` seems to belong to, unless the found one overrides them: nothing must
        silently take a broken plugin's place."""
        overridden = found.overrides if found is not None else ()
        return [
            r
            for r in self.records
            if r.status == "failed" and name in self.likely(r) and not any(is_called(r, o) for o in overridden)
        ]

    def _unsupported(self, names: Sequence[str]) -> UnsupportedModelError:
        known = [name for s in self.specs for name in s.architectures]
        text = f"no plugin for {' or '.join(repr(n) for n in names)}."
        if headless := _headless(names, known):
            return UnsupportedModelError(text + headless)
        text += did_you_mean(names[0], known)
        for record in self.records:
            if record.status == "disabled" and set(names) & set(self.likely(record)):
                return UnsupportedModelError(f"{text} The plugin {record.label} serves it but is off: {record.error}.")
        return UnsupportedModelError(
            f"{text} `fastgen models` lists what is installed. More families come as distributions called "
            f"fastgen-FAMILY (pip install fastgen-FAMILY); docs/AddingAModel.md shows how to write one."
            f"{failures_note(self.records)}"
        )


def _headless(names: Iterable[str], known: Iterable[str]) -> str:
    """A suffix for a class of a family that is served, but without its language model's head, or with another."""
    for name in names:
        stem = re.sub(r"(Model|For\w*(Classification|Answering|Choice|Reward\w*))$", "", name)
        for served in known:
            if stem != name and served in (f"{stem}ForCausalLM", f"{stem}LMHeadModel"):
                return (
                    f" {served!r} of the same family is served; {name!r} has no head that tells the next token, or "
                    "another. Give the checkpoint of the language model."
                )
    return ""


def failures_note(records: Iterable[PluginRecord]) -> str:
    """A suffix for "nobody provides this" errors: the broken plugins with their reasons, or an empty string."""
    failed = [r for r in records if r.status == "failed"]
    return "".join(f"\n  the plugin {r.label} is broken and may be the one: {r.error}" for r in failed)


def _broken_text(record: PluginRecord, name: str, way_out: str) -> str:
    trace = f"\n{record.traceback}" if record.traceback else ""
    return f"{name} belongs to the plugin {record.label}, which is broken: {record.error}{way_out}{trace}"
