"""Tool calls and structured answers through the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from fastgen.testing.scripted import ScriptedEngine

USER: list[Any] = [{"role": "user", "content": "Weather in Köln?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def ask(door: Any, **fields: Any) -> Any:
    async def post() -> Any:
        async with door.openai() as client:
            got = await client.chat.completions.create(
                **{"model": "scripted", "messages": USER, "tools": [TOOL], "max_tokens": 400, **fields}
            )
            return [one async for one in got] if fields.get("stream") else got

    return asyncio.run(post())


def answer_with(engine: ScriptedEngine, text: str) -> None:
    end = sorted(engine.tokenizer.eos_token_ids) if engine.tokenizer else []
    engine.script = lambda prompt, index: [*text.encode(), *end]


def test_a_call(scripted: Any, engine: ScriptedEngine) -> None:
    answer_with(engine, CALL)
    (choice,) = ask(scripted).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert call.id


def test_a_call_in_a_stream(scripted: Any, engine: ScriptedEngine) -> None:
    answer_with(engine, CALL)
    chunks = [one.choices[0] for one in ask(scripted, stream=True)]
    assert [one.delta.role for one in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(one.delta.content or "" for one in chunks) == "I look."
    pieces = [call for one in chunks for call in one.delta.tool_calls or ()]
    assert {one.index for one in pieces} == {0}
    assert [bool(one.id) for one in pieces] == [True] + [False] * (len(pieces) - 1)
    assert pieces[0].function.name == "weather"
    assert json.loads("".join(one.function.arguments or "" for one in pieces)) == {"city": "Köln"}
    assert [one.finish_reason for one in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": openai.omit}], ids=["none", "left out"])
def test_without_tools_a_call_is_text(scripted: Any, engine: ScriptedEngine, stream: bool, fields: Any) -> None:
    answer_with(engine, CALL)
    got = ask(scripted, stream=stream, **fields)
    text = "".join(one.choices[0].delta.content or "" for one in got) if stream else got.choices[0].message.content
    assert text == CALL
    last = got[-1] if stream else got
    assert last.choices[0].finish_reason == "stop"


def test_an_answer_cut_by_its_length_is_no_call(scripted: Any, engine: ScriptedEngine) -> None:
    answer_with(engine, CALL)
    (choice,) = ask(scripted, max_tokens=40).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None


def test_a_conversation_with_calls_reaches_the_template(scripted: Any, engine: ScriptedEngine) -> None:
    seen: list[Any] = []
    tokenizer: Any = engine.tokenizer
    render = tokenizer.render_chat

    def watched(messages: Any, **options: Any) -> str:
        seen.append((messages, options["tools"]))
        return str(render(messages, **options))

    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    turns = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "render_chat", watched)
        ask(scripted, messages=turns, max_tokens=1)
    ((messages, tools),) = seen
    assert tools == [TOOL]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Köln"}}
    assert messages[1]["content"] is None
    assert messages[2]["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ],
    ids=str,
)
def test_wrong_tools(scripted: Any, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(scripted, **fields)
    assert raised.value.param == param
    assert scripted.admission.choices == 0


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_is_kept_by_a_model_that_knows_nothing_of_it(live: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 200, "temperature": 1.0, "seed": 3}
    with live.sync_openai() as client:
        got = client.chat.completions.create(**asked, response_format=form)
        free = client.chat.completions.create(**asked)
        word = client.completions.create(
            model="tiny", prompt="x", max_tokens=20, extra_body={"guided_choice": ["yes", "no"]}
        )
        value = json.loads(got.choices[0].message.content or "")
        assert set(value) == {"name", "age"}
        assert len(value["name"]) <= 3
        assert 1 <= value["age"] <= 9
        assert got.choices[0].finish_reason == "stop"
        with pytest.raises(ValueError, match=r"Expecting|Extra|Invalid"):  # it would not have by itself
            json.loads(free.choices[0].message.content or "")
        assert word.choices[0].text in ("yes", "no")


def test_a_call_that_was_asked_for_comes(live: Any) -> None:
    """From a model that writes noise."""
    tool = json.loads(json.dumps(TOOL))
    tool["function"]["parameters"]["properties"]["city"] = {"enum": ["Bonn", "Köln"]}
    with live.sync_openai() as client:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            got = client.chat.completions.create(
                model="tiny",
                messages=USER,
                tools=[tool],
                tool_choice=choice,  # type: ignore[arg-type]
                parallel_tool_calls=False,
                max_tokens=300,
                temperature=1.0,
                seed=1,
            )
            calls: Any = got.choices[0].message.tool_calls
            assert got.choices[0].finish_reason == "tool_calls"
            assert calls[0].function.name == "weather"
            assert json.loads(calls[0].function.arguments)["city"] in ("Bonn", "Köln")


DEEP: Any = {"type": "object"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
FORMS: list[Any] = [
    {"type": "poem"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": False}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": [False]}}},
    {"type": "json_object", "json_schema": {}},
    {},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_that_cannot_be_kept_are_refused(live: Any, form: Any) -> None:
    with live.sync_openai() as client, pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="tiny", messages=USER, response_format=form, max_tokens=5)
    assert raised.value.param == "response_format"
    assert live.idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(("},
        {"guided_choice": []},
        {"guided_grammar": "nonsense"},
        {"guided_json": False},
        {"guided_json": "{"},
        {"guided_choice": ["a"], "guided_regex": "b"},
        {"guided_choice": ["a"], "ignore_eos": True},
    ],
    ids=str,
)
def test_guides_that_cannot_be_followed_are_refused(live: Any, fields: Any) -> None:
    with live.sync_openai() as client, pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="x", max_tokens=5, extra_body=fields)
    assert raised.value.param in fields
