"""A model's ``config.json``, normalised once: the only place that knows the spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from fastgen.core.config_keys import SPELLINGS, refuse_unknown_maths
from fastgen.core.dtypes import FLOATS, Dtype
from fastgen.core.json_file import read_json_object
from fastgen.core.rope_config import RopeConfig, read_rope, rope_by_kind, rope_settings
from fastgen.errors import ConfigError, ModelNotFoundError, PluginError, UnsupportedModelError, did_you_mean

__all__ = ["HFConfig", "RopeConfig", "read_eos_ids", "read_generation_config", "read_raw_config"]

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
_LARGEST = 2**31 - 1


class HFConfig(BaseModel):
    """What every decoder has. A family subclasses it, adds fields under the names its ``config.json`` uses, and
    overrides a default where its transformers class has another one:

        class FooConfig(HFConfig):
            default_rope_theta = 10_000.0
            sliding_window: int | None = None
            use_sliding_window: bool = False

    Build one with `from_raw`. Keys that are not fields are ignored, but for those that would silently change the
    model's maths (`config_keys.NEUTRAL`): these are refused unless the class has a field of that name, or they are
    neutral.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False, defer_build=True)

    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Other names of a field in the raw file, for this family; laid over `SPELLINGS`. Names that are present and
    disagree are an error; of the names of ``rope_theta`` and ``partial_rotary_factor``, which are no fields, the
    first wins."""
    rope_types: ClassVar[Mapping[str, str]] = {}
    """Other meanings that this family's files give to the name of a rope type."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """What the family's transformers class takes for a field of this class that the file does not mention, or sets to
    null. (A null in ``head_dim`` or ``num_key_value_heads`` does say something: that the number is derived.)"""
    default_rope_theta: ClassVar[float] = 10_000.0
    default_partial_rotary_factor: ClassVar[float] = 1.0
    """A family that turns only a part of each head says so, by another default or by an entry in `spellings`; in
    others a file that asks for it is refused."""
    has_rope: ClassVar[bool] = True
    """False for a family with another kind of position: `rope` is ``None`` and rope keys are not read."""
    local_rope_theta: ClassVar[tuple[str, float] | None] = None
    """For a family whose ``"sliding_attention"`` layers turn by a theta of their own, unscaled: the key of flat files
    that holds it, and its default. `rope_by_layer_type` then holds that kind and ``"full_attention"``, for flat and
    nested files alike."""
    nested_in: ClassVar[str | None] = None
    """The key under which multimodal files keep the config of their language model, for a family that serves the
    language model of such a file alone."""

    architectures: tuple[str, ...] = ()
    model_type: str | None = None
    vocab_size: Annotated[Count, Field(le=2**26)]
    hidden_size: Annotated[Count, Field(le=2**20)]
    num_hidden_layers: Annotated[Count, Field(le=4096)]
    num_attention_heads: Annotated[Count, Field(le=2**14)]
    num_key_value_heads: Annotated[Count, Field(le=2**14)]
    head_dim: Annotated[Count, Field(le=2**16)]
    intermediate_size: Annotated[Count, Field(le=2**24)] | None = None
    hidden_act: str = "silu"
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    max_position_embeddings: Annotated[Count, Field(le=2**31 - 1)] = 2048
    tie_word_embeddings: bool = False
    torch_dtype: Dtype | None = None
    bos_token_id: Annotated[int, Field(ge=0)] | None = None
    eos_token_ids: frozenset[int] = frozenset()
    rope: RopeConfig | None = None
    rope_by_layer_type: dict[str, RopeConfig] = Field(default_factory=dict)
    """Of a family with a `local_rope_theta`, by the names in ``layer_types``; `rope` is then ``None``."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for option, names in (("defaults", cls.defaults), ("spellings", cls.spellings)):
            for name in names:
                if name not in cls.model_fields and not (option == "spellings" and name in _ROPE_KEYS):
                    near = did_you_mean(name, cls.model_fields)
                    raise PluginError(f"{cls.__name__}: {option} names {name!r}, which is no field of it.{near}")

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> Self:
        """The normalised config.

        Raises:
            ConfigError: a field is missing or holds a value that cannot be used; the message names both.
            UnsupportedModelError: the file asks for something that changes the maths and is not known here.
        """
        raw = _unnested(raw, cls.nested_in)
        refuse_unknown_maths(raw, cls.model_fields, cls.__name__)
        spellings = {name: names for name, names in {**SPELLINGS, **cls.spellings}.items() if name not in _ROPE_KEYS}
        silent = {name for name in cls.defaults if not _mentions(raw, name, (name, *spellings.get(name, ())))}
        fields = {**raw, **_spelled(raw, spellings), **{name: cls.defaults[name] for name in silent}}
        fields = {name: value for name, value in fields.items() if name not in _DERIVED or name in silent}
        fields["architectures"] = _architectures(raw)
        if "eos_token_id" in raw:
            fields["eos_token_ids"] = read_eos_ids(raw, "config.json")
        if fields.get("num_key_value_heads") is None:
            fields["num_key_value_heads"] = fields.get("num_attention_heads")
        if fields.get("head_dim") is None:
            fields["head_dim"] = _derived_head_dim(fields)
        config = cls._validated(fields, raw)
        return cls._validated({**fields, **cls._ropes(raw, config)}, raw) if cls.has_rope else config

    @classmethod
    def _validated(cls, fields: dict[str, Any], raw: Mapping[str, Any]) -> Self:
        try:
            return cls(**{name: value for name, value in fields.items() if value is not None or cls._nullable(name)})
        except ValidationError as error:
            raise _config_error(error, cls, raw) from None

    @classmethod
    def _nullable(cls, name: str) -> bool:
        """Whether an explicit null is a value of this field, as in ``sliding_window: null``; else it means "unset"."""
        field = cls.model_fields.get(name)
        return field is not None and type(None) in get_args(field.annotation)

    @classmethod
    def _ropes(cls, raw: Mapping[str, Any], config: HFConfig) -> dict[str, Any]:
        # A family whose class has this field reads it before the rope dictionary's, its default included.
        original = getattr(config, "original_max_position_embeddings", None)
        if original is not None:
            raw = {**raw, "original_max_position_embeddings": original}

        def read(settings: Mapping[str, Any]) -> RopeConfig:
            rope = read_rope(
                settings,
                raw,
                types=cls.rope_types,
                spellings=cls.spellings,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                default_theta=cls.default_rope_theta,
                default_partial_rotary_factor=cls.default_partial_rotary_factor,
            )
            if rope.rotary_dim != config.head_dim and not cls._turns_part():
                raise UnsupportedModelError(
                    f"config.json: {rope.rotary_dim} of {config.head_dim} dimensions of a head are to be turned "
                    f"(partial_rotary_factor, rotary_dim), which {cls.__name__} does not support"
                )
            return rope

        if cls.local_rope_theta is not None:
            by_kind = rope_by_kind(raw, cls.default_rope_theta, *cls.local_rope_theta)
            return {"rope_by_layer_type": {kind: read(settings) for kind, settings in by_kind.items()}}
        settings = rope_settings(raw)
        nested = {name: value for name, value in settings.items() if isinstance(value, dict)}
        if nested:
            raise UnsupportedModelError(
                f"config.json: rope settings differ by layer type ({', '.join(map(repr, nested))}), which "
                f"{cls.__name__} does not support"
            )
        return {"rope": read(settings)}

    @classmethod
    def _turns_part(cls) -> bool:
        return cls.default_partial_rotary_factor != 1 or "partial_rotary_factor" in cls.spellings

    def layer_windows(self, slides: Callable[[int], bool] = lambda layer: True) -> list[int | None]:
        """For each layer, the tokens that a query sees, itself included; ``None``: all before it.

        Reads the fields ``sliding_window``, ``use_sliding_window`` and ``layer_types``, as far as the family has them.
        Layer types, where the file has them, say which layers slide; else ``slides`` does, asked with each index.

        Raises:
            ConfigError: layer types that are not one for each layer, or that slide where the file has no window.
            UnsupportedModelError: a layer type other than full and sliding attention.
        """
        window: int | None = getattr(self, "sliding_window", None)
        off = not getattr(self, "use_sliding_window", True)
        if off:
            window = None
        kinds: list[str] | None = getattr(self, "layer_types", None)
        if kinds is None:
            return [window if slides(layer) else None for layer in range(self.num_hidden_layers)]
        if len(kinds) != self.num_hidden_layers:
            raise ConfigError(
                f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(f"config.json: layer type {kind!r} (in layer_types) is not supported")
        if window is None and "sliding_attention" in kinds:
            reason = "use_sliding_window is false" if off else "sliding_window is not set"
            raise ConfigError(f"config.json: layer_types has sliding_attention layers, but {reason}; they must agree")
        return [window if kind == "sliding_attention" else None for kind in kinds]

    @field_validator("*")
    @classmethod
    def _within_reason(cls, value: Any, info: ValidationInfo) -> Any:
        """Bounds that hold for a family's own fields too, and for those of these that it declares anew."""
        if type(value) is int and abs(value) > _LARGEST:
            raise ValueError(f"must lie between {-_LARGEST} and {_LARGEST}")
        if info.field_name in ("intermediate_size", "max_position_embeddings") and value is not None and value < 1:
            raise ValueError("must be 1 or more")
        if info.field_name == "norm_eps" and not 0 < value < 1:
            raise ValueError("must lie between 0 and 1")
        return value

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        return self


_OUTER = ("architectures", "bos_token_id", "eos_token_id", "tie_word_embeddings")
"""What the outer config of a multimodal file says of the whole model, before the nested one."""

_ROPE_KEYS = {"rope_theta", "partial_rotary_factor"}
_DERIVABLE = {"num_key_value_heads", "head_dim"}
_DERIVED = {"rope", "rope_by_layer_type", "eos_token_ids"}


def _unnested(raw: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
    """A flat config, of a multimodal file's: the nested one, and what the outer one says besides."""
    nested = raw.get(key) if key else None
    if not isinstance(nested, dict):
        return raw
    outer = {name for name in _OUTER if raw.get(name) is not None}
    if any(raw.get(name) is not None for name in SPELLINGS["torch_dtype"]):
        outer.update(SPELLINGS["torch_dtype"])
    return {**raw, **{name: value for name, value in nested.items() if name not in outer}}


def _mentions(raw: Mapping[str, Any], field: str, names: tuple[str, ...]) -> bool:
    """Whether the file says anything of a field. A null does only where it has a meaning: to derive the value."""
    given = {name: raw[name] for name in names if name in raw}
    return bool(given) if field in _DERIVABLE else any(value is not None for value in given.values())


def _spelled(raw: Mapping[str, Any], spellings: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    fields = {}
    for field, names in spellings.items():
        given = {name: raw[name] for name in names if raw.get(name) is not None}
        if field == "torch_dtype":
            given = {name: _dtype(value) for name, value in given.items()}
        if not given:
            continue
        (name, value), *others = given.items()
        for other, different in others:
            if different != value:
                raise ConfigError(f"config.json says {name} = {value!r} and {other} = {different!r}; they must agree")
        fields[field] = value
    return fields


def _architectures(raw: Mapping[str, Any]) -> tuple[str, ...]:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: architectures must be a list of class names, got {names!r}")
    return tuple(names)


def _derived_head_dim(fields: Mapping[str, Any]) -> int | None:
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if not (type(hidden) is int and type(heads) is int and hidden > 0 and heads > 0):
        return 1  # one of the two is refused by its own field, which tells more
    if hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim "
            "is not set"
        )
    return hidden // heads


def _dtype(value: Any) -> str:
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in FLOATS:
        raise ConfigError(f"config.json: dtype {value!r} is not one of {', '.join(FLOATS)}")
    return str(name)


def _config_error(error: ValidationError, cls: type[HFConfig], raw: Mapping[str, Any]) -> ConfigError:
    first = error.errors()[0]
    field, *rest = first["loc"] or ("",)
    names = {**SPELLINGS, **cls.spellings}.get(str(field), (str(field),))
    name = ".".join([next((name for name in names if name in raw), names[0]), *map(str, rest)])
    if first["type"] == "missing":
        return ConfigError(f"config.json has no {name}, which {cls.__name__} needs")
    text = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return ConfigError(f"config.json: {name}: {text}, got {first['input']!r}" if name else f"config.json: {text}")


def read_eos_ids(raw: Mapping[str, Any], file: str) -> frozenset[int]:
    """``eos_token_id`` of a config or generation config as a set; it may be a number, a list, null or absent.

    Raises:
        ConfigError: anything else; ``file`` is named.
    """
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(token for token in ids if token >= 0)  # -1 stands for "none" in old files


def read_raw_config(directory: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a model directory, as it is.

    Raises:
        ModelNotFoundError: there is none.
        ConfigError: it cannot be read, is too large, or is not a JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{directory} has no config.json, so it is not a model directory")
    return read_json_object(path)


def read_generation_config(directory: str | Path) -> dict[str, Any]:
    """The ``generation_config.json`` of a model directory; empty where there is none.

    Raises:
        ConfigError: it cannot be read, is too large, or is not a JSON object.
    """
    path = Path(directory) / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}
