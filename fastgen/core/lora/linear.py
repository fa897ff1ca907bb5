"""Adapters at work: each row of a pass gets what its own adapter adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from fastgen.core.layers import Linear
from fastgen.core.lora.plan import LoraPlan, LoraTarget

__all__ = ["LoraLinear", "Loras"]

Run = tuple[str | None, int]
"""An adapter's name (``None``: the model as it is) and a number of rows that follow one another."""


@dataclass(frozen=True)
class Rows:
    """The rows of each adapter among ``count``; ``None``: all of them."""

    count: int
    of: Mapping[str, torch.Tensor | None]

    @classmethod
    def group(cls, runs: Iterable[Run], device: torch.device) -> Rows:
        """Runs, in the order of the rows, by adapter."""
        runs = [run for run in runs if run[1]]
        ends = list(accumulate(count for _, count in runs))
        total = ends[-1] if ends else 0
        spans: dict[str, list[torch.Tensor]] = {}
        for (name, count), end in zip(runs, ends, strict=True):
            if name is not None:
                spans.setdefault(name, []).append(torch.arange(end - count, end))
        index = {name: torch.cat(parts) for name, parts in spans.items()}
        return cls(total, {name: None if len(i) == total else i.to(device) for name, i in index.items()})


class Loras:
    """The adapters of one engine, and which rows of the pass in flight are whose. One thread at a time."""

    def __init__(self, plans: Sequence[LoraPlan], device: torch.device) -> None:
        self.plans, self.device = plans, device
        self._stream: Rows | None = None
        self._logits: Rows | None = None

    def attach(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Read the adapters, and put them into the model. It must have its weights and no kernels yet: a part that
        looks at the weight of another, which an adapter changes, fails then, and not silently.

        Raises:
            CheckpointError: a file changed since it was planned.
        """
        wrapped: dict[str, LoraLinear] = {}
        for plan in self.plans:
            names = [name for target in plan.targets for name in (target.down, target.up)]
            tensors = {name: tensor.clone() for name, tensor in plan.files.stream(names)}
            for path in dict.fromkeys(target.path for target in plan.targets):
                if path not in wrapped:
                    wrapped[path] = self._wrap(model, path)
                targets = [target for target in plan.targets if target.path == path]
                wrapped[path].take(plan.name, targets, tensors, dtype, self.device)

    def _wrap(self, model: nn.Module, path: str) -> LoraLinear:
        base = model.get_submodule(path)
        assert isinstance(base, Linear)
        wrapper = LoraLinear(base, self, path)
        for parent in list(model.modules()):  # a part may be shared
            for name in [name for name, child in parent._modules.items() if child is base]:
                setattr(parent, name, wrapper)
        return wrapper

    @contextmanager
    def rows(self, stream: Iterable[Run], logits: Iterable[Run]) -> Iterator[None]:
        """What runs inside is a pass over these rows; outside, the model answers without adapters.

        Args:
            stream: the tokens of the pass.
            logits: the rows that come to the last norm and the head.
        """
        self._stream, self._logits = Rows.group(stream, self.device), Rows.group(logits, self.device)
        try:
            yield
        finally:
            self._stream = self._logits = None

    def now(self, *, head: bool) -> Rows | None:
        """The rows of the pass in flight, at the last norm and the head or before them."""
        return self._logits if head else self._stream


@dataclass(frozen=True)
class _Delta:
    """What one adapter adds to one `Linear`."""

    down: torch.Tensor
    """The factors A of its slots, one under another: ``[ranks, in]``."""
    ups: list[tuple[slice, slice, torch.Tensor]]
    """For each slot its columns of ``x @ down.T``, its columns of the output, and ``scale * B``: ``[out, rank]``."""

    def add(self, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor | None) -> None:
        inner = (x if rows is None else x.index_select(0, rows)) @ self.down.T
        for ranks, out, up in self.ups:
            added = inner[:, ranks] @ up.T
            if rows is None:
                y[:, out] += added
            else:
                y[:, out].index_add_(0, rows, added)


class LoraLinear(nn.Module):
    """A `Linear` with adapters: ``x [tokens, in] -> [tokens, out]``. It has no ``weight``: not one serves all rows."""

    def __init__(self, base: Linear, loras: Loras, path: str) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features, self.slots = base.in_features, base.out_features, base.slots
        self.path = path
        self._loras = loras
        self._head = path.partition(".")[0] in ("norm", "head")  # these see the rows whose logits are wanted
        self._deltas: dict[str, _Delta] = {}

    def take(
        self,
        name: str,
        targets: Sequence[LoraTarget],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Hold the adapter ``name``, which changes the slots of these ``targets``."""
        starts = dict(zip(self.slots, accumulate(self.slots.values(), initial=0), strict=False))
        ups = []
        rank = 0
        for target in targets:
            # In float32 first: a scale such as 16 / sqrt(48) is no bfloat16.
            scaled = tensors[target.up].float() * target.scale
            for slot, rows in target.slots.items():
                part = scaled if rows is None else scaled[rows]
                out = slice(starts[slot], starts[slot] + self.slots[slot])
                ups.append((slice(rank, rank + target.rank), out, part.to(device, dtype)))
            rank += target.rank
        down = torch.cat([tensors[target.down].to(device, dtype) for target in targets])
        self._deltas[name] = _Delta(down, ups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        rows = self._loras.now(head=self._head)
        if rows is None:
            return y
        for name, index in rows.of.items():
            delta = self._deltas.get(name)
            if delta is None:
                continue
            if x.ndim != 2 or len(x) != rows.count:
                raise RuntimeError(
                    f"LoRA cannot act on {self.path}: its input is {list(x.shape)} in a pass of {rows.count} rows"
                )
            delta.add(x, y, index)
        return y
