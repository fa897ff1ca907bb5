"""What sampling remembers of one sequence between steps. It grows by one token a step and is never rebuilt, so it
survives preemption as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastgen.core.plugin.describe import describe_error
from fastgen.core.request import Sampling
from fastgen.errors import InvalidRequestError, did_you_mean

__all__ = ["LogitsProcessor", "SequenceSampler", "TokenCounts", "described", "make_processors", "uniforms"]

LogitsProcessor: TypeAlias = Callable[[list[int], Tensor], Tensor]
"""``processor(output_ids, logits[vocab])`` -> new logits ``[vocab]``. It may change ``logits`` in place (float32, its
own copy), must not change ``output_ids``, and ends only its own sequence if it raises."""

LONGEST_SHOWN = 200
"""Characters of a request's options that an error message repeats."""


def make_processors(
    requested: Iterable[tuple[str, Any]],
    factories: Mapping[str, Callable[..., LogitsProcessor]],
    *,
    vocab_size: int,
    prompt_token_ids: Sequence[int],
) -> list[tuple[str, LogitsProcessor]]:
    """Fresh processors for one choice, as ``Sampling.logits_processors`` asks: ``(name, processor)`` each.

    Args:
        factories: by name; called as ``factory(options, vocab_size=..., prompt_token_ids=...)``.
        vocab_size: entries in the logits the processors will see: ``Limits.valid_ids``.

    Raises:
        InvalidRequestError: an unknown name, or options that the factory refuses.
    """
    made = []
    for name, options in requested:
        factory = factories.get(name)
        if factory is None:
            known = ", ".join(sorted(factories)) or "none is installed"
            raise InvalidRequestError(
                f"unknown logits processor {name!r} (known: {known}).{did_you_mean(name, factories)}",
                field="logits_processors",
            )
        try:
            processor = factory(options, vocab_size=vocab_size, prompt_token_ids=list(prompt_token_ids))
        except (Exception, SystemExit) as error:  # a plugin's code: anything may come
            raise InvalidRequestError(
                f"logits processor {name!r} refused its options {_short(options)}: {described(error)}",
                field="logits_processors",
            ) from error
        if not callable(processor):
            raise InvalidRequestError(
                f"logits processor {name!r} made {processor!r}, which cannot be called", field="logits_processors"
            )
        made.append((name, processor))
    return made


def _short(options: Any) -> str:
    """Options in an error message: they may be large, or nested deeper than ``repr`` can follow."""
    try:
        text = repr(options)
    except Exception:
        return "(which cannot be shown)"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def described(error: BaseException) -> str:
    """A plugin's error in one line, even one that fails when it is to say what it is."""
    try:
        return describe_error(error)
    except Exception:
        return type(error).__name__


class TokenCounts:
    """The distinct tokens of a sequence, each with its count in the answer, in arrays that grow in place."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        seen = dict.fromkeys(prompt_token_ids)
        self._index = {token: index for index, token in enumerate(seen)}
        self._ids = np.fromiter(self._index, dtype=np.int64, count=len(self._index))
        self._counts = np.zeros(len(self._index), dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of ``ids`` is in the answer; 0: in the prompt alone."""
        return self._counts[: len(self._index)]

    def add(self, token: int) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(index + 16, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(index + 16, dtype=np.float32)))
        self._ids[index] = token
        self._counts[index] += 1


class SequenceSampler:
    """The state of one choice. ``observe`` every token that enters its answer; nothing else changes it.

    Args:
        prompt_token_ids: read once, and only where a repetition penalty needs them.
        index: which of the request's ``n`` choices; each draws from a stream of its own.
        processors: from ``make_processors``; not shared with another choice.
        vocab_size: ids an answer can hold, ``Limits.valid_ids``.
    """

    __slots__ = (
        "_steady",
        "bias",
        "bias_ids",
        "counts",
        "key",
        "logprobs",
        "num_output",
        "output_ids",
        "plain",
        "processors",
        "sampling",
        "stop_ids",
    )

    def __init__(
        self,
        sampling: Sampling,
        prompt_token_ids: Sequence[int],
        index: int = 0,
        processors: Sequence[tuple[str, LogitsProcessor]] = (),
        *,
        vocab_size: int,
    ) -> None:
        self.sampling = sampling
        self.logprobs = sampling.logprobs
        self.num_output = 0
        self.processors = tuple(processors)
        self.output_ids: list[int] = []
        """Kept for processors alone."""
        self.key = _stream_key(sampling.seed, index)
        self.stop_ids = np.array(sorted(sampling.stop_ids), dtype=np.int64)
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32)
        self.counts: TokenCounts | None = None
        if sampling.repetition_penalty != 1:
            # Rows of the embedding beyond the output head can be in a prompt, but have no logit.
            self.counts = TokenCounts(token for token in prompt_token_ids if token < vocab_size)
        elif sampling.presence_penalty or sampling.frequency_penalty:
            self.counts = TokenCounts(())
        self._steady = sampling.greedy and not (len(self.bias) or self.counts or self.processors)
        self.plain = self._steady and not self.ends_forbidden
        """Whether the next token is simply the best one of the raw logits."""

    @property
    def ends_forbidden(self) -> bool:
        """Whether the next token comes too early to be a stop id."""
        return self.num_output < self.sampling.min_new_tokens and len(self.stop_ids) > 0

    def observe(self, token: int) -> None:
        """``token`` was added to the answer."""
        self.num_output += 1
        if self.num_output == self.sampling.min_new_tokens:
            self.plain = self._steady
        if self.counts is not None:
            self.counts.add(token)
        if self.processors:
            self.output_ids.append(token)


def _stream_key(seed: int, index: int) -> int:
    """64 bits that start choice ``index``'s stream. numpy's SeedSequence keeps the streams of one seed, and those of
    neighbouring seeds, unrelated; its values are stable across numpy versions."""
    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])


def uniforms(sequences: Sequence[SequenceSampler]) -> NDArray[np.float64]:
    """One number in [0, 1) per sequence, with 53 random bits: element ``num_output`` of its own stream.

    SplitMix64 (Steele, Lea and Flood, 2014), which computes any element of a stream directly. So the number depends on
    the seed, the choice and the position alone: not on batch mates, row order, preemption, or being asked for twice.
    """
    state = np.array([sequence.key for sequence in sequences], dtype=np.uint64)
    position = np.array([sequence.num_output + 1 for sequence in sequences], dtype=np.uint64)
    state += position * np.uint64(0x9E3779B97F4A7C15)  # wraps around, as meant
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
