"""The `fastgen` command."""

from __future__ import annotations

import click

from fastgen import __version__
from fastgen.cli.group import LazyGroup

__all__ = ["main"]

# The help stands here, so that `fastgen --help` imports none of them.
COMMANDS = {
    "generate": ("fastgen.cli.generate:generate", "Generate text from prompts, files or standard input."),
    "chat": ("fastgen.cli.chat:chat", "Talk with a model."),
    "serve": ("fastgen.cli.serve:serve", "Serve a model over HTTP (as OpenAI does) and gRPC."),
    "models": ("fastgen.cli.models:models", "List the model architectures that can be served."),
    "plugins": ("fastgen.cli.plugins:plugins", "List, check, install and begin plugins."),
    "explain": ("fastgen.cli.explain:explain", "Show how a model would be served, and why."),
    "calibrate": ("fastgen.cli.calibrate:calibrate", "Choose the token budget for a model on this machine."),
    "bench": ("fastgen.bench.cli:bench", "Measure throughput and latency."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fastgen", message="%(prog)s %(version)s")
def main() -> None:
    """Serve large language models with Dynamic SplitFuse; every model family is a plugin."""
