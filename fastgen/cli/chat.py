"""`fastgen chat`: a conversation on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import click

from fastgen.cli.options import SectionedCommand, engine_options, sampling_options, with_only_lora
from fastgen.cli.output import on_terminal
from fastgen.config import EngineConfig
from fastgen.errors import FastgenError, InvalidRequestError, did_you_mean
from fastgen.types import SamplingParams

if TYPE_CHECKING:
    from fastgen.front import Pipeline

__all__ = ["Conversation", "chat"]

HELP = """\
/help           show this
/system [TEXT]  set the instructions for the model, or show them
/reset          forget the conversation, keep the instructions
/exit           leave; so does Ctrl-D
Ctrl-C stops an answer. A line that begins with a space is sent as it is, whatever it begins with then."""
COMMANDS = ("/help", "/system", "/reset", "/exit", "/quit")


class Conversation:
    """The messages so far, kept short enough to be answered.

    Args:
        count: tokens of a prompt made of these messages.
        limit: most tokens of a prompt and its answer.
        reserve: tokens kept free for the answer.
    """

    def __init__(
        self, count: Callable[[list[dict[str, Any]]], int], *, limit: int, reserve: int, system: str | None = None
    ) -> None:
        self._count, self._limit, self._reserve = count, limit, reserve
        self.system = system
        self.turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def ask(self, text: str) -> int:
        """Add the user's message and drop the oldest exchanges until there is room for an answer.

        Returns:
            How many messages were dropped.

        Raises:
            InvalidRequestError: this message leaves no room even by itself; it was not added.
        """
        before = list(self.turns)
        self.turns.append({"role": "user", "content": text})
        try:
            dropped = 0
            while (length := self._count(self.messages)) + self._reserve > self._limit:
                if len(self.turns) == 1:
                    raise InvalidRequestError(
                        f"the message takes {length} tokens and the model holds {self._limit}, of which "
                        f"{self._reserve} are kept for the answer"
                    )
                dropped += self._drop_oldest()
        except InvalidRequestError:
            self.turns = before
            raise
        return dropped

    def answer(self, text: str) -> None:
        """Add what the model said; nothing said takes the question back, as templates want the two to alternate."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()

    def _drop_oldest(self) -> int:
        """Drop up to the next message of the user's."""
        end = next((i for i, turn in enumerate(self.turns) if i and turn["role"] == "user"), 1)
        del self.turns[:end]
        return end


@click.command(cls=SectionedCommand)
@click.argument("model")
@click.option("--system", metavar="TEXT", help="Instructions for the model, ahead of the conversation.")
@engine_options
@sampling_options
def chat(model: str, system: str | None, config: EngineConfig, params: SamplingParams) -> None:
    """Talk with MODEL: a Hugging Face name, a directory, or a file such as .gguf.

    /help lists what can be typed besides messages. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    if params.n != 1:
        raise click.UsageError("a conversation has one answer to each message; leave --n out")
    from fastgen.front import pipeline

    with pipeline(model, config) as pipe:
        Repl(pipe, with_only_lora(params, config), system).run()


class Repl:
    """Reads lines, answers them."""

    def __init__(self, pipe: Pipeline, params: SamplingParams, system: str | None) -> None:
        self.pipe, self.params = pipe, params
        limit = min(pipe.engine.limits.most_tokens, params.max_length or sys.maxsize)
        reserve = params.max_new_tokens or min(256, limit // 4)
        self.conversation = Conversation(self._count, limit=limit, reserve=reserve, system=system)
        self._count([{"role": "user", "content": "?"}])  # a model that cannot chat says so now
        self.interactive = sys.stdin.isatty()

    def run(self) -> None:
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  # makes input() edit lines and remember them
            click.echo("/help shows what you can type.")
        for line in self._lines():
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line.strip():
                try:
                    self._reply(line.strip())
                except KeyboardInterrupt:  # a second one, while the first was being handled
                    if not self.interactive:
                        raise
                    click.echo()

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield input("> " if self.interactive else "")
            except EOFError:
                if self.interactive:
                    click.echo()
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                click.echo("\n(Ctrl-D or /exit leaves)")

    def _command(self, line: str) -> bool:
        """Whether the conversation goes on."""
        name, _, text = line.partition(" ")
        text = text.strip()
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            click.echo(HELP)
        elif name == "/reset":
            self.conversation.reset()
            click.echo("(the conversation is forgotten)")
        elif name == "/system":
            if text:
                self.conversation.system = text
            click.echo(f"(instructions: {self.conversation.system or 'none'})")
        else:
            note = f"no command {name}.{did_you_mean(name, COMMANDS)} /help lists them; a space first sends the line."
            click.echo(f"({note})")
        return True

    def _reply(self, text: str) -> None:
        try:
            dropped = self.conversation.ask(text)
        except InvalidRequestError as error:
            click.echo(f"error: {error}", err=True)
            return
        if dropped:
            click.echo(f"({dropped} old messages no longer fit and were left out)")
        said: list[str] = []
        try:
            end = self._stream(said)
        except KeyboardInterrupt:
            end = "stopped"
        except FastgenError as error:
            end = ""
            click.echo(f"\nerror: {error}", err=True)
        click.echo(f" ({end})" if end else "")
        self.conversation.answer("".join(said))

    def _stream(self, said: list[str]) -> str:
        """Print the answer as it comes. Returns why it ended, where that needs a word."""
        reason = None
        chunks = self.pipe.chat(self.conversation.messages, self.params, stream=True)
        with closing(chunks):
            for chunk in chunks:
                said.append(chunk.text)
                click.echo(on_terminal(chunk.text), nl=False)
                if chunk.error:
                    raise FastgenError(chunk.error)
                reason = chunk.finish_reason or reason
        return "cut at the limit of tokens" if reason == "length" else ""

    def _count(self, messages: list[dict[str, Any]]) -> int:
        if self.pipe.tokenizer is None:
            raise InvalidRequestError(
                "this model has no tokenizer, so it cannot chat; `fastgen generate` takes token ids"
            )
        special = self.params.add_special_tokens or False
        return len(self.pipe.tokenizer.encode_chat(messages, add_special_tokens=special))
