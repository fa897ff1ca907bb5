"""``Client``: the pipeline's verbs, over a connection to a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, Self, overload

from fastgen.client.address import connect
from fastgen.client.progress import Bar
from fastgen.client.prompts import Call, chat_call, completion_call, one_prompt
from fastgen.client.session import Options, Session
from fastgen.client.streams import AsyncChunkStream, ChunkStream
from fastgen.types import Chunk, Message, Response, SamplingParams
from fastgen.wire.info import ModelInfo

__all__ = ["Client"]

Ids = Sequence[int]


class Client:
    """A server's model, with ``fastgen.Pipeline``'s verbs. All methods may be called from any thread and event loop.

    A list of prompts goes as one request each, at most ``concurrency`` at a time; the answers keep its order. If one is
    refused or fails, those still running are aborted and its error is raised; others may have run by then.

    Verbs raise what the pipeline's do: ``InvalidRequestError`` for what cannot be run, ``EngineClosedError`` where the
    server's engine, the server or this client went away before the answer was whole (``ServerUnreachableError``, if
    nobody answers at all). Beside them ``OverloadedError``, ``RequestTimeoutError`` and ``AuthenticationError`` of
    ``fastgen.client``.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float | None = None,
        retries: int = 3,
        concurrency: int = 64,
        ca_cert: str | Path | None = None,
    ) -> None:
        """No connection is made yet.

        Args:
            address: ``"localhost:50051"`` (gRPC; ``grpcs://...`` with TLS), or ``"http://..."``, ``"https://..."``.
            api_key: one the server knows.
            model: which of the server's names to ask for, such as a LoRA adapter's. Unset: its model.
            timeout: seconds for a call of a verb, all its prompts, chunks and retries included. Unset: no end.
            retries: tries after the first, of a request the server has not begun: nobody listens, it is starting or
                shutting down, or has no room just now.
            concurrency: requests of one call in flight at a time.
            ca_cert: certificates (PEM) to know the server by, instead of the system's.

        Raises:
            ConfigError: one of them cannot be used.
        """
        options = Options(model, timeout, retries, concurrency)
        self.address = address
        self._session = Session(connect(address, api_key=api_key, ca_cert=ca_cert), options)

    def with_options(self, **options: Any) -> Client:
        """A client with another ``model``, ``timeout``, ``retries`` or ``concurrency``, over the same connection:
        ``client.with_options(timeout=5)(prompt)``. Closing either closes both."""
        other = Client.__new__(Client)
        other.address, other._session = self.address, self._session.but(**options)
        return other

    # ---- completions -----------------------------------------------------------------------------------------------

    @overload
    def __call__(
        self, prompts: str, params: SamplingParams | None = None, *, progress: bool | None = None, **sampling: Any
    ) -> Response: ...

    @overload
    def __call__(
        self,
        prompts: list[str] | tuple[str, ...],
        params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **sampling: Any,
    ) -> list[Response]: ...

    @overload
    def __call__(
        self,
        prompts: None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int],
        progress: bool | None = None,
        **sampling: Any,
    ) -> Response: ...

    @overload
    def __call__(
        self,
        prompts: None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]],
        progress: bool | None = None,
        **sampling: Any,
    ) -> list[Response]: ...

    def __call__(
        self,
        prompts: str | Sequence[str] | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Ids | Sequence[Ids] | None = None,
        progress: bool | None = None,
        **sampling: Any,
    ) -> Response | list[Response]:
        """Complete one prompt or a list of them, and wait for the answers.

        Args:
            prompts: text; a list gives a list of responses, in its order.
            prompt_token_ids: token ids instead, of one prompt or of several.
            progress: show a bar. Unset: for a list, if standard error is a terminal.

        Raises:
            InvalidRequestError: says which prompt of several is at fault.
        """
        call = completion_call(prompts, prompt_token_ids, params, sampling, self._model)
        if progress is None:
            progress = len(call.requests) > 1 and sys.stderr.isatty()
        bar: AbstractContextManager[Bar | None] = Bar(len(call.requests)) if progress else nullcontext()
        with bar as shown:
            work = self._session.answers(call, shown.done) if shown is not None else self._session.answers(call)
            responses = self._session.run(work)
        return responses[0] if call.single else responses

    def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Ids | None = None,
        **sampling: Any,
    ) -> ChunkStream:
        """Complete one prompt, piece by piece. Closing or dropping the iterator early aborts the request."""
        return ChunkStream(self._session, one_prompt(prompt, prompt_token_ids, params, sampling, self._model))

    @overload
    async def acall(self, prompts: str, params: SamplingParams | None = None, **sampling: Any) -> Response: ...

    @overload
    async def acall(
        self, prompts: list[str] | tuple[str, ...], params: SamplingParams | None = None, **sampling: Any
    ) -> list[Response]: ...

    @overload
    async def acall(
        self,
        prompts: None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int],
        **sampling: Any,
    ) -> Response: ...

    @overload
    async def acall(
        self,
        prompts: None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]],
        **sampling: Any,
    ) -> list[Response]: ...

    async def acall(
        self,
        prompts: str | Sequence[str] | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Ids | Sequence[Ids] | None = None,
        **sampling: Any,
    ) -> Response | list[Response]:
        """As calling the client, for event loops. Cancelling aborts the requests."""
        call = completion_call(prompts, prompt_token_ids, params, sampling, self._model)
        responses = await self._session.arun(self._session.answers(call))
        return responses[0] if call.single else responses

    def astream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Ids | None = None,
        **sampling: Any,
    ) -> AsyncChunkStream:
        """As ``stream``, for ``async for``. What is wrong with the request is raised at the first chunk."""
        return AsyncChunkStream(
            self._session, lambda: one_prompt(prompt, prompt_token_ids, params, sampling, self._model)
        )

    # ---- chats -----------------------------------------------------------------------------------------------------

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> Response: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> ChunkStream: ...

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **sampling: Any,
    ) -> Response | Iterator[Chunk]:
        """Answer a conversation.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``.
            stream: give chunks as they are generated, as ``Client.stream``.
            tools: functions the model may call, as JSON schemas or annotated Python functions.
            template: the name of one of the model's templates, instead of its default. (A server takes no Jinja text.)
            template_variables: whatever else the template reads, such as ``{"enable_thinking": False}``.
            add_generation_prompt: open the assistant's answer. Unset: yes, unless ``continue_final_message``.
            continue_final_message: go on with the last message instead of answering it.

        Raises:
            InvalidRequestError: also for what the template refuses, in its own words.
        """
        call = chat_call(
            messages,
            params,
            self._model,
            tools=tools,
            template=template,
            template_variables=template_variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **sampling,
        )
        return ChunkStream(self._session, call) if stream else self._session.run(self._session.answers(call))[0]

    @overload
    def achat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> Coroutine[Any, Any, Response]: ...

    @overload
    def achat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncChunkStream: ...

    def achat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Coroutine[Any, Any, Response] | AsyncIterator[Chunk]:
        """As ``chat``, with the same options, to be awaited, or with ``stream=True`` iterated with ``async for``."""

        def prepare() -> Call:
            return chat_call(messages, params, self._model, **options)

        async def answer() -> Response:
            return (await self._session.arun(self._session.answers(prepare())))[0]

        return AsyncChunkStream(self._session, prepare) if stream else answer()

    # ---- the server ------------------------------------------------------------------------------------------------

    def health(self) -> bool:
        """Whether the server takes requests. ``False`` also where nobody answers."""
        return self._session.run(self._session.health())

    async def ahealth(self) -> bool:
        """As ``health``, for event loops."""
        return await self._session.arun(self._session.health())

    def model_info(self) -> ModelInfo:
        """What is being served, and how it was loaded."""
        return self._session.run(self._session.model_info())

    async def amodel_info(self) -> ModelInfo:
        """As ``model_info``, for event loops."""
        return await self._session.arun(self._session.model_info())

    @property
    def closed(self) -> bool:
        """Whether the client was closed."""
        return self._session.background.closed

    def close(self) -> None:
        """Close the connection. Calls in flight raise ``EngineClosedError``, and their requests are aborted. Closing
        twice is harmless."""
        self._session.background.close()

    async def aclose(self) -> None:
        """As ``close``, for event loops."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- inside ----------------------------------------------------------------------------------------------------

    @property
    def _model(self) -> str | None:
        return self._session.options.model
