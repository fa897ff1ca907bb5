"""What every notation shares: finding calls in a text, and telling of them in OpenAI's words."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fastgen.errors import ConfigError, did_you_mean
from fastgen.server.tools.reader import SPACES, Broken, Part, Reader

if TYPE_CHECKING:
    from fastgen.server.tools.choice import Tool, ToolChoice
    from fastgen.text import Tokenizer
    from fastgen.types import SamplingParams

__all__ = ["Delta", "Parsed", "ToolCall", "ToolFormat", "ToolStream"]

MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model wants called. ``arguments`` is JSON text: an object."""

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer taken apart."""

    content: str
    """Empty where there is none."""
    calls: tuple[ToolCall, ...]

    def as_openai(self) -> dict[str, Any]:
        """The message: ``content`` is null where there are calls alone."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message


@dataclass(slots=True)
class Delta:
    """A piece of an answer: of its content, or of the call with this ``index``. A call's first piece has its id and
    name, the pieces of its arguments add up."""

    content: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def as_openai(self) -> dict[str, Any]:
        if self.index is None:
            return {"content": self.content}
        call: dict[str, Any] = {"index": self.index}
        function: dict[str, Any] = {"arguments": self.arguments}
        if self.id is not None:
            call |= {"id": self.id, "type": "function"}
            function = {"name": self.name, "arguments": self.arguments}
        return {"tool_calls": [call | {"function": function}]}


class ToolFormat(ABC):
    """A notation for tool calls."""

    name: ClassVar[str]
    opens: ClassVar[tuple[str, ...]]
    """What a call may begin with."""
    opens_answer: ClassVar[tuple[str, ...]] = ()
    """What a call may begin with at the beginning of the answer alone."""
    markers: ClassVar[tuple[str, ...]] = ()
    """What has to be seen in the text, and may be special tokens."""
    id_length: ClassVar[int] = 0
    """Letters and digits in a call's id, if its template counts them; 0: as OpenAI's."""

    @staticmethod
    def detect(template: str) -> ToolFormat:
        """The notation that a chat template teaches, by its markers; Hermes' where there are none, which is the most
        common."""
        from fastgen.server.tools.formats import detect

        return detect(template)

    @staticmethod
    def named(name: str) -> ToolFormat:
        """
        Raises:
            ConfigError: there is none of this name.
        """
        from fastgen.server.tools.formats import FORMATS

        if name not in FORMATS:
            known = ", ".join(FORMATS)
            raise ConfigError(f"unknown tool format {name!r} (known: {known}).{did_you_mean(name, FORMATS)}")
        return FORMATS[name]

    def parse(self, text: str, *, names: Collection[str] | None = None) -> Parsed:
        """A whole answer. ``names``: functions there are; a call of another stays content. Unset: all are taken."""
        stream = ToolStream(self, names=names, whole=True)
        deltas = [*stream.push(text), *stream.finish()]
        calls = [
            ToolCall(delta.id, delta.name, delta.arguments) for delta in deltas if delta.id is not None and delta.name
        ]
        return Parsed("".join(delta.content for delta in deltas), tuple(calls))

    def stream(self, *, names: Collection[str] | None = None) -> ToolStream:
        """For an answer that comes in pieces. ``names``: as ``parse``."""
        return ToolStream(self, names=names)

    def constrain(
        self, params: SamplingParams, *, tools: Sequence[Tool], choice: ToolChoice, tokenizer: Tokenizer | None
    ) -> SamplingParams:
        """``params`` for an answer that may, or has to, call a tool. Blocks, as ``structured.constrain``.

        Raises:
            InvalidRequestError: a call was asked for that cannot be promised: by ``field`` ``tool_choice``.
        """
        from fastgen.server.tools.choice import constrain

        return constrain(self, params, tools=tools, choice=choice, tokenizer=tokenizer)

    def new_id(self) -> str:
        """A name for a call."""
        alphabet = string.ascii_letters + string.digits
        letters = "".join(secrets.choice(alphabet) for _ in range(self.id_length or 24))
        return letters if self.id_length else f"call_{letters}"

    @abstractmethod
    def read(self, opening: str, reader: Reader, calls: Calls) -> Part[None]:
        """Read one call or several, after ``opening`` of ``opens`` or ``opens_answer``, which stands before the reader.

        Raises:
            Broken: what comes is none. What was read since the last call's end is content then.
        """

    def frame(self, calls: list[tuple[str, Any]], most: int, marker: Any) -> Any:
        """A structure for the guided processor (see fastgen-guided): 1 to ``most`` of these calls.

        Args:
            calls: name and JSON schema of the arguments of each function that may be called.
            marker: makes the node of a marker's text.

        Returns:
            ``None`` where arguments are not JSON in this notation, and no schema can hold them.
        """
        return None


@dataclass
class Calls:
    """Where a format tells of calls. The parts of one come in order: ``begin``, ``arguments``, ``end``."""

    stream: ToolStream
    _name: str = ""
    _arguments: list[str] = field(default_factory=list)
    open: bool = False

    def begin(self, name: str) -> None:
        """
        Raises:
            Broken: no name, or of no function there is.
        """
        names = self.stream.names
        if not name or len(name) > MAX_NAME or not name.isprintable() or (names is not None and name not in names):
            raise Broken
        self._name, self._arguments, self.open = name, [], True
        if not self.stream.whole:
            self.stream.emit_call(name)

    def arguments(self, text: str) -> None:
        if self.stream.whole:
            self._arguments.append(text)
        else:
            self.stream.emit_arguments(text)

    def end(self) -> None:
        """The call is complete."""
        if self.stream.whole:
            self.stream.emit_call(self._name)
            self.stream.emit_arguments("".join(self._arguments))
        self.stream.count += 1
        self.open = False


class ToolStream:
    """Takes one answer apart while it comes. ``whole``: a call is told of when it is complete, not before."""

    def __init__(self, format: ToolFormat, *, names: Collection[str] | None = None, whole: bool = False) -> None:
        self.format = format
        self.names = names
        self.whole = whole
        self.count = 0
        """Calls that are complete."""
        self.called = False
        """Whether a call was told of, be it complete or not."""
        self.broken = False
        """Whether a call that was told of turned out to be none, too late."""
        self._reader = Reader()
        self._deltas: list[Delta] = []
        self._held = ""  # white space that is content only if no call comes next to it
        self._begun = False  # something but white space has come
        self._just_called = False
        self._machine = self._run()
        next(self._machine)

    def push(self, text: str) -> list[Delta]:
        """What is certain now."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Delta]:
        """What was still held back: the answer is over."""
        self._reader.end()
        return self._advance()

    def emit_call(self, name: str) -> None:
        self._settle()
        self.called = True
        self._deltas.append(Delta(index=self.count, id=self.format.new_id(), name=name))

    def emit_arguments(self, text: str) -> None:
        self._settle()
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.index == self.count:
            last.arguments += text
        else:
            self._deltas.append(Delta(index=self.count, arguments=text))

    def _settle(self) -> None:
        """What was read is a call's, and so is the white space before it."""
        self._reader.mark()
        self._held = ""

    def _emit_content(self, text: str) -> None:
        if self._deltas and self._deltas[-1].index is None:
            self._deltas[-1].content += text
        else:
            self._deltas.append(Delta(text))

    def _advance(self) -> list[Delta]:
        next(self._machine, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _run(self) -> Part[None]:
        while (opening := (yield from self._content())) is not None:
            calls = Calls(self)
            before = self.count
            try:
                yield from self.format.read(opening, self._reader, calls)
            except Broken:
                self.broken |= not self.whole and calls.open
                self._reader.back()
            told = self.count > before or (calls.open and not self.whole)
            if not told:
                yield from self._plain()  # the opening's first character, or it would be found again
            self._reader.mark()
            self._just_called = self.count > before and not calls.open
        if self._held:
            self._emit_content(self._held)

    def _content(self) -> Part[str | None]:
        """Pass text on as content up to what may begin a call; ``None`` at the end."""
        reader = self._reader
        stops = frozenset(opening[0] for opening in (*self.format.opens, *self.format.opens_answer)) | set(SPACES)
        while True:
            if self._begun and not self._held and (run := reader.run(stops)):  # most text by far
                self._emit_content(run)
                self._just_called = False
            character = yield from reader.peek()
            if not character:
                return None
            reader.mark()
            openings = self.format.opens if self._begun else (*self.format.opens, *self.format.opens_answer)
            for opening in openings:
                if (yield from reader.optional(opening)):
                    return opening
            yield from self._plain()

    def _plain(self) -> Part[None]:
        """One character of content."""
        character = yield from self._reader.take()
        if character in SPACES:
            if not self._just_called:
                self._held += character
        else:
            self._emit_content(self._held + character)
            self._held, self._begun, self._just_called = "", True, False
        self._reader.mark()
