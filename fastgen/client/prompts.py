"""What callers may hand in as prompts, made into requests: as the pipeline takes it, with the same words where it is
wrong. What takes a tokenizer to find out, the server says."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.core.loop import in_batch
from fastgen.errors import InvalidRequestError
from fastgen.text.chat import check_messages
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
    read = _params(params, sampling)
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequestError("give prompts (text) or prompt_token_ids, one of the two", field="prompts")
    found: Sequence[str | list[int]]
    if prompt_token_ids is not None:
        found, single = _id_lists(prompt_token_ids)
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
    read = _params(params, sampling, chat=True)
    prompt = ChatPrompt(
        messages=check_messages(messages),
        tools=None if tools is None else [_tool(tool) for tool in tools],
        template=template,
        template_variables=template_variables,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    return Call([GenerateRequest(prompt, read, model)], single=True)


def _params(params: SamplingParams | None, options: Mapping[str, Any], *, chat: bool = False) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be a SamplingParams, got {_short(params)}", field="params")
    try:
        return SamplingParams.of(params, **options)
    except InvalidRequestError as error:
        if chat and error.field not in SamplingParams.model_fields:
            hint = f"{error} (A variable of the chat template goes into template_variables={{...}}.)"
            raise InvalidRequestError(hint, field=error.field) from None
        raise


def _texts(prompts: object) -> tuple[list[str], bool]:
    if isinstance(prompts, str):
        return [_text(prompts)], True
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a string or a list of strings, got {_short(prompts)}", field="prompts"
        )
    texts = []
    for index, prompt in enumerate(prompts):
        try:
            texts.append(_text(prompt))
        except InvalidRequestError as error:
            if len(prompts) == 1:
                raise
            raise in_batch(error, index, len(prompts)) from error
    return texts, False


def _text(prompt: object) -> str:
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the prompt cannot be sent: character {error.start} is half of a surrogate pair", field="prompt"
            ) from None
        return prompt
    hint = ""
    if isinstance(prompt, Mapping):
        hint = "; the messages of a chat go to chat()"
    elif isinstance(prompt, int | Sequence):
        hint = "; token ids go into prompt_token_ids=..."
    raise InvalidRequestError(f"a prompt must be a string, got {_short(prompt)}{hint}", field="prompts")


def _id_lists(value: object) -> tuple[list[list[int]], bool]:
    """Lists of ids from one list of ids or several (or tensors or arrays of them), and whether it was one."""
    value = _plain(value)
    if not isinstance(value, list | tuple):
        raise _bad_ids(value)
    if not value:
        raise InvalidRequestError("prompt_token_ids is empty; give at least one token id", field="prompt_token_ids")
    rows = [_plain(row) for row in value]
    if all(isinstance(row, list | tuple) for row in rows):
        return [_ids(row) for row in rows], False
    return [_ids(rows)], True


def _ids(row: Any) -> list[int]:
    try:
        if any(isinstance(token, bool) for token in row):
            raise TypeError
        return [operator.index(token) for token in row]
    except TypeError:
        raise _bad_ids(row) from None


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, list | tuple) else value


def _bad_ids(value: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt_token_ids must be a list of ints, or a list of such lists, got {_short(value)}",
        field="prompt_token_ids",
    )


def _tool(tool: Any) -> Any:
    """A function as its JSON schema, which is what a template would see of it."""
    if not inspect.isroutine(tool):
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # of its docstring and its annotations
        raise InvalidRequestError(f"tools: {error}", field="tools") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
