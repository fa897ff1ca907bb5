"""Engine options, the same as keywords, command-line flags and TOML; every field with its default and meaning."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fastgen.errors import ConfigError, did_you_mean, first_problem

__all__ = ["EngineConfig", "cache_directory", "parse_bytes"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def cache_directory() -> Path:
    """Where fastgen keeps what it made and can make again: ``$FASTGEN_CACHE``, else ``$XDG_CACHE_HOME/fastgen``, else
    ``~/.cache/fastgen``."""
    own = os.environ.get("FASTGEN_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fastgen"


def parse_bytes(value: str) -> int:
    """Bytes in ``"2GiB"``, ``"500MB"``, ``"1.5G"`` or ``"1048576"``.

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write '2GiB', '500MB' or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


class EngineConfig(BaseModel):
    """Everything an engine can be told. Fields left unset are decided from the model and the machine at load time;
    ``fastgen explain MODEL`` prints what was decided."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Number format of weights and cache. auto: float32 on a CPU, else the checkpoint's."
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ... auto: a GPU if torch sees one.")
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads for the maths, of the whole process. Unset: torch's choice."
    )
    quantization: Literal["int8", "int4"] | None = Field(
        default=None,
        description="Quantise the weights of linear maps and experts while they are loaded, to 8 bits in "
        "groups of 64 or to 4 bits in groups of 32; activations then go through them in 8 bits.",
    )
    packed_cache: bool = Field(
        default=True,
        description="Keep quantised weights in the user's cache, and map them from there at the next start.",
    )
    max_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="The token budget: tokens in one forward pass, prompts and generations together. Unset: what "
        "`fastgen calibrate MODEL` found on this machine, else 512.",
    )
    target_latency: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Milliseconds that a pass may take, by which the token budget is chosen where max_batch_tokens is "
        "unset. If nothing is known about the model on this machine, it is measured at start, for some seconds.",
    )
    max_sequences: int = Field(
        default=128, ge=1, le=2**16, description="Most sequences running at once; never more than the token budget."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Most tokens of prompt and answer. Unset: the model's own limit."
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens in one block of the KV cache.")
    kv_dtype: Literal["auto", "int8"] = Field(
        default="auto",
        description="Number format of the KV cache. auto: the model's dtype. int8: 8 bits, with a scale for every 32 "
        "components of a key and every 64 of a value: nearly twice as many tokens fit as in bfloat16, nearly four "
        "times as many as in float32.",
    )
    num_blocks: int | None = Field(default=None, ge=1, description="Blocks in the KV cache; instead of cache_memory.")
    cache_memory: int | float | str | None = Field(
        default=None,
        description="Memory for the KV cache: a fraction of what is free beside the weights (0.5), or a size (2GiB, "
        "or a number of bytes). Unset: 0.4 of it on a CPU, 0.9 on a GPU, and never more than max_sequences full-length "
        "sequences can use.",
    )
    prefix_caching: bool = Field(default=True, description="Reuse the computed blocks of shared prompt beginnings.")
    policy: Literal["splitfuse", "prefill-first", "whole-prompt"] = Field(
        default="splitfuse",
        description="What a pass carries. splitfuse: running generations, then pieces of prompts, max_batch_tokens in "
        "all. To compare with: prefill-first (whole prompts alone, generations wait) and whole-prompt (whole prompts "
        "beside the generations); these raise max_batch_tokens to what the longest prompt needs.",
    )
    queue_order: Literal["fcfs", "lpm", "random", "priority"] = Field(
        default="fcfs",
        description="Who enters from the waiting queue: first come, longest cached prefix, random, or priority. "
        "A request's priority field goes first in any of them.",
    )
    record_passes: bool = Field(
        default=True,
        description="On a CPU, record passes of few tokens when their shape comes up again, and replay them without "
        "Python. For comparisons and debugging it can be turned off.",
    )
    seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Makes requests without a seed, and queue_order random, repeatable."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a model on the hub.")
    token: str | None = Field(
        default=None,
        repr=False,
        description="Access token for the hub, or for the source a plugin offers. Unset: the hub uses the saved login.",
    )
    offline: bool = Field(default=False, description="Use files already on this machine only.")
    trust_remote_code: bool = Field(default=False, description="Let code shipped with a checkpoint run. Off is safe.")
    load_bin: bool = Field(default=False, description="Allow PyTorch .bin weights (loaded with weights_only).")
    adapter: dict[str, str] = Field(
        default_factory=dict, description="Which plugin serves an architecture, where several do: {arch: plugin}."
    )
    lora: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters in peft's format to serve beside the model: {name: directory, or name on the hub}. "
        "A request chooses one by its name here.",
    )

    @field_validator("quantization", mode="before")
    @classmethod
    def _quantization(cls, value: Any) -> Any:
        schemes = ("int8", "int4")
        if value is not None and value not in schemes:
            near = did_you_mean(value, schemes) if isinstance(value, str) else ""
            raise ValueError(f"got {value!r}; there are int8 and int4, and None for none.{near}")
        return value

    @field_validator("cache_memory")
    @classmethod
    def _cache_memory(cls, value: int | float | str | None) -> float | str | None:
        """A fraction as a float, a size as text."""
        if value is None:
            return None
        if isinstance(value, str):
            if parse_bytes(value) > 1:
                return value
            try:
                value = float(value)
            except ValueError:
                raise ValueError(f"{value!r} is no room for anything") from None
        if isinstance(value, int) and value > 1:
            return str(value)
        if not 0 < value <= 1:
            raise ValueError(f"{value} must be a fraction above 0 and up to 1, or a size such as '2GiB'")
        return float(value)

    @field_validator("lora", mode="before")
    @classmethod
    def _directories(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: str(path) if isinstance(path, Path) else path for name, path in value.items()}

    @field_validator("lora")
    @classmethod
    def _named(cls, value: dict[str, str]) -> dict[str, str]:
        for name, path in value.items():
            if not name.strip() or not path.strip():
                raise ValueError(f"an adapter needs a name and a directory, got {name!r}: {path!r}")
        return value

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.num_blocks is not None and self.cache_memory is not None:
            raise ValueError("give num_blocks or cache_memory, not both")
        return self

    def __init__(self, **options: Any) -> None:
        """
        Raises:
            ConfigError: an unknown option (with a suggestion), or a value that cannot be used.
        """
        try:
            super().__init__(**options)
        except ValidationError as error:
            _, text = first_problem(error.errors(), type(self).model_fields, what="engine option", secret=("token",))
            raise ConfigError(text) from None

    @classmethod
    def of(cls, options: dict[str, Any]) -> EngineConfig:
        """The same, from a dictionary."""
        return cls(**options)

    @classmethod
    def read_toml(cls, path: Path) -> dict[str, Any]:
        """The options in a TOML file, not validated yet, to be laid under flags and keywords.

        Raises:
            ConfigError: the file cannot be read or is not TOML.
        """
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the config file {path}: {error.strerror or error}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
