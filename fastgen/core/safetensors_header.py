"""The header of a safetensors file, checked before the reference reader maps the file. No torch here.

Format: https://huggingface.co/docs/safetensors, "Format"; the checks are those of the reference implementation, with
messages that say which file and what is wrong with it.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from fastgen.core.quantised import WAY_OUT
from fastgen.errors import CheckpointError

__all__ = ["DTYPES", "HeaderEntry", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""The reference reader's limit."""

DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Number formats that are read: the file's name to torch's name and the bytes of an element. Others (float8, float4)
come with scales, which only a quantisation scheme understands."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file: torch's name of its number format, its shape, and where its bytes lie in the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """The tensors of a safetensors file by name, in the order of their bytes. Reads the header only.

    Raises:
        CheckpointError: the file cannot be read, is cut or has bytes too many, or its header is not a valid one.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointError(f"{path} has {size} bytes, too few for a safetensors file; download it again")
            length = int.from_bytes(head, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} is not a safetensors file: it claims a header of {length} bytes; at most "
                    f"{MAX_HEADER_BYTES} are allowed"
                )
            if length > size - 8:
                raise CheckpointError(
                    f"{path} is cut off inside its header: {size} bytes, but the header alone takes {length + 8}; "
                    "download it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    entries = {name: _entry(path, name, value) for name, value in _parse(path, text).items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_layout(path, entries, data_bytes=size - 8 - length)
    return entries


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: its header names {twice!r} twice")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, value: Any) -> HeaderEntry:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {what}")

    if not isinstance(value, dict):
        raise wrong(f"its header entry is {value!r}, not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if isinstance(dtype, str) and re.match(r"[FU][468]|U32|C64", dtype) and dtype not in DTYPES:
        raise wrong(f"it is stored as {dtype}, as quantised weights are, which is not supported; {WAY_OUT}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise wrong(f"number format {dtype!r} is not supported; known are {', '.join(DTYPES)}")
    if not _is_counts(shape):
        raise wrong(f"its shape is {shape!r}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"its data_offsets are {offsets!r}")
    name_in_torch, width = DTYPES[dtype]
    wanted = math.prod(shape) * width  # Python's integers do not overflow
    begin, end = offsets
    if end - begin != wanted:
        raise wrong(f"shape {shape} of {dtype} takes {wanted} bytes, its data_offsets span {end - begin}")
    return HeaderEntry(name_in_torch, tuple(shape), begin, end)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, entries: dict[str, HeaderEntry], data_bytes: int) -> None:
    """The tensors fill the data exactly: in order, without overlap or hole, to the last byte."""
    position, before = 0, "the header"
    for name, entry in entries.items():
        if entry.begin != position:
            problem = "overlaps" if entry.begin < position else "leaves a hole after"
            raise CheckpointError(f"{path}: tensor {name!r} (bytes {entry.begin} to {entry.end}) {problem} {before}")
        position, before = entry.end, repr(name)
    if data_bytes < position:
        raise CheckpointError(
            f"{path} is cut off: its header describes {position} bytes of tensors, {data_bytes} are there "
            f"({position - data_bytes} missing); download it again"
        )
    if data_bytes > position:
        raise CheckpointError(
            f"{path} is damaged: its header describes {position} bytes of tensors, and {data_bytes - position} more "
            "follow; download it again"
        )
