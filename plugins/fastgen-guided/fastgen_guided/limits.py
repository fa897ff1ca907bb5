"""What a grammar from a request may cost."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ADDRESS_SPACE",
    "CHECK_SECONDS",
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
CHECK_SECONDS = 3.0
"""Longest time a grammar may take to be compiled."""
WAIT_SECONDS = 15.0
"""Longest time a grammar waits for its turn."""
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
