"""Tool calls in the notations of many models: whole and streamed, around text, broken in every way."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.errors import ConfigError
from fastgen.server.tools import FORMATS, Parsed, ToolFormat

ROME = {"city": "Rome", "days": 3, "exact": True}
ODD = {"text": 'a "quote", a \\ and }] é 東京 😀 </tool_call>\n', "none": None, "list": [1, [2.5e-3], {"x": {}}]}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {dumps(arguments)}}}'


# The format's name, text, content, calls.
CASES: dict[str, tuple[str, str, str, list[tuple[str, Any]]]] = {
    "no call": ("hermes", "Just text, with <tags> and {braces}.\n", "Just text, with <tags> and {braces}.\n", []),
    "empty": ("hermes", "", "", []),
    "hermes": ("hermes", f"<tool_call>\n{call('f', ROME)}\n</tool_call>", "", [("f", ROME)]),
    "hermes, text around": (
        "hermes",
        f"Let me see.\n\n<tool_call>{call('f', ROME)}</tool_call>\n Done. ",
        "Let me see.Done. ",
        [("f", ROME)],
    ),
    "hermes, two": (
        "hermes",
        f"<tool_call>\n{call('f', ROME)}\n</tool_call>\n<tool_call>\n{call('g', ODD)}\n</tool_call>",
        "",
        [("f", ROME), ("g", ODD)],
    ),
    "hermes, no end": ("hermes", f"<tool_call>\n{call('f', ODD)}", "", [("f", ODD)]),
    "hermes, arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        "",
        [("f", {"a": 1})],
    ),
    "hermes, other entries": (
        "hermes",
        '<tool_call>{"id": 1, "name": "f", "arguments": {}, "type": {"x": [1]}}</tool_call>',
        "",
        [("f", {})],
    ),
    "hermes, no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    "hermes, null arguments": ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    "hermes, arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", {"a": 1})],
    ),
    "hermes, two in one": (
        "hermes",
        f"<tool_call>{call('f', {})}\n{call('g', {})}</tool_call>",
        "",
        [("f", {}), ("g", {})],
    ),
    "smollm2": (
        "smollm2",
        f"<tool_call>[{call('f', ROME)}, {call('g', ODD)}]</tool_call>",
        "",
        [("f", ROME), ("g", ODD)],
    ),
    "llama3": ("llama3", call("f", ROME, "parameters"), "", [("f", ROME)]),
    "llama3, python tag": ("llama3", f"<|python_tag|>{call('f', ROME, 'parameters')}", "", [("f", ROME)]),
    "llama3, two": (
        "llama3",
        f"\n{call('f', ROME, 'parameters')}; {call('g', ODD, 'parameters')}",
        "",
        [("f", ROME), ("g", ODD)],
    ),
    "llama3, JSON that is no call": ("llama3", '{"name": "f", "age": 4}', '{"name": "f", "age": 4}', []),
    "llama3, JSON in the middle": (
        "llama3",
        f"So: {call('f', {}, 'parameters')}",
        f"So: {call('f', {}, 'parameters')}",
        [],
    ),
    "llama3, code": ("llama3", "<|python_tag|>search.call(query='x')", "<|python_tag|>search.call(query='x')", []),
    "mistral": ("mistral", f"[TOOL_CALLS] [{call('f', ROME)}, {call('g', ODD)}]", "", [("f", ROME), ("g", ODD)]),
    "mistral, text before": ("mistral", f"Yes [1]. [TOOL_CALLS][{call('f', ROME)}]", "Yes [1].", [("f", ROME)]),
    "mistral, ids": (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        "",
        [("f", {"a": 1})],
    ),
    "mistral, named": (
        "mistral-named",
        f"[TOOL_CALLS]f[ARGS]{dumps(ROME)}[TOOL_CALLS]g[CALL_ID]abc123[ARGS]{dumps(ODD)}",
        "",
        [("f", ROME), ("g", ODD)],
    ),
    "mistral, named without a marker": ("mistral", f"[TOOL_CALLS]f{dumps(ROME)}", "", [("f", ROME)]),
    "granite": ("granite", f"<|tool_call|>[{call('f', ROME)}]", "", [("f", ROME)]),
    "granite, other marker": ("granite", f"<tool_call>[{call('f', ROME)}]", "", [("f", ROME)]),
    "phi4": ("phi4", f"<|tool_call|>[{call('f', ODD)}]<|/tool_call|>", "", [("f", ODD)]),
    "deepseek": (
        "deepseek",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        + dumps(ROME)
        + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>"
        + dumps(ODD)
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [("f", ROME), ("g", ODD)],
    ),
    "deepseek v3": (
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        + dumps(ROME)
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n"
        + dumps(ODD)
        + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("f", ROME), ("g", ODD)],
    ),
    "functiongemma": (
        "functiongemma",
        "<start_function_call>call:f{city:<escape>Rome, {x}<escape>,days:3,l:[1,<escape>a<escape>],o:{p:true,q:null}}"
        "<end_function_call>",
        "",
        [("f", {"city": "Rome, {x}", "days": 3, "l": [1, "a"], "o": {"p": True, "q": None}})],
    ),
    "functiongemma, empty": ("functiongemma", "<start_function_call>call:f{}<end_function_call>", "", [("f", {})]),
    "gemma": (
        "gemma",
        "Now:\n```tool_code\nprint(f(city='Rome', days=3))\n[g(x=[1, {'a': None}]), h()]\n```\n",
        "Now:",
        [("f", {"city": "Rome", "days": 3}), ("g", {"x": [1, {"a": None}]}), ("h", {})],
    ),
}

BROKEN: dict[str, tuple[str, str]] = {
    "opening alone": ("hermes", "<tool_call>"),
    "half an opening": ("hermes", "and <tool_ca"),
    "half an opening, then text": ("hermes", "<tool_ca ll>"),
    "no JSON": ("hermes", "<tool_call>\nf(x)\n</tool_call>"),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "empty name": ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    "name is no text": ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    "half a surrogate pair": ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    "arguments are a list": ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "arguments are odd text": ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    "empty list": ("smollm2", "<tool_call>[]</tool_call>"),
    "single quotes": ("hermes", "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
    "trailing text in a key": ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
    "mistral, nothing": ("mistral", "[TOOL_CALLS]"),
    "mistral, name alone": ("mistral", "[TOOL_CALLS]f[ARGS]"),
    "deepseek, no call": ("deepseek", "<｜tool▁calls▁begin｜>f"),
    "functiongemma": ("functiongemma", "<start_function_call>call:f{a:1"),
    "python with positions": ("gemma", "```tool_code\nf(1)\n```"),
    "python that runs": ("gemma", "```tool_code\nimport os\n```"),
    "python names": ("gemma", "```tool_code\nf(x=y)\n```"),
    "python syntax": ("gemma", "```tool_code\nf(\n```"),
}

BROKEN_IN_ARGUMENTS: dict[str, tuple[str, str]] = {
    "cut": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "Ro'),
    "cut before the end": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
    "no JSON": ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>'),
    "newline in a string": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>'),
    "bad number": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    "bad escape": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
    "too deep": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}</tool_call>"),
    "mistral": ("mistral", '[TOOL_CALLS]f[ARGS]{"a": '),
}


def pieces(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 20)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(form: ToolFormat, parts: list[str], **options: Any) -> tuple[Parsed, bool]:
    """What a client makes of the deltas, as OpenAI's do."""
    stream = form.stream(**options)
    content, calls = "", []
    deltas = [delta for part in parts for delta in stream.push(part)] + stream.finish()
    for delta in deltas:
        sent = delta.as_openai()
        content += sent.get("content", "")
        for piece in sent.get("tool_calls", []):
            if piece["index"] == len(calls):
                assert piece["id"]
                assert piece["type"] == "function"
                calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                assert piece["index"] == len(calls) - 1
            calls[-1]["arguments"] += piece["function"]["arguments"]
    assert stream.called == bool(calls)
    from fastgen.server.tools import ToolCall

    return Parsed(content, tuple(ToolCall(**one) for one in calls)), stream.broken


def bare(parsed: Parsed) -> tuple[str, list[tuple[str, str]]]:
    """Without the ids, which are drawn."""
    return parsed.content, [(one.name, one.arguments) for one in parsed.calls]


@pytest.mark.parametrize("name", CASES)
def test_whole(name: str) -> None:
    form, text, content, calls = CASES[name]
    parsed = ToolFormat.named(form).parse(text)
    assert parsed.content == content
    assert [(one.name, json.loads(one.arguments)) for one in parsed.calls] == calls


@pytest.mark.parametrize("name", CASES)
def test_streamed_in_any_pieces(name: str) -> None:
    form, text, _, _ = CASES[name]
    expected = bare(ToolFormat.named(form).parse(text))
    for parts in [[text], list(text), *(pieces(text, seed) for seed in range(20))]:
        parsed, broken = streamed(ToolFormat.named(form), parts)
        assert bare(parsed) == expected
        assert not broken


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_call_is_content_to_the_letter(name: str) -> None:
    form, text = BROKEN[name]
    for around in (text, f"Before {text} and after\n", f" {text}"):
        assert bare(ToolFormat.named(form).parse(around)) == (around, [])
        for parts in [list(around), *(pieces(around, seed) for seed in range(5))]:
            parsed, broken = streamed(ToolFormat.named(form), parts)
            assert bare(parsed) == (around, [])
            assert not broken


@pytest.mark.parametrize("name", BROKEN_IN_ARGUMENTS)
def test_a_call_that_breaks_inside_its_arguments(name: str) -> None:
    """Whole, it is content. Streamed, what was sent stays sent, the rest is content, and nothing is lost."""
    form, text = BROKEN_IN_ARGUMENTS[name]
    assert bare(ToolFormat.named(form).parse(f"Look: {text}")) == (f"Look: {text}", [])
    first = streamed(ToolFormat.named(form), [text])
    for parts in [list(text), *(pieces(text, seed) for seed in range(5))]:
        parsed, broken = streamed(ToolFormat.named(form), parts)
        assert broken
        assert bare(parsed) == bare(first[0])
        (sent,) = parsed.calls
        assert sent.arguments
        assert text.endswith(sent.arguments + parsed.content)


def test_a_good_call_after_a_broken_one() -> None:
    text = f"<tool_call>oops <tool_call>{call('f', ROME)}</tool_call> and"
    parsed = ToolFormat.named("hermes").parse(text)
    assert parsed.content == "<tool_call>oopsand"
    assert [one.name for one in parsed.calls] == ["f"]


def test_only_functions_there_are() -> None:
    for form, text in [
        ("hermes", f"<tool_call>{call('g', ROME)}</tool_call>"),
        ("llama3", call("g", ROME, "parameters")),
        ("mistral", f"[TOOL_CALLS]g{dumps(ROME)}"),
        ("gemma", "```tool_code\nf(x=1)\ng(x=1)\n```"),
    ]:
        assert bare(ToolFormat.named(form).parse(text, names=["f"])) == (text, [])
        assert bare(streamed(ToolFormat.named(form), list(text), names=["f"])[0]) == (text, [])
        assert ToolFormat.named(form).parse(text, names=["f", "g"]).calls


def test_arguments_come_while_they_are_written() -> None:
    stream = ToolFormat.named("hermes").stream()
    told = []
    for part in ['Hi <tool_call>{"name": "f", ', '"arguments": {"a": "lo', 'ng", "b', '": 1}}', "</tool", "_call>"]:
        told.append([delta.as_openai() for delta in stream.push(part)])
    (first,) = told[1][0]["tool_calls"]
    assert told[0] == [{"content": "Hi"}]
    assert first == {**first, "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": "lo'}}
    assert told[2:] == [
        [{"tool_calls": [{"index": 0, "function": {"arguments": 'ng", "b'}}]}],
        [{"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]}],
        [],
        [],
    ]
    assert stream.finish() == []
    assert (stream.called, stream.count, stream.broken) == (True, 1, False)


def test_text_is_not_held_back_longer_than_it_must() -> None:
    stream = ToolFormat.named("hermes").stream()
    assert [delta.content for delta in stream.push("a < b <t")] == ["a < b"]
    assert [delta.content for delta in stream.push("x")] == [" <tx"]
    assert stream.push(" ") == []  # a call may come next
    assert [delta.content for delta in stream.finish()] == [" "]


def test_as_a_message() -> None:
    parsed = ToolFormat.named("hermes").parse(f"<tool_call>{call('f', ROME)}</tool_call>")
    message = parsed.as_openai()
    (one,) = message["tool_calls"]
    assert (message["role"], message["content"]) == ("assistant", None)
    assert one == {"id": one["id"], "type": "function", "function": {"name": "f", "arguments": dumps(ROME)}}
    assert one["id"].startswith("call_")
    assert ToolFormat.named("hermes").parse("Hi").as_openai() == {"role": "assistant", "content": "Hi"}
    (short,) = ToolFormat.named("mistral").parse(f"[TOOL_CALLS][{call('f', {})}]").calls
    assert len(short.id) == 9
    assert short.id.isalnum()


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<|tool_call|>",
        "<tool",
        "[",
        "]",
        "{",
        "}",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```json\n",
        "\n```",
        "function",
    ),
    *("<start_function_call>", "call:f{", "a:1", "<escape>", "<end_function_call>", "```tool_code\n", "f(x=1)", "```"),
    *(
        '"name"',
        '"arguments": ',
        '"parameters": ',
        ": ",
        ", ",
        '"f"',
        '{"a": 1}',
        "null",
        "1e5",
        '"x\\"y"',
        " ",
        "\n",
        ";",
        "text",
    ),
    *(call("f", ROME), call("g", ODD, "parameters"), f"<tool_call>{call('f', ODD)}</tool_call>", dumps(ODD)),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_streamed_equals_whole_for_any_text(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = form.parse(text)
    in_parts, broken = streamed(form, parts)
    in_letters, broken_too = streamed(form, list(text))
    assert bare(in_parts) == bare(in_letters)
    assert broken == broken_too
    if not broken:
        assert bare(in_parts) == bare(whole)
    for one in whole.calls:
        assert isinstance(json.loads(one.arguments), dict)
    if not whole.calls:
        assert whole.content == text


TEMPLATES = {
    "hermes": '{%- if tools %}... return a json object within <tool_call></tool_call>:\n<tool_call>\n{"name"',
    "smollm2": 'The output MUST be: <tool_call>[\n{"name": "func_name1", "arguments": {}}]</tool_call>',
    "llama3": '{{- "Environment: ipython\\n" }}<|python_tag|>{"name": f, "parameters": {}}',
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "mistral-named": '{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}',
    "granite": "{{ '<|tool_call|>' }}",
    "phi4": "{{ '<|tool_call|>' + t + '<|/tool_call|>' }}",
    "deepseek": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments",
    "deepseek-v3": "'<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json' + '\\n'",
    "functiongemma": "{{ '<start_function_call>call:' + name }}",
    "gemma": "put calls into ```tool_code```",
}


def test_found_by_the_template() -> None:
    assert {name: ToolFormat.detect(template).name for name, template in TEMPLATES.items()} == {n: n for n in FORMATS}
    assert ToolFormat.detect("{{ messages }}").name == "hermes"


def test_found_by_name() -> None:
    assert ToolFormat.named("mistral").name == "mistral"
    with pytest.raises(ConfigError, match="Did you mean 'mistral'"):
        ToolFormat.named("mistrl")
