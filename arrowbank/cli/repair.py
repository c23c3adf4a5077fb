"""``arrowbank repair``: mends what an open heals and what it refuses."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from arrowbank.cli.output import output_for
from arrowbank.durable.session import Takeover
from arrowbank.verification.repair import repair as repair_bank

__all__ = ["From", "repair"]


class From(StrEnum):
    """From whom the bank is taken."""

    AUTO = "auto"
    NEVER = "never"
    FORCE = "force"


_TAKEOVERS: dict[From, Takeover] = {From.AUTO: "auto", From.NEVER: "never", From.FORCE: "force"}


def repair(
    path: Annotated[str, typer.Argument(help="The bank; nobody else may have it.", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")] = False,
    accept_damage: Annotated[
        bool,
        typer.Option("--accept-damage", help="Go on where a draw may be hidden, and without files that are missing."),
    ] = False,
    takeover: Annotated[From, typer.Option(help="From whom to take the bank, as for RolloutBank.open.")] = From.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Mend a damaged bank; what is damaged is kept in quarantine/. Exit code 0: healthy now, 1: damage is left."""
    output = output_for(as_json=as_json)
    with output.reading("repair") as on_progress:
        report = repair_bank(
            path, dry_run=dry_run, accept_damage=accept_damage, takeover=_TAKEOVERS[takeover], on_progress=on_progress
        )
    output.repaired(report)
    if not report.is_healthy:
        raise typer.Exit(1)
