"""Everything decided about a model before a byte of its weights is read: for `load`, and for `fastgen explain`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastgen.config import EngineConfig
from fastgen.core.checkpoint import Checkpoint
from fastgen.core.containers import Decoder
from fastgen.core.generation_config import check_generation_config
from fastgen.core.hf_config import HFConfig, read_generation_config, read_raw_config
from fastgen.core.layers.layer import building
from fastgen.core.lora import LoraPlan, plan_loras
from fastgen.core.plugin import ModelSpec, Registry, registry
from fastgen.core.plugin.specs import describe_error, format_error
from fastgen.core.quantised import FLOATS, WAY_OUT, quantised_tensor, refuse_quantised_beside
from fastgen.core.runtime.kv_cache import CachePlan, plan_cache
from fastgen.core.source import ModelFiles, resolve
from fastgen.core.weight_map import WeightMap
from fastgen.core.weights import Placement, plan
from fastgen.errors import CheckpointError, ConfigError, FastgenError, PluginError, UnsupportedModelError
from fastgen.kernels.ops import Implementation, KernelTable
from fastgen.kernels.reference import IMPLEMENTATIONS

__all__ = ["Blueprint", "draw"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Blueprint:
    """A model that could be loaded."""

    files: ModelFiles
    registry: Registry
    spec: ModelSpec
    model_config: HFConfig
    generation_config: dict[str, Any]
    checkpoint: Checkpoint
    placements: list[Placement]
    loras: list[LoraPlan]
    """The adapters to serve beside the model."""
    model: Decoder
    """Without memory (on torch's meta device), its kernels chosen."""
    kernels: KernelTable
    device: torch.device
    dtype: torch.dtype
    dtype_reason: str
    max_model_len: int
    weight_bytes: int
    """Bytes the loaded weights take, adapters included."""
    cache: CachePlan
    warnings: list[str]


def draw(model: str | Path, config: EngineConfig) -> Blueprint:
    """Find the files, the plugin and the kernels, and check that all of it fits together.

    Raises:
        ModelNotFoundError, CheckpointError, ConfigError, UnsupportedModelError, PluginError: with the reason.
    """
    plugins = registry()
    files = resolve(
        model, revision=config.revision, token=config.token, offline=config.offline, load_bin=config.load_bin
    )
    raw = read_raw_config(files.directory)
    spec = plugins.find_model(_architectures(raw, files), adapter=config.adapter)
    _check_model_type(raw, spec, plugins, config)
    parts = spec.load()
    model_config = parts.config.from_raw(raw)
    if "quantization_config" not in parts.config.model_fields:
        refuse_quantised_beside(files.directory)
    generation_config = read_generation_config(files.directory)
    warnings = check_generation_config(generation_config)
    device = _device(config)
    max_model_len = _max_model_len(config, model_config)

    files.fetch_weights()  # now that nothing but the weights themselves can be wrong
    checkpoint = Checkpoint.open(files.directory, load_bin=config.load_bin)
    dtype, dtype_reason, doubts = _dtype(config, model_config, checkpoint, device)
    model_config, weights, shapes, untied = _tie(model_config, checkpoint, parts.weights)
    unread = _leave_unread(shapes, weights, model_config)
    warnings += [*doubts, *checkpoint.warnings, *untied, *unread]
    implementations, broken = _implementations(plugins)
    warnings += [f"kernel {name} for {operation} is left out: {reason}" for operation, name, reason in broken]
    kernels = KernelTable(device.type, str(dtype).removeprefix("torch."), implementations, broken)
    skeleton = _build(spec, parts.build, model_config, dtype)
    warnings += skeleton.remarks
    skeleton.bind(kernels)
    try:
        placements = plan(skeleton, weights, model_config, shapes)
    except CheckpointError as error:
        raise _quantised(checkpoint, shapes) or error from None
    _check_floats(checkpoint, placements)
    loras = plan_loras(
        config.lora,
        model=skeleton,
        weights=weights,
        config=model_config,
        checkpoint=checkpoint,
        model_name=files.name,
        token=config.token,
        offline=config.offline,
        load_bin=config.load_bin,
    )
    warnings += [f"LoRA adapter {lora.name!r} {doubt}" for lora in loras for doubt in lora.warnings]
    weight_bytes = sum(p.numel() * p.element_size() for p in skeleton.parameters())  # some stay in float32
    weight_bytes += sum(lora.parameters for lora in loras) * dtype.itemsize
    cache = plan_cache(skeleton, config, dtype, device, max_model_len=max_model_len, weight_bytes=weight_bytes)
    return Blueprint(
        files=files,
        registry=plugins,
        spec=spec,
        model_config=model_config,
        generation_config=generation_config,
        checkpoint=checkpoint,
        placements=placements,
        loras=loras,
        model=skeleton,
        kernels=kernels,
        device=device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        max_model_len=max_model_len,
        weight_bytes=weight_bytes,
        cache=cache,
        warnings=warnings,
    )


def _architectures(raw: dict[str, Any], files: ModelFiles) -> list[str]:
    names = _names(raw)
    if not names:
        raise UnsupportedModelError(
            f"{files.name}: config.json names no architectures, so no plugin can be chosen; add "
            '"architectures": ["FooForCausalLM"], the name of the class it was saved from'
        )
    return names


def _names(raw: dict[str, Any]) -> list[str]:
    names = raw.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


def _check_model_type(raw: dict[str, Any], spec: ModelSpec, plugins: Registry, config: EngineConfig) -> None:
    """Refuse a config whose two names of its family belong to two families of one distribution, whose author tells
    them apart: they differ in what the weights do not show, such as a window or a default. ``model_type`` is that of
    ``FooForCausalLM``, in small letters. A stranger's architecture may go by any type.

    Raises:
        ConfigError: names both.
    """
    kind, names = raw.get("model_type"), _names(raw)
    if not isinstance(kind, str) or spec.fallback or set(names) & set(config.adapter):
        return
    stem = re.sub(r"[^a-z0-9]", "", kind.lower())
    meant = re.compile(rf"{stem}(for[a-z]+|lmheadmodel)", re.IGNORECASE)
    if not stem or any(meant.fullmatch(name) for name in spec.architectures):
        return
    for row in plugins.model_rows():
        same = row.plugin.distribution == plugins.record(spec.plugin).distribution
        if same and not row.spec.fallback and meant.fullmatch(row.architecture):
            served = next(name for name in names if name in spec.architectures)
            raise ConfigError(
                f"config.json names the architecture {served!r} and the model_type {kind!r}, which is that of "
                f"{row.architecture!r}; correct the one that is wrong, or pin the plugin of the architecture (the "
                f"engine option adapter={{{served!r}: {spec.plugin!r}}})"
            )


def _implementations(plugins: Registry) -> tuple[list[Implementation], list[tuple[str, str, str]]]:
    """Ours and the plugins', and those that cannot be loaded (a GPU package on a machine without one, say)."""
    found, broken = list(IMPLEMENTATIONS), []
    for spec in plugins.kernels:
        try:
            found.append(spec.load())
        except Exception as error:
            broken.append((spec.operation, spec.name, f"broken: {error}"))
    return found, broken


def _build(spec: ModelSpec, build: Callable[[Any], Decoder], config: HFConfig, dtype: torch.dtype) -> Decoder:
    """The model, without memory.

    Raises:
        PluginError: its plugin fails on this config, or returns something else.
    """
    try:
        with building(dtype, torch.device("meta")):
            model = build(config)
    except FastgenError:
        raise
    except Exception as error:
        raise PluginError(
            f"the plugin {spec.plugin!r} cannot build this model: {describe_error(error)}\n{format_error(error)}"
        ) from error
    if not isinstance(model, Decoder):
        raise PluginError(
            f"the plugin {spec.plugin!r} built {model!r}; build(config) must return a fastgen.api.Decoder"
        )
    return model


def _tie(
    config: HFConfig, checkpoint: Checkpoint, weights: WeightMap
) -> tuple[HFConfig, WeightMap, dict[str, tuple[int, ...]], list[str]]:
    """A config that ties head and embedding, beside a file that holds both: equal, the head is left unread;
    different, each is used, as transformers does. Of a file that holds the head alone, it is the embedding too. The
    config to build, where tensors go, the shapes to load, and what to say."""
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    found: dict[str, str] = {}
    for name, renamed in weights.rename(shapes).items():
        to = weights.find(renamed)
        if to is not None and to.tail == "weight":
            found[to.path] = name
    head, table = found.get("head.proj"), found.get("embed.tokens")
    if not config.tie_word_embeddings or head is None:
        return config, weights, shapes, []
    if table is None:
        module = weights.rename(shapes)[head].rpartition(".")[0]
        return config, weights.but({module: "embed.tokens"}), shapes, []
    if _same(checkpoint, head, table):
        del shapes[head]
        return config, weights, shapes, []
    warning = (
        f"config.json ties the output head to the embedding, but the checkpoint holds a different {head}: both are used"
    )
    return config.model_copy(update={"tie_word_embeddings": False}), weights, shapes, [warning]


def _leave_unread(shapes: dict[str, tuple[int, ...]], weights: WeightMap, config: HFConfig) -> list[str]:
    """Take out of ``shapes`` what the weight map says is not served. Returns what to say about it."""
    if weights.unused is None:
        return []
    unread = [name for name in shapes if weights.unused(name, config)]
    for name in unread:
        del shapes[name]
    if not unread:
        return []
    return [
        f"{len(unread)} tensors of the checkpoint belong to parts that are not served here and are left unread: "
        f"{', '.join(unread[:2])}{', ...' if len(unread) > 2 else ''}"
    ]


def _quantised(checkpoint: Checkpoint, names: Iterable[str]) -> CheckpointError | None:
    """Why these tensors fit no model, if it is that they are quantised."""
    found = quantised_tensor({name: checkpoint.tensors[name].dtype for name in names})
    if found is None:
        return None
    return CheckpointError(
        f"the checkpoint is quantised, though config.json does not say so: {found}. This is not supported; {WAY_OUT}"
    )


def _check_floats(checkpoint: Checkpoint, placements: list[Placement]) -> None:
    for placement in placements:
        dtype = checkpoint.tensors[placement.name].dtype
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{placement.name} is stored as {dtype}: quantised or damaged weights, which are not supported; "
                f"{WAY_OUT}"
            )


def _same(checkpoint: Checkpoint, one: str, other: str) -> bool:
    if checkpoint.tensors[one].shape != checkpoint.tensors[other].shape:
        return False
    kept = {name: tensor.clone() for name, tensor in checkpoint.stream([one])}[one]
    return all(torch.equal(kept, tensor) for _, tensor in checkpoint.stream([other]))


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        raise ConfigError(f"device: {config.device!r} is not a device; use auto, cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {config.device!r} is not supported; use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {config.device!r} was asked for, and torch sees {torch.cuda.device_count()} GPUs")
    return device


def _dtype(
    config: EngineConfig, model: HFConfig, checkpoint: Checkpoint, device: torch.device
) -> tuple[torch.dtype, str, list[str]]:
    """The dtype to compute in, why, and what to say about it. Of a config that names none, it is most tensors'."""
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    stored = next((dtype for dtype, _ in sizes.most_common() if dtype in FLOATS), "float32")
    saved: str = model.torch_dtype or stored
    if config.dtype != "auto":
        doubts = []
        if config.dtype == "float16" and saved == "bfloat16":
            doubts.append("a bfloat16 checkpoint runs as float16: large values may overflow to NaN; bfloat16 is safer")
        return _DTYPES[config.dtype], "as asked", doubts
    if device.type == "cpu":
        return torch.float32, "auto: float32 on a CPU", []
    if saved not in _DTYPES:
        return torch.float32, f"auto: the checkpoint's {saved} is served as float32", []
    return _DTYPES[saved], "auto: the checkpoint's own", []


def _max_model_len(config: EngineConfig, model: HFConfig) -> int:
    longest = model.max_position_embeddings
    # The dynamic type rescales with the prompt's length: config.json's limit is where that starts, not where it ends.
    if model.rope is not None and model.rope.type == "dynamic" and model.rope.factor:
        longest = int(min(longest * model.rope.factor, 2**31 - 1))
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(f"max_model_len: {config.max_model_len} is more than the {longest} positions the model has")
    return config.max_model_len
