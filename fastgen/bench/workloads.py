"""Workloads: prompts as token ids, and how many tokens to generate, so that every engine does the same work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastgen.errors import ConfigError, did_you_mean

__all__ = ["BUILT_IN", "Request", "Workload", "load"]

BUILT_IN = ("w1", "w2")
"""`w1`: one stream, 128 tokens in, 128 out. `w2`: 64 requests at once, about 300 tokens in and 60 out each."""


@dataclass(frozen=True, slots=True)
class Request:
    """``prompt``: token ids. ``out``: how many tokens to generate, end tokens ignored."""

    prompt: list[int]
    out: int


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    title: str
    requests: list[Request]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.out for request in self.requests)

    def short(self) -> Workload:
        """A few tokens of the first two requests, to warm an engine up."""
        few = [Request(request.prompt[:64], min(request.out, 4)) for request in self.requests[:2]]
        return Workload(self.name, self.title, few)


def load(name: str) -> Workload:
    """The built-in workload of this name, or the one in this JSON file: ``{"name": ..., "requests": [{"prompt": [ids],
    "out": tokens}, ...]}``.

    Raises:
        ConfigError: no such name or file, or the file is not a workload that `bench offline` can run; says why.
    """
    if name.lower() in BUILT_IN:
        text = files("fastgen.bench").joinpath("workloads", f"{name.lower()}.json").read_text(encoding="utf-8")
        return _parse(json.loads(text), name.lower(), name)
    path = Path(name)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if path.suffix or len(path.parts) > 1:
            raise ConfigError(f"cannot read the workload {name}: {error.strerror or error}") from None
        hint = did_you_mean(name, BUILT_IN)
        raise ConfigError(f"no workload {name!r}: give {' or '.join(BUILT_IN)}, or a JSON file.{hint}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the workload {name} is not JSON: {error}") from None
    return _parse(raw, path.stem, name)


def _parse(raw: Any, name: str, where: str) -> Workload:
    entries = raw.get("requests") if isinstance(raw, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"the workload {where} has no list 'requests' of {{'prompt': [ids], 'out': tokens}}")
    return Workload(name, str(raw.get("name", name)), [_request(entry, i, where) for i, entry in enumerate(entries)])


def _request(entry: Any, index: int, where: str) -> Request:
    prompt, out = (entry.get("prompt"), entry.get("out")) if isinstance(entry, dict) else (None, None)
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise ConfigError(f"request {index} of the workload {where}: 'prompt' must be a list of token ids")
    if type(out) is not int or out < 1:
        raise ConfigError(f"request {index} of the workload {where}: 'out' must be a positive number, got {out!r}")
    return Request(prompt, out)
