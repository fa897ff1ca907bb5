"""From the fields of a request to a processor's options; and everything that is refused on the way."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fastgen import api as fg
from fastgen.core.plugin import Registry, registered, registry
from fastgen.errors import FastgenError, InvalidRequestError, OverloadedError
from fastgen.server.structured import check_processors, constrain, with_processor
from fastgen.testing.tokenizers import byte_tokenizer
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PLAIN = SamplingParams(temperature=0.5, seed=1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def json_schema(**changes: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True, **changes}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("response_format", "guided", "options"),
    [
        (json_schema(), None, {"json_schema": SCHEMA}),
        (json_schema(strict=None, description="what it is for"), None, {"json_schema": SCHEMA}),
        (json_schema(schema={}), None, {"json_schema": {}}),
        ({"type": "json_object"}, None, {"json_object": True}),
        (None, {"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        (None, {"guided_json": '{"type": "null"}'}, {"json_schema": '{"type": "null"}'}),
        ({"type": "text"}, {"guided_regex": "[0-9]+", "guided_json": None}, {"regex": "[0-9]+"}),
        (None, {"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        (None, {"guided_grammar": 'root ::= "a" root | "b"'}, {"grammar": 'root ::= "a" root | "b"'}),
        (None, {"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        (None, {"structured_outputs": {"json_object": True, "regex": None}}, {"json_object": True}),
        (None, {"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        (
            None,
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {"json_schema": SCHEMA, "whitespace": False},
        ),
    ],
)
def test_what_is_asked_for(tokenizer: Tokenizer, response_format: Any, guided: Any, options: Any) -> None:
    params = constrain(PLAIN, response_format=response_format, guided=guided, tokenizer=tokenizer)
    assert params == SamplingParams.of(PLAIN, logits_processors={"guided": options})


@pytest.mark.parametrize("guided", [None, {}, {"guided_json": None, "structured_outputs": None}])
@pytest.mark.parametrize("response_format", [None, {"type": "text"}])
def test_plain_text(response_format: Any, guided: Any) -> None:
    assert constrain(PLAIN, response_format=response_format, guided=guided, tokenizer=None) is PLAIN


def test_other_processors_stay(tokenizer: Tokenizer) -> None:
    params = SamplingParams(logits_processors={"other": {}})
    found = constrain(params, guided={"guided_regex": "a"}, tokenizer=tokenizer)
    assert found.logits_processors == {"other": {}, "guided": {"regex": "a"}}


BAD_FORMATS: dict[str, tuple[Any, str]] = {
    "text": ("json_object", "must be an object"),
    "list": ([], "must be an object"),
    "no type": ({}, "type must be"),
    "unknown type": ({"type": "json"}, 'got "json"'),
    "unknown entry": ({"type": "json_object", "json_shema": {}}, "Did you mean 'json_schema'"),
    "schema with another type": ({"type": "json_object", "json_schema": {}}, "goes with the type"),
    "no schema object": ({"type": "json_schema"}, "must be an object"),
    "no name": (json_schema(name=None), "json_schema.name"),
    "bad name": (json_schema(name="a b"), "json_schema.name"),
    "long name": (json_schema(name="a" * 65), "json_schema.name"),
    "bad strict": (json_schema(strict="yes"), "json_schema.strict"),
    "bad description": (json_schema(description=5), "json_schema.description"),
    "unknown in schema": (json_schema(shema={}), "Did you mean 'schema'"),
    "no schema": ({"type": "json_schema", "json_schema": {"name": "a"}}, "schema is missing"),
    "schema false": (json_schema(schema=False), "must be an object"),
    "schema text": (json_schema(schema="{}"), "must be an object"),
    "invalid": (json_schema(schema={"type": "objct"}), "objct"),
    "not enforceable": (json_schema(schema={"not": {}}), "not"),
    "10,000 deep": (json_schema(schema=nested(10_000)), "levels deep"),
    "recursive without end": (json_schema(schema={"$ref": "#"}), "no answer satisfies"),
    "huge": (json_schema(schema={"enum": list(range(100_000))}), "values"),
    "slow": (json_schema(schema={"type": "integer", "multipleOf": 1000003}), "compile"),
}


@pytest.mark.parametrize("name", BAD_FORMATS)
def test_response_formats_that_are_refused(tokenizer: Tokenizer, name: str) -> None:
    value, reason = BAD_FORMATS[name]
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        constrain(PLAIN, response_format=value, tokenizer=tokenizer)
    assert caught.value.field == "response_format"
    assert len(str(caught.value)) < 1000


BAD_FIELDS: dict[str, tuple[str, Any]] = {
    "empty JSON": ("guided_json", ""),
    "false": ("guided_json", False),
    "number": ("guided_json", 5),
    "no JSON": ("guided_json", "{"),
    "empty regex": ("guided_regex", ""),
    "bad regex": ("guided_regex", "("),
    "regex list": ("guided_regex", ["a"]),
    "no choice": ("guided_choice", []),
    "numbers": ("guided_choice", [1, 2]),
    "choice text": ("guided_choice", "yes"),
    "bad grammar": ("guided_grammar", "start: ("),
    "empty": ("structured_outputs", {}),
    "text": ("structured_outputs", "json"),
    "json_object false": ("structured_outputs", {"json_object": False}),
    "json empty": ("structured_outputs", {"json": ""}),
    "two": ("structured_outputs", {"json": {}, "regex": "a"}),
    "unknown entry": ("structured_outputs", {"jsn": {}}),
    "structural tag": ("structured_outputs", {"structural_tag": "x"}),
    "whitespace": ("structured_outputs", {"json": {}, "disable_any_whitespace": "x"}),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_guided_fields_that_are_refused(tokenizer: Tokenizer, name: str) -> None:
    field, value = BAD_FIELDS[name]
    with pytest.raises(InvalidRequestError, match=field) as caught:
        constrain(PLAIN, guided={field: value}, tokenizer=tokenizer)
    assert caught.value.field == field


def test_one_form_at_a_time(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="response_format asks for a form") as caught:
        constrain(PLAIN, response_format={"type": "json_object"}, guided={"guided_regex": "a"}, tokenizer=tokenizer)
    assert caught.value.field == "guided_regex"
    mine = SamplingParams(logits_processors={"guided": {"regex": "a"}})
    with pytest.raises(InvalidRequestError, match="already"):
        constrain(mine, response_format={"type": "json_object"}, tokenizer=tokenizer)
    with pytest.raises(InvalidRequestError, match="Did you mean 'guided_regex'"):
        constrain(PLAIN, guided={"guided_rgex": "a"}, tokenizer=tokenizer)


def test_what_it_takes(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="without a tokenizer"):
        constrain(PLAIN, response_format={"type": "json_object"}, tokenizer=None)
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        constrain(SamplingParams(ignore_eos=True), response_format={"type": "json_object"}, tokenizer=tokenizer)


def test_without_the_plugin(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="pip install fastgen-guided") as caught:
        constrain(PLAIN, response_format={"type": "json_object"}, tokenizer=tokenizer, plugins=Registry(()))
    assert caught.value.field == "response_format"


def test_processors_that_clients_write_themselves() -> None:
    check_processors(PLAIN)
    check_processors(SamplingParams(logits_processors={"guided": {"regex": "a"}, "of another process": {}}))
    with pytest.raises(InvalidRequestError, match="compile") as caught:
        check_processors(
            SamplingParams(logits_processors={"guided": {"json_schema": {"type": "integer", "multipleOf": 1000003}}})
        )
    assert caught.value.field == "logits_processors"


@contextmanager
def checking(check: Callable[[Any], None]) -> Iterator[Registry]:
    """With a processor ``checked`` that has this check."""
    plugin = types.ModuleType("checking")

    @fg.hookimpl
    def fastgen_logits_processors() -> list[fg.LogitsProcessorSpec]:
        return [fg.LogitsProcessorSpec("checked", print, check=check)]

    plugin.fastgen_logits_processors = fastgen_logits_processors  # type: ignore[attr-defined]
    with registered(plugin, name="checking"):
        yield registry()


CHECKED = SamplingParams(logits_processors={"checked": {}})


def test_a_check_that_breaks_refuses() -> None:
    """Whatever it raises, and however much it says."""

    def breaks(options: Any) -> None:
        raise SystemExit("x" * 10_000)

    with checking(breaks) as plugins, pytest.raises(InvalidRequestError, match=r"sys\.exit") as caught:
        check_processors(CHECKED, plugins)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("trouble", [OverloadedError("no room", retry_after=1.0), FastgenError("it does not start")])
def test_the_servers_own_trouble_is_not_the_requests_fault(trouble: FastgenError) -> None:
    def check(options: Any) -> None:
        raise trouble

    with checking(check) as plugins, pytest.raises(FastgenError) as caught:
        check_processors(CHECKED, plugins)
    assert caught.value is trouble


def test_options_as_they_are(tokenizer: Tokenizer) -> None:
    params = with_processor(
        PLAIN, {"structure": {"sequence": ["a", {"regex": "b"}]}}, field="tools", tokenizer=tokenizer
    )
    assert params.logits_processors == {"guided": {"structure": {"sequence": ["a", {"regex": "b"}]}}}


def test_no_torch() -> None:
    program = "import sys, fastgen.server.structured, fastgen.server.tools; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
