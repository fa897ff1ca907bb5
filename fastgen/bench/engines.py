"""The engines a benchmark can run in this process: fastgen, and transformers' `generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from typing import Any, get_args

from fastgen.bench.drive import drive
from fastgen.bench.protocol import Opener, Pass, Request, Run, Settings, Tick, Timeline, Workload
from fastgen.config import EngineConfig
from fastgen.errors import ConfigError, RequestFailedError

__all__ = ["ENGINES", "POLICIES", "FastgenEngine", "TransformersEngine", "policy_row"]

POLICIES: tuple[str, ...] = get_args(EngineConfig.model_fields["policy"].annotation)
"""Ways to compose passes that fastgen can be compared with itself by."""


class FastgenEngine:
    """fastgen in this process, driven through `fastgen.Engine`."""

    name = "fastgen"
    note = "fastgen: every run has its own cache salt, so no run finds another's prefixes."

    def __init__(self, settings: Settings) -> None:
        import fastgen

        self.versions: Mapping[str, str] = {name: version(name) for name in ("fastgen", "torch")}
        self._threads = settings.threads
        options = {"dtype": settings.dtype, "device": settings.device, "threads": settings.threads}
        self._engine = fastgen.Engine.load(settings.directory, **{**options, **dict(settings.options)})
        self._salts = count()

    def run(self, workload: Workload, tick: Tick) -> Run:
        _set_threads(self._threads)
        for request in workload.requests:  # refused before the first one runs
            self._engine.check(request.prompt, _greedy(request.out, ""))
        steps = _Steps(self._engine, f"bench-{next(self._salts)}")
        lines = drive(steps, workload.requests, clients=workload.clients, tick=tick)
        return Run(lines, steps.passes(), budget=self._engine.max_batch_tokens, cached=steps.cached)

    def close(self) -> None:
        self._engine.close()


class _Steps:
    """`fastgen.Engine` as a `Stepper` that keeps a record of every pass."""

    def __init__(self, engine: Any, salt: str) -> None:
        self._engine, self._salt = engine, salt
        self._rows: dict[str, int] = {}
        self._given: set[int] = set()
        self._passes: list[Pass] = []
        self.cached = 0
        self._tokens = engine.stats().tokens
        self._began = time.perf_counter()

    def add(self, row: int, prompt: list[int], out: int) -> None:
        self._rows[self._engine.add(prompt, _greedy(out, self._salt))] = row

    def step(self) -> list[tuple[int, list[int]]]:
        began = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - began
        came: list[tuple[int, list[int]]] = []
        decoded = 0
        for output in outputs:
            if output.finish_reason not in (None, "length"):
                raise RequestFailedError(f"a request ended with {output.finish_reason!r}: {output.error}")
            row = self._rows[output.request_id]
            if row in self._given:
                decoded += 1
            else:  # its first token belongs to the reading of its prompt
                self._given.add(row)
                self.cached += output.cached_tokens
            came.append((row, [output.token_id]))
        stats = self._engine.stats()
        tokens, self._tokens = stats.tokens - self._tokens, stats.tokens
        record = Pass(began - self._began, seconds, tokens - decoded, decoded, stats.running, stats.waiting)
        self._passes.append(record)
        return came

    def passes(self) -> list[Pass]:
        """Those that ran tokens."""
        return [one for one in self._passes if one.prompt or one.decode]


def _greedy(out: int, salt: str) -> Any:
    from fastgen import SamplingParams

    return SamplingParams(max_new_tokens=out, temperature=0.0, repetition_penalty=1.0, ignore_eos=True, cache_salt=salt)


def policy_row(policy: str) -> Opener:
    """fastgen with this scheduling policy, as a row of its own."""

    return lambda settings: FastgenEngine(replace(settings, options=(*settings.options, ("policy", policy))))


class TransformersEngine:
    """transformers' `generate`, as a careful user batches it: sorted by length, left-padded, in groups of 16."""

    name = "transformers"
    group = 16
    note = (
        "transformers: batched generate over groups of 16 sorted by prompt length, left-padded; a group runs to its "
        "longest output, only requested tokens are counted. One stream: one request after another."
    )

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        self.versions: Mapping[str, str] = {name: version(name) for name in ("transformers", "torch")}
        self._torch = torch
        self._threads = settings.threads
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            settings.directory, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
        self._model = model.to(settings.device).eval()

    def run(self, workload: Workload, tick: Tick) -> Run:
        """All requests at once in groups, or one after another.

        Raises:
            ConfigError: requests arrive while others run, which `generate` cannot take in.
        """
        alone = workload.clients == 1
        if not alone and not workload.at_once:
            raise ConfigError(
                f"transformers cannot run {workload.name}: generate takes no requests in while others run; use it with "
                "`bench offline` and `bench latency`"
            )
        _set_threads(self._threads)
        size = 1 if alone else self.group
        order = list(range(len(workload.requests)))
        if not alone:
            order.sort(key=lambda row: len(workload.requests[row].prompt))
        lines = [Timeline() for _ in order]
        began = time.perf_counter()
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            sent = time.perf_counter() - began if alone else 0.0
            clock = _Clock([workload.requests[row].out for row in rows], tick)
            for row, answer in zip(rows, self._generate([workload.requests[row] for row in rows], clock), strict=True):
                lines[row] = Timeline(sent, [at - began for at in clock.times[: len(answer)]], answer)
        return Run(lines)

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
        self._model = None


class _Clock:
    """A transformers streamer: told of the prompt first, then of each step's tokens, one a row."""

    def __init__(self, outs: list[int], tick: Tick) -> None:
        self.times: list[float] = []
        self._outs, self._tick, self._prompt = outs, tick, True

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(time.perf_counter())
        self._tick(sum(out >= len(self.times) for out in self._outs))

    def end(self) -> None:
        """Nothing is held back."""


def _set_threads(threads: int) -> None:
    """Before every run, since engines in one process share torch's setting."""
    import torch

    torch.set_num_threads(threads)


ENGINES: dict[str, Opener] = {FastgenEngine.name: FastgenEngine, TransformersEngine.name: TransformersEngine}
