"""From the engine's thread into a caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastgen.core.loop import CallerGone

__all__ = ["call_soon"]


def call_soon(events: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """``events.call_soon_threadsafe``.

    Raises:
        CallerGone: the event loop is closed, as ``asyncio.run`` leaves it: whoever waited there is no more.
    """
    try:
        events.call_soon_threadsafe(function, *args)
    except RuntimeError as error:
        if not events.is_closed():
            raise
        raise CallerGone(str(error)) from error
