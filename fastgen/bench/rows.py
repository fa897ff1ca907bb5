"""Which engines run: names, policies and addresses from the command line become rows of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastgen.bench.engines import ENGINES, POLICIES, FastgenEngine, policy_row
from fastgen.bench.protocol import Opener
from fastgen.bench.url import UrlTarget, check_url
from fastgen.errors import ConfigError, did_you_mean

__all__ = ["select_rows", "words"]


def words(text: str) -> list[str]:
    """Comma-separated words, each once."""
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


def select_rows(
    engines: Sequence[str],
    *,
    policies: Sequence[str] = (),
    urls: Sequence[str] = (),
    url_model: str | None = None,
    api_key: str | None = None,
    peers: Mapping[str, Opener] | None = None,
) -> dict[str, Opener]:
    """How to open each row, by its name, in the order they take turns. Nothing is loaded.

    Args:
        engines: names of `ENGINES` or ``peers``.
        policies: fastgen runs once for each of them, instead of once with its default.
        urls: ``URL`` or ``NAME=URL`` of servers that speak OpenAI's completions API.
        peers: engines in environments of their own.

    Raises:
        ConfigError: a name that is not known, or none at all.
    """
    known = {**ENGINES, **(peers or {})}
    rows: dict[str, Opener] = {}
    for name in engines:
        if name not in known:
            raise ConfigError(f"unknown engine {name!r}: choose from {', '.join(known)}.{did_you_mean(name, known)}")
        if name == FastgenEngine.name and policies:
            rows |= {f"{name} ({policy})": policy_row(_known_policy(policy)) for policy in policies}
        else:
            rows[name] = known[name]
    if policies and FastgenEngine.name not in engines:
        raise ConfigError(f"--policy {','.join(policies)} is fastgen's, which is not among the engines")
    for text in urls:
        name, url = check_url(text)
        if name in rows:
            raise ConfigError(f"--url {text}: there is a row {name!r} already; give NAME={url}")
        rows[name] = _server(name, url, url_model, api_key)
    if not rows:
        raise ConfigError(f"no engine to run: choose from {', '.join(known)}, or give a --url")
    return rows


def _known_policy(policy: str) -> str:
    if policy not in POLICIES:
        raise ConfigError(
            f"unknown policy {policy!r}: choose from {', '.join(POLICIES)}.{did_you_mean(policy, POLICIES)}"
        )
    return policy


def _server(name: str, url: str, model: str | None, api_key: str | None) -> Opener:
    return lambda settings: UrlTarget(name, url, model=model, api_key=api_key)
