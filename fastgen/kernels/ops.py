"""Every operation by name, and who runs it.

An implementation says what it supports; the choice is made once, when a model is built, and remembered with the
reasons why the others were not taken, for ``fastgen explain``. What an operation means is fixed by its reference
implementation (``reference.py``); every implementation passes the same parity tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastgen.errors import ConfigError, PluginError, did_you_mean

__all__ = ["OPERATIONS", "Choice", "Implementation", "KernelTable", "Need", "anything"]

OPERATIONS: Mapping[str, str] = {
    "linear": "linear(x [tokens, in], weight [out, in], bias [out] or None) -> [tokens, out]",
    "embedding": "embedding(ids [tokens] int64, weight [rows, hidden]) -> [tokens, hidden]",
    "add_rms_norm": "add_rms_norm(stream [..., size], delta or None, weight [size], eps, offset) -> (stream + delta, "
    "its norm times offset + weight)",
    "add_layer_norm": "add_layer_norm(stream [..., size], delta or None, weight [size] or None, bias [size] or None, "
    "eps) -> (stream + delta, its norm)",
    "rotary": "rotary(x [tokens, heads, head_dim], cos, sin [tokens, rotary_dim / 2]) -> x with the first rotary_dim "
    "components of each head rotated in halves",
    "gated_activation": "gated_activation(gate_up [tokens, 2 * hidden], activation name) -> act(gate) * up",
    "activation": "activation(x [tokens, hidden], activation name) -> act(x)",
    "experts": "experts(x [tokens, hidden], gate_up [experts, 2 * width, hidden], down [experts, hidden, width], "
    "chosen [tokens, k] int64, weights [tokens, k], activation name) -> the chosen experts' weighted sum",
    "argmax": "argmax(x [rows, size], of the model's dtype or float32) -> [rows] int64, where the greatest is: the "
    "first of equals; a NaN is greater than any number",
    "paged_attention": "a PagedAttention: owns the cache layout, writes this pass's keys and values, attends causally",
    "quantised_linear": "a QuantisedLinear: owns the packed layout, packs a weight, multiplies by it",
}

AFTER_PASSES = frozenset({"argmax"})
"""Operations on the logits, which no layer asks for."""


@dataclass(frozen=True)
class Need:
    """What a layer asks of an operation: where, in which format, of what size."""

    operation: str
    device: str
    dtype: str
    sizes: Mapping[str, int | str] = field(default_factory=dict)


def anything(need: Need) -> str | None:
    """Supports every need."""
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    ``supports`` returns ``None`` when it can serve a need, or the reason why not, for a person to read. Among those
    that can, the highest ``rank`` wins; the reference implementations have rank 0.
    """

    operation: str
    name: str
    function: Callable[..., Any]
    supports: Callable[[Need], str | None] = anything
    rank: int = 10
    repeatable: bool = False
    """Whether all it does is calls of our CPU library and of torch, the same ones for arguments of the same shapes,
    whatever their values: then a pass may be recorded and replayed without it. The attention's layout may be read only
    through its tensors; its block table has room for the longest sequence then, whatever the pass's sequences need."""


@dataclass(frozen=True)
class Choice:
    """Who serves a need, and why the others do not: ``(name, reason)`` each."""

    need: Need
    chosen: str
    rejected: tuple[tuple[str, str], ...]


class KernelTable:
    """The implementations known to one engine, and the choices made for its model.

    Args:
        device: ``"cpu"``, ``"cuda"``, ...
        dtype: the model's dtype, ``"float32"``, ...
        implementations: in any order; names are unique per operation.
        broken: ``(operation, name, reason)`` of others that cannot even be loaded; never chosen, and listed with the
            rejected.
        kv_dtype: the format in which keys and values are kept; ``"auto"``: ``dtype``.

    Raises:
        PluginError: an implementation of an unknown operation, or two of one name.
    """

    def __init__(
        self,
        device: str,
        dtype: str,
        implementations: Iterable[Implementation],
        broken: Iterable[tuple[str, str, str]] = (),
        *,
        kv_dtype: str = "auto",
    ) -> None:
        self.device, self.dtype, self.kv_dtype = device, dtype, kv_dtype
        self._broken = tuple(broken)
        self.choices: list[Choice] = []
        self._unrepeatable: dict[str, None] = {}
        self._known: dict[str, dict[str, Implementation]] = {name: {} for name in OPERATIONS}
        self._shared: dict[Callable[..., Any], Any] = {}
        for one in implementations:
            if one.operation not in OPERATIONS:
                raise PluginError(
                    f"kernel {one.name!r} implements the unknown operation {one.operation!r}."
                    f"{did_you_mean(one.operation, OPERATIONS)}"
                )
            if one.name in self._known[one.operation]:
                raise PluginError(f"two kernels of the name {one.name!r} implement {one.operation!r}")
            self._known[one.operation][one.name] = one

    def choose(self, operation: str, **sizes: int | str) -> Callable[..., Any]:
        """The best function for this need.

        Raises:
            ConfigError: no implementation supports it; says each one's reason.
        """
        need = Need(operation, self.device, self.dtype, sizes)
        by_rank = sorted(self._known[operation].values(), key=lambda one: (-one.rank, one.name))
        winner: Implementation | None = None
        rejected = [(name, reason) for broken, name, reason in self._broken if broken == operation]
        for one in by_rank:
            reason = self._reason_against(one, need)
            if reason is None and winner is None:
                winner = one
            else:
                rejected.append((one.name, reason or f"ranked below {winner.name if winner else one.name}"))
        if winner is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected) or "none is registered"
            raise ConfigError(f"no kernel can run {operation} on {self.device} in {self.dtype} ({reasons})")
        choice = Choice(need, winner.name, tuple(rejected))
        if choice not in self.choices:
            self.choices.append(choice)
        if not winner.repeatable and operation not in AFTER_PASSES:
            self._unrepeatable[f"the kernel {winner.name!r} for {operation} does not say that it may be"] = None
        return winner.function

    def unrepeatable(self) -> list[str]:
        """Why passes over the kernels chosen so far may not be recorded; empty if they may."""
        return list(self._unrepeatable)

    def shared(self, factory: Callable[..., Any]) -> Any:
        """What ``factory()`` made, once for all layers (an attention kernel keeps buffers)."""
        if factory not in self._shared:
            self._shared[factory] = factory()
        return self._shared[factory]

    def _reason_against(self, one: Implementation, need: Need) -> str | None:
        try:
            reason = one.supports(need)
            kept = need.sizes.get("kv_dtype")
            if reason is not None or kept is None:
                return reason
            known = getattr(self.shared(one.function), "kv_dtypes", ("auto",))  # `PagedAttention`
            return None if kept in known else f"cannot keep keys and values in {kept} (it knows: {', '.join(known)})"
        except Exception as error:  # a plugin's own: it must not cost others their model
            return f"broken: {type(error).__name__}: {error}"
