"""The weights of a model directory: checked from the headers alone, then streamed one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from fastgen.core.bin_weights import read_bin
from fastgen.core.memory import available_memory
from fastgen.core.quantised import WAY_OUT
from fastgen.core.safetensors_header import DTYPES, read_header
from fastgen.core.weight_files import WeightFiles, choose_files
from fastgen.errors import CheckpointError, did_you_mean, some

__all__ = ["Checkpoint", "TensorInfo", "check_memory"]

# A file is mapped anew after so many bytes: the pages read through the old mapping stop being this process's.
_REMAP_BYTES = 64 * 2**20
_DTYPES = {name for name, _ in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as the header of its file describes it. ``dtype`` is torch's name: ``"bfloat16"``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A directory's weights. `open` has checked every file; nothing of them is in memory.

    ``tensors`` come in the order of their bytes, file by file; ``warnings`` are sentences for the user.
    """

    directory: Path
    tensors: dict[str, TensorInfo]
    warnings: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def open(cls, directory: str | Path, *, load_bin: bool = False) -> Self:
        """Find the weight files and check them without reading weights.

        An index goes before a single file, safetensors before ``.bin``, and the latter needs ``load_bin``. Files
        that are not part of the model are ignored with a warning.

        Raises:
            CheckpointError: no weights, a file that is missing, cut, damaged or hostile, an index that does not fit
                its files; names the file and what to do.
        """
        directory = Path(directory)
        chosen = choose_files(directory, load_bin=load_bin)
        tensors: dict[str, TensorInfo] = {}
        for file in chosen.files:
            for tensor in _describe(file):
                if tensor.name in tensors:
                    first = tensors[tensor.name].file.name
                    raise CheckpointError(
                        f"{directory}: tensor {tensor.name!r} is in two files, {first} and {file.name}"
                    )
                tensors[tensor.name] = tensor
        if not tensors:
            raise CheckpointError(f"{directory}: {', '.join(file.name for file in chosen.files)} holds no tensors")
        return cls(directory, tensors, [*_compare(chosen, tensors), *_stray_warning(directory, chosen)])

    @classmethod
    def of_file(cls, file: Path) -> Self:
        """One file by itself, checked as in `open`.

        Raises:
            CheckpointError: it is cut, damaged or hostile.
        """
        return cls(file.parent, {tensor.name: tensor for tensor in _describe(file)})

    def stream(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of these names (unset: all), one at a time, on the CPU, in the order of the files.

        Each is a view of the mapped file: copy it to its place and let it go. Of what was read, at most 64 MiB and
        the latest tensor stay resident, whatever the size of the checkpoint.

        Raises:
            CheckpointError: a name that is not there (before anything is read), or a file that changed since `open`.
        """
        wanted = set(self.tensors if names is None else names)
        for name in sorted(wanted - self.tensors.keys()):
            raise CheckpointError(f"{self.directory} has no tensor {name!r}.{did_you_mean(name, self.tensors)}")
        return _stream([tensor for tensor in self.tensors.values() if tensor.name in wanted])

    def agrees(self, name: str, other: Checkpoint, other_name: str) -> bool:
        """Whether a tensor of this checkpoint and one of another (or of this one) hold the same numbers, in the
        narrower of their formats."""
        if self.tensors[name].shape != other.tensors[other_name].shape:
            return False
        (kept,) = (tensor.clone() for _, tensor in self.stream([name]))
        return all(
            torch.equal(kept, tensor.to(kept.dtype)) or torch.equal(kept.to(tensor.dtype), tensor)
            for _, tensor in other.stream([other_name])
        )


def check_memory(needed: int, what: str) -> None:
    """Refuse what cannot fit, before the machine swaps or kills the process.

    Args:
        needed: bytes of main memory.
        what: what needs them, for the message.

    Raises:
        CheckpointError: more than is available.
    """
    available = available_memory(torch.device("cpu"))
    if needed > available:
        raise CheckpointError(
            f"not enough memory: {what} needs {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are available; "
            "free some, or use a smaller model or dtype"
        )


def _describe(file: Path) -> list[TensorInfo]:
    if file.suffix == ".bin":
        found = [
            TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), file, tensor.nbytes)
            for name, tensor in read_bin(file).items()
        ]
        for tensor in found:
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{file}: tensor {tensor.name!r}: it is stored as {tensor.dtype}, which is not supported; {WAY_OUT}"
                )
        return found
    header = read_header(file)
    with _mapped(file):  # the reference reader has the last word on the header; it reads nothing else
        pass
    return [TensorInfo(name, entry.dtype, entry.shape, file, entry.end - entry.begin) for name, entry in header.items()]


def _compare(chosen: WeightFiles, tensors: dict[str, TensorInfo]) -> list[str]:
    if chosen.index is None:
        return []
    for name, file in chosen.file_of.items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{chosen.index} says that tensor {name!r} is in {file}, and it is not there")
    extra = [name for name in tensors if name not in chosen.file_of]
    return [f"{chosen.index.name} omits {len(extra)} tensors of its files, such as {extra[0]!r}"] if extra else []


def _stray_warning(directory: Path, chosen: WeightFiles) -> list[str]:
    if not chosen.strays:
        return []
    names = some(chosen.strays)
    return [
        f"ignored in {directory}, as {'not part of the model' if chosen.index is None else 'not in the index'}: {names}"
    ]


def _stream(tensors: list[TensorInfo]) -> Iterator[tuple[str, torch.Tensor]]:
    for group in _by_mapping(tensors):
        with _mapped(group[0].file) as read:
            for info in group:
                tensor = read(info.name)
                if tuple(tensor.shape) != info.shape or str(tensor.dtype) != f"torch.{info.dtype}":
                    raise CheckpointError(f"{info.file} changed while it was being loaded; try again")
                yield info.name, tensor
                del tensor  # or it would keep the mapping alive while the next one is made


def _by_mapping(tensors: list[TensorInfo]) -> Iterator[list[TensorInfo]]:
    group: list[TensorInfo] = []
    taken = 0
    for tensor in tensors:
        if group and (tensor.file != group[0].file or taken >= _REMAP_BYTES):
            yield group
            group, taken = [], 0
        group.append(tensor)
        taken += tensor.nbytes
    if group:
        yield group


@contextmanager
def _mapped(file: Path) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function that gives the tensor of a name out of the mapped file."""
    if file.suffix == ".bin":
        yield read_bin(file).__getitem__
        return
    try:
        with safe_open(str(file), framework="pt", device="cpu") as reader:
            yield reader.get_tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from None
