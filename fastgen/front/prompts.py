"""What callers may hand in as prompts, made into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.core.loop import in_batch
from fastgen.errors import InvalidRequestError
from fastgen.text import Tokenizer
from fastgen.text.prompts import check_text, one_of_two, read_id_lists, read_params, read_texts
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


def completion_call(
    prompts: object, prompt_token_ids: object, params: SamplingParams, tokenizer: Tokenizer | None
) -> Call:
    """Prompts as text or as ids.

    Raises:
        InvalidRequestError: neither or both are given, or one is no prompt, says which; ids with
            ``add_special_tokens``.
    """
    one_of_two(prompts, prompt_token_ids)
    if prompt_token_ids is not None:
        if params.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens: prompt_token_ids are taken as they are; put the special tokens among them, or "
                "give the prompt as text",
                field="add_special_tokens",
            )
        lists, single = read_id_lists(prompt_token_ids)
        return Call([Prompt(ids) for ids in lists], params, single)
    texts, single = read_texts(prompts)
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
    text = check_text(text)
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
