"""Everything decided about a model before a byte of its weights is read: for `load`, and for `fastgen explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastgen.config import EngineConfig
from fastgen.core.calibration import Budget, Calibration, Setting, plan_budget
from fastgen.core.checkpoint import Checkpoint
from fastgen.core.containers import Decoder
from fastgen.core.dtypes import FLOATS
from fastgen.core.family import find_family
from fastgen.core.fit import place, prepare
from fastgen.core.generation_config import check_generation_config
from fastgen.core.hf_config import HFConfig, read_generation_config
from fastgen.core.layers.layer import building
from fastgen.core.lora import LoraPlan, plan_loras
from fastgen.core.plugin import ModelSpec, Registry, registry
from fastgen.core.plugin.describe import describe_error, format_error
from fastgen.core.policy import PolicyName, policy_named
from fastgen.core.quant import Quantisation, plan_quantisation
from fastgen.core.runtime.kv_cache import CachePlan, plan_cache
from fastgen.core.setting import setting_of
from fastgen.core.source import ModelFiles, resolve
from fastgen.core.weights import Placement
from fastgen.errors import ConfigError, FastgenError, PluginError
from fastgen.kernels import cpu, reference
from fastgen.kernels.ops import Implementation, KernelTable

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
    quantisation: Quantisation | None
    """What is packed while weights are loaded."""
    weight_bytes: int
    """Bytes the loaded weights take, packed ones as they are packed, adapters included."""
    cache: CachePlan
    setting: Setting
    """What the time of a pass depends on."""
    budget: Budget
    warnings: list[str]

    def pass_limits(self, config: EngineConfig) -> tuple[int, int]:
        """Most tokens of a pass and most sequences running at once, under the policy that the options name."""
        longest = min(self.max_model_len, self.cache.tokens + 1)  # as in `Limits.most_tokens`
        tokens = policy_named(config.policy).budget(self.budget.tokens, longest, config.max_sequences)
        return tokens, min(config.max_sequences, tokens)


def draw(model: str | Path, config: EngineConfig) -> Blueprint:
    """Find the files, the plugin and the kernels, and check that all of it fits together.

    Raises:
        ModelNotFoundError, CheckpointError, ConfigError, UnsupportedModelError, PluginError: with the reason.
    """
    plugins = registry()
    files = resolve(
        model, revision=config.revision, token=config.token, offline=config.offline, load_bin=config.load_bin
    )
    spec, parts, model_config = find_family(files, plugins, config.adapter)
    generation_config = read_generation_config(files.directory)
    warnings = check_generation_config(generation_config)
    device = _device(config)
    max_model_len = _max_model_len(config, model_config)

    files.fetch_weights()  # now that nothing but the weights themselves can be wrong
    checkpoint = Checkpoint.open(files.directory, load_bin=config.load_bin)
    dtype, dtype_reason, doubts = _dtype(config, model_config, checkpoint, device)
    model_config, weights, shapes, remarks = prepare(model_config, checkpoint, parts.weights)
    warnings += [*doubts, *checkpoint.warnings, *remarks]
    implementations, broken = _implementations(plugins)
    warnings += [f"kernel {name} for {operation} is left out: {reason}" for operation, name, reason in broken]
    dtype_name = str(dtype).removeprefix("torch.")
    kernels = KernelTable(device.type, dtype_name, implementations, broken, kv_dtype=config.kv_dtype)
    skeleton = _build(spec, parts.build, model_config, dtype)
    warnings += skeleton.remarks
    quantisation = None
    if config.quantization is not None:
        quantisation = plan_quantisation(skeleton, config.quantization, kernels, keep=config.packed_cache)
        warnings += quantisation.warnings
    skeleton.bind(kernels)
    head: Any = skeleton.head
    kernels.choose("argmax", size=head.vocab_rows)  # the sampler's: to be told, and part of the setting
    placements = place(skeleton, weights, model_config, checkpoint, shapes)
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
    if config.target_latency is not None and config.max_batch_tokens is None:
        warnings += _doubts_of_target(config.policy, config.target_latency)
    setting = setting_of(files, spec.plugin, kernels, dtype, device, config)
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
        quantisation=quantisation,
        weight_bytes=weight_bytes,
        cache=cache,
        setting=setting,
        budget=plan_budget(config, Calibration.remembered(setting)),
        warnings=warnings,
    )


def _doubts_of_target(policy: PolicyName, milliseconds: float) -> list[str]:
    if not policy_named(policy).whole_prompts:
        return []
    return [
        f"target_latency: policy {policy} raises the token budget to what the longest prompt needs, so that passes may "
        f"take longer than {milliseconds:g} ms; policy splitfuse keeps to it"
    ]


def _implementations(plugins: Registry) -> tuple[list[Implementation], list[tuple[str, str, str]]]:
    """Ours and the plugins', and those that cannot be loaded (a GPU package on a machine without one, say)."""
    found, broken = [*reference.IMPLEMENTATIONS, *cpu.IMPLEMENTATIONS], []
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
