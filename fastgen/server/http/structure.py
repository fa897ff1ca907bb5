"""Answers of a given form: ``response_format``, ``structured_outputs`` and ``guided_*``."""

from __future__ import annotations

import asyncio

from fastgen.server.http.schemas import Sampled
from fastgen.server.http.tool_calls import Tools
from fastgen.server.service import Service
from fastgen.server.structured import GUIDED_FIELDS, check_processors, constrain, in_thread
from fastgen.types import SamplingParams

__all__ = ["constrained"]


async def constrained(
    params: SamplingParams, body: Sampled, service: Service, tools: Tools | None = None
) -> SamplingParams:
    """``params`` with what keeps the answer in the form that the request asks for: a schema's, or a tool call's.

    Raises:
        InvalidRequestError: the form cannot be kept; nothing is ever ignored.
    """
    guided = {name: value for name in GUIDED_FIELDS if (value := getattr(body, name)) is not None}
    free = not guided and body.response_format in (None, {"type": "text"}) and not params.logits_processors
    tokenizer = service.verbs.tokenizer
    if free and (tools is None or not tools.promised):  # nothing to try out, nothing to wait for
        if tools is None or not tools.possible:
            return params
        return await asyncio.to_thread(tools.constrain, params, tokenizer)

    def check() -> SamplingParams:
        check_processors(params)
        made = constrain(params, response_format=body.response_format, guided=guided, tokenizer=tokenizer)
        return made if tools is None else tools.constrain(made, tokenizer)

    return await in_thread(check)
