"""llama.cpp through llama-cpp-python's low-level calls, with a small loop for continuous batching: a pass holds a token
of every running sequence first, then pieces of prompts up to the budget. llama.cpp's own loop is in its server."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any


@dataclass
class Sequence:
    """``done``: positions computed. ``next``: the token to feed, once the prompt is read. ``left``: tokens to give."""

    row: int
    prompt: list[int]
    left: int
    slot: int = -1
    done: int = 0
    next: int | None = None


class Engine:
    """``budget``: tokens of a pass (`n_batch`, `n_ubatch`). ``max_seqs``: sequences at once."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._numpy, self._llama = import_module("numpy"), import_module("llama_cpp")
        self._threads, self._budget, self._most = settings["threads"], settings["budget"], settings["max_seqs"]
        self._llama.llama_backend_init()
        self._model = self._llama.llama_model_load_from_file(
            settings["model"].encode(), self._llama.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings['model']}")
        self._vocabulary = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self._model))
        self._batch = self._llama.llama_batch_init(self._budget, 0, 1)
        self._context: Any = None
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._slots: list[int] = []
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        self.note = f"llama.cpp: our loop over its batches, budget {self._budget}, at most {self._most} sequences"

    def begin(self, requests: list[Any], clients: int | None) -> None:
        """A context with room for the longest request in each slot."""
        if self._context is not None:
            self._llama.llama_free(self._context)
        slots = min(self._most, len(requests), clients or len(requests))
        params = self._llama.llama_context_default_params()
        params.n_ctx = slots * max(len(request.prompt) + request.out for request in requests)
        params.n_ctx += slots * -(params.n_ctx // slots) % (slots * 256)  # whole blocks of 256 a slot
        params.n_batch = params.n_ubatch = self._budget
        params.n_seq_max = slots
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False  # else every token looks at the cells of all sequences
        self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._waiting.clear()
        self._running.clear()
        self._slots = list(range(slots))

    def add(self, row: int, prompt: list[int], out: int) -> None:
        self._waiting.append(Sequence(row, prompt, out))

    def step(self) -> list[tuple[int, list[int]]]:
        while self._waiting and self._slots:
            sequence = self._waiting.popleft()
            sequence.slot = self._slots.pop()
            self._running.append(sequence)
        ends = self._fill()
        code = self._llama.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")
        return [(sequence.row, [self._pick(index, sequence)]) for index, sequence in ends]

    def _fill(self) -> list[tuple[int, Sequence]]:
        """Builds the pass; ``(index in it, sequence)`` of the tokens whose successor is wanted."""
        self._batch.n_tokens = 0
        ends = []
        for sequence in self._running:
            if sequence.next is not None and self._batch.n_tokens < self._budget:
                ends.append((self._put(sequence, sequence.next, wanted=True), sequence))
        for sequence in self._running:
            if sequence.next is None:
                room = self._budget - self._batch.n_tokens
                for token in sequence.prompt[sequence.done : sequence.done + room]:
                    last = sequence.done == len(sequence.prompt) - 1
                    index = self._put(sequence, token, wanted=last)
                    if last:
                        ends.append((index, sequence))
        return ends

    def _put(self, sequence: Sequence, token: int, *, wanted: bool) -> int:
        batch, index = self._batch, self._batch.n_tokens
        batch.token[index], batch.pos[index] = token, sequence.done
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence.slot
        batch.logits[index] = wanted
        batch.n_tokens += 1
        sequence.done += 1
        return int(index)

    def _pick(self, index: int, sequence: Sequence) -> int:
        """The likeliest token; a sequence that has all its tokens gives its slot back."""
        logits = self._llama.llama_get_logits_ith(self._context, index)
        sequence.next = int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())
        sequence.left -= 1
        if not sequence.left:
            self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(self._context), sequence.slot, -1, -1)
            self._slots.append(sequence.slot)
            self._running.remove(sequence)
        return sequence.next
