"""fastgen's own route: one prompt, ``SamplingParams`` whole, and the pipeline's own answer as JSON.

``POST /v1/fastgen/generate`` answers with a ``fastgen.Response``, or with ``stream`` as server-sent events: one named
``prompt`` as soon as the request is accepted (what was made of it), ``prompt_logprobs`` if they were asked for, then
``chunk``s (``fastgen.Chunk``), the last with ``usage``. An ``error``, in the shape of every error here, ends a stream,
too. ``fastgen.wire.documents`` says how the classes are written; a log-probability of minus infinity is ``null``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from fastgen.errors import InvalidRequestError
from fastgen.server.admission import Admission
from fastgen.server.aside import LARGE_ENTRIES, aside, weight
from fastgen.server.http.body import read_body, with_body
from fastgen.server.http.errors import ErrorBody
from fastgen.server.http.openapi import json_answer, json_body
from fastgen.server.http.run import while_connected
from fastgen.server.http.sse import EventStream, named_line
from fastgen.server.native import Native
from fastgen.server.service import Service
from fastgen.types import Chunk, SamplingParams
from fastgen.types import Response as Answer
from fastgen.wire import documents
from fastgen.wire.info import ModelInfo
from fastgen.wire.requests import ChatPrompt, GenerateRequest, StreamEvent, StreamStart

__all__ = ["GenerateBody", "router"]

JSON = "application/json"

Params = Annotated[dict[str, Any], WithJsonSchema(SamplingParams.model_json_schema())]


class GenerateBody(BaseModel):
    """One of ``prompt``, ``prompt_token_ids`` and ``messages``; the fields from ``tools`` on go with ``messages``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = Field(default=None, description="A name of the model or of a LoRA adapter. Unset: the model.")
    prompt: str | None = None
    prompt_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    params: Params = Field(default_factory=dict, description="fastgen.SamplingParams")
    stream: bool = False
    tools: list[Any] | None = None
    template: str | None = Field(default=None, description="The name of one of the model's templates.")
    template_variables: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def request(self) -> GenerateRequest:
        """
        Raises:
            InvalidRequestError: names the field.
        """
        prompts = [name for name in ("prompt", "prompt_token_ids", "messages") if getattr(self, name) is not None]
        if len(prompts) != 1:
            got = " and ".join(prompts) or "none"
            raise InvalidRequestError(f"give one of prompt, prompt_token_ids and messages; got {got}", field="prompt")
        chat = {name: getattr(self, name) for name in ChatPrompt.__dataclass_fields__}
        if self.messages is None:
            for name in self.model_fields_set & (chat.keys() - {"messages"}):
                raise InvalidRequestError(f"{name} goes with messages; this is a {prompts[0]}", field=name)
        prompt = ChatPrompt(**chat) if self.messages is not None else getattr(self, prompts[0])
        return GenerateRequest(prompt, SamplingParams(**_without_nulls(self.params)), self.model)


def router(service: Service, admission: Admission) -> APIRouter:
    made = APIRouter(prefix="/v1/fastgen", tags=["fastgen"])
    native = Native(service, admission)

    @made.post("/generate", **_described())
    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateBody)
        wanted = await with_body(request, body.request)
        if not body.stream:
            answer = await while_connected(request.receive, native.answer(wanted))
            data = await aside(weight(answer) > LARGE_ENTRIES, lambda: documents.encode(answer))
            return Response(data, media_type=JSON)
        events = native.stream(wanted)
        first = await while_connected(request.receive, anext(events))  # what is wrong is told with a status
        return EventStream(events, _bodies(first, events), named_line)

    @made.get("/model", **json_answer(ErrorBody))
    async def model() -> Response:
        """What is being served, and how it was loaded: a ``ModelInfo``."""
        return Response(documents.encode(service.info), media_type=JSON)

    model_answer = next(route for route in made.routes if getattr(route, "name", "") == "model")
    model_answer.responses[200]["content"][JSON]["schema"] = _schema(ModelInfo)  # type: ignore[attr-defined]
    return made


async def _bodies(first: StreamEvent, events: AsyncGenerator[StreamEvent, None]) -> AsyncGenerator[bytes, None]:
    yield await _line(first)
    async for event in events:
        yield await _line(event)


async def _line(event: StreamEvent) -> bytes:
    name = "chunk" if isinstance(event, Chunk) else "prompt" if isinstance(event, StreamStart) else "prompt_logprobs"
    return await aside(weight(event) > LARGE_ENTRIES, lambda: named_line(name, documents.encode(event)))


def _without_nulls(params: dict[str, Any]) -> dict[str, Any]:
    """``null`` is the same as leaving a field out."""
    return {
        name: value for name, value in params.items() if value is not None or name not in SamplingParams.model_fields
    }


# ---- the API's description -----------------------------------------------------------------------------------------


def _described() -> dict[str, Any]:
    """Keywords of the route. The answers are fastgen's own classes, not structs of ``openapi``."""
    made = json_body(GenerateBody, ErrorBody, errors=(404, 429, 500, 503))
    events = {"type": "string", "description": "events named prompt, prompt_logprobs, chunk (fastgen.Chunk) and error"}
    made["responses"][200]["content"] = {
        JSON: {"schema": _schema(Answer)},
        "text/event-stream": {"schema": events, "x-event": _schema(Chunk)},
    }
    return made


def _schema(kind: type[Any]) -> dict[str, Any]:
    """A class's JSON schema, with what it refers to in its place."""
    (_,), definitions = msgspec.json.schema_components([kind], ref_template="{name}")
    definitions["TokenLogprob"] = _token_logprob(definitions) if "TokenLogprob" in definitions else {}

    def inline(part: Any) -> Any:
        if isinstance(part, list):
            return [inline(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inline(definitions[part["$ref"]])
        return {key: inline(value) for key, value in part.items()}

    made: dict[str, Any] = inline(definitions[kind.__name__])
    return made


def _token_logprob(definitions: dict[str, Any]) -> dict[str, Any]:
    """``top`` holds entries without a ``top`` of their own; ``logprob`` may be null."""
    schema: dict[str, Any] = definitions["TokenLogprob"]
    properties = {**schema["properties"], "logprob": {"type": ["number", "null"]}}
    inner = {**schema, "properties": {**properties, "top": {"type": "array", "maxItems": 0}}}
    return {**schema, "properties": {**properties, "top": {"type": "array", "items": inner}}}
