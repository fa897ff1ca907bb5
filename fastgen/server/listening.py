"""Where a server listens: its port, taken early, and its certificate."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from dataclasses import dataclass

from fastgen.errors import ConfigError
from fastgen.server.settings import ServerConfig

__all__ = ["Addresses", "addresses_of", "bind", "check_certificate", "is_local", "listen"]

BACKLOG = 2048
"""Connections that may wait to be accepted."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a server listens."""

    http: str
    """A URL."""
    grpc: str | None
    """``host:port``, or with ``grpcs://`` before it."""


def check_certificate(settings: ServerConfig) -> None:
    """Raises ConfigError where the files for TLS are not what they should be."""
    if settings.tls_cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
        except OSError as error:
            raise ConfigError(f"tls_cert and tls_key are no certificate and its key: {error}") from None


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(settings: ServerConfig) -> socket.socket:
    """The port of HTTP, taken before the model is loaded; nobody gets an answer, nor hangs, before it listens.

    Raises:
        ConfigError: it cannot be taken.
    """
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host: cannot listen on {host!r}: {error.strerror or error}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        # Two sockets with this option could both have the port until one listens.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise _taken(host, port, error) from None
    return made


def listen(listener: socket.socket, settings: ServerConfig) -> None:
    """Let connections come in.

    Raises:
        ConfigError: somebody else was faster.
    """
    try:
        # Connections inherit it: those that linger after the end do not keep the next server from the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(BACKLOG)
    except OSError as error:
        raise _taken(settings.host, listener.getsockname()[1], error) from None


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    hint = "; another server may run there. Choose another port, or 0 for any that is free" if port else ""
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}")


def addresses_of(listener: socket.socket, grpc_port: int | None, settings: ServerConfig) -> Addresses:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    secure = "s" if settings.tls_cert is not None else ""
    grpc = None
    if grpc_port is not None:
        grpc = f"{'grpcs://' if secure else ''}{host}:{grpc_port}"
    return Addresses(f"http{secure}://{host}:{listener.getsockname()[1]}", grpc)
