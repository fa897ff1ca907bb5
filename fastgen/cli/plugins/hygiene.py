"""The manners of a plugin: light, modest, harmless twice, the same in every process, honest about versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastgen
from fastgen.cli.plugins.candidate import Candidate
from fastgen.cli.plugins.findings import Finding, failed, passed, skipped, warned
from fastgen.cli.plugins.probe import HEAVY, PROBES
from fastgen.cli.plugins.source_rules import offences
from fastgen.core.plugin.bounds import admits, bounds, current_bounds
from fastgen.core.plugin.loader import normalise
from fastgen.errors import PluginError, some

__all__ = [
    "check_hygiene",
    "keywords",
    "light",
    "loads",
    "probe",
    "references",
    "sources",
    "spawn",
    "twice",
    "version_bounds",
]


def check_hygiene(candidate: Candidate, workspace: Path) -> tuple[list[Finding], list[str]]:
    """Every finding, and the architectures that the plugin claims. Runs the plugin, in processes of its own."""
    with ThreadPoolExecutor() as pool:  # each waits for a process
        seen = {name: pool.submit(probe, candidate, name, workspace) for name in PROBES}
    facts = seen["registry"].result()
    plugins: dict[str, Any] = facts.get("plugins", {})
    architectures = list(dict.fromkeys(name for one in plugins.values() for name in one["architectures"]))
    loaded = bool(plugins) and all(one["status"] == "loaded" for one in plugins.values())
    findings = [version_bounds(candidate), *loads(facts)]
    findings += [light(candidate, seen["light"].result()), *sources(candidate)]
    if loaded:
        findings += [twice(plugins), spawn(facts), references(seen["references"].result())]
        findings += [keywords(candidate, architectures), *_clashes(plugins)]
    else:
        rest = ("twice", "spawn", "references", "keywords")
        findings += [skipped(check, "not tried, since the plugin does not load") for check in rest]
    return findings, architectures


def probe(candidate: Candidate, name: str, workspace: Path) -> dict[str, Any]:
    """What a probe saw; ``{"died": text}`` where its process came to an end before it could say."""
    out = workspace / f"{name}.json"
    pairs = [f"{entry.plugin}={entry.value}" for entry in candidate.entries]
    roots = json.dumps([str(root) for root in candidate.roots])
    try:
        run = candidate.run(["-m", "fastgen.cli.plugins.probe", name, str(out), roots, *pairs], cwd=workspace)
    except PluginError as error:  # it does not end
        return {"died": str(error)}
    if run.returncode or not out.is_file():
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        return {"died": f"the process ended with exit code {run.returncode}: {lines[-1] if lines else 'no message'}"}
    facts: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return facts


# ---- metadata ------------------------------------------------------------------------------------------------------


def version_bounds(candidate: Candidate) -> Finding:
    """The distribution requires fastgen, this version among others, and not every later one."""
    if normalise(candidate.distribution) == "fastgen":
        return skipped("versions", "part of fastgen itself")
    write = f'write dependencies = ["fastgen{current_bounds(fastgen.__version__)}"] in pyproject.toml'
    try:
        specifier = bounds(candidate.requires)
        if specifier is None:
            return failed("versions", "the distribution does not require fastgen", write)
        if not specifier:
            return failed("versions", "requires fastgen of any version: the next one may break it", write)
        if not admits(specifier, fastgen.__version__):
            return failed("versions", f"requires fastgen {specifier}, and this is {fastgen.__version__}", write)
    except ValueError as error:
        return failed("versions", f"the requirement on fastgen cannot be read: {error}", write)
    if not any(clause.strip().startswith(("<", "==", "~=")) for clause in specifier.split(",")):
        return failed("versions", f"requires fastgen {specifier}, with no upper bound", write)
    return passed("versions", f"fastgen {specifier}; this is {fastgen.__version__}")


def keywords(candidate: Candidate, architectures: list[str]) -> Finding:
    """The distribution's keywords name the architectures, which must be known when it does not load."""
    if not architectures:
        return skipped("keywords", "it claims no architecture by name")
    if normalise(candidate.distribution) == "fastgen":
        return skipped("keywords", "part of fastgen itself")
    named = set(re.findall(r"\w+", candidate.keywords))
    missing = [name for name in architectures if name not in named]
    if not missing:
        return passed("keywords", f"name {some(architectures)}")
    return failed(
        "keywords",
        f"the distribution's keywords do not name {some(missing)}, so fastgen cannot tell whose fault it is when the "
        "plugin does not load",
        f"write keywords = [{', '.join(f'{name!r}' for name in architectures)}] in pyproject.toml".replace("'", '"'),
    )


# ---- sources -------------------------------------------------------------------------------------------------------


def sources(candidate: Candidate) -> Iterator[Finding]:
    """Only `fastgen.api` is imported of fastgen, by every module of the plugin."""
    if not candidate.roots:
        yield failed(
            "api only",
            f"no sources of {some([e.module for e in candidate.entries])} were found",
            "see 'loads'",
        )
        return
    wrong: list[str] = []
    count = 0
    for file, is_test in candidate.modules():
        count += 1
        try:
            found = offences(file.read_bytes(), is_test=is_test)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested without end
            line = getattr(error, "lineno", None)
            found = [(line or 1, f"is not Python: {getattr(error, 'msg', error)}")]
        except OSError as error:  # a link that leads nowhere
            found = [(1, f"cannot be read: {error.strerror or error}")]
        wrong += [f"{candidate.shown(file)}:{line} {what}" for line, what in found]
    if wrong:
        yield failed(
            "api only",
            some(wrong, separator="; "),
            "import `from fastgen import api as fg` alone: all else may change without notice. What you miss there is "
            "worth an issue",
        )
    else:
        yield passed("api only", f"{count} module{'s' if count != 1 else ''} read")


# ---- behaviour -----------------------------------------------------------------------------------------------------


def loads(facts: dict[str, Any]) -> Iterator[Finding]:
    """It is installed beside all others as fastgen loads them. ``facts``: of the probe "registry"."""
    if "died" in facts:
        yield failed(
            "loads", facts["died"], "an entry module defines hooks and does nothing else; take out what ends it"
        )
        return
    for name, seen in facts["plugins"].items():
        if seen["status"] != "loaded":
            trace = f"\n{seen['traceback']}" if seen["traceback"] else ""
            yield failed(
                "loads", f"{name}: {seen['error']}{trace}", "mend the error; the traceback begins at your code"
            )
            continue
        claims = sum(len(names) for _, names in seen["claims"])
        yield passed("loads", f"{name}: {claims} claim{'s' if claims != 1 else ''}")


def light(candidate: Candidate, facts: dict[str, Any]) -> Finding:
    """``facts``: of the probe "light"."""
    remedy = (
        "import it inside the functions that need it; classes of parts live in a module of their own, imported inside "
        "build, and specs may name things lazily ('module:attribute')"
    )
    if "died" in facts:
        return failed("light", facts["died"], "see 'loads'")
    heavy = [
        f"{name} ({_where(candidate, where)})" if where else name for name, where in sorted(facts["heavy"].items())
    ]
    if heavy:
        return failed("light", f"importing the entry module loads {', '.join(heavy)}", remedy)
    if facts["devices"]:
        return failed("light", f"importing the entry module opens {some(facts['devices'])}", remedy)
    if facts["errors"]:
        return failed("light", f"importing it fails: {'; '.join(facts['errors'].values())}", "see 'loads'")
    return passed("light", f"importing the entry loads none of {', '.join(HEAVY)} and opens no device")


def _where(candidate: Candidate, where: str) -> str:
    file, _, line = where.rpartition(":")
    return f"{candidate.shown(Path(file))}:{line}"


def twice(plugins: dict[str, Any]) -> Finding:
    """``plugins``: of the probe "registry"."""
    wrong = [f"{name}: {seen['again']}" for name, seen in plugins.items() if seen.get("again")]
    if wrong:
        return failed(
            "twice",
            "; ".join(wrong),
            "a hook returns the same specs whenever it is called, and keeps no count of its calls",
        )
    return passed("twice", "registering it again changes nothing")


def spawn(facts: dict[str, Any]) -> Finding:
    """``facts``: of the probe "registry"."""
    if facts["spawn"]:
        return failed(
            "spawn",
            f"a spawned process differs: {facts['spawn']}",
            "what a plugin registers may depend on its code alone, not on the process or its environment",
        )
    return passed("spawn", "a spawned process has the same plugins")


def references(facts: dict[str, Any]) -> Finding:
    """``facts``: of the probe "references"."""
    wrong = [facts["died"]] if "died" in facts else facts["wrong"]
    if wrong:
        return failed(
            "references", some(wrong, separator="; "), "mend what the spec names; it is imported when it is used"
        )
    return passed("references", "everything that its specs name can be loaded")


def _clashes(plugins: dict[str, Any]) -> Iterator[Finding]:
    for seen in plugins.values():
        for architecture, note in seen.get("clashes", ()):
            yield warned(
                "clashes",
                f"{architecture} {note} here, so nobody can load it without a pin",
                "if yours is to stand in the other's place, declare overrides=('NAME',) in its spec",
            )
