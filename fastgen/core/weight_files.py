"""Which files of a model directory hold its weights: the ones its index names, and no others. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fastgen.core.json_file import read_json_object
from fastgen.errors import CheckpointError, some

__all__ = ["BIN", "BIN_INDEX", "SAFETENSORS", "SAFETENSORS_INDEX", "WeightFiles", "choose_files", "read_index"]

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_MAX_INDEX_BYTES = 256 * 2**20


BIN_WARNING = (
    "These are pickles, which can be made to run code, so they are loaded only if you say so: load_bin=True "
    "(--load-bin)"
)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a directory; all are there."""

    files: tuple[Path, ...]
    index: Path | None = None
    file_of: dict[str, str] = field(default_factory=dict)
    """Tensor name to file name, where there is an index."""
    strays: tuple[str, ...] = ()
    """Names of safetensors files beside them that are not part of the model."""


def choose_files(directory: Path, *, load_bin: bool = False) -> WeightFiles:
    """``model.safetensors.index.json`` and its files, else ``model.safetensors``; with ``load_bin``, and only where
    there is neither, the same of ``pytorch_model.bin``.

    Raises:
        CheckpointError: there are none, a file that the index names is missing, or the index is not a valid one.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    if (directory / SAFETENSORS_INDEX).exists():
        found = _indexed(directory, SAFETENSORS_INDEX, ".safetensors")
    elif (directory / SAFETENSORS).exists():
        found = WeightFiles((directory / SAFETENSORS,))
    elif (directory / BIN_INDEX).exists() or (directory / BIN).exists():
        if not load_bin:
            raise CheckpointError(
                f"{directory} has PyTorch .bin weights only. {BIN_WARNING}; or convert them to safetensors"
            )
        bins = (directory / BIN_INDEX).exists()
        found = _indexed(directory, BIN_INDEX, ".bin") if bins else WeightFiles((directory / BIN,))
    else:
        raise CheckpointError(_nothing_found(directory))
    for file in found.files:
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file, so its weights cannot be mapped; download it again")
    used = {file.name for file in found.files}
    strays = tuple(sorted(path.name for path in directory.glob("*.safetensors") if path.name not in used))
    return WeightFiles(found.files, found.index, found.file_of, strays)


def _indexed(directory: Path, index: str, suffix: str) -> WeightFiles:
    file_of = read_index(directory / index, suffix)
    files = tuple(directory / name for name in sorted(set(file_of.values())))
    missing = [file.name for file in files if not file.is_file()]  # a pipe or a device is no file either
    if missing:
        raise CheckpointError(
            f"{directory} lacks {some(missing)}: {len(missing)} of the {len(files)} files that {index} names; "
            "download the model again"
        )
    return WeightFiles(files, directory / index, file_of)


def read_index(path: Path, suffix: str) -> dict[str, str]:
    """The file of each tensor, from an index; every file is a plain name that ends in ``suffix``.

    Raises:
        CheckpointError: it cannot be read or is not a valid index.
    """
    file_of = read_json_object(path, max_bytes=_MAX_INDEX_BYTES, error=CheckpointError).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f"{path} has no weight_map that names the file of each tensor")
    for tensor, name in file_of.items():
        if not isinstance(name, str) or not name.endswith(suffix) or set(name) & set("/\\\0"):
            raise CheckpointError(
                f"{path}: the file of {tensor!r} is {name!r}; it must be the name of a {suffix} file in that directory"
            )
    return file_of


def _nothing_found(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    text = f"{directory} holds no weights: neither {SAFETENSORS_INDEX} nor {SAFETENSORS} is there"
    others = [name for name in names if name.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth"))]
    if others:
        return f"{text}, and {some(others)} cannot be taken for them"
    return text if names else f"{text}; it is empty"
