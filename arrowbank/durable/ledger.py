"""What one session knows of its line and its groups, and how it changes that: journaled first, then believed.

Not thread-safe: the bank serialises calls. Every method that changes something is durable on return; when it raises,
nothing has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from arrowbank.durable import files
from arrowbank.durable.appender import Appender
from arrowbank.durable.following import Follower
from arrowbank.durable.journal import Abandoned, Checkpointed, Drawn, Entry, Evicted, Journal, Restored, Sealed
from arrowbank.durable.layout import BankPaths, JournalName, SegmentName
from arrowbank.durable.line import Line
from arrowbank.durable.recovery import State
from arrowbank.durable.segment import GroupRef, SegmentFacts, abandoned_in, check_head
from arrowbank.errors import BankClosedError, CorruptRecordError, InvalidDrawError, UnknownGroupError

__all__ = ["Ledger"]

_log = logging.getLogger("arrowbank")


class Ledger:
    """The state of one session."""

    def __init__(
        self,
        paths: BankPaths,
        bank_id: str,
        session: int,
        state: State,
        journal: Journal,
        appender: Appender,
        *,
        must_restore: bool,
    ) -> None:
        self.state = state
        self.restored = False
        self.guessed = False
        """Whether nothing said that the line taken up had got to the restored checkpoint."""
        self.rivals: tuple[int, ...] = ()
        """Newer sessions that may have got to it, too."""
        self._interrupted = False
        self.writers = Follower(paths, bank_id, session)
        """The run's other writers."""
        self._fresh = Line(session, makers=[(0, session)])
        """Until the session restores or writes something, its line is not part of the history."""
        self._paths, self._session = paths, session
        self._journal, self._appender = journal, appender
        self._must_restore = must_restore

    @property
    def line(self) -> Line:
        """The line that this session works on."""
        return self.state.history.lines.get(self._session, self._fresh)

    def reload(self, state: State) -> None:
        """Take over what has been read anew, before anything was restored."""
        self.state = state

    @property
    def is_used(self) -> bool:
        """Whether this session has restored or written anything, so that another restore belongs to the next one."""
        line, appender = self.line, self._appender
        return bool(self.restored or line.last_drawn >= 0 or line.checkpoints or appender.sizes or appender.groups)

    @property
    def live_bytes(self) -> int:
        """Bytes of segments that are not archived."""
        sizes = (self.state.segment_bytes, self._appender.sizes, self.writers.sizes)
        return sum(nbytes for each in sizes for nbytes in each.copy().values())

    # -- resume

    def check_restore(self, iteration: int, session: int | None, *, accept_damage: bool) -> None:
        """Raise when this checkpoint cannot be restored: HistoryGoneError, CorruptRecordError."""
        if self.state.hidden and not accept_damage:
            damage, iterations = self.state.hidden[0]
            raise CorruptRecordError(
                self._paths.journal / damage.name,
                f"{damage.reason}: a draw {iterations} may be hidden",
                offset=damage.offset,
                hint="restore(…, accept_damage=True) goes on with what can be read",
            )
        self.state.history.parent_of(iteration, session)

    def restore(self, iteration: int, mode: str, session: int | None) -> None:
        """Take up the line that holds checkpoint ``iteration``."""
        history = self.state.history
        parent = history.parent_of(iteration, session)
        guessed = history.is_guess(iteration, parent, session)
        line = None if parent is None else history.lines[parent]
        plan = Line.inherit(self._session, line, iteration, guessed=guessed).plan()
        lost = tuple(uid for draw in plan for uid in draw.uids if uid not in self.state.groups)
        self.guessed, self.rivals = guessed, tuple(history.rivals(iteration, parent)) if session is None else ()
        entry = Restored(iteration, mode, parent, lost, guessed, session)
        with self._all_or_nothing():
            self._write([entry])
            history.apply(self._session, entry)
            self.restored = True
        if guessed:
            _log.warning(
                "%s: nothing says that any session got to checkpoint %s; all that was drawn before it counts as "
                "trained on. Is this the bank of that run?",
                self._paths.root,
                iteration,
            )

    # -- training

    def draw(self, drawn: Drawn) -> None:
        self._require_restored(f"mark_consumed at iteration {drawn.iteration}")
        self._wait_for_appends()
        if not self.line.check_draw(drawn, self.state.history.evicted):
            self.line.began = max(self.line.began, drawn.iteration)
            return
        self._require_known(drawn.uids)
        for uid in drawn.uids:
            split = self.state.groups[uid].head["split"]
            if split != "train":
                raise InvalidDrawError(f"group {uid} is of split {split!r}, which is never trained on")
        self._record(drawn)

    def evict(self, uids: tuple[str, ...], reason: str) -> None:
        self._require_restored("evict")
        self._wait_for_appends()
        self.line.check_evict(uids)
        self._require_known(uids)
        new = tuple(uid for uid in dict.fromkeys(uids) if uid not in self.state.history.evicted)
        if new:
            self._record(Evicted(new, reason))

    def checkpoint(self, iteration: int) -> bool:
        """Return whether this was news."""
        self._require_restored(f"checkpoint({iteration})")
        if not self.line.check_checkpoint(iteration):
            return False
        skipped = self.line.skipped(before=iteration)
        self._record(Checkpointed(iteration))
        if skipped:
            _log.warning(
                "%s: checkpoint %s, but the planned draws of iterations %s were not marked as consumed again: they are "
                "void, and their groups pending. A replayed draw is drawn by mark_consumed, like any other",
                self._paths.root,
                iteration,
                skipped,
            )
        return True

    # -- groups and segments

    def take_arrivals(self) -> None:
        """Take over groups that became durable."""
        arrived = self._appender.arrived
        while arrived:
            ref = arrived[0]  # taken out last: an interrupt must not lose it
            self.state.groups[ref.uid] = ref
            if "evicted" in ref.head:
                self.state.history.evicted[ref.uid] = ref.head["evicted"]
            arrived.popleft()

    def look_at_writers(self) -> set[SegmentName]:
        """Take over groups of the run's other writers; return those of their segments that are finished and read."""
        with self._fence_first():
            added = self.writers.look()
        for record in added:
            told = abandoned_in(record.head)
            for gone in told or ():
                self._abandoned(Abandoned(*gone))
            name = SegmentName.parse(record.name)
            if told is None and name is not None and check_head(record.head) is None:
                ref = GroupRef(record.head["uid"], name, record.sequence, record.head)
                self.state.groups.setdefault(ref.uid, ref)
                if "evicted" in record.head:
                    self.state.history.evicted.setdefault(ref.uid, record.head["evicted"])
        return set(self.writers.finished)

    def _abandoned(self, gone: Abandoned) -> None:
        """A writer's append failed: what was read of it meanwhile does not count."""
        self._journal.learn(gone)
        for uid, ref in list(self.state.groups.items()):
            if str(ref.segment) == gone.name and ref.sequence in gone.sequences and self.line.find(uid) is None:
                del self.state.groups[uid]

    def finish(self) -> None:
        """Write what waits and say how many records each segment has."""
        try:
            self._appender.close()
        finally:
            self.take_arrivals()
        if self._appender.closed:
            self._write([])

    def seal(self) -> None:
        """Say now how many records there are in files of dead sessions, if that is still to be said."""
        if self._dead_files():
            self._write([])

    def let_go(self, names: Container[str]) -> None:
        """These segments are being archived: nothing more is to be said of them."""
        for fact in [fact for fact in self._appender.closed if fact.name in names]:
            self._appender.closed.remove(fact)

    def _write(self, entries: list[Entry]) -> None:
        """Write entries to the journal, behind facts of files that were finished since.

        Files of dead sessions are finished as they are: synced, since who wrote them may not have got to it, and what
        their old owner, should he live, adds from now on does not count.
        """
        facts = self._finish_dead_files()
        gone = [
            Abandoned(fact.name, part.start, len(part))
            for fact in facts for part in self.state.unfinished.get(fact.name, ())
        ]  # fmt: skip
        closed = []
        while self._appender.closed:
            closed.append(self._appender.closed.popleft())
        try:
            self._journal.write([*gone, *([Sealed((*facts, *closed))] if facts or closed else []), *entries])
        except BaseException:
            self._appender.closed.extendleft(reversed(closed))
            raise
        self.state.unsealed.clear()
        self.state.unfinished.clear()

    def _finish_dead_files(self) -> list[SegmentFacts]:
        dead = {name: (self._place(name), records) for name, records in self._dead_files().items()}
        with self._fence_first():
            facts = [SegmentFacts(name, records, files.fsync_file(path)) for name, (path, records) in dead.items()]
            for directory in {path.parent for path, _ in dead.values()}:
                files.fsync_directory(directory)
        return facts

    @contextmanager
    def _fence_first(self) -> Iterator[None]:
        """Who takes over takes files away: say that rather than "no such file"."""
        try:
            yield
        except OSError:
            self._journal.check_fence()
            raise

    def _dead_files(self) -> dict[str, int]:
        """Files of earlier sessions of which nobody has said how many records count."""
        return {name: count for name, count in self.state.unsealed.items() if _session_of(name) < self._session}

    def _place(self, name: str) -> Path:
        return (self._paths.segments if JournalName.parse(name) is None else self._paths.journal) / name

    def _record(self, entry: Entry) -> None:
        """Make an entry durable, with the facts of segments closed since, and take it into the line."""
        with self._all_or_nothing():
            self._write([entry])
            if not isinstance(entry, Evicted):  # evictions are no part of any line
                self.state.history.lines.setdefault(self._session, self.line)
            self.state.history.apply(self._session, entry)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An interrupt between the journal and the line would leave this handle with less than it has written."""
        if self._interrupted:
            raise BankClosedError(
                f"{self._paths.root}: an earlier call was interrupted while it wrote, and what has become of it is not "
                "known here; close this handle and open the bank again"
            )
        try:
            yield
        except BaseException as error:
            self._interrupted = not isinstance(error, Exception)  # after an error of the write, nothing was written
            raise

    def _wait_for_appends(self) -> None:
        self._appender.flush()
        self.take_arrivals()

    def _require_restored(self, what: str) -> None:
        if self._must_restore and not self.restored:
            raise InvalidDrawError(
                f"{what} before restore, on a bank that has groups: call restore(iteration) first, 0 for a run from "
                "the start"
            )

    def _require_known(self, uids: Iterable[str]) -> None:
        groups = self.state.groups
        if any(uid not in groups or groups[uid].segment in self.writers.sizes for uid in uids):
            self.look_at_writers()  # a new one, or one whose append has failed since it was read
        unknown = [uid for uid in uids if uid not in self.state.groups]
        if unknown:
            raise UnknownGroupError(
                f"{self._paths.root}: no live group has uid {', '.join(unknown[:4])}: it was never appended to this "
                "bank, or was trained on so long ago that it is archived"
            )


def _session_of(name: str) -> int:
    parsed = JournalName.parse(name) or SegmentName.parse(name)
    assert parsed is not None  # a name that was read as one
    return parsed.session
