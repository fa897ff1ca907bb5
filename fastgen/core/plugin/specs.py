"""What a plugin hands to fastgen: frozen descriptions of models, formats, sources, kernels, processors and commands.

Whatever is heavy may be named by a ``"module:attribute"`` string instead of given: it is imported when it is first
used (``spec.load()``), so that a plugin's entry module stays light. A spec checks itself when it is made, so that a
mistake shows up at the author's own line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from fastgen.core.plugin.describe import describe_error, format_error
from fastgen.errors import PluginError, did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

    import click

    from fastgen.core.containers import Decoder
    from fastgen.core.hf_config import HFConfig
    from fastgen.core.weight_map import WeightMap
    from fastgen.kernels.ops import Implementation

__all__ = [
    "CheckpointFormatSpec",
    "CommandSpec",
    "KernelSpec",
    "LoadedModel",
    "LogitsProcessorSpec",
    "ModelSourceSpec",
    "ModelSpec",
    "Spec",
]

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
PROCESSOR_NEEDS = ("tokenizer", "stop_token_ids", "checked")
"""What a logits processor's factory may be given besides its options, the vocabulary's size and the prompt."""


def _check_lazy(owner: str, name: str, value: object, kind: str, fits: Callable[[Any], bool]) -> None:
    if isinstance(value, str):
        if not _REFERENCE.fullmatch(value):
            raise PluginError(f"{owner}: {name} is {value!r}; a reference is written 'module:attribute'")
    elif not fits(value):
        raise PluginError(f"{owner}: {name} must be {kind} or a 'module:attribute' string, got {value!r}")


def _check_text(owner: str, name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise PluginError(f"{owner}: {name} must be a string that is not empty, got {value!r}")


def _names(owner: str, name: str, value: Any, *, empty: bool = False) -> tuple[str, ...]:
    """``value`` as a tuple of distinct names; a bare string is the commonest mistake and gets its own message."""
    if isinstance(value, str):
        raise PluginError(f"{owner}: {name} is the string {value!r}; write a tuple: ({value!r},)")
    if not isinstance(value, Iterable):
        raise PluginError(f"{owner}: {name} must be a tuple of strings, got {value!r}")
    names = tuple(value)
    for item in names:
        if not isinstance(item, str) or not item.strip():
            raise PluginError(f"{owner}: {name} holds {item!r}; it must hold strings that are not empty")
    if not names and not empty:
        raise PluginError(f"{owner}: {name} is empty; name at least one")
    if len(set(names)) != len(names):
        raise PluginError(f"{owner}: {name} names something twice: {', '.join(names)}")
    return names


@dataclass(frozen=True, eq=False)
class Spec:
    """What all specs share.

    ``overrides``: names of plugins whose claim on the same thing this one replaces. Without it two claims are an
    error when the thing is asked for. ``plugin``: the plugin's name; fastgen fills it in.
    """

    overrides: tuple[str, ...] = field(default=(), kw_only=True)
    plugin: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", _names(str(self), "overrides", self.overrides, empty=True))
        description = getattr(self, "description", "")
        if not isinstance(description, str):
            raise PluginError(f"{self}: description must be a string, got {description!r}")

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.claims())})"

    def claims(self) -> tuple[str, ...]:
        """The names for which this spec stands: two specs of one kind that share one clash."""
        raise NotImplementedError

    def _resolve(self, name: str) -> Any:
        """The field's value, imported if it is a reference.

        Raises:
            PluginError: the import failed, or the module lacks the attribute; with the traceback in its text.
        """
        value = getattr(self, name)
        if not isinstance(value, str):
            return value
        module, _, attribute = value.partition(":")
        try:
            found: Any = import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {self.plugin!r} is broken: cannot load {name} {value!r} of {self}: "
                f"{describe_error(error)}\n{format_error(error)}"
            ) from error
        return found

    def _resolve_callable(self, name: str) -> Callable[..., Any]:
        found = self._resolve(name)
        if not callable(found):
            raise self._wrong(name, found, "something callable")
        return found  # type: ignore[no-any-return]

    def _wrong(self, name: str, found: object, kind: str) -> PluginError:
        given = getattr(self, name)
        where = f" ({given!r})" if isinstance(given, str) else ""
        return PluginError(f"plugin {self.plugin!r} is broken: {name}{where} of {self} must be {kind}, got {found!r}")


class LoadedModel(NamedTuple):
    """A model family with nothing left to import."""

    config: type[HFConfig]
    build: Callable[[Any], Decoder]
    weights: WeightMap


@dataclass(frozen=True, eq=False)
class ModelSpec(Spec):
    """A model family: which ``architectures`` of a ``config.json`` it serves, and how.

    ``config``: an ``HFConfig`` subclass. ``build(config) -> Decoder`` composes the parts. ``weights``: the
    ``WeightMap`` that says which checkpoint module fills which part. A ``fallback`` serves only what no other plugin
    claims, and may claim by pattern (``"*ForCausalLM"``).
    """

    architectures: tuple[str, ...]
    config: type[HFConfig] | str
    build: Callable[[Any], Decoder] | str
    weights: WeightMap | str
    description: str = field(default="", kw_only=True)
    fallback: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "architectures", _names("ModelSpec", "architectures", self.architectures))
        for name in self.architectures:
            if not (name.isidentifier() or (self.fallback and re.fullmatch(r"[\w*?]+", name))):
                hint = "" if self.fallback else " (only a fallback may claim by pattern)"
                raise PluginError(f"ModelSpec: {name!r} cannot be an architecture's name{hint}")
        super().__post_init__()
        if not isinstance(self.fallback, bool):
            raise PluginError(f"{self}: fallback must be True or False, got {self.fallback!r}")
        _check_lazy(str(self), "config", self.config, "an HFConfig subclass", lambda v: isinstance(v, type))
        _check_lazy(str(self), "build", self.build, "a function", callable)
        # A WeightMap cannot be recognised here without importing it; load() does.
        _check_lazy(str(self), "weights", self.weights, "a WeightMap", lambda v: v is not None and not callable(v))

    def claims(self) -> tuple[str, ...]:
        return self.architectures

    def load(self) -> LoadedModel:
        """The config class, the build function and the weight map.

        Raises:
            PluginError: one of them cannot be imported or is not what it must be.
        """
        from fastgen.core.config_class import realise
        from fastgen.core.hf_config import HFConfig
        from fastgen.core.weight_map import WeightMap

        config, weights = self._resolve("config"), self._resolve("weights")
        try:
            real = realise(config)
        except Exception as error:  # fields that pydantic cannot use
            raise PluginError(
                f"plugin {self.plugin!r} is broken: the config class of {self} cannot be used: "
                f"{describe_error(error)}\n{format_error(error)}"
            ) from error
        if not (isinstance(real, type) and issubclass(real, HFConfig)):
            raise self._wrong("config", config, "a subclass of fastgen.api.HFConfig")
        if not isinstance(weights, WeightMap):
            raise self._wrong("weights", weights, "a fastgen.api.WeightMap")
        try:
            weights.find("")  # which reads all rules
        except Exception as error:
            raise PluginError(
                f"plugin {self.plugin!r} is broken: the weight map of {self} cannot be used: {describe_error(error)}"
            ) from error
        return LoadedModel(real, self._resolve_callable("build"), weights)


@dataclass(frozen=True, eq=False)
class CheckpointFormatSpec(Spec):
    """A file format. ``convert(source: Path, target: Path, *, dtype: str | None) -> None`` writes the file ``source``
    as a Hugging Face directory (config.json, tokenizer, safetensors) into the empty directory ``target``.
    ``suffixes`` are file name endings with their dot: ``(".gguf",)``.
    """

    name: str
    suffixes: tuple[str, ...]
    convert: Callable[..., None] | str
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_text("CheckpointFormatSpec", "name", self.name)
        suffixes = _names(f"CheckpointFormatSpec({self.name})", "suffixes", self.suffixes)
        for suffix in suffixes:
            if not suffix.startswith(".") or len(suffix) < 2:
                raise PluginError(f"CheckpointFormatSpec({self.name}): the suffix {suffix!r} must start with a dot")
        object.__setattr__(self, "suffixes", tuple(s.lower() for s in suffixes))
        super().__post_init__()
        _check_lazy(str(self), "convert", self.convert, "a function", callable)

    def claims(self) -> tuple[str, ...]:
        return self.suffixes

    def load(self) -> Callable[..., None]:
        """The convert function. Raises PluginError as ``ModelSpec.load`` does."""
        return self._resolve_callable("convert")


@dataclass(frozen=True, eq=False)
class ModelSourceSpec(Spec):
    """A place models come from. ``fetch(name: str, *, revision, token, offline) -> Path`` brings the model called
    ``name``, which begins with ``prefix`` (``"s3://"``), to this machine and returns its directory or file.
    ``token`` is what the user gave (``token``, ``--token``), else None; never a saved login.
    """

    name: str
    prefix: str
    fetch: Callable[..., Path] | str
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_text("ModelSourceSpec", "name", self.name)
        if not isinstance(self.prefix, str) or not re.fullmatch(r"[A-Za-z][\w+.-]*:(//)?", self.prefix):
            raise PluginError(f"ModelSourceSpec({self.name}): prefix is {self.prefix!r}; write it as 's3://' or 'ms:'")
        super().__post_init__()
        _check_lazy(str(self), "fetch", self.fetch, "a function", callable)

    def claims(self) -> tuple[str, ...]:
        return (self.prefix,)

    def load(self) -> Callable[..., Path]:
        """The fetch function. Raises PluginError as ``ModelSpec.load`` does."""
        return self._resolve_callable("fetch")


@dataclass(frozen=True, eq=False)
class KernelSpec(Spec):
    """One more implementation, called ``name``, of the operation called ``operation``."""

    operation: str
    name: str
    implementation: Implementation | str
    description: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        _check_text("KernelSpec", "operation", self.operation)
        _check_text("KernelSpec", "name", self.name)
        super().__post_init__()
        _check_lazy(str(self), "implementation", self.implementation, "an Implementation", lambda v: v is not None)

    def claims(self) -> tuple[str, ...]:
        return (f"{self.operation}/{self.name}",)

    def load(self) -> Implementation:
        """The implementation. Raises PluginError as ``ModelSpec.load`` does."""
        from fastgen.kernels.ops import Implementation

        found = self._resolve("implementation")
        if not isinstance(found, Implementation):
            raise self._wrong("implementation", found, "a fastgen.api.Implementation")
        if (found.operation, found.name) != (self.operation, self.name):
            raise self._wrong("implementation", found, f"that of {self.operation!r} called {self.name!r}")
        return found


@dataclass(frozen=True, eq=False)
class LogitsProcessorSpec(Spec):
    """A logits processor that requests ask for by ``name``.

    ``factory(options: dict, *, vocab_size: int, prompt_token_ids: list[int])`` makes one for each choice, a function
    ``(output_ids: list[int], logits: Tensor[vocab]) -> Tensor[vocab]`` called before each of its tokens. The factory
    raises ValueError for options it refuses. ``needs`` names what else it wants to be given, each by a keyword argument
    of that name: ``"tokenizer"`` (or None where the model has none), ``"stop_token_ids"`` (a frozenset of the ids that
    end this answer), ``"checked"`` (whether ``check`` has let these options through already).

    ``check(options: dict) -> None`` raises ValueError for options that no model can serve. A server calls it before it
    hands the request to an engine, in a thread, so it may take a while; it must do without torch.

    A server's engine makes one processor in a thread, for nobody, before it makes those of a request: a factory that
    takes long for new options keeps what took long, for any thread, and no answer waits for it. The same is done with
    ``example``, options that every model can serve, when the server starts.
    """

    name: str
    factory: Callable[..., Any] | str
    description: str = field(default="", kw_only=True)
    needs: tuple[str, ...] = field(default=(), kw_only=True)
    check: Callable[[Any], None] | str | None = field(default=None, kw_only=True)
    example: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_text("LogitsProcessorSpec", "name", self.name)
        super().__post_init__()
        _check_lazy(str(self), "factory", self.factory, "a function", callable)
        object.__setattr__(self, "needs", _names(str(self), "needs", self.needs, empty=True))
        for need in self.needs:
            if need not in PROCESSOR_NEEDS:
                near = did_you_mean(need, PROCESSOR_NEEDS)
                raise PluginError(f"{self}: needs holds {need!r}; known are {', '.join(PROCESSOR_NEEDS)}.{near}")
        if self.check is not None:
            _check_lazy(str(self), "check", self.check, "a function", callable)

    def claims(self) -> tuple[str, ...]:
        return (self.name,)

    def load(self) -> Callable[..., Any]:
        """The factory. Raises PluginError as ``ModelSpec.load`` does."""
        return self._resolve_callable("factory")

    def load_check(self) -> Callable[[Any], None] | None:
        """The check, where there is one. Raises PluginError as ``ModelSpec.load`` does."""
        return None if self.check is None else self._resolve_callable("check")


@dataclass(frozen=True, eq=False)
class CommandSpec(Spec):
    """``fastgen NAME``: a click command. ``help`` is its one line in ``fastgen --help``."""

    name: str
    command: click.Command | str
    help: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", self.name):
            raise PluginError(f"CommandSpec: {self.name!r} cannot be a command's name; use a-z, 0-9, - and _")
        if not isinstance(self.help, str):
            raise PluginError(f"CommandSpec({self.name}): help must be a string, got {self.help!r}")
        super().__post_init__()
        _check_lazy(str(self), "command", self.command, "a click command", _is_click_command)

    def claims(self) -> tuple[str, ...]:
        return (self.name,)

    def load(self) -> click.Command:
        """The command. Raises PluginError as ``ModelSpec.load`` does."""
        found = self._resolve("command")
        if not _is_click_command(found):
            raise self._wrong("command", found, "a click command")
        return found  # type: ignore[no-any-return]


def _is_click_command(value: object) -> bool:
    # Whoever made a click command has imported click; nobody else needs it here.
    click = sys.modules.get("click")
    return click is not None and isinstance(value, click.Command)
