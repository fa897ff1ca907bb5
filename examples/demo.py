"""A real model in a minute: it answers a question as it thinks, then sixteen people ask at once.

Run it with `make demo`, or `python examples/demo.py [MODEL]` for a chat model of your own.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from textwrap import shorten

from rich.console import Console
from rich.table import Table
from rich.text import Text

import fastgen
from fastgen.testing.demo_model import demo_model

QUESTION = "Why is the sky blue? Answer in three sentences."

TOPICS = ("a lighthouse", "the number zero", "rain", "bread", "the moon", "a violin", "salt", "bees")
STORY = (
    "Tea was first grown in the hills of southern China. For centuries it was drunk as a medicine, boiled "
    "together with ginger, salt or orange peel, before people came to like it for its own taste.",
    "Monks carried the plant to Japan in the ninth century. They found that a bowl of tea kept them awake through"
    " long hours of meditation, and over time the making of tea became a quiet ceremony of its own.",
    "Dutch ships brought the first chests to Europe around 1610. Tea was so expensive that it was kept in locked "
    "boxes, and the lady of the house carried the key on a ribbon around her neck.",
    "In England coffee houses sold it as a curiosity until a Portuguese princess, Catherine of Braganza, married "
    "King Charles and made it the drink of the court. Within a hundred years, workers drank it too.",
    "The tax on tea was high, so smugglers landed it on lonely beaches at night. At one time more than half of "
    "all the tea in Britain had never seen a customs officer, until the tax was cut in 1784.",
    "Across the ocean the same tax led to anger. In December 1773 a crowd in Boston climbed aboard three ships "
    "and threw 342 chests into the harbour, and many Americans took up coffee out of principle.",
    "In the 1840s a Scottish gardener, Robert Fortune, travelled through China in disguise and sent thousands of "
    "young plants to India. Large plantations grew in Assam and Darjeeling, and prices fell.",
    "Fast sailing ships, the clippers, raced home with each year's first harvest. The winner of the great race of"
    " 1866 reached London after ninety-nine days at sea, only minutes before the second.",
)
# Short questions, and a story that grows: 16 prompts of many lengths, half of which begin alike.
PROMPTS = [f"Write one sentence about {topic}." for topic in TOPICS]
PROMPTS += ["\n\n".join([*STORY[:parts], "Sum this story up in one sentence."]) for parts in range(1, 9)]
MOST_TOKENS = 64  # in each answer


def main() -> None:
    console = Console(highlight=False)
    if len(sys.argv) > 1:
        model = told = sys.argv[1]
    else:
        found = demo_model(Path(__file__).resolve().parent.parent / ".cache")
        model, told = found.model, found.told
    console.print(f"[bold]Model[/bold]  {told}", soft_wrap=True)

    with fastgen.pipeline(model) as pipe:
        answer_one(pipe, console)
        answer_sixteen(pipe, console)


def answer_one(pipe: fastgen.Pipeline, console: Console) -> None:
    """A chat, streamed."""
    console.print(f"\n[bold]You[/bold]    {QUESTION}\n[bold]Answer[/bold] ", end="")
    for chunk in pipe.chat([{"role": "user", "content": QUESTION}], stream=True, max_new_tokens=120):
        print(chunk.text, end="", flush=True)
    print("\n")


def answer_sixteen(pipe: fastgen.Pipeline, console: Console) -> None:
    """A batch: prompts of many lengths share every pass. On a terminal a bar shows how far it is."""
    assert pipe.tokenizer is not None
    chats = [pipe.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    before, began = pipe.stats(), time.perf_counter()
    answers = pipe(prompt_token_ids=chats, max_new_tokens=MOST_TOKENS)
    seconds, after = time.perf_counter() - began, pipe.stats()

    table = Table(title="Sixteen prompts at once", title_justify="left", title_style="bold")
    for header in ("in", "cached", "out"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    for answer in answers:
        usage = answer.usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        table.add_row(*map(str, counts), Text(shorten(answer.text, max(24, console.width - 30), placeholder="…")))
    console.print(table)

    tokens_in = sum(answer.usage.prompt_tokens for answer in answers)
    tokens_out = sum(answer.usage.completion_tokens for answer in answers)
    passes, computed = after.passes - before.passes, after.tokens - before.tokens
    found = after.prefix_hit_tokens - before.prefix_hit_tokens
    block = pipe.config.block_size
    numbers = Table(title="In numbers", title_justify="left", title_style="bold", show_header=False)
    numbers.add_column()
    numbers.add_column(justify="right")
    for what, value in {
        "tokens in": f"{tokens_in:,}",
        "of them found in the prefix cache": f"{found:,}",
        "tokens out": f"{tokens_out:,}",
        "seconds": f"{seconds:.1f}",
        "tokens per second, in and out": f"{(tokens_in + tokens_out) / seconds:,.0f}",
        "tokens per second, out": f"{tokens_out / seconds:,.0f}",
        "passes": f"{passes:,}",
        f"tokens per pass (budget {pipe.engine.max_batch_tokens})": f"{computed / passes:,.1f}",
        f"cache blocks in use at most (of {after.total_blocks:,}, {block} tokens each)": f"{after.peak_blocks:,}",
        "cache blocks kept for prompts that begin alike": f"{after.cached_blocks:,}",
    }.items():
        numbers.add_row(what, value)
    console.print(numbers)


if __name__ == "__main__":
    try:
        main()
    except fastgen.FastgenError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
