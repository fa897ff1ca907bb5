"""Tools and tool choices: read, refused, and promised: whatever a model says, it is calls that fit their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
import torch
from fastgen_guided.processor import guided

from fastgen.errors import InvalidRequestError
from fastgen.server.tools import FORMATS, Tool, ToolChoice, ToolFormat, read_tool_choice, read_tools
from fastgen.testing.tokenizers import build_byte_tokenizer, save_tokenizer
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = read_tools([WEATHER, TIME])
SPACES = frozenset(b" \t\r\n")
SPECIAL = ["<eos>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<｜tool▁call▁begin｜>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte, and some of the markers as special tokens, as models have them."""
    directory = tmp_path_factory.mktemp("bytes")
    save_tokenizer(build_byte_tokenizer(specials=SPECIAL), directory, eos_token="<eos>")
    return Tokenizer.load(directory)


def answer(tokenizer: Tokenizer, params: SamplingParams, seed: int) -> str:
    """What a model that knows nothing says under these params."""
    processor = guided(
        (params.logits_processors or {})["guided"],
        vocab_size=tokenizer.num_ids,
        prompt_token_ids=[1],
        tokenizer=tokenizer,
        stop_token_ids=tokenizer.eos_token_ids,
        checked=True,
    )
    rng = random.Random(seed)
    said: list[int] = []
    for _ in range(600):
        allowed = processor(said, torch.zeros(tokenizer.num_ids)).isfinite().nonzero().flatten().tolist()
        ends = [token for token in allowed if token in tokenizer.eos_token_ids]
        if ends and (len(allowed) == 1 or rng.random() < 0.6):
            break
        # White space between JSON's parts would make most of the answer.
        others = [token for token in allowed if token not in ends and token not in SPACES]
        said.append(rng.choice(others or [token for token in allowed if token not in ends]))
    return tokenizer.decode(said, skip_special_tokens=params.skip_special_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("functiongemma", "gemma")])
def test_a_promised_call(tokenizer: Tokenizer, name: str, parallel: bool) -> None:
    form = ToolFormat.named(name)
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    seen, most = set(), 0
    for wanted in ("required", {"type": "function", "function": {"name": "weather"}}):
        choice = read_tool_choice(wanted, TOOLS, parallel=parallel)
        params = form.constrain(SamplingParams(), tools=TOOLS, choice=choice, tokenizer=tokenizer)
        for seed in range(8):
            text = answer(tokenizer, params, seed)
            parsed = form.parse(text, names=choice.names)
            assert parsed.content == "", text
            assert parsed.calls, text
            for call in parsed.calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
                seen.add(call.name)
                assert wanted == "required" or call.name == "weather"
            most = max(most, len(parsed.calls)) if wanted == "required" else most
            assert wanted == "required" or len(parsed.calls) == 1
            stream = form.stream(names=choice.names)
            deltas = [delta for letter in text for delta in stream.push(letter)] + stream.finish()
            assert [delta.name for delta in deltas if delta.name] == [call.name for call in parsed.calls]
            assert "".join(delta.arguments for delta in deltas) == "".join(call.arguments for call in parsed.calls)
    assert seen == set(schemas)
    assert (most > 1) == parallel


def test_markers_that_are_special_tokens_are_seen(tokenizer: Tokenizer) -> None:
    auto = read_tool_choice("auto", TOOLS)
    for name, hidden in [("mistral", True), ("llama3", True), ("granite", True), ("hermes", False)]:
        params = ToolFormat.named(name).constrain(SamplingParams(), tools=TOOLS, choice=auto, tokenizer=tokenizer)
        assert params.skip_special_tokens is not hidden
        assert params.logits_processors is None
    none = read_tool_choice("none", TOOLS)
    params = ToolFormat.named("mistral").constrain(SamplingParams(), tools=TOOLS, choice=none, tokenizer=tokenizer)
    assert params == SamplingParams()


@pytest.mark.parametrize("name", ["functiongemma", "gemma"])
def test_a_notation_that_no_schema_can_hold(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be promised") as caught:
        ToolFormat.named(name).constrain(
            SamplingParams(), tools=TOOLS, choice=read_tool_choice("required", TOOLS), tokenizer=tokenizer
        )
    assert caught.value.field == "tool_choice"


def test_a_schema_that_cannot_be_promised(tokenizer: Tokenizer) -> None:
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}])
    form = ToolFormat.named("hermes")
    form.constrain(SamplingParams(), tools=tools, choice=read_tool_choice("auto", tools), tokenizer=tokenizer)
    with pytest.raises(InvalidRequestError, match="not"):
        form.constrain(SamplingParams(), tools=tools, choice=read_tool_choice("required", tools), tokenizer=tokenizer)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        form.constrain(SamplingParams(), tools=TOOLS, choice=read_tool_choice("required", TOOLS), tokenizer=None)


def test_read() -> None:
    assert read_tools(None) == read_tools([]) == ()
    assert TOOLS[0] == Tool("weather", CITY)
    assert TOOLS[1].parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert read_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}])[0].parameters == {
        "type": "object"
    }
    assert read_tool_choice(None, ()) == ToolChoice("none", ())
    assert read_tool_choice(None, TOOLS) == ToolChoice("auto", ("weather", "time"))
    assert read_tool_choice("none", ()) == ToolChoice("none", ())
    assert read_tool_choice("required", TOOLS, parallel=False) == ToolChoice("required", ("weather", "time"), False)
    named = read_tool_choice({"type": "function", "function": {"name": "time"}}, TOOLS)
    assert (named.mode, named.names, named.promised, named.parallel) == ("named", ("time",), True, False)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("f", "must be a list"),
        ({"type": "function"}, "must be a list"),
        (["f"], r"\[0\] must be an object"),
        ([WEATHER, {"type": "retrieval"}], r"\[1\] must be an object with the type 'function'"),
        ([{"type": "function"}], "function must be an object"),
        ([{"type": "function", "function": {}}], "function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "function.name"),
        ([{"type": "function", "function": {"name": "a" * 65}}], "function.name"),
        ([{"type": "function", "function": {"name": "a\n"}}], "function.name"),
        ([WEATHER, WEATHER], "as one before it"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], "must be a JSON schema"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], "schema of an object"),
        ([WEATHER] * 200, "at most 128"),
    ],
)
def test_bad_tools(value: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read_tools(value)
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    ("value", "tools", "reason"),
    [
        ("auto", (), "there are no tools"),
        ("any", TOOLS, "must be 'none'"),
        (5, TOOLS, "must be 'none'"),
        ({"type": "function"}, TOOLS, "must be 'none'"),
        ({"type": "function", "function": {}}, TOOLS, "must be 'none'"),
        ({"type": "function", "function": {"name": "wether"}}, TOOLS, "Did you mean 'weather'"),
    ],
)
def test_bad_choices(value: Any, tools: tuple[Tool, ...], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read_tool_choice(value, tools)
    assert caught.value.field == "tool_choice"
