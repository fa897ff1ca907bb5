"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from fastgen.errors import InvalidRequestError
from fastgen.front.prompts import chat_call, completion_call
from fastgen.server.http.answers import TokenIds, TokenText
from fastgen.server.http.body import read_body
from fastgen.server.http.chat import template_options
from fastgen.server.http.head import json_response
from fastgen.server.http.models import name_of
from fastgen.server.http.openapi import json_body
from fastgen.server.http.run import while_connected
from fastgen.server.http.schemas import DetokenizeRequest, TokenizeRequest
from fastgen.server.service import Service
from fastgen.server.tools import read_tools
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams

__all__ = ["router"]

_threads = ThreadPoolExecutor(2, thread_name_prefix="fastgen-tokens")
"""Whoever asks here waits for others who ask here, and for nobody else: these requests are not counted as the model's
are."""


def router(service: Service) -> APIRouter:
    made = APIRouter(tags=["tokens"])

    def tokenizer() -> Tokenizer:
        if service.verbs.tokenizer is None:
            raise InvalidRequestError("this model was loaded without a tokenizer")
        return service.verbs.tokenizer

    @made.post("/tokenize", **json_body(TokenizeRequest, TokenIds, errors=(404, 429)))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or a conversation, as the model would get them."""
        body = await read_body(request, TokenizeRequest)
        name_of(service, body.model)
        known = tokenizer()

        def answer() -> Response:
            ids = _encode(body, known)
            texts = [known.token_text(one) for one in ids] if body.return_token_strs else None
            return json_response(TokenIds(len(ids), service.info.max_model_len, ids, texts))

        return await _in_turn(request.receive, answer)

    @made.post("/detokenize", **json_body(DetokenizeRequest, TokenText, errors=(404, 429)))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeRequest)
        name_of(service, body.model)
        known = tokenizer()
        most = max(service.info.vocab_size, known.num_ids)

        def answer() -> Response:
            for place, one in enumerate(body.tokens):
                if one >= most:
                    raise InvalidRequestError(
                        f"tokens[{place}] is {one}; there are the ids 0 to {most - 1}", field="tokens"
                    )
            text = known.decode(body.tokens, skip_special_tokens=body.skip_special_tokens or False)
            return json_response(TokenText(text))

        return await _in_turn(request.receive, answer)

    return made


async def _in_turn(receive: Receive, answer: Callable[[], Response]) -> Response:
    """Whose client goes gives its turn up."""
    return await while_connected(receive, asyncio.get_running_loop().run_in_executor(_threads, answer))


def _encode(body: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    params = SamplingParams(add_special_tokens=body.add_special_tokens)
    if body.messages is not None:
        read_tools(body.tools)
        return chat_call(body.messages, params, tokenizer, **template_options(body)).prompts[0].token_ids
    if not body.prompt:
        return []
    return completion_call(body.prompt, None, params, tokenizer).prompts[0].token_ids
