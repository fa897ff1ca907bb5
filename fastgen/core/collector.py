"""From the engine's outputs to what a caller sees: ``Collector`` makes chunks, ``ResponseBuilder`` adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastgen.errors import InvalidRequestError
from fastgen.text import TextStream, Tokenizer
from fastgen.types import Chunk, Completion, FinishReason, Response, SamplingParams, StepOutput, TokenLogprob, Usage

__all__ = ["Collector", "ResponseBuilder"]


class Collector:
    """One request: turns each ``StepOutput`` into a ``Chunk``, with text, and finds stop strings.

    Everything a choice reports (text, ids, logprobs, usage) ends with the token that completed its stop string. A token
    that ended the answer as a stop id gives no text, like a stop string, unless ``include_stop``.
    """

    __slots__ = (
        "_cached_tokens",
        "_completion_tokens",
        "_logprobs",
        "_params",
        "_prompt_token_ids",
        "_request_id",
        "_streams",
        "_tokenizer",
    )

    def __init__(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        """
        Raises:
            InvalidRequestError: stop strings, but no tokenizer to find them with.
        """
        if tokenizer is None and params.stop:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer, so stop strings cannot be found; use stop_token_ids",
                field="stop",
            )
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._logprobs = params.logprobs
        self._tokenizer = tokenizer
        self._streams = {index: self._text_stream() for index in range(params.n)}  # of the open choices
        self._completion_tokens = 0
        self._cached_tokens = 0

    @property
    def finished(self) -> bool:
        """Whether every choice has ended; the last chunk carried the usage."""
        return not self._streams

    def is_open(self, index: int) -> bool:
        """Whether a choice goes on."""
        return index in self._streams

    def take(self, output: StepOutput) -> Chunk | None:
        """The chunk for one output; ``None`` if its choice had ended before (by a stop string the engine knows not)."""
        index, token, reason = output.index, output.token_id, output.finish_reason
        if index not in self._streams:
            return None
        if index == 0:  # the others share its prompt
            self._cached_tokens = output.cached_tokens
        stream, text, found = self._streams[index], "", None
        if stream is not None:
            if token is not None and (reason != "stop" or self._params.include_stop):
                text, found = stream.push(token)
            if found is None and reason is not None:
                text += stream.finish()
                found = stream.stop
        if reason is None and found is None and self._logprobs is None and token is not None:  # most chunks by far
            self._completion_tokens += 1
            return Chunk(self._request_id, index, text, [token])
        return self._chunk(
            index,
            text,
            token_ids=[] if token is None else [token],
            logprob=output.logprob,
            reason="stop" if found is not None else reason,
            stop=output.stop if found is None else found,
            error=output.error,
        )

    def fail(self, error: str) -> list[Chunk]:
        """Last chunks for the choices still open: something broke, and broke this request alone."""
        return [self._chunk(index, "", reason="error", error=error) for index in sorted(self._streams)]

    def name_tokens(self, entries: list[TokenLogprob | None]) -> list[TokenLogprob | None]:
        """Prompt logprobs with the text of each token."""
        return [None if entry is None else self._named(entry) for entry in entries]

    def _text_stream(self) -> TextStream | None:
        if self._tokenizer is None:
            return None
        params = self._params
        return TextStream(
            self._tokenizer,
            stops=params.stop,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _chunk(
        self,
        index: int,
        text: str,
        *,
        token_ids: list[int] | None = None,
        logprob: TokenLogprob | None = None,
        reason: FinishReason | None,
        stop: str | int | None = None,
        error: str | None = None,
    ) -> Chunk:
        if reason is not None:
            self._streams.pop(index, None)
        token_ids = token_ids or []
        self._completion_tokens += len(token_ids)
        logprobs = None
        if self._logprobs is not None:
            logprobs = [] if logprob is None else [self._named(logprob)]
        return Chunk(
            request_id=self._request_id,
            index=index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop=stop,
            error=error,
            usage=None if self._streams else self._usage(),
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
        )

    def _named(self, entry: TokenLogprob) -> TokenLogprob:
        if self._tokenizer is None:
            return entry
        # Not dataclasses.replace, which takes three times as long: a long prompt has a million of them.
        top = tuple([self._named(other) for other in entry.top]) if entry.top else ()
        return TokenLogprob(entry.token_id, entry.logprob, entry.rank, self._tokenizer.token_text(entry.token_id), top)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    last: Chunk | None = None


class ResponseBuilder:
    """Adds up the chunks of one request, in the order they came."""

    __slots__ = ("_choices", "_prompt", "_prompt_token_ids", "_request_id", "_usage", "prompt_logprobs")

    def __init__(self, request_id: str, prompt_token_ids: list[int], *, n: int = 1, prompt: str | None = None) -> None:
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._prompt = prompt
        self._choices = [_Choice() for _ in range(n)]
        self._usage: Usage | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None

    def add(self, chunk: Chunk) -> bool:
        """Whether this was the last one."""
        choice = self._choices[chunk.index]
        choice.texts.append(chunk.text)
        choice.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            choice.logprobs = choice.logprobs or []
            choice.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            choice.last = chunk
        self._usage = chunk.usage
        return self._usage is not None

    def build(self) -> Response:
        """The response.

        Raises:
            ValueError: the last chunk has not come.
        """
        if self._usage is None:
            raise ValueError(f"request {self._request_id!r} is not finished")
        return Response(
            request_id=self._request_id,
            prompt_token_ids=self._prompt_token_ids,
            choices=[_completion(index, choice) for index, choice in enumerate(self._choices)],
            usage=self._usage,
            prompt=self._prompt,
            prompt_logprobs=self.prompt_logprobs,
        )


def _completion(index: int, choice: _Choice) -> Completion:
    last = choice.last
    assert last is not None
    assert last.finish_reason is not None
    return Completion(
        index=index,
        text="".join(choice.texts),
        token_ids=choice.token_ids,
        finish_reason=last.finish_reason,
        stop=last.stop,
        logprobs=choice.logprobs,
        error=last.error,
    )
