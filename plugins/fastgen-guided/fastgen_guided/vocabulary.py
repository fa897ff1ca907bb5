"""A model's vocabulary as llguidance sees it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

__all__ = ["TextTokenizer", "Vocabulary", "vocabulary"]


class TextTokenizer(Protocol):
    """What is used of fastgen's tokenizer."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes | None: ...

    def token_text(self, token_id: int) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of one tokenizer, up to a size."""

    size: int
    llguidance: LLTokenizer
    """Has one more token, id ``size``: the end of an answer. It is allowed where the grammar may end."""
    unfit_at_start: NDArray[np.bool_] | None
    """``[size]``: tokens whose leading space the tokenizer leaves out at the start of an answer, so that their text
    there is not what the grammar would take it for. ``None``: none is."""


class _Wrapper:
    """The interface that ``LLTokenizer`` asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], tokenizer: TextTokenizer) -> None:
        self.tokens = [*tokens, b"<end of answer>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, len(tokens)]
        self._tokenizer = tokenizer
        self._size = len(tokens)
        self.greedy: LLTokenizer | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens that spell ``text``, as the model would choose them where that can be told. llguidance asks where
        its grammar leaves no choice. It asks for an empty text while it is made."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # not Unicode
            ids = []
        if all(token < self._size for token in ids):
            spelt = b"".join([self.tokens[token] for token in ids])
            if spelt == text.encode("utf-8", "replace"):
                return ids
        # Sentencepiece puts a space before every text.
        return [] if self.greedy is None else list(self.greedy.greedy_tokenize(text))


_known: weakref.WeakKeyDictionary[TextTokenizer, dict[int, Vocabulary]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def vocabulary(tokenizer: TextTokenizer, size: int) -> Vocabulary:
    """The vocabulary of ``tokenizer``'s ids below ``size``. Takes a second or so for a new tokenizer, then nothing."""
    with _lock:
        sizes = _known.setdefault(tokenizer, {})
        if size not in sizes:
            sizes[size] = _build(tokenizer, size)
        return sizes[size]


def _build(tokenizer: TextTokenizer, size: int) -> Vocabulary:
    tokens: list[bytes] = []
    special: list[int] = []
    for token in range(size):
        spelling = tokenizer.token_bytes(token)
        if spelling is None and (name := tokenizer.token_text(token)):
            special.append(token)
            spelling = name.encode()
        tokens.append(spelling or b"")
    wrapper = _Wrapper(tokens, special, tokenizer)
    made = LLTokenizer(TokenizerWrapper(wrapper))
    wrapper.greedy = made
    return Vocabulary(size, made, _unfit_at_start(tokenizer, tokens, frozenset(special)))


def _unfit_at_start(tokenizer: TextTokenizer, tokens: list[bytes], special: frozenset[int]) -> NDArray[np.bool_] | None:
    spaced = [token for token, spelling in enumerate(tokens) if spelling.startswith(b" ") and token not in special]
    # All such tokens are treated alike, so one tells: the first that is text by itself.
    for token in spaced:
        text = tokens[token].decode("utf-8", "replace")
        if "\ufffd" not in text:
            if tokenizer.decode([token]) == text:
                return None
            unfit = np.zeros(len(tokens), dtype=np.bool_)
            unfit[spaced] = True
            return unfit
    return None


def size_in_words(vocabulary: Any) -> int:
    """32-bit words of a bitmask over the vocabulary and its end."""
    return (int(vocabulary.size) + 32) // 32
