"""`fastgen chat`: history that fits, commands, Ctrl-C and Ctrl-D on a real pseudo-terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastgen import pipeline
from fastgen.cli import main
from fastgen.cli.chat import Conversation
from fastgen.errors import InvalidRequestError
from fastgen.testing.checkpoints import tiny_llama


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


# ---- the loop, with lines piped in ---------------------------------------------------------------------------------

FLAGS = ["--num-blocks", "200", "--max-new-tokens", "6"]


def talk(model: str, *lines: str, flags: list[str] = FLAGS) -> Result:
    return CliRunner().invoke(main, ["chat", model, *flags], input="".join(f"{line}\n" for line in lines))


def test_answers_are_the_pipelines_with_history(tiny: str) -> None:
    with pipeline(tiny, num_blocks=200) as pipe:
        messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}]
        expected = []
        for text in ("hello", "again"):
            messages.append({"role": "user", "content": text})
            expected.append(pipe.chat(messages, max_new_tokens=6).text)
            messages.append({"role": "assistant", "content": expected[-1]})
    result = talk(tiny, "hello", "again", flags=[*FLAGS, "--system", "be kind"])
    assert result.exit_code == 0
    assert result.stdout == "".join(f"{text} (cut at the limit of tokens)\n" for text in expected)


def test_reset_forgets_and_system_is_kept(tiny: str) -> None:
    one, two = (talk(tiny, *lines).stdout.splitlines() for lines in (["/system x", "hi", "/reset", "hi"], ["hi"]))
    first, second = (line for line in one if "cut at" in line)
    assert first == second
    assert first not in two
    assert "(instructions: x)" in one
    assert "(the conversation is forgotten)" in one


def test_commands(tiny: str) -> None:
    shown = talk(tiny, "/help", "/system", "/systme x", "", "/exit", "not reached").stdout
    assert "/reset          forget the conversation" in shown
    assert "(instructions: none)" in shown
    assert "no command /systme. Did you mean '/system'" in shown
    assert "cut at" not in shown


def test_leading_space_sends_what_looks_like_a_command(tiny: str) -> None:
    assert "cut at" in talk(tiny, " /help").stdout


def test_history_is_trimmed_with_a_word(tiny: str) -> None:
    shown = talk(tiny, *["x" * 150] * 5, flags=["--num-blocks", "200", "--max-new-tokens", "20"]).stdout
    assert "(2 old messages no longer fit and were left out)" in shown
    assert shown.count("cut at the limit") == 5


def test_message_too_long_is_an_error_and_the_talk_goes_on(tiny: str) -> None:
    result = talk(tiny, "x" * 600, "hi")
    assert result.exit_code == 0
    assert "error: the message takes" in result.stderr
    assert result.stdout.count("cut at the limit") == 1


def test_model_that_cannot_chat_says_so_at_once(tmp_path: Path) -> None:
    silent = tiny_llama(tmp_path / "silent", tokenizer=False)
    result = talk(str(silent), "hi")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: this model has no tokenizer")


def test_one_answer_only(tiny: str) -> None:
    assert talk(tiny, flags=["--n", "2"]).exit_code == 2


# ---- a real pseudo-terminal ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(terminal: Any, endless: str) -> None:
    flags = ["--ignore-eos", "--max-batch-tokens", "8", "--num-blocks", "7000"]
    with terminal("chat", endless, *flags) as screen:
        screen.expect("/help shows")
        screen.expect("> ")
        screen.type("hello\n")
        screen.expect("hello\r\n")
        screen.expect("[^\\s]{5}")  # it has begun
        screen.type("\x03")
        screen.expect(r"\(stopped\)\r\n")
        screen.expect("> ")
        screen.type("/system kind\n")
        screen.expect(r"\(instructions: kind\)")
        screen.expect("> ")
        screen.type("again\n")
        screen.expect("again\r\n")
        screen.expect("[^\\s]{5}")
        screen.type("\x03")
        screen.expect(r"\(stopped\)\r\n")
        screen.expect("> ")
        screen.type("\x04")
        assert screen.end() == 0
        assert "Traceback" not in screen.shown


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_clears_the_line(terminal: Any, tiny: str) -> None:
    with terminal("chat", tiny, *FLAGS) as screen:
        screen.expect("> ")
        screen.type("never sent")
        screen.expect("never sent")
        time.sleep(0.3)  # a signal in the instant before readline waits again is seen with the next key only
        screen.type("\x03")
        screen.expect(r"\(Ctrl-D or /exit leaves\)")
        screen.expect("> ")
        screen.type("hi\n")
        screen.expect("cut at the limit")
        screen.expect("> ")
        screen.type("/exit\n")
        assert screen.end() == 0
