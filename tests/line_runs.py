"""Runs of several sessions on one history of journal entries, for the tests of ``durable/line.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from arrowbank.durable.history import History
from arrowbank.durable.journal import Checkpointed, Drawn, Evicted, Restored
from arrowbank.durable.line import Line

__all__ = ["Run", "draw", "example", "planned", "seen"]

Draws: TypeAlias = list[tuple[int, str]]


def draw(uids: str, at: int, *, span: int = 1, state: bytes | None = None) -> Drawn:
    """A draw of groups with one-letter uids."""
    return Drawn(at, tuple(uids), span, state)


class Run:
    """A run's sessions, one after another, on one history."""

    def __init__(self, groups: str = "abcdef") -> None:
        self.groups = groups
        self.history = History()
        self.session = 0

    def restore(
        self, iteration: int, mode: str = "replay", *, session: int | None = None, lost: Sequence[str] = ()
    ) -> Line:
        """A kill, and a new session that restores."""
        self.session += 1
        parent = self.history.parent_of(iteration, session)
        guessed = self.history.is_guess(iteration, parent, session)
        self.history.apply(self.session, Restored(iteration, mode, parent, tuple(lost), guessed, session))
        return self.line

    @property
    def line(self) -> Line:
        return self.history.line(self.session)

    def draws(self, *drawn: Drawn) -> None:
        for one in drawn:
            if self.line.check_draw(one, self.history.evicted):
                self.history.apply(self.session, one)

    def checkpoint(self, iteration: int) -> None:
        if self.line.check_checkpoint(iteration):
            self.history.apply(self.session, Checkpointed(iteration))

    def evict(self, uids: str) -> None:
        self.line.check_evict(uids)
        self.history.apply(self.session, Evicted(tuple(uids), "why"))

    @property
    def settled(self) -> str:
        return "".join(sorted(uid for one in self.line.settled(self.line.resumed) for uid in one.uids))

    @property
    def plan(self) -> Draws:
        return [(one.iteration, "".join(one.uids)) for one in self.line.plan()]

    @property
    def pending(self) -> str:
        return "".join(uid for uid in self.groups if self.line.find(uid) is None and uid not in self.history.evicted)


def example() -> Run:
    """Groups a…f appended; draws [a,b]@0, [c,d]@1; checkpoint(1); draw [e]@2; kill."""
    run = Run()
    run.restore(0)
    run.draws(draw("ab", 0), draw("cd", 1))
    run.checkpoint(1)
    run.draws(draw("e", 2))
    return run


def seen(run: Run) -> tuple[str, Draws, str]:
    return run.settled, run.plan, run.pending


def planned(*drawn: Drawn) -> Run:
    run = Run("abcdefgh")
    run.restore(0)
    run.draws(*drawn)
    run.restore(0)
    return run
