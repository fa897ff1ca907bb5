"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from fastgen.front.prompts import Call, Prompt, completion_call
from fastgen.server.admission import Admission
from fastgen.server.aside import LARGE_ENTRIES, aside, weight
from fastgen.server.http.answers import Choice, Completion, Logprobs, TextChunk, TextChunkChoice
from fastgen.server.http.body import read_body, with_body
from fastgen.server.http.head import Head, extras, head_of, json_response, stop_reason, usage_body
from fastgen.server.http.logprobs import Offsets, text_logprobs
from fastgen.server.http.openapi import json_body
from fastgen.server.http.params import completion_params, in_clients_words
from fastgen.server.http.run import answer, start, while_connected
from fastgen.server.http.schemas import CompletionRequest
from fastgen.server.http.sse import EventStream, data_line, run_bodies
from fastgen.server.http.structure import constrained
from fastgen.server.native import adapter_of, admit
from fastgen.server.service import Service
from fastgen.text import Tokenizer
from fastgen.types import Chunk, FinishReason, SamplingParams, TokenLogprob, Usage
from fastgen.types import Response as Answer

__all__ = ["router"]


def router(service: Service, admission: Admission) -> APIRouter:
    made = APIRouter(tags=["OpenAI"])
    tokenizer = service.verbs.tokenizer

    @made.post(
        "/v1/completions", **json_body(CompletionRequest, Completion, errors=(404, 429, 500, 503), stream=TextChunk)
    )
    async def completions(request: Request) -> Response:
        """Go on with a text, or with several."""
        body = await read_body(request, CompletionRequest)
        head = head_of(request, service, "cmpl", body.model)
        with in_clients_words(body):
            params = await with_body(request, lambda: completion_params(body, adapter_of(service, body.model)))
            tellings = params.n if body.echo and body.logprobs is not None else 1  # an echo has its log-probabilities
            entry = admit(service, admission, choices=_count(body) * params.n)
            try:
                call, echoes = await while_connected(request.receive, _prepared(body, params, service))
                form = _Form(body, call, echoes, tokenizer)
                if body.stream:
                    run = await start(service, entry, call, tellings=tellings)
                    return EventStream(run, run_bodies(run, _Writer(head, form)), data_line)
                responses = await while_connected(request.receive, answer(service, entry, call, tellings=tellings))
                large = sum(map(weight, responses)) > LARGE_ENTRIES
                answered = await aside(large, lambda: json_response(_whole(head, form, responses)))
            except BaseException:
                entry.leave()
                raise
        entry.leave()
        return answered

    return made


def _count(body: CompletionRequest) -> int:
    """Prompts in the request."""
    prompt = body.prompt
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


async def _prepared(body: CompletionRequest, params: SamplingParams, service: Service) -> tuple[Call, list[str]]:
    params = await constrained(params, body, service)
    return await asyncio.to_thread(_prepare, body, params, service.verbs.tokenizer)


def _prepare(body: CompletionRequest, params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[Call, list[str]]:
    """The call, and for each prompt the text that an echo begins with."""
    prompt = body.prompt
    text = isinstance(prompt, str) or isinstance(prompt[0], str)
    call = completion_call(prompt if text else None, None if text else prompt, params, tokenizer)
    if not body.echo:
        return call, []
    return call, [_echo(one, params, tokenizer) for one in call.prompts]


def _echo(prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None) -> str:
    if prompt.text is not None:
        return prompt.text
    if tokenizer is None:
        return ""
    return tokenizer.decode(prompt.token_ids, skip_special_tokens=params.skip_special_tokens)


class _Form:
    """What the client asked to be told, and what is needed to tell it."""

    def __init__(
        self,
        body: CompletionRequest,
        call: Call,
        echoes: list[str],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.body, self.params, self.call, self.echoes, self.tokenizer = body, call.params, call, echoes, tokenizer
        self.scored_only = body.max_tokens == 0

    def choice(self, prompt: int, index: int, entries: list[TokenLogprob | None] | None) -> _Choice:
        return _Choice(self, prompt, index, entries)


class _Choice:
    """One choice, told in one piece or in many."""

    def __init__(self, form: _Form, prompt: int, index: int, entries: list[TokenLogprob | None] | None) -> None:
        """
        Args:
            prompt: the place of its prompt in the request.
            index: its place among the choices of that prompt.
            entries: the log-probabilities of its prompt, if they were asked for.
        """
        self._form, self._index = form, index
        self._ids = form.call.prompts[prompt].token_ids
        self._echo = form.echoes[prompt] if form.body.echo else ""
        self._entries = entries
        self._offsets = self._offsets_from(len(self._echo))
        self._first = True

    def piece(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        reason: FinishReason | None,
        stop: str | int | None,
    ) -> dict[str, Any]:
        """Fields of what is told, for the choice or a chunk of it."""
        form, first = self._form, self._first
        self._first = False
        if form.scored_only:
            text, token_ids, logprobs, stop = "", [], None if logprobs is None else [], None
            reason = None if reason is None else "length"
        told = None
        if logprobs is not None:
            told = text_logprobs(logprobs, token_ids, self._offsets, form.tokenizer)
            if first and form.body.echo and self._entries is not None:
                told = _joined(self._of_prompt(), told)
        own = extras(
            form.body,
            token_ids=token_ids,
            first=first,
            prompt_token_ids=self._ids,
            prompt_entries=self._entries,
            choice=self._index,
        )
        return {
            "text": self._echo + text if first else text,
            "logprobs": told,
            "finish_reason": reason,
            "stop_reason": stop_reason(stop),
            **own,
        }

    def _of_prompt(self) -> Logprobs:
        assert self._entries is not None
        told = text_logprobs(self._entries, self._ids, self._offsets_from(0), self._form.tokenizer)
        told.text_offset = [min(offset, len(self._echo)) for offset in told.text_offset]
        return told

    def _offsets_from(self, start: int) -> Offsets:
        return Offsets(self._form.tokenizer, skip_special_tokens=self._form.params.skip_special_tokens, start=start)


def _joined(first: Logprobs, second: Logprobs) -> Logprobs:
    return Logprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _whole(head: Head, form: _Form, responses: list[Answer]) -> Completion:
    n = form.params.n
    choices = []
    for prompt, response in enumerate(responses):
        for one in response.choices:
            told = form.choice(prompt, one.index, response.prompt_logprobs)
            fields = told.piece(one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop)
            choices.append(Choice(index=prompt * n + one.index, **fields))
    usage = usage_body([response.usage for response in responses], scored_only=form.scored_only)
    return Completion(**head.fields(), choices=choices, usage=usage)


class _Writer:
    """The events of a streamed completion."""

    def __init__(self, head: Head, form: _Form) -> None:
        self._head, self._form = head.fields(), form
        self._entries: dict[int, list[TokenLogprob | None]] = {}
        self._choices: dict[int, _Choice] = {}
        options = form.body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._usage = None if self._with_usage else UNSET

    def prompt(self, prompt: int, entries: list[TokenLogprob | None]) -> None:
        self._entries[prompt] = entries

    def chunk(self, prompt: int, chunk: Chunk) -> Iterable[msgspec.Struct]:
        index = prompt * self._form.params.n + chunk.index
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = self._form.choice(prompt, chunk.index, self._entries.get(prompt))
        elif not (chunk.text or chunk.finish_reason or chunk.logprobs or self._form.body.return_token_ids):
            return ()  # part of a character, or of what may become a stop string
        fields = choice.piece(chunk.text, chunk.token_ids, chunk.logprobs, chunk.finish_reason, chunk.stop)
        return (TextChunk(**self._head, choices=[TextChunkChoice(index=index, **fields)], usage=self._usage),)

    def usage(self, usages: list[Usage]) -> msgspec.Struct | None:
        if not self._with_usage:
            return None
        total = usage_body(usages, scored_only=self._form.scored_only)
        return TextChunk(**self._head, choices=[], usage=total)
