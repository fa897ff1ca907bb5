"""What callers may hand in as prompts, made into token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.core.loop import in_batch
from fastgen.errors import InvalidRequestError
from fastgen.text import Tokenizer
from fastgen.types import Message, SamplingParams

__all__ = ["Call", "Prompt", "chat_call", "completion_call", "read_params"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``text`` is ``None`` where ids were given."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb, checked as far as it can be without the engine."""

    prompts: list[Prompt]
    params: SamplingParams
    single: bool
    """Whether one prompt was given and not a list of them."""
    chat: bool = False


def read_params(params: SamplingParams | None, options: Mapping[str, Any], *, chat: bool = False) -> SamplingParams:
    """``params`` with ``options`` laid over it.

    Raises:
        InvalidRequestError: an unknown option, or a value out of range.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be a SamplingParams, got {_short(params)}", field="params")
    try:
        return SamplingParams.of(params, **options)
    except InvalidRequestError as error:
        if chat and error.field not in SamplingParams.model_fields:
            hint = f"{error} (A variable of the chat template goes into template_variables={{...}}.)"
            raise InvalidRequestError(hint, field=error.field) from None
        raise


def completion_call(
    prompts: object, prompt_token_ids: object, params: SamplingParams, tokenizer: Tokenizer | None
) -> Call:
    """Prompts as text or as ids.

    Raises:
        InvalidRequestError: neither or both are given, or one is no prompt, says which; ids with
            ``add_special_tokens``.
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequestError("give prompts (text) or prompt_token_ids, one of the two", field="prompts")
    if prompt_token_ids is not None:
        if params.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens: prompt_token_ids are taken as they are; put the special tokens among them, or "
                "give the prompt as text",
                field="add_special_tokens",
            )
        lists, single = _id_lists(prompt_token_ids)
        return Call([Prompt(ids) for ids in lists], params, single)
    single = isinstance(prompts, str)
    if not single and (isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Sequence)):
        raise InvalidRequestError(
            f"prompts must be a string or a list of strings, got {_short(prompts)}", field="prompts"
        )
    texts: Sequence[object] = [prompts] if single else prompts  # type: ignore[assignment]
    read = [_read_one(text, i, len(texts), params, tokenizer) for i, text in enumerate(texts)]
    return Call(read, params, single)


def chat_call(
    messages: Sequence[Message],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    *,
    variables: Mapping[str, Any],
    **options: Any,
) -> Call:
    """A conversation. ``options`` and ``variables``: as ``Tokenizer.render_chat``.

    Raises:
        InvalidRequestError: bad messages, no chat template, or the template refused them.
    """
    for name in variables:
        if name in options or name == "messages":
            raise InvalidRequestError(
                f"template_variables may not set {name!r}; it has an argument of its own", field=name
            )
    tokenizer = _needed(tokenizer, "messages")
    text = tokenizer.render_chat(messages, **options, **variables)
    ids = tokenizer.encode(text, add_special_tokens=params.add_special_tokens or False)
    return Call([Prompt(ids, text)], params, single=True, chat=True)


def _read_one(text: object, index: int, count: int, params: SamplingParams, tokenizer: Tokenizer | None) -> Prompt:
    try:
        return _encode(text, params, tokenizer)
    except InvalidRequestError as error:
        if count == 1:
            raise
        raise in_batch(error, index, count) from error


def _encode(text: object, params: SamplingParams, tokenizer: Tokenizer | None) -> Prompt:
    if not isinstance(text, str):
        hint = ""
        if isinstance(text, Mapping):
            hint = "; the messages of a chat go to chat()"
        elif isinstance(text, int | Sequence):
            hint = "; token ids go into prompt_token_ids=..."
        raise InvalidRequestError(f"a prompt must be a string, got {_short(text)}{hint}", field="prompts")
    add = True if params.add_special_tokens is None else params.add_special_tokens
    ids = _needed(tokenizer, "prompts").encode(text, add_special_tokens=add)
    if not ids:
        raise InvalidRequestError(
            "the prompt is empty, and the tokenizer puts no BOS token before it to begin from; give some text",
            field="prompts",
        )
    return Prompt(ids, text)


def _needed(tokenizer: Tokenizer | None, field: str) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequestError("this model was loaded without a tokenizer; give prompt_token_ids", field=field)
    return tokenizer


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


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
