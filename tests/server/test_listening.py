"""The port of a server: taken early, once."""

from __future__ import annotations

import socket

import pytest

from fastgen.errors import ConfigError
from fastgen.server.listening import bind, listen
from fastgen.server.settings import ServerConfig


def test_two_servers_that_load_do_not_have_one_port() -> None:
    with bind(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: .*in use; another server"):
            bind(ServerConfig(port=port))
        listen(first, ServerConfig(port=port))
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_somebody_who_listens_first() -> None:
    """As on systems where an option that is cleared later changes nothing."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        settings = ServerConfig(port=other.getsockname()[1])
        with bind(settings) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.listen()
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {settings.port}: .*in use"):
                listen(ours, settings)


def test_connections_that_linger_do_not_keep_the_port() -> None:
    """The side that closes first keeps the connection for a minute (TIME_WAIT)."""
    with bind(ServerConfig(port=0)) as first:
        settings = ServerConfig(port=first.getsockname()[1])
        listen(first, settings)
        with socket.create_connection(first.getsockname()[:2]) as client:
            first.setblocking(True)
            first.accept()[0].close()
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):  # negative control: it lingers
        plain.bind(("127.0.0.1", settings.port))
    with bind(settings) as second:
        with pytest.raises(ConfigError):
            bind(settings)
        listen(second, settings)
