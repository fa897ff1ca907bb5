"""How the first Qwen goes beyond the length it was trained at."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastgen import api as fg

if TYPE_CHECKING:
    from fastgen.models.qwen import QwenConfig


class QwenRope(fg.Rope):
    """A rope that stretches in steps with the length of the prompt, and scales queries with their position.

    For a prompt of ``length`` tokens the base is multiplied by ``alpha ** (dim / (dim - 2))`` with ``alpha = 2 **
    ceil(log2(length / seq_length) + 1) - 1``, and keeps it while the answer grows (``use_dynamic_ntk``). Queries come
    first among the heads that it turns; the one at position ``p`` is multiplied by ``log(p + 1) / log(seq_length)``
    where that is above 1 (``use_logn_attn``).

    Raises:
        ConfigError: sizes for which one of these has no value.
    """

    def __init__(self, c: QwenConfig) -> None:
        super().__init__(c.rope)
        self.heads, self.stretches, self.scales = c.num_attention_heads, c.use_dynamic_ntk, c.use_logn_attn
        self.trained = c.seq_length or c.max_position_embeddings
        config = self.config
        if self.trained < 2 or config.rotary_dim < 4:
            raise fg.ConfigError(
                f"config.json: seq_length {self.trained} and {config.rotary_dim} rotated dimensions per head: there "
                "must be 2 tokens and 4 dimensions or more"
            )
        power = config.rotary_dim / (config.rotary_dim - 2)
        thetas = [config.theta * (2**step - 1) ** power for step in range(2, self._step(c.max_position_embeddings) + 1)]
        self.stretched = nn.ModuleList(fg.Rope(config.model_copy(update={"theta": theta})) for theta in thetas)

    def _step(self, length: int) -> int:
        """1 up to the length trained at, 2 up to twice that, 3 up to four times, and so on."""
        if not self.stretches or length <= self.trained:
            return 1
        return math.ceil(math.log(length / self.trained, 2) + 1)

    def regime(self, length: int) -> int | None:
        step = self._step(length)
        return step if step > 1 else None

    def forward(self, x: torch.Tensor, batch: fg.Batch) -> torch.Tensor:
        """``x [tokens, heads + kv_heads, head_dim]``, turned."""
        turned = super().forward(x, batch)
        steps = batch.memo.get((self, "steps"))
        if steps is None:
            steps = batch.memo[self, "steps"] = [self._step(length) for length in batch.lengths.tolist()]
        for step in {*steps} - {1}:
            here = torch.tensor([other == step for other in steps], device=x.device)[batch.sequence_of]
            turned = torch.where(here[:, None, None], self.stretched[step - 2](x, batch), turned)
        if not self.scales:
            return turned
        scale = ((batch.positions + 1).float().log() / math.log(self.trained)).clamp(min=1).to(x.dtype)
        return torch.cat([turned[:, : self.heads] * scale[:, None, None], turned[:, self.heads :]], 1)
