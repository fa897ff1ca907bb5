"""LoRA adapters (Hu et al., 2021) in the format of peft: read, matched with the model, and added row by row."""

from fastgen.core.lora.linear import Loras
from fastgen.core.lora.plan import LoraPlan, plan_loras

__all__ = ["LoraPlan", "Loras", "plan_loras"]
