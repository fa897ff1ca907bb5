"""Where a server is, and how to speak to it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from fastgen.client.transport import Transport
from fastgen.errors import ConfigError, FastgenError

__all__ = ["connect"]

SCHEMES = ("grpc", "grpcs", "http", "https")


def connect(address: str, *, api_key: str | None, ca_cert: str | Path | None) -> Transport:
    """A connection, not opened yet.

    Args:
        address: ``host:port``, ``grpc://host:port`` or ``grpcs://...`` (gRPC), or a URL of HTTP.

    Raises:
        ConfigError: the address, the key or the certificate cannot be used.
        FastgenError: the packages for it are not installed.
    """
    scheme, rest = _split(address)
    roots = None if ca_cert is None else Path(ca_cert)
    if roots is not None and not roots.is_file():
        raise ConfigError(f"ca_cert: there is no file {roots}")
    if roots is not None and scheme in ("grpc", "http"):
        raise ConfigError(f"ca_cert goes with {scheme}s://, and {address!r} speaks without TLS")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise ConfigError("api_key must be printable ASCII and not empty")
    try:
        if scheme in ("http", "https"):
            from fastgen.client.over_http import HttpTransport

            return HttpTransport(f"{scheme}://{rest}", api_key=api_key, ca_cert=roots)
        from fastgen.client.over_grpc import GrpcTransport

        return GrpcTransport(rest, api_key=api_key, tls=scheme == "grpcs", ca_cert=roots)
    except ModuleNotFoundError as error:
        raise FastgenError(
            f"the client needs the package {error.name}; install it, or all that servers and clients need, from your "
            "checkout of fastgen: pip install '.[server]'"
        ) from error


def _split(address: str) -> tuple[str, str]:
    """Scheme, and what comes after ``://``."""
    if not isinstance(address, str):
        raise ConfigError(f"address must be text such as 'localhost:50051', got {address!r}")
    scheme, found, rest = address.strip().partition("://")
    if not found:
        scheme, rest = "grpc", scheme
    if scheme not in SCHEMES:
        raise ConfigError(f"address {address!r}: {scheme!r} is none of {', '.join(SCHEMES)}")
    try:
        parts = urlsplit(f"//{rest}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"address {address!r}: {error}") from None
    grpc = scheme.startswith("grpc")
    if not grpc:  # as OpenAI's clients want it
        rest = rest.removesuffix("/").removesuffix("/v1")
    if not parts.hostname or parts.username or parts.query or parts.fragment or (grpc and (parts.path or port is None)):
        example = "host:port" if grpc else f"{scheme}://host:port"
        raise ConfigError(f"address {address!r} is not of the form {example}")
    return scheme, rest
