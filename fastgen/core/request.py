"""Admission at the front door: is this request possible, and what exactly does it ask for? No torch here.

``resolve`` turns ``SamplingParams`` (where silence means "the model's default, then ours") into ``Sampling``, where
nothing is left open, or refuses with an ``InvalidRequestError`` that names the number at fault.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.core.generation_config import TRANSFORMERS_TOP_K, ModelDefaults, end_token_ids
from fastgen.errors import InvalidRequestError, did_you_mean
from fastgen.types import SamplingParams

__all__ = [
    "DEFAULT_MAX_NEW_TOKENS",
    "GREEDY_BELOW",
    "Limits",
    "Sampling",
    "model_defaults",
    "resolve",
]

DEFAULT_MAX_NEW_TOKENS = 256
"""Answer length of a completion when neither the request nor the model says; a chat gets what fits."""

GREEDY_BELOW = 1e-5
"""Temperatures below this pick the best token. Above it, division by it cannot leave float32 for any sane logits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can hold, fixed at load."""

    max_model_len: int
    """Most tokens of prompt and answer together."""
    vocab_rows: int
    """Rows of the embedding: prompt ids must be below this."""
    valid_ids: int
    """Ids an answer can hold are below this: the fewer of output head rows and the tokenizer's highest id + 1."""
    cache_tokens: int
    """Tokens whose K/V fit the whole block pool (blocks x block size)."""
    loras: tuple[str, ...] = ()
    """Names of the LoRA adapters that are loaded."""

    @property
    def most_tokens(self) -> int:
        """Longest prompt and answer possible. The answer's last token is never run, so needs no place in the cache."""
        return min(self.max_model_len, self.cache_tokens + 1)


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request with every question answered; shared by its ``n`` choices."""

    n: int
    temperature: float
    """0 where the best token is wanted."""
    top_k: int
    """0: off."""
    top_p: float
    """1: off; 0: the best token only."""
    min_p: float
    """0: off."""
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int
    """The request's, else drawn by the engine. Choice ``i`` draws from stream ``i`` of it."""
    max_tokens: int
    """Prompt and answer together: the answer ends with "length" here."""
    max_new_tokens: int
    min_new_tokens: int
    """No stop id within this many tokens of the answer."""
    stop_ids: frozenset[int]
    """Token ids that end the answer: the model's end tokens unless ``ignore_eos``, and the request's."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    logprobs: int
    """Best tokens to report at each step besides the chosen one; -1: no log-probabilities at all."""
    prompt_logprobs: int
    """The same for the prompt; -1: none."""
    logits_processors: tuple[tuple[str, Any], ...]
    """Name and options of each, in the order to run them."""
    priority: int
    cache_salt: str
    """Empty: shared with every request that has none."""
    lora: str
    """The LoRA adapter to answer with. Empty: the model as it is."""
    from_model: tuple[str, ...]
    """The keys of the model's generation_config.json that decided something the request left open."""

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, without a draw."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0


def resolve(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    *,
    generation_config: Mapping[str, Any],
    eos_ids: frozenset[int],
    limits: Limits,
    chat: bool,
    seeds: random.Random,
) -> Sampling:
    """Everything a request left open, decided: first the request's own value, then the model's
    ``generation_config.json`` key by key (``Sampling.from_model`` says which), then fastgen's default.

    A request that says nothing gets the distribution ``transformers.generate`` would sample from. So where the model
    says ``do_sample``, the temperature defaults to its own or 1, and ``top_k`` to its own or transformers' 50; where it
    does not, to greedy, and ``top_k`` is off even if the request sets a temperature.

    The answer's length: ``max_new_tokens`` or ``max_length`` of the request must fit exactly or is refused. Otherwise
    the model's ``max_new_tokens``, else its ``max_length`` where that leaves room after the prompt, else 256 for a
    completion and what fits for a chat, clipped to what fits.

    Args:
        eos_ids: end tokens of the tokenizer and of config.json; those of generation_config are added here.
        seeds: draws a seed for a request without one; not touched otherwise.

    Raises:
        InvalidRequestError: the prompt is empty, too long or holds an impossible id; the length asked for does not fit;
            ``logit_bias`` or ``stop_token_ids`` name an id the model cannot produce, or ``lora`` an unknown adapter.
        ConfigError: the model's generation_config holds an unusable value (``check_generation_config`` finds it first).
    """
    _check_prompt(prompt_token_ids, limits)
    for token in params.stop_token_ids:
        _check_output_id(token, "stop_token_ids", limits)
    for token in params.logit_bias or ():
        _check_output_id(token, "logit_bias", limits)

    if params.lora is not None and params.lora not in limits.loras:
        raise InvalidRequestError(_unknown_lora(params.lora, limits.loras), field="lora")

    model = ModelDefaults(generation_config)
    temperature, top_k, top_p, min_p = _randomness(params, model)
    max_new_tokens, min_new_tokens = _lengths(params, model, len(prompt_token_ids), limits, chat=chat)
    ends = eos_ids | end_token_ids(generation_config.get("eos_token_id"))
    stop_ids = {token for token in ends if token < limits.valid_ids and not params.ignore_eos}
    return Sampling(
        n=params.n,
        temperature=float(temperature),
        top_k=top_k if 0 < top_k < limits.valid_ids else 0,
        top_p=float(top_p),
        min_p=float(min_p),
        repetition_penalty=float(model.pick("repetition_penalty", params.repetition_penalty, 1.0)),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=tuple((params.logit_bias or {}).items()),
        seed=params.seed if params.seed is not None else seeds.getrandbits(63),
        max_tokens=len(prompt_token_ids) + max_new_tokens,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_ids=frozenset(stop_ids.union(params.stop_token_ids)),
        stop=params.stop,
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        logits_processors=tuple((params.logits_processors or {}).items()),
        priority=params.priority,
        cache_salt=params.cache_salt or "",
        lora=params.lora or "",
        from_model=tuple(model.used),
    )


def _check_prompt(ids: Sequence[int], limits: Limits) -> None:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InvalidRequestError(
            f"prompt_token_ids must be a list of token ids, got {type(ids).__name__}", field="prompt_token_ids"
        )
    count = len(ids)
    if count == 0:
        raise InvalidRequestError(
            "the prompt is empty: give at least one token (this tokenizer adds none of its own)", field="prompt"
        )
    if count >= limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {count} tokens, but prompt and answer together may have {limits.max_model_len} "
            f"(max_model_len); shorten it to at most {limits.max_model_len - 1}",
            field="prompt",
        )
    if count > limits.cache_tokens:
        raise InvalidRequestError(
            f"the prompt has {count} tokens, but the whole KV cache holds {limits.cache_tokens}; shorten it, or raise "
            f"num_blocks or cache_memory",
            field="prompt",
        )
    # One pass in C for the usual prompt; bool is a subclass of int, so only exact types are let through here.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < limits.vocab_rows:
        return
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise InvalidRequestError(
                f"prompt_token_ids[{position}] is {token!r} ({type(token).__name__}); token ids must be plain integers",
                field="prompt_token_ids",
            )
        if not 0 <= token < limits.vocab_rows:
            raise InvalidRequestError(
                f"prompt_token_ids[{position}] is {token}; this model knows the ids 0 to {limits.vocab_rows - 1}",
                field="prompt_token_ids",
            )


def _unknown_lora(name: str, loras: tuple[str, ...]) -> str:
    if not loras:
        return (
            f"lora names the adapter {name!r}, and the model was loaded without adapters; load it with "
            f"lora={{{name!r}: directory}} (--lora NAME=DIRECTORY)"
        )
    known = ", ".join(map(repr, loras))
    return f"lora names the adapter {name!r}; loaded are {known}.{did_you_mean(name, loras)}"


def _check_output_id(token: int, field: str, limits: Limits) -> None:
    if not 0 <= token < limits.valid_ids:
        raise InvalidRequestError(
            f"{field} names the token id {token}; this model can produce the ids 0 to {limits.valid_ids - 1}",
            field=field,
        )


def _randomness(params: SamplingParams, model: ModelDefaults) -> tuple[float, int, float, float]:
    """temperature, top_k, top_p, min_p. The model's own last three are read only if something is drawn at all."""
    temperature = params.temperature
    if temperature is None:
        temperature = 0.0
        if model.do_sample:
            model.use("do_sample")
            temperature = model.pick("temperature", None, 1.0)
    if temperature < GREEDY_BELOW:
        return 0.0, params.top_k or 0, 1.0 if params.top_p is None else params.top_p, params.min_p or 0.0
    top_k = model.pick("top_k", params.top_k, None)
    if top_k is None:
        top_k = 0
        if model.do_sample:
            model.use("do_sample")
            top_k = TRANSFORMERS_TOP_K
    top_p = model.pick("top_p", params.top_p, 1.0)
    return temperature, top_k, top_p, model.pick("min_p", params.min_p, 0.0)


def _lengths(
    params: SamplingParams, model: ModelDefaults, prompt: int, limits: Limits, *, chat: bool
) -> tuple[int, int]:
    """Most and fewest tokens of the answer. ``1 <= most <= room``, ``0 <= fewest <= most``."""
    room = limits.most_tokens - prompt  # at least 1: _check_prompt
    asked = params.max_new_tokens
    if params.max_length is not None:
        asked = params.max_length - prompt
        if asked < 1:
            raise InvalidRequestError(
                f"max_length is {params.max_length}, but the prompt alone has {prompt} tokens; max_length counts both, "
                f"max_new_tokens the answer alone",
                field="max_length",
            )
    floor = params.min_new_tokens or 0
    field = "max_length" if params.max_length is not None else "max_new_tokens"
    for count, name in ((asked or 0, field), (floor, "min_new_tokens")):
        _check_fits(count, name, prompt, limits)
    if asked is not None:
        most = asked
        if floor > most:
            raise InvalidRequestError(
                f"min_new_tokens is {floor}, but max_length {params.max_length} leaves room for {most} after the "
                f"prompt's {prompt} tokens",
                field="min_new_tokens",
            )
    else:
        most = min(max(_default_length(model, prompt, room, chat=chat), floor), room)
    if params.min_new_tokens is None:
        floor = model.pick("min_new_tokens", None, None)
        if floor is None:
            floor = max(model.pick("min_length", None, 0) - prompt, 0)
    return most, min(floor, most)


def _check_fits(count: int, field: str, prompt: int, limits: Limits) -> None:
    total = prompt + count
    if total > limits.max_model_len:
        raise InvalidRequestError(
            f"{field} asks for {count} new tokens after a prompt of {prompt}: {total} in all, but prompt and "
            f"answer together may have {limits.max_model_len} (max_model_len); ask for at most "
            f"{limits.max_model_len - prompt}",
            field=field,
        )
    if total > limits.most_tokens:
        raise InvalidRequestError(
            f"{field} asks for {count} new tokens after a prompt of {prompt}: {total} in all, but the whole KV cache "
            f"holds {limits.cache_tokens}; ask for at most {limits.most_tokens - prompt}, or raise num_blocks or "
            f"cache_memory",
            field=field,
        )


def _default_length(model: ModelDefaults, prompt: int, room: int, *, chat: bool) -> int:
    """What transformers would do: its max_new_tokens wins over max_length, which counts the prompt."""
    most = model.pick("max_new_tokens", None, None)
    if most is not None:
        return int(most)
    total = model.peek("max_length")
    if total is not None and total > prompt:
        model.use("max_length")
        return int(total) - prompt
    return room if chat else DEFAULT_MAX_NEW_TOKENS


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a request that leaves everything open takes from the model's ``generation_config.json``."""
    most = 2**31
    sampling = resolve(
        SamplingParams(),
        [0],
        generation_config=generation_config,
        eos_ids=frozenset(),
        limits=Limits(max_model_len=most, vocab_rows=most, valid_ids=most, cache_tokens=most),
        chat=False,
        seeds=random.Random(0),
    )
    return {key: generation_config[key] for key in sampling.from_model if key in generation_config}
