"""Fast operations for CPUs: a small C++ library, built for the processor at hand, and torch-facing functions for it."""

from __future__ import annotations

from fastgen.kernels.cpu import attention, elementwise, linear, quantised
from fastgen.kernels.cpu.library import set_threads
from fastgen.kernels.ops import Implementation

__all__ = ["IMPLEMENTATIONS", "set_threads"]

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *attention.IMPLEMENTATIONS,
    *elementwise.IMPLEMENTATIONS,
    *linear.IMPLEMENTATIONS,
    *quantised.IMPLEMENTATIONS,
)
"""What the library can serve; each says itself whether it can here."""
