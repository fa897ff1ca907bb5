"""The client's verbs are the pipeline's: the same signatures, the same objects, the same errors."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fastgen.client
from fastgen.client import Client
from fastgen.errors import ConfigError, InvalidRequestError
from fastgen.front import Pipeline
from fastgen.front.verbs import Verbs
from fastgen.server.inprocess import in_process
from fastgen.testing.doors import Served, open_door
from fastgen.types import Response, SamplingParams

pytestmark = pytest.mark.slow

VERBS = ("__call__", "stream", "acall", "astream", "chat", "achat")
USER = [{"role": "user", "content": "hé"}]


def same(response: Response, other: Response) -> bool:
    """Equal but for the request's name."""
    return replace(response, request_id="") == replace(other, request_id="")


@pytest.mark.parametrize("name", VERBS)
def test_the_signatures_are_the_pipelines(name: str) -> None:
    assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(Verbs, name))
    assert inspect.iscoroutinefunction(getattr(Client, name)) == inspect.iscoroutinefunction(getattr(Verbs, name))


def test_no_other_verb_is_missing() -> None:
    asked = {name for name, value in vars(Verbs).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert asked | {"__call__"} == set(VERBS)


# ---- the same objects ------------------------------------------------------------------------------------------------

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 6},
    "default length": {"stop_token_ids": [17]},
    "seeded": {"max_new_tokens": 6, "temperature": 0.9, "seed": 7},
    "narrowed": {"max_new_tokens": 6, "temperature": 2.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    "n": {"max_new_tokens": 4, "n": 3, "temperature": 1.0, "seed": 3},
    "logprobs": {"max_new_tokens": 4, "logprobs": 3},
    "logprobs of the chosen": {"max_new_tokens": 4, "logprobs": 0, "n": 2, "temperature": 1.0, "seed": 1},
    "prompt logprobs": {"max_new_tokens": 2, "prompt_logprobs": 2},
    "all logprobs": {"max_new_tokens": 3, "n": 2, "logprobs": 1, "prompt_logprobs": 0, "temperature": 1.0, "seed": 5},
    "stop string": {"max_new_tokens": 40, "temperature": 1.5, "seed": 2, "stop": ["a", "e", "i", "\x11"]},
    "stop string kept": {"max_new_tokens": 40, "temperature": 1.5, "seed": 2, "stop": "\x11", "include_stop": True},
    "stop id": {"max_new_tokens": 40, "temperature": 1.5, "seed": 2, "stop_token_ids": list(range(0, 256, 3))},
    "penalties": {
        "max_new_tokens": 8,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {97: 3.0, 98: -100},
    },
    "lengths": {"max_length": 12, "min_new_tokens": 3, "ignore_eos": True},
    "special tokens": {"max_new_tokens": 3, "add_special_tokens": False, "skip_special_tokens": False},
    "priority and salt": {"max_new_tokens": 2, "priority": 3, "cache_salt": "tenant"},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_completions_equal_the_pipelines(client: Client, pipe: Pipeline, params: dict[str, Any]) -> None:
    expected = pipe("hé llo", **params)
    assert same(client("hé llo", **params), expected)
    assert same(client("hé llo", SamplingParams(**params)), expected)

    stream = client.stream("hé llo", **params)
    chunks = list(stream)
    assert same(stream.response(), expected)
    assert stream.prompt_logprobs == expected.prompt_logprobs
    theirs = list(pipe.stream("hé llo", **params))
    assert _by_choice(chunks) == _by_choice(theirs)

    async def asynchronous() -> None:
        assert same(await client.acall("hé llo", **params), expected)
        stream = client.astream("hé llo", **params)
        assert _by_choice([chunk async for chunk in stream]) == _by_choice(theirs)
        assert same(stream.response(), expected)

    asyncio.run(asynchronous())


def _by_choice(chunks: list[Any]) -> list[Any]:
    """In each choice's own order, without the request's name."""
    return sorted((replace(chunk, request_id="") for chunk in chunks), key=lambda chunk: chunk.index)


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"max_new_tokens": 4},
    "default length": {"stop_token_ids": list(range(100))},
    "several turns": {
        "messages": [{"role": "system", "content": "x"}, *USER, {"role": "assistant", "content": "ab"}, *USER],
        "max_new_tokens": 4,
        "logprobs": 1,
    },
    "continued": {
        "messages": [*USER, {"role": "assistant", "content": "ab"}],
        "continue_final_message": True,
        "max_new_tokens": 4,
    },
    "not opened": {"add_generation_prompt": False, "max_new_tokens": 4},
    "variables": {"template_variables": {"enable_thinking": False}, "max_new_tokens": 3},
    "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "max_new_tokens": 3},
    "special tokens": {"add_special_tokens": True, "max_new_tokens": 3},
}


@pytest.mark.parametrize("options", CHATS.values(), ids=CHATS.keys())
def test_chats_equal_the_pipelines(client: Client, pipe: Pipeline, options: dict[str, Any]) -> None:
    options = {"messages": USER, **options}
    expected = pipe.chat(**options)
    assert same(client.chat(**options), expected)
    stream = client.chat(**options, stream=True)
    assert "".join(chunk.text for chunk in stream) == expected.text
    assert same(stream.response(), expected)

    async def asynchronous() -> None:
        assert same(await client.achat(**options), expected)
        stream = client.achat(**options, stream=True)
        assert "".join([chunk.text async for chunk in stream]) == expected.text
        assert same(stream.response(), expected)

    asyncio.run(asynchronous())


def test_a_python_function_is_a_tool(client: Client, pipe: Pipeline) -> None:
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where
        """
        return city

    options: dict[str, Any] = {"tools": [weather], "max_new_tokens": 2}
    assert same(client.chat(USER, **options), pipe.chat(USER, **options))
    with pytest.raises(InvalidRequestError, match="tools") as error:
        client.chat(USER, tools=[lambda x: x])
    assert error.value.field == "tools"


def test_lists_in_their_order(client: Client, pipe: Pipeline) -> None:
    texts = ["long " * 20, "b", "middle " * 5, "d"] * 4
    expected = pipe(texts, max_new_tokens=3)
    for responses in (client(texts, max_new_tokens=3), asyncio.run(client.acall(tuple(texts), max_new_tokens=3))):
        assert len(responses) == len(texts)
        assert all(map(same, responses, expected))
    assert client([]) == pipe([]) == []
    assert [response.prompt for response in client(["a"], max_new_tokens=1)] == ["a"]


def test_token_ids_one_list_or_several(client: Client, pipe: Pipeline) -> None:
    expected = pipe(prompt_token_ids=[97, 98], max_new_tokens=2)
    assert expected.prompt is None
    for ids in ([97, 98], (97, 98), np.array([97, 98]), torch.tensor([97, 98])):
        assert same(client(prompt_token_ids=ids, max_new_tokens=2), expected)
    for rows in ([[97, 98]], np.array([[97, 98]]), [np.array([97, 98])]):
        (response,) = client(prompt_token_ids=rows, max_new_tokens=2)
        assert same(response, expected)
    stream = client.stream(prompt_token_ids=[97, 98], max_new_tokens=2)
    list(stream)
    assert same(stream.response(), expected)


# ---- the same errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompts": "a", "prompt_token_ids": [1]},
        {"prompts": 5},
        {"prompts": b"a"},
        {"prompts": [1, 2]},
        {"prompts": ["a", USER[0]]},
        {"prompts": ""},
        {"prompts": ["a", "", "b"]},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [[97], []]},
        {"prompt_token_ids": [97, [98]]},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [10**12]},
        {"prompt_token_ids": [97], "add_special_tokens": True},
        {"prompts": "a", "temprature": 1},
        {"prompts": "a", "temperature": float("nan")},
        {"prompts": "a", "max_new_tokens": "5"},
        {"prompts": "a", "max_new_tokens": 5, "max_length": 9},
        {"prompts": "a", "max_length": 1},
        {"prompts": "a", "stop": ""},
        {"prompts": "a", "stop_token_ids": [10**12]},
        {"prompts": "a", "logit_bias": {300: 1.0}},
        {"prompts": "a", "logits_processors": {"nobody": {}}},
        {"prompts": "a", "lora": "nobody"},
        {"prompts": "a", "n": 129},
        {"prompts": "a", "params": {"n": 2}},
        {"prompts": ["a", "b" * 20_000]},
    ],
    ids=str,
)
def test_errors_are_the_pipelines(client: Client, pipe: Pipeline, arguments: dict[str, Any]) -> None:
    calls: list[Callable[[Any], object]] = [
        lambda verbs: verbs(**arguments),
        lambda verbs: asyncio.run(verbs.acall(**arguments)),
    ]
    if not isinstance(arguments.get("prompts"), list):
        renamed = {"prompt" if name == "prompts" else name: value for name, value in arguments.items()}
        calls += [lambda verbs: verbs.stream(**renamed), lambda verbs: asyncio.run(_first(verbs.astream(**renamed)))]
    for call in calls:
        with pytest.raises(InvalidRequestError) as theirs:
            call(pipe)
        with pytest.raises(InvalidRequestError) as ours:
            call(client)
        words = str(theirs.value).replace("call the pipeline", "call the client")
        assert (str(ours.value), ours.value.field) == (words, theirs.value.field)


@pytest.mark.parametrize(
    "options",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": USER, "nobody": 1},
        {"messages": USER, "n": 0},
        {"messages": USER, "template": "nobody"},
        {"messages": USER, "template_variables": {"tools": 1}},
        {"messages": USER, "add_generation_prompt": True, "continue_final_message": True},
    ],
    ids=str,
)
def test_errors_of_chats_are_the_pipelines(client: Client, pipe: Pipeline, options: dict[str, Any]) -> None:
    for call in (
        lambda verbs: verbs.chat(**options),
        lambda verbs: verbs.chat(**options, stream=True),
        lambda verbs: asyncio.run(verbs.achat(**options)),
        lambda verbs: asyncio.run(_first(verbs.achat(**options, stream=True))),
    ):
        with pytest.raises(InvalidRequestError) as theirs:
            call(pipe)
        with pytest.raises(InvalidRequestError) as ours:
            call(client)
        assert (str(ours.value), ours.value.field) == (str(theirs.value), theirs.value.field)


async def _first(stream: Any) -> object:
    return await anext(stream)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client("b\ud800"), "prompt"),
        (lambda client: client(["a", "b\ud800"]), "prompt"),
        (lambda client: client("a", stop="\ud800"), "stop"),
        (lambda client: client("a", logits_processors={"a": object()}), "logits_processors"),
        (lambda client: client(prompt_token_ids=[2**70]), "prompt_token_ids"),
        (lambda client: client.chat([{"role": "user", "content": "\ud800"}]), "messages"),
        (lambda client: client.chat(USER, template="{{ messages }}"), "template"),
        (lambda client: client.chat(USER, tools=[object()]), "tools"),
    ],
)
def test_what_does_not_go_over_a_wire(client: Client, call: Callable[[Client], object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        call(client)
    assert error.value.field == field


def test_a_failed_request_ends_with_an_error_and_hurts_no_other(client: Client, pipe: Pipeline) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "logits_processors": {"raises": {"after": 2}}}
    expected = pipe("a", **options)
    assert (expected.finish_reason, "a fault of the plugin" in str(expected.error)) == ("error", True)
    healthy = client.stream("b", max_new_tokens=20)
    assert same(client("a", **options), expected)
    stream = client.stream("a", **options)
    assert list(stream)[-1].error == expected.error
    assert same(stream.response(), expected)
    list(healthy)
    assert same(healthy.response(), pipe("b", max_new_tokens=20))


# ---- the server ------------------------------------------------------------------------------------------------------


def test_the_server_is_asked(client: Client, served: Served) -> None:
    assert client.model_info() == asyncio.run(client.amodel_info()) == served.service.info
    assert client.health() is True
    served.backend.starting = True
    try:
        assert client.health() is False
        assert asyncio.run(client.ahealth()) is False
    finally:
        served.backend.starting = False


def test_a_model_by_its_name(client: Client, pipe: Pipeline) -> None:
    named = client.with_options(model="tiny")
    assert same(named("a", max_new_tokens=2), pipe("a", max_new_tokens=2))
    other = client.with_options(model="tony")
    for call in (lambda: other("a"), lambda: other.stream("a"), lambda: other.chat(USER)):
        with pytest.raises(InvalidRequestError, match="Did you mean 'tiny'") as error:
            call()
        assert error.value.field == "model"


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_names_of_adapters_are_models(pipe: Pipeline, door: Any) -> None:
    """The engine has none: that it says so shows that it was asked for one."""
    info = replace(in_process(pipe, name="tiny").info, loras=("polite",))
    with open_door(pipe, door, info=info) as served, Client(served.address, model="polite") as client:
        with pytest.raises(InvalidRequestError, match="lora names the adapter 'polite'"):
            client("a")
        with pytest.raises(InvalidRequestError, match="another one"):
            client("a", lora="rude")


# ---- the package -----------------------------------------------------------------------------------------------------


def test_the_package_is_the_function(served: Served) -> None:
    with fastgen.client(served.address, timeout=30) as made:  # type: ignore[operator, unused-ignore]
        assert isinstance(made, Client)
        assert made.health()
    assert made.closed


def test_a_url_may_end_as_openai_s_clients_want_it(served: Served) -> None:
    if served.address.startswith("http"):
        with Client(served.address + "/v1/") as made:
            assert made.health()
    else:
        with pytest.raises(ConfigError, match="host:port"):
            Client(served.address + "/v1")


def test_no_torch_and_nothing_heavy() -> None:
    code = (
        "import sys, fastgen.client, fastgen.client.over_grpc, fastgen.client.over_http;"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("address", "options", "words"),
    [
        ("localhost", {}, "host:port"),
        ("localhost:no", {}, "localhost:no"),
        ("localhost:70000", {}, "localhost:70000"),
        ("", {}, "host:port"),
        ("http://", {}, "http://host:port"),
        ("ftp://a:1", {}, "'ftp' is none of"),
        ("a:1/path", {}, "host:port"),
        (5, {}, "must be text"),
        ("a:1", {"timeout": 0}, "timeout"),
        ("a:1", {"timeout": float("inf")}, "timeout"),
        ("a:1", {"retries": -1}, "retries"),
        ("a:1", {"concurrency": 0}, "concurrency"),
        ("a:1", {"model": 5}, "model"),
        ("a:1", {"api_key": "a\nb"}, "api_key"),
        ("a:1", {"api_key": ""}, "api_key"),
        ("a:1", {"ca_cert": "/nowhere"}, "grpcs|no file"),
        ("http://a:1", {"ca_cert": __file__}, "https"),
    ],
)
def test_options_that_cannot_be_used(address: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Client(address, **options)


def test_options_of_a_copy(client: Client) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'tmeout'.*'timeout'"):
        client.with_options(tmeout=1)
    with pytest.raises(ConfigError, match="timeout"):
        client.with_options(timeout=-1)
