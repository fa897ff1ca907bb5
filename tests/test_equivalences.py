"""A response does not depend on who shared its passes: text, ids, log-probabilities, usage and reason are the same
alone, batched, in pieces, preempted and resumed, from a cached prefix, and streamed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

import fastgen
from fastgen.testing.checkpoints import tiny_llama
from fastgen.types import Chunk, Completion, Response, SamplingParams, TokenLogprob, Usage

REQUESTS: list[tuple[str, dict]] = [
    ("Hello, my name is", {"temperature": 0.0}),
    ("a", {"temperature": 0.0, "logprobs": 3}),
    ("The quick brown fox jumps over the lazy dog", {"seed": 1, "temperature": 1.0, "logprobs": 2}),
    ("The quick brown fox jumps over the lazy cat", {"seed": 2, "temperature": 0.8, "top_p": 0.9, "top_k": 40}),
    ("The quick brown fox", {"seed": 3, "temperature": 1.5, "min_p": 0.02, "n": 3, "logprobs": 0}),
    ("é😀한 and more", {"seed": 4, "temperature": 2.0, "prompt_logprobs": 2}),
    ("to be or not to be", {"temperature": 0.0, "repetition_penalty": 1.6, "logprobs": 1}),
    ("that is the question", {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7}),
    ("x" * 70, {"seed": 5, "temperature": 1.0, "min_new_tokens": 8}),
    ("stop it", {"seed": 6, "temperature": 2.0, "stop": [*"abcdefghijklmnopqrstuvwxyz"], "n": 2}),
    ("stop ids", {"seed": 7, "temperature": 2.0, "stop_token_ids": list(range(100, 140))}),
    ("bias", {"seed": 8, "temperature": 1.0, "logit_bias": {65: 3.0, 66: -100.0}, "logprobs": 1}),
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def load(directory, **options) -> fastgen.Pipeline:
    return fastgen.pipeline(directory, **{"device": "cpu", "block_size": 4, "num_blocks": 512, "seed": 0, **options})


def params(options: dict) -> SamplingParams:
    return SamplingParams.of(max_new_tokens=NEW_TOKENS, **options)


def run_alone(pipe: fastgen.Pipeline) -> list[Response]:
    return [pipe(text, params=params(options)) for text, options in REQUESTS]


def run_together(pipe: fastgen.Pipeline) -> list[Response]:
    """All in flight at once, as streams that are read only when every one has been handed in."""
    streams = [pipe.stream(text, params=params(options)) for text, options in REQUESTS]
    return [joined(stream, *request) for stream, request in zip(streams, REQUESTS, strict=True)]


def joined(chunks: Iterable[Chunk], text: str, options: dict) -> Response:
    """The response that a stream's chunks add up to."""
    choices: dict[int, list[Chunk]] = {}
    usage = None
    for chunk in chunks:
        choices.setdefault(chunk.index, []).append(chunk)
        usage = chunk.usage or usage
    assert usage is not None
    completions = []
    for index, parts in sorted(choices.items()):
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        last = parts[-1]
        logprobs = [one for part in parts for one in part.logprobs or []]
        completions.append(
            Completion(
                index=index,
                text="".join(part.text for part in parts),
                token_ids=[token for part in parts for token in part.token_ids],
                finish_reason=last.finish_reason,
                stop=last.stop,
                logprobs=logprobs if "logprobs" in options else None,
                error=last.error,
            )
        )
    return Response("", [], completions, usage, prompt=text)


def assert_same(got: Response, want: Response) -> None:
    assert got.usage.prompt_tokens == want.usage.prompt_tokens
    assert got.usage.completion_tokens == want.usage.completion_tokens
    assert len(got.choices) == len(want.choices)
    for one, other in zip(got.choices, want.choices, strict=True):
        assert replace(one, logprobs=None) == replace(other, logprobs=None)
        assert_same_logprobs(one.logprobs, other.logprobs)


def assert_same_logprobs(got: list[TokenLogprob | None] | None, want: list[TokenLogprob | None] | None) -> None:
    assert (got is None) == (want is None)
    for one, other in zip(got or [], want or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.token_id, one.rank, one.token) == (other.token_id, other.rank, other.token)
            assert math.isclose(one.logprob, other.logprob, abs_tol=1e-4)
            assert_same_logprobs(list(one.top), list(other.top))


@pytest.fixture(scope="module")
def alone(directory) -> list[Response]:
    with load(directory, prefix_caching=False) as pipe:
        return run_alone(pipe)


def test_requests_reach_every_reason(alone):
    """A control of the requests themselves: they end in different ways, with text, and are not all alike."""
    choices = [choice for response in alone for choice in response.choices]
    assert {type(choice.stop) for choice in choices} == {str, int, type(None)}
    assert {choice.finish_reason for choice in choices} == {"stop", "length"}
    assert len({choice.text for choice in choices}) >= len(choices) - 1


CIRCUMSTANCES = {
    "batched": {},
    "one token a pass": {"max_batch_tokens": 1},
    "pieces of 3": {"max_batch_tokens": 3},
    "pieces of 5": {"max_batch_tokens": 5},
    "preempted": {"num_blocks": 25},
    "preempted, no prefix cache": {"num_blocks": 25, "prefix_caching": False},
    "no prefix cache": {"prefix_caching": False},
    "longest prefix first": {"policy": "lpm", "max_sequences": 2},
    "random order": {"policy": "random", "max_sequences": 3},
    "big blocks": {"block_size": 64, "num_blocks": 64},
}


@pytest.mark.parametrize("options", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
def test_streamed_together(directory, alone, options):
    with load(directory, **options) as pipe:
        for got, want in zip(run_together(pipe), alone, strict=True):
            assert_same(got, want)
        stats = pipe.stats()
        assert stats.used_blocks == 0
        assert (stats.preemptions > 0) == (options.get("num_blocks") == 25)


def test_prefix_hit(directory, alone):
    with load(directory) as pipe:
        first, second = run_alone(pipe), run_alone(pipe)
    for got, want in zip(first + second, alone + alone, strict=True):
        assert_same(got, want)
    assert any(response.usage.cached_tokens for response in first)  # some prompts begin alike
    for response, (_, options) in zip(second, REQUESTS, strict=True):
        expected = 0 if "prompt_logprobs" in options else (response.usage.prompt_tokens - 1) // 4 * 4
        assert response.usage.cached_tokens == expected


def test_one_call_for_many(directory, alone):
    """A list in one call, of requests with the same options."""
    texts = [text for text, _ in REQUESTS]
    options = {"max_new_tokens": 9, "seed": 3, "temperature": 1.0, "logprobs": 1}
    with load(directory) as pipe:
        singles = [pipe(text, **options) for text in texts]
        for got, want in zip(pipe(texts, **options), singles, strict=True):
            assert_same(got, want)


def test_prompt_logprobs_survive_company(directory, alone):
    number = next(i for i, (_, options) in enumerate(REQUESTS) if "prompt_logprobs" in options)
    text, options = REQUESTS[number]
    with load(directory, max_batch_tokens=5) as pipe:
        others = [pipe.stream(other, params=params(o)) for other, o in REQUESTS]
        got = pipe(text, params=params(options))
        for other in others:
            list(other)
    assert got.prompt_logprobs[0] is None
    assert_same_logprobs(got.prompt_logprobs, alone[number].prompt_logprobs)


def test_async_equals_sync(directory, alone):
    async def collect(pipe, text, options) -> Response:
        return joined([chunk async for chunk in pipe.astream(text, params=params(options))], text, options)

    async def main(pipe) -> list[Response]:
        return await asyncio.gather(*(collect(pipe, text, options) for text, options in REQUESTS))

    with load(directory) as pipe:
        for got, want in zip(asyncio.run(main(pipe)), alone, strict=True):
            assert_same(got, want)


def test_the_comparison_can_fail(alone):
    """A control of the comparison: one other token, a shifted log-probability, another count are all seen."""
    want = alone[1]
    choice = want.choices[0]
    assert choice.logprobs is not None
    worse = replace(choice.logprobs[0], logprob=choice.logprobs[0].logprob + 0.01)
    for changed in (
        replace(want, choices=[replace(choice, token_ids=[*choice.token_ids[:-1], 0])]),
        replace(want, choices=[replace(choice, logprobs=[worse, *choice.logprobs[1:]])]),
        replace(want, usage=Usage(want.usage.prompt_tokens, want.usage.completion_tokens - 1)),
    ):
        with pytest.raises(AssertionError):
            assert_same(changed, want)
