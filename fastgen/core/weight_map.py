"""Which checkpoint module fills which part of a model. No torch here: adapters state their maps when imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = [
    "DECODER_WEIGHTS",
    "Destination",
    "Transform",
    "WeightMap",
    "expert_rules",
    "split_gate_up",
    "split_interleaved",
    "split_qkv",
    "split_qkv_groups",
]

Transform = Callable[[Any, Any], Mapping[str, Any]]
"""``(tensor, config) -> {slot: tensor}``: takes a checkpoint tensor apart. Also run on tensors without data (torch's
meta device) to check shapes before anything is read, so it may only slice, view, permute and concatenate."""


def split_qkv(tensor: Any, config: Any) -> dict[str, Any]:
    """Rows (or a bias) fused as ``[all q | all k | all v]``."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return dict(zip("qkv", tensor.split([q, kv, kv]), strict=True))


def split_qkv_groups(tensor: Any, config: Any) -> dict[str, Any]:
    """Rows (or a bias) fused by key head: for each, its query heads, then its key, then its value. With as many key
    heads as query heads that is ``[q, k, v]`` head by head; with one, ``[all q | k | v]``."""
    grouped = tensor.view(config.num_key_value_heads, -1, config.head_dim, *tensor.shape[1:])
    q, k, v = grouped.split([grouped.shape[1] - 2, 1, 1], 1)
    return {name: part.flatten(0, 2) for name, part in zip("qkv", (q, k, v), strict=True)}


def split_gate_up(tensor: Any, config: Any) -> dict[str, Any]:
    """Rows (or a bias) fused as ``[gate | up]``."""
    return dict(zip(("gate", "up"), tensor.chunk(2), strict=True))


def split_interleaved(slot: str) -> Transform:
    """For queries or keys (``slot``) whose rope turns neighbouring rows: the rows (or biases) of each head reordered,
    so that row i turns with row i + rotary_dim / 2, as parts here expect. Only a head's first ``rotary_dim`` move."""

    def split(tensor: Any, config: Any) -> dict[str, Any]:
        import torch

        heads = tensor.view(-1, config.head_dim, *tensor.shape[1:])
        turning, rest = heads.split([config.rope.rotary_dim, config.head_dim - config.rope.rotary_dim], 1)
        halves = turning.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return {slot: torch.cat([halves, rest], 1).flatten(0, 1)}

    return split


def expert_rules(
    found: str, part: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, str]:
    """Rules for experts, which files hold one by one (``{found}.7.gate_proj``) or stacked in ``found``'s own tensors.

    Args:
        found: the module of all experts in the checkpoint.
        part: where the model has them.
        gate, up, down: what an expert's own modules are called.
    """
    one_by_one = {"gate": gate, "up": up, "down": down}
    return {found: part, **{f"{found}.*.{name}": f"{part}[*.{slot}]" for slot, name in one_by_one.items()}}


_NUMBER = re.compile(r"\d+")

Rule = str | tuple[str, Transform] | None


@dataclass(frozen=True)
class Destination:
    """Where a checkpoint tensor goes: the part at ``path``, its ``slot``, and what of it (``tail``: weight, bias)."""

    path: str
    slot: str
    tail: str
    transform: Transform | None = None


class WeightMap:
    """Rules from checkpoint **module** names to parts, so that biases and other tensors of a module follow.

    ``"model.layers.*.self_attn.q_proj": "blocks.*.attn.qkv[q]"`` sends every tensor of that module to slot ``q`` of the
    part ``qkv``; each ``*`` is a number, kept in order. A rule may carry a :data:`Transform`: ``("path", split_qkv)``.

    Args:
        rules: anchored at both ends; later maps win over the one they derive from.
        ignore: whole tensor names that are no weights (recomputable buffers); here ``*`` matches anything.
        unused: ``(tensor name, config) -> bool``: weights of what is not served here, such as the vision tower of a
            multimodal checkpoint; they are left unread, and the user is told.
        roots: other names some checkpoints have for the canonical root of the rules: ``{found: canonical}``.
    """

    def __init__(
        self,
        rules: Mapping[str, Rule],
        *,
        ignore: Iterable[str] = (),
        roots: Mapping[str, str] | None = None,
        unused: Callable[[str, Any], bool] | None = None,
    ) -> None:
        self.rules = {pattern: rule for pattern, rule in rules.items() if rule is not None}
        self.ignore = tuple(ignore)
        self.roots = dict(roots or {})
        self.unused = unused

    def but(
        self,
        rules: Mapping[str, Rule],
        *,
        ignore: Iterable[str] = (),
        unused: Callable[[str, Any], bool] | None = None,
    ) -> WeightMap:
        """This map with other rules laid over it; ``None`` takes a rule away."""
        return WeightMap(
            {**self.rules, **rules},
            ignore=(*self.ignore, *ignore),
            roots=self.roots,
            unused=self.unused if unused is None else unused,
        )

    @cached_property
    def _compiled(self) -> dict[str, list[tuple[re.Pattern[str], str, Transform | None]]]:
        """By the pattern with every number in it as ``*`` too, so that a name finds its rule without a search."""
        compiled: dict[str, list[tuple[re.Pattern[str], str, Transform | None]]] = {}
        for pattern, rule in self.rules.items():
            destination, transform = rule if isinstance(rule, tuple) else (rule, None)
            assert destination is not None
            if pattern.count("*") != destination.count("*"):
                raise ValueError(f"the rule {pattern!r} -> {destination!r} has a different number of * on each side")
            found = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
            compiled.setdefault(_NUMBER.sub("*", pattern), []).append((found, destination, transform))
        return compiled

    @cached_property
    def _ignored(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in self.ignore) or r"(?!)")

    def ignores(self, name: str) -> bool:
        """Whether this tensor is a buffer that is recomputed and need not be read."""
        return self._ignored.fullmatch(name) is not None

    def find(self, name: str) -> Destination | None:
        """Where the tensor of this (canonical) name goes, or ``None`` when no rule claims it."""
        module, _, tail = name.rpartition(".")
        for pattern, destination, transform in self._compiled.get(_NUMBER.sub("*", module), ()):
            match = pattern.fullmatch(module)
            if match is None:
                continue
            for number in match.groups():
                destination = destination.replace("*", number, 1)
            path, _, slot = destination.partition("[")
            return Destination(path, slot.removesuffix("]"), tail, transform)
        return None

    def rename(self, names: Iterable[str]) -> dict[str, str]:
        """``{name in the file: canonical name}`` under the one root that fits the most of these names."""
        names = list(names)

        def under(found: str, canonical: str) -> dict[str, str]:
            moved = (n for n in names if n.startswith(found) and self.find(n) is None)
            return {n: n for n in names} | {n: canonical + n.removeprefix(found) for n in moved}

        as_written = {n: n for n in names}
        if all(self.find(n) is not None or self.ignores(n) for n in names):
            return as_written
        candidates = [as_written, *(under(found, canonical) for found, canonical in self.roots.items())]
        return max(candidates, key=lambda renamed: sum(self.find(n) is not None for n in renamed.values()))


DECODER_WEIGHTS = WeightMap(
    {
        "model.embed_tokens": "embed.tokens",
        "model.norm": "norm",
        "lm_head": "head.proj",
        "model.layers.*.input_layernorm": "blocks.*.norm1",
        "model.layers.*.post_attention_layernorm": "blocks.*.norm2",
        "model.layers.*.self_attn.q_proj": "blocks.*.attn.qkv[q]",
        "model.layers.*.self_attn.k_proj": "blocks.*.attn.qkv[k]",
        "model.layers.*.self_attn.v_proj": "blocks.*.attn.qkv[v]",
        "model.layers.*.self_attn.o_proj": "blocks.*.attn.out",
        "model.layers.*.self_attn.q_norm": "blocks.*.attn.q_norm",
        "model.layers.*.self_attn.k_norm": "blocks.*.attn.k_norm",
        "model.layers.*.mlp.gate_proj": "blocks.*.mlp.up[gate]",
        "model.layers.*.mlp.up_proj": "blocks.*.mlp.up[up]",
        "model.layers.*.mlp.down_proj": "blocks.*.mlp.down",
    },
    ignore=["*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached"],
    # Multimodal checkpoints nest the language model; a bare base model has no root at all.
    roots={
        "language_model.": "",
        "model.language_model.": "model.",
        "transformer.": "model.",
        "": "model.",
    },
)
"""The names most families in transformers write. Derive yours with ``.but({...})``."""
