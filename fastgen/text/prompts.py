"""What callers may hand in as prompts, checked as far as that goes without a tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from fastgen.errors import InvalidRequestError
from fastgen.types import SamplingParams

__all__ = ["check_text", "one_of_two", "read_id_lists", "read_params", "read_texts"]


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


def one_of_two(prompts: object, prompt_token_ids: object) -> None:
    """
    Raises:
        InvalidRequestError: neither or both are given.
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise InvalidRequestError("give prompts (text) or prompt_token_ids, one of the two", field="prompts")


def read_texts(prompts: object) -> tuple[Sequence[object], bool]:
    """One prompt or several as a sequence, each still to be checked by ``check_text``; and whether it was one.

    Raises:
        InvalidRequestError: it is no text and no sequence.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a string or a list of strings, got {_short(prompts)}", field="prompts"
        )
    return prompts, False


def check_text(prompt: object) -> str:
    """
    Raises:
        InvalidRequestError: it is no text; says where what it is belongs.
    """
    if isinstance(prompt, str):
        return prompt
    hint = ""
    if isinstance(prompt, Mapping):
        hint = "; the messages of a chat go to chat()"
    elif isinstance(prompt, int | Sequence):
        hint = "; token ids go into prompt_token_ids=..."
    raise InvalidRequestError(f"a prompt must be a string, got {_short(prompt)}{hint}", field="prompts")


def read_id_lists(value: object) -> tuple[list[list[int]], bool]:
    """Lists of ids from one list of ids or several (or tensors or arrays of them), and whether it was one.

    Raises:
        InvalidRequestError: it is nothing of the kind, or holds no id.
    """
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
