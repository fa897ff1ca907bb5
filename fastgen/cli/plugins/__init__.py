"""`fastgen plugins`: see what is installed, check it, install and remove it, and begin one of your own."""

from __future__ import annotations

from importlib import import_module

import click

from fastgen.errors import did_you_mean

__all__ = ["plugins"]

# The help stands here, so that `fastgen plugins --help` imports none of them.
COMMANDS = {
    "list": ("listing:list_plugins", "List the installed plugins (as `fastgen plugins` alone does)."),
    "new": ("new:new", "Begin a plugin: a distribution that passes its own tests."),
    "check": ("check:check", "Check a plugin: manners, version bounds, conformance."),
    "install": ("install:install", "Install plugins with pip, never moving torch."),
    "uninstall": ("install:uninstall", "Remove plugins with pip."),
}


class _Group(click.Group):
    """Commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            near = did_you_mean(args[0], COMMANDS)
            raise click.UsageError(f"no such command {args[0]!r}.{near} There are {', '.join(COMMANDS)}.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Group, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--failed", is_flag=True, help="Only the broken ones, with their tracebacks; exit code 1 if there are any."
)
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, failed: bool) -> None:
    """List the installed plugins, what each provides, and what is wrong with it; or run one of the commands below.

    FASTGEN_PLUGINS (a comma-separated list; empty: none) allows plugins by their or their distribution's name,
    FASTGEN_DISABLE_PLUGINS switches some off, FASTGEN_PLUGINS_STRICT=1 makes a broken one an error.
    """
    if ctx.invoked_subcommand is None:
        from fastgen.cli.plugins.listing import list_plugins

        ctx.invoke(list_plugins, as_json=as_json, failed=failed)
    elif as_json or failed:
        option = "--json" if as_json else "--failed"
        raise click.UsageError(
            f"write {option} after the command: fastgen plugins {ctx.invoked_subcommand} {option}", ctx
        )
