"""From a request's options to a grammar in llguidance's dialect of Lark.

The options name one constraint::

    {"json_schema": {...}}     the schema, as an object, a boolean or JSON text
    {"json_object": True}      any JSON object
    {"regex": "..."}           the whole answer matches (Rust's syntax: no look-around, no back-references)
    {"choice": ["a", "b"]}     one of these texts
    {"grammar": "..."}         a grammar in Lark's or llama.cpp's (GBNF) notation
    {"structure": node}        several of these put together, see below

and may hold ``"whitespace": False`` beside it: no space or newline between the parts of JSON.

A node of a structure is a text, which stands for itself, or an object with one entry: ``json_schema``, ``json_object``,
``regex``, ``choice`` as above; ``{"token": 5}``, the special token with this id; ``{"sequence": [nodes]}``;
``{"any_of": [nodes]}``; ``{"repeat": node, "separator": node, "most": 16}``, at least once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastgen_guided.limits import MAX_CHOICES, MAX_DEPTH, MAX_NODES, MAX_TEXT

__all__ = ["CONSTRAINTS", "grammar_of"]

CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar", "structure")

# Bounded, since a small model that may write spaces writes spaces until its answer's end.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"

_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""Those that llguidance enforces."""
_DATA = frozenset(["const", "enum", "default", "examples"])  # what stands in them is not a schema


def grammar_of(options: object) -> str:
    """The grammar that the options ask for, as text. Equal options give equal text.

    Raises:
        ValueError: they are not of the form above, or too large. Whether llguidance can make something of the grammar
            shows when it is compiled.
    """
    if not isinstance(options, dict):
        raise ValueError(f"expected an object with one of {', '.join(CONSTRAINTS)}, got {type(options).__name__}")
    _check_size(options)
    unknown = set(options) - {*CONSTRAINTS, "whitespace"}
    if unknown:
        raise ValueError(f"unknown option {_shown(sorted(map(str, unknown))[0])}; known are {', '.join(CONSTRAINTS)}")
    given = [name for name in CONSTRAINTS if name in options]
    if len(given) != 1:
        raise ValueError(f"give one of {', '.join(CONSTRAINTS)}, got {' and '.join(given) or 'none'}")
    whitespace = options.get("whitespace", True)
    if not isinstance(whitespace, bool):
        raise ValueError(f"whitespace must be true or false, got {_shown(whitespace)}")
    if given == ["grammar"]:
        return _own_grammar(options["grammar"])
    node = options["structure"] if given == ["structure"] else {given[0]: options[given[0]]}
    return _Writer(whitespace=whitespace).write(node)


class _Writer:
    """Writes one rule for each node."""

    def __init__(self, *, whitespace: bool) -> None:
        self._whitespace = whitespace
        self._rules: list[str] = []
        self._kinds: dict[str, Callable[[dict[str, Any]], str]] = {
            "json_schema": self._json_schema,
            "json_object": self._json_object,
            "regex": self._regex,
            "choice": self._choice,
            "token": self._token,
            "sequence": self._sequence,
            "any_of": self._any_of,
            "repeat": self._repeat,
        }

    def write(self, node: object) -> str:
        start = self._node(node)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _node(self, node: object) -> str:
        """The expression for a node."""
        if isinstance(node, str):
            return _literal(node)
        if not isinstance(node, dict):
            raise ValueError(f"a node must be a text or an object, got {_shown(node)}")
        kinds = [name for name in self._kinds if name in node]
        if len(kinds) != 1 or (len(node) > 1 and kinds != ["repeat"]):
            raise ValueError(f"a node has one of {', '.join(self._kinds)}, got {_shown(sorted(map(str, node)))}")
        return self._kinds[kinds[0]](node)

    def _rule(self, body: str) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _json_schema(self, node: dict[str, Any]) -> str:
        schema = _read_schema(node["json_schema"])
        # Set for good: a schema's own "x-guidance" could turn off what makes an answer follow it.
        schema["x-guidance"] = {
            "whitespace_flexible": self._whitespace,
            "lenient": False,
            "coerce_one_of": False,
            **({"whitespace_pattern": _WHITESPACE} if self._whitespace else {}),
        }
        return self._rule(f"%json {_dumps(schema)}")

    def _json_object(self, node: dict[str, Any]) -> str:
        if node["json_object"] is not True:
            raise ValueError(f"json_object must be true or left out, got {_shown(node['json_object'])}")
        return self._json_schema({"json_schema": {"type": "object"}})

    def _regex(self, node: dict[str, Any]) -> str:
        from llguidance import regex_to_lark

        regex = node["regex"]
        if not isinstance(regex, str) or not regex:
            raise ValueError(f"regex must be a text that is not empty, got {_shown(regex)}")
        # The whole answer has to match, so anchors around all of it say nothing new.
        regex = regex.removeprefix("^")
        if regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2:
            regex = regex[:-1]
        if not regex:
            raise ValueError("regex matches nothing but an empty answer")
        if "\n" in regex or "\r" in regex:
            regex = regex.replace("\r", r"\r").replace("\n", r"\n")
        return self._rule(f"/{regex_to_lark(regex, '')}/")

    def _choice(self, node: dict[str, Any]) -> str:
        texts = node["choice"]
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"choice must be a list of texts that are not empty, got {_shown(texts)}")
        if len(texts) > MAX_CHOICES:
            raise ValueError(f"choice has {len(texts)} texts, at most {MAX_CHOICES} are allowed")
        return self._rule(" | ".join(_literal(text) for text in dict.fromkeys(texts)))

    def _token(self, node: dict[str, Any]) -> str:
        token = node["token"]
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"token must be a token's id, got {_shown(token)}")
        return self._rule(f"<[{token}]>")

    def _sequence(self, node: dict[str, Any]) -> str:
        return self._rule(" ".join(self._nodes(node, "sequence")))

    def _any_of(self, node: dict[str, Any]) -> str:
        return self._rule(" | ".join(self._nodes(node, "any_of")))

    def _nodes(self, node: dict[str, Any], name: str) -> list[str]:
        nodes = node[name]
        if not isinstance(nodes, list) or not nodes:
            raise ValueError(f"{name} must be a list that is not empty, got {_shown(nodes)}")
        return [self._node(one) for one in nodes]

    def _repeat(self, node: dict[str, Any]) -> str:
        most = node.get("most")
        if set(node) - {"repeat", "separator", "most"} or not isinstance(most, int) or not 1 <= most <= 1000:
            raise ValueError(f"a repeat has 'separator' and 'most' (1 to 1000), got {_shown(node)}")
        one, separator = self._node(node["repeat"]), self._node(node.get("separator", ""))
        return self._rule(one if most == 1 else f"{one} ({separator} {one}){{0,{most - 1}}}")


def _own_grammar(text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"grammar must be a text that is not empty, got {_shown(text)}")
    if "::=" not in text:
        return text
    from llguidance import gbnf_to_lark

    try:
        return str(gbnf_to_lark.any_to_lark(text))
    except Exception as error:  # a small parser, which may stumble in any way
        raise ValueError(f"the grammar cannot be read: {error}") from error


def _read_schema(schema: object) -> dict[str, Any]:
    """The schema as an object of its own, without the formats that only annotate."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema is not JSON: {error}") from error
        _check_size(schema)
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("json_schema is false, which no answer satisfies")
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema must be an object, got {_shown(schema)}")
    cleaned = _without_annotations(schema)
    assert isinstance(cleaned, dict)
    return cleaned


def _without_annotations(schema: Any, *, names: bool = False) -> Any:
    """A copy without ``format``s that llguidance cannot enforce: the standard lets validators ignore them, and
    llguidance refuses the whole schema. ``names``: the keys are names of the user's own."""
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if not names and key in _DATA:
            copy[key] = value
        elif not names and key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        else:
            inner = not names and key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
            copy[key] = _without_annotations(value, names=inner)
    return copy


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else json.dumps(text)


def _check_size(value: object) -> None:
    """Bounds what comes after: nothing here or in llguidance's reader sees a structure deeper or larger."""
    level, nodes = [value], 0
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise ValueError(f"it holds more than {MAX_NODES} values, which is too many")
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
        if not level:
            break
    else:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    if len(_dumps(value)) > MAX_TEXT:
        raise ValueError(f"it has more than {MAX_TEXT} characters")


def _dumps(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
