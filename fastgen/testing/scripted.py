"""An engine without a model, whose answers are written down beforehand: for tests of what stands around an engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastgen.config import EngineConfig
from fastgen.errors import InvalidRequestError
from fastgen.text import Tokenizer
from fastgen.types import FinishReason, SamplingParams, StepOutput, TokenLogprob

__all__ = ["ScriptedEngine"]

Script = Callable[[list[int], int], Sequence[int]]
"""The answer's token ids for a prompt's ids and a choice's index."""


@dataclass(slots=True)
class _Choice:
    prompt: list[int]
    params: SamplingParams
    answer: list[int]
    end: FinishReason
    given: int = 0
    aborted: bool = False


@dataclass
class ScriptedEngine:
    """``fastgen.Engine``'s interface. Each step gives a token to each choice in flight.

    An answer ends with ``stop`` at one of the tokenizer's end tokens, else with ``length`` at ``max_new_tokens`` or
    where the script ends. A prompt is refused if it is empty or longer than ``max_model_len``, and stop strings
    unless ``text``. Log-probabilities are made up: ``-token_id``, with the next ids as the best others. Like the real
    one it is for one thread at a time: a second thread inside it raises.
    """

    tokenizer: Tokenizer | None
    script: Script = lambda prompt, index: prompt
    max_model_len: int = 10_000
    on_step: Callable[[], None] = lambda: None
    """Called at the beginning of each step, in the loop's thread."""
    config: EngineConfig = field(default_factory=EngineConfig)
    steps: int = 0
    closed: bool = False
    added: list[str] = field(default_factory=list)
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    """Arguments of every ``abort``."""

    def __post_init__(self) -> None:
        self._choices: dict[tuple[str, int], _Choice] = {}
        self._ids = itertools.count()
        self._busy = threading.Lock()

    @property
    def has_work(self) -> bool:
        return bool(self._choices)

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chat: bool = False,
        text: bool = False,
    ) -> str:
        params = params or SamplingParams()
        if not 0 < len(prompt_token_ids) < self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(prompt_token_ids)} tokens, must have 1 to {self.max_model_len - 1}",
                field="prompt",
            )
        if params.stop and not text:
            raise InvalidRequestError("the engine cannot look for stop strings", field="stop")
        request_id = f"r{next(self._ids)}" if request_id is None else request_id
        if any(known == request_id for known, _ in self._choices):
            raise InvalidRequestError(f"request id {request_id!r} is in use", field="request_id")
        with self._alone():
            for index in range(params.n):
                answer, end = self._cut(list(self.script(prompt_token_ids, index)), params)
                self._choices[request_id, index] = _Choice(prompt_token_ids, params, answer, end)
            self.added.append(request_id)
        return request_id

    def step(self) -> list[StepOutput]:
        with self._alone():
            self.steps += 1
            self.on_step()
            return [self._advance(*key) for key in list(self._choices)]

    def abort(self, request_id: str, index: int | None = None) -> None:
        with self._alone():
            self.aborted.append((request_id, index))
            for (known, one), choice in self._choices.items():
                if known == request_id and index in (None, one):
                    choice.aborted = True

    def stats(self) -> int:
        """Steps so far."""
        with self._alone():
            return self.steps

    def close(self) -> None:
        with self._alone():
            self.closed = True
            self._choices.clear()

    def _alone(self) -> _Alone:
        return _Alone(self._busy)

    def _cut(self, answer: list[int], params: SamplingParams) -> tuple[list[int], FinishReason]:
        ends = set(params.stop_token_ids)
        if self.tokenizer is not None and not params.ignore_eos:
            ends |= self.tokenizer.eos_token_ids
        answer = answer[: params.max_new_tokens]
        for place, token in enumerate(answer):
            if token in ends:
                return answer[: place + 1], "stop"
        return answer, "length"

    def _advance(self, request_id: str, index: int) -> StepOutput:
        choice = self._choices[request_id, index]
        if choice.aborted or not choice.answer:
            del self._choices[request_id, index]
            return StepOutput(request_id, index, None, finish_reason="abort")
        token = choice.answer[choice.given]
        choice.given += 1
        reason = choice.end if choice.given == len(choice.answer) else None
        if reason is not None:
            del self._choices[request_id, index]
        params, first = choice.params, choice.given == 1 and index == 0
        scores: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None and first:
            scores = [None, *(_logprob(one, params.prompt_logprobs) for one in choice.prompt[1:])]
        return StepOutput(
            request_id,
            index,
            token,
            logprob=None if params.logprobs is None else _logprob(token, params.logprobs),
            finish_reason=reason,
            stop=token if reason == "stop" else None,
            cached_tokens=len(choice.prompt) // 2,
            prompt_logprobs=scores,
        )


class _Alone:
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("two threads are in the engine at once")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _logprob(token: int, others: int) -> TokenLogprob:
    top = tuple(TokenLogprob(token + i, -float(token + i), i + 1) for i in range(others))
    return TokenLogprob(token, -float(token), 1, top=top)
