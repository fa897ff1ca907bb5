"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine started, and its state now."""

    passes: int
    tokens: int
    """Run through the model, prompt and answer, recomputed ones too."""
    sampled: int
    """Tokens of answers."""
    failed: int
    """Choices that ended with an error."""
    seconds: float
    """Spent in passes."""
    running: int
    waiting: int
    preemptions: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    """Held by nobody, kept for prompts with the same beginning."""
    peak_blocks: int
    """Most that were in use at once."""
    prefix_hit_tokens: int
    prefix_queried_tokens: int
