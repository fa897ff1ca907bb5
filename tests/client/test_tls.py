"""Keys and certificates. Those in ``tls/`` are of these tests alone: valid for localhost until 2126, and signed by
themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastgen.client import AuthenticationError, Client
from fastgen.errors import EngineClosedError
from fastgen.front import Pipeline
from fastgen.testing.doors import open_door

pytestmark = pytest.mark.slow

TLS = Path(__file__).parent / "tls"


@pytest.mark.parametrize(("door", "scheme"), [("grpc", "grpcs://"), ("http", "https://")])
def test_tls(door: Any, scheme: str, pipe: Pipeline) -> None:
    files = {"tls_cert": str(TLS / "cert.pem"), "tls_key": str(TLS / "key.pem")}
    with open_door(pipe, door, scheme=scheme, **files) as served:
        with Client(served.address, ca_cert=files["tls_cert"], timeout=30) as client:
            assert client("a", max_new_tokens=2).token_ids == pipe("a", max_new_tokens=2).token_ids
            assert client.health()
        with Client(served.address, retries=0, timeout=30) as client:  # whose system does not know it
            with pytest.raises(EngineClosedError, match=r"(?i)ssl|certificate"):
                client("a")
            assert client.health() is False
        plain = served.address.replace(scheme, "" if door == "grpc" else "http://")
        with Client(plain, retries=0, timeout=5) as client, pytest.raises((EngineClosedError, TimeoutError)):
            client("a")


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_api_keys(door: Any, pipe: Pipeline) -> None:
    with open_door(pipe, door, api_key=("one", "two")) as served:
        with Client(served.address, api_key="two") as client:
            assert client("a", max_new_tokens=2).token_ids == pipe("a", max_new_tokens=2).token_ids
            assert client.model_info().name == "tiny"
        for key in (None, "three"):
            with Client(served.address, api_key=key) as client:
                for call in (client, client.stream, lambda _: client.model_info()):
                    with pytest.raises(AuthenticationError, match="no valid API key"):
                        call("a")
                with pytest.raises(PermissionError):  # the same, by its other name
                    client("a")
                assert client.health()  # probes have none
        assert served.idle()
