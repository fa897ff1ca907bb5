"""Where the prompts of `fastgen generate` come from: arguments, files, standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from fastgen.errors import InvalidRequestError
from fastgen.types import SamplingParams

__all__ = ["Job", "from_arguments", "from_file", "from_stdin"]

KINDS = ("prompt", "prompt_token_ids", "messages")
SHOWN_PROBLEMS = 5
MAX_STDIN_BYTES = 64 * 2**20
"""Far more than any model reads; a pipe that never ends is refused before it fills the memory."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, in one of its three forms, and how to answer it."""

    where: str
    """For messages: ``"prompts.jsonl, line 3"``."""
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """``{"prompt": ...}``, ``{"messages": ...}`` or ``{"prompt_token_ids": ...}``."""
        return {kind: value for kind in KINDS if (value := getattr(self, kind)) is not None}


def from_arguments(prompts: Sequence[str], params: SamplingParams, *, chat: bool) -> list[Job]:
    """``-`` stands for standard input."""
    return [
        from_stdin(params, chat=chat) if text == "-" else _job(f"prompt {number}", text, params, chat)
        for number, text in enumerate(prompts, 1)
    ]


def from_stdin(params: SamplingParams, *, chat: bool) -> Job:
    """All of standard input as one prompt, less the line end that the shell adds.

    Raises:
        InvalidRequestError: it is empty, endless or no UTF-8.
    """
    if sys.stdin.isatty():
        click.echo("Type the prompt; Ctrl-D on a line of its own ends it.", err=True)
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise InvalidRequestError(
            f"standard input is one prompt, and has over {MAX_STDIN_BYTES // 2**20} MiB; for many prompts use --file",
            field="prompt",
        )
    text = _decoded(data, "standard input").removesuffix("\n").removesuffix("\r")
    if not text:
        raise InvalidRequestError("standard input holds no prompt; give one as an argument, or --file", field="prompt")
    return _job("standard input", text, params, chat)


def from_file(path: Path, params: SamplingParams, *, chat: bool) -> list[Job]:
    """One prompt a line; lines of a ``.jsonl`` file are objects with ``prompt``, ``prompt_token_ids`` or ``messages``
    and whatever sampling fields that line wants otherwise. Blank lines are passed over.

    Raises:
        InvalidRequestError: names every line that cannot be used.
    """
    jobs: list[Job] = []
    problems: list[str] = []
    # Not splitlines(), which also breaks at characters that a prompt may hold.
    lines = _decoded(path.read_bytes(), str(path)).replace("\r\n", "\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            is_json = path.suffix.lower() in (".jsonl", ".ndjson")
            jobs.append(_from_json(where, line, params, chat) if is_json else _job(where, line, params, chat))
        except InvalidRequestError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise InvalidRequestError(listed(f"{path} cannot be used", problems))
    if not jobs:
        raise InvalidRequestError(f"{path} holds no prompts")
    return jobs


def listed(what: str, problems: Sequence[str]) -> str:
    """One line for one problem, else a list of the first few."""
    if len(problems) == 1:
        return f"{what}: {problems[0]}"
    shown = [f"\n  {problem}" for problem in problems[:SHOWN_PROBLEMS]]
    more = len(problems) - len(shown)
    return f"{what}, {len(problems)} problems:{''.join(shown)}{f'{chr(10)}  and {more} more' if more else ''}"


def _job(where: str, text: str, params: SamplingParams, chat: bool) -> Job:
    if chat:
        return Job(where, params, messages=[{"role": "user", "content": text}])
    return Job(where, params, prompt=text)


def _from_json(where: str, line: str, params: SamplingParams, chat: bool) -> Job:
    try:
        fields = json.loads(line)
    except RecursionError:
        raise InvalidRequestError("nested too deeply to be read") from None
    except ValueError as error:
        raise InvalidRequestError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError(f'a line must be an object such as {{"prompt": "..."}}, got {line.strip()[:40]!r}')
    given = {kind: fields.pop(kind) for kind in KINDS if kind in fields}
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidRequestError(f"give one of prompt, prompt_token_ids and messages; found {found}")
    ((kind, value),) = given.items()
    params = SamplingParams.of(params, **fields)
    if kind == "prompt":
        if not isinstance(value, str):
            raise InvalidRequestError(f"prompt must be a string, got {value!r}")
        return _job(where, value, params, chat)
    if kind == "prompt_token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise InvalidRequestError("prompt_token_ids must be a list of integers")
        if chat:
            raise InvalidRequestError("prompt_token_ids cannot be put into a chat (--chat); give messages, or a prompt")
        return Job(where, params, prompt_token_ids=value)
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and "role" in m for m in value):
        raise InvalidRequestError('messages must be a list of objects such as {"role": "user", "content": "..."}')
    return Job(where, params, messages=value)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InvalidRequestError(
            f"{name} is not UTF-8 text (line {line}); convert it, for example with iconv"
        ) from None
