"""Tiny random checkpoints in the Hugging Face layout, whose logits are far from ties and depend on every tensor."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastgen.testing.tokenizers import BOS, EOS, build_byte_tokenizer, byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "TINY",
    "hush",
    "randomise",
    "shuffle_shards",
    "split_shards",
    "tiny_checkpoint",
    "tiny_llama",
    "write_random",
]

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The sizes of a tiny model, by the names most config classes have."""


def tiny_llama(
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: bool = True,
    **config_overrides: Any,
) -> Path:
    """Save a random ``LlamaForCausalLM`` of 2 layers, hidden size 32, 4 heads and 2 key/value heads.

    With ``tokenizer`` the byte tokenizer is saved beside it and the vocabulary covers it; without, there are 64 ids,
    beginning-of-sequence is 1 and end-of-sequence 2. ``config_overrides`` are fields of transformers' ``LlamaConfig``.

    Returns:
        The directory.

    Raises:
        ValueError: ``vocab_size`` was given and is too small for the tokenizer.
    """
    from transformers import LlamaConfig

    fields: dict[str, Any] = dict(TINY)
    if tokenizer:
        byte_level = build_byte_tokenizer()
        fields |= {
            "vocab_size": byte_level.get_vocab_size(),
            "bos_token_id": byte_level.token_to_id(BOS),
            "eos_token_id": byte_level.token_to_id(EOS),
        }
    config = LlamaConfig(**{**fields, **config_overrides})
    return tiny_checkpoint(directory, config, seed=seed, dtype=dtype, shards=shards, tokenizer=tokenizer)


def tiny_checkpoint(
    directory: str | Path,
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Save a random causal language model of any transformers config, as ``save_pretrained`` does.

    The weights are those of `randomise`; the same config and seed give the same file. ``dtype`` is the number format
    of the file. ``shards`` above 1 writes exactly so many files and an index. ``tokenizer`` saves the byte tokenizer
    beside it, which needs a vocabulary that covers it.

    Returns:
        The directory.

    Raises:
        ValueError: the vocabulary is too small for the tokenizer, or there are fewer tensors than shards.
    """
    from transformers import AutoModelForCausalLM

    directory = Path(directory)
    if tokenizer:
        ids, rows = build_byte_tokenizer().get_vocab_size(), config.get_text_config().vocab_size
        if rows < ids:
            raise ValueError(
                f"vocab_size {rows} does not cover the byte tokenizer's {ids} ids; raise it or pass tokenizer=False"
            )
        byte_tokenizer(directory)
    with torch.random.fork_rng(devices=[]):  # building the model draws from the global generator
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    randomise(model, seed=seed)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    if shards > 1:
        split_shards(directory, shards)
    return directory


@torch.no_grad()
def randomise(model: PreTrainedModel, *, seed: int = 0, bias_scale: float = 1.0) -> None:
    """Draw every parameter anew, so that a tensor that is dropped, swapped or misread shows in the logits.

    Matrices keep the scale of their input (a little more, so that layers outweigh the embedding); norm weights are
    ``1 + noise``; biases have the standard deviation ``bias_scale``, as large as what they are added to; the output
    matrix spreads the logits (standard deviation about 4), so that the best two are rarely near.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                value = noise * bias_scale if name.endswith("bias") else 1 + 0.3 * noise
            elif module is head or (module is embedding and head is None):
                value = noise * 4 / math.sqrt(parameter.shape[-1])
            elif isinstance(module, nn.Embedding):
                value = noise
            else:
                fan_in = parameter.shape[0] if type(module).__name__ == "Conv1D" else parameter.shape[-1]
                value = noise * 1.5 / math.sqrt(fan_in)
            parameter.copy_(value)
        for name, buffer in module.named_buffers(recurse=False):  # some files keep biases that are no parameters
            if name.endswith("bias") and name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)


QUIET_IDS = (3, 4)
"""Tokens whose embeddings `hush` makes small."""
QUIET_POSITIONS = range(8, 16)
"""Rows of other tables of embeddings that it makes small: learned positions."""


@torch.no_grad()
def hush(model: PreTrainedModel) -> None:
    """Make the embeddings of a few tokens a thousand times smaller, so that a norm that sees one of them divides by
    something not much larger than its epsilon: a wrong epsilon shows."""
    tokens = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            rows = QUIET_IDS if module is tokens else [row for row in QUIET_POSITIONS if row < module.num_embeddings]
            module.weight[list(rows)] *= 1e-3


def write_random(
    directory: str | Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], *, seed: int = 0
) -> None:
    """A checkpoint for which transformers has no class: ``config.json`` as given, and a random tensor of each shape.

    The numbers follow the rules of `randomise` and `hush`, as far as names and shapes tell: a vector is a bias if its
    name ends so, else a norm's weight; a matrix whose name holds ``lm_head`` or ``embed_out`` makes logits; one whose
    name holds ``embed``, ``wte`` or ``wpe`` is a table of embeddings.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(*shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = noise if name.endswith("bias") else 1 + 0.3 * noise
        elif "lm_head" in name or "embed_out" in name:
            tensors[name] = noise * 4 / math.sqrt(shape[-1])
        elif "embed" in name or "wte" in name or "wpe" in name:
            rows = [row for row in (QUIET_POSITIONS if "wpe" in name else QUIET_IDS) if row < shape[0]]
            noise[rows] *= 1e-3
            tensors[name] = noise
        else:
            tensors[name] = noise * 1.5 / math.sqrt(shape[-1])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2))


def shuffle_shards(directory: str | Path, target: str | Path, *, seed: int = 0) -> None:
    """Copy a checkpoint of one file to ``target`` with each tensor in a file of its own, in no order at all."""
    from safetensors.torch import load_file, save_file

    directory, target = Path(directory), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    for file in directory.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    shuffler = random.Random(seed)
    numbers, names = list(range(1, len(tensors) + 1)), list(tensors)
    shuffler.shuffle(numbers)
    shuffler.shuffle(names)
    weight_map = {}
    for name, number in zip(names, numbers, strict=True):
        weight_map[name] = f"model-{number:05}-of-{len(names):05}.safetensors"
        save_file({name: tensors[name]}, target / weight_map[name], metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def split_shards(directory: str | Path, shards: int) -> None:
    """Rewrite ``model.safetensors`` as exactly ``shards`` files and an index, as the hub holds large models.

    Raises:
        ValueError: fewer tensors than shards.
    """
    from safetensors.torch import load_file, save_file

    directory = Path(directory)
    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"cannot split {len(tensors)} tensors over {shards} shards")
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    whole.unlink()
