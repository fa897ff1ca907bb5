"""Answers of a given form: OpenAI's ``response_format`` and vLLM's ``structured_outputs`` and ``guided_*``, made into
an entry of ``SamplingParams.logits_processors`` for the plugin fastgen-guided.

For a door: ``constrain(params, response_format=..., guided=..., tokenizer=...)``. What cannot be promised is refused,
with ``InvalidRequestError.field`` naming the field at fault; nothing is ever ignored. A schema is tried out here,
before an engine sees it: in a process of the plugin's own with limits on time and memory, so that no request hurts
another. That takes milliseconds, or half a second for a hostile one, and blocks: call it by ``in_thread``. No torch.

The same check stands behind ``check_processors``, for doors whose clients write ``logits_processors`` themselves.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastgen.core.plugin import LogitsProcessorSpec, Registry, registry
from fastgen.core.plugin.describe import describe_error
from fastgen.errors import FastgenError, InvalidRequestError, did_you_mean
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams

__all__ = ["GUIDED_FIELDS", "PROCESSOR", "check_processors", "constrain", "in_thread", "with_processor"]

T = TypeVar("T")

_threads = ThreadPoolExecutor(2, thread_name_prefix="fastgen-schemas")
"""Not those that tokenize: a hostile schema takes its time, and holds up other schemas alone."""

PROCESSOR = "guided"
"""The logits processor that holds answers to a form."""

GUIDED_FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields of a request that ``constrain`` takes as ``guided``."""

_OPTIONS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""The processor's option for each field, and for each entry of ``structured_outputs``."""

_LONGEST = 500  # characters of a reason: a library's may repeat what it was given


async def in_thread(function: Callable[[], T]) -> T:
    """What ``function`` gives, which tries out schemas. What comes to none should not wait here."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function)


def constrain(
    params: SamplingParams,
    *,
    response_format: object = None,
    guided: Mapping[str, object] | None = None,
    tokenizer: Tokenizer | None,
    plugins: Registry | None = None,
) -> SamplingParams:
    """``params``, with a processor that holds the answer to the form asked for, if one is.

    Args:
        response_format: OpenAI's, as it came: ``{"type": "text" | "json_object" | "json_schema", ...}``.
        guided: those of ``GUIDED_FIELDS`` that the request has; ``None`` values count as left out.
        tokenizer: the model's.
        plugins: where to look for the processor. Unset: what is installed.

    Raises:
        InvalidRequestError: several forms at once, one that is not valid or that no answer can be held to, a model
            without a tokenizer, or no plugin to do it (says what to install).
        FastgenError: another: there is no telling, for the server's own trouble; ``OverloadedError`` just now.
    """
    asked: list[tuple[str, dict[str, Any]]] = []  # field, options of the processor
    if response_format is not None and (options := _response_format(response_format)) is not None:
        asked.append(("response_format", options))
    for field, value in (guided or {}).items():
        if value is None:
            continue
        if field not in GUIDED_FIELDS:
            raise InvalidRequestError(f"unknown field {field!r}.{did_you_mean(field, GUIDED_FIELDS)}", field=field)
        if field == "structured_outputs":
            asked.append((field, _structured_outputs(value)))
        else:
            asked.append((field, {_OPTIONS[field]: value}))
    if not asked:
        return params
    if len(asked) > 1:
        raise InvalidRequestError(
            f"{asked[1][0]}: {asked[0][0]} asks for a form of the answer already; give one of them", field=asked[1][0]
        )
    field, options = asked[0]
    return with_processor(params, options, field=field, tokenizer=tokenizer, plugins=plugins)


def with_processor(
    params: SamplingParams,
    options: Mapping[str, Any],
    *,
    field: str,
    tokenizer: Tokenizer | None,
    plugins: Registry | None = None,
) -> SamplingParams:
    """``params`` with the processor and these options of it (see fastgen-guided), checked.

    Args:
        field: the field of the request that is to blame.

    Raises:
        InvalidRequestError, FastgenError: as ``constrain``.
    """
    others = params.logits_processors or {}
    if PROCESSOR in others:
        raise InvalidRequestError(
            f"{field}: logits_processors asks for {PROCESSOR!r} already; give one of them", field=field
        )
    if tokenizer is None:
        raise InvalidRequestError(
            f"{field}: this model was loaded without a tokenizer, so its answers cannot be held to a form", field=field
        )
    if params.ignore_eos:
        raise InvalidRequestError(
            f"{field}: an answer of a given form has to end where it is complete; leave out ignore_eos", field=field
        )
    plugins = plugins if plugins is not None else registry()
    spec = plugins.find_logits_processor(PROCESSOR)
    if spec is None:
        raise InvalidRequestError(_missing(field, plugins), field=field)
    _check(spec, options, field)
    return SamplingParams.of(params, logits_processors={**others, PROCESSOR: dict(options)})


def check_processors(params: SamplingParams, plugins: Registry | None = None) -> None:
    """Refuse logits processors whose options no model can serve, where their plugin can tell without a model. An engine
    refuses the others. Blocks, as ``constrain``.

    Raises:
        InvalidRequestError: says which and why.
        FastgenError: as ``constrain``.
    """
    if not params.logits_processors:
        return
    plugins = plugins if plugins is not None else registry()
    for name, options in params.logits_processors.items():
        spec = plugins.find_logits_processor(name)
        if spec is not None:  # an engine knows which there are, and says so
            _check(spec, options, "logits_processors")


def _check(spec: LogitsProcessorSpec, options: object, field: str) -> None:
    check = spec.load_check()
    if check is None:
        return
    try:
        check(options)
    except (Exception, SystemExit) as error:  # a plugin's code: anything may come
        if isinstance(error, FastgenError) and not isinstance(error, ValueError):
            raise  # nothing is wrong with the options
        reason = str(error) if isinstance(error, ValueError) else describe_error(error)
        raise InvalidRequestError(f"{field}: {_short(reason or type(error).__name__)}", field=field) from error


def _missing(field: str, plugins: Registry) -> str:
    text = f"{field}: this server cannot hold answers to a form; its operator can: pip install fastgen-guided"
    for record in plugins.failures():
        if record.name == PROCESSOR:
            return f"{field}: this server cannot hold answers to a form: its plugin fastgen-guided is broken"
    return text


# ---- what the fields say ---------------------------------------------------------------------------------------------


def _response_format(value: object) -> dict[str, Any] | None:
    """The processor's options; ``None`` for plain text."""
    field = "response_format"
    entries = _entries(value, field, ("type", "json_schema"))
    kind = entries.get("type")
    if kind == "json_schema":
        schema = _entries(
            entries.get("json_schema"), f"{field}.json_schema", ("name", "description", "schema", "strict"), field
        )
        name, strict, description = schema.get("name"), schema.get("strict"), schema.get("description")
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,64}", name, re.ASCII):
            raise _wrong(field, f"json_schema.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -, got {_shown(name)}")
        if strict is not None and not isinstance(strict, bool):
            raise _wrong(field, f"json_schema.strict must be true or false, got {_shown(strict)}")
        if description is not None and not isinstance(description, str):
            raise _wrong(field, f"json_schema.description must be a text, got {_shown(description)}")
        if "schema" not in schema:
            raise _wrong(field, "json_schema.schema is missing; for any JSON object take the type json_object")
        if not isinstance(schema["schema"], dict):
            raise _wrong(field, f"json_schema.schema must be an object, got {_shown(schema['schema'])}")
        return {"json_schema": schema["schema"]}
    if "json_schema" in entries:
        raise _wrong(field, f"json_schema goes with the type json_schema, and this is {_shown(kind)}")
    if kind == "json_object":
        return {"json_object": True}
    if kind == "text":
        return None
    raise _wrong(field, f"type must be 'text', 'json_object' or 'json_schema', got {_shown(kind)}")


def _structured_outputs(value: object) -> dict[str, Any]:
    field = "structured_outputs"
    names = [name for name in _OPTIONS if not name.startswith("guided_")]
    entries = {
        name: entry
        for name, entry in _entries(value, field, (*names, "disable_any_whitespace")).items()
        if entry is not None
    }
    compact = entries.pop("disable_any_whitespace", False)
    if not isinstance(compact, bool):
        raise _wrong(field, f"disable_any_whitespace must be true or false, got {_shown(compact)}")
    if len(entries) != 1:
        raise _wrong(field, f"give one of {', '.join(names)}, got {' and '.join(entries) or 'none'}")
    name, entry = next(iter(entries.items()))
    return {_OPTIONS[name]: entry} | ({"whitespace": False} if compact else {})


def _entries(value: object, what: str, known: Iterable[str], field: str | None = None) -> dict[str, Any]:
    field = field or what
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{what} must be an object, got {_shown(value)}", field=field)
    for name in value:
        if name not in known:
            raise InvalidRequestError(
                f"{what}: unknown entry {_shown(name)}.{did_you_mean(str(name), known)}", field=field
            )
    return dict(value)


def _wrong(field: str, text: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {text}", field=field)


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
