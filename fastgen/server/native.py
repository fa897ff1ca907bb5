"""fastgen's own API, whatever door it comes through: one prompt, ``SamplingParams`` whole, the pipeline's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from fastgen.core.loop import Loop
from fastgen.errors import ConfigError, EngineClosedError, InvalidRequestError, did_you_mean
from fastgen.front.answers import async_answers
from fastgen.front.prompts import Call, chat_call, completion_call
from fastgen.front.streams import AsyncChunkStream
from fastgen.server.admission import Admission, Entry
from fastgen.server.service import Service
from fastgen.server.structured import check_processors, in_thread
from fastgen.types import Response, SamplingParams
from fastgen.wire.requests import ChatPrompt, GenerateRequest, PromptLogprobs, StreamEvent, StreamStart

__all__ = ["Native", "NotReadyError", "UnknownModelError", "adapter_of", "admit", "check_names", "named_template"]


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served here. HTTP: 404; gRPC: NOT_FOUND."""


class NotReadyError(EngineClosedError):
    """No engine takes requests just now, and this one was not begun: it may be sent again. HTTP: 503 with Retry-After;
    gRPC: UNAVAILABLE with retry-after."""


def admit(service: Service, admission: Admission, *, choices: int) -> Entry:
    """Let a request in.

    Raises:
        OverloadedError, DrainingError, NotReadyError: not now.
        InvalidRequestError: never so many choices.
    """
    entry = admission.enter(choices=choices)  # first: a server that drains says so
    state = service.backend.state
    if state != "ready":
        entry.leave()
        raise NotReadyError(f"the model is not ready (it is {state}); try again later")
    return entry


def adapter_of(service: Service, asked: str | None) -> str | None:
    """The LoRA adapter that a request's model means; ``None``: the model as it is.

    Raises:
        UnknownModelError: no model or adapter has that name.
    """
    if asked is None:
        return None
    names = service.names
    if asked not in names:
        known = ", ".join(map(repr, names[:10]))
        text = f"there is no model {asked[:200]!r} here; served are {known}.{did_you_mean(asked, names)}"
        raise UnknownModelError(text, field="model")
    return asked if asked in service.info.loras else None


def check_names(service: Service) -> None:
    """
    Raises:
        ConfigError: a name of the model is an adapter's, too.
    """
    for name in service.settings.served_model_name or (service.info.name,):
        if name in service.info.loras:
            raise ConfigError(
                f"{name!r} would be the name of the model and of one of its LoRA adapters; give the model another one "
                f"with served_model_name, or the adapter"
            )


def named_template(template: str | None, field: str) -> str | None:
    """The template that a request names, in ``field``. Jinja from strangers is not run: its sandbox keeps them from the
    system, not from using it up.

    Raises:
        InvalidRequestError: it is the text of one.
    """
    if template is not None and "{" in template:
        raise InvalidRequestError(
            f"{field}: a server takes the name of one of the model's own templates, not the text of one; render the "
            f"conversation yourself and complete it as a prompt",
            field=field,
        )
    return template


class Native:
    """Answers ``GenerateRequest``s. What it raises beside its own errors is the pipeline's and ``Admission``'s."""

    def __init__(self, service: Service, admission: Admission) -> None:
        """
        Raises:
            ConfigError: as ``check_names``.
        """
        check_names(service)
        self._service = service
        self._admission = admission

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._service.backend.state == "ready" and not self._admission.draining

    async def answer(self, request: GenerateRequest) -> Response:
        """The whole answer. Cancelling aborts the request.

        Raises:
            UnknownModelError, NotReadyError, InvalidRequestError, OverloadedError, DrainingError: it has not run.
            EngineClosedError: the engine was closed, or died, meanwhile.
        """
        params = self._params(request)
        with self._enter(params) as entry:
            call = await self._call(request, params, entry)
            return (await async_answers(self._loop, call))[0]

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        """What was made of the prompt, as soon as the request is accepted; then the chunks. Closing aborts the request.
        Raises as ``answer``; what is wrong with the request, before anything is yielded."""
        params = self._params(request)
        with self._enter(params) as entry:
            call = await self._call(request, params, entry)
            async with _Accepted(self._loop, lambda: call) as chunks:
                prompt = call.prompts[0]
                yield StreamStart(await chunks.begin(), prompt.token_ids, prompt.text, params.n)
                told = params.prompt_logprobs is None
                async for chunk in chunks:
                    if not told:
                        yield PromptLogprobs(chunks.prompt_logprobs or [])
                        told = True
                    yield chunk

    @property
    def _loop(self) -> Loop:
        return self._service.verbs.loop  # which may have something around the backend that looks on

    def _enter(self, params: SamplingParams) -> Entry:
        return admit(self._service, self._admission, choices=params.n)

    async def _call(self, request: GenerateRequest, params: SamplingParams, entry: Entry) -> Call:
        """Templates and tokenizers may take their time: in a thread."""
        if params.logits_processors:
            await in_thread(lambda: check_processors(params))
        call = await asyncio.to_thread(self._read, request.prompt, params)
        entry.add_call(call)
        return call

    def _read(self, prompt: str | list[int] | ChatPrompt, params: SamplingParams) -> Call:
        tokenizer = self._service.verbs.tokenizer
        if isinstance(prompt, str):
            return completion_call(prompt, None, params, tokenizer)
        if not isinstance(prompt, ChatPrompt):
            return completion_call(None, [prompt], params, tokenizer)
        return chat_call(
            prompt.messages,
            params,
            tokenizer,
            variables=prompt.template_variables or {},
            tools=prompt.tools,
            template=named_template(prompt.template, "template"),
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
        )

    def _params(self, request: GenerateRequest) -> SamplingParams:
        """The request's, with the adapter its model names."""
        adapter, params = adapter_of(self._service, request.model), request.params
        if adapter is None:
            return params
        if params.lora not in (None, adapter):
            raise InvalidRequestError(f"model names the adapter {adapter!r}, lora another one", field="lora")
        return SamplingParams.of(params, lora=adapter)


class _Accepted(AsyncChunkStream):
    """A stream whose request is handed in before the first chunk is asked for."""

    async def begin(self) -> str:
        """Hand it in, and wait for the engine to take it.

        Returns:
            The request's name.
        """
        self._inbox = await self._start()
        assert self._request_id is not None
        return self._request_id
