"""Which checkpoints a line has, and who recorded each, kept as arithmetic runs.

A run that checkpoints every so many iterations needs one entry for all of them, however long it gets: a journal's
snapshot, an open and a restore cost the same after 100,000 checkpoints as after ten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Checkpoints", "Run"]


class Run(NamedTuple):
    """The checkpoints first, first + step … last, all recorded by one session."""

    first: int
    last: int
    step: int
    """0 for a single checkpoint."""
    session: int

    def has(self, checkpoint: int) -> bool:
        inside = self.first <= checkpoint <= self.last
        return inside and (self.first == self.last or (checkpoint - self.first) % self.step == 0)

    def upto(self, checkpoint: int) -> Run | None:
        """Return the part at or below a checkpoint."""
        if self.last <= checkpoint:
            return self
        if checkpoint < self.first:
            return None
        last = checkpoint - (checkpoint - self.first) % self.step
        return Run(self.first, last, self.step if last > self.first else 0, self.session)

    @property
    def checkpoints(self) -> range:
        return range(self.first, self.last + 1, self.step or 1)


class Checkpoints:
    """Checkpoint → the session that recorded it, in rising order."""

    __slots__ = ("runs",)

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self.runs = list(runs)
        """Rising, none reaching into another."""

    def __repr__(self) -> str:
        return f"Checkpoints({[tuple(part) for part in self.items()]})"

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __contains__(self, checkpoint: int) -> bool:
        return self.get(checkpoint) is not None

    def get(self, checkpoint: int) -> int | None:
        """Return the session that recorded a checkpoint, or None."""
        run = self._run_of(checkpoint)
        return None if run is None else run.session

    def _run_of(self, checkpoint: int) -> Run | None:
        place = bisect_right(self.runs, checkpoint, key=lambda run: run.first) - 1
        return self.runs[place] if place >= 0 and self.runs[place].has(checkpoint) else None

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield each checkpoint and its session."""
        for run in self.runs:
            for checkpoint in run.checkpoints:
                yield checkpoint, run.session

    def upto(self, checkpoint: int) -> Checkpoints:
        """Return those at or below a checkpoint."""
        return Checkpoints(part for run in self.runs if (part := run.upto(checkpoint)) is not None)

    def beyond(self, other: Checkpoints) -> Iterator[tuple[int, int]]:
        """Yield those that ``other`` has not; what both have in common, as a line and its parent do, costs nothing."""
        for run in self.runs:
            start, common = run.first, other._run_of(run.first)
            if common is not None and common.step == run.step:
                start = min(common.last, run.last) + (run.step or 1)
            for checkpoint in range(start, run.last + 1, run.step or 1):
                if checkpoint not in other:
                    yield checkpoint, run.session

    def newest(self, count: int) -> list[int]:
        """Return the last so many, newest first."""
        found: list[int] = []
        for run in reversed(self.runs):
            for checkpoint in reversed(run.checkpoints):
                if len(found) == count:
                    return found
                found.append(checkpoint)
        return found

    def add(self, checkpoint: int, session: int) -> None:
        """Take in a checkpoint; one that is known already changes its session."""
        last = self.runs[-1] if self.runs else None
        if last is not None and checkpoint <= last.last:
            known = dict(self.items()) | {checkpoint: session}
            self.runs = Checkpoints.of(known).runs
        elif last is not None and last.session == session and last.step in (0, checkpoint - last.last):
            self.runs[-1] = Run(last.first, checkpoint, checkpoint - last.last, session)
        else:
            self.runs.append(Run(checkpoint, checkpoint, 0, session))

    @classmethod
    def of(cls, known: dict[int, int]) -> Checkpoints:
        """Make one of a table."""
        made = cls()
        for checkpoint in sorted(known):
            made.add(checkpoint, known[checkpoint])
        return made
