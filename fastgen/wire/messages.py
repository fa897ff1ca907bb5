"""What a front and its engine process say to each other: typed, versioned, as msgpack. Never pickle.

The engine process says ``Hello`` first, the front answers with ``Start``, and the engine with ``Ready`` or ``Failed``,
after any number of ``Progress``. From then on the front sends ``Submit`` and ``Abort``, the engine ``Accepted`` or
``Refused`` to each ``Submit`` and a ``Step`` after each pass, and ``Beat`` whatever it does.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from fastgen import errors
from fastgen.core.stats import EngineStats
from fastgen.errors import FastgenError, InvalidRequestError, RequestFailedError
from fastgen.types import FinishReason, SamplingParams, StepOutput, TokenLogprob
from fastgen.wire.info import ModelInfo, Pass

__all__ = [
    "PROTOCOL",
    "Abort",
    "Accepted",
    "Beat",
    "Ended",
    "Failed",
    "FromEngine",
    "FromFront",
    "Hello",
    "Output",
    "Progress",
    "Ready",
    "Refused",
    "Request",
    "Start",
    "Step",
    "Submit",
    "decode_from_engine",
    "decode_from_front",
    "encode",
    "error_of",
    "kind_of",
    "params_fields",
]

PROTOCOL = 1
"""Raised with every change of a message's fields or meaning."""


class _Message(msgspec.Struct, array_like=True, gc=False):
    """Positional on the wire; the tag is the class's name."""


# ---- from the front -------------------------------------------------------------------------------------------------


class Start(_Message, tag=True):
    """What to load. The first message to an engine."""

    protocol: int
    version: str
    """Of fastgen."""
    plugins: list[str]
    """``Registry.fingerprint()`` of the front."""
    model: str
    config: dict[str, Any]
    """The engine options that were set. They may hold a token, so they travel here and never in an argument."""
    place: int
    """Which of the ``places`` engines on this machine it is, from 0."""
    places: int


class Request(_Message):
    """A ``Submission`` without its sink."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    """The fields of ``SamplingParams`` that were set: silence has a meaning of its own."""
    chat: bool


class Submit(_Message, tag=True):
    """Run these, all or none."""

    number: int
    """To be repeated in the answer."""
    requests: list[Request]


class Abort(_Message, tag=True):
    """End a request, or one of its choices."""

    request_id: str
    index: int | None = None


# ---- from the engine ------------------------------------------------------------------------------------------------


class Hello(_Message, tag=True):
    protocol: int
    version: str
    pid: int


class Progress(_Message, tag=True):
    """What it is doing before it is ready, for people."""

    text: str


class Ready(_Message, tag=True):
    info: ModelInfo
    directory: str
    """Where the model's files are; the front reads the tokenizer there."""


class Failed(_Message, tag=True):
    """It could not be loaded; nothing more comes."""

    kind: str
    """Name of the error's class in ``fastgen.errors``; another for one that is none of ours."""
    text: str


class Accepted(_Message, tag=True):
    number: int


class Refused(_Message, tag=True):
    number: int
    place: int
    """Which of the requests is at fault, from 0."""
    kind: str
    text: str
    field: str | None


class Scored(_Message):
    """A ``TokenLogprob``."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[Scored, ...] = ()

    @classmethod
    def of(cls, entry: TokenLogprob) -> Scored:
        return cls(entry.token_id, entry.logprob, entry.rank, tuple(map(cls.of, entry.top)))

    def to(self) -> TokenLogprob:
        return TokenLogprob(self.token_id, self.logprob, self.rank, top=tuple(other.to() for other in self.top))


class Output(_Message):
    """A ``StepOutput``."""

    request_id: str
    index: int
    token_id: int | None
    cached_tokens: int
    finish_reason: FinishReason | None = None
    stop: int | None = None
    error: str | None = None
    logprob: Scored | None = None
    prompt_logprobs: list[Scored | None] | None = None

    @classmethod
    def of(cls, output: StepOutput) -> Output:
        if output.finish_reason is None and output.logprob is None and output.prompt_logprobs is None:  # most by far
            return cls(output.request_id, output.index, output.token_id, output.cached_tokens)
        scores = output.prompt_logprobs
        return cls(
            output.request_id,
            output.index,
            output.token_id,
            output.cached_tokens,
            output.finish_reason,
            output.stop,
            output.error,
            None if output.logprob is None else Scored.of(output.logprob),
            None if scores is None else [None if entry is None else Scored.of(entry) for entry in scores],
        )

    def to(self) -> StepOutput:
        scores = self.prompt_logprobs
        return StepOutput(
            self.request_id,
            self.index,
            self.token_id,
            None if self.logprob is None else self.logprob.to(),
            self.finish_reason,
            self.stop,
            self.error,
            self.cached_tokens,
            None if scores is None else [None if entry is None else entry.to() for entry in scores],
        )


class Step(_Message, tag=True):
    """All that came of one pass."""

    outputs: list[Output]
    ran: Pass | None
    """``None`` where nothing ran and only ends of aborted requests are told."""
    stats: EngineStats | None
    """A few times a second."""


class Beat(_Message, tag=True):
    """The process lives; sent every second or so, by a thread of its own."""

    in_step: float
    """Seconds the step in flight has taken so far; 0 between two."""
    stats: EngineStats | None = None


class Ended(_Message, tag=True):
    """A step failed beyond repair; the process exits."""

    text: str


FromFront: TypeAlias = Start | Submit | Abort
FromEngine: TypeAlias = Hello | Progress | Ready | Failed | Accepted | Refused | Step | Beat | Ended

_encoder = msgspec.msgpack.Encoder()
_front_decoder: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: object) -> bytes:
    """Raises ``TypeError``, ``OverflowError`` and the like for what msgpack cannot hold."""
    return _encoder.encode(message)


def decode_from_front(frame: bytes) -> FromFront:
    """Raises ``msgspec.MsgspecError`` for what is no message of a front."""
    return _front_decoder.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Raises ``msgspec.MsgspecError`` for what is no message of an engine."""
    return _engine_decoder.decode(frame)


def params_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields that were set."""
    return {name: getattr(params, name) for name in params.model_fields_set}


# ---- errors ---------------------------------------------------------------------------------------------------------


def kind_of(error: BaseException) -> str:
    """The name by which ``error_of`` finds the class again: of the nearest class in ``fastgen.errors``."""
    for kind in type(error).__mro__:
        if getattr(errors, kind.__name__, None) is kind:
            return str(kind.__name__)
    return type(error).__name__


def error_of(kind: str, text: str, field: str | None = None) -> FastgenError:
    """The error that another process met. What was none of fastgen's own is a ``RequestFailedError``."""
    found = getattr(errors, kind, None)
    if found is InvalidRequestError:
        return InvalidRequestError(text, field=field)
    if isinstance(found, type) and issubclass(found, FastgenError):
        return found(text)
    return RequestFailedError(text)
