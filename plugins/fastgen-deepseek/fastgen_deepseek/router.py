"""The routers of DeepSeek V2 and V3. They compute in float32, and keep their numbers so, whatever the model's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastgen import api as fg

__all__ = ["RoutedExperts", "SigmoidRouter", "SoftmaxRouter"]


class Router(fg.Layer):
    """Which experts a token visits: ``x [tokens, hidden] -> (chosen, weights)``, both ``[tokens, top_k]``.

    Args:
        hidden: width of the stream.
        experts: how many there are, in ``groups`` of equal size, one after another.
        top_k: how many a token visits, all from its ``kept`` best groups.
        scale: of the weights.

    Raises:
        ConfigError: numbers that do not fit together.
    """

    def __init__(self, hidden: int, experts: int, top_k: int, groups: int, kept: int, scale: float) -> None:
        super().__init__()
        if experts % groups or kept > groups or top_k > experts // groups * kept:
            raise fg.ConfigError(
                f"config.json: n_routed_experts {experts} in n_group {groups} groups, of which topk_group {kept} are "
                f"kept, do not give num_experts_per_tok {top_k} experts to choose"
            )
        self.top_k, self.groups, self.kept, self.scale = top_k, groups, kept, scale
        self.weight = _float32(experts, hidden)

    def want(self) -> dict[tuple[str, str], tuple[int, ...]]:
        return {("", name): tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def place(self, slot: str, tail: str) -> torch.Tensor:
        return self.get_parameter(tail)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, experts]``, float32."""
        return F.linear(x.float(), self.weight)

    def outside(self, scores: torch.Tensor, best: int) -> torch.Tensor:
        """Whether each expert is outside the kept groups: those whose ``best`` highest scores have the largest sum."""
        grouped = scores.view(len(scores), self.groups, -1)
        kept = grouped.topk(best, -1).values.sum(-1).topk(self.kept, -1).indices
        outside = torch.ones_like(grouped, dtype=torch.bool)
        return outside.scatter_(1, kept[..., None].expand(-1, -1, grouped.shape[-1]), False).flatten(1)


class SoftmaxRouter(Router):
    """V2: softmax over all experts; a group is worth its best expert."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.logits(x).softmax(-1)
        weights, chosen = scores.masked_fill(self.outside(scores, 1), 0.0).topk(self.top_k, -1)
        return chosen, weights * self.scale


class SigmoidRouter(Router):
    """V3: sigmoids, with a correction that balances the load: it counts for the choice, not for the weights. A group is
    worth its best two experts."""

    def __init__(
        self, hidden: int, experts: int, top_k: int, groups: int, kept: int, scale: float, *, normalise: bool
    ) -> None:
        super().__init__(hidden, experts, top_k, groups, kept, scale)
        if experts // groups < 2:
            raise fg.ConfigError(
                f"config.json: n_group {groups} leaves one of {experts} experts in a group; two compete"
            )
        self.normalise = normalise
        self.e_score_correction_bias = _float32(experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.logits(x).sigmoid()
        corrected = scores + self.e_score_correction_bias
        chosen = corrected.masked_fill(self.outside(corrected, 2), float("-inf")).topk(self.top_k, -1).indices
        weights = scores.gather(1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.scale


class RoutedExperts(nn.Module):
    """``[tokens, hidden] -> [tokens, hidden]``: each token through the experts its router chooses."""

    def __init__(self, router: Router, experts: fg.Experts) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.router(x)
        mixed: torch.Tensor = self.experts(x, chosen, weights.to(x.dtype))
        return mixed


def _float32(*shape: int) -> nn.Parameter:
    """An unfilled parameter where the model is built."""
    return nn.Parameter(fg.parameter(*shape).float(), requires_grad=False)
