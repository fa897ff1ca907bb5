"""Rotary position settings, read once from every spelling a ``config.json`` may use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastgen.errors import ConfigError, UnsupportedModelError, did_you_mean

__all__ = ["RopeConfig", "RopeType", "read_rope", "rope_by_kind", "rope_settings"]

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

PositiveInt = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RopeConfig(BaseModel):
    """How one kind of layer rotates queries and keys. ``layers/frequencies.py`` turns it into numbers.

    Fields a type does not use are ``None``; fields with defaults of transformers' hold them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: RopeType = "default"
    theta: PositiveFloat = 10_000.0
    rotary_dim: PositiveInt
    """Leading dimensions of each head that are rotated, in pairs (i, i + rotary_dim / 2); the rest pass through."""
    partial_rotary_factor: PositiveFloat = 1.0
    max_position_embeddings: PositiveInt
    factor: Annotated[PositiveFloat, Field(le=1e9)] | None = None
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    attention_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    mscale: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] | None = None
    beta_fast: Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)] = 32.0
    beta_slow: Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)] = 1.0
    truncate: Annotated[bool, Field(strict=True)] = True
    short_factor: tuple[PositiveFloat, ...] | None = None
    """For ``longrope``: what each pair's frequency is divided by, in requests no longer than
    `original_max_position_embeddings`."""
    long_factor: tuple[PositiveFloat, ...] | None = None
    """The same for longer requests."""


# Keys of the rope dictionary each type reads, beside those every type has. A key that belongs to another type is
# left alone, as transformers does (files keep `original_max_position_embeddings` beside "linear").
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_TYPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
_REQUIRED_KEYS: dict[str, set[str]] = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
}
# A null stands for max_position_embeddings / original_max_position_embeddings there.
_NULL_DERIVES = {("yarn", "factor")}
_KNOWN_KEYS = _COMMON_KEYS.union(*_TYPE_KEYS.values())
# Notes that change nothing: how the checkpoint was trained.
_NOTES = {"finetuned"}
_ALIASES = {"su": "longrope"}
_SPELLINGS = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
}


def rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rope dictionary of a raw config: ``rope_scaling`` (transformers 4) if it is set, else ``rope_parameters``.

    Raises:
        ConfigError: it is not a dictionary.
    """
    for name in ("rope_scaling", "rope_parameters"):
        settings = raw.get(name)
        if settings is not None and not isinstance(settings, dict):
            raise ConfigError(f"config.json: {name} must be an object, got {settings!r}")
        if settings:
            return dict(settings)
    return {}


def rope_by_kind(
    raw: Mapping[str, Any], theta: float, local_theta_key: str, local_theta: float
) -> dict[str, dict[str, Any]]:
    """The rope dictionaries of full and of sliding layers, where these differ: nested by kind (transformers 5), or from
    a flat file, whose ``rope_scaling`` is that of the full layers alone.

    Args:
        theta: of full layers, where the file has none.
        local_theta_key: the flat key of the sliding layers' theta.
        local_theta: that theta, where the file has none.

    Raises:
        ConfigError: an entry is not a dictionary.
        UnsupportedModelError: a ``rope_parameters`` that is not nested: it does not say whose it is.
    """
    kinds = ("full_attention", "sliding_attention")
    scaling, nested = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for name, settings in (("rope_scaling", scaling), ("rope_parameters", nested)):
        if not isinstance(settings, dict):
            raise ConfigError(f"config.json: {name} must be an object, got {settings!r}")
    for name, settings in nested.items():
        if name not in kinds:
            raise UnsupportedModelError(
                f"config.json: rope_parameters has {name!r}; for this family it holds an object for each of "
                f"{', '.join(map(repr, kinds))}"
            )
        if settings is not None and not isinstance(settings, dict):
            raise ConfigError(f"config.json: rope_parameters.{name} must be an object, got {settings!r}")
    full, sliding = (
        {name: value for name, value in (nested.get(kind) or {}).items() if value is not None} for kind in kinds
    )
    return {
        "full_attention": {"rope_theta": _first(raw, "rope_theta", default=theta), **full, **scaling},
        "sliding_attention": {"rope_theta": _first(raw, local_theta_key, default=local_theta), **sliding},
    }


def read_rope(
    settings: Mapping[str, Any],
    raw: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float = 10_000.0,
    default_partial_rotary_factor: float = 1.0,
    types: Mapping[str, str] = MappingProxyType({}),
    spellings: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> RopeConfig:
    """One rope dictionary (may be empty), completed from the top level of the raw config and the family's defaults.

    The precedence is transformers' (``modeling_rope_utils.RotaryEmbeddingConfigMixin``): the dictionary's own
    ``rope_theta`` and ``partial_rotary_factor`` before the top level's; a top-level
    ``original_max_position_embeddings`` before the dictionary's.

    Args:
        types: other meanings of a rope type's name, in this family.
        spellings: the top level's names of ``rope_theta`` and ``partial_rotary_factor`` in this family, the first
            before the others.

    Raises:
        ConfigError: a value that cannot be used, or one that the rope type needs is missing.
        UnsupportedModelError: a rope type or key that is not known here; it would change the maths.
    """
    kind = _first(settings, "rope_type", "type") or "default"
    kind = {**_ALIASES, **types}.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in get_args(RopeType):
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} is not supported; known are {', '.join(get_args(RopeType))}."
            f"{did_you_mean(str(kind), get_args(RopeType))}"
        )
    for key in settings:
        if key not in _KNOWN_KEYS | _NOTES:
            raise UnsupportedModelError(
                f"config.json: rope key {key!r} (value {settings[key]!r}) is not known, and ignoring it could change "
                f"the model's answers.{did_you_mean(key, _KNOWN_KEYS)}"
            )
    for key in sorted(_REQUIRED_KEYS.get(kind, ())):
        if settings.get(key) is None and not (key in settings and (kind, key) in _NULL_DERIVES):
            raise ConfigError(f"config.json: rope type {kind!r} needs {key!r}, which is missing")

    names = {**_SPELLINGS, **spellings}
    theta = _first(settings, "rope_theta")
    partial = _first(settings, "partial_rotary_factor")
    fields: dict[str, Any] = {
        "type": kind,
        "theta": _first(raw, *names["rope_theta"], default=default_theta) if theta is None else theta,
        "max_position_embeddings": max_position_embeddings,
        **{key: settings[key] for key in _TYPE_KEYS[kind] if settings.get(key) is not None},
    }
    if "original_max_position_embeddings" in _TYPE_KEYS[kind]:
        original = _first(raw, "original_max_position_embeddings")
        own = _first(settings, "original_max_position_embeddings", default=max_position_embeddings)
        fields["original_max_position_embeddings"] = own if original is None else original
    if partial is None:
        partial = _first(raw, *names["partial_rotary_factor"])
    rotary_dim = raw.get("rotary_dim")
    fields |= _rotary_width(partial, rotary_dim, head_dim, default_partial_rotary_factor)
    return _checked(_validate(fields))


def _first(mapping: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    return next((mapping[name] for name in names if mapping.get(name) is not None), default)


def _rotary_width(partial: Any, rotary_dim: Any, head_dim: int, default: float) -> dict[str, Any]:
    if rotary_dim is None:
        partial = default if partial is None else partial
        if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
            raise ConfigError(f"config.json: partial_rotary_factor must lie in (0, 1], got {partial!r}")
        rotary_dim = int(head_dim * partial)
    elif isinstance(rotary_dim, bool) or not isinstance(rotary_dim, int) or not 0 < rotary_dim <= head_dim:
        raise ConfigError(f"config.json: rotary_dim must lie in 1..{head_dim} (head_dim), got {rotary_dim!r}")
    elif _is_number(partial) and int(head_dim * partial) != rotary_dim:
        raise ConfigError(
            f"config.json says rotary_dim = {rotary_dim} and, by partial_rotary_factor {partial} of head_dim "
            f"{head_dim}, {int(head_dim * partial)}; they must agree"
        )
    else:
        partial = rotary_dim / head_dim
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"config.json: {rotary_dim} rotated dimensions per head (head_dim {head_dim}, partial_rotary_factor "
            f"{partial}); rotation goes in pairs, so the number must be even"
        )
    return {"rotary_dim": rotary_dim, "partial_rotary_factor": partial}


def _validate(fields: dict[str, Any]) -> RopeConfig:
    for name, value in fields.items():  # pydantic would read "2" and True as numbers
        if name in ("type", "truncate"):
            continue
        if name in ("short_factor", "long_factor"):
            if not isinstance(value, list) or not all(_is_number(factor) for factor in value):
                raise ConfigError(f"config.json: rope {name} must be a list of numbers, got {value!r}")
        elif not _is_number(value):
            raise ConfigError(f"config.json: rope {name} must be a number, got {value!r}")
    try:
        return RopeConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"config.json: rope {first['loc'][0]}: {first['msg']}, got {first['input']!r}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(rope: RopeConfig) -> RopeConfig:
    if rope.type in ("yarn", "longrope") and rope.factor is None:
        assert rope.original_max_position_embeddings is not None
        rope = rope.model_copy(update={"factor": rope.max_position_embeddings / rope.original_max_position_embeddings})
    stretched = rope.type == "longrope" and rope.attention_factor is None and (rope.factor or 1) > 1
    if stretched and rope.original_max_position_embeddings == 1:
        raise ConfigError(
            "config.json: rope type 'longrope' needs an original_max_position_embeddings above 1, or an "
            "attention_factor, got 1"
        )
    if rope.type == "dynamic" and rope.rotary_dim < 4:
        raise ConfigError(f"config.json: rope type 'dynamic' needs 4 rotated dimensions or more, got {rope.rotary_dim}")
    if rope.type == "dynamic" and rope.factor is not None and rope.factor < 1:
        raise ConfigError(f"config.json: rope factor must be 1 or more for type 'dynamic', got {rope.factor}")
    if rope.type == "yarn" and math.isclose(rope.theta, 1.0):
        raise ConfigError("config.json: rope type 'yarn' needs a rope_theta other than 1")
    for name in ("short_factor", "long_factor"):
        factors = getattr(rope, name)
        if factors is not None and len(factors) != rope.rotary_dim // 2:
            raise ConfigError(
                f"config.json: rope {name} has {len(factors)} numbers; {rope.rotary_dim} rotated dimensions need "
                f"{rope.rotary_dim // 2}"
            )
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if low is not None and high is not None and high <= low:
        raise ConfigError(f"config.json: rope high_freq_factor {high} must be above low_freq_factor {low}")
    return rope
