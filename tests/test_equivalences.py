"""A response does not depend on who shared its passes: it is the same alone, batched, in pieces, preempted and resumed,
from a cached prefix, and streamed. All of it is compared. Allowed to differ are, and are listed in ``bare``,

- the request's id;
- ``usage.cached_tokens``, where a prefix may be found in the cache: it is on, and no prompt logprobs are asked for;
- the last digits of log-probabilities, whose sums are made in another order.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

import fastgen
from fastgen.core.policy import Outcome, Plan, Sequence
from fastgen.front import AsyncChunkStream, ChunkStream
from fastgen.testing.checkpoints import tiny_llama
from fastgen.types import Chunk, Completion, Response, SamplingParams, TokenLogprob, Usage

pytestmark = pytest.mark.slow

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
    return [checked(stream, list(stream), options) for stream, (_, options) in zip(streams, REQUESTS, strict=True)]


def checked(stream: ChunkStream | AsyncChunkStream, chunks: list[Chunk], options: dict) -> Response:
    """The stream's response, which its chunks must add up to."""
    response = stream.response()
    assert (response.choices, response.usage) == added_up(chunks, options)
    assert {chunk.request_id for chunk in chunks} == {response.request_id}
    assert stream.prompt_logprobs == response.prompt_logprobs
    return response


def added_up(chunks: list[Chunk], options: dict) -> tuple[list[Completion], Usage]:
    """Choices and usage, made from the chunks alone."""
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
    return completions, usage


def bare(response: Response, *, cached: bool) -> Response:
    """Without what may differ; ``cached``: whether the tokens found in the cache may. The log-probabilities are
    compared on their own."""
    usage = replace(response.usage, cached_tokens=0) if cached else response.usage
    choices = [replace(choice, logprobs=None) for choice in response.choices]
    return replace(response, request_id="", usage=usage, choices=choices, prompt_logprobs=None)


def assert_same(got: Response, want: Response, *, cached: bool = False) -> None:
    """``cached``: whether the cache may hold some of the prompt."""
    cached = cached and want.prompt_logprobs is None
    assert bare(got, cached=cached) == bare(want, cached=cached)
    assert 0 <= got.usage.cached_tokens < got.usage.prompt_tokens
    assert_same_logprobs(got.prompt_logprobs, want.prompt_logprobs)
    for one, other in zip(got.choices, want.choices, strict=True):
        assert_same_logprobs(one.logprobs, other.logprobs)


def assert_all_same(got: list[Response], want: list[Response], *, cached: bool = False) -> None:
    for one, other in zip(got, want, strict=True):
        assert_same(one, other, cached=cached)


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
    "longest prefix first": {"queue_order": "lpm", "max_sequences": 2},
    "random order": {"queue_order": "random", "max_sequences": 3},
    "prompts first": {"policy": "prefill-first"},
    "prompts first, preempted": {"policy": "prefill-first", "num_blocks": 25},
    "whole prompts": {"policy": "whole-prompt", "max_batch_tokens": 3},
    "whole prompts, preempted": {"policy": "whole-prompt", "num_blocks": 25, "prefix_caching": False},
    "big blocks": {"block_size": 64, "num_blocks": 64},
}


@pytest.mark.parametrize("options", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
def test_streamed_together(directory, alone, options):
    with load(directory, **options) as pipe:
        assert_all_same(run_together(pipe), alone, cached=options.get("prefix_caching", True))
        stats = pipe.stats()
        assert stats.used_blocks == 0
        assert (stats.preemptions > 0) == (options.get("num_blocks") == 25)


def test_prefix_hit(directory, alone):
    with load(directory) as pipe:
        first, second = run_alone(pipe), run_alone(pipe)
    assert_all_same(first + second, alone + alone, cached=True)
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
        assert_all_same(pipe(texts, **options), singles, cached=True)


def test_prompt_logprobs_survive_company(directory, alone):
    number = next(i for i, (_, options) in enumerate(REQUESTS) if "prompt_logprobs" in options)
    text, options = REQUESTS[number]
    with load(directory, max_batch_tokens=5) as pipe:
        others = [pipe.stream(other, params=params(o)) for other, o in REQUESTS]
        got = pipe(text, params=params(options))
        for other in others:
            list(other)
    assert [entry is None for entry in got.prompt_logprobs] == [True] + [False] * (got.usage.prompt_tokens - 1)
    assert_same(got, alone[number])


def test_d9_prompt_logprobs_survive_preemption(directory):
    """Of prompts that lose their blocks when they are half read, and of those that lose them later."""
    texts = ["a stream that goes first and grows", *(f"{number} is the one I think of" * 2 for number in range(3))]
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 9, "ignore_eos": True, "prompt_logprobs": 2}
    with load(directory, prefix_caching=False) as pipe:
        alone = [pipe(text, **options) for text in texts]
    with load(directory, num_blocks=27, max_batch_tokens=3, max_sequences=4) as pipe:
        victims = preempted_ones(pipe)
        streams = [pipe.stream(text, **options, priority=-number) for number, text in enumerate(texts)]
        got = [checked(stream, list(stream), options) for stream in streams]
    assert_all_same(got, alone)
    assert set(victims) == {"half read", "later"}


def preempted_ones(pipe: fastgen.Pipeline) -> list[str]:
    """Filled while the pipeline runs: how far each sequence that lost its blocks had come."""
    found: list[str] = []
    scheduler = pipe.engine.scheduler
    before: dict[Sequence, int] = {}
    plan, commit = scheduler.plan, scheduler.commit

    def watch_plan() -> Plan:
        made = plan()
        for sequence in made.preempted:
            if before.get(sequence, 0):
                found.append("half read" if before[sequence] < sequence.num_prompt else "later")
        return made

    def watch_commit(made: Plan, tokens: list[int | None]) -> list[Outcome]:
        outcomes = commit(made, tokens)
        before.update((sequence, sequence.num_computed) for sequence in made.sequences)
        return outcomes

    scheduler.plan, scheduler.commit = watch_plan, watch_commit
    return found


def test_async_equals_sync(directory, alone):
    async def collect(pipe, text, options) -> Response:
        stream = pipe.astream(text, params=params(options))
        return checked(stream, [chunk async for chunk in stream], options)

    async def main(pipe) -> list[Response]:
        return await asyncio.gather(*(collect(pipe, text, options) for text, options in REQUESTS))

    with load(directory) as pipe:
        assert_all_same(asyncio.run(main(pipe)), alone, cached=True)
        whole = asyncio.run(pipe.acall(REQUESTS[5][0], params=params(REQUESTS[5][1])))
        assert_same(whole, alone[5])


def test_the_comparison_can_fail(alone):
    """A control of the comparison: a change of any one thing is seen, and the listed differences are not."""
    for want in (alone[2], alone[5]):
        (choice,), usage = want.choices, want.usage
        for changes in (
            {"choices": [replace(choice, token_ids=[*choice.token_ids[:-1], 0])]},
            {"choices": [replace(choice, text=f"{choice.text} ")]},
            {"choices": [replace(choice, finish_reason="abort")]},
            {"choices": [replace(choice, stop="x")]},
            {"choices": [replace(choice, logprobs=shifted(choice.logprobs))]},
            {"choices": [choice, choice]},
            {"usage": replace(usage, prompt_tokens=usage.prompt_tokens + 1)},
            {"usage": replace(usage, completion_tokens=usage.completion_tokens - 1)},
            {"usage": replace(usage, cached_tokens=usage.prompt_tokens)},
            {"prompt": f"{want.prompt} "},
            {"prompt_token_ids": want.prompt_token_ids[1:]},
            {"prompt_logprobs": shifted(want.prompt_logprobs)},
        ):
            with pytest.raises(AssertionError):
                assert_same(replace(want, **changes), want, cached=True)
        hit = replace(want, request_id="other", usage=replace(usage, cached_tokens=1))
        with pytest.raises(AssertionError):
            assert_same(hit, want)
    assert_same(
        replace(alone[2], request_id="other", usage=replace(alone[2].usage, cached_tokens=1)), alone[2], cached=True
    )


def shifted(entries: list[TokenLogprob | None] | None) -> list[TokenLogprob | None]:
    """The same with one number a little off; something where there was nothing."""
    if entries is None:
        return []
    return [*entries[:-1], replace(entries[-1], logprob=entries[-1].logprob + 0.01)]


def test_the_adding_up_can_fail(directory):
    """A control: a stream whose chunks are not its response is found out."""
    with load(directory) as pipe:
        stream = pipe.stream("abc", max_new_tokens=4, ignore_eos=True)
        chunks = list(stream)
    checked(stream, chunks, {})
    for wrong in ([*chunks[1:]], [replace(chunks[0], text="?"), *chunks[1:]]):
        with pytest.raises(AssertionError):
            checked(stream, wrong, {})
