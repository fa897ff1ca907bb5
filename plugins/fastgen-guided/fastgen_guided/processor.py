"""The logits processor: tokens with which the answer cannot follow its grammar any more are masked out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from fastgen_guided.grammar import grammar_of
from fastgen_guided.guard import checked_grammar
from fastgen_guided.limits import PARSER_LIMITS
from fastgen_guided.vocabulary import TextTokenizer, Vocabulary, size_in_words, vocabulary

__all__ = ["Guided", "guided"]

MAX_COMPILED = 64
"""Grammars kept compiled, the latest used."""


def guided(
    options: object,
    *,
    vocab_size: int,
    prompt_token_ids: list[int],
    tokenizer: TextTokenizer | None,
    stop_token_ids: frozenset[int],
    checked: bool,
) -> Guided:
    """A processor for one answer. The first for a tokenizer takes a second, and the first with some options what they
    take to compile; others hardly anything.

    Args:
        options: see ``fastgen_guided.grammar``.
        checked: whether ``guard.check`` has let them through already, in whatever process.

    Raises:
        ValueError: the options cannot be used, or not with this model.
    """
    if tokenizer is None:
        raise ValueError("the model was loaded without a tokenizer, so what its tokens spell is not known")
    ends = sorted(token for token in stop_token_ids if token < vocab_size)
    if not ends:
        raise ValueError(
            "an answer that follows a grammar has to end, and no token may end this one; leave out ignore_eos"
        )
    words = vocabulary(tokenizer, vocab_size)
    grammar = grammar_of(options) if checked else checked_grammar(options)
    return Guided(_compiled(grammar, words).deep_copy(), words, ends)


class Guided:
    """State is a function of the answer's tokens alone: what was computed for those of the last call is taken up where
    this call's begin alike, and undone where they do not.

    Args:
        matcher: at its beginning; not shared.
        ends: ids that end the answer, allowed exactly where the grammar may end.
    """

    def __init__(self, matcher: LLMatcher, words: Vocabulary, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._ends = np.array(ends, dtype=np.int64)
        self._seen: list[int] = []
        self._mask = np.zeros(size_in_words(words), dtype=np.int32)

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """``logits [vocab]`` with -inf for the tokens that are out. In place.

        Raises:
            ValueError: the answer does not follow the grammar already, or the grammar became too complex to follow.
        """
        self._follow(output_ids)
        allowed = self.allowed()
        forbidden = torch.from_numpy(np.logical_not(allowed, out=allowed)).to(logits.device)
        return logits.masked_fill_(forbidden, float("-inf"))

    def allowed(self) -> NDArray[np.bool_]:
        """``[vocab]``: the tokens that may come next."""
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed any further: {_first_line(matcher.get_error())}")
        size = self._words.size
        bits = np.unpackbits(self._mask.view(np.uint8), count=size + 1, bitorder="little").view(np.bool_)
        allowed, may_end = bits[:size], bits[size]
        if not self._seen and self._words.unfit_at_start is not None:
            allowed &= ~self._words.unfit_at_start
        allowed[self._ends] = may_end
        return allowed

    def _follow(self, output_ids: list[int]) -> None:
        known = len(self._seen)
        if output_ids[:known] != self._seen:
            known = next(
                (i for i, (a, b) in enumerate(zip(self._seen, output_ids, strict=False)) if a != b),
                min(known, len(output_ids)),
            )
            self._matcher.rollback(len(self._seen) - known)
            del self._seen[known:]
        for token in output_ids[known:]:
            if not self._matcher.consume_token(token):
                raise ValueError(
                    f"token {token} of the answer does not follow the grammar: {_first_line(self._matcher.get_error())}"
                )
            self._seen.append(token)


_cache: OrderedDict[tuple[str, Vocabulary], LLMatcher] = OrderedDict()
_lock = threading.Lock()


def _compiled(grammar: str, words: Vocabulary) -> LLMatcher:
    """The grammar at its beginning, to be copied. Lets other threads have theirs while it compiles one."""
    key = (grammar, words)
    with _lock:
        found = _cache.get(key)
    if found is None:
        limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
        found = LLMatcher(words.llguidance, grammar, log_level=0, limits=limits)
    with _lock:
        _cache[key] = found  # a broken one too: to find that out may have taken long
        _cache.move_to_end(key)
        while len(_cache) > MAX_COMPILED:
            _cache.popitem(last=False)
    if found.is_error():
        raise ValueError(_first_line(found.get_error()))
    return found


def _first_line(error: str) -> str:
    return next((line for line in error.splitlines() if line.strip()), "llguidance stopped")
