"""Answers of a given form: ``response_format``, ``structured_outputs`` and ``guided_*``."""

from __future__ import annotations

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
    plain = not guided and body.response_format is None and not params.logits_processors
    if plain and (tools is None or not tools.possible):
        return params
    tokenizer = service.verbs.tokenizer

    def check() -> SamplingParams:
        check_processors(params)
        made = constrain(params, response_format=body.response_format, guided=guided, tokenizer=tokenizer)
        return made if tools is None else tools.constrain(made, tokenizer)

    return await in_thread(check)
