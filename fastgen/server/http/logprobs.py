"""Log-probabilities in OpenAI's two formats. They are the model's own, before penalties, temperature and the like.

JSON knows no infinity: a token that is impossible has ``-9999.0``, as OpenAI writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.server.http.answers import ChatLogprobs, ChatToken, ChatTop, Logprobs, PromptLogprobs, PromptTop
from fastgen.text import Tokenizer
from fastgen.types import TokenLogprob

__all__ = ["LOWEST", "Offsets", "chat_logprobs", "finite", "prompt_logprobs", "text_logprobs"]

LOWEST = -9999.0


def finite(logprob: float) -> float:
    """The number as JSON can carry it."""
    return logprob if logprob > LOWEST else LOWEST  # NaN, too


class Offsets:
    """Where in a choice's text its tokens begin. A token that goes on with a character begins where that does; one that
    is not written out, such as an end token, where the next begins."""

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool, start: int = 0) -> None:
        """``start``: length of the text before."""
        self._decoder = None if tokenizer is None else tokenizer.decoder(skip_special_tokens=skip_special_tokens)
        self._length = start

    def next(self, token_id: int) -> int:
        offset = self._length
        if self._decoder is not None:
            self._length += len(self._decoder.push(token_id))
        return offset


def text_logprobs(
    entries: Sequence[TokenLogprob | None], ids: Sequence[int], offsets: Offsets, tokenizer: Tokenizer | None
) -> Logprobs:
    """The format of completions.

    Args:
        entries: ``None`` where the model says nothing, at the first token of a prompt.
        ids: of the same tokens.
    """
    made = Logprobs([], [], [], [])
    for entry, token_id in zip(entries, ids, strict=True):
        made.text_offset.append(offsets.next(token_id))
        if entry is None:
            made.tokens.append("" if tokenizer is None else tokenizer.token_text(token_id))
            made.token_logprobs.append(None)
            made.top_logprobs.append(None)
            continue
        made.tokens.append(entry.token)
        made.token_logprobs.append(finite(entry.logprob))
        top: dict[str, float] = {}
        for one in (entry, *entry.top):  # tokens with the same text share an entry: the likeliest has it
            top[one.token] = max(finite(one.logprob), top.get(one.token, LOWEST))
        made.top_logprobs.append(top)
    return made


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None) -> ChatLogprobs:
    """The format of chats."""

    def raw(one: TokenLogprob) -> list[int] | None:
        if "\ufffd" not in one.token or tokenizer is None:
            return list(one.token.encode())
        known = tokenizer.token_bytes(one.token_id)
        return None if known is None else list(known)

    return ChatLogprobs(
        [
            ChatToken(
                one.token,
                finite(one.logprob),
                raw(one),
                [ChatTop(other.token, finite(other.logprob), raw(other)) for other in one.top],
            )
            for one in entries
        ]
    )


def prompt_logprobs(entries: Sequence[TokenLogprob | None] | None) -> PromptLogprobs | None:
    """Of the prompt, by token id."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {str(one.token_id): PromptTop(finite(one.logprob), one.rank, one.token) for one in (entry, *entry.top)}
        for entry in entries
    ]
