"""The engines a benchmark can run, behind one small face: load once, then run a workload and say when tokens came."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from fastgen.bench.workloads import Request, Workload
from fastgen.errors import RequestFailedError

__all__ = ["ENGINES", "FastgenEngine", "Run", "Settings", "TransformersEngine"]

Tick = Callable[[int], None]
"""Called with the number of requested output tokens that just came."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The same for every engine. ``threads``: CPU threads. ``options``: fastgen's engine options."""

    directory: Path
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, run once. Seconds from the moment the requests were handed over; tokens by request."""

    wall: float
    first_token: float
    tokens: list[list[int]]


class FastgenEngine:
    """fastgen in this process, driven through `fastgen.Engine`."""

    name = "fastgen"
    note = "fastgen: all requests at once; every run has its own cache salt, so no run finds another's prefixes."

    def __init__(self, settings: Settings) -> None:
        import fastgen

        self._threads = settings.threads
        options = {"dtype": settings.dtype, "device": settings.device, "threads": settings.threads}
        self._engine = fastgen.Engine.load(settings.directory, **{**options, **dict(settings.options)})
        self._salts = count()

    def run(self, workload: Workload, tick: Tick) -> Run:
        _set_threads(self._threads)
        engine, salt = self._engine, f"bench-{next(self._salts)}"
        tokens: list[list[int]] = [[] for _ in workload.requests]
        first_token = 0.0
        began = perf_counter()
        rows = {engine.add(r.prompt, _greedy(r.out, salt)): i for i, r in enumerate(workload.requests)}
        while engine.has_work:
            outputs = engine.step()
            came = 0
            for output in outputs:
                if output.finish_reason not in (None, "length"):
                    raise RequestFailedError(f"a request ended with {output.finish_reason!r}: {output.error}")
                if output.token_id is not None:
                    tokens[rows[output.request_id]].append(output.token_id)
                    came += 1
            if came:
                first_token = first_token or perf_counter() - began
                tick(came)
        return Run(perf_counter() - began, first_token, tokens)

    def close(self) -> None:
        self._engine.close()


def _greedy(out: int, salt: str) -> Any:
    from fastgen import SamplingParams

    return SamplingParams(max_new_tokens=out, temperature=0.0, repetition_penalty=1.0, ignore_eos=True, cache_salt=salt)


class TransformersEngine:
    """transformers' `generate`, as a careful user batches it: sorted by length, left-padded, in groups of 16."""

    name = "transformers"
    group = 16
    note = (
        "transformers: batched generate over groups of 16 sorted by prompt length, left-padded; a group runs to its "
        "longest output, only requested tokens are counted."
    )

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        self._torch = torch
        self._threads = settings.threads
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            settings.directory, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        self._model = model.to(settings.device).eval()

    def run(self, workload: Workload, tick: Tick) -> Run:
        _set_threads(self._threads)
        order = sorted(range(len(workload.requests)), key=lambda i: len(workload.requests[i].prompt))
        tokens: list[list[int]] = [[] for _ in workload.requests]
        first_token = 0.0
        began = perf_counter()
        for start in range(0, len(order), self.group):
            rows = order[start : start + self.group]
            clock = _Clock([workload.requests[row].out for row in rows], tick)
            for row, answer in zip(rows, self._generate([workload.requests[row] for row in rows], clock), strict=True):
                tokens[row] = answer
            first_token = first_token or clock.first - began
        return Run(perf_counter() - began, first_token, tokens)

    def _generate(self, requests: list[Request], clock: _Clock) -> list[list[int]]:
        from transformers import GenerationConfig

        torch, device = self._torch, self._model.device
        width, longest = max(len(r.prompt) for r in requests), max(r.out for r in requests)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in requests], device=device)
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests], device=device)
        # A fresh config: the model's own sampling defaults and end tokens must not shorten or change the work.
        plain = GenerationConfig(do_sample=False, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0)
        self._model.generation_config = plain
        with torch.inference_mode():
            output = self._model.generate(input_ids=ids, attention_mask=mask, generation_config=plain, streamer=clock)
        answers: list[list[int]] = output[:, width:].tolist()
        return [answer[: r.out] for answer, r in zip(answers, requests, strict=True)]

    def close(self) -> None:
        del self._model


class _Clock:
    """A transformers streamer: told of the prompt first, then of each step's tokens, one a row."""

    def __init__(self, outs: list[int], tick: Tick) -> None:
        self.first = 0.0
        self._outs, self._tick, self._steps = outs, tick, -1

    def put(self, value: Any) -> None:
        self._steps += 1
        if self._steps:
            self.first = self.first or perf_counter()
            self._tick(sum(out >= self._steps for out in self._outs))

    def end(self) -> None:
        """Nothing is held back."""


def _set_threads(threads: int) -> None:
    """Before every run, since engines in one process share torch's setting."""
    import torch

    torch.set_num_threads(threads)


ENGINES: dict[str, type[FastgenEngine] | type[TransformersEngine]] = {
    FastgenEngine.name: FastgenEngine,
    TransformersEngine.name: TransformersEngine,
}
