"""``arrowbank demo``: a training run that is killed and resumes, beside a twin that is not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from arrowbank.cli.output import output_for
from arrowbank.demo.supervisor import DemoSettings, TrainerFailedError, prepare, run_demo

__all__ = ["demo"]

FEWEST_ITERATIONS = 4
FEWEST_ITERATIONS_TO_ROLL_BACK = 8
ITERATIONS_A_KILL = 2


def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="A new or empty directory. Without it, a fresh temporary one.", show_default=False),
    ] = None,
    iterations: Annotated[
        int, typer.Option(min=FEWEST_ITERATIONS, help="Training iterations; few of them learn little.")
    ] = 60,
    kills: Annotated[int, typer.Option(min=0, help="How many times the trainer is killed with SIGKILL.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, sampling and kill moments.")] = 0,
    no_bank: Annotated[bool, typer.Option("--no-bank", help="The control: the same kills, without a bank.")] = False,
    rollback: Annotated[
        bool,
        typer.Option("--rollback", help="Besides the kills, resume once from an older model checkpoint."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
) -> None:
    """Train a small policy while SIGKILL strikes, resume from the bank, and compare with a run never killed."""
    output = output_for(as_json=as_json)
    if kills * ITERATIONS_A_KILL > iterations:
        output.error(f"{kills} kills need at least {kills * ITERATIONS_A_KILL} iterations, not {iterations}")
        raise typer.Exit(2)
    if rollback and iterations < FEWEST_ITERATIONS_TO_ROLL_BACK:
        output.error(f"--rollback needs at least {FEWEST_ITERATIONS_TO_ROLL_BACK} iterations, not {iterations}")
        raise typer.Exit(2)
    directory = directory or Path(tempfile.mkdtemp(prefix="arrowbank-demo-"))
    settings = DemoSettings(directory, iterations, kills, seed, not no_bank, rollback)
    try:
        prepare(directory)
        with output.demo_running(settings) as observer:
            result = run_demo(settings, observer)
    except FileExistsError as error:
        output.error(str(error))
        raise typer.Exit(2) from None
    except TrainerFailedError as error:
        output.error(str(error))
        raise typer.Exit(1) from None
    output.demo(result)
    if not result.is_right:
        raise typer.Exit(1)
