"""Weights quantised while they are loaded: what is packed and what is not, packing it, and keeping it for the next
start. Knows the parts with weights (`Linear`, `Experts`, a tied `Head`) and no family."""

from fastgen.core.quant.loading import Packing
from fastgen.core.quant.plan import Kept, Quantisation, plan_quantisation

__all__ = ["Kept", "Packing", "Quantisation", "plan_quantisation"]
