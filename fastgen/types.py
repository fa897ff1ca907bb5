"""What callers hand in and get back: sampling parameters, responses, chunks. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fastgen.errors import InvalidRequestError, first_problem

__all__ = [
    "Chunk",
    "Completion",
    "FinishReason",
    "Message",
    "Response",
    "SamplingParams",
    "StepOutput",
    "TokenLogprob",
    "Usage",
]

FinishReason = Literal["stop", "length", "abort", "error"]
Message = Mapping[str, Any]
"""One chat message: ``{"role": ..., "content": ...}`` and whatever else the model's template reads."""

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
MAX_N = 128


class SamplingParams(BaseModel):
    """How to pick tokens and when to stop. An unset (``None``) field takes the model's ``generation_config.json``
    value, then the default written here; unknown fields are refused with a suggestion.

    Logits are processed in transformers' order: logit bias, repetition penalty, presence and frequency penalties,
    ``min_new_tokens``, custom logits processors, temperature, top-k, top-p, min-p.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n: int = Field(default=1, ge=1, le=MAX_N, description="Choices to generate for each prompt.")
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens to generate. Unset: 256 for a completion, what fits for a chat."
    )
    max_length: int | None = Field(
        default=None, ge=1, description="Most tokens of prompt and answer together; instead of max_new_tokens."
    )
    min_new_tokens: int | None = Field(default=None, ge=0, description="No end token before this many. Default 0.")
    temperature: float | None = Field(
        default=None,
        ge=0,
        description="0 picks the best token. Default: 0; where the model says do_sample, its own or 1.",
    )
    top_k: int | None = Field(
        default=None, ge=-1, description="Keep the k best tokens; 0 or -1 is off. Default: the model's."
    )
    top_p: float | None = Field(
        default=None, ge=0, le=1, description="Keep the smallest set with this probability; 0: the best token only."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Drop tokens less likely than this share of the best one's probability."
    )
    repetition_penalty: float | None = Field(
        default=None,
        ge=0.001,
        le=1000,
        description="Divides positive, multiplies negative logits of tokens in prompt or answer.",
    )
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, description="Subtracted once per token in the answer.")
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, description="Subtracted per occurrence in the answer.")
    logit_bias: dict[int, float] | None = Field(
        default=None, description="Added to the logits of these token ids; each in [-100, 100]."
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Makes this request's sampling repeatable, whoever shares its batch."
    )
    stop: tuple[str, ...] = Field(default=(), description="Strings that end the answer; cut from it.")
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Token ids that end the answer, besides the model's."
    )
    include_stop: bool = Field(default=False, description="Keep the stop string in the text.")
    ignore_eos: bool = Field(default=False, description="Do not stop at the model's own end tokens.")
    skip_special_tokens: bool = Field(default=True, description="Leave special tokens out of the text.")
    add_special_tokens: bool | None = Field(
        default=None, description="Let the tokenizer add BOS and the like. Unset: yes for a completion, no for a chat."
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of the chosen and this many best tokens."
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="The same for the tokens of the prompt; the first has none."
    )
    logits_processors: dict[str, Any] | None = Field(
        default=None, description="Plugin logits processors to run, by name, each with its options."
    )
    priority: int = Field(default=0, description="Higher runs first and is evicted last, under any policy.")
    cache_salt: str | None = Field(
        default=None, description="Only requests with the same salt share cached prefixes (keeps tenants apart)."
    )
    lora: str | None = Field(
        default=None, description="Name of the loaded LoRA adapter to answer with. Unset: the model as it is."
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _stop_bounds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(value)} stop strings given, at most {MAX_STOP_STRINGS} are allowed")
        if "" in value:
            raise ValueError("an empty stop string would end every answer at once; leave it out")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _id_list(cls, value: Any) -> Any:
        return () if value is None else tuple(value) if isinstance(value, list) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_ids(cls, value: Any) -> Any:
        """JSON and TOML have text for keys: ``{"50256": -100}``."""
        if not isinstance(value, Mapping):
            return value
        return {
            int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: value[key] for key in value
        }

    @field_validator("logit_bias")
    @classmethod
    def _bias_bounds(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        for token, bias in (value or {}).items():
            if not -100 <= bias <= 100:  # also refuses NaN
                raise ValueError(f"the bias of token {token} is {bias}, must lie in [-100, 100]")
        return value

    @field_validator("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"must be a finite number, got {value}")
        return value

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.max_new_tokens is not None and self.max_length is not None:
            raise ValueError("give max_new_tokens (the answer) or max_length (prompt and answer), not both")
        if self.max_new_tokens is not None and (self.min_new_tokens or 0) > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        return self

    def __init__(self, **fields: Any) -> None:
        """
        Raises:
            InvalidRequestError: an unknown field (with a suggestion) or a value out of range; names the field.
        """
        try:
            super().__init__(**fields)
        except ValidationError as error:
            field, text = first_problem(error.errors(), type(self).model_fields)
            raise InvalidRequestError(text, field=field) from None

    @classmethod
    def of(cls, params: SamplingParams | None = None, **fields: Any) -> SamplingParams:
        """``params`` with ``fields`` laid over it; raises as the class does."""
        known = params.model_dump(exclude_unset=True) if params is not None else {}
        return cls(**{**known, **fields})


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request took. ``cached_tokens`` of the prompt were found in the prefix cache and not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with the model's own log-probability (float32 log-softmax of the raw logits, before any processing).

    ``rank`` is 1 + the number of strictly likelier tokens. ``top`` holds the best tokens asked for, best first.
    ``token`` is the token's own text; it is empty until a front decodes it.
    """

    token_id: int
    logprob: float
    rank: int
    token: str = ""
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop: str | int | None = None
    """The stop string or token id that ended it, when ``finish_reason`` is ``"stop"``."""
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    """What went wrong, when ``finish_reason`` is ``"error"``."""


@dataclass(frozen=True, slots=True)
class Response:
    """The whole answer to one prompt. ``text``, ``token_ids``, ... speak of the first choice."""

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Completion]
    usage: Usage
    prompt: str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def stop(self) -> str | int | None:
        return self.choices[0].stop

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def error(self) -> str | None:
        return self.choices[0].error


@dataclass(slots=True)  # not frozen: one is made for each token, and a frozen one takes four times as long to make
class Chunk:
    """A piece of one choice, as it is generated. The texts of a choice's chunks add up to its ``Completion.text``.

    ``token_ids`` may be empty (held text was flushed) and ``text`` may be (a character is not complete yet).
    ``finish_reason`` is set on the last chunk of each choice, ``usage`` on the last chunk of the request.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None
    usage: Usage | None = None


@dataclass(slots=True)  # not frozen: see Chunk
class StepOutput:
    """What one forward pass meant for one choice: usually one new token. The last one carries ``finish_reason``."""

    request_id: str
    index: int
    token_id: int | None
    """``None`` when the choice ended without a new token (aborted, failed)."""
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    stop: int | None = None
    """The token id that ended it, when ``finish_reason`` is ``"stop"``."""
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """On the first output of a request that asked for them."""
