"""Engine, server and sampling options as flags, made from the fields of the models, so that none can be forgotten."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fastgen.config import EngineConfig
from fastgen.errors import ConfigError, InvalidRequestError, did_you_mean
from fastgen.types import SamplingParams

__all__ = ["SectionedCommand", "engine_options", "sampling_options", "server_options", "with_only_lora"]

F = TypeVar("F", bound=Callable[..., Any])

_TOML = "fastgen.toml"
_ENGINE, _SAMPLING, _SERVER = "engine__", "sampling__", "server__"
_TABLES = ("sampling", "server")
"""Tables of a config file; engine options stand before them."""
# The engine's seed makes every request of a run repeatable and still lets two of them differ.
_NOT_FLAGS = {"seed"}
# A request's field `lora` is a name, the engine's option the adapters there are: `--lora NAME=DIRECTORY` loads.
_RENAMED = {"sampling__lora": "use-lora"}
_HELP = {"sampling__lora": "LoRA adapter to answer with, by its name. Unset: the only one, if --lora loads one."}


class SectionedOption(click.Option):
    """An option that `--help` shows under a heading of its own."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help groups its options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (row := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(parameter, "section", "Options"), []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class _Pairs(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """``KEY=VALUE``, with the key and the value of the given types; ``None``: the value is JSON and may be left out."""

    name = "key=value"

    def __init__(self, key: type, value: type | None) -> None:
        self.key, self.value = key, value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, Any]:
        if isinstance(value, tuple):
            return value
        key, found, text = str(value).partition("=")
        if self.value is None and not found:
            return key, {}
        try:
            if not found:
                raise ValueError("write it as KEY=VALUE")
            return self.key(key), json.loads(text) if self.value is None else self.value(text)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class _Numbers(click.ParamType):  # type: ignore[type-arg]
    """One or several integers, comma-separated."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} must be integers, comma-separated", param, ctx)


def engine_options(function: F) -> F:
    """Gives the command a flag for each engine option, and ``--config FILE.toml`` that they go over. The command is
    called with ``config: EngineConfig``."""

    @functools.wraps(function)
    def call(*args: Any, **values: Any) -> Any:
        given = _given(values, _ENGINE, EngineConfig)
        options = {k: v for k, v in _toml().items() if k not in _TABLES}
        for table in ("adapter", "lora"):
            if table in given and isinstance(options.get(table), dict):
                given[table] = {**options[table], **given[table]}
        try:
            config = EngineConfig.of({**options, **given})
        except ConfigError as error:
            raise click.UsageError(str(error), click.get_current_context()) from None
        return function(*args, config=config, **values)

    for name, field in reversed(EngineConfig.model_fields.items()):
        call = _flag(name, field, _ENGINE, "Engine options")(call)
    from_file = SectionedOption(
        ["--config"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_toml,
        section="Engine options",
        help="A TOML file of engine options, with sampling options in a table [sampling] and a server's in [server]; "
        "flags go over it.",
    )
    _add(call, from_file)
    return call  # type: ignore[return-value]


def sampling_options(function: F) -> F:
    """Gives the command a flag for each sampling option. It is called with ``params: SamplingParams``."""

    @functools.wraps(function)
    def call(*args: Any, **values: Any) -> Any:
        table = _toml().get("sampling", {})
        try:
            if not isinstance(table, dict):
                raise InvalidRequestError(f"sampling must be a table in the config file, got {table!r}")
            params = SamplingParams.of(**{**table, **_given(values, _SAMPLING, SamplingParams)})
        except InvalidRequestError as error:
            raise click.UsageError(str(error), click.get_current_context()) from None
        return function(*args, params=params, **values)

    for name, field in reversed(SamplingParams.model_fields.items()):
        if name not in _NOT_FLAGS:
            call = _flag(name, field, _SAMPLING, "Sampling options")(call)
    return call  # type: ignore[return-value]


def server_options(sections: Mapping[str, Sequence[str]]) -> Callable[[F], F]:
    """Gives the command a flag for each server option. It is called with ``settings: ServerConfig``.

    Args:
        sections: headings of the help with the names of their options; those named nowhere come under another.
    """
    from fastgen.server.settings import ServerConfig

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **values: Any) -> Any:
            table = _toml().get("server", {})
            try:
                if not isinstance(table, dict):
                    raise ConfigError(f"server must be a table in the config file, got {table!r}")
                settings = ServerConfig(**{**table, **_given(values, _SERVER, ServerConfig)})
            except ConfigError as error:
                raise click.UsageError(str(error), click.get_current_context()) from None
            return function(*args, settings=settings, **values)

        section_of = {name: title for title, names in sections.items() for name in names}
        fields = ServerConfig.model_fields
        order = [*section_of, *(name for name in fields if name not in section_of)]
        for name in reversed(order):
            call = _flag(name, fields[name], _SERVER, section_of.get(name, "Server options"))(call)
        return call  # type: ignore[return-value]

    return decorate


def with_only_lora(params: SamplingParams, config: EngineConfig) -> SamplingParams:
    """``params`` with the adapter that ``--lora`` loads, if it loads one and the request names none: whoever loads one
    for a command means it to be used."""
    if len(config.lora) != 1 or "lora" in params.model_fields_set:
        return params
    return SamplingParams.of(params, lora=next(iter(config.lora)))


def _add(command: Callable[..., Any], option: click.Option) -> None:
    """What click's decorators do, for an option that is already made."""
    params: list[click.Parameter] = command.__dict__.setdefault("__click_params__", [])
    params.append(option)


def _flag(name: str, field: FieldInfo, prefix: str, section: str) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        flag = _RENAMED.get(f"{prefix}{name}", name.replace("_", "-"))
        declaration = [f"{prefix}{name}", f"--{flag}"]
        settings = _type(field.annotation)
        if settings.pop("is_bool", False):
            declaration[1] += f"/--no-{flag}"
        text = _HELP.get(f"{prefix}{name}") or _help(field)
        option = SectionedOption(declaration, default=None, help=text, section=section, **settings)
        _add(command, option)
        return command

    return decorate


def _help(field: FieldInfo) -> str:
    text = (field.description or "").rstrip(".")
    shown = field.default
    if shown is None or field.default_factory is not None or shown == () or "efault" in text:
        return f"{text}."
    return f"{text}. [{'on' if shown is True else 'off' if shown is False else shown}]"


def _type(annotation: Any) -> dict[str, Any]:
    """How click parses a field of this type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = [a for a in arguments if a is not type(None)]
        return _type(kinds[0] if len(kinds) == 1 else str)
    if origin is Literal:
        return {"type": click.Choice(arguments)}
    if origin is tuple:
        return {"type": _Numbers() if arguments[0] is int else click.STRING, "multiple": True}
    if origin is dict:
        key, value = arguments
        return {"type": _Pairs(key, None if value is Any else value), "multiple": True}
    if annotation is bool:
        return {"is_bool": True}
    return {"type": {int: click.INT, float: click.FLOAT, str: click.STRING}[annotation]}


def _given(values: dict[str, Any], prefix: str, model: type[BaseModel]) -> dict[str, Any]:
    """Take the flags that were given out of a command's ``values``, as fields of the ``model``."""
    given: dict[str, Any] = {}
    for name in list(values):
        if not name.startswith(prefix):
            continue
        value = values.pop(name)
        if value is None or value == ():
            continue
        field = name.removeprefix(prefix)
        given[field] = _joined(value, model.model_fields[field].annotation) if isinstance(value, tuple) else value
    return given


def _joined(values: Sequence[Any], annotation: Any) -> Any:
    """The values of a flag given several times, as the one value of its field."""
    settings = _type(annotation)
    if isinstance(settings["type"], _Pairs):
        return dict(values)
    if isinstance(settings["type"], _Numbers):
        return tuple(number for numbers in values for number in numbers)
    return tuple(values)


def _read_toml(ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
    if path is not None:
        try:
            found = EngineConfig.read_toml(path)
            _check_file(found, path)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from None
        ctx.meta[_TOML] = found


def _check_file(found: Mapping[str, Any], path: Path) -> None:
    """
    Raises:
        ConfigError: an entry that no command could use; names the file.
    """
    from fastgen.server.settings import ServerConfig

    for name, value in found.items():
        if name in _TABLES or name in EngineConfig.model_fields:
            continue
        if isinstance(value, dict):
            raise ConfigError(f"{path}: unknown table [{name}].{did_you_mean(name, _TABLES)}")
        if name in ServerConfig.model_fields:
            raise ConfigError(f"{path}: {name} is a server's option; it belongs under [server]")
    try:
        EngineConfig.of({name: value for name, value in found.items() if name not in _TABLES})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _toml() -> dict[str, Any]:
    found: dict[str, Any] = click.get_current_context().meta.get(_TOML, {})
    return found
