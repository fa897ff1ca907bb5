"""Server options: flags of ``fastgen serve``, keywords of ``fastgen.serve``, and the TOML table ``[server]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fastgen.config import parse_bytes
from fastgen.errors import ConfigError, first_problem

__all__ = ["ServerConfig"]

_SECRET = ("api_key",)


class ServerConfig(BaseModel):
    """Everything a server can be told beside its engine's options."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on. 0.0.0.0 lets other machines in.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port of HTTP. 0: any that is free, told at start.")
    grpc_port: int | None = Field(default=None, ge=0, le=65535, description="Port of gRPC. Unset: no gRPC. 0: any.")
    api_key: tuple[str, ...] = Field(
        default=(),
        repr=False,
        description="Keys of which a request must bring one (Authorization: Bearer KEY). Also read from "
        "FASTGEN_API_KEY, comma-separated. None: everyone who reaches the port is served.",
    )
    served_model_name: tuple[str, ...] = Field(
        default=(),
        description="Names clients may use for the model; answers carry the first. Unset: as loaded.",
    )
    replicas: int = Field(default=1, ge=1, le=64, description="Engine processes to spread the requests over.")
    max_queue: int = Field(
        default=512, ge=0, description="Choices that may wait or run beyond max_sequences; more are refused with 429."
    )
    max_waiting_tokens: int = Field(
        default=2**20,
        ge=1,
        description="Prompt tokens in flight beyond which requests are refused with 429.",
    )
    max_request_size: int | str = Field(
        default="4MiB", description="Largest request body. A larger one is refused with 413 and not read whole."
    )
    cors_origin: tuple[str, ...] = Field(
        default=(),
        description="Origins whose pages may call from a browser; * for any. None: its own page only.",
    )
    tls_cert: str | None = Field(default=None, description="Certificate chain (PEM) for HTTPS and gRPC.")
    tls_key: str | None = Field(default=None, description="Private key (PEM) of that certificate.")
    drain_timeout: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="Seconds that requests in flight get to end after SIGTERM."
    )
    start_timeout: float = Field(
        default=1800.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that an engine may take to load.",
    )
    heartbeat_timeout: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds of silence after which an engine counts as dead.",
    )
    step_timeout: float = Field(
        default=120.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a forward pass counts as stuck.",
    )
    max_restarts: int = Field(
        default=5, ge=0, description="Restarts of a dead engine within ten minutes before the server gives it up."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="What is logged.")
    log_format: Literal["text", "json"] = Field(default="text", description="Log lines for people, or JSON.")
    page: bool = Field(default=True, description="Serve the chat page and the live view at /.")
    metrics: bool = Field(default=True, description="Serve Prometheus metrics at /metrics.")
    docs: bool = Field(default=True, description="Serve the API's description at /docs and /openapi.json.")

    @field_validator("api_key", "served_model_name", "cors_origin", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("api_key", "served_model_name", "cors_origin")
    @classmethod
    def _not_blank(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not text.strip() for text in value):
            raise ValueError("an empty text is among the values given; leave it out")
        return value

    @field_validator("max_request_size")
    @classmethod
    def _size(cls, value: int | str) -> int:
        size = parse_bytes(value) if isinstance(value, str) else value
        if size < 1:
            raise ValueError(f"{value!r} is no room for anything")
        return size

    @model_validator(mode="after")
    def _ports(self) -> Self:
        if self.port and self.port == self.grpc_port:
            raise ValueError(f"port and grpc_port are both {self.port}; HTTP and gRPC need one each")
        return self

    @model_validator(mode="after")
    def _tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("give tls_cert and tls_key together")
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name}: there is no file {path}")
        return self

    def __init__(self, **options: Any) -> None:
        """
        Raises:
            ConfigError: an unknown option (with a suggestion), or a value that cannot be used.
        """
        try:
            super().__init__(**options)
        except ValidationError as error:
            _, text = first_problem(error.errors(), type(self).model_fields, what="server option", secret=_SECRET)
            raise ConfigError(text) from None

    @property
    def body_limit(self) -> int:
        """``max_request_size`` in bytes."""
        assert isinstance(self.max_request_size, int)
        return self.max_request_size
