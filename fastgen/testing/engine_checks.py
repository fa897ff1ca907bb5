"""A case in the real engine: greedy answers are the same alone, preempted and resumed, and from a cached prefix, and
they are the reference's."""

from __future__ import annotations

from typing import Any

import torch

from fastgen.core.engine import Engine
from fastgen.testing.parity import allowed
from fastgen.testing.subject import BLOCK, REACH, Subject
from fastgen.types import SamplingParams

__all__ = ["check_preempted", "check_prefix_hit"]


def check_preempted(subject: Subject) -> None:
    """Three requests in a cache with room for one and a half; where there is a rope that changes with the length, one
    that outgrows it while it is answered.

    Raises:
        AssertionError: an answer depends on the others, or is not the reference's.
    """
    room = subject.blueprint.max_model_len
    new = min(9, room // 2)
    prompts = [subject.ids(min(n, room - new), seed=seed) for seed, n in enumerate((9, 6, 11))]
    alone = _check_company(subject, prompts, new, preempt=True)
    _check_generate(subject, prompts[0], alone[0])
    renewal = subject.decoder.renewal(1)
    if renewal is not None and renewal + new < min(REACH, room):
        prompts[0] = subject.ids(renewal - 5, seed=3)
        _check_company(subject, prompts, new, preempt=False)


def _check_company(subject: Subject, prompts: list[list[int]], new: int, *, preempt: bool) -> list[list[int]]:
    """Each prompt's answer, the same alone and with the others."""
    blocks = -(-(max(map(len, prompts)) + new) // BLOCK) + 2
    with _engine(subject, num_blocks=blocks, prefix_caching=False, max_batch_tokens=7) as engine:
        alone = [_answers(engine, [prompt], new)[0] for prompt in prompts]
        assert engine.stats().preemptions == 0
        together = _answers(engine, prompts, new)
        if preempt:
            assert engine.stats().preemptions > 0, "nothing was preempted, so nothing was checked: a fault of the kit"
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        first = _parting(subject, prompt, one, other)
        if first is not None:
            raise AssertionError(
                f"a prompt of {len(prompt)} tokens is answered {one} alone and {other} with others, preempted and "
                f"resumed: they differ from token {first} on. A part keeps state of its own between passes, or reads "
                "what belongs to another sequence"
            )
        _check_greedy(subject, prompt, one)
    return alone


def check_prefix_hit(subject: Subject) -> None:
    """The same request twice, and one that begins alike, with the prefix cache on.

    Raises:
        AssertionError: the cache changes an answer.
    """
    room = subject.blueprint.max_model_len
    new = min(6, room // 4)
    prompt = subject.ids(min(4 * BLOCK + 2, room - new), seed=7)
    fork = prompt[: 2 * BLOCK + 1] + subject.ids(len(prompt), seed=8)[2 * BLOCK + 1 :]
    with _engine(subject, num_blocks=64) as engine:
        cold = _answers(engine, [prompt], new)[0]
        warm = _answers(engine, [prompt], new)[0]
        hits = engine.stats().prefix_hit_tokens
        forked = _answers(engine, [fork], new)[0]
        assert engine.stats().prefix_hit_tokens > hits > 0, "the cache was not hit: a fault of the kit"
    if _parting(subject, prompt, cold, warm) is not None:
        raise AssertionError(
            f"answered {cold} from a cold cache and {warm} from a warm one: a part keeps state beside the cache, or "
            "its keys depend on more than the tokens before them and `regime`"
        )
    _check_greedy(subject, prompt, cold)
    _check_greedy(subject, fork, forked)


def _engine(subject: Subject, **options: Any) -> Engine:
    return Engine.load(
        subject.directory, **{**subject.options, "block_size": BLOCK, "max_sequences": 4, "seed": 0, **options}
    )


def _answers(engine: Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
    ids = [engine.add(prompt, params) for prompt in prompts]
    found: dict[str, list[int]] = {one: [] for one in ids}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, f"the engine gave up a request: {output.error}"
            if output.token_id is not None:
                found[output.request_id].append(output.token_id)
    return [found[one] for one in ids]


def _parting(subject: Subject, prompt: list[int], one: list[int], other: list[int]) -> int | None:
    """The first token in which two answers differ; ``None`` where they do not, or where the reference finds the two
    tokens equally good, so that rounding decides."""
    for number, (first, second) in enumerate(zip(one, other, strict=True)):
        if first != second:
            row = subject.want(prompt + one[:number])[-1]
            return None if abs(row[first] - row[second]) <= 2 * allowed(row, subject.tolerance) else number
    return None


def _check_greedy(subject: Subject, prompt: list[int], answer: list[int]) -> None:
    """Each token is the reference's best, given those before it: as far as the reference's rope, which goes by the
    length of its call, is the one that the request has then."""
    regime, renewal = subject.decoder.regime, subject.decoder.renewal(len(prompt))
    groups: dict[tuple[int, ...], list[int]] = {}
    for number in range(len(answer)):
        known = len(prompt) + number
        own = regime(len(prompt)) if renewal is None or known < renewal else regime(renewal)
        if own == regime(known):
            groups.setdefault(own, []).append(number)
    for numbers in groups.values():
        # One call of the reference says it of them all.
        rows = subject.want(prompt + answer[: numbers[-1]])[[len(prompt) - 1 + number for number in numbers]]
        picked = rows.gather(1, torch.tensor([answer[number] for number in numbers])[:, None]).squeeze(1)
        behind = rows.amax(-1) - picked
        wrong = (behind > 2 * allowed(rows, subject.tolerance)).nonzero().flatten().tolist()
        if wrong:
            raise AssertionError(
                f"after a prompt of {len(prompt)} tokens the answer is {answer}; its token {numbers[wrong[0]]} is not "
                f"the reference's best ({int(rows[wrong[0]].argmax())}). If test_decode passes, a part behaves "
                "differently in the engine"
            )


def _check_generate(subject: Subject, prompt: list[int], answer: list[int]) -> None:
    """transformers' own ``generate`` answers the same."""
    model = subject.transformers
    if model is None or subject.make_reference is not None:
        return
    if len({subject.decoder.regime(len(prompt) + count) for count in range(len(answer))}) > 1:
        return  # transformers changes the rope while it answers
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=len(answer), pad_token_id=0)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        model(ids[:, :1], use_cache=False)
        found = model.generate(ids, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist()
    if _parting(subject, prompt, found, answer) is not None:
        raise AssertionError(
            f"transformers' generate answers {found} to a prompt of {len(prompt)} tokens, not {answer}"
        )
