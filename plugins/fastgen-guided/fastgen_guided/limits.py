"""What a grammar from a request may cost."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ADDRESS_SPACE",
    "ANSWER_SECONDS",
    "COMPILE_SECONDS",
    "MAX_CHOICES",
    "MAX_DEPTH",
    "MAX_NODES",
    "MAX_TEXT",
    "PARSER_LIMITS",
    "WAIT_SECONDS",
]

MAX_TEXT = 256 * 1024
"""Characters of a request's options, as JSON."""
MAX_DEPTH = 64
"""Levels of nesting in them."""
MAX_NODES = 20_000
"""Values in them."""
MAX_CHOICES = 1000
"""Texts in one list to choose from."""
COMPILE_SECONDS = 0.5
"""Longest time of a processor that a grammar may take to be compiled. A schema of 1500 properties takes 0.4."""
ANSWER_SECONDS = 10.0
"""Longest wait for what comes of it: a busy machine gives it a processor for part of the time."""
WAIT_SECONDS = 15.0
"""Longest time a grammar waits for its turn, and a process for its start."""
ADDRESS_SPACE = 2 * 2**30
"""Bytes of address space of the process that compiles it first."""

PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
"""llguidance's own bounds (``LLParserLimits``): beyond them a grammar is refused, or its request ends with an error.
The last two are a fifth of its defaults."""
