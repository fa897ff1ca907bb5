"""The loaded library: its operations by name, and the way to call them."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import struct
from collections.abc import Callable
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from fastgen.errors import ConfigError
from fastgen.kernels.cpu.build import BINDING, LIBRARY, BuildError, binding_file, library_file, prebuilt
from fastgen.kernels.cpu.isa import Level, best_level, level_named

__all__ = ["Library", "library", "set_threads", "unavailable"]

logger = logging.getLogger(__name__)


class Library:
    """The operations compiled for one instruction set.

    ``call(address, *arguments)`` runs one: integers (pointers among them) and floats, in the order of its struct.
    """

    def __init__(self, level: Level, *, lanes: int | None = None) -> None:
        self.level = level
        self._handle = _load_library(level, lanes)
        self._addresses: dict[str, int] = {}
        self.binding: Any = None
        self.call: Callable[..., None]
        try:
            self.binding = _binding()
            self.call = self.binding.call
        except (BuildError, ImportError) as error:
            logger.info("CPU kernels are called through ctypes, which is slower: %s", error)
            self.call = _call_by_ctypes

    def op(self, name: str) -> int:
        """The address of an operation."""
        address = self._addresses.get(name)
        if address is None:
            address = self._addresses[name] = ctypes.cast(getattr(self._handle, name), ctypes.c_void_p).value or 0
        return address

    def set_threads(self, count: int) -> None:
        """Threads that share an operation's work, the caller among them; for the whole process."""
        self._handle.fg_set_threads(ctypes.c_int64(count))


@cache
def library() -> Library:
    """The library for this processor, built at first use. ``FASTGEN_CPU_LEVEL`` names another instruction set.

    Raises:
        BuildError: it cannot be built here.
        ConfigError: ``FASTGEN_CPU_LEVEL`` is no level, or one that this processor does not run.
    """
    name = os.environ.get("FASTGEN_CPU_LEVEL")
    return Library(level_named(name) if name else best_level())


@cache
def unavailable() -> str | None:
    """Why there is no library, for a person to read; ``None`` if there is one. ``FASTGEN_CPU_KERNELS=0``: unwanted."""
    if os.environ.get("FASTGEN_CPU_KERNELS") == "0":
        return "turned off by FASTGEN_CPU_KERNELS=0"
    try:
        library()
    except BuildError as error:
        logger.warning("the fast CPU kernels cannot be built, torch's serve instead: %s", error)
        return str(error)
    except OSError as error:
        logger.warning("the fast CPU kernels cannot be loaded, torch's serve instead: %s", error)
        return str(error)
    except ConfigError:
        raise
    return None


def set_threads(count: int) -> None:
    """Threads that share an operation's work, in the whole process; nothing where there is no library."""
    if unavailable() is None:
        library().set_threads(count)


def _load_library(level: Level, lanes: int | None) -> ctypes.CDLL:
    came = prebuilt(LIBRARY.format(level.name)) if lanes is None else None
    if came is not None:
        try:
            return ctypes.CDLL(str(came))
        except OSError as error:  # made for a newer system than this
            logger.info("the CPU kernels that came with the package are of no use here and are compiled: %s", error)
    return ctypes.CDLL(str(library_file(level, lanes=lanes)))


def _binding() -> Any:
    if (came := prebuilt(BINDING)) is not None:
        try:
            return _load_binding(came)
        except ImportError as error:  # made for a newer system than this
            logger.info("the binding that came with the package is of no use here and is compiled: %s", error)
    return _load_binding(binding_file())


def _load_binding(file: Path) -> Any:
    name = "fastgen_cpu_binding"
    spec = importlib.util.spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _call_by_ctypes(address: int, *arguments: int | float) -> None:
    bits = [struct.unpack("q", struct.pack("d", one))[0] if isinstance(one, float) else one for one in arguments]
    _PROTOTYPE(address)((ctypes.c_int64 * len(bits))(*bits))


_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))
