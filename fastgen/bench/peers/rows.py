"""The TOML file that names peers: a table a row.

What it says is checked when it is read; what it points to when a row is opened, so that one peer that is not installed
does not stop the others.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from fastgen.bench.peers.process import CHILDREN, Launch, PeerTarget
from fastgen.bench.protocol import Opener, Settings
from fastgen.errors import ConfigError, did_you_mean, first_problem

__all__ = ["ADAPTERS", "PeerRow", "read"]

Dtype = Literal["float32", "bfloat16", "float16"]


class PeerRow(BaseModel):
    """What every table may say. Paths are relative to the file."""

    model_config = ConfigDict(extra="forbid")
    adapter: ClassVar[str] = ""
    model_kind: ClassVar[str] = ""
    """What ``model`` must be; empty: a checkpoint as the benchmark's own, which is then the default."""

    engine: str = Field(description="A name of `ADAPTERS`, or a Python file with a class `Engine`.")
    python: Path = Field(description="The interpreter of the engine's virtual environment.")
    model: Path | None = Field(None, description="In the engine's format. Unset: the benchmark's model.")
    dtype: Dtype | None = Field(None, description="Of inference. Unset: the benchmark's.")
    env: dict[str, str] = Field({}, description="Environment variables of the process.")
    load_seconds: PositiveFloat = Field(900.0, description="The longest that loading may take.")
    quiet_seconds: PositiveFloat = Field(180.0, description="The longest that a run may give no token.")

    def options(self) -> dict[str, Any]:
        """What the adapter itself takes."""
        return {name: value for name, value in self.model_dump().items() if name not in PeerRow.model_fields}


class VllmRow(PeerRow):
    adapter: ClassVar[str] = "vllm_child.py"
    budget: PositiveInt | None = Field(None, description="Tokens of a pass. Unset: vLLM's default.")
    max_seqs: PositiveInt | None = Field(None, description="Sequences at once.")
    max_length: PositiveInt | None = Field(None, description="Tokens of a sequence. Unset: the model's.")
    cache_gb: PositiveInt = Field(2, description="Of the KV cache.")
    eager: bool = Field(False, description="Without compilation.")


class OpenvinoRow(PeerRow):
    adapter: ClassVar[str] = "openvino_child.py"
    model_kind: ClassVar[str] = "a folder with openvino_model.xml, as `optimum-cli export openvino` writes it"
    budget: PositiveInt = Field(256, description="Tokens of a pass.")
    max_seqs: PositiveInt = Field(128, description="Sequences at once.")
    cache_gb: PositiveInt = Field(2, description="Of the KV cache.")
    kv_dtype: str | None = Field(None, description="Of the KV cache: bf16, f16, f32, u8. Unset: OpenVINO's choice.")


class OnnxruntimeRow(PeerRow):
    adapter: ClassVar[str] = "onnxruntime_child.py"
    model_kind: ClassVar[str] = "a folder with genai_config.json, as onnxruntime-genai's model builder writes it"
    max_seqs: PositiveInt = Field(4, description="Sequences at once, where requests run together.")


class LlamacppRow(PeerRow):
    adapter: ClassVar[str] = "llamacpp_child.py"
    model_kind: ClassVar[str] = "a GGUF file"
    budget: PositiveInt = Field(512, description="Tokens of a pass.")
    max_seqs: PositiveInt = Field(16, description="Sequences at once.")


class OwnRow(PeerRow):
    """An adapter of the user's own: a file that holds a class `Engine`, as ``children/serve.py`` describes it."""

    model_config = ConfigDict(extra="allow")

    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


ADAPTERS: Mapping[str, type[PeerRow]] = {
    "vllm": VllmRow,
    "openvino-genai": OpenvinoRow,
    "onnxruntime-genai": OnnxruntimeRow,
    "llama-cpp-python": LlamacppRow,
}
"""By the name of the package that is installed."""


def read(path: Path) -> dict[str, Opener]:
    """How to open the row of each table, by the table's name. No process starts.

    Raises:
        ConfigError: the file cannot be read, or a table is wrong; says which and why.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:  # neither UTF-8 nor TOML
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if not tables:
        raise ConfigError(f"{path} names no peer: write a table a row, such as [vllm-bf16]")
    return {name: _opener(name, table, path) for name, table in tables.items()}


def _opener(name: str, table: Any, file: Path) -> Opener:
    where = f"the peer {name!r} in {file}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}: write a table, [{name}], with 'engine' and 'python'")
    engine, folder = table.get("engine"), file.parent
    kind: type[PeerRow] = OwnRow
    if not isinstance(engine, str):
        raise ConfigError(f"{where}: 'engine' must be one of {', '.join(ADAPTERS)}, or a Python file")
    if engine.endswith(".py"):
        adapter = _path(folder, Path(engine))
        if not adapter.is_file():
            raise ConfigError(f"{where}: there is no adapter {adapter}")
    elif engine in ADAPTERS:
        kind = ADAPTERS[engine]
        adapter = CHILDREN / kind.adapter
    else:
        hint = did_you_mean(engine, ADAPTERS)
        raise ConfigError(f"{where}: unknown engine {engine!r}; choose from {', '.join(ADAPTERS)}.{hint}")
    try:
        row = kind.model_validate(table)
    except ValidationError as error:
        _, text = first_problem(error.errors(), kind.model_fields, what="key")
        raise ConfigError(f"{where}: {text}") from None
    if row.model is None and row.model_kind:
        raise ConfigError(f"{where}: {row.engine} needs 'model', {row.model_kind}")
    model = None if row.model is None else _path(folder, row.model)

    def open_peer(settings: Settings) -> PeerTarget:
        python = _interpreter(row.python, folder, where)
        if model is not None:
            _check_model(row, model, where)
        said = {
            "model": str(model or settings.directory),
            "dtype": row.dtype or settings.dtype,
            "threads": settings.threads,
            **row.options(),
        }
        launch = Launch(python, adapter, said, row.env, row.load_seconds, row.quiet_seconds)
        return PeerTarget(name, launch)

    return open_peer


def _path(folder: Path, path: Path) -> Path:
    # Not resolved: a virtual environment's interpreter is a link, and knows its environment by the link's place.
    return Path(os.path.abspath(folder / path.expanduser()))


def _interpreter(given: Path, folder: Path, where: str) -> Path:
    python = _path(folder, given)
    if not python.is_file():
        raise ConfigError(f"{where}: there is no interpreter {python}; make its environment, or correct 'python'")
    if shutil.which(python) is None:
        raise ConfigError(f"{where}: {python} cannot be executed")
    return python


def _check_model(row: PeerRow, model: Path, where: str) -> None:
    if not model.exists():
        raise ConfigError(f"{where}: there is no model {model}")
    needs = {OpenvinoRow: "openvino_model.xml", OnnxruntimeRow: "genai_config.json"}.get(type(row))
    if (needs and not (model / needs).is_file()) or (isinstance(row, LlamacppRow) and not model.is_file()):
        raise ConfigError(f"{where}: {model} is not {row.model_kind}")
