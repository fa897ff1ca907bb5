"""Packed weights in the user's cache: written once, memory-mapped at later starts.

One safetensors file for each model, scheme and layout, in the folder ``packed`` of the cache. Its tensors begin at
multiples of 64 bytes. Whatever is wrong with the cache costs one warning and the time to pack anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

import fastgen
from fastgen.config import cache_directory
from fastgen.core.cache_entries import PARTIAL, is_full, locked, sync, tidy
from fastgen.core.checkpoint import Checkpoint
from fastgen.core.quant.matrix import ALIGNMENT
from fastgen.core.quant.plan import Quantisation
from fastgen.core.safetensors_header import read_header
from fastgen.errors import CheckpointError

__all__ = ["PackedCache"]

logger = logging.getLogger("fastgen")

_VERSION = 1
"""Of the file's form and of what its key says."""
_SUFFIX = ".safetensors"
_SAMPLE = 64
"""Bytes of each weight that the key takes in: of its beginning, middle and end."""

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class PackedCache:
    """The file of one quantised checkpoint, there or not."""

    folder: Path
    family: str
    """How the names of all its versions begin: what the checkpoint's directory has held before, and what older kernels
    made of it."""
    key: str
    shapes: Shapes
    """Of each tensor, all uint8."""

    @classmethod
    def of(
        cls,
        quantisation: Quantisation,
        checkpoint: Checkpoint,
        sources: Mapping[str, Sequence[object]],
        *,
        name: str,
        plugin: str,
    ) -> Self:
        """Where the packed weights of a checkpoint belong.

        The key holds the form of the file, what is packed how, who says where each weight belongs and what that is, and
        the checkpoint: names, sizes and dates of its files and some bytes of each weight, so that a copy elsewhere
        finds the same file, and another fine-tune of the same size and date does not.

        Args:
            sources: the checkpoint's tensors that are packed, with where each goes, in plain values.
            name: what the user called the model.
            plugin: whose weight map that is, with its version.
        """
        matrices = {
            f"{part.path}.{tensor}": matrix for part in quantisation.parts for tensor, matrix in part.matrices.items()
        }
        forms = {
            tensor: (m.scheme, m.kernel.layout(m.scheme), m.count, m.out_features, m.in_features)
            for tensor, m in matrices.items()
        }
        # Weights of a wider format are rounded to the model's before they are packed.
        how = [quantisation.scheme, quantisation.dtype]
        directory = os.path.abspath(checkpoint.directory)
        stem = re.sub(r"[^\w-]+", "-", name.rstrip("/").rpartition("/")[2])[:48].strip("-") or "model"
        family = f"{stem}-{quantisation.scheme}-{_digest(directory, how)[:8]}-"
        whose = [_VERSION, fastgen.__version__, plugin]
        key = _digest(
            whose, how, forms, list(sources.items()), _files(checkpoint, sources), _samples(checkpoint, sources)
        )
        shapes = {tensor: matrix.shape for tensor, matrix in matrices.items()}
        return cls(cache_directory() / "packed", family, key[:20], shapes)

    @property
    def path(self) -> Path:
        """Of the file: the one that a copy of the checkpoint has made, if there is one."""
        same = sorted(self.folder.glob(f"*-{self.key}{_SUFFIX}"))
        return same[0] if same else self.folder / f"{self.family}{self.key}{_SUFFIX}"

    def read(self) -> dict[str, torch.Tensor] | None:
        """The packed weights, mapped and private to this process; ``None``: not there, or not whole (which it says)."""
        path = self.path
        if not path.exists():
            return None
        try:
            if not self._is_whole(path):
                logger.warning("%s is damaged: the weights are packed anew", path)
                return None
            size = path.stat().st_size
            mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            logger.warning("%s cannot be read (%s): the weights are packed anew", path, error)
            return None
        at = size - self._bytes
        found = {}
        for tensor, (count, length) in self.shapes.items():
            found[tensor] = mapped[at : at + count * length].view(count, length)
            at += count * length
        logger.info("packed weights mapped from %s (%s)", path, self._size)
        return found

    def write(self, packed: Mapping[str, torch.Tensor]) -> None:
        """Keep these weights, unless another process does already. A cache that cannot is warned about, once."""
        path = self.path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(path, wait=False) as held:
                if not held or (path.exists() and self._is_whole(path)):
                    return
                self._write(packed, path)
            logger.info("packed weights kept in %s (%s): the next start maps them", path, self._size)
            with suppress(OSError):  # room that cannot be made free is no reason to fail
                tidy(self.folder, lambda entry: entry != path and self._is_older(entry))
        except OSError as error:
            logger.warning(
                "packed weights could not be kept in %s (%s): the next start packs them again; free some space, set "
                "FASTGEN_CACHE to another place, or turn packed_cache off",
                self.folder,
                "no space left" if is_full(error) else error.strerror or error,
            )

    @property
    def _bytes(self) -> int:
        return sum(count * length for count, length in self.shapes.values())

    @property
    def _size(self) -> str:
        return f"{self._bytes / 2**20:,.1f} MiB"

    def _is_whole(self, path: Path) -> bool:
        """Whether the file is as long as its header says, and holds what it should, in order."""
        try:
            header = read_header(path)
        except CheckpointError:
            return False
        found = [(name, entry.dtype, entry.shape) for name, entry in header.items()]
        return found == [(name, "uint8", shape) for name, shape in self.shapes.items()]

    def _is_older(self, entry: Path) -> bool:
        return entry.suffix == _SUFFIX and entry.name.startswith(self.family)

    def _write(self, packed: Mapping[str, torch.Tensor], path: Path) -> None:
        if shutil.disk_usage(self.folder).free < self._bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        partial = path.with_suffix(PARTIAL)
        try:
            with partial.open("wb") as file:
                file.write(self._header())
                for tensor in self.shapes:
                    file.write(packed[tensor].cpu().numpy().data)
            sync(partial)
            partial.rename(path)
            sync(self.folder)
        finally:
            partial.unlink(missing_ok=True)

    def _header(self) -> bytes:
        """Of the safetensors file, filled up with spaces, so that the data behind it is aligned."""
        entries: dict[str, object] = {"__metadata__": {"format": f"fastgen packed weights {_VERSION}"}}
        at = 0
        for tensor, (count, length) in self.shapes.items():
            end = at + count * length
            entries[tensor] = {"dtype": "U8", "shape": [count, length], "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def _digest(*what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _files(checkpoint: Checkpoint, sources: Iterable[str]) -> list[tuple[str, int, int]]:
    """Name, size and date of each file that holds one of the tensors."""
    files = sorted({checkpoint.tensors[source].file for source in sources})
    stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _samples(checkpoint: Checkpoint, sources: Iterable[str]) -> str:
    """A digest of some bytes of each tensor, in the order of the files."""
    digest = hashlib.sha256()
    for name, tensor in checkpoint.stream(sources):
        raw = tensor.flatten().view(torch.uint8)
        middle = len(raw) // 2
        for piece in (raw[:_SAMPLE], raw[middle : middle + _SAMPLE], raw[-_SAMPLE:]):
            digest.update(piece.contiguous().numpy().data)
        digest.update(name.encode())
    return digest.hexdigest()
