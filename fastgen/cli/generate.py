"""`fastgen generate`: prompts in, answers out."""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastgen.cli import answers
from fastgen.cli.options import SectionedCommand, engine_options, sampling_options, with_only_lora
from fastgen.cli.output import on_terminal, print_table
from fastgen.cli.prompts import Job, from_arguments, from_file, from_stdin, listed
from fastgen.config import EngineConfig
from fastgen.errors import FastgenError, InvalidRequestError, RequestFailedError
from fastgen.types import Response, SamplingParams

if TYPE_CHECKING:
    from fastgen.core.engine import Engine, EngineStats
    from fastgen.core.loop import EngineLoop, Submission
    from fastgen.front.prompts import Call

__all__ = ["generate"]

Finished = queue.SimpleQueue[tuple[int, Response | FastgenError | None]]
"""``(index of the job, its answer)`` as they end; ``None`` for Ctrl-C."""

NO_TOKENIZER = (
    "this model has no tokenizer, so it cannot read text: give token ids, by --file PROMPTS.jsonl with lines such as "
    '{"prompt_token_ids": [1, 2, 3]}; the answers are ids too, which --json prints'
)
LAST_WORDS_SECONDS = 10.0
"""How long an interrupted batch waits for the pass in flight."""


@click.command(cls=SectionedCommand)
@click.argument("model")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Prompts, one a line; a .jsonl file holds objects: {"prompt": ...}, {"prompt_token_ids": [...]} or '
    '{"messages": [...]}, with sampling fields for that line.',
)
@click.option("--chat", is_flag=True, help="Put each prompt to the model as a user's message.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each prompt.")
@click.option("--stats", is_flag=True, help="Print tokens, speed, passes and cache use at the end (standard error).")
@engine_options
@sampling_options
def generate(
    model: str,
    prompts: tuple[str, ...],
    file: Path | None,
    chat: bool,
    as_json: bool,
    stats: bool,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Let MODEL (a Hugging Face name, a directory, or a file such as .gguf) continue each PROMPT.

    Without a prompt, or with -, the prompt is standard input. One prompt is answered as it is generated; several run
    together, and their answers come in the order of the prompts. Ctrl-C keeps what there is.
    """
    params = with_only_lora(params, config)
    jobs = from_arguments(prompts, params, chat=chat)
    if file is not None:
        jobs += from_file(file, params, chat=chat)
    if not jobs:
        jobs.append(from_stdin(params, chat=chat))
    with _loaded(model, config) as run:
        began = time.perf_counter()
        calls = run.calls(jobs)
        try:
            if len(jobs) == 1 and jobs[0].params.n == 1 and not as_json:
                run.stream(calls[0])
            else:
                run.batch(jobs, calls, as_json=as_json)
        finally:
            if stats:
                tokens_in = sum(len(call.prompts[0].token_ids) for call in calls)
                _print_stats(run.loop.run(run.engine.stats).result(), tokens_in, time.perf_counter() - began)


@contextmanager
def _loaded(model: str, config: EngineConfig) -> Iterator[Run]:
    from fastgen.core.engine import Engine
    from fastgen.core.loop import EngineLoop

    engine = Engine.load(model, config, progress=sys.stderr.isatty())
    loop = EngineLoop(engine)
    try:
        yield Run(engine, loop)
    finally:
        loop.close()


@dataclass(frozen=True, slots=True)
class Run:
    """A loaded model at work."""

    engine: Engine
    loop: EngineLoop

    def calls(self, jobs: list[Job]) -> list[Call]:
        """The jobs as token ids.

        Raises:
            InvalidRequestError: names every job that cannot be run; none of them has.
        """
        from fastgen.front.prompts import chat_call, completion_call

        calls: list[Call] = []
        problems: list[str] = []
        for job in jobs:
            try:
                if self.engine.tokenizer is None and job.prompt_token_ids is None:
                    raise InvalidRequestError(NO_TOKENIZER)
                if job.messages is not None:
                    call = chat_call(job.messages, job.params, self.engine.tokenizer, variables={})
                else:
                    call = completion_call(job.prompt, job.prompt_token_ids, job.params, self.engine.tokenizer)
                self._check(call)
                calls.append(call)
            except InvalidRequestError as error:
                problems.append(f"{job.where}: {error}" if len(jobs) > 1 else str(error))
        if problems:
            raise InvalidRequestError(problems[0] if len(problems) == 1 else listed("nothing was run", problems))
        return calls

    def _check(self, call: Call) -> None:
        # With a seed, checking draws none from the engine's: the answers are those of an unchecked run.
        params = call.params.model_copy(update={"seed": call.params.seed or 0})
        ids = call.prompts[0].token_ids
        self.loop.run(lambda: self.engine.check(ids, params, chat=call.chat)).result()

    def stream(self, call: Call) -> None:
        """Print one answer as it comes."""
        from fastgen.front.streams import ChunkStream

        with ChunkStream(self.loop, call) as chunks:
            try:
                for chunk in chunks:
                    click.echo(on_terminal(chunk.text), nl=False)
            finally:
                click.echo()
            if (error := chunks.response().error) is not None:
                raise RequestFailedError(error)

    def batch(self, jobs: list[Job], calls: list[Call], *, as_json: bool) -> None:
        """Run everything together and print the answers in the order of the jobs, as soon as that allows."""
        from fastgen.front.progress import Bar

        finished: Finished = queue.SimpleQueue()
        requests = [self._request(index, call, finished) for index, call in enumerate(calls)]
        show = len(jobs) > 1 and sys.stderr.isatty()
        # A bar and the answers would write over each other on one terminal.
        printer = _Printer(jobs, as_json, hold=show and sys.stdout.isatty())
        self.loop.submit(requests).result()
        with _interrupt_into(finished), Bar(requests) if show else nullcontext() as bar:
            while not printer.complete:
                index, answer = bar.wait(finished) if bar is not None else finished.get()
                if answer is None:
                    self._end_early(requests, finished, printer)
                    break
                printer.take(index, answer)
        printer.flush()
        if printer.interrupted:
            click.echo(f"\ninterrupted: {printer.summary()}", err=True)
            raise click.Abort
        if printer.failed:
            raise RequestFailedError(f"{len(printer.failed)} of {len(jobs)} prompts failed: {printer.failed[0]}")

    def _request(self, index: int, call: Call, finished: Finished) -> Submission:
        from fastgen.front.answers import WholeResponse, submissions

        (made,) = submissions(
            self.loop, call, lambda _, builder: WholeResponse(builder, lambda answer: finished.put((index, answer)))
        )
        return made

    def _end_early(self, requests: list[Submission], finished: Finished, printer: _Printer) -> None:
        """End what still runs, and take what it had come to."""
        printer.interrupted = True
        for request in requests:
            self.loop.abort(request.request_id)
        end = time.monotonic() + LAST_WORDS_SECONDS
        while not printer.complete:
            try:
                index, answer = finished.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return
            if answer is not None:
                printer.take(index, answer)


@contextmanager
def _interrupt_into(finished: Finished) -> Iterator[None]:
    """Make the first Ctrl-C an entry of the queue: raised at any odd place, it could lose an answer or print it twice.
    The second one acts as ever."""
    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        finished.put((-1, None))

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Printer:
    """Prints answers in order, whatever order they come in."""

    def __init__(self, jobs: list[Job], as_json: bool, *, hold: bool) -> None:
        self.jobs, self.as_json, self.hold = jobs, as_json, hold
        self.failed: list[str] = []
        self.interrupted = False
        self._answers: dict[int, Response] = {}
        self._taken = self._next = 0

    @property
    def complete(self) -> bool:
        return self._taken == len(self.jobs)

    def take(self, index: int, answer: Response | FastgenError) -> None:
        """
        Raises:
            FastgenError: the engine died.
        """
        if isinstance(answer, FastgenError):
            self.flush()
            raise answer
        self._taken += 1
        self._answers[index] = answer
        self.failed += [f"{self.jobs[index].where}: {c.error}" for c in answer.choices if c.finish_reason == "error"]
        while not self.hold and self._next in self._answers:
            self._print(self._next)
            self._next += 1

    def flush(self) -> None:
        """Print what has not been, gaps or not."""
        for index in range(self._next, len(self.jobs)):
            if index in self._answers:
                self._print(index)
        self._next = len(self.jobs)

    def summary(self) -> str:
        whole = sum(all(c.finish_reason != "abort" for c in answer.choices) for answer in self._answers.values())
        begun = sum(_begun(answer) for answer in self._answers.values())
        total = len(self.jobs)
        return f"{whole} of {total} prompts answered, {begun - whole} cut short, {total - begun} not begun"

    def _print(self, index: int) -> None:
        job, answer = self.jobs[index], self._answers[index]
        if not _begun(answer):
            return
        if self.as_json:
            click.echo(answers.json_line(index, job, answer))
        else:
            click.echo(on_terminal(answers.text_block(index, len(self.jobs), job, answer)))


def _begun(answer: Response) -> bool:
    return any(choice.token_ids or choice.finish_reason != "abort" for choice in answer.choices)


def _print_stats(stats: EngineStats, tokens_in: int, seconds: float) -> None:
    hits = stats.prefix_hit_tokens
    rows = [
        ("tokens in", f"{tokens_in:,}"),
        ("tokens out", f"{stats.sampled:,}"),
        ("seconds", f"{seconds:.2f}"),
        ("tokens out per second", f"{stats.sampled / max(seconds, 1e-9):,.1f}"),
        ("passes", f"{stats.passes:,}"),
        ("tokens per pass", f"{stats.tokens / max(stats.passes, 1):,.1f}"),
        ("cache blocks used at most", f"{stats.peak_blocks:,} of {stats.total_blocks:,}"),
        ("prompt tokens found in cache", f"{hits:,} ({hits / max(tokens_in, 1):.0%})"),
        ("preemptions", f"{stats.preemptions:,}"),
    ]
    print_table(("name", "value"), rows, right=("value",), header=False, err=True)
