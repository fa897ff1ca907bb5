"""The header of a GGUF file, checked against the file's length before any library reads it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen.api import CheckpointError, UnsupportedModelError

__all__ = ["Header", "read_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMS = 8
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself: its metadata, with arrays replaced by their lengths, and its tensors' names."""

    architecture: str
    metadata: dict[str, Any]
    tensors: frozenset[str]

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own: ``get("context_length")`` for ``llama.context_length``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: Path) -> Header:
    """The header of a GGUF file whose tensors all lie inside the file.

    Raises:
        CheckpointError: not a GGUF file, or one that is cut or damaged.
        UnsupportedModelError: a version or number format that is not known.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not start with {MAGIC.decode()!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 4

    def header(self) -> Header:
        version = self.scalar("I")
        if version not in VERSIONS:
            raise UnsupportedModelError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read")
        tensor_count, key_count = self.count(), self.count()
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        ends = dict(self.tensor() for _ in range(tensor_count))
        self.check_length(ends, metadata.get("general.alignment", 32))
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{self.path} does not say which architecture it holds (general.architecture)")
        return Header(architecture, metadata, frozenset(ends))

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.position:
            raise CheckpointError(
                f"{self.path} is cut off or damaged: its header goes on past the end of the file "
                f"({len(self.data)} bytes); download it again"
            )
        self.position += size
        return self.data[self.position - size : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self) -> int:
        """A number of things to come; each takes a byte at least, so more than the file has bytes is damage."""
        count: int = self.scalar("Q")
        if count > len(self.data):
            raise CheckpointError(f"{self.path} is cut off or damaged: its header announces {count} entries")
        return count

    def string(self) -> str:
        return self.take(self.count()).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path} is damaged: it has a value of type {kind}, which does not exist")
        element, count = self.scalar("I"), self.count()
        if element in _SCALARS:
            self.take(count * struct.calcsize("<" + _SCALARS[element]))
        elif element == _STRING:
            for _ in range(count):
                self.take(self.count())
        else:
            raise CheckpointError(f"{self.path} is damaged: it has an array of type {element}")
        return count

    def tensor(self) -> tuple[str, int]:
        """A tensor's name, and where it ends in the data."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dims = self.string(), self.scalar("I")
        if dims > _MAX_DIMS:
            raise CheckpointError(f"{self.path} is damaged: tensor {name!r} has {dims} dimensions")
        shape = [self.scalar("Q") for _ in range(dims)]
        kind, offset = self.scalar("I"), self.scalar("Q")
        try:
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is in number format {kind}, which the gguf library here does not know"
            ) from None
        if shape and shape[0] % block:
            raise CheckpointError(f"{self.path} is damaged: rows of tensor {name!r} are not whole blocks")
        return name, offset + math.prod(shape) // block * width

    def check_length(self, ends: dict[str, int], alignment: Any) -> None:
        if type(alignment) is not int or alignment <= 0:
            raise CheckpointError(f"{self.path} is damaged: its alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        last = max(ends, key=lambda name: ends[name], default=None)
        if last is None:
            raise CheckpointError(f"{self.path} holds no tensors")
        if start + ends[last] > len(self.data):
            raise CheckpointError(
                f"{self.path} is cut off: tensor {last!r} ends at byte {start + ends[last]}, the file at "
                f"{len(self.data)}; download it again"
            )
