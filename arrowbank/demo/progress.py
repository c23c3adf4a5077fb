"""The lines by which the trainer tells its parent where it is: ``moment iteration value``, over a pipe.

A line is one ``write``; whoever reads it knows that the moment has come, and can kill within it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = [
    "ACKNOWLEDGED",
    "APPENDING",
    "CHECKPOINTED",
    "GENERATING",
    "RESUMED",
    "TRAINED",
    "Progress",
    "announce",
    "parse",
]

RESUMED = "resumed"
"""A start is over; value: groups and draws handed back."""
GENERATING = "generating"
"""A generator was asked for one more group."""
APPENDING = "appending"
"""A group is finished and on its way into the bank."""
ACKNOWLEDGED = "acknowledged"
"""The bank has it."""
TRAINED = "trained"
"""An iteration is complete; value: its mean reward."""
CHECKPOINTED = "checkpointed"
"""The model checkpoint and the bank's are done."""


class Progress(NamedTuple):
    """One line."""

    moment: str
    iteration: int
    value: float


def announce(moment: str, iteration: int, value: float = 0.0) -> None:
    """Write one line to standard output. Raises BrokenPipeError, which ends a trainer whose parent is gone."""
    os.write(1, f"{moment} {iteration} {value:.6f}\n".encode())


def parse(line: str) -> Progress | None:
    """Return what a line says, None for what is no progress line."""
    match line.split():
        case [moment, iteration, value] if iteration.isdigit():
            return Progress(moment, int(iteration), float(value))
    return None
