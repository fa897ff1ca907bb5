"""What callers ask a model for, whoever runs it: completions and chats, whole or streamed, waited for or awaited."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from fastgen.core.loop import Loop
from fastgen.errors import InvalidRequestError
from fastgen.front.answers import answers, async_answers
from fastgen.front.prompts import Call, chat_call, completion_call, read_params
from fastgen.front.streams import AsyncChunkStream, ChunkStream
from fastgen.types import Chunk, Message, Response, SamplingParams

if TYPE_CHECKING:
    from fastgen.config import EngineConfig
    from fastgen.text import Tokenizer

__all__ = ["Verbs"]

Ids = Sequence[int]


class Verbs:
    """Answers prompts and chats through a ``Loop``, which batches whatever is asked at the same time. All methods may
    be called from any thread and event loop.

    Every verb takes ``params`` (a ``SamplingParams``) and sampling options as keywords, which are laid over it. All
    verbs raise ``InvalidRequestError`` for what cannot be run, before anything runs, and ``EngineClosedError`` once
    nothing is taken any more. A request that fails while it runs ends with ``finish_reason`` ``"error"`` and hurts no
    other.
    """

    def __init__(self, loop: Loop, *, tokenizer: Tokenizer | None, config: EngineConfig, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.max_model_len = max_model_len
        self.loop = loop
        """Runs the requests."""

    @property
    def closed(self) -> bool:
        """Whether it takes no requests any more: it was closed, or the engine died."""
        return self.loop.closed

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
            InvalidRequestError: says which prompt of several is at fault; none of them has run.
        """
        call = self._completion(prompts, prompt_token_ids, params, sampling)
        if progress is None:
            progress = len(call.prompts) > 1 and sys.stderr.isatty()
        responses = answers(self.loop, call, progress=progress)
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
        return ChunkStream(self.loop, self._one(prompt, prompt_token_ids, params, sampling), self)

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
        """As calling the pipeline, for event loops. Cancelling aborts the requests."""
        call = await asyncio.to_thread(self._completion, prompts, prompt_token_ids, params, sampling)
        responses = await async_answers(self.loop, call)
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
        return AsyncChunkStream(self.loop, lambda: self._one(prompt, prompt_token_ids, params, sampling), self)

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
            stream: give chunks as they are generated, as ``Pipeline.stream``.
            tools: functions the model may call, as JSON schemas or annotated Python functions.
            template: Jinja text, or the name of one of the model's templates, instead of its default.
            template_variables: whatever else the template reads, such as ``{"enable_thinking": False}``.
            add_generation_prompt: open the assistant's answer. Unset: yes, unless ``continue_final_message``.
            continue_final_message: go on with the last message instead of answering it.

        Raises:
            InvalidRequestError: also for what the template refuses, in its own words.
        """
        call = self._chat(
            messages,
            params,
            tools=tools,
            template=template,
            template_variables=template_variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **sampling,
        )
        return ChunkStream(self.loop, call, self) if stream else answers(self.loop, call)[0]

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
            return self._chat(messages, params, **options)

        async def answer() -> Response:
            return (await async_answers(self.loop, await asyncio.to_thread(prepare)))[0]

        return AsyncChunkStream(self.loop, prepare, self) if stream else answer()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _completion(
        self, prompts: object, ids: object, params: SamplingParams | None, sampling: Mapping[str, Any]
    ) -> Call:
        return completion_call(prompts, ids, read_params(params, sampling), self.tokenizer)

    def _one(self, prompt: object, ids: object, params: SamplingParams | None, sampling: Mapping[str, Any]) -> Call:
        call = self._completion(prompt, ids, params, sampling)
        if not call.single:
            raise InvalidRequestError("a stream takes one prompt; call the pipeline for a list of them", field="prompt")
        return call

    def _chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        *,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **sampling: Any,
    ) -> Call:
        return chat_call(
            messages,
            read_params(params, sampling, chat=True),
            self.tokenizer,
            variables=template_variables or {},
            tools=tools,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
