"""The commands put together, and what becomes of their errors."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from arrowbank import __version__
from arrowbank.cli.demo import demo
from arrowbank.cli.repair import repair
from arrowbank.cli.verify import verify
from arrowbank.errors import ArrowbankError, CorruptionError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Durable columnar storage, resume and replay for the rollouts of RL post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (demo, verify, repair):
    app.command()(_command)


def main() -> None:
    """Run the command line. What a terminal cannot show is escaped, rather than ending it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="arrowbank")
    except CorruptionError as error:
        sys.exit(_told(error, 1))
    except (ArrowbankError, OSError) as error:
        sys.exit(_told(error, 2))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"arrowbank {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Nothing here: the option acts by its callback."""


def _told(error: Exception, code: int) -> int:
    print(f"arrowbank: {error}", file=sys.stderr)
    return code
