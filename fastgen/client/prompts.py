"""What callers may hand in as prompts, made into requests: as the pipeline takes it, with the same words where it is
wrong. What takes a tokenizer to find out, the server says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.core.loop import in_batch
from fastgen.errors import InvalidRequestError
from fastgen.text.chat import check_messages
from fastgen.text.prompts import check_text, one_of_two, read_id_lists, read_params, read_texts
from fastgen.types import Message, SamplingParams
from fastgen.wire.requests import ChatPrompt, GenerateRequest

__all__ = ["Call", "chat_call", "completion_call", "one_prompt"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb: a request for each prompt."""

    requests: list[GenerateRequest]
    single: bool
    """Whether one prompt was given and not a list of them."""


def completion_call(
    prompts: object,
    prompt_token_ids: object,
    params: SamplingParams | None,
    sampling: Mapping[str, Any],
    model: str | None,
) -> Call:
    """Prompts as text or as ids.

    Raises:
        InvalidRequestError: neither or both are given, one is no prompt, or a sampling option is wrong.
    """
    read = read_params(params, sampling)
    one_of_two(prompts, prompt_token_ids)
    found: Sequence[str | list[int]]
    if prompt_token_ids is not None:
        found, single = read_id_lists(prompt_token_ids)
    else:
        found, single = _texts(prompts)
    return Call([GenerateRequest(prompt, read, model) for prompt in found], single)


def one_prompt(
    prompt: object,
    prompt_token_ids: object,
    params: SamplingParams | None,
    sampling: Mapping[str, Any],
    model: str | None,
) -> Call:
    """The same for a stream, which takes one."""
    call = completion_call(prompt, prompt_token_ids, params, sampling, model)
    if not call.single:
        raise InvalidRequestError("a stream takes one prompt; call the client for a list of them", field="prompt")
    return call


def chat_call(
    messages: Sequence[Message],
    params: SamplingParams | None,
    model: str | None,
    *,
    tools: Sequence[Any] | None = None,
    template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    **sampling: Any,
) -> Call:
    """A conversation.

    Raises:
        InvalidRequestError: bad messages or tools, or a sampling option is wrong.
    """
    read = read_params(params, sampling, chat=True)
    prompt = ChatPrompt(
        messages=check_messages(messages),
        tools=None if tools is None else [_tool(tool) for tool in tools],
        template=template,
        template_variables=template_variables,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    return Call([GenerateRequest(prompt, read, model)], single=True)


def _texts(prompts: object) -> tuple[list[str], bool]:
    given, single = read_texts(prompts)
    texts = []
    for index, prompt in enumerate(given):
        try:
            texts.append(_sendable(check_text(prompt)))
        except InvalidRequestError as error:
            if len(given) == 1:
                raise
            raise in_batch(error, index, len(given)) from error
    return texts, single


def _sendable(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt cannot be sent: character {error.start} is half of a surrogate pair", field="prompt"
        ) from None
    return prompt


def _tool(tool: Any) -> Any:
    """A function as its JSON schema, which is what a template would see of it."""
    if not inspect.isroutine(tool):
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # of its docstring and its annotations
        raise InvalidRequestError(f"tools: {error}", field="tools") from error
