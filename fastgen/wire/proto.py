"""Between fastgen's own types and the messages of ``fastgen.proto``, both ways.

What has a fixed shape is carried whole: ``response(response_message(r)) == r``. Numbers are 64 bits wide; ``-inf`` is a
double like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from fastgen.errors import InvalidRequestError
from fastgen.types import Chunk, Completion, FinishReason, Response, SamplingParams, TokenLogprob, Usage
from fastgen.wire.info import ModelInfo
from fastgen.wire.pb import fastgen_pb2 as pb
from fastgen.wire.requests import (
    ChatPrompt,
    GenerateRequest,
    PromptLogprobs,
    StreamEvent,
    StreamStart,
    json_text,
    json_value,
)

__all__ = [
    "SERVICE",
    "event",
    "event_message",
    "model_info",
    "model_info_message",
    "params",
    "params_message",
    "parse_request",
    "request_message",
    "response",
    "response_message",
]

SERVICE: str = pb.DESCRIPTOR.services_by_name["Fastgen"].full_name
"""The service's full name, the first part of its methods' paths."""

_JSON = frozenset({"logits_processors"})
_REPEATED = frozenset({"stop", "stop_token_ids"})
_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}
_REASON_NAMES = {number: name for name, number in _REASONS.items()}

# ---- sampling parameters -------------------------------------------------------------------------------------------


def params_message(given: SamplingParams) -> pb.SamplingParams:
    """The fields that were set.

    Raises:
        InvalidRequestError: a value no message can carry: a number of more than 64 bits, text that is no valid
            Unicode, options of a logits processor that JSON has no form for.
    """
    message = pb.SamplingParams()
    for name in sorted(given.model_fields_set):
        value = getattr(given, name)
        if value is None:
            continue
        try:
            if name == "logit_bias":
                message.logit_bias.update(value)
            elif name in _REPEATED:
                getattr(message, name).extend(value)
            else:
                setattr(message, name, json_text(value, name) if name in _JSON else value)
        except InvalidRequestError:
            raise
        except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
            raise InvalidRequestError(f"{name} cannot be sent: {error}", field=name) from None
    return message


def params(message: pb.SamplingParams) -> SamplingParams:
    """
    Raises:
        InvalidRequestError: as ``SamplingParams``, or one of the texts is no JSON.
    """
    fields: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name == "logit_bias":
            fields[name] = dict(value)
        elif name in _REPEATED:
            fields[name] = tuple(value)
        else:
            fields[name] = json_value(value, name, dict) if name in _JSON else value
    return SamplingParams(**fields)


# ---- requests ------------------------------------------------------------------------------------------------------


def request_message(request: GenerateRequest) -> pb.GenerateRequest:
    """
    Raises:
        InvalidRequestError: something in it no message can carry; names the field.
    """
    message = pb.GenerateRequest(params=params_message(request.params))
    field = "model"
    try:
        message.model = request.model or ""
        prompt = request.prompt
        if isinstance(prompt, str):
            field = "prompt"
            message.text = prompt
        elif isinstance(prompt, ChatPrompt):
            field = "messages"
            message.chat.CopyFrom(_chat_message(prompt))
        else:
            field = "prompt_token_ids"
            message.token_ids.ids.extend(prompt)
            message.token_ids.SetInParent()
    except InvalidRequestError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{field} cannot be sent: {error}", field=field) from None
    return message


def parse_request(data: bytes) -> GenerateRequest:
    """A serialized ``GenerateRequest``.

    Raises:
        InvalidRequestError: it is none, has fields that are not known here, or values that cannot be used; names the
            field.
    """
    message = pb.GenerateRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:  # invalid UTF-8, too
        raise InvalidRequestError("the request is not a valid fastgen.v1.GenerateRequest message") from None
    _refuse_unknown(message)
    return GenerateRequest(_prompt(message), params(message.params), message.model or None)


def _prompt(message: pb.GenerateRequest) -> str | list[int] | ChatPrompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case "chat":
            return _chat(message.chat)
        case _:
            raise InvalidRequestError("the request has no prompt; set text, token_ids or chat", field="prompt")


def _chat_message(chat: ChatPrompt) -> pb.Chat:
    message = pb.Chat(messages=json_text(chat.messages, "messages"), continue_final_message=chat.continue_final_message)
    if chat.tools is not None:
        message.tools = json_text(chat.tools, "tools")
    if chat.template is not None:
        message.template = chat.template
    if chat.template_variables is not None:
        message.template_variables = json_text(chat.template_variables, "template_variables")
    if chat.add_generation_prompt is not None:
        message.add_generation_prompt = chat.add_generation_prompt
    return message


def _chat(message: pb.Chat) -> ChatPrompt:
    variables = json_value(message.template_variables or "{}", "template_variables", dict)
    return ChatPrompt(
        messages=json_value(message.messages, "messages", list),
        tools=json_value(message.tools, "tools", list) if message.HasField("tools") else None,
        template=message.template if message.HasField("template") else None,
        template_variables=variables if message.HasField("template_variables") else None,
        add_generation_prompt=message.add_generation_prompt if message.HasField("add_generation_prompt") else None,
        continue_final_message=message.continue_final_message,
    )


def _refuse_unknown(message: Message) -> None:
    """An option this server is too old for must not be ignored."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        name = message.DESCRIPTOR.name
        raise InvalidRequestError(
            f"{name} has a field of number {unknown[0].field_number}, which this server does not know; its fastgen may "
            f"be older than the client's",
            field=name,
        )
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None and not descriptor.message_type.GetOptions().map_entry:
            for part in [value] if isinstance(value, Message) else value:
                _refuse_unknown(part)


# ---- answers -------------------------------------------------------------------------------------------------------


def response_message(answer: Response) -> pb.Response:
    return pb.Response(
        request_id=answer.request_id,
        prompt_token_ids=answer.prompt_token_ids,
        choices=[_completion_message(choice) for choice in answer.choices],
        usage=_usage_message(answer.usage),
        prompt=answer.prompt,
        prompt_logprobs=_prompt_logprobs_message(answer.prompt_logprobs),
    )


def response(message: pb.Response) -> Response:
    return Response(
        request_id=message.request_id,
        prompt_token_ids=list(message.prompt_token_ids),
        choices=[_completion(choice) for choice in message.choices],
        usage=_usage(message.usage),
        prompt=message.prompt if message.HasField("prompt") else None,
        prompt_logprobs=_prompt_logprobs(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None,
    )


def event_message(one: StreamEvent) -> pb.StreamEvent:
    if isinstance(one, Chunk):
        return pb.StreamEvent(chunk=_chunk_message(one))
    if isinstance(one, PromptLogprobs):
        return pb.StreamEvent(prompt_logprobs=_prompt_logprobs_message(one.prompt_logprobs))
    prompt = pb.Prompt(
        request_id=one.request_id,
        token_ids=one.prompt_token_ids,
        text=one.prompt,
        n=one.n,
    )
    return pb.StreamEvent(prompt=prompt)


def event(message: pb.StreamEvent) -> StreamEvent:
    if message.HasField("chunk"):
        return _chunk(message.chunk)
    if message.HasField("prompt_logprobs"):
        return PromptLogprobs(_prompt_logprobs(message.prompt_logprobs))
    start = message.prompt
    return StreamStart(
        request_id=start.request_id,
        prompt_token_ids=list(start.token_ids),
        prompt=start.text if start.HasField("text") else None,
        n=start.n,
    )


def model_info_message(info: ModelInfo) -> pb.ModelInfoResponse:
    return pb.ModelInfoResponse(**{name: getattr(info, name) for name in ModelInfo.__dataclass_fields__})


def model_info(message: pb.ModelInfoResponse) -> ModelInfo:
    fields = {name: getattr(message, name) for name in ModelInfo.__dataclass_fields__}
    fields["loras"] = tuple(message.loras)
    fields["quantization"] = message.quantization if message.HasField("quantization") else None
    return ModelInfo(**fields)


def _completion_message(choice: Completion) -> pb.Completion:
    return pb.Completion(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        finish_reason=_REASONS[choice.finish_reason],
        stop_string=choice.stop if isinstance(choice.stop, str) else None,
        stop_token_id=choice.stop if isinstance(choice.stop, int) else None,
        logprobs=_logprobs_message(choice.logprobs),
        error=_clean(choice.error),
    )


def _completion(message: pb.Completion) -> Completion:
    return Completion(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        finish_reason=_REASON_NAMES[message.finish_reason],
        stop=_stop(message),
        logprobs=_logprobs(message.logprobs.entries) if message.HasField("logprobs") else None,
        error=message.error if message.HasField("error") else None,
    )


def _chunk_message(chunk: Chunk) -> pb.Chunk:
    return pb.Chunk(
        request_id=chunk.request_id,
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=_logprobs_message(chunk.logprobs),
        finish_reason=None if chunk.finish_reason is None else _REASONS[chunk.finish_reason],
        stop_string=chunk.stop if isinstance(chunk.stop, str) else None,
        stop_token_id=chunk.stop if isinstance(chunk.stop, int) else None,
        error=_clean(chunk.error),
        usage=None if chunk.usage is None else _usage_message(chunk.usage),
    )


def _chunk(message: pb.Chunk) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        logprobs=_logprobs(message.logprobs.entries) if message.HasField("logprobs") else None,
        finish_reason=_REASON_NAMES.get(message.finish_reason),
        stop=_stop(message),
        error=message.error if message.HasField("error") else None,
        usage=_usage(message.usage) if message.HasField("usage") else None,
    )


def _stop(message: pb.Completion | pb.Chunk) -> str | int | None:
    match message.WhichOneof("stop"):
        case "stop_string":
            return message.stop_string
        case "stop_token_id":
            return message.stop_token_id
        case _:
            return None


def _usage_message(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _usage(message: pb.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def _logprobs_message(entries: Sequence[TokenLogprob] | None) -> pb.TokenLogprobs | None:
    return None if entries is None else pb.TokenLogprobs(entries=[_logprob_message(entry) for entry in entries])


def _prompt_logprobs_message(entries: Sequence[TokenLogprob | None] | None) -> pb.PromptLogprobs | None:
    if entries is None:
        return None
    return pb.PromptLogprobs(
        entries=[pb.PromptLogprob(value=None if entry is None else _logprob_message(entry)) for entry in entries]
    )


def _logprob_message(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        token=entry.token,
        top=[_logprob_message(other) for other in entry.top],
    )


def _logprobs(entries: Iterable[pb.TokenLogprob]) -> list[TokenLogprob]:
    return [_logprob(entry) for entry in entries]


def _prompt_logprobs(message: pb.PromptLogprobs) -> list[TokenLogprob | None]:
    return [_logprob(entry.value) if entry.HasField("value") else None for entry in message.entries]


def _logprob(entry: pb.TokenLogprob) -> TokenLogprob:
    top = tuple(_logprob(other) for other in entry.top)
    return TokenLogprob(entry.token_id, entry.logprob, entry.rank, entry.token, top)


def _clean(text: str | None) -> str | None:
    """A plugin's error may say anything; a message carries Unicode only."""
    return None if text is None else text.encode("utf-8", "replace").decode()
