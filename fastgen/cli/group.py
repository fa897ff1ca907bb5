"""The command group: commands are imported when called, plugins' commands join, errors become exit codes."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from fastgen.errors import FastgenError, did_you_mean

if TYPE_CHECKING:
    from fastgen.core.plugin import CommandSpec

__all__ = ["LazyGroup"]

INTERRUPTED = 130
"""What a shell reports of a program that SIGINT ended."""


class LazyGroup(click.Group):
    """A group whose commands are given as ``{name: ("module:attribute", help)}``.

    Exit codes: 0, 1 for an error (one line on standard error; the traceback too with ``FASTGEN_DEBUG=1``), 2 for wrong
    usage, 130 after Ctrl-C. When the reader of our output goes away, 1 without a word.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *sorted({spec.name for spec in self._plugin_commands()})]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy:
            module, _, attribute = self.lazy[cmd_name][0].partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        from fastgen.core.plugin import registry

        spec = registry().find_command(cmd_name)
        return spec.load() if spec is not None else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name.startswith("-") or (command := self.get_command(ctx, name)) is None:
            if name.startswith("-"):
                return super().resolve_command(ctx, args)  # an unknown option
            raise click.UsageError(f"no such command {name!r}.{did_you_mean(name, self.list_commands(ctx))}", ctx)
        return name, command, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy.items()])
        specs = {spec.name: spec for spec in self._plugin_commands()}
        if specs:
            with formatter.section("Commands of plugins"):
                rows = [(name, f"{spec.help} ({spec.plugin})".strip()) for name, spec in sorted(specs.items())]
                formatter.write_dl(rows)

    def _plugin_commands(self) -> Sequence[CommandSpec]:
        """Those that do not carry a built-in's name. Help must come out whatever is wrong with plugins."""
        from fastgen.core.plugin import registry

        try:
            specs = registry().commands
        except FastgenError as error:  # strict mode
            click.echo(f"fastgen: warning: {str(error).splitlines()[0]}", err=True)
            return ()
        for spec in specs:
            if spec.name in self.lazy:
                text = f"the plugin {spec.plugin!r} cannot replace the command {spec.name!r}; its own is left out"
                click.echo(f"fastgen: warning: {text}", err=True)
        return [spec for spec in specs if spec.name not in self.lazy]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        _escape_the_unprintable()
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except (KeyboardInterrupt, click.Abort):
            code = INTERRUPTED
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
                raise
            _discard_output()  # click sees to a write that fails; this is the last of the buffer
            if error.errno != errno.EPIPE:
                click.echo(f"error: cannot write the output: {error.strerror}", err=True)
            code = 1
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except FastgenError as error:
            if os.environ.get("FASTGEN_DEBUG", "0") not in ("", "0"):
                import traceback

                traceback.print_exc()
            click.echo(f"error: {error}", err=True)
            code = 1
        if "torch" not in sys.modules:
            gc.freeze()  # a command that only lists things spends a tenth of its time on collecting garbage at exit
        sys.exit(code if isinstance(code, int) else 0)


def _escape_the_unprintable() -> None:
    """Strangers' words (a plugin's, a config's) may hold what standard output cannot encode, half a surrogate pair if
    nothing else: it is shown escaped, as Python does on standard error, and the rest comes out."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Nobody reads standard output any more; Python must not fail once more when it flushes it at exit."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # not a file, as under a test
        pass
