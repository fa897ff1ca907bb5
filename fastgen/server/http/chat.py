"""``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from fastgen.front.prompts import Call, chat_call
from fastgen.server.admission import Admission
from fastgen.server.aside import LARGE_ENTRIES, aside, weight
from fastgen.server.http.answers import Chat, ChatChoice, ChatChunk, ChatChunkChoice, Delta
from fastgen.server.http.body import read_body, with_body
from fastgen.server.http.head import Head, extras, head_of, json_response, stop_reason, usage_body
from fastgen.server.http.logprobs import chat_logprobs
from fastgen.server.http.openapi import json_body
from fastgen.server.http.params import chat_params, in_clients_words
from fastgen.server.http.run import answer, start, while_connected
from fastgen.server.http.schemas import ChatMessages, ChatRequest
from fastgen.server.http.sse import EventStream, data_line, run_bodies
from fastgen.server.http.structure import constrained
from fastgen.server.http.tool_calls import Tools, deltas
from fastgen.server.native import adapter_of, admit, named_template
from fastgen.server.service import Service
from fastgen.server.tools import ToolStream
from fastgen.text import Tokenizer
from fastgen.types import Chunk, SamplingParams, TokenLogprob, Usage
from fastgen.types import Response as Answer

__all__ = ["router", "template_options"]


def router(service: Service, admission: Admission) -> APIRouter:
    made = APIRouter(tags=["OpenAI"])
    tokenizer = service.verbs.tokenizer

    @made.post("/v1/chat/completions", **json_body(ChatRequest, Chat, errors=(404, 429, 500, 503), stream=ChatChunk))
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(request, ChatRequest)
        head = head_of(request, service, "chatcmpl", body.model)
        with in_clients_words(body):
            params, tools = await with_body(request, lambda: _read(body, service))
            entry = admit(service, admission, choices=params.n)
            try:
                call = await while_connected(request.receive, _prepared(body, params, tools, service))
                form = _Form(body, call, tools, tokenizer)
                if body.stream:
                    run = await start(service, entry, call)
                    return EventStream(run, run_bodies(run, _Writer(head, form)), data_line)
                (response,) = await while_connected(request.receive, answer(service, entry, call))
                large = weight(response) > LARGE_ENTRIES
                answered = await aside(large, lambda: json_response(_whole(head, form, response)))
            except BaseException:
                entry.leave()
                raise
        entry.leave()
        return answered

    return made


def template_options(body: ChatMessages) -> dict[str, Any]:
    """Arguments of ``chat_call`` beside the messages.

    Raises:
        InvalidRequestError: as ``named_template``.
    """
    return {
        "variables": body.chat_template_kwargs or {},
        "tools": body.tools or None,
        "template": named_template(body.chat_template, "chat_template"),
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message or False,
    }


def _read(body: ChatRequest, service: Service) -> tuple[SamplingParams, Tools]:
    return chat_params(body, adapter_of(service, body.model)), Tools.of(body, service.verbs.tokenizer)


async def _prepared(body: ChatRequest, params: SamplingParams, tools: Tools, service: Service) -> Call:
    params = await constrained(params, body, service, tools)
    return await asyncio.to_thread(_prepare, body, params, tools, service.verbs.tokenizer)


def _prepare(body: ChatRequest, params: SamplingParams, tools: Tools, tokenizer: Tokenizer | None) -> Call:
    options = template_options(body)
    if not tools.possible:
        options["tools"] = None
    return chat_call(body.messages, params, tokenizer, **options)


class _Form:
    """What the client asked to be told."""

    def __init__(self, body: ChatRequest, call: Call, tools: Tools, tokenizer: Tokenizer | None) -> None:
        self.body, self.prompt_token_ids, self.tools = body, call.prompts[0].token_ids, tools
        self._tokenizer = tokenizer

    def shared(self, piece: Any, *, first: bool, prompt_entries: list[TokenLogprob | None] | None) -> dict[str, Any]:
        """Fields that a choice and a chunk of one (``piece``) have alike."""
        own = extras(
            self.body,
            token_ids=piece.token_ids,
            first=first,
            prompt_token_ids=self.prompt_token_ids,
            prompt_entries=prompt_entries,
            choice=piece.index,
        )
        return {
            "index": piece.index,
            "logprobs": None if piece.logprobs is None else chat_logprobs(piece.logprobs, self._tokenizer),
            "finish_reason": piece.finish_reason,
            "stop_reason": stop_reason(piece.stop),
            **own,
        }


def _whole(head: Head, form: _Form, response: Answer) -> Chat:
    choices = []
    for one in response.choices:
        told = form.tools.whole(one)
        fields = form.shared(one, first=True, prompt_entries=response.prompt_logprobs)
        choices.append(ChatChoice(message=told.message, **{**fields, "finish_reason": told.reason}))
    return Chat(**head.fields(), choices=choices, usage=usage_body([response.usage]))


class _Writer:
    """The events of a streamed chat."""

    def __init__(self, head: Head, form: _Form) -> None:
        self._head, self._form = head.fields(), form
        self._entries: list[TokenLogprob | None] | None = None
        self._streams: dict[int, ToolStream | None] = {}
        options = form.body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._usage = None if self._with_usage else UNSET

    def prompt(self, prompt: int, entries: list[TokenLogprob | None]) -> None:
        self._entries = entries

    def chunk(self, prompt: int, chunk: Chunk) -> Iterable[msgspec.Struct]:
        index = chunk.index
        first = index not in self._streams
        if first:
            self._streams[index] = self._form.tools.stream()
        stream = self._streams[index]
        told = list(deltas(stream, chunk))
        of_prompt = first and self._form.body.prompt_logprobs is not None
        if not told and (chunk.finish_reason or chunk.logprobs or self._form.body.return_token_ids or of_prompt):
            told = [Delta()]
        # The role comes first and by itself; what belongs to the chunk comes with its last piece.
        made = [ChatChunkChoice(index=index, delta=one) for one in [Delta(role="assistant", content="")] * first]
        made += [ChatChunkChoice(index=index, delta=one) for one in told[:-1]]
        if told:
            fields = self._form.shared(chunk, first=first, prompt_entries=self._entries)
            if stream is not None and stream.called and chunk.finish_reason == "stop":
                fields["finish_reason"] = "tool_calls"
            made.append(ChatChunkChoice(delta=told[-1], **fields))
        return [self._event(one) for one in made]

    def usage(self, usages: list[Usage]) -> msgspec.Struct | None:
        if not self._with_usage:
            return None
        return ChatChunk(**self._head, choices=[], usage=usage_body(usages))

    def _event(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self._head, choices=[choice], usage=self._usage)
