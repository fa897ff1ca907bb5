"""GGUF files for fastgen. This module stays light: what needs torch is imported when a file is converted."""

from __future__ import annotations

from fastgen.api import CheckpointFormatSpec, hookimpl

__all__ = ["fastgen_checkpoint_formats"]


@hookimpl
def fastgen_checkpoint_formats() -> list[CheckpointFormatSpec]:
    return [
        CheckpointFormatSpec(
            "gguf",
            (".gguf",),
            "fastgen_gguf.convert:convert",
            description="GGUF files, converted once into safetensors",
        )
    ]
