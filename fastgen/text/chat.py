"""Chat messages to the text a model was trained on, through transformers' own sandboxed Jinja environment."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastgen.errors import InvalidRequestError, did_you_mean
from fastgen.types import Message

__all__ = ["check_messages", "render"]

TEMPLATE_SECONDS = 10.0
"""A template that runs longer than this is stopped. Real ones take about a millisecond."""

# Arguments of transformers' apply_chat_template that are not the caller's to set.
_NOT_VARIABLES = frozenset(
    {"conversation", "messages", "chat_template", "tokenize", "padding", "truncation", "max_length"}
)
_NOT_VARIABLES |= {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
_NOT_VARIABLES |= {"sanitize_control_tokens"}


def check_messages(messages: object) -> list[dict[str, Any]]:
    """The messages as a new list of dicts; what they hold besides a role is the template's business.

    Raises:
        InvalidRequestError: not a non-empty list of dicts, each with a role.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _refused(f"must be a list of dicts like {{'role': 'user', 'content': '...'}}, got {_short(messages)}")
    if not messages:
        raise _refused("is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _refused(f"[{index}] must be a dict with 'role' and 'content', got {_short(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _refused(f"[{index}] needs a 'role' such as 'user' or 'assistant', got {_short(message)}")
        content = message.get("content")
        if content is not None and (isinstance(content, bytes) or not isinstance(content, str | Sequence)):
            raise _refused(f"[{index}]['content'] must be a string, a list of parts or None, got {_short(content)}")
    return [dict(message) for message in messages]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    seconds: float = TEMPLATE_SECONDS,
) -> str:
    """The prompt text for ``messages``; see ``Tokenizer.render_chat``.

    A loop in a template is stopped after ``seconds``, between two Python instructions: one huge operation in C, such as
    a power with a million digits, is beyond reach. A template comes with the model: trust it as far as the model.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt opens a new message, continue_final_message goes on with the last one: choose one",
            field="continue_final_message",
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    checked = check_messages(messages)
    _check_template(tokenizer.chat_template, template)
    for name in variables or ():
        if name in _NOT_VARIABLES:
            raise InvalidRequestError(f"{name!r} cannot be a template variable, it has another meaning", field=name)
    try:
        with _time_limit(seconds):
            text: str = tokenizer.apply_chat_template(
                checked,
                tools=list(tools) if tools is not None else None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(variables or {}),
            )
    except _TemplateTimeout:
        raise InvalidRequestError(
            f"the chat template ran longer than {seconds:g} s and was stopped", field="messages"
        ) from None
    except Exception as error:  # a template may raise anything; all of it is about what it was given
        words = str(error).strip() or type(error).__name__
        raise InvalidRequestError(f"the chat template refused the messages: {words}", field="messages") from error
    return text


def _check_template(own: object, template: str | None) -> None:
    names = list(own) if isinstance(own, Mapping) else []
    if template is None:
        if not own:
            raise InvalidRequestError(
                "this model's tokenizer has no chat template. Give one (template=..., Jinja text), or write the prompt"
                " yourself and complete it as plain text",
                field="messages",
            )
    elif not isinstance(template, str) or (template not in names and "{" not in template):
        known = f"The model has {', '.join(map(repr, names))}" if names else "The model has no named templates"
        hint = did_you_mean(template, names) if isinstance(template, str) else ""
        raise InvalidRequestError(
            f"template {_short(template)} is neither Jinja text nor a template's name. {known}.{hint}", field="template"
        )


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"messages{'' if what.startswith('[') else ' '}{what}", field="messages")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class _TemplateTimeout(BaseException):
    """Not an ``Exception``: nothing on the way swallows it."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises ``_TemplateTimeout`` in this thread if the block, which must be pure Python, takes too long."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    running, expired, struck = True, False, False

    def expire() -> None:
        nonlocal expired
        with lock:
            if running:
                expired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TemplateTimeout))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except _TemplateTimeout:
        struck = True
        raise
    finally:
        timer.cancel()
        with lock:
            running = False
        # If it expired just now and has not struck yet, it strikes here and not in what follows. (Taken back, it would
        # make CPython 3.11 look for it at every call in the process from then on, and hang under a profiler.)
        for _ in range(100 if expired and not struck else 0):
            pass
