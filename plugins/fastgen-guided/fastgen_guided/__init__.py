"""Structured output for fastgen. This module stays light: llguidance and torch are imported when a request asks."""

from __future__ import annotations

from fastgen.api import LogitsProcessorSpec, hookimpl

__all__ = ["fastgen_logits_processors"]


@hookimpl
def fastgen_logits_processors() -> list[LogitsProcessorSpec]:
    return [
        LogitsProcessorSpec(
            "guided",
            "fastgen_guided.processor:guided",
            needs=("tokenizer", "stop_token_ids", "checked"),
            check="fastgen_guided.guard:check",
            example={"choice": ["yes", "no"]},
            description="Answers that follow a JSON schema, a regular expression, a grammar or a list of choices",
        )
    ]
