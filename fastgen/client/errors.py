"""What a client raises beside the pipeline's own errors."""

from __future__ import annotations

from fastgen.errors import EngineClosedError, FastgenError

__all__ = ["AuthenticationError", "NotBegun", "RequestTimeoutError", "ServerUnreachableError"]


class ServerUnreachableError(EngineClosedError, ConnectionError):
    """Nobody answers at the address."""


class RequestTimeoutError(FastgenError, TimeoutError):
    """The answer was not whole within the client's ``timeout``. The request was aborted."""


class AuthenticationError(FastgenError, PermissionError):
    """The server wants an API key, and does not know the one it got."""


class NotBegun(Exception):
    """Inside the client: the server has not begun the request, so it may be sent again."""

    def __init__(self, error: FastgenError, retry_after: float | None = None) -> None:
        """
        Args:
            error: raised if it is not sent again.
            retry_after: seconds that the server asks for.
        """
        super().__init__(str(error))
        self.error = error
        self.retry_after = retry_after
