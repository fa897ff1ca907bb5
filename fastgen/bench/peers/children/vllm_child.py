"""vLLM on the CPU, its engine in this process, stepped by hand."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any


class Engine:
    """``budget``: `max_num_batched_tokens`. ``eager``: no compilation. ``cache_gb``: of its KV cache."""

    def __init__(self, settings: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        # Read when vLLM is imported. One process: the step's time is the engine's, not that of a message between two.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings["cache_gb"]))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        self._vllm = import_module("vllm")
        limits = {
            "max_num_batched_tokens": settings["budget"],
            "max_model_len": settings["max_length"],
            "max_num_seqs": settings["max_seqs"],
        }
        model = self._vllm.LLM(
            settings["model"],
            dtype=settings["dtype"],
            enforce_eager=settings["eager"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            **{name: value for name, value in limits.items() if value is not None},
        )
        self._engine = model.llm_engine
        self._given: dict[str, int] = {}
        self._out: dict[str, int] = {}
        self._run = 0
        self.versions = {name: _version(name) for name in ("vllm", "vllm-cpu", "torch") if _version(name)}
        mode = "eager" if settings["eager"] else "compiled"
        self.note = f"vLLM: {mode}, one process, prefix cache off, budget {settings['budget'] or 'its default'}"

    def begin(self, requests: list[Any], clients: int | None) -> None:
        self._run += 1
        self._given.clear()

    def add(self, row: int, prompt: list[int], out: int) -> None:
        params = self._vllm.SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, detokenize=False)
        name = f"{self._run}-{row}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self._given[name], self._out[name] = 0, out

    def step(self) -> list[tuple[int, list[int]]]:
        came = []
        for output in self._engine.step():
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            fresh = tokens[self._given[name] :]
            self._given[name] = len(tokens)
            if fresh:
                came.append((int(name.partition("-")[2]), fresh))
            if output.finished and len(tokens) != self._out[name]:
                raise RuntimeError(f"request {name} ended after {len(tokens)} of {self._out[name]} tokens")
        return came


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
