"""From submissions to the frame that an engine process gets, or why there is none."""

from __future__ import annotations

from fastgen.core.loop import Submission
from fastgen.errors import InvalidRequestError
from fastgen.wire.messages import Request, Submit, encode, params_fields

__all__ = ["frame_of", "request_of"]


def request_of(new: Submission) -> Request:
    return Request(new.request_id, new.prompt_token_ids, params_fields(new.params), new.chat)


def frame_of(number: int, requests: list[Request]) -> bytes:
    """
    Raises:
        InvalidRequestError: a value that cannot be sent: a number beyond 64 bits, or a Python object.
    """
    try:
        return encode(Submit(number, requests))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _unsendable(requests, error) from error


def _unsendable(requests: list[Request], error: Exception) -> InvalidRequestError:
    for request in requests:
        for field, value in (("prompt_token_ids", request.prompt_token_ids), *request.params.items()):
            try:
                encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as found:
                return InvalidRequestError(f"{field} holds what cannot be sent to the engine: {found}", field=field)
    return InvalidRequestError(f"the request cannot be sent to the engine: {error}")
