"""Reading an answer that arrives in pieces, as if it were all there.

The parts of a parser are generators: they yield where the text has run out and go on when there is more. So a parser
reads like one of whole texts, and what it does cannot depend on where the pieces were cut.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

__all__ = ["Broken", "Part", "Reader"]

T = TypeVar("T")
Part: TypeAlias = Generator[None, None, T]
"""Yields for more text; returns what it read."""

MAX_DEPTH = 64
"""Levels of nesting in a call's arguments."""
SPACES = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_END = ""  # what a look past the end sees


class Broken(Exception):
    """What was to be read is not there."""


class Reader:
    """Characters that have come and are not read yet, and those read since ``mark``."""

    def __init__(self) -> None:
        self._coming: deque[str] = deque()
        self._read: list[str] = []
        self._ended = False

    def feed(self, text: str) -> None:
        self._coming.extend(text)

    def end(self) -> None:
        """No more comes."""
        self._ended = True

    def mark(self) -> None:
        """What was read so far is settled."""
        self._read.clear()

    def back(self) -> str:
        """Unread all since the mark; returns it."""
        text = "".join(self._read)
        self.unread(len(self._read))
        return text

    def unread(self, count: int) -> None:
        """Give the last ``count`` characters back."""
        for _ in range(count):
            self._coming.appendleft(self._read.pop())

    def run(self, stops: frozenset[str]) -> str:
        """What has come up to the first of ``stops``, read and settled."""
        run: list[str] = []
        while self._coming and self._coming[0] not in stops:
            run.append(self._coming.popleft())
        return "".join(run)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def peek(self) -> Part[str]:
        """The next character, left where it is; empty at the end."""
        while not self._coming:
            if self._ended:
                return _END
            yield
        return self._coming[0]

    def take(self) -> Part[str]:
        """The next character; empty at the end."""
        character = yield from self.peek()
        if character:
            self._read.append(self._coming.popleft())
        return character

    def spaces(self) -> Part[None]:
        while (character := (yield from self.peek())) and character in SPACES:
            yield from self.take()

    def optional(self, text: str) -> Part[bool]:
        """Read ``text`` if it comes next, else nothing."""
        for count, expected in enumerate(text):
            if (yield from self.peek()) != expected:
                self.unread(count)
                return False
            yield from self.take()
        return True

    def expect(self, text: str) -> Part[None]:
        if not (yield from self.optional(text)):
            raise Broken

    def matching(self, pattern: re.Pattern[str], most: int) -> Part[str]:
        """The longest run of characters that each match ``pattern``."""
        run: list[str] = []
        while (character := (yield from self.peek())) and pattern.fullmatch(character):
            if len(run) == most:
                raise Broken
            run.append((yield from self.take()))
        return "".join(run)

    def until(self, text: str, most: int) -> Part[str]:
        """Everything before ``text``, which is read too."""
        run: list[str] = []
        while not (yield from self.optional(text)):
            character = yield from self.take()
            if not character or len(run) == most:
                raise Broken
            run.append(character)
        return "".join(run)

    # ---- JSON ------------------------------------------------------------------------------------------------------

    def json_text(self) -> Part[str]:
        """One JSON value, as it is written."""
        text: list[str] = []
        yield from self.json(text.append)
        return "".join(text)

    def json_string(self) -> Part[str]:
        """What a JSON string says."""
        text: list[str] = []
        yield from self._string(text.append)
        return str(json.loads("".join(text)))

    def json(self, out: Callable[[str], object], depth: int = 0) -> Part[None]:
        """One JSON value, handed to ``out`` as it comes."""
        if depth > MAX_DEPTH:
            raise Broken
        first = yield from self.peek()
        if first == "{":
            yield from self._items(out, "{", "}", depth)
        elif first == "[":
            yield from self._items(out, "[", "]", depth)
        elif first == '"':
            yield from self._string(out)
        elif first in _WORDS:
            for expected in _WORDS[first]:
                yield from self._one(out, expected)
        else:
            yield from self._number(out)

    def _items(self, out: Callable[[str], object], opening: str, closing: str, depth: int) -> Part[None]:
        yield from self._one(out, opening)
        yield from self._gap(out)
        if (yield from self.peek()) == closing:
            yield from self._one(out, closing)
            return
        while True:
            if closing == "}":
                yield from self._string(out)
                yield from self._gap(out)
                yield from self._one(out, ":")
                yield from self._gap(out)
            yield from self.json(out, depth + 1)
            yield from self._gap(out)
            if (yield from self.peek()) == closing:
                yield from self._one(out, closing)
                return
            yield from self._one(out, ",")
            yield from self._gap(out)

    def _string(self, out: Callable[[str], object]) -> Part[None]:
        yield from self._one(out, '"')
        while True:
            character = yield from self.peek()
            if not character or character < " ":
                raise Broken
            yield from self._one(out, character)
            if character == '"':
                return
            if character == "\\":
                escape = yield from self._among(out, '"\\/bfnrtu')
                for _ in range(4 if escape == "u" else 0):
                    yield from self._among(out, "0123456789abcdefABCDEF")

    def _number(self, out: Callable[[str], object]) -> Part[None]:
        text = ""
        while (character := (yield from self.peek())) and character in "+-.0123456789eE" and len(text) < 400:
            yield from self._one(out, character)
            text += character
        if not _NUMBER.fullmatch(text):
            raise Broken

    def _gap(self, out: Callable[[str], object]) -> Part[None]:
        while (character := (yield from self.peek())) and character in SPACES:
            yield from self._one(out, character)

    def _among(self, out: Callable[[str], object], characters: str) -> Part[str]:
        character = yield from self.peek()
        if not character or character not in characters:
            raise Broken
        yield from self._one(out, character)
        return character

    def _one(self, out: Callable[[str], object], expected: str) -> Part[None]:
        if (yield from self.peek()) != expected:
            raise Broken
        out((yield from self.take()))
