"""What parent and child agree on: the places inside a run's directory, the batch, the command line between them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BANK", "GENERATOR_LOG", "GROUPS", "MODEL", "TRAINER_ERRORS", "TWIN", "TrainerSettings", "checkpoint_every"]

BANK, MODEL, GENERATOR_LOG, TRAINER_ERRORS, TWIN = (
    "bank",
    "model",
    "generator-log.jsonl",
    "trainer-errors.txt",
    "twin",
)
GROUPS = 24
"""Groups a batch."""


@dataclass(frozen=True)
class TrainerSettings:
    """What one start of the trainer is told."""

    directory: Path
    iterations: int
    seed: int
    attempt: int
    """1 for the first start, one more after each kill."""
    has_bank: bool

    @property
    def checkpoint_every(self) -> int:
        """Iterations from one checkpoint to the next."""
        return checkpoint_every(self.iterations)

    def arguments(self) -> list[str]:
        """Return the command line that says the same."""
        given = {
            "--dir": self.directory,
            "--iterations": self.iterations,
            "--seed": self.seed,
            "--attempt": self.attempt,
        }
        flags = [] if self.has_bank else ["--no-bank"]
        return [*(str(part) for pair in given.items() for part in pair), *flags]

    @classmethod
    def from_arguments(cls, arguments: list[str] | None = None) -> TrainerSettings:
        """Invert ``arguments``; None is this process's own command line."""
        parser = argparse.ArgumentParser(prog="python -m arrowbank.demo.trainer")
        parser.add_argument("--dir", type=Path, required=True)
        for name in ("--iterations", "--seed", "--attempt"):
            parser.add_argument(name, type=int, required=True)
        parser.add_argument("--no-bank", action="store_true")
        given = parser.parse_args(arguments)
        return cls(given.dir, given.iterations, given.seed, given.attempt, not given.no_bank)


def checkpoint_every(iterations: int) -> int:
    """Return 5, and fewer for short runs, so that these are checkpointed a few times too."""
    return max(2, min(5, iterations // 4))
