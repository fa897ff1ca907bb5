"""The weights of a model directory: checked from the headers alone, then streamed one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from safetensors import SafetensorError, safe_open

from fastgen.core.bin_weights import open_bin
from fastgen.core.safetensors_header import DTYPES, read_header
from fastgen.errors import CheckpointError, did_you_mean

__all__ = ["Checkpoint", "TensorInfo", "check_memory"]

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_MAX_INDEX_BYTES = 256 * 2**20
# A file is mapped anew after so many bytes: what was read from the old mapping stops counting as resident memory.
_REMAP_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as its file's header describes it."""

    name: str
    dtype: str
    """Torch's name: ``"bfloat16"``."""
    shape: tuple[int, ...]
    file: Path
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A directory's weights. `open` has checked every file; nothing of them is in memory.

    ``tensors`` are in the order of their bytes, file by file; ``warnings`` are sentences for the user.
    """

    directory: Path
    tensors: dict[str, TensorInfo]
    warnings: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def open(cls, directory: str | Path, *, load_bin: bool = False) -> Self:
        """Find the weight files and check them without reading weights: all that the index names and no others.

        ``model.safetensors.index.json`` goes before ``model.safetensors``; PyTorch's ``.bin`` files are looked at
        only where there are no safetensors, and only with ``load_bin``.

        Raises:
            CheckpointError: no weights, a file that is missing, cut, damaged or hostile, an index that does not fit
                its files; names the file and what to do.
        """
        directory = Path(directory)
        index, files = _choose(directory, load_bin)
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for tensor in _read_infos(file):
                if tensor.name in tensors:
                    first = tensors[tensor.name].file.name
                    raise CheckpointError(f"tensor {tensor.name!r} is in two files, {first} and {file.name}")
                tensors[tensor.name] = tensor
        if not tensors:
            raise CheckpointError(f"{', '.join(file.name for file in files)} in {directory} holds no tensors")
        warnings = _compare(index, tensors) + _strays(directory, files)
        return cls(directory, tensors, warnings)

    def stream(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of these names (unset: all), one at a time, on the CPU, in the order of the files.

        Each is a view of the mapped file: copy it where it belongs and let it go. Resident memory grows by at most
        64 MiB and the largest tensor, whatever the size of the checkpoint.

        Raises:
            CheckpointError: a name that is not there (before anything is read), or a file that changed since `open`.
        """
        wanted = set(self.tensors if names is None else names)
        for name in sorted(wanted - self.tensors.keys()):
            raise CheckpointError(f"{self.directory} has no tensor {name!r}.{did_you_mean(name, self.tensors)}")
        return self._stream([tensor for tensor in self.tensors.values() if tensor.name in wanted])

    def _stream(self, tensors: list[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        for group in _by_mapping(tensors):
            with _mapped(group[0].file) as read:
                for info in group:
                    yield info.name, _checked(read, info)


def check_memory(needed: int, what: str = "the weights") -> None:
    """Refuse what cannot fit, before the machine swaps or kills.

    Args:
        needed: bytes of main memory.

    Raises:
        CheckpointError: more than is available, swap included.
    """
    available = psutil.virtual_memory().available + psutil.swap_memory().free
    if needed > available:
        raise CheckpointError(
            f"{what} need {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available; "
            "free some, or use a smaller model or dtype"
        )


# ---- which files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Index:
    path: Path
    files: dict[str, str]
    """File of each tensor."""


def _choose(directory: Path, load_bin: bool) -> tuple[_Index | None, list[Path]]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    sets = [(SAFETENSORS_INDEX, SAFETENSORS, ".safetensors"), (BIN_INDEX, BIN, ".bin")]
    for index_name, single, suffix in sets:
        has_index, has_single = (directory / index_name).exists(), (directory / single).exists()
        if not (has_index or has_single):
            continue
        if suffix == ".bin" and not load_bin:
            raise CheckpointError(
                f"{directory} has PyTorch .bin weights only. These are pickles, which can be made to run code, so they "
                "are loaded only if you say so: load_bin=True (--load-bin), or convert them to safetensors"
            )
        if not has_index:
            return None, [directory / single]
        index = _read_index(directory / index_name, suffix)
        files = [directory / name for name in sorted(set(index.files.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{directory}: {', '.join(missing[:5])} missing ({len(missing)} of {len(files)} files that "
                f"{index_name} names); download the model again"
            )
        return index, files
    raise CheckpointError(_nothing_found(directory))


def _nothing_found(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    others = [name for name in names if name.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth"))]
    text = f"{directory} holds no weights: neither {SAFETENSORS} nor {SAFETENSORS_INDEX}"
    if not others:
        return text + ("; it is empty" if not names else "")
    return text + f". It has {', '.join(others[:4])}{' and more' if len(others) > 4 else ''}, which is not read by itself"


def _read_index(path: Path, suffix: str) -> _Index:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, too many for an index")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path} has no weight_map that names the file of each tensor")
    for tensor, name in files.items():
        if not isinstance(name, str) or not name.endswith(suffix) or set(name) & set("/\\\0"):
            raise CheckpointError(
                f"{path}: the file of {tensor!r} is {name!r}; it must be the name of a {suffix} file in the same directory"
            )
    return _Index(path, files)


def _compare(index: _Index | None, tensors: dict[str, TensorInfo]) -> list[str]:
    if index is None:
        return []
    for name, file in index.files.items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{index.path.name} says that tensor {name!r} is in {file}, and it is not there")
    extra = [name for name in tensors if name not in index.files]
    return [f"{index.path.name} does not list {len(extra)} tensors of its files, {extra[0]!r} for one"] if extra else []


def _strays(directory: Path, files: list[Path]) -> list[str]:
    strays = sorted(path.name for path in directory.glob("*.safetensors") if path not in files)
    if files[0].suffix == ".safetensors" and not strays:
        return []
    if not strays:
        return []
    return [f"{', '.join(strays[:5])} in {directory} {'is' if len(strays) == 1 else 'are'} not part of the model: ignored"]


# ---- reading -----------------------------------------------------------------------------------------------------


def _read_infos(file: Path) -> list[TensorInfo]:
    if file.suffix == ".bin":
        infos = []
        for name, tensor in open_bin(file).items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in {known for known, _ in DTYPES.values()}:
                raise CheckpointError(f"{file}: tensor {name!r}: number format {dtype} is not supported")
            infos.append(TensorInfo(name, dtype, tuple(tensor.shape), file, tensor.nbytes))
        return infos
    header = read_header(file)
    # The reference reader has the last word; it maps the file and looks at the header alone.
    with _mapped(file) as _:
        pass
    return [TensorInfo(name, entry.dtype, entry.shape, file, entry.end - entry.begin) for name, entry in header.items()]
