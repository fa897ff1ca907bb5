"""From what a user calls a model to a directory with its files: a directory, a file, or a name. No torch here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from fastgen.core.conversion import convert
from fastgen.core.hub import Snapshot, fetch_model
from fastgen.core.plugin import CheckpointFormatSpec, Registry
from fastgen.core.plugin import registry as installed_plugins
from fastgen.errors import ConfigError, ModelNotFoundError, PluginError, did_you_mean

__all__ = ["ModelFiles", "resolve"]

_FILE_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".json", ".onnx", ".ckpt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's directory in the Hugging Face layout. Whether the weights of a model of the hub are in it is known
    after `fetch_weights` only: ask first whether the model can be served.

    ``name`` is what the user called it. ``origin`` says where the files come from: ``"directory"``, ``"cache"`` (the
    hub's, no network needed), ``"hub"``, ``"format gguf"``, ``"format gguf, converted before"``, ``"source s3"``.
    ``revision`` is the commit, for models of the hub.
    """

    directory: Path
    name: str
    origin: str
    revision: str | None = None
    snapshot: Snapshot | None = field(default=None, repr=False)
    """For models of the hub: what was fetched, and what is to be."""

    def fetch_weights(self) -> None:
        """Fetch the weight files of a model of the hub, unless they are here. Other models are whole already.

        Raises:
            ModelNotFoundError: they are not here, and there is no network or no access.
            CheckpointError: the model has no weights that can be loaded; says what it has.
        """
        if self.snapshot is not None:
            self.snapshot.fetch_weights()


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    offline: bool = False,
    load_bin: bool = False,
    registry: Registry | None = None,
) -> ModelFiles:
    """Find a model's files, fetching or converting them if need be; the weights of a model of the hub are left to
    `ModelFiles.fetch_weights`.

    What exists on this machine goes before a name on the hub: a directory in the Hugging Face layout, or a file of a
    format that a plugin converts. ``prefix://`` names go to the plugin of that source.

    Args:
        model: a directory, a file, or a name on the hub.
        revision: branch, tag or commit; for names only.
        token: for the hub, or the source that the name's prefix stands for. Unset: the hub's own client uses the login
            saved on this machine, for the hub alone; a plugin's source is never given it.
        offline: make no network call.
        load_bin: accept PyTorch ``.bin`` weights.
        registry: whose formats and sources to use. Unset: the installed plugins.

    Raises:
        ModelNotFoundError: there is no such thing; says what is near, and what to do.
        CheckpointError, UnsupportedModelError: it was found and cannot be used.
        ConfigError: a revision for files on this machine.
    """
    if not isinstance(model, str | Path):
        raise ModelNotFoundError(f"a model is a name, a directory or a file, got {model!r}")
    registry = registry or installed_plugins()
    name = os.fspath(model)
    if not name.strip() or "\0" in name:
        raise ModelNotFoundError(f"{name!r} is not a model; give a directory, a file, or a name on the hub")
    source = registry.find_source(name) if isinstance(model, str) else None
    if source is not None:
        fetched = source.load()(name, revision=revision, token=token, offline=offline)
        if not isinstance(fetched, str | Path) or not Path(fetched).exists():
            raise PluginError(f"plugin {source.plugin!r} is broken: fetch({name!r}) returned {fetched!r}, not a path")
        return _local(Path(fetched), name, registry, origin=f"source {source.name}")
    if isinstance(model, str) and "://" in name:
        known = [spec.prefix for spec in registry.sources]
        raise ModelNotFoundError(
            f"no plugin fetches {name!r}; known prefixes are {', '.join(known) or 'none'}.{did_you_mean(name, known)}"
            f"{registry.failures_note()}"
        )
    path = Path(name).expanduser()
    if _exists(path):
        if revision is not None:
            raise ConfigError(f"revision: {revision!r} is for names on the hub, and {name} is on this machine")
        return _local(path, name, registry, origin="directory")
    if isinstance(model, Path) or _reads_as_path(name, registry):
        raise ModelNotFoundError(f"there is no file or directory {name}.{_near(path)}")
    found = fetch_model(name, revision=revision, token=token, offline=offline, load_bin=load_bin)
    return ModelFiles(found.directory, name, "cache" if found.from_cache else "hub", found.commit, found)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # not allowed to look, name too long
        raise ModelNotFoundError(f"cannot look at {str(path)[:200]}: {error.strerror or error}") from None


def _reads_as_path(name: str, registry: Registry) -> bool:
    """Names on the hub are ``owner/model`` or ``model``; all else can only mean a place on this machine."""
    starts = name.startswith(("/", "./", "../", "~")) or name in (".", "..")
    return starts or name.count("/") > 1 or name.lower().endswith(_suffixes(registry))


def _suffixes(registry: Registry) -> tuple[str, ...]:
    return (*_FILE_SUFFIXES, *(suffix for spec in registry.formats for suffix in spec.suffixes))


def _near(path: Path) -> str:
    parent = path.parent
    try:
        names = [str(parent / entry.name) if parent != Path() else entry.name for entry in parent.iterdir()]
    except OSError:
        return f" There is no directory {parent} either." if not _exists(parent) else ""
    return did_you_mean(str(path), names)


def _local(path: Path, name: str, registry: Registry, origin: str) -> ModelFiles:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(_not_a_model(path, registry))
        return ModelFiles(path, name, origin)
    if not path.is_file():
        raise ModelNotFoundError(f"{path} is neither a file nor a directory")
    spec = registry.find_format(path)
    if spec is None:
        raise ModelNotFoundError(_unknown_format(path, registry))
    directory, before = convert(path, spec, version=_version(spec, registry))
    converted = f"format {spec.name}{', converted before' if before else ''}"
    return ModelFiles(directory, name, converted if origin == "directory" else f"{origin}, {converted}")


def _version(spec: CheckpointFormatSpec, registry: Registry) -> str:
    record = registry.record(spec.plugin)
    return f"{record.distribution}=={record.version}"


def _unknown_format(path: Path, registry: Registry) -> str:
    if (path.parent / "config.json").is_file():
        return f"{path} is one file of a model; give its directory, {path.parent}"
    known = sorted(suffix for spec in registry.formats for suffix in spec.suffixes)
    return (
        f"no plugin reads {path.name}; known file formats are {', '.join(known) or 'none'}. Give a model's directory, "
        f"a file of such a format, or a name on the hub.{registry.failures_note()}"
    )


def _not_a_model(directory: Path, registry: Registry) -> str:
    text = f"{directory} has no config.json, so it is not a model's directory"
    snapshots = sorted((directory / "snapshots").glob("*/config.json"))
    if snapshots:
        return f"{text}; it is a folder of the hub's cache: give {snapshots[-1].parent}"
    names = sorted(entry.name for entry in directory.iterdir())
    files = [file for file in names if registry.find_format(file) is not None]
    if files:
        return f"{text}; give the file itself: {directory / files[0]}"
    inside = [entry for entry in names if (directory / entry / "config.json").is_file()]
    if inside:
        return f"{text}; {', '.join(str(directory / entry) for entry in inside[:3])} has one"
    return text if names else f"{text}; it is empty"
