"""One session's line: what is settled, planned and pending on it. Pure: no files, no clock.

Each session works on one line: a table iteration → draws in order, inherited at restore, then overwritten by what the
session draws itself. ``history`` folds the entries of all sessions and says which line a restore takes (rule 1). Here:

2. What it inherits: ``Line.inherit``. Draws settled by T stay; the others are the plan. A planned draw that T *cuts*
   (its training began before T and ends after) has an offset.
3. What drawing does to the plan: ``Line.draw``. Draws of skipped iterations are void; own draws that repeat the
   planned ones confirm them; anything else voids what was planned at that iteration; a group drawn leaves any other
   planned draw; drawing a cut draw's groups again, inside its span, continues it where it is.
4. What is refused: ``Line.check_draw``, ``Line.check_evict``, ``Line.check_checkpoint``.

Invariant (I3): a group that is not evicted is in at most one draw of a line; in none, it is pending. A group that is
archived, and all of whose draw is, is in no line.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace

from arrowbank.durable.checkpoints import Checkpoints
from arrowbank.durable.journal import Drawn
from arrowbank.errors import InvalidDrawError

__all__ = ["Line", "LineDraw"]


@dataclass(frozen=True, slots=True, eq=False)
class LineDraw:
    """A draw as a line knows it. Shared by all lines that inherited it."""

    iteration: int
    uids: tuple[str, ...]
    span: int
    state: bytes | None
    session: int
    """The session that made it, or repeated it: the draw is that session's own."""
    index: int = 0
    """Its place among the draws of its iteration."""

    @property
    def end(self) -> int:
        """A checkpoint at this iteration count, or a later one, holds all the draw's training."""
        return self.iteration + self.span


@dataclass(slots=True)
class Line:
    """The history one session works on."""

    session: int
    parent: int | None = None
    """The session whose line this one went on from."""
    resumed: int = 0
    """T of the session's restore."""
    makers: list[tuple[int, int]] = field(default_factory=list)
    """Who got on from where: (iteration count, session), rising; the last one is this session, from ``resumed`` on."""
    made: dict[int, list[LineDraw]] = field(default_factory=dict)
    """Draws by iteration: inherited ones that ``resumed`` settles, and the session's own."""
    planned: dict[int, list[LineDraw]] = field(default_factory=dict)
    """Inherited draws by iteration that are to be replayed: neither settled nor repeated nor void."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    last_checkpoint: int = 0
    """The session's own last one, or ``resumed``."""
    last_drawn: int = -1
    """The last iteration that the session itself drew at."""
    began: int = -1
    """The last iteration begun or drawn at; a restore begins the one that it resumes at."""
    reach: int = 0
    """The highest checkpoint that this session may have got to."""
    lost: frozenset[str] = frozenset()
    """Groups of the plan that could not be handed back when the session restored."""
    _place: dict[str, LineDraw] | None = None
    """Group → the draw it is in; made when first asked for, since most lines are never asked."""

    @classmethod
    def inherit(
        cls,
        session: int,
        parent: Line | None,
        iteration: int,
        *,
        keep_plan: bool = True,
        lost: Iterable[str] = (),
        guessed: bool = False,
    ) -> Line:
        """Rule 2: start a session's line at checkpoint ``iteration`` on its parent's.

        Without ``keep_plan``, draws that the checkpoint does not hold are forgotten; of one that it cuts, the part
        that it holds is what stays. What the parent itself had planned before ``iteration`` and never drew, it skipped:
        that is void, as a checkpoint would have made it; but not where it is ``guessed`` that the parent got there.
        """
        line = cls(session, None, iteration, last_checkpoint=iteration, reach=iteration, lost=frozenset(lost))
        line.makers = [(iteration, session)]
        line.began = iteration
        if parent is not None:
            line.parent = parent.session
            line.makers = [*(part for part in parent.makers if part[0] <= iteration), *line.makers]
            line.checkpoints = parent.checkpoints.upto(iteration)
            skipped = [] if guessed else parent.skipped(before=iteration)
            for draw in parent.draws():
                if draw.iteration in skipped and draw in parent.planned[draw.iteration]:
                    continue
                if draw.end <= iteration:
                    _put(line.made, draw)
                elif keep_plan:
                    _put(line.planned, draw)
                elif draw.iteration < iteration:
                    _put(line.made, replace(draw, span=iteration - draw.iteration))
        return line

    def maker(self, iteration: int) -> int | None:
        """Return the session that got to ``iteration`` on this line."""
        before = bisect_left(self.makers, (iteration,))
        return self.makers[before - 1][1] if before else None

    def came_through(self, session: int, iteration: int) -> bool:
        """Whether the line goes on from one that ``session`` resumed at ``iteration`` or later."""
        return any(by == session and start >= iteration for start, by in self.makers)

    def owns(self, draw: LineDraw) -> bool:
        """Whether this session made the draw itself, or repeated it."""
        return draw.session == self.session

    def is_made(self, draw: LineDraw) -> bool:
        """Whether the draw is settled or the session's own, not only planned."""
        return draw in self.made.get(draw.iteration, ())

    def cuts(self, draw: LineDraw) -> bool:
        """Whether the restored checkpoint holds a part of the draw's training."""
        return draw.iteration < self.resumed < draw.end

    def draws(self) -> Iterator[LineDraw]:
        """All draws, in order."""
        for iteration in sorted(self.made.keys() | self.planned.keys()):
            yield from self.at(iteration)

    def at(self, iteration: int) -> list[LineDraw]:
        """The draws of one iteration, in order."""
        both = [*self.made.get(iteration, ()), *self.planned.get(iteration, ())]
        return sorted(both, key=lambda draw: draw.index)

    def settled(self, checkpoint: int) -> Iterator[LineDraw]:
        """Draws whose training is inside ``checkpoint``."""
        return (draw for draw in self.draws() if draw.end <= checkpoint)

    def plan(self) -> list[LineDraw]:
        """The draws to replay, in order."""
        return [draw for iteration in sorted(self.planned) for draw in self.planned[iteration]]

    def find(self, uid: str) -> LineDraw | None:
        """Return the draw that the group is in."""
        return self.places.get(uid)

    @property
    def places(self) -> dict[str, LineDraw]:
        """Group → the draw that it is in."""
        if self._place is None:
            self._place = {uid: draw for draw in self.draws() for uid in draw.uids}
        return self._place

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
            raise InvalidDrawError(f"the draw at iteration {at} names {repeated} twice; name each group once")
        continued = self._continued(drawn, evicted)
        if self._was_made(drawn) or (continued is not None and self.owns(continued)):
            return False
        floor = max(self.resumed, self.last_checkpoint)
        if at < floor:
            raise InvalidDrawError(
                f"a draw at iteration {at}, but checkpoint {floor} was restored or recorded; draw at {floor} or later"
            )
        if at < self.last_drawn:
            raise InvalidDrawError(
                f"a draw at iteration {at} after one at {self.last_drawn}; iterations only go up: draw at "
                f"{self.last_drawn} or later"
            )
        gone = [uid for uid in drawn.uids if uid in evicted]
        if gone:
            raise InvalidDrawError(f"the draw at iteration {at} names evicted groups: {gone}; leave them out")
        if continued is None:
            for uid in drawn.uids:
                self._refuse_taken(uid, f"the draw at iteration {at}")
                self._refuse_cut(uid, at, evicted)
        return True

    def check_evict(self, uids: Iterable[str]) -> None:
        """Raise InvalidDrawError for groups whose training is settled, or that this session drew."""
        for uid in uids:
            self._refuse_taken(uid, "evict")

    def check_checkpoint(self, iteration: int) -> bool:
        """Return False for a checkpoint at or below the last one; raise InvalidDrawError beyond what was begun."""
        latest = self.began + 1
        if iteration > latest:
            raise InvalidDrawError(
                f"checkpoint({iteration}), but the last iteration begun is {latest - 1}; a checkpoint counts complete "
                f"iterations, so {latest} is the highest possible now: call begin_iteration first"
            )
        return iteration > self.last_checkpoint

    def _was_made(self, drawn: Drawn) -> bool:
        return any(
            self.owns(draw) and (draw.uids, draw.span, draw.state) == (drawn.uids, drawn.span, drawn.state)
            for draw in self.made.get(drawn.iteration, ())
        )

    def _refuse_taken(self, uid: str, what: str) -> None:
        draw = self.find(uid)
        if draw is not None and self.owns(draw):
            raise InvalidDrawError(
                f"{what} names group {uid}, which this session drew at iteration {draw.iteration} "
                f"(span {draw.span}, {len(draw.uids)} groups); leave it out. Only the very same draw, with the same "
                "groups, span and state, may be repeated"
            )
        held = max(self.resumed, self.last_checkpoint)
        if draw is not None and draw.end <= held:
            raise InvalidDrawError(
                f"{what} names group {uid}, which was trained on at iteration {draw.iteration}: checkpoint {held} "
                "holds it; leave it out"
            )

    def _refuse_cut(self, uid: str, at: int, evicted: Container[str]) -> None:
        draw = self.find(uid)
        if draw is not None and self.cuts(draw):
            raise InvalidDrawError(
                f"the draw at iteration {at} names group {uid}: checkpoint {self.resumed} holds a part of the "
                f"training of its draw at {draw.iteration}, which feeds iterations up to {draw.end - 1}. Draw "
                f"{list(self._there(draw, evicted))} together, below {draw.end}, to go on with it; or restore with "
                'mode="requeue" or "discard"'
            )

    # -- rule 3: what drawing and checkpoints do

    def draw(self, drawn: Drawn, evicted: Container[str] = ()) -> None:
        """Take a draw of this session into the line."""
        at = drawn.iteration
        if self._was_made(drawn):
            return
        self._void_skipped(before=at)
        continued = self._continued(drawn, evicted)
        if continued is not None:
            self._make(replace(continued, session=self.session), instead_of=continued)
        else:
            planned = self.planned.get(at, [])
            first = next((draw for draw in planned if self._there(draw, evicted)), None)
            if first is not None and self._there(first, evicted) == drawn.uids:
                self._drop(planned[: planned.index(first) + 1])
            else:
                self._drop(planned)
            self._leave_planned(drawn.uids)
            index = len(self.made.get(at, ()))
            self._make(LineDraw(at, drawn.uids, drawn.span, drawn.state, self.session, index))
            self._number(at)
        self.last_drawn = max(self.last_drawn, at)
        self.began = max(self.began, at)

    def checkpoint(self, iteration: int) -> None:
        """Take a checkpoint of this session into the line."""
        self.checkpoints.add(iteration, self.session)
        self.last_checkpoint = iteration
        self.reach = max(self.reach, iteration)
        self._void_skipped(before=iteration)

    def _there(self, draw: LineDraw, evicted: Container[str]) -> tuple[str, ...]:
        """The groups of a planned draw that can be trained on again."""
        return tuple(uid for uid in draw.uids if uid not in evicted and uid not in self.lost)

    def _continued(self, drawn: Drawn, evicted: Container[str]) -> LineDraw | None:
        """Return the cut draw that a draw of its groups, inside its span, goes on with."""
        draw = self.find(drawn.uids[0]) if drawn.uids else None
        if draw is None or not self.cuts(draw) or not self.resumed <= drawn.iteration < draw.end:
            return None
        return draw if self._there(draw, evicted) == drawn.uids else None

    def _void_skipped(self, before: int) -> None:
        """Void planned draws of skipped iterations; one that the resumed checkpoint cut in two is never void."""
        for at in self.skipped(before):
            self._drop(self.planned[at])

    def skipped(self, before: int) -> list[int]:
        """The iterations of planned draws that are passed over when the session gets to ``before``."""
        return [at for at in self.planned if self.resumed <= at < before]

    def _leave_planned(self, uids: Iterable[str]) -> None:
        """Take groups out of the planned draws that they are in."""
        for uid in uids:
            draw = self.find(uid)
            if draw is None or draw not in self.planned.get(draw.iteration, ()):
                continue
            left = tuple(other for other in draw.uids if other != uid)
            if left:
                self._replace(draw, replace(draw, uids=left))
                self.places.pop(uid, None)
            else:
                self._drop([draw])
                self._number(draw.iteration)

    def _number(self, iteration: int) -> None:
        """Let planned draws move up behind the session's own when one before them is gone."""
        first = len(self.made.get(iteration, ()))
        for index, draw in enumerate(list(self.planned.get(iteration, ())), first):
            if draw.index != index:
                self._replace(draw, replace(draw, index=index))

    def _make(self, draw: LineDraw, instead_of: LineDraw | None = None) -> None:
        if instead_of is not None:
            for table in (self.planned, self.made):
                if instead_of in table.get(instead_of.iteration, ()):
                    _take(table, instead_of)
        places = self.places
        _put(self.made, draw)
        places.update(dict.fromkeys(draw.uids, draw))
        self.reach = max(self.reach, draw.end)

    def _replace(self, planned: LineDraw, other: LineDraw) -> None:
        """Put another draw in the place of a planned one."""
        at = self.planned[planned.iteration]
        at[at.index(planned)] = other
        self.places.update(dict.fromkeys(other.uids, other))

    def _drop(self, draws: Iterable[LineDraw]) -> None:
        """Take draws out of the plan; their groups become pending."""
        places = self.places
        for draw in list(draws):
            _take(self.planned, draw)
            for uid in draw.uids:
                places.pop(uid, None)  # what is left of a damaged journal may name a group twice

    # -- the archive

    def copy(self) -> Line:
        """Return a line that changes on its own."""
        made = {at: list(draws) for at, draws in self.made.items()}
        planned = {at: list(draws) for at, draws in self.planned.items()}
        checkpoints = Checkpoints(self.checkpoints.runs)
        return replace(self, made=made, planned=planned, checkpoints=checkpoints, _place=None)

    def forget(self, archived: Container[str]) -> None:
        """Let go of settled draws all of whose groups are archived."""
        for iteration in list(self.made):
            kept = [draw for draw in self.made[iteration] if not all(uid in archived for uid in draw.uids)]
            if len(kept) < len(self.made[iteration]):
                self._place = None
                self.made[iteration] = kept
            if not kept:
                del self.made[iteration]

    def revive(self, draws: Iterable[LineDraw]) -> None:
        """Take back draws whose groups have left the archive; those that the line still has are not among them."""
        for draw in draws:
            _put(self.made, draw)
            self.made[draw.iteration].sort(key=lambda one: one.index)
        self._place = None


def _put(table: dict[int, list[LineDraw]], draw: LineDraw) -> None:
    table.setdefault(draw.iteration, []).append(draw)


def _take(table: dict[int, list[LineDraw]], draw: LineDraw) -> None:
    at = table[draw.iteration]
    at.remove(draw)
    if not at:
        del table[draw.iteration]
