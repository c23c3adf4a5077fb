"""``arrowbank verify``: whether a bank is whole; nothing is written."""

from __future__ import annotations

from typing import Annotated

import typer

from arrowbank.cli.output import output_for
from arrowbank.verification.verify import verify as verify_bank

__all__ = ["verify"]


def verify(
    path: Annotated[str, typer.Argument(help="The bank; it may be in use.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Check every record, file and count of a bank, and write nothing. Exit code 0: healthy, 1: damage was found."""
    output = output_for(as_json=as_json)
    with output.reading("verify") as on_progress:
        report = verify_bank(path, on_progress=on_progress)
    output.verified(report)
    if not report.is_healthy:
        raise typer.Exit(1)
