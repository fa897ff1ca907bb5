"""onnxruntime-genai: its `Generator` for one stream, its `Engine` where requests run together.

`Engine` joins them in static batches: dynamic ones need a model with paged caches, which its builder does not make for
the CPU (0.18).
"""

from __future__ import annotations

import json
from collections import deque
from importlib import import_module
from importlib.metadata import version
from typing import Any


class Engine:
    """``max_seqs``: requests of a static batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._genai = import_module("onnxruntime_genai")
        config = self._genai.Config(settings["model"])
        # By itself the library takes a thread fewer than it might.
        threads = {"intra_op_num_threads": settings["threads"], "inter_op_num_threads": 1}
        batching = {"static_batching": {"max_batch_size": settings["max_seqs"]}}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}, "engine": batching}))
        self._model = self._genai.Model(config)
        self._alone = _Alone(self._genai, self._model)
        self._together: _Together | None = None  # made when it is needed
        self._way: _Alone | _Together = self._alone
        self.versions = {name: version(name) for name in ("onnxruntime", "onnxruntime-genai")}
        most = settings["max_seqs"]
        self.note = f"onnxruntime-genai: Generator for one stream, Engine with batches of {most} for many"

    def begin(self, requests: list[Any], clients: int | None) -> None:
        if clients == 1 or len(requests) == 1:
            self._way = self._alone
            return
        if self._together is None:
            self._together = _Together(self._genai, self._model)
        self._way = self._together

    def add(self, row: int, prompt: list[int], out: int) -> None:
        self._way.add(row, prompt, out)

    def step(self) -> list[tuple[int, list[int]]]:
        return self._way.step()


class _Alone:
    """One request after another, in the order they came."""

    def __init__(self, genai: Any, model: Any) -> None:
        self._numpy = import_module("numpy")
        self._genai, self._model = genai, model
        self._waiting: deque[tuple[int, list[int], int]] = deque()
        self._generator: Any = None
        self._row = self._left = 0

    def add(self, row: int, prompt: list[int], out: int) -> None:
        self._waiting.append((row, prompt, out))

    def step(self) -> list[tuple[int, list[int]]]:
        if not self._left:
            self._row, prompt, self._left = self._waiting.popleft()
            params = self._genai.GeneratorParams(self._model)
            total = len(prompt) + self._left
            params.set_search_options(do_sample=False, max_length=total, min_length=total)
            self._generator = self._genai.Generator(self._model, params)
            self._generator.append_tokens(self._numpy.array([prompt], dtype=self._numpy.int32))
        elif self._generator.is_done():
            raise RuntimeError(f"request {self._row} ended {self._left} tokens short")
        self._generator.generate_next_token()
        self._left -= 1
        return [(self._row, [int(self._generator.get_next_tokens()[0])])]


class _Together:
    """Many requests at once."""

    def __init__(self, genai: Any, model: Any) -> None:
        self._numpy = import_module("numpy")
        self._genai = genai
        self._engine = genai.Engine(model)
        self._events = self._engine.create_event_buffer(1024)
        self._running: list[tuple[int, Any]] = []
        self._left: dict[int, int] = {}

    def add(self, row: int, prompt: list[int], out: int) -> None:
        options = self._genai.RequestOptions()
        options.set_max_session_tokens(len(prompt) + out)
        request = self._engine.create_request(options=options)
        turn = self._genai.TurnOptions(request)
        turn.set_max_generated_tokens(out)
        turn.set_min_generated_tokens(out)
        turn.set_do_sample(False)
        request.begin_turn(self._numpy.array(prompt, dtype=self._numpy.int32), turn)
        self._running.append((row, request))
        self._left[row] = out

    def step(self) -> list[tuple[int, list[int]]]:
        came: dict[int, list[int]] = {}
        for event in self._engine.run(self._events):
            row = next(row for row, request in self._running if request == event.request)
            flags = getattr(event.flags, "value", event.flags)
            if flags & self._genai.EngineEventFlags.FAILED.value:
                raise RuntimeError(f"request {row} failed: {event.error_code}")
            if flags & self._genai.EngineEventFlags.TOKEN.value:
                came.setdefault(row, []).append(int(event.token))
                self._left[row] -= 1
        self._running = [(row, request) for row, request in self._running if self._left[row]]
        return list(came.items())
