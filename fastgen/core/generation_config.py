"""The model's own defaults: ``generation_config.json``, read key by key. No torch here."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastgen.errors import ConfigError

__all__ = ["TRANSFORMERS_TOP_K", "ModelDefaults", "check_generation_config", "end_token_ids"]

TRANSFORMERS_TOP_K = 50
"""What transformers' generate() uses where do_sample is on and top_k is not set (its GenerationConfig's defaults)."""

# Keys of generation_config.json that change transformers' answers and have no counterpart here, with their neutral
# values. They are reported, see check_generation_config.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_decoder_ids": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": (),
}


def end_token_ids(*sources: object) -> frozenset[int]:
    """All ids in ``sources``, each an id, a list of ids, or ``None``: the shapes ``eos_token_id`` takes in
    ``config.json``, ``generation_config.json`` and tokenizers."""
    found: set[int] = set()
    for source in sources:
        members = source if isinstance(source, list | tuple | set | frozenset) else (source,)
        found.update(m for m in members if isinstance(m, int) and not isinstance(m, bool) and m >= 0)
    return frozenset(found)


def check_generation_config(generation_config: Mapping[str, Any]) -> list[str]:
    """Reads the model's defaults once, at load. Returns one sentence for each key that would change transformers'
    answers and is not applied here, to be shown to the user.

    Raises:
        ConfigError: a key that is applied holds a value that cannot be used.
    """
    ModelDefaults(generation_config).check()
    warnings = []
    ends = generation_config.get("eos_token_id")
    given = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if len(end_token_ids(given)) < len(set(map(repr, given))):
        warnings.append(f"generation_config.json has eos_token_id {ends!r}, of which only token ids are used")
    for key, neutral in _NOT_APPLIED.items():
        value = generation_config.get(key)
        if value is not None and value not in neutral and value != []:
            warnings.append(f"generation_config.json sets {key} to {value!r}, which fastgen does not apply")
    return warnings


class _Range(NamedTuple):
    kind: type[int] | type[float]
    low: float
    high: float = math.inf
    open_low: bool = False


class ModelDefaults:
    """The model's generation_config.json, read key by key, remembering which keys were used."""

    _RANGES: Mapping[str, _Range] = {
        "temperature": _Range(float, 0),
        "top_k": _Range(int, -1),
        "top_p": _Range(float, 0, 1),
        "min_p": _Range(float, 0, 1),
        "repetition_penalty": _Range(float, 0, open_low=True),
        "max_new_tokens": _Range(int, 1),
        "max_length": _Range(int, 1),
        "min_new_tokens": _Range(int, 0),
        "min_length": _Range(int, 0),
    }

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.used: dict[str, None] = {}  # ordered

    @property
    def do_sample(self) -> bool:
        return self.raw.get("do_sample") is True

    def use(self, *keys: str) -> None:
        self.used.update(dict.fromkeys(keys))

    def peek(self, key: str) -> Any:
        """The value of ``key`` in its own type, ``None`` where the file is silent."""
        value = self.raw.get(key)
        if value is None:
            return None
        kind, low, high, open_low = self._RANGES[key]
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        usable = usable and abs(value) <= sys.float_info.max and (kind is float or value == int(value))
        if not usable or not low <= value <= high or (open_low and value == low):
            span = f"above {low}" if open_low else f"from {low} to {high}" if high < math.inf else f"{low} or more"
            wanted = f"a{' whole' if kind is int else ''} number {span}"
            raise ConfigError(
                f"the model's generation_config.json has {key} = {value!r}; it must be {wanted}. Correct the file, or "
                f"remove the key"
            )
        return kind(value)

    def pick(self, key: str, asked: Any, default: Any) -> Any:
        """The request's value, else the file's, else ``default``."""
        if asked is not None:
            return asked
        value = self.peek(key)
        if value is None:
            return default
        self.use(key)
        return value

    def check(self) -> None:
        for key in self._RANGES:
            self.peek(key)
