"""The official client against the server: what it gets equals what the pipeline gives."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from fastgen.types import Response, TokenLogprob

USER: list[Any] = [{"role": "user", "content": "Tell me"}]
SAMPLED = {"temperature": 0.9, "seed": 7}
TEXTS = ["Hello", "a", "Grüße, 世界"]

EXTRA: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SAMPLED,
    "top_p": {**SAMPLED, "top_p": 0.5},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "bias": {"logit_bias": {"65": 100, "66": 99.5}, **SAMPLED},
    "stop": {"stop": ["d", "zz"]},
    "extensions": {**SAMPLED, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3, "ignore_eos": True},
    "least": {"min_tokens": 3, "stop_token_ids": [100, 31]},
    "kept": {"stop": "d", "include_stop_str_in_output": True, "skip_special_tokens": False},
}
OPENAIS = {
    "temperature",
    "seed",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "n",
    "logprobs",
}
OURS = {"min_tokens": "min_new_tokens", "include_stop_str_in_output": "include_stop"}


def keywords(fields: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the client: what it does not know goes into ``extra_body``."""
    extra = {name: value for name, value in fields.items() if name not in OPENAIS}
    known = {name: value for name, value in fields.items() if name in OPENAIS}
    return {**known, "extra_body": {**extra, "return_token_ids": True}}


def sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """The same for the pipeline."""
    return {OURS.get(name, name): value for name, value in fields.items()}


def stripped(choices: Any) -> list[tuple[Any, ...]]:
    return [(one.text, one.token_ids, one.finish_reason, getattr(one, "stop_reason", None)) for one in choices]


def expected(response: Response) -> list[tuple[Any, ...]]:
    return [(one.text, one.token_ids, one.finish_reason, one.stop) for one in response.choices]


def near(value: Any) -> Any:
    """The same request in another batch, or from the prefix cache, differs in the last bits. Text is compared as is."""
    return value if isinstance(value, str) else pytest.approx(value, abs=1e-4)


def same_logprobs(told: Any, entries: list[TokenLogprob | None]) -> None:
    """The format of completions."""
    assert told.tokens == [one and one.token for one in entries]
    assert told.token_logprobs == [None if one is None else near(one.logprob) for one in entries]
    for top, entry in zip(told.top_logprobs, entries, strict=True):
        if entry is None:
            assert top is None
            continue
        wanted: dict[str, float] = {}
        for one in (entry, *entry.top):
            wanted[one.token] = max(one.logprob, wanted.get(one.token, -math.inf))
        assert top == near(wanted)


@pytest.mark.parametrize("fields", EXTRA.values(), ids=EXTRA)
@pytest.mark.parametrize("n", [1, 3])
def test_completions_equal_the_pipelines(live: Any, fields: dict[str, Any], n: int) -> None:
    with live.sync_openai() as client:
        got = client.completions.create(model="tiny", prompt=TEXTS, max_tokens=8, n=n, **keywords(fields))
    wanted = live.pipe(TEXTS, max_new_tokens=8, n=n, **sampling(fields))
    assert [one.index for one in got.choices] == list(range(3 * n))
    assert stripped(got.choices) == [one for response in wanted for one in expected(response)]
    assert [one.prompt_token_ids for one in got.choices[::n]] == [one.prompt_token_ids for one in wanted]  # type: ignore[attr-defined]
    assert got.usage is not None
    assert got.usage.completion_tokens == sum(one.usage.completion_tokens for one in wanted)
    assert got.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in wanted)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.object == "text_completion"
    assert got.model == "tiny"


@pytest.mark.parametrize("fields", EXTRA.values(), ids=EXTRA)
def test_streamed_completions_add_up_to_whole_ones(live: Any, fields: dict[str, Any]) -> None:
    asked = {"model": "tiny", "prompt": TEXTS, "max_tokens": 8, "n": 2, "logprobs": 3, **keywords(fields)}
    with live.sync_openai() as client:
        whole = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )
    for choice in whole.choices:
        pieces = [one.choices[0] for one in chunks if one.choices[0].index == choice.index]
        assert "".join(one.text for one in pieces) == choice.text
        assert [token for one in pieces for token in one.token_ids] == choice.token_ids
        assert [one.finish_reason for one in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [entry for one in pieces for entry in getattr(one.logprobs, name)]
            assert joined == [near(one) for one in getattr(choice.logprobs, name)]


def test_prompts_as_ids_equal_prompts_as_text(live: Any) -> None:
    ids = [live.pipe.tokenizer.encode(text) for text in TEXTS]
    with live.sync_openai() as client:
        text = client.completions.create(model="tiny", prompt=TEXTS, max_tokens=6)
        several = client.completions.create(model="tiny", prompt=ids, max_tokens=6)
        one = client.completions.create(model="tiny", prompt=ids[0], max_tokens=6)
    assert [choice.text for choice in several.choices] == [choice.text for choice in text.choices]
    assert one.choices[0].text == text.choices[0].text


@pytest.mark.parametrize("asked", [0, 1, 4])
def test_logprobs_of_completions(live: Any, asked: int) -> None:
    with live.sync_openai() as client:
        got = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, logprobs=asked, **SAMPLED)  # type: ignore[arg-type]
    wanted = live.pipe("Hello", max_new_tokens=5, logprobs=asked, **SAMPLED)
    same_logprobs(got.choices[0].logprobs, wanted.logprobs)


@pytest.mark.parametrize("fields", EXTRA.values(), ids=EXTRA)
def test_chats_equal_the_pipelines(live: Any, fields: dict[str, Any]) -> None:
    asked = {
        "model": "tiny",
        "messages": USER,
        "max_completion_tokens": 8,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        **keywords(fields),
    }
    wanted = live.pipe.chat(USER, max_new_tokens=8, n=2, logprobs=2, **sampling(fields))
    with live.sync_openai() as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == wanted.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens == wanted.usage.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens >= 0
    assert len({(one.id, one.created, one.model, one.system_fingerprint) for one in chunks}) == 1
    for choice, one in zip(whole.choices, wanted.choices, strict=True):
        assert (choice.message.content, choice.message.role) == (one.text, "assistant")
        assert choice.token_ids == one.token_ids
        assert choice.finish_reason == one.finish_reason
        assert [entry.token for entry in choice.logprobs.content] == [entry.token for entry in one.logprobs]
        assert [entry.logprob for entry in choice.logprobs.content] == near([entry.logprob for entry in one.logprobs])
        for told, entry in zip(choice.logprobs.content, one.logprobs, strict=True):
            assert [top.token for top in told.top_logprobs] == [top.token for top in entry.top]
            assert [top.logprob for top in told.top_logprobs] == near([top.logprob for top in entry.top])
            assert told.bytes == list(live.pipe.tokenizer.token_bytes(entry.token_id) or entry.token.encode())
        pieces = [piece.choices[0] for piece in chunks if piece.choices[0].index == choice.index]
        assert "".join(piece.delta.content or "" for piece in pieces) == one.text
        assert [piece.delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [one.finish_reason]
        told = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
        assert [(entry.token, entry.bytes) for entry in told] == [
            (entry.token, entry.bytes) for entry in choice.logprobs.content
        ]
        assert [entry.logprob for entry in told] == near([entry.logprob for entry in choice.logprobs.content])


def test_a_chat_without_a_length_ends_where_the_model_does(live: Any) -> None:
    with live.sync_openai() as client:
        got = client.chat.completions.create(model="tiny", messages=USER, seed=3, temperature=1)
    wanted = live.pipe.chat(USER, seed=3, temperature=1)
    assert got.choices[0].message.content == wanted.text
    assert got.choices[0].finish_reason == wanted.finish_reason
    assert got.usage is not None
    assert got.usage.completion_tokens > 256 or wanted.finish_reason == "stop"


def test_text_parts_and_the_developer_role_reach_the_template(live: Any) -> None:
    parts: list[Any] = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Tell"}, {"type": "text", "text": " me"}]},
    ]
    plain = [{"role": "system", "content": "Be brief"}, *USER]
    with live.sync_openai() as client:
        got = client.chat.completions.create(
            model="tiny", messages=parts, max_tokens=1, extra_body={"return_token_ids": True}
        )
    assert got.choices[0].prompt_token_ids == live.pipe.tokenizer.encode_chat(plain)  # type: ignore[attr-defined]


def test_continuing_a_message(live: Any) -> None:
    messages: list[Any] = [*USER, {"role": "assistant", "content": "Once"}]
    extra = {"continue_final_message": True, "return_token_ids": True}
    with live.sync_openai() as client:
        got = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=extra)
    ids = live.pipe.tokenizer.encode_chat(messages, continue_final_message=True)
    assert got.choices[0].prompt_token_ids == ids  # type: ignore[attr-defined]
    assert live.pipe.tokenizer.decode(ids).endswith("Once")


def test_the_asynchronous_client(door: Any) -> None:
    async def ask() -> None:
        async with door.openai() as client:
            got, chat = await asyncio.gather(
                client.completions.create(model="tiny", prompt="Hello", max_tokens=6),
                client.chat.completions.create(model="tiny", messages=USER, max_tokens=6),
            )
            assert got.choices[0].text == door.pipe("Hello", max_new_tokens=6).text
            assert chat.choices[0].message.content == door.pipe.chat(USER, max_new_tokens=6).text
            stream = await client.completions.create(model="tiny", prompt="Hello", max_tokens=6, stream=True)
            assert "".join([one.choices[0].text async for one in stream]) == got.choices[0].text

    asyncio.run(ask())
    assert door.idle()


def test_models(live: Any) -> None:
    with live.sync_openai() as client:
        assert [one.id for one in client.models.list()] == ["tiny"]
        model = client.models.retrieve("tiny")
        assert (model.object, model.owned_by, model.created) == ("model", "fastgen", live.service.created)
        with pytest.raises(openai.NotFoundError, match=r"there is no model 'tinny'.*Did you mean 'tiny'"):
            client.models.retrieve("tinny")


@pytest.mark.parametrize(
    ("fields", "error", "param", "words"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "served are 'tiny'"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 512}, openai.BadRequestError, "max_tokens", "max_model_len"),
        ({"temperature": -0.1}, openai.BadRequestError, "temperature", "got -0.1"),
        ({"n": 129}, openai.BadRequestError, "n", "less than or equal to 128"),
        ({"best_of": 2}, openai.BadRequestError, "best_of", "nothing is ranked"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix", "suffix"),
        ({"prompt": []}, openai.BadRequestError, "prompt", "empty"),
        ({"prompt": [0, 259]}, openai.BadRequestError, "prompt", "0 to 258"),
        ({"prompt": ["ok", ""]}, openai.BadRequestError, "prompt", "prompt 1 of 2"),
        ({"stop": ""}, openai.BadRequestError, "stop", "empty stop string"),
        ({"logit_bias": {"259": 1}}, openai.BadRequestError, "logit_bias", "0 to 258"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature", "Did you mean 'temperature'"),
        ({"extra_body": {"lora": "x"}}, openai.BadRequestError, "lora", "unknown field"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options", "set stream"),
    ],
    ids=str,
)
def test_errors_are_the_clients_exceptions(
    live: Any, fields: dict[str, Any], error: type[openai.APIStatusError], param: str, words: str
) -> None:
    with live.sync_openai() as client, pytest.raises(error, match=words) as raised:
        client.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 2, **fields})
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"
    assert raised.value.code
    assert raised.value.request_id == raised.value.response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"content": "x"}]}, "messages", "needs a role"),
        ({"messages": [{"role": "user"}]}, "messages", "no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
            "reads text alone",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "two names"),
        ({"max_completion_tokens": 600}, "max_completion_tokens", "max_completion_tokens asks for 600"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions", "send tools"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template", "not the text of one"),
        ({"extra_body": {"chat_template": "toools"}}, "chat_template", "template"),
        ({"extra_body": {"add_generation_prompt": True, "continue_final_message": True}}, None, "choose one"),
    ],
    ids=str,
)
def test_errors_of_chats(live: Any, fields: dict[str, Any], param: str | None, words: str) -> None:
    with live.sync_openai() as client, pytest.raises(openai.BadRequestError, match=words) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": USER, **fields})
    assert param is None or raised.value.param == param


def test_keys(make: Any, serve: Any) -> None:
    with serve(make(api_key=("right", "also right"))) as live:
        for key in ("right", "also right"):
            with live.sync_openai(api_key=key) as client:
                assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
        with live.sync_openai(api_key="wrong") as client, pytest.raises(openai.AuthenticationError) as raised:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert raised.value.code == "invalid_api_key"


def test_a_full_server_is_a_rate_limit(make: Any, serve: Any) -> None:
    with serve(make(max_queue=0)) as live, live.sync_openai() as client:
        with live.admission.enter(choices=2), pytest.raises(openai.RateLimitError, match="full") as raised:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert int(raised.value.response.headers["retry-after"]) >= 1
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
        live.admission.drain()
        with pytest.raises(openai.InternalServerError, match="shutting down") as other:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert other.value.status_code == 503


def test_a_body_that_is_too_large(make: Any, serve: Any) -> None:
    with serve(make(max_request_size="2KiB")) as live, live.sync_openai() as client:
        with pytest.raises(openai.APIStatusError, match="max_request_size") as raised:
            client.completions.create(model="tiny", prompt="x" * 4000, max_tokens=1)
        assert raised.value.status_code == 413
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
