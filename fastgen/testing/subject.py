"""One case of the conformance kit: a checkpoint, what the reference makes of it, and the decoder under test; each made
once, when it is first asked for."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastgen.config import EngineConfig
from fastgen.core.blueprint import Blueprint, draw
from fastgen.core.containers import Decoder
from fastgen.core.hf_config import read_raw_config
from fastgen.core.layers import CachedAttention, Rope
from fastgen.core.layers.layer import building
from fastgen.core.plugin import PluginRecord, registered, registry
from fastgen.core.weights import load
from fastgen.errors import PluginError
from fastgen.testing.checkpoints import QUIET_IDS, hush, randomise
from fastgen.testing.checkpoints import TINY as SIZES
from fastgen.testing.driver import HandDriver
from fastgen.testing.parity import Landmarks, assert_equal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["BLOCK", "TINY", "Reference", "Subject", "hooks_of", "missing", "serving", "transformers_config"]

BLOCK = 4
"""Tokens in a block of the cache."""
REACH = 128
"""The longest window or original rope length that the kit runs past."""
_SHORT = 40  # tokens of the long prompt, where nothing asks for more
_LENGTH_RULED = ("dynamic", "longrope")  # rope types whose frequencies transformers takes from the call's length

Reference = Callable[[list[int]], torch.Tensor]
"""``ids -> logits [tokens, vocab]``, float32."""

TINY: dict[str, Any] = {**SIZES, "pad_token_id": None}
"""What a case's config gets where it is silent and its class has the field, under any of its names."""


def transformers_config(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The transformers config of a case: ``model_type`` and fields, completed from `TINY`.

    Raises:
        ValueError: no ``model_type``, or transformers does not know it.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    given = dict(fields)
    kind = given.pop("model_type", None)
    if kind is None:
        raise ValueError(f"a case of hf_config needs a model_type, as in config.json; got {sorted(given)}")
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"the installed transformers has no model_type {kind!r}: give write_checkpoint and reference to test "
            "without it"
        )
    default = CONFIG_MAPPING[kind]()
    for name, value in TINY.items():
        if hasattr(default, name) and not {name, default.attribute_map.get(name, name)} & given.keys():
            given[name] = value
    return AutoConfig.for_model(kind, **given)


@contextmanager
def serving(entry: str) -> Iterator[PluginRecord]:
    """The plugin of an entry (``module`` or ``module:attribute``), registered in this process if it is not installed.

    Raises:
        PluginError: it is broken.
    """
    name = entry.replace(":", ".")
    for record in registry().plugins:
        if record.status == "loaded" and (record.entry == entry or (record.in_process and record.name == name)):
            yield record
            return
        if record.status == "failed" and record.entry == entry:
            raise PluginError(f"the plugin {record.label} is broken: {record.error}\n{record.traceback or ''}")
    with registered(hooks_of(entry), name=name) as record:
        yield record


def missing(entry: str) -> str | None:
    """What to do where the entry's package is nowhere on the path; ``None``: it is there (whatever state it is in)."""
    package = entry.partition(":")[0].partition(".")[0]
    if package in sys.modules or find_spec(package) is not None:
        return None
    return (
        f"the entry {entry!r} cannot be imported: no module {package!r} is on the path. Run `pip install -e .` in "
        "the plugin's directory, or `fastgen plugins check .`, which needs no installation; or write "
        'pythonpath = ["."] below [tool.pytest.ini_options] in its pyproject.toml'
    )


def hooks_of(entry: str) -> Any:
    """The module or object that an entry names."""
    module, _, attribute = entry.partition(":")
    found: Any = import_module(module)
    for name in filter(None, attribute.split(".")):
        found = getattr(found, name)
    return found


@dataclass(eq=False)
class Subject:
    """A case: ``fields`` as its author wrote them, and an empty ``directory`` for its checkpoint."""

    record: PluginRecord
    fields: Mapping[str, Any]
    folder: Path
    tolerance: float = 1e-4
    architecture: str | None = None
    write_checkpoint: Callable[[Path, dict[str, Any]], None] | None = None
    make_reference: Callable[[Path], Reference] | None = None
    _wanted: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    # ---- the reference ---------------------------------------------------------------------------------------------

    @cached_property
    def transformers(self) -> PreTrainedModel | None:
        """transformers' own model, eager and float32, random; ``None`` where the author writes the checkpoint."""
        from transformers import AutoModelForCausalLM

        if self.write_checkpoint is not None:
            return None
        config = transformers_config(self.fields)
        with torch.random.fork_rng(devices=[]):  # building the model draws from the global generator
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        randomise(model)
        hush(model)
        return model.eval()

    @cached_property
    def directory(self) -> Path:
        """The checkpoint, in the Hugging Face layout."""
        if self.write_checkpoint is not None:
            self.write_checkpoint(self.folder, dict(self.fields))
        else:
            assert self.transformers is not None
            self.transformers.save_pretrained(self.folder)
        return self.folder

    @cached_property
    def raw(self) -> dict[str, Any]:
        """``config.json``."""
        return read_raw_config(self.directory)

    @property
    def served_architecture(self) -> str:
        """The one the config names; the adapter of this plugin is the one that is tried, whoever else claims it."""
        names = self.raw.get("architectures") or []
        return self.architecture or (names[0] if isinstance(names, list) and names else str(names))

    @cached_property
    def reference(self) -> Reference:
        """Logits at all positions of a sequence by itself."""
        if self.make_reference is not None:
            return self.make_reference(self.directory)
        model = self.transformers
        if model is None:
            raise ValueError("write_checkpoint is given and reference is not: who says what the logits should be?")
        reset = any(kind in str(getattr(model.config, "rope_parameters", "")) for kind in _LENGTH_RULED)

        def logits(ids: list[int]) -> torch.Tensor:
            if reset:  # these rope types remember the longest call so far; a short one makes them forget
                model(torch.tensor([ids[:1]]), use_cache=False)
            found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
            return found

        return logits

    def want(self, ids: list[int]) -> torch.Tensor:
        """The reference's logits, ``[tokens, vocab]``."""
        key = tuple(ids)
        if key not in self._wanted:
            with torch.inference_mode():
                self._wanted[key] = self.reference(ids).float()
        return self._wanted[key]

    # ---- the decoder -----------------------------------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """Engine options that all checks share."""
        return {"device": "cpu", "dtype": "float32", "adapter": {self.served_architecture: self.record.name}}

    @cached_property
    def blueprint(self) -> Blueprint:
        """Everything decided and checked from the headers."""
        return self.draw(self.directory)

    def draw(self, directory: Path) -> Blueprint:
        """The blueprint of another checkpoint of this case."""
        return draw(directory, EngineConfig.of({**self.options, "num_blocks": 1}))

    @cached_property
    def decoder(self) -> Decoder:
        """Loaded as an engine loads it, but that every parameter is NaN before: what is not filled shows."""
        blueprint = self.blueprint
        with building(blueprint.dtype, blueprint.device):
            model = blueprint.spec.load().build(blueprint.model_config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        load(model, blueprint.placements, blueprint.model_config, blueprint.checkpoint)
        model.bind(blueprint.kernels)
        return model.eval()

    def driver(self, *, shuffle: int | None = 0) -> HandDriver:
        """An empty cache for the decoder; blocks are handed out in a shuffled order."""
        return HandDriver(self.decoder, block_size=BLOCK, shuffle=shuffle)

    # ---- lengths and prompts ---------------------------------------------------------------------------------------

    @cached_property
    def windows(self) -> list[int]:
        """Of the decoder's attention, and what the config calls a window, if it is a small one."""
        found = {m.scores.window for m in self.decoder.modules() if isinstance(m, CachedAttention)}
        names = ("window", "window_size")  # max_window_layers counts layers
        told = {v for k, v in self.raw.items() if k.endswith(names) and type(v) is int and 0 < v <= REACH}
        return sorted({window for window in found if window is not None} | told)

    @cached_property
    def originals(self) -> list[int]:
        """Lengths at which a rope begins to be stretched."""
        found = set()
        for module in self.decoder.modules():
            if isinstance(module, Rope) and module.config.type not in ("default", "linear"):
                length = module.config.original_max_position_embeddings
                found.add(module.config.max_position_embeddings if module.config.type == "dynamic" else length)
        return sorted(length for length in found if length is not None)

    @property
    def landmarks(self) -> Landmarks:
        return Landmarks(self.windows, self.originals, BLOCK)

    @cached_property
    def length(self) -> int:
        """Tokens of the long prompt: past the window and the original length where they are within reach.

        Raises:
            ValueError: the config leaves no room for a prompt of some blocks.
        """
        room = self.blueprint.max_model_len
        if room < 6 * BLOCK:
            raise ValueError(f"the model allows {room} tokens: write a max_position_embeddings of {6 * BLOCK} or more")
        marks = [mark for mark in (*self.windows, *self.originals) if mark <= REACH]
        return min(max([_SHORT, *(mark + 2 * BLOCK + 1 for mark in marks)]), room)

    def out_of_reach(self, marks: list[int]) -> int | None:
        """Of these lengths one that the long prompt does not pass."""
        return next((mark for mark in marks if mark >= self.length), None)

    def ids(self, count: int, seed: int = 0) -> list[int]:
        """A prompt of ``count`` tokens, some of which are the quiet ones of `hush`."""
        rng = random.Random(seed)
        rows: Any = self.decoder.head.vocab_rows
        ids = [rng.randrange(3, int(rows)) for _ in range(count)]
        for place in (0, 9, 10, 12):
            if place < count:
                ids[place] = QUIET_IDS[place % 2]
        return ids

    # ---- comparisons -----------------------------------------------------------------------------------------------

    def prefill(self, decoder: Decoder | None = None) -> torch.Tensor:
        """The decoder's logits for the long prompt in one pass, ``[length, vocab]``."""
        driver = HandDriver(decoder or self.decoder, block_size=BLOCK)
        return driver.read(driver.add(self.ids(self.length)), self.length)

    def compare(self, got: torch.Tensor, ids: list[int], what: str, *, alone: bool = False) -> None:
        """Raises AssertionError, with advice, where ``got`` differs from the reference's logits of ``ids``."""
        assert_equal(
            got,
            self.want(ids),
            self.tolerance,
            what,
            landmarks=self.landmarks,
            where=lambda: self.first_wrong_block(ids) if alone else "",
            alone=alone,
        )

    @torch.inference_mode()
    def first_wrong_block(self, ids: list[int]) -> str:
        """A sentence about the first block whose outcome differs from transformers'; empty if that cannot be told."""
        if self.make_reference is not None or self.transformers is None:
            return ""
        found = self.transformers(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        wanted = [state[0] for state in found.hidden_states or ()]
        got: list[torch.Tensor] = []

        def keep_input(_: object, args: tuple[Any, ...], __: object) -> None:
            if not got:
                got.append(args[0].clone())

        def keep_output(_: object, __: object, out: tuple[torch.Tensor, torch.Tensor | None]) -> None:
            got.append(out[0].clone() if out[1] is None else out[0] + out[1])

        blocks = list(self.decoder.blocks)
        hooks = [blocks[0].register_forward_hook(keep_input)] if blocks else []
        hooks += [block.register_forward_hook(keep_output) for block in blocks]
        try:
            driver = self.driver()
            driver.read(driver.add(ids), len(ids))
        finally:
            for hook in hooks:
                hook.remove()
        # transformers' last state is behind the final norm, so the last block's own cannot be compared.
        for number, (one, other) in enumerate(zip(got, wanted[:-1], strict=False)):
            if one.shape != other.shape:
                return ""
            if not torch.allclose(one, other, rtol=1e-3, atol=1e-3):
                kind = "" if number == 0 else f" ({type(blocks[number - 1]).__name__})"
                where = "what enters the first block" if number == 0 else f"what block {number - 1}{kind} returns"
                return f"Compared with transformers' hidden states, {where} is the first that differs."
        return (
            "Up to the last block, the stream agrees with transformers' hidden states: look at the last block, the "
            "final norm and the head."
        )
