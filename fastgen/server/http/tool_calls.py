"""Tool calls of a chat: what the request allows, and what its answers hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from fastgen.server.http.answers import Delta, FunctionCall, FunctionDelta, Message, ToolCall, ToolCallDelta
from fastgen.server.http.schemas import ChatRequest
from fastgen.server.tools import Delta as Piece
from fastgen.server.tools import Tool, ToolChoice, ToolFormat, ToolStream, read_tool_choice, read_tools
from fastgen.text import Tokenizer
from fastgen.types import Chunk, Completion, SamplingParams

__all__ = ["Tools", "Whole"]


@dataclass(frozen=True, slots=True)
class Whole:
    """A message, and why it ended."""

    message: Message
    reason: Any


class Tools:
    """Of one request."""

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice, format: ToolFormat) -> None:
        self._tools, self._choice, self._format = tools, choice, format

    @classmethod
    def of(cls, body: ChatRequest, tokenizer: Tokenizer | None) -> Tools:
        """
        Raises:
            InvalidRequestError: ``tools`` or ``tool_choice`` is wrong.
        """
        tools = read_tools(body.tools)
        choice = read_tool_choice(body.tool_choice, tools, parallel=body.parallel_tool_calls is not False)
        template = None if tokenizer is None or not tools else tokenizer.template_text(tools=True)
        return cls(tools, choice, ToolFormat.detect(template or ""))

    @property
    def possible(self) -> bool:
        """Whether the answer may call one."""
        return self._choice.mode != "none"

    @property
    def promised(self) -> bool:
        """Whether the answer is a call in any case, and has to be held to that."""
        return self._choice.promised

    def constrain(self, params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
        """Blocks, for long where a call is ``promised``.

        Raises:
            InvalidRequestError: a call was asked for that cannot be promised.
        """
        if not self.possible:
            return params
        return self._format.constrain(params, tools=self._tools, choice=self._choice, tokenizer=tokenizer)

    def whole(self, answer: Completion) -> Whole:
        """A choice taken apart."""
        if not self.possible:
            return Whole(Message(content=answer.text), answer.finish_reason)
        parsed = self._format.parse(answer.text, names=self._choice.names)
        calls = [ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments)) for call in parsed.calls]
        if not calls:
            return Whole(Message(content=parsed.content), answer.finish_reason)
        reason = "tool_calls" if answer.finish_reason == "stop" else answer.finish_reason
        return Whole(Message(content=parsed.content or None, tool_calls=calls), reason)

    def stream(self) -> ToolStream | None:
        """For one choice; ``None`` where no call can come."""
        return self._format.stream(names=self._choice.names) if self.possible else None


def deltas(stream: ToolStream | None, chunk: Chunk) -> Iterator[Delta]:
    """What to tell of a chunk's text."""
    if stream is None:
        if chunk.text:
            yield Delta(content=chunk.text)
        return
    pieces = stream.push(chunk.text)
    if chunk.finish_reason is not None:
        pieces += stream.finish()
    for piece in pieces:
        yield _delta(piece)


def _delta(piece: Piece) -> Delta:
    if piece.index is None:
        return Delta(content=piece.content)
    first = piece.id is not None
    function = FunctionDelta(name=piece.name if first and piece.name else UNSET, arguments=piece.arguments)
    call = ToolCallDelta(
        index=piece.index,
        id=piece.id if piece.id is not None else UNSET,
        type="function" if first else UNSET,
        function=function,
    )
    return Delta(tool_calls=[call])
