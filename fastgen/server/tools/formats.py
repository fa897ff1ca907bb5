"""The notations, each as the templates of its models write it.

All are read generously where models are known to stray: white space anywhere between parts, ``parameters`` for
``arguments``, one call or a list of them, a closing marker left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

from fastgen.server.tools.other_notations import FunctionGemma, Pythonic
from fastgen.server.tools.reader import Broken, Part, Reader
from fastgen.server.tools.stream import Calls, ToolFormat

__all__ = ["FORMATS", "detect"]

_ARGUMENTS = ("arguments", "parameters", "args")
_NAME = re.compile(r"[\w.\-]", re.ASCII)

Marker = Callable[[str], Any]


# ---- calls as JSON objects -------------------------------------------------------------------------------------------


def _call(reader: Reader, calls: Calls, *, needs_arguments: bool = False) -> Part[None]:
    """``{"name": "f", "arguments": {...}}``, with any other entries, in any order."""
    name, arguments, told = None, None, False
    yield from reader.expect("{")
    yield from reader.spaces()
    while True:
        key = yield from reader.json_string()
        yield from reader.spaces()
        yield from reader.expect(":")
        yield from reader.spaces()
        if key == "name" and name is None:
            name = yield from reader.json_string()
        elif key in _ARGUMENTS and arguments is None and name is not None and (yield from reader.peek()) == "{":
            calls.begin(name)
            yield from reader.json(calls.arguments)
            arguments, told = "", True
        elif key in _ARGUMENTS and arguments is None:
            arguments = yield from reader.json_text()
        else:
            yield from reader.json_text()
        yield from reader.spaces()
        if (yield from reader.optional("}")):
            break
        yield from reader.expect(",")
        yield from reader.spaces()
    if not told:
        if name is None or (needs_arguments and arguments is None):
            raise Broken
        text = _object(arguments)
        calls.begin(name)
        calls.arguments(text)
    calls.end()
    reader.mark()


def _object(text: str | None) -> str:
    """Arguments as an object: left out, or an object written as a string, as some models do."""
    value = json.loads(text or "null")
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Broken from None
    if value is None:
        return "{}"
    if not isinstance(value, dict) or text is None:
        raise Broken
    return text


def _call_or_list(reader: Reader, calls: Calls) -> Part[None]:
    """One call, several after each other, or a list of them."""
    yield from reader.spaces()
    if not (yield from reader.optional("[")):
        yield from _call(reader, calls)
        yield from reader.spaces()
        while (yield from reader.peek()) == "{":
            yield from _call(reader, calls)
            yield from reader.spaces()
        return
    while True:
        yield from reader.spaces()
        yield from _call(reader, calls)
        yield from reader.spaces()
        if (yield from reader.optional("]")):
            return
        yield from reader.expect(",")


def _json_call(name: str, schema: Any, key: str = "arguments") -> Any:
    return {"sequence": [f'{{"name": {json.dumps(name)}, "{key}": ', {"json_schema": schema}, "}"]}


def _any(nodes: list[Any]) -> Any:
    return nodes[0] if len(nodes) == 1 else {"any_of": nodes}


class Hermes(ToolFormat):
    """Hermes, Qwen and many more: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    name = "hermes"
    opens: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    closes: ClassVar[str] = "</tool_call>"

    def read(self, opening: str, reader: Reader, calls: Calls) -> Part[None]:
        yield from _call_or_list(reader, calls)
        yield from reader.spaces()
        yield from reader.optional(self.closes)

    def frame(self, calls: list[tuple[str, Any]], most: int, marker: Marker) -> Any:
        call = _any([_json_call(*one) for one in calls])
        one = {"sequence": [marker(self.opens[0]), "\n", call, "\n", marker(self.closes)]}
        return {"repeat": one, "separator": "\n", "most": most}


class JsonList(Hermes):
    """A list between markers. This one is SmolLM2's: ``<tool_call>[{...}, {...}]</tool_call>``."""

    name = "smollm2"

    def frame(self, calls: list[tuple[str, Any]], most: int, marker: Marker) -> Any:
        call = _any([_json_call(*one) for one in calls])
        listed = {"repeat": call, "separator": ", ", "most": most}
        end = [marker(self.closes)] if self.closes else []
        return {"sequence": [marker(self.opens[0]), "[", listed, "]", *end]}


class Granite(JsonList):
    """Granite 3: ``<|tool_call|>[{...}]``, without an end."""

    name = "granite"
    opens = ("<|tool_call|>", "<tool_call>")
    markers = opens
    closes = ""


class Phi4(JsonList):
    """Phi-4-mini: ``<|tool_call|>[{...}]<|/tool_call|>``."""

    name = "phi4"
    opens = ("<|tool_call|>",)
    closes = "<|/tool_call|>"
    markers = (*opens, closes)


class Llama3(ToolFormat):
    """Llama 3: the answer is ``{"name": ..., "parameters": {...}}``, maybe after ``<|python_tag|>``; several are parted
    by semicolons."""

    name = "llama3"
    opens = ("<|python_tag|>",)
    opens_answer = ("{",)
    markers = ("<|python_tag|>",)

    def read(self, opening: str, reader: Reader, calls: Calls) -> Part[None]:
        if opening == "{":
            reader.unread(1)
        while True:
            yield from reader.spaces()
            yield from _call(reader, calls, needs_arguments=True)
            yield from reader.spaces()
            if not (yield from reader.optional(";")):
                return

    def frame(self, calls: list[tuple[str, Any]], most: int, marker: Marker) -> Any:
        call = _any([_json_call(name, schema, "parameters") for name, schema in calls])
        return {"repeat": call, "separator": "; ", "most": most}


class Mistral(ToolFormat):
    """Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{...}``."""

    name = "mistral"
    opens = ("[TOOL_CALLS]",)
    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    id_length = 9

    def read(self, opening: str, reader: Reader, calls: Calls) -> Part[None]:
        yield from reader.spaces()
        if (yield from reader.peek()) in ("[", "{"):
            yield from _call_or_list(reader, calls)
            return
        name = yield from reader.matching(_NAME, 128)
        if (yield from reader.optional("[CALL_ID]")):
            yield from reader.matching(_NAME, 128)
        yield from reader.optional("[ARGS]")
        yield from _named(name, reader, calls)

    def frame(self, calls: list[tuple[str, Any]], most: int, marker: Marker) -> Any:
        call = _any([_json_call(*one) for one in calls])
        listed = {"repeat": call, "separator": ", ", "most": most}
        return {"sequence": [marker("[TOOL_CALLS]"), "[", listed, "]"]}


class MistralNamed(Mistral):
    """The newer of Mistral's two, which differ where a call has to be written."""

    name = "mistral-named"
    markers = ("[TOOL_CALLS]", "[ARGS]")

    def frame(self, calls: list[tuple[str, Any]], most: int, marker: Marker) -> Any:
        call = _any([{"sequence": [name, marker("[ARGS]"), {"json_schema": schema}]} for name, schema in calls])
        return {"repeat": {"sequence": [marker("[TOOL_CALLS]"), call]}, "most": most}


# ---- calls with the name before the arguments ------------------------------------------------------------------------


def _named(name: str, reader: Reader, calls: Calls) -> Part[None]:
    """The arguments of a call whose name was read."""
    yield from reader.spaces()
    if (yield from reader.peek()) != "{":
        raise Broken
    calls.begin(name)
    yield from reader.json(calls.arguments)
    calls.end()
    reader.mark()


class DeepSeek(ToolFormat):
    """DeepSeek V3.1: ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``, one or more between markers.
    V3 and R1 write ``function<｜tool▁sep｜>name`` and the arguments in a block of JSON."""

    name = "deepseek"
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, separator, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    opens = (begin, call)
    markers = (begin, end, call, separator, call_end)

    def read(self, opening: str, reader: Reader, calls: Calls) -> Part[None]:
        if opening == self.begin:
            yield from reader.spaces()
            yield from reader.expect(self.call)
        while True:
            name = (yield from reader.until(self.separator, 256)).strip()
            yield from reader.spaces()
            fenced = (yield from reader.peek()) != "{"
            if fenced:
                name = (yield from reader.until("\n", 256)).strip()
                yield from reader.spaces()
                yield from reader.expect("```json")
            yield from _named(name, reader, calls)
            yield from reader.spaces()
            if fenced:
                yield from reader.optional("```")
                yield from reader.spaces()
            yield from reader.optional(self.call_end)
            yield from reader.spaces()
            reader.mark()
            if not (yield from reader.optional(self.call)):
                break
        yield from reader.optional(self.end)

    def _one(self, name: str, schema: Any, marker: Marker) -> list[Any]:
        return [name, marker(self.separator), {"json_schema": schema}]

    def frame(self, calls: list[tuple[str, Any]], most: int, marker: Marker) -> Any:
        one = _any([{"sequence": self._one(*call, marker)} for call in calls])
        repeated = {"repeat": {"sequence": [marker(self.call), one, marker(self.call_end)]}, "most": most}
        return {"sequence": [marker(self.begin), repeated, marker(self.end)]}


class DeepSeekV3(DeepSeek):
    """The older of DeepSeek's two, which differ where a call has to be written."""

    name = "deepseek-v3"

    def _one(self, name: str, schema: Any, marker: Marker) -> list[Any]:
        return ["function", marker(self.separator), f"{name}\n```json\n", {"json_schema": schema}, "\n```"]


FORMATS: dict[str, ToolFormat] = {
    one.name: one
    for one in (
        Hermes(),
        JsonList(),
        Llama3(),
        Mistral(),
        MistralNamed(),
        Granite(),
        Phi4(),
        DeepSeek(),
        DeepSeekV3(),
        FunctionGemma(),
        Pythonic(),
    )
}


def detect(template: str) -> ToolFormat:
    """See ``ToolFormat.detect``."""
    if "<｜tool▁call▁begin｜>" in template:
        return FORMATS["deepseek-v3" if "```json" in template else "deepseek"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral-named" if "[ARGS]" in template else "mistral"]
    if "<start_function_call>" in template:
        return FORMATS["functiongemma"]
    if "<|tool_call|>" in template:
        return FORMATS["phi4" if "<|/tool_call|>" in template else "granite"]
    if "<tool_call>" in template:
        return FORMATS["smollm2" if re.search(r"<tool_call>\s*\[", template) else "hermes"]
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return FORMATS["llama3"]
    return FORMATS["gemma" if "tool_code" in template else "hermes"]
