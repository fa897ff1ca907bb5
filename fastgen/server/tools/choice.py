"""OpenAI's ``tools`` and ``tool_choice``: read, and made into a promise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastgen.errors import InvalidRequestError, did_you_mean, some
from fastgen.server.structured import with_processor
from fastgen.server.tools.stream import ToolFormat
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams

__all__ = ["Tool", "ToolChoice", "constrain", "read_tool_choice", "read_tools"]

MAX_TOOLS = 128
MOST_CALLS = 8
"""Calls in one answer that has to have some: a small model would go on for ever."""

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]
    """A JSON schema of an object."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the answer may do, and with which functions."""

    mode: Literal["none", "auto", "required", "named"]
    names: tuple[str, ...]
    parallel: bool = True
    """Whether there may be several calls in one answer."""

    @property
    def promised(self) -> bool:
        """Whether the answer is a call in any case."""
        return self.mode in ("required", "named")


def read_tools(value: object) -> tuple[Tool, ...]:
    """``[{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}]``.

    Raises:
        InvalidRequestError: says which is wrong.
    """
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _wrong("tools", f"must be a list of functions, got {type(value).__name__}")
    if len(value) > MAX_TOOLS:
        raise _wrong("tools", f"has {len(value)} entries, at most {MAX_TOOLS} are allowed")
    tools: dict[str, Tool] = {}
    for index, entry in enumerate(value):
        tool = _tool(entry, f"[{index}]")
        if tool.name in tools:
            raise _wrong("tools", f"[{index}] has the name {tool.name!r}, as one before it")
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(entry: object, place: str) -> Tool:
    if not isinstance(entry, Mapping) or entry.get("type") != "function":
        raise _wrong("tools", f"{place} must be an object with the type 'function'; there are no other tools here")
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise _wrong("tools", f"{place}.function must be an object, got {type(function).__name__}")
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII):
        raise _wrong("tools", f"{place}.function.name must be 1 to 64 of a-z, A-Z, 0-9, _, . and -")
    parameters = function.get("parameters")
    if parameters is None:
        return Tool(name, _NO_PARAMETERS)
    if not isinstance(parameters, dict):
        raise _wrong("tools", f"{place}.function.parameters must be a JSON schema, got {type(parameters).__name__}")
    if parameters.get("type", "object") != "object":
        raise _wrong("tools", f"{place}.function.parameters must be the schema of an object")
    return Tool(name, {"type": "object", **parameters})


def read_tool_choice(value: object, tools: Sequence[Tool], *, parallel: bool = True) -> ToolChoice:
    """``"none"``, ``"auto"``, ``"required"`` or ``{"type": "function", "function": {"name": ...}}``; unset: ``auto``
    where there are tools.

    Args:
        parallel: OpenAI's ``parallel_tool_calls``.

    Raises:
        InvalidRequestError: none of these, no tools to call, or no such tool.
    """
    names = tuple(tool.name for tool in tools)
    if value is None:
        return ToolChoice("auto" if tools else "none", names, parallel)
    if value == "none":
        return ToolChoice("none", names, parallel)
    if not tools:
        raise _wrong("tool_choice", "asks for a call, and there are no tools")
    if value == "auto":
        return ToolChoice("auto", names, parallel)
    if value == "required":
        return ToolChoice("required", names, parallel)
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _wrong(
            "tool_choice",
            "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}",
        )
    if name not in names:
        raise _wrong("tool_choice", f"there is no tool {name!r}, but {some(names)}.{did_you_mean(name, names)}")
    return ToolChoice("named", (name,), parallel=False)


def constrain(
    format: ToolFormat,
    params: SamplingParams,
    *,
    tools: Sequence[Tool],
    choice: ToolChoice,
    tokenizer: Tokenizer | None,
) -> SamplingParams:
    """See ``ToolFormat.constrain``."""
    if choice.mode == "none":
        return params
    special = {marker: _special_id(marker, tokenizer) for marker in format.markers}
    if any(token is not None for token in special.values()):
        params = SamplingParams.of(params, skip_special_tokens=False)
    if not choice.promised:
        return params

    def node(marker: str) -> Any:
        token = special.get(marker)
        return marker if token is None else {"token": token}

    calls = [(tool.name, tool.parameters) for tool in tools if tool.name in choice.names]
    structure = format.frame(calls, MOST_CALLS if choice.parallel else 1, node)
    if structure is None:
        raise _wrong(
            "tool_choice",
            f"calls in this model's notation ({format.name}) cannot be promised; take 'auto'",
        )
    return with_processor(params, {"structure": structure}, field="tool_choice", tokenizer=tokenizer)


def _special_id(marker: str, tokenizer: Tokenizer | None) -> int | None:
    """The id of a marker that is a special token, which is no text to the tokenizer."""
    if tokenizer is None:
        return None
    ids = tokenizer.encode(marker, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and tokenizer.token_bytes(ids[0]) is None else None


def _wrong(field: str, text: str) -> InvalidRequestError:
    space = "" if text.startswith("[") else " "
    return InvalidRequestError(f"{field}{space}{text}", field=field)
