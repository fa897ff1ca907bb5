"""Errors of plugins and other strangers, told to people."""

from __future__ import annotations

import traceback

from fastgen.errors import PluginError

__all__ = ["describe_error", "format_error"]

_LONGEST = 1000
"""Letters of an error that one line shows."""
_THIS_PACKAGE = __name__.rpartition(".")[0]


def describe_error(error: BaseException) -> str:
    """One line for a person: the error's type and the first line of its text, cut if that is long. Never raises,
    though the error be a stranger's that cannot tell its own text."""
    try:
        text = _describe(error)
    except Exception as another:
        text = f"{type(error).__name__}, whose text cannot be shown ({type(another).__name__})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _describe(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)})"
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, PluginError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def format_error(error: BaseException) -> str:
    """The traceback, beginning where it leaves this loader and Python's import machinery, so at the plugin's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = {f"{_THIS_PACKAGE}.{name}".replace(".", "/") for name in ("specs", "hooks", "loader", "registry")}
    skipped = 0
    for frame in frames:
        path = frame.filename.replace("\\", "/").removesuffix(".py")
        if not (
            any(path.endswith(o) for o in own)
            or frame.filename.startswith("<frozen importlib")
            or "/importlib/" in path
            or "/pluggy/" in path
        ):
            break
        skipped += 1
    lines = traceback.format_list(frames[skipped:])
    if lines:
        lines.insert(0, "Traceback (most recent call last):\n")
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
