"""Notations whose arguments are not JSON. They are read whole, and cannot be promised: no schema holds them."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from fastgen.server.tools.reader import Broken, Part, Reader
from fastgen.server.tools.stream import Calls, ToolFormat

__all__ = ["FunctionGemma", "Pythonic"]

_NAME = re.compile(r"[\w.\-]", re.ASCII)
_MOST_TEXT = 2**16  # characters of a call that is read before it is understood


class FunctionGemma(ToolFormat):
    """FunctionGemma: ``<start_function_call>call:name{city:<escape>Rome<escape>,days:3}<end_function_call>``."""

    name = "functiongemma"
    opens = ("<start_function_call>",)
    closes, quote = "<end_function_call>", "<escape>"
    markers = ("<start_function_call>", closes, quote)

    def read(self, opening: str, reader: Reader, calls: Calls) -> Part[None]:
        yield from reader.spaces()
        yield from reader.expect("call:")
        name = yield from reader.matching(_NAME, 128)
        arguments = yield from self._value(reader, 0)
        if not isinstance(arguments, dict):
            raise Broken
        calls.begin(name)
        calls.arguments(json.dumps(arguments, ensure_ascii=False))
        calls.end()
        reader.mark()
        yield from reader.spaces()
        yield from reader.optional(self.closes)

    def _value(self, reader: Reader, depth: int) -> Part[Any]:
        if depth > 32:
            raise Broken
        if (yield from reader.optional(self.quote)):
            return (yield from reader.until(self.quote, _MOST_TEXT))
        if (yield from reader.optional("{")):
            entries: dict[str, Any] = {}
            if (yield from reader.optional("}")):
                return entries
            while True:
                yield from reader.spaces()
                quoted = yield from reader.optional(self.quote)
                key = yield from reader.until(f"{self.quote}:" if quoted else ":", 256)
                entries[key.strip()] = yield from self._value(reader, depth + 1)
                yield from reader.spaces()
                if (yield from reader.optional("}")):
                    return entries
                yield from reader.expect(",")
        if (yield from reader.optional("[")):
            items: list[Any] = []
            if (yield from reader.optional("]")):
                return items
            while True:
                items.append((yield from self._value(reader, depth + 1)))
                yield from reader.spaces()
                if (yield from reader.optional("]")):
                    return items
                yield from reader.expect(",")
        word = (yield from reader.matching(re.compile(r"[^,\]}<]"), 256)).strip()
        try:
            return json.loads(word, parse_constant=str)
        except ValueError:
            return word


class Pythonic(ToolFormat):
    """Calls as Python: a block of ````` ```tool_code ````` as Gemma's guide asks for, or ``[f(x=1), g()]`` alone."""

    name = "gemma"
    opens = ("```tool_code\n",)

    def read(self, opening: str, reader: Reader, calls: Calls) -> Part[None]:
        code = yield from reader.until("```", _MOST_TEXT)
        found = _python_calls(code)
        for name, _ in found:
            if calls.stream.names is not None and name not in calls.stream.names:
                raise Broken
        for name, arguments in found:
            calls.begin(name)
            calls.arguments(arguments)
            calls.end()
        reader.mark()


def _python_calls(code: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls in ``code``, which must hold nothing else. It is read, never run."""
    try:
        statements = ast.parse(code.strip()).body
        nodes: list[ast.expr] = []
        for statement in statements:
            if not isinstance(statement, ast.Expr):
                raise Broken
            inner = statement.value
            if isinstance(inner, ast.Call) and ast.unparse(inner.func) == "print" and len(inner.args) == 1:
                inner = inner.args[0]
            nodes += inner.elts if isinstance(inner, ast.List) else [inner]
        found = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
                raise Broken
            arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
            found.append((ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Broken from None
    if not found:
        raise Broken
    return found
