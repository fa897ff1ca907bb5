"""What an engine process tells of itself: the model it loaded, and each pass it ran."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelInfo", "Pass"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded, and how. Lengths in tokens."""

    name: str
    """As it was asked for: a name on the hub, a directory or a file."""
    architecture: str
    dtype: str
    device: str
    quantization: str | None
    max_model_len: int
    max_batch_tokens: int
    max_sequences: int
    block_size: int
    total_blocks: int
    vocab_size: int
    loras: tuple[str, ...]
    version: str
    """Of fastgen."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, for the live view."""

    ended: float
    """Unix time, seconds."""
    seconds: float
    tokens: int
    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int
