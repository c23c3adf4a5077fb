"""Lines: from journal entries to what is settled, planned, pending and evicted. Pure: no files, no clock.

Each session works on one line: a table iteration → draws in order, inherited at restore, then overwritten by what the
session draws itself. ``History`` folds the entries of all sessions; its methods are the rules of resume:

1. Which line a restore takes: ``History.parent_of``.
2. What it inherits: ``Line.inherit``. Draws settled by T stay; the others are the plan.
3. What drawing does to the plan: ``Line.draw``. Draws of skipped iterations are void; own draws that repeat the
   planned ones confirm them; anything else voids what was planned at that iteration; a group drawn leaves any other
   planned draw.
4. What is refused: ``Line.check_draw``, ``Line.check_evict``, ``Line.check_checkpoint``.

Invariant (I3): a group that is not evicted is in at most one draw of a line; in none, it is pending.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace

from arrowbank.durable.journal import Checkpointed, Drawn, Entry, Evicted, Restored
from arrowbank.errors import HistoryGoneError, InvalidDrawError

__all__ = ["DISCARDED", "History", "Line", "LineDraw"]

DISCARDED = "discarded at restore"


@dataclass(frozen=True, slots=True)
class LineDraw:
    """A draw as a line knows it."""

    iteration: int
    uids: tuple[str, ...]
    span: int
    state: bytes | None
    session: int
    """The session that made it."""
    own: bool
    """Made, or repeated, by the session whose line this is; otherwise inherited."""

    @property
    def end(self) -> int:
        """A checkpoint at this iteration count, or a later one, holds all the draw's training."""
        return self.iteration + self.span


@dataclass(slots=True)
class Line:
    """The history one session works on."""

    session: int
    resumed: int = 0
    """T of the session's restore."""
    made: dict[int, list[LineDraw]] = field(default_factory=dict)
    """Draws by iteration: inherited ones that ``resumed`` settles, and the session's own."""
    planned: dict[int, list[LineDraw]] = field(default_factory=dict)
    """Inherited draws by iteration that are to be replayed: neither settled nor repeated nor void."""
    checkpoints: dict[int, int] = field(default_factory=dict)
    """Checkpoint → the session that recorded it, in rising order."""
    last_checkpoint: int = 0
    """The session's own last one, or ``resumed``."""
    last_drawn: int = -1
    """The last iteration that the session itself drew at."""
    began: int = -1
    """The last iteration begun or drawn at."""
    _place: dict[str, LineDraw] = field(default_factory=dict)
    """Group → the draw it is in."""

    @classmethod
    def inherit(cls, session: int, parent: Line | None, iteration: int, *, keep_plan: bool = True) -> Line:
        """Rule 2: start a session's line at checkpoint ``iteration`` on its parent's.

        Without ``keep_plan``, draws that the checkpoint does not hold are forgotten; of one that it holds in part,
        the part is what stays.
        """
        line = cls(session, iteration, last_checkpoint=iteration)
        if parent is not None:
            line.checkpoints = {kept: by for kept, by in parent.checkpoints.items() if kept <= iteration}
            for draw in parent.draws():
                inherited = replace(draw, own=False)
                if draw.end <= iteration:
                    line._put(line.made, inherited)
                elif keep_plan:
                    line._put(line.planned, inherited)
                elif draw.iteration < iteration:
                    line._put(line.made, replace(inherited, span=iteration - draw.iteration))
        return line

    @property
    def reach(self) -> int:
        """The highest checkpoint that this line may have got to."""
        own = (draw.end for draws in self.made.values() for draw in draws if draw.own)
        return max(self.resumed, self.last_checkpoint, *own)

    def draws(self) -> Iterator[LineDraw]:
        """All draws, in order."""
        for iteration in sorted(self.made.keys() | self.planned.keys()):
            yield from self.at(iteration)

    def at(self, iteration: int) -> list[LineDraw]:
        """The draws of one iteration, in order: those made before those planned."""
        return [*self.made.get(iteration, ()), *self.planned.get(iteration, ())]

    def settled(self, checkpoint: int) -> Iterator[LineDraw]:
        """Draws whose training is inside ``checkpoint``."""
        return (draw for draw in self.draws() if draw.end <= checkpoint)

    def plan(self) -> list[LineDraw]:
        """The draws to replay, in order."""
        return [draw for iteration in sorted(self.planned) for draw in self.planned[iteration]]

    def find(self, uid: str) -> LineDraw | None:
        """Return the draw that the group is in."""
        return self._place.get(uid)

    # -- rule 4: what is refused

    def check_draw(self, drawn: Drawn, evicted: Container[str]) -> bool:
        """Return False when this session made this very draw before; raise InvalidDrawError when it cannot be made."""
        at = drawn.iteration
        if drawn.span < 1:
            raise InvalidDrawError(f"span {drawn.span}: a draw feeds at least one optimizer step")
        if not drawn.uids:
            raise InvalidDrawError(f"an empty draw at iteration {at}: mark a batch only when it has groups")
        repeated = sorted(uid for uid, times in Counter(drawn.uids).items() if times > 1)
        if repeated:
            raise InvalidDrawError(f"the draw at iteration {at} names {repeated} twice")
        if self._was_made(drawn):
            return False
        floor = max(self.resumed, self.last_checkpoint)
        if at < floor:
            raise InvalidDrawError(
                f"a draw at iteration {at}, but checkpoint {floor} was restored or recorded; draw at {floor} or later"
            )
        if at < self.last_drawn:
            raise InvalidDrawError(f"a draw at iteration {at} after one at {self.last_drawn}; iterations only go up")
        gone = [uid for uid in drawn.uids if uid in evicted]
        if gone:
            raise InvalidDrawError(f"the draw at iteration {at} names evicted groups: {gone}")
        for uid in drawn.uids:
            self._refuse_taken(uid, f"the draw at iteration {at}")
        return True

    def check_evict(self, uids: Iterable[str]) -> None:
        """Raise InvalidDrawError for groups whose training is settled, or that this session drew."""
        for uid in uids:
            self._refuse_taken(uid, "evict")

    def check_checkpoint(self, iteration: int) -> bool:
        """Return False for a checkpoint at or below the last one; raise InvalidDrawError beyond what was begun."""
        latest = max(self.began, self.last_drawn, self.resumed - 1) + 1
        if iteration > latest:
            raise InvalidDrawError(
                f"checkpoint({iteration}), but the last iteration begun is {latest - 1}; a checkpoint counts complete "
                f"iterations, so {latest} is the highest possible now"
            )
        return iteration > self.last_checkpoint

    def _was_made(self, drawn: Drawn) -> bool:
        made = self.made.get(drawn.iteration, ())
        return any(draw.own and draw.uids == drawn.uids and draw.span == drawn.span for draw in made)

    def _refuse_taken(self, uid: str, what: str) -> None:
        draw = self.find(uid)
        if draw is not None and draw.own:
            raise InvalidDrawError(f"{what} names group {uid}, which this session drew at iteration {draw.iteration}")
        if draw is not None and draw.end <= self.resumed:
            raise InvalidDrawError(
                f"{what} names group {uid}, which was trained on at iteration {draw.iteration}: checkpoint "
                f"{self.resumed} holds it"
            )

    # -- rule 3: what drawing and checkpoints do

    def draw(self, drawn: Drawn) -> None:
        """Take a draw of this session into the line."""
        at = drawn.iteration
        if self._was_made(drawn):
            return
        self._void_skipped(before=at)
        planned = self.planned.get(at, [])
        if planned and planned[0].uids == drawn.uids:
            self._drop(planned[:1])
        else:
            self._drop(planned)
        self._leave_planned(drawn.uids)
        self._put(self.made, LineDraw(at, drawn.uids, drawn.span, drawn.state, self.session, own=True))
        self.last_drawn = max(self.last_drawn, at)
        self.began = max(self.began, at)

    def checkpoint(self, iteration: int) -> None:
        """Take a checkpoint of this session into the line."""
        self.checkpoints[iteration] = self.session
        self.last_checkpoint = iteration
        self._void_skipped(before=iteration)

    def _void_skipped(self, before: int) -> None:
        """Void planned draws of skipped iterations; one that the resumed checkpoint cut in two is never void."""
        skipped = [at for at in self.planned if self.resumed <= at < before]
        for at in skipped:
            self._drop(self.planned[at])

    def _leave_planned(self, uids: Iterable[str]) -> None:
        """Take groups out of the planned draws that they are in."""
        for uid in uids:
            draw = self._place.get(uid)
            if draw is not None and draw in self.planned.get(draw.iteration, ()):
                left = tuple(other for other in draw.uids if other != uid)
                self._drop([draw], instead=replace(draw, uids=left) if left else None)

    def _put(self, table: dict[int, list[LineDraw]], draw: LineDraw) -> None:
        table.setdefault(draw.iteration, []).append(draw)
        self._place.update(dict.fromkeys(draw.uids, draw))

    def _drop(self, draws: list[LineDraw], instead: LineDraw | None = None) -> None:
        """Take draws out of the plan; their groups become pending, but for those of ``instead``."""
        for draw in list(draws):
            at = self.planned[draw.iteration]
            place = at.index(draw)
            at[place : place + 1] = [instead] if instead else []
            if not at:
                del self.planned[draw.iteration]
            for uid in draw.uids:
                self._place.pop(uid, None)
        if instead is not None:
            self._place.update(dict.fromkeys(instead.uids, instead))


@dataclass(slots=True)
class History:
    """All sessions' lines, folded from the journal in order."""

    lines: dict[int, Line] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)
    """Group → reason; evictions hold on every line."""
    gone: set[int] = field(default_factory=set)
    """Checkpoints that were recorded by lines that were let go of."""

    def apply(self, session: int, entry: Entry) -> None:
        """Take in one journal entry of ``session``; entries about segments say nothing here."""
        match entry:
            case Restored():
                self._restore(session, entry)
            case Drawn():
                self.line(session).draw(entry)
            case Checkpointed():
                self.line(session).checkpoint(entry.iteration)
                self._let_go_of_others(session)
            case Evicted():
                self.evicted |= dict.fromkeys(entry.uids, entry.reason)

    def _restore(self, session: int, entry: Restored) -> None:
        parent = None if entry.parent is None else self.lines.get(entry.parent)
        line = Line.inherit(session, parent, entry.iteration, keep_plan=entry.mode == "replay")
        self.lines[session] = line
        if entry.mode == "discard" and parent is not None:
            rolled_back = (uid for draw in parent.draws() for uid in draw.uids if line.find(uid) is None)
            self.evicted |= dict.fromkeys(rolled_back, DISCARDED)

    def _let_go_of_others(self, session: int) -> None:
        """A checkpoint makes its line the only one: from now on the archive holds what that line settles."""
        if len(self.lines) == 1:
            return
        kept = self.lines[session]
        recorded = {checkpoint for line in self.lines.values() for checkpoint in line.checkpoints}
        self.gone = (self.gone | recorded) - kept.checkpoints.keys()
        self.lines = {session: kept}

    def line(self, session: int) -> Line:
        """Return a session's line; a session that drew without a restore (an empty bank's first) starts at 0."""
        return self.lines.setdefault(session, Line(session))

    def parent_of(self, iteration: int) -> int | None:
        """Rule 1: return the session whose line a restore of ``iteration`` takes; None on a bank without any.

        Raises HistoryGoneError when only lines that were let go of recorded this checkpoint.
        """
        newest = sorted(self.lines, reverse=True)
        if iteration == 0:
            return newest[0] if newest else None
        recorders = [line.checkpoints[iteration] for line in self.lines.values() if iteration in line.checkpoints]
        if recorders:
            recorder = max(recorders)
            return next(one for one in newest if self.lines[one].checkpoints.get(iteration) == recorder)
        reaching = [one for one in newest if self.lines[one].reach >= iteration]
        if not reaching and iteration in self.gone:
            raise HistoryGoneError(
                f"checkpoint {iteration} belongs to a line that a later session left, and whose draws are not kept any "
                f"more; restore one of {sorted({0} | {at for line in self.lines.values() for at in line.checkpoints})}"
            )
        return next(iter(reaching or newest), None)
