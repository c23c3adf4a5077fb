"""A plain model of sessions, resume and replay (DESIGN §5), written from the text and sharing nothing with the bank.

It keeps the log of everything that was acknowledged, and computes every answer from the whole log each time it is
asked. No files, no damage, no compaction: it says what a bank must answer, however it stores things.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

__all__ = ["Fate", "Gone", "Group", "Mode", "PlainModel", "Planned", "Trained", "Weights"]

Mode: TypeAlias = Literal["replay", "requeue", "discard"]
Verdict: TypeAlias = Literal["new", "same", "refused"]


class Gone(Exception):
    """No line that is kept has the history asked for."""


@dataclass(frozen=True, slots=True)
class Group:
    uid: str
    number: int  # counts groups; their tokens are made from it
    env: str
    split: str
    members: int
    source: int | None


@dataclass(frozen=True, slots=True)
class Appended:
    group: Group


@dataclass(frozen=True, slots=True)
class Evicted:
    uids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    session: int
    parent: int | None
    iteration: int
    mode: Mode
    guessed: bool
    """Nobody recorded or reached this checkpoint, and no session was named."""
    named: int | None = None


@dataclass(frozen=True, slots=True)
class Began:
    session: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Drew:
    session: int
    iteration: int
    uids: tuple[str, ...]
    span: int
    state: bytes | None


@dataclass(frozen=True, slots=True)
class Recorded:
    session: int
    iteration: int


Event: TypeAlias = Appended | Evicted | Resumed | Began | Drew | Recorded


@dataclass(frozen=True, slots=True)
class Placed:
    """A draw on a line."""

    iteration: int
    uids: tuple[str, ...]
    span: int
    state: bytes | None
    how: Literal["settled", "planned", "own"]

    @property
    def end(self) -> int:
        return self.iteration + self.span


@dataclass(frozen=True, slots=True)
class Planned:
    """A draw as a restore must hand it back."""

    iteration: int
    index: int
    span: int
    offset: int
    uids: tuple[str, ...]
    state: bytes | None
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fate:
    """What the archive must say of a group."""

    outcome: str | None = None
    iteration: int | None = None
    draw: int | None = None
    position: int | None = None
    span: int | None = None
    reason: str | None = None


class PlainModel:
    """What a bank knows, as a log."""

    def __init__(self, log: Iterable[Event] = ()) -> None:
        self.log: list[Event] = list(log)
        self._lines: dict[tuple[int, int], list[Placed]] = {}  # computed before, by the length of the log

    def copy(self) -> PlainModel:
        return PlainModel(self.log)

    # -- what happened

    def append(self, group: Group, evicted: str | None = None) -> None:
        self.log.append(Appended(group))
        if evicted is not None:
            self.log.append(Evicted((group.uid,), evicted))

    def evict(self, uids: Iterable[str], reason: str) -> None:
        new = tuple(uid for uid in uids if uid not in self.evicted)
        if new:
            self.log.append(Evicted(new, reason))

    def begin(self, session: int, iteration: int) -> None:
        self.log.append(Began(session, iteration))

    def draw(self, session: int, iteration: int, uids: tuple[str, ...], span: int, state: bytes | None) -> None:
        if self.judge_draw(session, iteration, uids, span) == "new":
            self.log.append(Drew(session, iteration, uids, span, state))

    def checkpoint(self, session: int, iteration: int) -> None:
        if iteration > self.last_checkpoint(session):
            self.log.append(Recorded(session, iteration))

    def restore(self, session: int, iteration: int, mode: Mode, named: int | None) -> None:
        parent = self.parent(iteration, named)
        guessed = named is None and parent is not None and iteration not in self.carries(parent)
        guessed = guessed and parent is not None and self.reach(parent) < iteration
        self.log.append(Resumed(session, parent, iteration, mode, guessed, named))
        if mode == "discard":
            plan = self._inherited(replace(self._resumed(session), mode="replay"))
            rolled_back = [draw for draw in plan if draw.how == "planned" and draw.iteration >= iteration]
            self.evict([uid for draw in rolled_back for uid in draw.uids], "discarded at restore")

    # -- groups

    @property
    def groups(self) -> dict[str, Group]:
        """In order of completion."""
        return {event.group.uid: event.group for event in self.log if isinstance(event, Appended)}

    @property
    def evicted(self) -> dict[str, str]:
        """Group → the first reason that was given."""
        events = [event for event in self.log if isinstance(event, Evicted)]
        return {uid: event.reason for event in reversed(events) for uid in event.uids}

    # -- sessions

    def _of(self, session: int) -> list[Resumed | Began | Drew | Recorded]:
        """What a session did, from its restore on."""
        found: list[Resumed | Began | Drew | Recorded] = []
        for event in self.log:
            if not isinstance(event, Appended | Evicted) and event.session == session:
                found = [event] if isinstance(event, Resumed) else [*found, event]
        return found

    def _resumed(self, session: int) -> Resumed:
        """How a session began; the first one on an empty bank need not restore."""
        found = [event for event in self._of(session) if isinstance(event, Resumed)]
        return found[0] if found else Resumed(session, None, 0, "replay", False)

    def kept(self) -> list[int]:
        """Sessions whose line is kept, oldest first: a checkpoint lets go of all others."""
        kept: list[int] = []
        for event in self.log:
            if isinstance(event, Recorded):
                kept = [event.session]
            elif isinstance(event, Resumed | Drew) and event.session not in kept:
                kept.append(event.session)
        return sorted(kept)

    def carries(self, session: int) -> dict[int, int]:
        """Checkpoints that a session's line carries, with who recorded them."""
        resumed = self._resumed(session)
        found = {} if resumed.parent is None else self.carries(resumed.parent)
        found = {at: by for at, by in found.items() if at <= resumed.iteration}
        return found | {event.iteration: session for event in self._of(session) if isinstance(event, Recorded)}

    def resumed_at(self, session: int) -> int:
        return self._resumed(session).iteration

    def last_checkpoint(self, session: int) -> int:
        own = [event.iteration for event in self._of(session) if isinstance(event, Recorded)]
        return max([self.resumed_at(session), *own])

    def last_drawn(self, session: int) -> int:
        return max([event.iteration for event in self._of(session) if isinstance(event, Drew)], default=-1)

    def latest_checkpoint(self, session: int) -> int:
        """The highest checkpoint that may be recorded now."""
        begun = [event.iteration for event in self._of(session) if isinstance(event, Resumed | Began | Drew)]
        return max(begun, default=-1) + 1

    def reach(self, session: int) -> int:
        own = [draw.end for draw in self.line(session) if draw.how == "own"]
        return max([self.last_checkpoint(session), *own])

    # -- rule 1: which line

    def parent(self, iteration: int, named: int | None) -> int | None:
        """Return the session whose line a restore takes. Raises Gone."""
        if not (kept := self.kept()):
            return None
        if named is not None:
            return self._named(iteration, named, kept)
        if iteration == 0:
            return max(kept, default=None)
        carried = {session: self.carries(session).get(iteration, -1) for session in kept}
        recorder = max(carried.values(), default=-1)
        if recorder >= 0:
            return max(session for session in kept if carried[session] == recorder)
        if any(isinstance(event, Recorded) and event.iteration == iteration for event in self.log):
            raise Gone
        return max([session for session in kept if self.reach(session) >= iteration] or kept, default=None)

    def keeps(self, iteration: int, named: int | None) -> bool:
        """Whether a line is kept that a restore may take."""
        try:
            self.parent(iteration, named)
        except Gone:
            return False
        return True

    def _named(self, iteration: int, named: int, kept: list[int]) -> int:
        if named in kept and iteration <= self.resumed_at(named):
            return named
        found = [one for one in kept if self._climb(one, iteration) == named or self._through(one, named, iteration)]
        if not found and iteration > 0:
            raise Gone
        return max(found or kept, default=-1)

    def _through(self, session: int, named: int, iteration: int) -> bool:
        """Whether a session's line goes on from where ``named`` resumed, at ``iteration`` or later."""
        start, found = self.resumed_at(named), session
        while found != named:
            parent = self._resumed(found).parent
            if parent is None or self.resumed_at(found) < start:
                return False
            found = parent
        return start >= iteration

    def _climb(self, session: int, iteration: int) -> int | None:
        """Return the session that made what this session's line has just below ``iteration``."""
        found: int | None = session
        while found is not None and self.resumed_at(found) >= iteration:
            resumed = self._resumed(found)
            found = resumed.named if resumed.parent is None else resumed.parent
        return found

    # -- rules 2 and 3: what is on it

    def line(self, session: int) -> list[Placed]:
        """The draws of a session's line, in order."""
        key = (session, len(self.log))
        if key not in self._lines:
            self._lines[key] = self._compute_line(session)
        return self._lines[key]

    def _compute_line(self, session: int) -> list[Placed]:
        placed: list[Placed] = []
        resumed = self.resumed_at(session)
        evicted: set[str] = set()
        for event in self.log:
            match event:
                case Evicted(uids):
                    evicted.update(uids)
                case Resumed(by) if by == session:
                    placed = self._inherited(event)
                case Recorded(by, iteration) if by == session:
                    placed = [draw for draw in placed if not _skipped(draw, resumed, iteration)]
                case Drew(by) if by == session:
                    placed = _after_draw(placed, event, resumed, evicted)
        return placed

    def _inherited(self, resumed: Resumed) -> list[Placed]:
        if resumed.parent is None:
            return []
        at, before = resumed.iteration, self.resumed_at(resumed.parent)
        inherited = []
        for draw in self.line(resumed.parent):
            if at > before and not resumed.guessed and _skipped(draw, before, at):
                continue  # the weights went past it without it, as a checkpoint would have said
            if draw.end <= at:
                inherited.append(replace(draw, how="settled"))
            elif resumed.mode == "replay":
                inherited.append(replace(draw, how="planned"))
            elif draw.iteration < at:
                inherited.append(replace(draw, how="settled", span=at - draw.iteration))
        return inherited

    # -- what a restore hands back

    def plan(self, session: int) -> list[Planned]:
        resumed, evicted = self.resumed_at(session), self.evicted
        found = []
        for draw, index in _indexed(self.line(session)):
            if draw.how == "planned":
                live = tuple(uid for uid in draw.uids if uid not in evicted)
                lost = tuple(uid for uid in draw.uids if uid in evicted)
                offset = max(resumed - draw.iteration, 0)
                found.append(Planned(draw.iteration, index, draw.span, offset, live, draw.state, lost))
        return found

    def pending(self, session: int) -> dict[str, list[str]]:
        """Environment → uids, oldest first."""
        drawn, evicted = {uid for draw in self.line(session) for uid in draw.uids}, self.evicted
        found: dict[str, list[str]] = {}
        for uid, group in self.groups.items():
            if group.split == "train" and uid not in drawn and uid not in evicted:
                found.setdefault(group.env, []).append(uid)
        return found

    def settled(self, session: int, by: int) -> set[str]:
        return {uid for draw in self.line(session) if draw.end <= by for uid in draw.uids}

    def fate(self, session: int, uid: str, by: int) -> Fate:
        """What the archive, and a scan, say of a group when checkpoint ``by`` is the last one."""
        evicted = self.evicted
        for draw, index in _indexed(self.line(session)):
            if uid in draw.uids and draw.end <= by:
                return Fate("consumed", draw.iteration, index, draw.uids.index(uid), draw.span, evicted.get(uid))
        return Fate("evicted", reason=evicted[uid]) if uid in evicted else Fate()

    def over(self, session: int) -> set[str]:
        """Groups that must be in the archive when the run is over: settled or evicted alike on all lines kept."""
        by = max(self.carries(session), default=0)
        held = {kept: min(by, self.last_checkpoint(kept)) for kept in self.kept()}
        drawn = [(kept, draw) for kept in held for draw in self.line(kept) if draw.end > held[kept]]
        half = [draw for kept, draw in drawn if draw.how == "own" or draw.iteration < self.resumed_at(kept)]
        awaited = {uid for draw in half for uid in draw.uids}
        fates = {uid: {self.fate(kept, uid, held[kept]) for kept in held} for uid in self.groups}
        alike = {uid for uid, ends in fates.items() if len(ends) == 1 and ends != {Fate()}}
        return alike - (awaited & self.evicted.keys())

    # -- rule 4: what is refused

    def judge_draw(self, session: int, iteration: int, uids: tuple[str, ...], span: int) -> Verdict:
        line, resumed, evicted, groups = self.line(session), self.resumed_at(session), self.evicted, self.groups
        if span < 1 or not uids or len(set(uids)) < len(uids):
            return "refused"
        for event in self._of(session):
            if isinstance(event, Drew) and (event.iteration, event.uids, event.span) == (iteration, uids, span):
                return "same"
        cut = [draw for draw in line if draw.iteration < resumed and draw.how != "settled"]
        if any(draw.how == "own" and _live(draw, evicted) == uids and resumed <= iteration < draw.end for draw in cut):
            return "same"
        if iteration < max(self.last_checkpoint(session), self.last_drawn(session)):
            return "refused"
        if any(uid not in groups or groups[uid].split != "train" or uid in evicted for uid in uids):
            return "refused"
        if any(_live(draw, evicted) == uids and iteration < draw.end for draw in cut):
            return "new"
        taken = {uid for draw in line if draw.how != "planned" or draw in cut for uid in draw.uids}
        return "refused" if taken.intersection(uids) else "new"

    def judge_evict(self, session: int, uids: Iterable[str]) -> Verdict:
        line, last, groups = self.line(session), self.last_checkpoint(session), self.groups
        taken = {uid for draw in line if draw.how != "planned" or draw.end <= last for uid in draw.uids}
        return "refused" if any(uid in taken or uid not in groups for uid in uids) else "new"


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch, as the trainer remembers it."""

    iteration: int
    span: int
    uids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model checkpoint: what its weights were trained on, wholly or in part."""

    iteration: int = 0
    session: int | None = None
    history: tuple[Trained, ...] = ()

    @property
    def held(self) -> set[str]:
        return {uid for one in self.history if one.iteration + one.span <= self.iteration for uid in one.uids}

    @property
    def cut(self) -> list[Trained]:
        return [one for one in self.history if one.iteration < self.iteration < one.iteration + one.span]


def _skipped(draw: Placed, resumed: int, before: int) -> bool:
    """Whether it is void once ``before`` is drawn at or recorded. One that the restored checkpoint cut never is."""
    return draw.how == "planned" and resumed <= draw.iteration < before


def _live(draw: Placed, evicted: Iterable[str]) -> tuple[str, ...]:
    return tuple(uid for uid in draw.uids if uid not in evicted)


def _indexed(line: list[Placed]) -> Iterator[tuple[Placed, int]]:
    """Yield draws with their place among those of their iteration."""
    seen: dict[int, int] = {}
    for draw in line:
        index = seen[draw.iteration] = seen.get(draw.iteration, -1) + 1
        yield draw, index


def _after_draw(placed: list[Placed], drew: Drew, resumed: int, evicted: set[str]) -> list[Placed]:
    at = drew.iteration
    placed = [draw for draw in placed if not _skipped(draw, resumed, at)]
    for place, draw in enumerate(placed):  # going on with one that the restored checkpoint cut
        if draw.how == "planned" and draw.iteration < resumed and _live(draw, evicted) == drew.uids and at < draw.end:
            return [*placed[:place], replace(draw, how="own"), *placed[place + 1 :]]
    here = [draw for draw in placed if draw.iteration == at and draw.how == "planned"]
    next_live = next((draw for draw in here if _live(draw, evicted)), None)
    repeats = next_live is not None and _live(next_live, evicted) == drew.uids
    rest = here[here.index(next_live) + 1 :] if next_live and repeats else []
    before = [draw for draw in placed if draw.iteration < at or (draw.iteration == at and draw.how != "planned")]
    after = [draw for draw in placed if draw.iteration > at]
    others = [_without(draw, drew.uids) for draw in (*rest, *after)]
    return [*before, Placed(at, drew.uids, drew.span, drew.state, "own"), *(draw for draw in others if draw.uids)]


def _without(draw: Placed, uids: tuple[str, ...]) -> Placed:
    return replace(draw, uids=_live(draw, uids)) if draw.how == "planned" else draw
