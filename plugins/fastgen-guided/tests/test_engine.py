"""Guided answers of a real engine: batched, chunked, preempted, several choices; and one that fails beside others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastgen_guided import processor

import fastgen
from fastgen.errors import InvalidRequestError
from fastgen.front import Pipeline
from fastgen.testing.checkpoints import tiny_llama

pytestmark = pytest.mark.slow

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
GUIDED = {"guided": {"json_schema": SCHEMA, "whitespace": False}}
SAMPLED = {"temperature": 1.0, "seed": 3, "max_new_tokens": 60}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def pipe(directory: Path) -> Iterator[Pipeline]:
    with fastgen.pipeline(directory) as made:
        yield made


def valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def test_answers_follow_and_end(pipe: Pipeline) -> None:
    response = pipe("hello", n=6, logits_processors=GUIDED, **SAMPLED)
    assert all(valid(choice.text) and choice.finish_reason == "stop" for choice in response.choices)
    assert len({choice.text for choice in response.choices}) > 1
    free = pipe("hello", n=6, **SAMPLED)
    assert not any(valid(choice.text) for choice in free.choices)


@pytest.mark.parametrize(
    "options",
    [{"max_batch_tokens": 8}, {"max_batch_tokens": 16, "num_blocks": 12, "block_size": 8}],
    ids=["chunked", "preempted"],
)
def test_the_same_whatever_happens_to_it(pipe: Pipeline, directory: Path, options: dict[str, Any]) -> None:
    prompts = [f"prompt number {i}, in pieces" for i in range(4)]
    alone = [pipe(prompt, logits_processors=GUIDED, **SAMPLED) for prompt in prompts]
    with fastgen.pipeline(directory, **options) as other:
        together = other(prompts, logits_processors=GUIDED, progress=False, **SAMPLED)
        preemptions = other.stats().preemptions
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert all(valid(r.text) for r in together)
    assert (preemptions > 0) == ("num_blocks" in options)


def test_streamed(pipe: Pipeline) -> None:
    whole = pipe("hello", logits_processors=GUIDED, **SAMPLED)
    assert "".join(chunk.text for chunk in pipe.stream("hello", logits_processors=GUIDED, **SAMPLED)) == whole.text


def test_refused_at_the_front(pipe: Pipeline) -> None:
    for options, reason in [({}, "give one of"), ({"json_schema": {"type": "objct"}}, "objct")]:
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            pipe("a", logits_processors={"guided": options})
        assert caught.value.field == "logits_processors"
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        pipe("a", logits_processors=GUIDED, ignore_eos=True)


def test_options_too_deep_to_be_shown(pipe: Pipeline) -> None:
    schema: dict[str, Any] = {}
    for _ in range(10_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="levels deep"):
        pipe("a", logits_processors={"guided": {"json_schema": schema}})


def test_one_that_fails_ends_alone(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that becomes too complex in the middle of its answer."""
    whole = processor.Guided.allowed

    def fails(self: Any) -> Any:
        if len(self._seen) == 3 and self._matcher.deep_copy().try_consume_tokens([ord("z")]):
            raise ValueError("too complex")
        return whole(self)

    healthy = pipe("healthy", logits_processors=GUIDED, **SAMPLED)
    monkeypatch.setattr(processor.Guided, "allowed", fails)
    streams = [
        pipe.stream("healthy", logits_processors=GUIDED, **SAMPLED),
        pipe.stream("other", logits_processors={"guided": {"regex": "[a-z]{9}"}}, **SAMPLED),
    ]
    chunks = [list(stream) for stream in streams]
    assert "".join(chunk.text for chunk in chunks[0]) == healthy.text
    assert chunks[1][-1].finish_reason == "error"
    assert "too complex" in (chunks[1][-1].error or "")
