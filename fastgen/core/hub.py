"""Models of the Hugging Face hub: the cache first, then the network; the small files, then the weights. No torch."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastgen.core.weight_files import (
    BIN,
    BIN_INDEX,
    BIN_WARNING,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    choose_files,
    read_index,
)
from fastgen.errors import CheckpointError, ConfigError, FastgenError, ModelNotFoundError, did_you_mean

__all__ = [
    "ADAPTER_BIN",
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "Snapshot",
    "cached_models",
    "fetch_adapter",
    "fetch_model",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_BIN = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
"""The files of a LoRA adapter, as peft names them."""

# Code is fetched with the rest, and runs only where trust_remote_code says so.
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.py"]
_TEMPLATES = "*.jinja"  # those in additional_chat_templates/ too
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model in the hub's cache: its small files, and its weights if they were there already."""

    name: str
    directory: Path
    commit: str
    from_cache: bool
    """Whether no network was needed."""
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    load_bin: bool = False

    def fetch_weights(self) -> None:
        """Fetch the weight files of this commit, and nothing else; what is there is used without a network call.

        Raises:
            ModelNotFoundError: they are not there, and there is no network or no access.
            CheckpointError: the repository holds no weights that can be loaded; says what it does hold.
        """
        from huggingface_hub import constants

        if _has_weights(self.directory, self.load_bin):
            return
        if self.offline or constants.HF_HUB_OFFLINE:
            if _has_weights(self.directory, load_bin=True):
                choose_files(self.directory)  # says that these are pickles, and how to load them
            raise ModelNotFoundError(
                f"offline, and the hub's cache holds {self.name} without its weights, or not all of them."
                f"{_what_is_cached(self.name)}"
            )
        there = _listing(self.name, self.commit, self.token)
        names = self._weight_names(SAFETENSORS_INDEX, SAFETENSORS)
        if self.load_bin and SAFETENSORS not in there and not (self.directory / SAFETENSORS_INDEX).is_file():
            names = self._weight_names(BIN_INDEX, BIN)
        if not names <= there:
            raise CheckpointError(_what_it_holds(self.name, there, self.directory))
        _download(self.name, self.commit, self.token, [glob.escape(name) for name in sorted(names)])

    def _weight_names(self, index: str, single: str) -> set[str]:
        if (self.directory / index).is_file():
            return set(read_index(self.directory / index, Path(single).suffix).values())
        return {single}


def fetch_model(
    name: str, *, revision: str | None = None, token: str | None = None, offline: bool = False, load_bin: bool = False
) -> Snapshot:
    """A model of the hub without its weights: config, tokenizer, templates and index. Whether it can be served is seen
    in these; `Snapshot.fetch_weights` gets the rest. What is complete in the cache is used without a network call.

    Args:
        name: ``"owner/model"`` or ``"model"``.
        token: for the hub. Unset: the login saved on this machine.
        load_bin: take PyTorch ``.bin`` weights where there are no safetensors.

    Raises:
        ModelNotFoundError: no such name or revision, no access, or no network and not in the cache.
        CheckpointError: the repository holds nothing that can be loaded; says what it does hold.
    """
    from huggingface_hub import constants

    _check_name(name)
    if revision is not None and (not revision or ".." in revision or revision.startswith("/") or "\0" in revision):
        raise ConfigError(f"revision: {revision!r} is not a branch, tag or commit")

    def snapshot(directory: Path, *, from_cache: bool) -> Snapshot:
        return Snapshot(name, directory, directory.name, from_cache, token, offline, load_bin)

    cached = _cached(name, revision, "config.json")
    if cached is not None and _has_tokenizer(cached) and _has_weights(cached, load_bin):
        return snapshot(cached, from_cache=True)
    try:
        if offline or constants.HF_HUB_OFFLINE:
            raise ModelNotFoundError(_offline(name, revision))
        return snapshot(_download_small(name, revision, token), from_cache=False)
    except FastgenError:
        if cached is None:
            raise
        return snapshot(cached, from_cache=True)


def fetch_adapter(name: str, *, token: str | None = None, offline: bool = False, load_bin: bool = False) -> Path:
    """The directory of a LoRA adapter of the hub: its config and its weights, and nothing else of the repository. What
    the cache has whole is used without a network call.

    Raises:
        ModelNotFoundError: no such name, no access, or no network and not in the cache.
        CheckpointError: its weights are in PyTorch's ``.bin`` format only, and ``load_bin`` is not set.
    """
    from huggingface_hub import constants

    def whole(directory: Path) -> bool:
        weights = (ADAPTER_WEIGHTS, ADAPTER_BIN) if load_bin else (ADAPTER_WEIGHTS,)
        return any((directory / file).is_file() for file in weights)

    _check_name(name)
    cached = _cached(name, None, ADAPTER_CONFIG)
    if cached is not None and whole(cached):
        return cached
    if offline or constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(_offline(name, None))
    directory = _download(name, None, token, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    if whole(directory) or ADAPTER_BIN not in _listing(name, directory.name, token):
        return directory
    if not load_bin:
        raise CheckpointError(f"it has PyTorch .bin weights only. {BIN_WARNING}")
    return _download(name, directory.name, token, [ADAPTER_BIN])


def cached_models() -> list[str]:
    """Names of the models that the hub's cache holds something of."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*/snapshots")
    return sorted(folder.parent.name.removeprefix("models--").replace("--", "/") for folder in folders)


def _check_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{name!r} is neither a file or directory here nor a name on the hub: {error}"
        ) from None


def _cached(name: str, revision: str | None, config: str) -> Path | None:
    """What the cache has of a model or adapter, if that has its config."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[config])
    except OSError:  # among them LocalEntryNotFoundError
        return None
    return Path(found) if (Path(found) / config).is_file() else None


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / file).is_file() for file in _TOKENIZER_FILES)


def _has_weights(directory: Path, load_bin: bool) -> bool:
    """Whether every weight file that the index names is there."""
    try:
        choose_files(directory, load_bin=load_bin)
    except CheckpointError:
        return False
    return True


def _download_small(name: str, revision: str | None, token: str | None) -> Path:
    directory = _download(
        name, revision, token, [*_SMALL_FILES, _TEMPLATES], ignore=[f"*/{pattern}" for pattern in _SMALL_FILES]
    )
    if not (directory / "config.json").is_file():
        raise CheckpointError(_what_it_holds(name, _listing(name, directory.name, token), directory))
    return directory


def _download(
    name: str, revision: str | None, token: str | None, allow: list[str], ignore: list[str] | None = None
) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                token=token,
                allow_patterns=allow,
                ignore_patterns=ignore,
                tqdm_class=_progress_bar(),
            )
        )
    except Exception as error:
        raise _translated(error, name, revision) from error


def _progress_bar() -> Any:
    """The hub library's own bar, on a terminal only."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Quiet(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return tqdm if sys.stderr.isatty() else Quiet


def _listing(name: str, commit: str, token: str | None) -> set[str]:
    """Names of the files of a repository."""
    from huggingface_hub import HfApi

    try:
        return set(HfApi(token=token).list_repo_files(name, revision=commit))
    except Exception as error:
        raise _translated(error, name, commit) from error


def _what_it_holds(name: str, listing: set[str], directory: Path) -> str:
    files = sorted(listing)

    def some(suffixes: Iterable[str]) -> list[str]:
        return [file for file in files if file.endswith(tuple(suffixes))]

    if "adapter_config.json" in files:
        return f"{name} on the hub is an adapter for another model (adapter_config.json), not a model"
    if gguf := some([".gguf"]):
        return (
            f"{name} on the hub holds GGUF files only: download one (`hf download {name} {gguf[0]}`) and give its "
            "path, or use the original repository"
        )
    if some([".bin"]) and (directory / "config.json").is_file():
        return f"{name} on the hub has PyTorch .bin weights only. {BIN_WARNING}"
    if index := next((file for file in (SAFETENSORS_INDEX, BIN_INDEX) if (directory / file).is_file()), None):
        return f"{name} on the hub lacks files that its {index} names"
    what = ", ".join(files[:6]) + (", ..." if len(files) > 6 else "")
    return f"{name} on the hub is not a model in the Hugging Face layout (config.json, *.safetensors); it has: {what}"


def _translated(error: Exception, name: str, revision: str | None) -> FastgenError:
    from huggingface_hub import errors

    if isinstance(error, FastgenError):
        return error
    page = f"https://huggingface.co/{name}"
    by_token = "a token that may read it (--token, HF_TOKEN or `hf auth login`)"
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(f"{name} is restricted: accept its conditions at {page} and give {by_token}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"there is no model {name!r} on the hub, or it is private and needs {by_token}.{_near(name)}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{name} on the hub has no revision {revision!r}; see {page}/tree/main")
    status = _status(error)
    if status in (401, 403):
        return ModelNotFoundError(f"the hub refused access to {name} (status {status}); give {by_token}")
    if status is not None:
        return ModelNotFoundError(f"the hub answered with status {status} when asked for {name}; try again later")
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return ModelNotFoundError(f"cannot store {name} in the hub's cache: {error}")
    return ModelNotFoundError(
        f"cannot reach the hub for {name} ({_first_line(error)}), and the cache has not all of it."
        f"{_what_is_cached(name)}"
    )


def _status(error: BaseException | None) -> int | None:
    """The status the hub answered with, if it answered: of the error or of what caused it."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None:
        if isinstance(error, HfHubHTTPError):
            response: Any = getattr(error, "response", None)
            return getattr(response, "status_code", None)
        error = error.__cause__
    return None


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _offline(name: str, revision: str | None) -> str:
    at = f" at revision {revision!r}" if revision else ""
    return f"offline, and {name}{at} is not in the hub's cache.{_what_is_cached(name)}"


def _what_is_cached(name: str) -> str:
    from huggingface_hub import constants

    here = cached_models()
    near = did_you_mean(name, here) or _near_path(name)
    listed = f"It holds {', '.join(here[:5])}{' and more' if len(here) > 5 else ''}. " if here else "It is empty. "
    return (
        f"{near} The cache is {constants.HF_HUB_CACHE}. {listed}Give a directory with the files, or fetch them where "
        f"there is a network: `hf download {name}`"
    )


def _near(name: str) -> str:
    return did_you_mean(name, cached_models()) or _near_path(name)


def _near_path(name: str) -> str:
    """A suggestion where the name is almost that of a directory or file here."""
    parent = name.rpartition("/")[0]
    try:
        there = [path.name for path in Path(parent or ".").iterdir() if not path.name.startswith(".")]
    except OSError:
        return ""
    return did_you_mean(name, [f"{parent}/{entry}" if parent else f"./{entry}" for entry in there])
