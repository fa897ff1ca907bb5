"""Mistakes that adapters make, planted into a decoder that is right: a check that would not notice one proves nothing.

The parts are found by their types, wherever a family or a plugin has put them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fastgen.core.containers import Block, Decoder
from fastgen.core.layers import CachedAttention, Embed, Experts, Head, Linear, MoE, Norm, Rope, SharedExpert
from fastgen.core.layers.frequencies import inverse_frequencies
from fastgen.core.layers.layer import Layer
from fastgen.core.rope_config import RopeConfig
from fastgen.kernels.paging import Scores
from fastgen.testing.weight_checks import kind

__all__ = ["Fault", "planted_faults"]

Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """One mistake. ``plant()`` is a context in which the decoder makes it; ``None``: it cannot be made here."""

    name: str
    plant: Plant | None
    hint: str = ""
    """What to change in the case's config where the fault goes unnoticed."""


def planted_faults(decoder: Decoder) -> list[Fault]:
    """Every fault, those that do not apply to this decoder among them (``plant`` is ``None``)."""
    return [
        *_tensor_faults(decoder),
        *_slot_faults(decoder),
        *_norm_faults(decoder),
        *_rope_faults(decoder),
        *_attention_faults(decoder),
        *_expert_faults(decoder),
        *_edge_faults(decoder),
    ]


# ---- tensors --------------------------------------------------------------------------------------------------------


def _tensor_faults(decoder: Decoder) -> Iterator[Fault]:
    """Each kind of tensor: a norm's weights left at one, a bias at zero, anything else read one number off."""
    ropes = any(isinstance(module, Rope) for module in decoder.modules())
    kinds: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for path, layer in _layers(decoder):
        if type(layer).place is Layer.place:
            continue  # it takes tensors in its own way, and has no such places
        for slot, tail in layer.want():
            place = layer.place(slot, tail)
            if tail == "bias":
                if slot == "k" and not ropes:
                    continue  # adds the same to the scores of all keys: the softmax does not see it
                what, wrong = "dropped bias", torch.zeros_like(place)
            elif isinstance(layer, Norm):
                what, wrong = "dropped norm", torch.full_like(place, 1.0 - getattr(layer, "offset", 0.0))
            else:
                shifted = place.flatten().roll(1).view(place.shape) if place.numel() > 1 else place + 1
                what, wrong = "misread", shifted.clone()
            spelt = f"{path}{f'[{slot}]' if slot else ''}" + (f".{tail}" if tail not in ("weight", "bias") else "")
            kinds.setdefault(f"{what}: {kind(spelt)}", []).append((place, wrong))
    for name, writes in kinds.items():
        yield Fault(name, _written(writes), "raise the scale of its numbers, or give the model another layer")
    if not any(name.startswith("dropped bias") for name in kinds):
        yield Fault("dropped bias", None)


def _slot_faults(decoder: Decoder) -> Iterator[Fault]:
    """Two slots of a fused map, of one shape, filled with each other's tensors."""
    swaps: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for path, layer in _layers(decoder):
        if not isinstance(layer, Linear):
            continue
        slots = list(layer.slots)
        for number, one in enumerate(slots):
            for other in slots[number + 1 :]:
                if layer.slots[one] != layer.slots[other]:
                    continue
                name = f"swapped {one} and {other}: {kind(path)}"
                for tail in ("weight", "bias") if layer.bias is not None else ("weight",):
                    swaps.setdefault(name, []).append((layer.place(one, tail), layer.place(other, tail)))
    for name, pairs in swaps.items():
        yield Fault(name, _swapped(pairs))
    experts = [layer for _, layer in _layers(decoder) if isinstance(layer, Experts)]
    gates_and_ups = [
        (layer.place(f"{number}.gate", "weight"), layer.place(f"{number}.up", "weight"))
        for layer in experts
        for number in range(layer.count)
    ]
    yield Fault("swapped gate and up: experts", _swapped(gates_and_ups) if experts else None)
    if not any(name.startswith("swapped gate and up") for name in swaps):
        yield Fault("swapped gate and up", None)


# ---- norms ----------------------------------------------------------------------------------------------------------


def _norm_faults(decoder: Decoder) -> Iterator[Fault]:
    norms = [m for m in decoder.modules() if isinstance(m, Norm)]
    changes = [(norm, "eps", norm.eps * 10) for norm in norms]
    yield Fault("wrong eps", _changed(changes) if norms else None, "norms see no small numbers here")
    offsets = [m for m in norms if getattr(m, "offset", 0.0)]
    yield Fault("forgotten offset", _changed([(m, "offset", 0.0) for m in offsets]) if offsets else None)
    swaps: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for path, block in decoder.named_modules():
        if not isinstance(block, Block):
            continue  # the norms of queries and keys, say: where no rope comes between, swapping them changes nothing
        own = [(name, m) for name, m in block.named_children() if isinstance(m, Norm) and ("", "weight") in m.want()]
        for (one, first), (other, second) in pairwise(own):
            if first is not second and first.size == second.size:
                name = f"swapped {one} and {other}: {kind(path)}"
                swaps.setdefault(name, []).append((first.place("", "weight"), second.place("", "weight")))
    for name, pairs in swaps.items():
        yield Fault(name, _swapped(pairs))


# ---- positions ------------------------------------------------------------------------------------------------------


def _rope_faults(decoder: Decoder) -> Iterator[Fault]:
    ropes = [m for m in decoder.modules() if isinstance(m, Rope)]

    def interleaved(rope: Rope) -> Callable[..., torch.Tensor]:
        """Component 2i turns with 2i + 1."""
        right, width = rope._rotary, rope.config.rotary_dim

        def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            turning, rest = x[..., :width], x[..., width:]
            halves = torch.cat([turning[..., 0::2], turning[..., 1::2]], -1)
            first, second = right(halves, cos, sin).chunk(2, -1)
            return torch.cat([torch.stack([first, second], -1).flatten(-2), rest], -1)

        return turn

    def still(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x

    wide = [rope for rope in ropes if rope.config.rotary_dim > 2]  # a single pair is its own halves
    pairing = _changed([(rope, "_rotary", interleaved(rope)) for rope in wide])
    yield Fault("rope pairing", pairing if wide else None)
    yield Fault("no rope", _changed([(rope, "_rotary", still) for rope in ropes]) if ropes else None)
    stretched = [rope for rope in ropes if rope.config.type != "default"]
    plain: list[tuple[Any, str, Any]] = []
    for rope in stretched:
        config = RopeConfig(
            theta=rope.config.theta,
            rotary_dim=rope.config.rotary_dim,
            max_position_embeddings=rope.config.max_position_embeddings,
        )
        inverse, scale = inverse_frequencies(config, config.rotary_dim)
        plain += [(rope, "config", config), (rope, "inverse", inverse), (rope, "scale", scale)]
    hint = "write a larger factor, or an original length that the prompts pass"
    yield Fault("no rope scaling", _changed(plain) if plain else None, hint)
    # A rope that some layers do not have, given to the wrong ones.
    holders = [
        (m, getattr(m, "rope", None)) for m in decoder.modules() if isinstance(getattr(m, "rope", 0), Rope | None)
    ]
    kinds = {id(rope) for _, rope in holders}
    others = [rope for _, rope in holders[1:]] + [rope for _, rope in holders[:1]]
    moved = [(m, "rope", other) for (m, _), other in zip(holders, others, strict=True)]
    yield Fault("ropes on the wrong layers", _changed(moved) if len(kinds) > 1 else None)


# ---- attention ------------------------------------------------------------------------------------------------------


def _attention_faults(decoder: Decoder) -> Iterator[Fault]:
    attentions = [m for m in decoder.modules() if isinstance(m, CachedAttention)]
    windows = [m.scores.window for m in attentions]

    def scores(change: Callable[[Scores], Scores], some: Iterable[CachedAttention]) -> Plant | None:
        changes = [(m, "scores", change(m.scores)) for m in some]
        return _changed(changes) if changes else None

    def shifted(attention: CachedAttention) -> Callable[..., torch.Tensor]:
        right = attention.forward

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None, batch: Any) -> torch.Tensor:
            return right(query, key.roll(1, 1), None if value is None else value.roll(1, 1), batch)

        return attend

    several = [m for m in attentions if m.kv_heads > 1]
    yield Fault("shifted KV head", _changed([(m, "forward", shifted(m)) for m in several]) if several else None)
    flat = "scores so small that the softmax is flat hide their scale: is a clip, a multiplier or a cap too small?"
    yield Fault("wrong scale", scores(lambda s: replace(s, scale=s.scale * 1.1), attentions), flat)
    windowed = [m for m in attentions if m.scores.window is not None]
    hint = "write a window that is shorter than the prompts"
    yield Fault("window one longer", scores(lambda s: replace(s, window=(s.window or 0) + 1), windowed), hint)
    narrow = [m for m in windowed if (m.scores.window or 0) > 1]
    yield Fault("window one shorter", scores(lambda s: replace(s, window=(s.window or 0) - 1), narrow), hint)
    moved = [
        (m, "scores", replace(m.scores, window=w)) for m, w in zip(attentions, windows[1:] + windows[:1], strict=True)
    ]
    yield Fault("windows on the wrong layers", _changed(moved) if len(set(windows)) > 1 else None)
    capped = [m for m in attentions if m.scores.softcap is not None]
    yield Fault("no soft cap of scores", scores(lambda s: replace(s, softcap=None), capped), "write a smaller one")
    sloped = [m for m in attentions if m.scores.slopes is not None and len(set(m.scores.slopes)) > 1]
    rolled = scores(lambda s: replace(s, slopes=(s.slopes or ())[1:] + (s.slopes or ())[:1]), sloped)
    yield Fault("ALiBi slopes of other heads", rolled)


# ---- experts and activations ----------------------------------------------------------------------------------------


def _expert_faults(decoder: Decoder) -> Iterator[Fault]:
    experts = [layer for _, layer in _layers(decoder) if isinstance(layer, Experts) and layer.count > 1]
    rolls: list[tuple[torch.Tensor, torch.Tensor]] = [
        (tensor, tensor.roll(1, 0)) for layer in experts for tensor in (layer.gate_up, layer.down)
    ]
    yield Fault("swapped experts", _written(rolls) if experts else None)
    routers = [m for m in decoder.modules() if isinstance(m, MoE) and m.top_k < m.experts.count]
    flipped: list[tuple[Any, str, Any]] = [(m, "normalise", not m.normalise) for m in routers]
    yield Fault("router normalised the other way", _changed(flipped) if routers else None)
    gated = [m for m in decoder.modules() if isinstance(m, SharedExpert) and m.gate is not None]
    yield Fault("no gate of the shared expert", _changed([(m, "gate", None) for m in gated]) if gated else None)
    active = [m for m in decoder.modules() if isinstance(getattr(m, "activation", None), str)]
    other: list[tuple[Any, str, Any]] = [(m, "activation", _near(m.activation)) for m in active]
    yield Fault("another activation", _changed(other) if active else None)


def _near(activation: Any) -> str:
    """The one it is taken for most easily."""
    if activation in ("gelu", "gelu_python"):
        return "gelu_pytorch_tanh"
    return "gelu"


# ---- both ends ------------------------------------------------------------------------------------------------------


def _edge_faults(decoder: Decoder) -> Iterator[Fault]:
    embeds = [m for m in decoder.modules() if isinstance(m, Embed)]
    heads = [m for m in decoder.modules() if isinstance(m, Head)]
    scaled = [m for m in embeds if m.scale not in (None, 1.0)]
    turned = nn.ModuleList(reversed(list(decoder.blocks)))
    yield Fault("blocks in another order", _changed([(decoder, "blocks", turned)]) if len(turned) > 1 else None)
    yield Fault("no scale of the embedding", _changed([(m, "scale", None) for m in scaled]) if scaled else None)
    placed = [m for m in embeds if m.positions is not None]
    # Towards the inside of the table, so that every row exists.
    off: list[tuple[Any, str, Any]] = [(m, "position_offset", abs(m.position_offset - 1)) for m in placed]
    yield Fault("positions one off", _changed(off) if placed else None)
    scaled_heads = [m for m in heads if m.scale not in (None, 1.0)]
    yield Fault(
        "no scale of the logits", _changed([(m, "scale", None) for m in scaled_heads]) if scaled_heads else None
    )
    capped = [m for m in heads if m.softcap]
    hint = "write a smaller one"
    yield Fault("no soft cap of the logits", _changed([(m, "softcap", None) for m in capped]) if capped else None, hint)


# ---- how to plant ---------------------------------------------------------------------------------------------------


def _layers(decoder: Decoder) -> list[tuple[str, Layer]]:
    return [(path, module) for path, module in decoder.named_modules() if isinstance(module, Layer)]


def _written(writes: list[tuple[torch.Tensor, torch.Tensor]]) -> Plant:
    """Other numbers in these places."""

    @contextmanager
    def plant() -> Iterator[None]:
        with torch.no_grad():
            kept = [place.clone() for place, _ in writes]
            try:
                for place, wrong in writes:
                    place.copy_(wrong)
                yield
            finally:
                for (place, _), right in zip(writes, kept, strict=True):
                    place.copy_(right)

    return plant


def _swapped(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Plant:
    """Each of two places holds what belongs to the other."""
    return _written([write for one, other in pairs for write in ((one, other.clone()), (other, one.clone()))])


def _changed(changes: list[tuple[Any, str, Any]]) -> Plant:
    """Other attributes."""

    @contextmanager
    def plant() -> Iterator[None]:
        with ExitStack() as back:
            for thing, name, wrong in changes:
                back.callback(_restore(thing, name))
                setattr(thing, name, wrong)
            yield

    return plant


_ABSENT = object()


def _restore(thing: Any, name: str) -> Callable[[], None]:
    """Puts an attribute back: a submodule, an instance's own, or the class's."""
    parts = thing._modules if isinstance(thing, nn.Module) else {}
    if name in parts:
        module = parts[name]
        return lambda: setattr(thing, name, module)
    kept = vars(thing).get(name, _ABSENT)
    return lambda: delattr(thing, name) if kept is _ABSENT else setattr(thing, name, kept)
