"""Decoding token by token: the decoders of the ``tokenizers`` library, rewritten so that they need no second look.

A fast tokenizer turns tokens (strings from its vocabulary) into text by a chain of decoder steps, each defined over the
whole list of tokens. Here each step is a ``Stage`` that takes one token at a time and keeps only what it must. What the
stages give out, joined, is what the library gives for the whole list, with one exception, see ``ByteFallback``.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

__all__ = ["Chain", "Decoder", "IdFilter", "Window", "chain_factory"]

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4


class Decoder(Protocol):
    """Turns token ids into text, one at a time."""

    def push(self, token: int, /) -> str:
        """The text that is certain now."""

    def flush(self) -> str:
        """What is still held; the end."""


class Stage:
    """One step of a chain, from strings to strings; an empty string is nothing."""

    def push(self, token: str) -> str:
        raise NotImplementedError

    def raw(self, token: str) -> str | bytes:
        """What one token stands for in the middle of a text; bytes, where they need not be whole characters."""
        return self.push(token)

    def flush(self) -> str:
        """What is held back at the end."""
        return ""

    def begin(self) -> None:
        """Treat what comes as the middle of a text, not its start."""

    def settled(self) -> bool:
        """Whether the next token's text depends on nothing that came before: none is held, and the start is past."""
        return True


@cache
def byte_of_character() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for (GPT-2's ``bytes_to_unicode``, reversed)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class ByteLevel(Stage):
    """Byte-level BPE: characters stand for bytes, and the bytes are UTF-8. An ill-formed part becomes one U+FFFD per
    maximal subpart (the Unicode standard's practice, which Python's decoder and Rust's ``from_utf8_lossy`` share); at
    most three bytes are held, and only while they can still become a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._table = byte_of_character()

    def push(self, token: str) -> str:
        return self._decoder.decode(self.raw(token))

    def raw(self, token: str) -> bytes:
        try:
            return bytes([self._table[character] for character in token])
        except KeyError:  # an added token, written in plain text
            return token.encode("utf-8")

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def settled(self) -> bool:
        return not self._decoder.getstate()[0]


class ByteFallback(Stage):
    """Sentencepiece's ``<0xE4>`` tokens: each is one byte of UTF-8; an ill-formed byte becomes one U+FFFD.

    The library decodes each run of such tokens as a whole and replaces all of it if any byte is ill-formed. A stream
    cannot wait for the end of a run (a newline is such a token in Llama 2), so characters that are complete go out, and
    stay: a run that mixes whole characters with ill-formed bytes keeps its characters here.
    """

    def __init__(self) -> None:
        self._held = b""

    def push(self, token: str) -> str:
        byte = self._byte(token)
        if byte is None:
            return self.flush() + token
        self._held += bytes([byte])
        out = ""
        while self._held:
            try:
                out += self._held.decode("utf-8")
                self._held = b""
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                out += REPLACEMENT * error.end  # the ill-formed part is at the start: what went before has gone out
                self._held = self._held[error.end :]
        return out

    def raw(self, token: str) -> str | bytes:
        byte = self._byte(token)
        return token if byte is None else bytes([byte])

    def flush(self) -> str:
        held, self._held = self._held, b""
        return REPLACEMENT * len(held)

    def settled(self) -> bool:
        return not self._held

    @staticmethod
    def _byte(token: str) -> int | None:
        if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
            return None
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None


class Replace(Stage):
    """Each occurrence of a string inside a token becomes another."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def push(self, token: str) -> str:
        return token.replace(self._pattern, self._content)


class StripStart(Stage):
    """Drops up to ``count`` leading characters ``content`` from the whole text."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._left = content, count

    def push(self, token: str) -> str:
        while self._left and token:
            if token[0] != self._content:
                self._left = 0
            else:
                token = token[1:]
                self._left -= 1
        return token

    def begin(self) -> None:
        self._left = 0

    def settled(self) -> bool:
        return not self._left


class Metaspace(Stage):
    """Sentencepiece's ``▁`` is a space, but not in the first token, where the encoder put it in."""

    def __init__(self, replacement: str, *, strip_first: bool) -> None:
        self._replacement, self._strip = replacement, strip_first

    def push(self, token: str) -> str:
        text = token.replace(self._replacement, "" if self._strip else " ")
        self._strip = False
        return text

    def begin(self) -> None:
        self._strip = False

    def settled(self) -> bool:
        return not self._strip


class JoinWithSpaces(Stage):
    """What the library does where a tokenizer has no decoder."""

    def __init__(self) -> None:
        self._first = True

    def push(self, token: str) -> str:
        text = token if self._first else f" {token}"
        self._first = False
        return text

    def begin(self) -> None:
        self._first = False

    def settled(self) -> bool:
        return not self._first


class Chain:
    """Stages in a row, from token strings to text."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    def push(self, token: str) -> str:
        for stage in self._stages:
            token = stage.push(token)
        return token

    def raw(self, token: str) -> bytes:
        """The bytes of one token in the middle of a text. For a chain that has begun and holds nothing."""
        for stage in self._stages:
            result = stage.raw(token)
            if isinstance(result, bytes):  # the stages after it look at the start of the text alone
                return result
            token = result
        return token.encode("utf-8")

    def flush(self) -> str:
        text = ""
        for stage in self._stages:
            text = stage.push(text) + stage.flush() if text else stage.flush()
        return text

    def begin(self) -> None:
        """Treat what comes as the middle of a text, not its start."""
        for stage in self._stages:
            stage.begin()

    def settled(self) -> bool:
        """Whether the next token's text depends on nothing that came before."""
        return all(stage.settled() for stage in self._stages)


class Window:
    """Decodes through a black box, for tokenizers whose rules are not known here (those in plain Python).

    The last piece and the tokens since are decoded, with and without the new ones; the difference is the new text.
    Text that ends in U+FFFD may be half a character and is held, for at most the four tokens a character can take.
    Exact where text is well-formed UTF-8; each token costs two decodes of a few tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0
        self._read_text = ""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        held = len(self._ids) - self._read
        if held < MAX_CHARACTER_BYTES and (text.endswith(REPLACEMENT) or len(text) <= len(self._read_text)):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids)) if self._ids else ""

    def settled(self) -> bool:
        """Never: the piece before is always looked at, too."""
        return False

    def _advance(self, text: str) -> str:
        new = text[len(self._read_text) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._read_text = self._decode(self._ids) if self._ids else ""
        return new


class IdFilter:
    """A decoder of ids in front of a chain or a window: ids that are to be left out or mean nothing go no further."""

    __slots__ = ("_inner", "_resolve", "_settled", "_skip", "_texts")

    def __init__(
        self, inner: Chain | Window, resolve: Callable[[int], Any], skip: frozenset[int], texts: dict[int, str]
    ) -> None:
        """
        Args:
            resolve: what ``inner`` takes for an id, or ``None``.
            texts: by id, where the text of it depends on nothing else; filled here, and shared by all decoders that
                have the same ``inner``, ``resolve`` and ``skip``.
        """
        self._inner: Any = inner
        self._resolve = resolve
        self._skip = skip
        self._texts = texts
        self._settled: bool = inner.settled()

    def push(self, token: int, /) -> str:
        if self._settled and (text := self._texts.get(token)) is not None:  # most tokens by far
            return text
        resolved = None if token in self._skip else self._resolve(token)
        text = "" if resolved is None else str(self._inner.push(resolved))
        before, self._settled = self._settled, self._inner.settled()
        if before and self._settled:
            self._texts[token] = text
        return text

    def flush(self) -> str:
        return str(self._inner.flush())


def chain_factory(spec: Mapping[str, Any] | None) -> Callable[[], Chain] | None:
    """A maker of fresh chains for the ``decoder`` entry of a ``tokenizer.json``; ``None`` where a step of it is not
    known here or cannot be done token by token."""
    if spec is None:
        return lambda: Chain([JoinWithSpaces()])
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    makers: list[Callable[[], Stage]] = []
    fused = False  # from here on the library sees one long token
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
            continue
        maker = _stage_maker(kind, step, fused=fused)
        if maker is None:
            return None
        makers.append(maker)
        fused = fused or kind == "ByteLevel"
    return lambda: Chain([make() for make in makers])


def _stage_maker(kind: str, step: Mapping[str, Any], *, fused: bool) -> Callable[[], Stage] | None:
    if kind == "ByteLevel" and not fused:
        return ByteLevel
    if kind == "ByteFallback" and not fused:
        return ByteFallback
    if kind == "Metaspace" and not fused:
        replacement, strip = step["replacement"], step["prepend_scheme"] != "never"
        return lambda: Metaspace(replacement, strip_first=strip)
    if kind == "Replace" and (pattern := step["pattern"].get("String")) and (not fused or len(pattern) == 1):
        return lambda: Replace(pattern, step["content"])
    if kind == "Strip" and fused and step["stop"] == 0:
        return lambda: StripStart(step["content"], step["start"])
    return None
