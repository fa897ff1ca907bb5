"""OpenVINO GenAI's continuous batching pipeline."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

PRECISIONS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


class Engine:
    """``budget``: `max_num_batched_tokens`. ``cache_gb``: of its KV cache. ``kv_dtype``: its number format, such as
    ``u8``; None: OpenVINO's choice."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._numpy, self._openvino = import_module("numpy"), import_module("openvino")
        self._genai = import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = settings["cache_gb"]
        scheduler.max_num_seqs = settings["max_seqs"]
        scheduler.max_num_batched_tokens = settings["budget"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": settings["threads"],
            "INFERENCE_PRECISION_HINT": PRECISIONS[settings["dtype"]],
        }
        if settings["kv_dtype"] is not None:
            properties["KV_CACHE_PRECISION"] = settings["kv_dtype"]
        self._pipeline = self._genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._running: dict[int, Any] = {}
        self._left: dict[int, int] = {}
        self._number = 0  # a request's name must be new
        self.versions = {name: version(name) for name in ("openvino", "openvino-genai")}
        self.note = (
            f"OpenVINO GenAI: continuous batching, split-fuse, prefix cache off, budget {settings['budget']}, "
            f"{properties['INFERENCE_PRECISION_HINT']} inference"
        )

    def begin(self, requests: list[Any], clients: int | None) -> None:
        self._running.clear()

    def add(self, row: int, prompt: list[int], out: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = out
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        self._number += 1
        ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
        self._running[row] = self._pipeline.add_request(self._number, ids, config)
        self._left[row] = out

    def step(self) -> list[tuple[int, list[int]]]:
        self._pipeline.step()
        came = []
        for row, handle in list(self._running.items()):
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            if tokens:
                came.append((row, tokens))
                self._left[row] -= len(tokens)
            if not self._left[row]:
                del self._running[row]
            elif not tokens and handle.get_status() != self._genai.GenerationStatus.RUNNING:
                raise RuntimeError(f"request {row} ended ({handle.get_status()}), {self._left[row]} tokens short")
        return came
