"""The text of one answer as its tokens arrive: ``Detokenizer``, then ``StopMatcher``; ``TextStream`` is both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastgen.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "TextStream"]


class Detokenizer:
    """Token ids to text, incrementally: the pieces given out, joined, are ``tokenizer.decode`` of all the ids.

    A character split over tokens is held until it is whole, which takes at most three bytes; bytes that can no longer
    become a character go out as U+FFFD at once. The work for a token does not grow with the answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._feed = tokenizer.decoder(skip_special_tokens=skip_special_tokens)

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now. Ids that the tokenizer cannot decode add nothing."""
        return "".join([self._feed.push(token) for token in ids])

    def flush(self) -> str:
        """What is still held, at the end: half a character becomes U+FFFD."""
        return self._feed.flush()


class StopMatcher:
    """Looks for stop strings in text that arrives in pieces.

    Held back is only the longest end of the text that could still grow into a stop string. Among the stop strings found
    after a piece, the one that starts first wins, then the first in the list.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if "" in stops:
            raise ValueError("an empty stop string is in every text")
        self._patterns = [_Pattern(stop) for stop in stops]
        self._starts = frozenset(stop[0] for stop in stops)
        self._include = include_stop
        self._held = ""
        self.stop: str | None = None
        """The stop string found, if one was."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string if one was completed; after that, nothing comes out."""
        if self.stop is not None:
            return "", self.stop
        if not self._held and self._starts.isdisjoint(text):  # most pieces by far
            return text, None
        text, new = self._held + text, text
        complete = [pattern.stop for pattern in self._patterns if pattern.feed(new)]
        if complete:
            return self._cut(text, complete), self.stop
        hold = max(pattern.matched for pattern in self._patterns)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], None

    def flush(self) -> str:
        """What is still held: the answer ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, complete: list[str]) -> str:
        starts = [text.index(stop) for stop in complete]
        start = min(starts)
        self.stop = complete[starts.index(start)]
        self._held = ""
        return text[: start + (len(self.stop) if self._include else 0)]


class _Pattern:
    """One stop string and how much of its beginning the text now ends with (Knuth, Morris and Pratt's automaton)."""

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # _borders[i]: length of the longest proper prefix of stop[:i + 1] that is also its suffix
        self._borders = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._borders[length - 1]
            length += stop[i] == stop[length]
            self._borders[i] = length

    def feed(self, text: str) -> bool:
        """Whether the stop string was completed in ``text``; then the state means nothing any more."""
        stop, matched = self.stop, self.matched
        if not matched and stop[0] not in text:
            return False
        for character in text:
            while matched and character != stop[matched]:
                matched = self._borders[matched - 1]
            if character == stop[matched]:
                matched += 1
                if matched == len(stop):
                    return True
        self.matched = matched
        return False


class TextStream:
    """The text of one choice, from token ids to what the caller may see.

    Pushing one token at a time tells which token completes a stop string.
    """

    __slots__ = ("_feed", "_matcher")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._feed = tokenizer.decoder(skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stops, include_stop=include_stop) if stops else None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._matcher is None else self._matcher.stop

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string if this token completed one."""
        text = self._feed.push(token_id)
        return (text, None) if self._matcher is None else self._matcher.push(text)

    def finish(self) -> str:
        """Everything still held, at the end of the answer. May yet find a stop string in it, see ``stop``."""
        if self._matcher is None:
            return self._feed.flush()
        text, _ = self._matcher.push(self._feed.flush())
        return text + self._matcher.flush()
