"""Models of the Hugging Face hub: the cache first, then the network; only the files that are needed. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fastgen.core.weight_files import BIN, BIN_INDEX, SAFETENSORS, SAFETENSORS_INDEX, choose_files, read_index
from fastgen.errors import CheckpointError, ConfigError, FastgenError, ModelNotFoundError, did_you_mean

__all__ = ["Snapshot", "cached_models", "fetch_model"]

# Code is fetched with the rest, and runs only where trust_remote_code says so.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_TEMPLATES = "additional_chat_templates/*.jinja"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class Snapshot(NamedTuple):
    """A model in the hub's cache."""

    directory: Path
    commit: str
    from_cache: bool
    """Whether no network was needed."""


def fetch_model(
    name: str, *, revision: str | None = None, token: str | None = None, offline: bool = False, load_bin: bool = False
) -> Snapshot:
    """The directory of a model of the hub. What is complete in the cache is used without a network call.

    Args:
        name: ``"owner/model"`` or ``"model"``.
        load_bin: take PyTorch ``.bin`` weights where there are no safetensors.

    Raises:
        ModelNotFoundError: no such name or revision, no access, or no network and not in the cache.
        CheckpointError: the repository holds nothing that can be loaded; says what it does hold.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{name!r} is neither a file or directory here nor a name on the hub: {error}"
        ) from None
    if revision is not None and (not revision or ".." in revision or revision.startswith("/") or "\0" in revision):
        raise ConfigError(f"revision: {revision!r} is not a branch, tag or commit")

    cached = _cached(name, revision)
    if cached is not None and _is_complete(cached, load_bin):
        return Snapshot(cached, cached.name, True)
    try:
        if offline or constants.HF_HUB_OFFLINE:
            raise ModelNotFoundError(_offline(name, revision, cached))
        directory = _download(name, revision, token, load_bin)
    except FastgenError:
        if cached is not None and _is_complete(cached, load_bin, tokenizer=False):
            return Snapshot(cached, cached.name, True)
        raise
    return Snapshot(directory, directory.name, False)


def cached_models() -> list[str]:
    """Names of the models that the hub's cache holds something of."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*/snapshots")
    return sorted(folder.parent.name.removeprefix("models--").replace("--", "/") for folder in folders)


def _cached(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=["config.json"])
    except OSError:  # among them LocalEntryNotFoundError
        return None
    return Path(found)


def _is_complete(directory: Path, load_bin: bool, *, tokenizer: bool = True) -> bool:
    """Whether config, tokenizer and every weight file that the index names are there."""
    if not (directory / "config.json").is_file():
        return False
    if tokenizer and not any((directory / file).is_file() for file in _TOKENIZER_FILES):
        return False
    try:
        choose_files(directory, load_bin=load_bin)
    except CheckpointError:
        return False
    return True


def _download(name: str, revision: str | None, token: str | None, load_bin: bool) -> Path:
    def snapshot(allow: list[str], ignore: list[str] | None = None) -> Path:
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

    directory = snapshot(_SMALL_FILES, ignore=["*/*"])
    if (directory / "config.json").is_file():
        snapshot([*_weight_names(directory, SAFETENSORS_INDEX, SAFETENSORS), _TEMPLATES])
        if load_bin and not _is_complete(directory, False, tokenizer=False):
            snapshot(_weight_names(directory, BIN_INDEX, BIN))
        if _is_complete(directory, load_bin, tokenizer=False):
            return directory
    raise CheckpointError(_what_it_holds(name, revision, token, directory))


def _progress_bar() -> Any:
    """The hub library's own bar, on a terminal only."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Quiet(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return tqdm if sys.stderr.isatty() else Quiet


def _weight_names(directory: Path, index: str, single: str) -> list[str]:
    if (directory / index).is_file():
        return sorted(set(read_index(directory / index, Path(single).suffix).values()))
    return [single]


def _what_it_holds(name: str, revision: str | None, token: str | None, directory: Path) -> str:
    from huggingface_hub import HfApi

    try:
        files = HfApi(token=token).list_repo_files(name, revision=revision)
    except Exception as error:
        raise _translated(error, name, revision) from error

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
        return (
            f"{name} on the hub has PyTorch .bin weights only. These are pickles, which can be made to run code, so "
            "they are loaded only if you say so: load_bin=True (--load-bin)"
        )
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


def _offline(name: str, revision: str | None, cached: Path | None) -> str:
    at = f" at revision {revision!r}" if revision else ""
    state = "is not complete in" if cached is not None else "is not in"
    return f"offline, and {name}{at} {state} the hub's cache.{_what_is_cached(name)}"


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
