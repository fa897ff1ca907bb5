"""Passes written down: what a model does to its tensors in one pass, done again without its Python code.

As CUDA graphs do for a GPU. Operations of the library are written down by the binding, with their pointers; torch's
operations are seen by a dispatch mode and are called again on the same tensors. What a pass computes lies in an arena,
so that the pointers hold.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.kernels.cpu.library import library, unavailable

__all__ = ["Arena", "NotRepeatable", "Tape", "again", "cannot_record", "recording"]

_ALIGNMENT = 64
_POISON = 0xFF  # makes NaN of floats, -1 of integers

_aten = torch.ops.aten
_EMPTY = frozenset((_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided))
_LEAVES_TORCH = frozenset(
    (_aten.item, _aten._local_scalar_dense, _aten.is_nonzero, _aten.equal, _aten.resolve_conj, _aten.resolve_neg)
)
"""What torch calls when values go to Python or numpy, where they may decide anything."""
_MAY_DIFFER = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
)


class NotRepeatable(Exception):
    """What was to be recorded does something that a recording could not repeat."""


def cannot_record() -> str | None:
    """Why nothing can be recorded here; ``None`` if it can."""
    if (reason := unavailable()) is not None:
        return reason
    return None if library().binding is not None else "the library is called through ctypes"


class Arena:
    """Memory that recorded passes compute in. Passes run one after another, so one serves all.

    Args:
        size: most bytes that a pass may need at once; the system gives them when they are touched.
    """

    def __init__(self, size: int) -> None:
        memory = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        first = -memory.ctypes.data % _ALIGNMENT
        self.memory = memory[first : first + size]


class _Room:
    """Which parts of the arena are taken while one pass is recorded: a part is free again when the last tensor that
    looks at it is gone, as the pass itself would have given it back."""

    def __init__(self, arena: Arena) -> None:
        self._memory = arena.memory
        self._free = [(0, len(arena.memory))]  # parts from, to; ascending, with gaps between them
        self._arrays: dict[int, weakref.ref[Any]] = {}
        self.used = 0
        """Bytes from the begin of the arena that were ever taken."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for what ``tensor`` holds: of its shape, dtype and order of dimensions, without its numbers."""
        size = max(tensor.numel() * tensor.element_size(), 1)
        size = (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        at = next((at for at, (first, end) in enumerate(self._free) if end - first >= size), None)
        if at is None:
            raise MemoryError("the pass needs more memory than recordings have")
        first, end = self._free[at]
        self._free[at : at + 1] = [(first + size, end)] if first + size < end else []
        self.used = max(self.used, first + size)
        array = self._memory[first : first + tensor.numel() * tensor.element_size()]
        self._arrays[first] = weakref.ref(array, partial(self._give_back, first, first + size))
        flat = torch.from_numpy(array).view(tensor.dtype)  # the storage holds the array
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
        ordered = flat.view([tensor.shape[dim] for dim in order])
        return ordered.permute([order.index(dim) for dim in range(tensor.ndim)])

    def _give_back(self, first: int, end: int, _array: Any) -> None:
        del self._arrays[first]
        parts = sorted([*self._free, (first, end)])
        merged = parts[:1]
        for part in parts[1:]:
            if merged[-1][1] == part[0]:
                merged[-1] = (merged[-1][0], part[1])
            else:
                merged.append(part)
        self._free = merged


class Tape:
    """The operations of a recorded pass."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self._room = arena, _Room(arena)
        self._steps: list[Callable[[], Any]] = []

    def replay(self) -> None:
        """Do it all again, on what the tensors hold now. The results are where they were when it was recorded."""
        for step in self._steps:
            step()

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """Inside, all that the pass computed is overwritten, so that a value which is not computed again shows. If it
        shows, by an exception, everything is as it was."""
        used = self._arena.memory[: self._room.used]
        before = used.copy()
        used[:] = _POISON
        try:
            yield
        except BaseException:
            used[:] = before
            raise

    def _begin(self) -> None:
        library().binding.record()

    def _end(self) -> None:
        program = library().binding.stop()
        if program is not None:
            self._steps.append(partial(library().binding.replay, program))

    def add(self, step: Callable[[], Any]) -> None:
        """Between the library's operations so far and those to come."""
        self._end()
        self._steps.append(step)
        self._begin()

    def keep(self, out: Any) -> Any:
        """``out``, tensors with results, moved into the arena."""
        if isinstance(out, torch.Tensor):
            return self._room.like(out)
        if isinstance(out, (tuple, list)):
            return type(out)(self.keep(one) for one in out)
        raise NotRepeatable(f"an operation of the pass gives a {type(out).__name__}")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down torch's operations."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and wrapping the method against it would import torch's compiler: a second of
        processor time before the first answer."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _LEAVES_TORCH or not _MAY_DIFFER.isdisjoint(func.tags):
            raise NotRepeatable(f"the pass asks for values in Python ({func})")
        if func.overloadpacket is _aten.lift_fresh:
            raise NotRepeatable("the pass makes tensors of Python's numbers")
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.tape.add(partial(func, *args, **kwargs))
            return out
        if _is_view(out, (*args, *kwargs.values())):
            return out
        kept = self.tape.keep(out)
        if func.overloadpacket in _EMPTY:
            return kept
        _copy(kept, out)
        self.tape.add(lambda: _copy(kept, func(*args, **kwargs)))
        return kept


def _is_view(out: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation has computed nothing: its results look at the memory of an argument."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(first, torch.Tensor):
        return False
    memory = first.untyped_storage().data_ptr()
    return any(one.untyped_storage().data_ptr() == memory for one in _tensors(args))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for one in values:
            yield from _tensors(one)


def _copy(to: Any, out: Any) -> None:
    if isinstance(to, torch.Tensor):
        to.copy_(out)
    else:
        for one, result in zip(to, out, strict=True):
            _copy(one, result)


class _Current(threading.local):
    tape: Tape | None = None


_current = _Current()


@contextmanager
def recording(arena: Arena) -> Iterator[Tape]:
    """What runs inside, on this thread, is computed as always and written down. All tensors that it reads must stay
    where they are.

    Raises:
        NotRepeatable: from inside, where it does what could not be repeated.
        MemoryError: from inside, where the arena is too small.
    """
    tape = Tape(arena)
    tape._begin()
    _current.tape = tape
    try:
        with _Recorder(tape):
            yield tape
    finally:
        _current.tape = None
        tape._end()


def again(step: Callable[[], Any]) -> None:
    """If this thread is recording, ``step()`` is called at this place of every replay; it is not called now."""
    if _current.tape is not None:
        _current.tape.add(step)
