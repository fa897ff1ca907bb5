"""Where an adapter's files are: a directory in peft's layout, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from fastgen.core.checkpoint import Checkpoint
from fastgen.core.hub import ADAPTER_BIN, ADAPTER_CONFIG, ADAPTER_WEIGHTS, fetch_adapter
from fastgen.core.weight_files import BIN_WARNING
from fastgen.errors import CheckpointError, ModelNotFoundError, did_you_mean

__all__ = ["find_adapter", "open_factors"]


def find_adapter(place: str, *, token: str | None, offline: bool, load_bin: bool) -> Path:
    """The directory of an adapter. What exists on this machine goes before a name on the hub, ``owner/adapter``.

    Raises:
        ModelNotFoundError: there is no such thing.
        CheckpointError: it is no adapter.
    """
    directory = Path(place).expanduser()
    try:
        exists = directory.exists()
    except OSError as error:  # not allowed to look, name too long
        raise ModelNotFoundError(f"cannot look there: {error.strerror or error}") from None
    if not exists:
        if place.count("/") != 1 or place.startswith(("/", ".", "~")):
            raise ModelNotFoundError(f"there is no such directory.{_near(directory)}")
        directory = fetch_adapter(place, token=token, offline=offline, load_bin=load_bin)
    if directory.is_file():
        raise CheckpointError("it is a file; give the directory that holds adapter_config.json and the weights")
    if not (directory / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"it has no {ADAPTER_CONFIG}, so it is no adapter in peft's format")
    return directory


def open_factors(directory: Path, *, load_bin: bool) -> Checkpoint:
    """The adapter's tensors, checked from their header.

    Raises:
        CheckpointError: there are none, they are damaged, or in a format that was not allowed.
    """
    if (directory / ADAPTER_WEIGHTS).is_file():
        return Checkpoint.of_file(directory / ADAPTER_WEIGHTS)
    if not (directory / ADAPTER_BIN).is_file():
        raise CheckpointError(f"it has no {ADAPTER_WEIGHTS}")
    if not load_bin:
        raise CheckpointError(f"it has PyTorch .bin weights only. {BIN_WARNING}; or convert them to safetensors")
    return Checkpoint.of_file(directory / ADAPTER_BIN)


def _near(directory: Path) -> str:
    try:
        there = [str(directory.parent / path.name) for path in directory.parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(str(directory), there)
