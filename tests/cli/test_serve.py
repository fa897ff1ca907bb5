"""`fastgen serve`: its flags, its config file, and its help."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastgen.cli import main
from fastgen.cli.serve import SECTIONS
from fastgen.config import EngineConfig
from fastgen.errors import ConfigError
from fastgen.server import launch
from fastgen.server.settings import ServerConfig

Got = dict[str, Any]


@pytest.fixture
def got(monkeypatch: pytest.MonkeyPatch) -> Got:
    """What the server would be started with."""
    seen: Got = {}

    def run(server: Any, settings: ServerConfig) -> int:
        coroutine: Coroutine[Any, Any, int] = server()
        coroutine.close()
        return 0

    def serve(model: str, config: EngineConfig, settings: ServerConfig, **options: Any) -> Coroutine[Any, Any, int]:
        seen.update(model=model, config=config, settings=settings)

        async def nothing() -> int:
            return 0

        return nothing()

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "serve", serve)
    monkeypatch.delenv("FASTGEN_API_KEY", raising=False)
    return seen


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["serve", "org/model", *arguments], standalone_mode=False)


FLAGS: dict[str, tuple[list[str], Any]] = {
    "host": (["--host", "0.0.0.0"], "0.0.0.0"),
    "port": (["--port", "0"], 0),
    "grpc_port": (["--grpc-port", "50051"], 50051),
    "api_key": (["--api-key", "a", "--api-key", "b"], ("a", "b")),
    "served_model_name": (["--served-model-name", "m"], ("m",)),
    "replicas": (["--replicas", "2"], 2),
    "max_queue": (["--max-queue", "7"], 7),
    "max_waiting_tokens": (["--max-waiting-tokens", "9"], 9),
    "max_request_size": (["--max-request-size", "1MiB"], 2**20),
    "cors_origin": (["--cors-origin", "*"], ("*",)),
    "drain_timeout": (["--drain-timeout", "1.5"], 1.5),
    "start_timeout": (["--start-timeout", "60"], 60.0),
    "heartbeat_timeout": (["--heartbeat-timeout", "5"], 5.0),
    "step_timeout": (["--step-timeout", "6"], 6.0),
    "max_restarts": (["--max-restarts", "0"], 0),
    "log_level": (["--log-level", "debug"], "debug"),
    "log_format": (["--log-format", "json"], "json"),
    "page": (["--no-page"], False),
    "metrics": (["--no-metrics"], False),
    "docs": (["--no-docs"], False),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_for_every_server_option(got: Got, name: str) -> None:
    flags, value = FLAGS[name]
    assert serve(*flags).exit_code == 0
    assert getattr(got["settings"], name) == value
    assert got["settings"].model_fields_set == {name}
    assert not got["config"].model_fields_set


def test_certificates(got: Got, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.touch()
    key.touch()
    serve("--tls-cert", str(cert), "--tls-key", str(key))
    assert (got["settings"].tls_cert, got["settings"].tls_key) == (str(cert), str(key))


def test_no_option_is_forgotten() -> None:
    named = [name for names in SECTIONS.values() for name in names]
    assert sorted(named) == sorted(ServerConfig.model_fields)
    assert set(FLAGS) | {"tls_cert", "tls_key"} >= set(ServerConfig.model_fields)
    assert not set(ServerConfig.model_fields) & set(EngineConfig.model_fields)  # fastgen.serve takes both as keywords


def test_the_config_file(got: Got, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('block_size = 8\n[sampling]\nn = 2\n[server]\nport = 9000\napi_key = ["a"]\nreplicas = 3\n')
    assert serve("--config", str(file), "--port", "9001", "--threads", "2").exit_code == 0
    assert (got["model"], got["config"]) == ("org/model", EngineConfig(block_size=8, threads=2))
    assert got["settings"] == ServerConfig(port=9001, api_key=("a",), replicas=3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nports = 1\n", "unknown server option 'ports'. Did you mean 'port'"),
        ("[server]\nport = 99999\n", "port"),
        ("server = 1\n", "server must be a table"),
        ("port = 9000\n", "port is a server's option; it belongs under"),
    ],
)
def test_a_config_file_that_is_wrong(got: Got, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    result = serve("--config", str(file))
    assert words in str(result.exception)
    assert not got


def test_keys_from_the_environment(got: Got, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_API_KEY", "one, two")
    serve()
    assert got["settings"].api_key == ("one", "two")
    serve("--api-key", "three")
    assert got["settings"].api_key == ("three",)


def test_its_help() -> None:
    result = CliRunner().invoke(main, ["serve", "--help"])
    assert result.exit_code == 0
    places = [result.output.index(f"\n{title}:\n") for title in (*SECTIONS, "Engine options")]
    assert places == sorted(places)
    assert result.output.index("fastgen serve org/model") < places[0]
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in result.output
    assert all(len(line) <= 90 for line in result.output.splitlines())


def test_one_port_cannot_be_both_http_and_grpc() -> None:
    with pytest.raises(ConfigError, match="both 8011"):
        ServerConfig(port=8011, grpc_port=8011)
    assert ServerConfig(port=0, grpc_port=0).grpc_port == 0
