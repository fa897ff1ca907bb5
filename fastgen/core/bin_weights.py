"""PyTorch ``.bin`` files, read without letting their pickle do more than make tensors."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from packaging.version import Version

from fastgen.errors import CheckpointError

__all__ = ["read_bin"]

# weights_only could be escaped before 2.6, and crafted files corrupted memory before 2.10.
SAFE_TORCH = Version("2.10")


def read_bin(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a ``.bin`` file by name, memory-mapped: none of them is read yet.

    Raises:
        CheckpointError: torch is too old to be safe, or the file is damaged, is in the format of torch before 1.6, or
            holds anything but a dictionary of tensors.
    """
    if Version(torch.__version__) < SAFE_TORCH:
        raise CheckpointError(
            f"{path}: reading .bin weights safely needs torch {SAFE_TORCH} or newer, this is {torch.__version__}; "
            "upgrade torch, or convert the file to safetensors"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} holds more than tensors, so it is refused ({reason})") from None
    except Exception as error:  # torch raises RuntimeError, ValueError, EOFError, KeyError, ... for damaged files
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as PyTorch weights ({reason}); convert it to safetensors"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: {name!r} is a {type(tensor).__name__}; only tensors by name are read")
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise CheckpointError(f"{path}: tensor {name!r} is {tensor.layout} on {tensor.device}, not a plain tensor")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: tensor {name!r} claims more bytes than the file holds for it")
    return content
