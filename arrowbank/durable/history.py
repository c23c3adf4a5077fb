"""All sessions' lines, and which of them a restore takes. Pure: no files, no clock.

``History`` folds journal entries in order: each goes to its session's line (see ``line``, rules 2 to 4). Evictions hold
on every line. A checkpoint makes its line the only one that is kept. Rule 1, which line a restore takes, is
``History.parent_of``. What is archived leaves the lines with ``forget``, and comes back with ``revive``.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from arrowbank.durable.checkpoints import Checkpoints
from arrowbank.durable.journal import Checkpointed, Drawn, Entry, Evicted, Restored
from arrowbank.durable.line import Line, LineDraw
from arrowbank.errors import HistoryGoneError

__all__ = ["DISCARDED", "History"]

DISCARDED = "discarded at restore"


@dataclass(slots=True)
class History:
    """All sessions' lines, folded from the journal in order."""

    lines: dict[int, Line] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)
    """Group → reason; evictions hold on every line."""
    gone: Checkpoints = field(default_factory=Checkpoints)
    """Checkpoints that only lines recorded that were let go of."""
    archived: set[str] = field(default_factory=set)
    """Groups of draws that the lines still have, which are in the archive."""

    def apply(self, session: int, entry: Entry) -> None:
        """Take in one journal entry of ``session``; entries about files say nothing here."""
        match entry:
            case Restored():
                self._restore(session, entry)
            case Drawn():
                self.line(session).draw(entry, self.evicted)
            case Checkpointed():
                self.line(session).checkpoint(entry.iteration)
                self._let_go_of_others(session)
            case Evicted():
                self._evict(entry.uids, entry.reason)

    def _restore(self, session: int, entry: Restored) -> None:
        parent = None if entry.parent is None else self.lines.get(entry.parent)
        at, guessed = entry.iteration, entry.guessed
        if entry.mode == "discard":
            plan = Line.inherit(session, parent, at, guessed=guessed).plan()
            self._evict((uid for draw in plan if draw.iteration >= at for uid in draw.uids), DISCARDED)
        keep_plan = entry.mode == "replay"
        line = Line.inherit(session, parent, at, keep_plan=keep_plan, lost=entry.lost, guessed=guessed)
        if parent is None and entry.named is not None and at > 0:
            line.makers.insert(0, (0, entry.named))  # one that drew nothing here got to this checkpoint
        self.lines[session] = line

    def _evict(self, uids: Iterable[str], reason: str) -> None:
        for uid in uids:
            self.evicted.setdefault(uid, reason)

    def _let_go_of_others(self, session: int) -> None:
        """A checkpoint makes its line the only one: from now on the archive holds what that line settles."""
        kept = self.lines[session]
        if len(self.lines) == 1 and kept.last_checkpoint not in self.gone:
            return
        recorded = dict(self.gone.items())
        for line in self.lines.values():
            recorded |= dict(line.checkpoints.beyond(kept.checkpoints))
        self.gone = Checkpoints.of({at: by for at, by in recorded.items() if at not in kept.checkpoints})
        self.lines = {session: kept}

    def line(self, session: int) -> Line:
        """Return a session's line; a session that drew without a restore (an empty bank's first) starts at 0."""
        return self.lines.setdefault(session, Line(session, makers=[(0, session)]))

    # -- rule 1: which line a restore takes

    def parent_of(self, iteration: int, session: int | None = None) -> int | None:
        """Return the session whose line a restore of ``iteration`` takes; None on a bank without any.

        session: the one that saved the model checkpoint. Raises HistoryGoneError when only lines that were let go of
        recorded this checkpoint, or the named one was let go of.
        """
        newest = sorted(self.lines, reverse=True)
        if not newest:
            return None  # nothing was drawn yet, by whomever
        if session is not None:
            return self._same_until(iteration, session, newest)
        if iteration == 0:
            return newest[0]
        recorders = [by for line in self.lines.values() if (by := line.checkpoints.get(iteration)) is not None]
        if recorders:
            recorder = max(recorders)
            return next(one for one in newest if self.lines[one].checkpoints.get(iteration) == recorder)
        if iteration in self.gone:
            raise HistoryGoneError(
                f"checkpoint {iteration} was recorded by session {self.gone.get(iteration)}, whose line a later "
                f"session left, and whose draws are not kept any more. {self._ways_out()}. If a session that is named "
                f"there saved this model checkpoint too and was killed before it recorded it, "
                f"restore({iteration}, session=…) names that session"
            )
        reaching = [one for one in newest if self.lines[one].reach >= iteration]
        return (reaching or newest)[0]

    def is_guess(self, iteration: int, parent: int | None, session: int | None) -> bool:
        """Whether nothing says that the line taken for a checkpoint ever got to it."""
        if session is not None or parent is None:
            return False
        line = self.lines[parent]
        return iteration not in line.checkpoints and line.reach < iteration

    def _same_until(self, iteration: int, session: int, newest: list[int]) -> int:
        """Return the newest session that has the same draws up to ``iteration`` as ``session`` had there."""
        line = self.lines.get(session)
        if line is not None and iteration <= line.resumed:
            return session  # it did not make this checkpoint itself: its very line is meant
        for one in newest:
            if self.lines[one].maker(iteration) == session or self.lines[one].came_through(session, iteration):
                return one
        if iteration == 0:
            return newest[0]  # what there was before any training is the same for all
        raise HistoryGoneError(
            f"restore({iteration}, session={session}): no line is kept that goes on from what session {session} had at "
            f"{iteration}; a later session recorded a checkpoint on another line, or there never was such a session. "
            f"{self._ways_out()}"
        )

    def rivals(self, iteration: int, parent: int | None) -> list[int]:
        """Return sessions, newer than the one whose line is taken, that may have got to the checkpoint as well."""
        return [
            number
            for number, line in sorted(self.lines.items())
            if parent is not None and number > parent and line.resumed < iteration <= line.reach
        ]

    def _ways_out(self) -> str:
        kept = []
        for number, line in sorted(self.lines.items()):
            newest = line.checkpoints.newest(4)
            shown = [*(["…"] if len(newest) > 3 else []), *map(str, reversed(newest[:3]))]
            kept.append(f"session {number} (checkpoints {', '.join(shown) or 'none'})")
        return f"Kept are the lines of {', '.join(kept) or 'no session'}"

    # -- the archive

    def copy(self) -> History:
        """Return a history that changes on its own."""
        lines = {number: line.copy() for number, line in self.lines.items()}
        return History(lines, dict(self.evicted), Checkpoints(self.gone.runs), set(self.archived))

    def forget(self, archived: Iterable[str], live: Container[str]) -> None:
        """Groups went to the archive: let go of what nothing refers to any more.

        live: the groups that are not archived.
        """
        self.archived |= set(archived)
        for line in self.lines.values():
            line.forget(self.archived)
        drawn = {uid for line in self.lines.values() for draw in line.draws() for uid in draw.uids}
        self.archived &= drawn
        self.evicted = {uid: why for uid, why in self.evicted.items() if uid in live or uid in drawn}

    def revive(self, draws: Collection[LineDraw]) -> None:
        """Groups have left the archive, and the draws that they were in are every line's again."""
        for line in self.lines.values():
            known = {(draw.iteration, draw.index) for draw in line.draws()}
            line.revive(draw for draw in draws if (draw.iteration, draw.index) not in known)
        self.archived -= {uid for draw in draws for uid in draw.uids}
