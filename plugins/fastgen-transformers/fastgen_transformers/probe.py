"""What each attention of a model asks for, found by running its code once without data (on torch's meta device).

The modelling code is handed an attention function that writes down what it is called with, and a mask function that
writes down what the mask would be: transformers describes masks as functions of two positions, which are asked here
for what they mean. Whatever fastgen's paged attention would not reproduce is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fastgen import api as fg

__all__ = ["PROBE", "AttentionCall", "probe"]

PROBE = "fastgen_probe"
_TOKENS = 8
_LONGEST = 2**20  # positions at which masks are asked
# Arguments of attention functions that change nothing here, because a pass has no padding, dropout or cache.
_HARMLESS = {
    "cache_position",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "sliding_window",  # the mask says so, too, and is what transformers' own attention goes by
    "use_cache",
}


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function: the arguments of a `fastgen.api.CachedAttention`."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass
class _Notes:
    longest: int
    calls: list[AttentionCall] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)


_notes: ContextVar[_Notes] = ContextVar("notes")


class _Refused(Exception):
    """Raised inside the modelling code; its text completes "its attention ..."."""


def probe(model: Any, *, longest: int) -> list[AttentionCall]:
    """The calls of one pass, in order.

    Args:
        model: on the meta device, built with the attention implementation `PROBE`.
        longest: positions it has.

    Raises:
        UnsupportedModelError: it does what fastgen's paged attention does not.
    """
    notes, name = _Notes(longest), type(model).__name__
    token = _notes.set(notes)
    try:
        with torch.no_grad(), torch.device("meta"), _without_experts(model), _one_sequence(), _NothingFound():
            ids, positions = torch.zeros(1, _TOKENS, dtype=torch.int64), torch.arange(_TOKENS)[None]
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except _Refused as refused:
        raise fg.UnsupportedModelError(
            f"{name} cannot run over fastgen's paged cache: its attention {refused}"
        ) from None
    except Exception as error:
        raise fg.UnsupportedModelError(
            f"{name} cannot run over fastgen's paged cache: its code does not run without data "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
        ) from error
    finally:
        _notes.reset(token)
    _check_layers(model, notes)
    return notes.calls


def _check_layers(model: Any, notes: _Notes) -> None:
    """Every layer must have attended: one that did not keeps a state of another kind, which nobody would keep."""
    called = {id(module) for module in notes.modules}

    def attends(part: torch.nn.Module) -> bool:
        return any(id(inner) in called for inner in part.modules())

    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and attends(m)]
    if not stacks:
        raise fg.UnsupportedModelError(
            f"{type(model).__name__} cannot run over fastgen's paged cache: none of its layers calls the attention "
            "function that transformers lets others give"
        )
    for stack in stacks:
        for number, layer in enumerate(stack):
            if not attends(layer):
                raise fg.UnsupportedModelError(
                    f"{type(model).__name__} cannot run over fastgen's paged cache: its layer {number} "
                    f"({type(layer).__name__}) does not call it, so it keeps or looks at something else"
                )


def _observe(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    notes = _notes.get()
    for name, given in kwargs.items():
        if given is not None and name not in _HARMLESS:
            raise _Refused(f"is given {name}, which fastgen does not know")
    if query.ndim != 4 or query.shape[0] != 1 or query.shape[2] != _TOKENS:
        raise _Refused(f"mixes tokens before it attends (queries {list(query.shape)} for {_TOKENS} tokens)")
    heads, kv_heads, tokens = query.shape[1], key.shape[1], _TOKENS
    if heads % kv_heads:
        raise _Refused(f"has {heads} query heads for {kv_heads} keys")
    if key.shape[2] != tokens or value.shape[:3] != key.shape[:3]:
        raise _Refused(f"has keys {list(key.shape)} and values {list(value.shape)} for {tokens} tokens")
    if isinstance(scaling, torch.Tensor):
        raise _Refused("computes its scale in each pass")
    notes.modules.append(module)
    notes.calls.append(
        AttentionCall(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=_window(attention_mask),
            softcap=softcap or None,
        )
    )
    return torch.empty(1, tokens, heads, value.shape[3], dtype=value.dtype, device="meta"), None


class _Mask(torch.Tensor):
    """A mask without data that knows what it stands for, and passes that on to its slices and views alone."""

    window: int | None
    refusal: str | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        same = getattr(func, "__name__", "") in ("__getitem__", "to", "contiguous", "expand", "view", "unsqueeze")
        if not isinstance(made, torch.Tensor):
            return made
        plain = made.as_subclass(torch.Tensor)
        return _mask(plain, args[0].window, args[0].refusal) if same and isinstance(args[0], _Mask) else plain


def _mask(data: torch.Tensor, window: int | None, refusal: str | None) -> _Mask:
    mask = data.as_subclass(_Mask)
    mask.window, mask.refusal = window, refusal
    return mask


def _window(mask: torch.Tensor | None) -> int | None:
    """What our own mask function found out about the mask."""
    if not isinstance(mask, _Mask):
        raise _Refused("is given no mask" if mask is None else "makes or changes its mask by itself")
    if mask.refusal is not None:
        raise _Refused(mask.refusal)
    return mask.window


def _describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    window, refusal = None, None
    try:
        window = read_window(mask_function, min(_notes.get().longest, _LONGEST))
    except _Refused as refused:  # it counts only if some attention is given this mask
        refusal = str(refused)
    with torch._C.DisableTorchFunctionSubclass():
        data = torch.empty(batch_size, 1, q_length, kv_length, dtype=dtype, device="meta")
    return _mask(data, window, refusal)


def read_window(mask_function: Callable[..., Any], longest: int) -> int | None:
    """How many tokens a query sees under this mask, itself included; ``None``: all before it.

    Args:
        mask_function: ``(batch, head, query position, key position) -> bool``, of tensors.
        longest: positions to ask for.
    """
    with torch.device("cpu"):
        keys = torch.arange(longest)
        seen = int(_row(mask_function, longest - 1, keys).sum())
        window = None if seen == longest else seen
        for query in sorted({longest // 3, longest // 2, longest - 1, *range(min(longest, 64))}):
            expected = keys <= query
            if window is not None:
                expected &= keys > query - window
            got = _row(mask_function, query, keys)
            if bool((got & (keys > query)).any()):
                raise _Refused("sees tokens that come after")
            if not torch.equal(got, expected):
                raise _Refused("sees other tokens than all before it, or than a sliding window of them")
    return window


def _row(mask_function: Callable[..., Any], query: int, keys: torch.Tensor) -> torch.Tensor:
    zero = torch.tensor(0)
    try:
        row: torch.Tensor = mask_function(zero, zero, torch.tensor(query), keys)
    except Exception as error:
        raise _Refused("has a mask that depends on more than two positions") from error
    return row.expand(keys.shape)


class _NothingFound(TorchFunctionMode):
    """Where code looks for the tokens that chose an expert, there are none: it cannot be said, and does not matter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = getattr(func, "__name__", "")
        if found == "nonzero" or (found == "where" and len(args) == 1):
            indices = torch.empty(0, args[0].ndim, dtype=torch.int64, device="meta")
            apart = found == "where" or (kwargs or {}).get("as_tuple")
            return tuple(indices.unbind(1)) if apart else indices
        return func(*args, **(kwargs or {}))


@contextmanager
def _one_sequence() -> Iterator[None]:
    """transformers looks in the positions for several sequences in one row, which takes data; here is one."""
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


@contextmanager
def _without_experts(model: Any) -> Iterator[None]:
    """Routed experts choose by data, which there is none of: leave them out."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "to_dict")}
    before = {key: getattr(config, "_experts_implementation_internal", None) for key, config in configs.items()}
    for config in configs.values():
        config._experts_implementation_internal = PROBE
    try:
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation_internal = before[key]


def _skip_experts(module: torch.nn.Module, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


AttentionInterface.register(PROBE, _observe)
AttentionMaskInterface.register(PROBE, _describe_mask)
ALL_EXPERTS_FUNCTIONS.register(PROBE, _skip_experts)
