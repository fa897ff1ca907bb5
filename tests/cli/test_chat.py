"""`fastgen chat`: history that fits, commands, Ctrl-C and Ctrl-D on a real pseudo-terminal."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.cli.chat import Conversation
from fastgen.errors import InvalidRequestError


def count(messages: list[dict[str, Any]]) -> int:
    """A template of two tokens a message, and a token a character."""
    return sum(2 + len(message["content"]) for message in messages)


def conversation(limit: int = 40, reserve: int = 10, system: str | None = None) -> Conversation:
    return Conversation(count, limit=limit, reserve=reserve, system=system)


def contents(talk: Conversation) -> list[str]:
    return [message["content"] for message in talk.messages]


def test_history_grows_and_is_reset() -> None:
    talk = conversation(system="be kind")
    assert talk.ask("one") == 0
    talk.answer("1")
    assert talk.ask("two") == 0
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user"]
    talk.reset()
    assert contents(talk) == ["be kind"]


def test_oldest_exchanges_are_dropped_when_full() -> None:
    talk = conversation()
    for text in ("aaaaa", "bbbbb", "ccccc"):
        talk.ask(text)
        talk.answer(text.upper())
    assert contents(talk) == ["bbbbb", "BBBBB", "ccccc", "CCCCC"]
    assert count(talk.messages) + 10 <= 40
    assert talk.ask("d" * 28) == 4
    assert contents(talk) == ["d" * 28]


def test_instructions_stay_when_history_goes() -> None:
    talk = conversation(system="sys")
    talk.ask("aaaaa")
    talk.answer("b" * 10)
    assert talk.ask("c" * 10) == 2
    assert contents(talk) == ["sys", "c" * 10]


def test_message_that_never_fits_is_refused_and_history_kept() -> None:
    talk = conversation()
    talk.ask("a")
    talk.answer("b")
    with pytest.raises(InvalidRequestError, match="takes 42 tokens and the model holds 40, of which 10"):
        talk.ask("c" * 40)
    assert contents(talk) == ["a", "b"]


def test_refused_by_the_template_is_taken_back() -> None:
    def refuse(messages: list[dict[str, Any]]) -> int:
        raise InvalidRequestError("no system role here")

    talk = Conversation(refuse, limit=40, reserve=10, system="x")
    with pytest.raises(InvalidRequestError, match="no system role"):
        talk.ask("a")
    assert talk.turns == []


def test_question_without_an_answer_is_taken_back() -> None:
    talk = conversation()
    talk.ask("a")
    talk.answer("")
    assert talk.turns == []
