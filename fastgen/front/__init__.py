"""The in-process front: ``fastgen.pipeline`` and the verbs of the ``Pipeline`` it returns."""

from __future__ import annotations

from fastgen.front.pipe import Pipeline, pipeline
from fastgen.front.streams import AsyncChunkStream, ChunkStream

__all__ = ["AsyncChunkStream", "ChunkStream", "Pipeline", "pipeline"]
