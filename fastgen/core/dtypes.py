"""The number formats of weights that are not quantised, by torch's names."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["FLOATS", "Dtype"]

Dtype = Literal["float32", "float16", "bfloat16", "float64"]
FLOATS: tuple[str, ...] = get_args(Dtype)
