"""The client of a server: ``fastgen.client("localhost:50051")`` or ``fastgen.client("http://localhost:8000")``.

::

    with fastgen.client("localhost:50051") as client:
        print(client("The capital of France is", max_new_tokens=8).text)

It has the verbs of ``fastgen.Pipeline`` with the same arguments, and gives the same objects. See ``Client`` for its
options.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from fastgen.client.errors import AuthenticationError, RequestTimeoutError, ServerUnreachableError
from fastgen.client.streams import AsyncChunkStream, ChunkStream
from fastgen.client.verbs import Client
from fastgen.errors import OverloadedError

__all__ = [
    "AsyncChunkStream",
    "AuthenticationError",
    "ChunkStream",
    "Client",
    "OverloadedError",
    "RequestTimeoutError",
    "ServerUnreachableError",
    "client",
]

client = Client


class _Callable(ModuleType):
    """``fastgen.client`` is this package and the function both, whichever of them is asked for first."""

    def __call__(self, address: str, **options: Any) -> Client:
        """See ``Client``."""
        return Client(address, **options)


sys.modules[__name__].__class__ = _Callable
