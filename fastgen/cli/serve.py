"""`fastgen serve`: a server that stays."""

from __future__ import annotations

import sys

import click

from fastgen.cli.options import SectionedCommand, engine_options, server_options
from fastgen.config import EngineConfig
from fastgen.errors import FastgenError
from fastgen.server.keys import with_keys
from fastgen.server.settings import ServerConfig

__all__ = ["serve"]

SECTIONS = {
    "Where it listens": ("host", "port", "grpc_port", "tls_cert", "tls_key"),
    "Who may use it": ("api_key", "cors_origin", "served_model_name"),
    "How much at once": ("replicas", "max_queue", "max_waiting_tokens", "max_request_size"),
    "What it shows": ("log_level", "log_format", "page", "metrics", "docs"),
    "Patience": ("start_timeout", "drain_timeout", "heartbeat_timeout", "step_timeout", "max_restarts"),
}


@click.command(cls=SectionedCommand)
@click.argument("model")
@server_options(SECTIONS)
@engine_options
def serve(model: str, config: EngineConfig, settings: ServerConfig) -> None:
    """Serve MODEL (a Hugging Face name, a directory, or a file such as .gguf) until told to stop.

    OpenAI's clients speak to it at /v1, a page to chat is at /, Prometheus reads /metrics. The engine runs in a process
    of its own and is started again if it dies. Ctrl-C or SIGTERM lets requests in flight finish, a second ends them.

    \b
    fastgen serve HuggingFaceTB/SmolLM2-135M-Instruct
    fastgen serve org/model --port 8080 --grpc-port 50051 --quantization int8
    fastgen serve org/model --replicas 2 --max-queue 100 --host 0.0.0.0
    fastgen serve org/model --config server.toml

    \b
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Hello"}], "model": "org/model"}'
    """
    try:
        from fastgen.server import launch
    except ImportError as error:
        raise FastgenError(
            f"the server's packages are missing ({error}); install them from your checkout of fastgen: "
            "pip install '.[server]'"
        ) from error
    settings = with_keys(settings)
    tell = _tell if sys.stderr.isatty() else None
    code = launch.run(lambda: launch.serve(model, config, settings, on_progress=tell), settings)
    click.get_current_context().exit(code)


def _tell(text: str) -> None:
    """On a terminal: what is being done before the server is ready."""
    click.secho(f"fastgen: {text} ...", err=True, dim=True)
