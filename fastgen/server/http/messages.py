"""Messages of a conversation, from OpenAI's shape to the one chat templates read."""

from __future__ import annotations

import json
from typing import Any

from fastgen.errors import did_you_mean

__all__ = ["read_message"]

_PARTS = ("text", "input_text", "refusal")


def read_message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """The message with its text in one string, and the arguments of its tool calls as objects. What else it holds is
    the template's business.

    Raises:
        ValueError: what is wrong with it.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"message {index} (the first is 0) needs a role, such as 'user'")
    made = {"content": None, **message}
    if role == "developer":  # OpenAI's newer word, which templates do not know
        made["role"] = "system"
    content = made["content"]
    if content is None:
        if role in ("system", "developer", "user", "tool"):
            raise ValueError(f"message {index} has no content")
    elif isinstance(content, list):
        made["content"] = "".join(_part(part, index) for part in content)
    elif not isinstance(content, str):
        raise ValueError(f"message {index}: content must be a string, or a list of parts of type text")
    if made.get("tool_calls") is None:
        made.pop("tool_calls", None)  # templates ask whether it is there
    else:
        made["tool_calls"] = _calls(made["tool_calls"], index)
    return made


def _part(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _PARTS:
        what = f"of type {kind!r}"[:60] if isinstance(kind, str) else "without a type"
        near = did_you_mean(kind, _PARTS[:1]) if isinstance(kind, str) else ""
        raise ValueError(f"message {index} has a part {what}; this model reads text alone.{near}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"message {index}: a part of type {kind} needs its text, a string")
    return text


def _calls(calls: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"message {index}: tool_calls must be a list")
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"message {index}: each of its tool_calls needs a function with a name")
        made.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return made


def _arguments(arguments: Any) -> Any:
    """OpenAI sends JSON as text, templates write JSON themselves: an object is what they expect. What is none stays as
    it is, the model may have written it."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    return {} if arguments is None else arguments
