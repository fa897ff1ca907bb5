"""A real model in a minute: it answers a question as it thinks, then sixteen people ask at once.

Run it with `make demo`, or `python examples/demo.py [MODEL]` for a chat model of your own.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import fastgen
from fastgen.testing.demo_model import demo_model

QUESTION = "Why is the sky blue? Answer in three sentences."

TOPICS = ("a lighthouse", "the number zero", "rain", "bread", "the moon", "a violin", "salt", "bees")
LETTER = (
    "Dear Anna, the garden is in full bloom and the first cherries are ripe. Yesterday we walked to the lake, where the "
    "children swam until their lips were blue. Father has repaired the old boat and means to paint it green. The baker "
    "asks after you every morning, and the cat sleeps on your bed. Come soon, and bring your camera. Yours, Tom. "
)
# Short questions and long letters: 16 prompts of many lengths that begin alike.
PROMPTS = [f"Write one sentence about {topic}." for topic in TOPICS]
PROMPTS += [f"{LETTER * repeats}\nWrite a short answer to this letter." for repeats in range(1, 9)]


def main() -> None:
    console = Console(highlight=False)
    if len(sys.argv) > 1:
        model, told = sys.argv[1], sys.argv[1]
    else:
        found = demo_model(Path(__file__).resolve().parent.parent / ".cache")
        model, told = found.model, found.told
    console.print(f"[bold]Model:[/bold] {told}")

    with fastgen.pipeline(model) as pipe:
        console.print(f"\n[bold]You:[/bold] {QUESTION}\n[bold]Model:[/bold] ", end="")
        for chunk in pipe.chat([{"role": "user", "content": QUESTION}], stream=True, max_new_tokens=120):
            print(chunk.text, end="", flush=True)
        print("\n")

        before, began = pipe.stats(), time.perf_counter()
        chats = [pipe.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
        answers = pipe(prompt_token_ids=chats, max_new_tokens=64)
        seconds, after = time.perf_counter() - began, pipe.stats()

    console.print(answers_table(answers))
    console.print(numbers_table(answers, before, after, seconds))


def answers_table(answers: list[fastgen.Response]) -> Table:
    table = Table(title="Sixteen prompts at once", title_justify="left", title_style="bold")
    for header in ("in", "cached", "out"):
        table.add_column(header, justify="right")
    table.add_column("answer", no_wrap=True, overflow="ellipsis")
    for answer in answers:
        usage = answer.usage
        numbers = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        table.add_row(*map(str, numbers), " ".join(answer.text.split()))
    return table
