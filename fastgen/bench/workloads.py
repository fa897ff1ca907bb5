"""Workloads from files: prompts as token ids, how many tokens to generate, and when each request arrives."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastgen.bench.protocol import Request, Workload
from fastgen.errors import ConfigError, did_you_mean

__all__ = ["BUILT_IN", "load"]

BUILT_IN = ("w1", "w2", "w3")
"""`w1`: one stream, 128 tokens in, 128 out. `w2`: 64 requests at once, about 300 tokens in and 60 out each. `w3`: eight
streams of 64 in, 128 out; when each has given 8 tokens, four prompts of 2,000 arrive, the next as soon as the one
before has its first token."""

_FIELDS = ("prompt", "out", "at", "after", "group")


def load(name: str) -> Workload:
    """The built-in workload of this name, or the one in this JSON file: ``{"name": ..., "requests": [{"prompt": [ids],
    "out": tokens}, ...]}``. A request may say when it arrives, as `Request` does: ``"at"``, ``"after"``, ``"group"``.

    Raises:
        ConfigError: no such name or file, or the file is not a workload; says why.
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
        known = (*BUILT_IN, "fastgen-1200-60")
        hint = did_you_mean(name, known)
        raise ConfigError(f"no workload {name!r}: give {', '.join(known)}, or a JSON file.{hint}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the workload {name} is not JSON: {error}") from None
    return _parse(raw, path.stem, name)


def _parse(raw: Any, name: str, where: str) -> Workload:
    entries = raw.get("requests") if isinstance(raw, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"the workload {where} has no list 'requests' of {{'prompt': [ids], 'out': tokens}}")
    requests: list[Request] = []
    for index, entry in enumerate(entries):
        try:
            requests.append(_request(entry, requests))
        except ValueError as error:
            raise ConfigError(f"request {index} of the workload {where}: {error}") from None
    return Workload(name, str(raw.get("name", name)), requests)


def _request(entry: Any, earlier: list[Request]) -> Request:
    """
    Raises:
        ValueError: says what is wrong with the entry.
    """
    if not isinstance(entry, dict):
        raise ValueError("must be an object with 'prompt' and 'out'")
    for key in entry:
        if key not in _FIELDS:
            raise ValueError(f"unknown field {key!r}.{did_you_mean(key, _FIELDS)}")
    prompt, out, at, group = entry.get("prompt"), entry.get("out"), entry.get("at", 0.0), entry.get("group", "")
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise ValueError("'prompt' must be a list of token ids")
    if type(out) is not int or out < 1:
        raise ValueError(f"'out' must be a positive number, got {out!r}")
    if type(at) not in (int, float) or not 0 <= at < math.inf:
        raise ValueError(f"'at' must be seconds, at least 0, got {at!r}")
    if not isinstance(group, str):
        raise ValueError(f"'group' must be text, got {group!r}")
    return Request(prompt, out, float(at), _after(entry.get("after", []), earlier), group)


def _after(raw: Any, earlier: list[Request]) -> tuple[tuple[int, int], ...]:
    if not isinstance(raw, list):
        raise ValueError(f"'after' must be a list of [request, tokens], got {raw!r}")
    needs = []
    for pair in raw:
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(number) is int for number in pair):
            raise ValueError(f"'after' must be a list of [request, tokens], got {pair!r} in it")
        row, tokens = pair
        if not 0 <= row < len(earlier):
            raise ValueError(f"'after' names request {row}, which is not an earlier one")
        if not 1 <= tokens <= earlier[row].out:
            raise ValueError(f"'after' waits for {tokens} tokens of request {row}, which gives {earlier[row].out}")
        needs.append((row, tokens))
    return tuple(needs)
