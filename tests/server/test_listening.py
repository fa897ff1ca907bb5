"""The port of a server: taken early, once."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.errors import ConfigError
from fastgen.server import launch
from fastgen.server.listening import Addresses, bind, listen
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


@pytest.mark.parametrize(
    ("options", "warned"),
    [({"host": "0.0.0.0"}, True), ({"host": "::"}, True), ({}, False), ({"host": "0.0.0.0", "api_key": "k"}, False)],
    ids=str,
)
def test_whoever_lets_everybody_in_is_told(
    options: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    service: Any = SimpleNamespace(settings=ServerConfig(**options), names=("tiny",))
    launch._announce(Addresses("http://there", None), service)
    assert ("there is no API key" in caplog.text) == warned
    assert capsys.readouterr().err == "fastgen: tiny is ready on http://there; Ctrl-C ends it\n"


def test_with_json_logs_it_is_ready_in_json(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    service: Any = SimpleNamespace(settings=ServerConfig(log_format="json"), names=("tiny",))
    with caplog.at_level("INFO"):
        launch._announce(Addresses("http://there", None), service)
    assert [record.getMessage() for record in caplog.records] == ["tiny is ready on http://there; Ctrl-C ends it"]
    assert capsys.readouterr().err == ""
