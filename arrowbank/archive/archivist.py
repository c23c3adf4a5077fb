"""What one session archives: decides under the bank's lock, works in the background, and lets go of what is archived.

It alone joins the session's ledger with the archive. Locks: ``lock`` is the bank's; the store and the compactor's
thread are used without it, but for the moments in which the ledger is looked at or changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable

from arrowbank.archive import compaction, healing, revival
from arrowbank.archive.carry import Carried
from arrowbank.archive.compaction import Made, Task
from arrowbank.archive.compactor import Compactor
from arrowbank.archive.parquet import told_as_damage
from arrowbank.archive.store import ArchiveStore, Change
from arrowbank.durable import quarantine
from arrowbank.durable.appender import Appender
from arrowbank.durable.history import History
from arrowbank.durable.journal import Facts, Journal, Snapshot
from arrowbank.durable.layout import JournalName, SegmentName
from arrowbank.durable.ledger import Ledger
from arrowbank.durable.recovery import State, read_groups, read_state
from arrowbank.durable.snapshot import make_snapshot
from arrowbank.durable.stream import Damage, map_file

__all__ = ["Archivist"]

_log = logging.getLogger("arrowbank")

MAX_JOURNAL_PARTS = 16
"""At open, a journal of more files than this is summed up in one: sessions that never got to a checkpoint leave one
each."""


class Archivist:
    """Archives for one session."""

    def __init__(
        self,
        store: ArchiveStore,
        ledger: Ledger,
        journal: Journal,
        appender: Appender,
        *,
        lock: threading.RLock,
        check_fence: Callable[[], None],
        on_freed: Callable[[], None],
    ) -> None:
        self.store = store
        self._root = store.paths.root
        self._ledger, self._journal, self._appender = ledger, journal, appender
        self._lock = lock
        self._check_fence = check_fence
        self._on_freed = on_freed
        self._kept: set[Damage] = set()
        """Damage of journals that lies in quarantine."""
        self.compactor = Compactor(
            store, plan=self._plan, roll=self._roll, forget=self._forget, check_fence=check_fence
        )

    def horizon(self, keep_checkpoints: int) -> int:
        """The checkpoint up to which settled draws go to the archive: the oldest of those kept."""
        newest = self._ledger.line.checkpoints.newest(keep_checkpoints)
        return newest[-1] if len(newest) == keep_checkpoints else 0

    def heal(self, *, accepted: bool = False, gone: Collection[SegmentName] = ()) -> None:
        """Have whole files only: what is good in damaged ones is copied, their damage kept in quarantine. At open.

        Also makes one file of a journal that has become many. Leaves everything as it is while a damaged journal may
        hide a draw, until that is ``accepted``. After a failure to write, the next open tries again: all that can be
        read can be read without this, too. gone: segments that are not there and are not to be missed any more.
        Raises: FencedError; CorruptionError, OSError where a file cannot be read.
        """
        state = self._ledger.state
        segments = {damage.name for damage in state.damage} & set(map(str, state.segment_bytes))
        is_long = state.journal_parts > MAX_JOURNAL_PARTS
        is_torn = any(part.length for part in _journal_damage(state))
        if (state.hidden and not accepted) or not (segments or is_long or is_torn or accepted or gone):
            return
        try:
            self._ledger.seal()
            healed = healing.copy(self.store, state, segments)
            self.store.commit(
                Change(
                    retired=(*healed.retired, *(name for name in gone if name.is_carried)),
                    carried=tuple(carried.name for carried in healed.carried),
                ),
                lambda: self._sum_up(state.history, healed.carried, {*segments, *map(str, gone)}),
            )
        except OSError as error:
            self._check_fence()
            self.store.discard_unfinished()
            _log.warning("%s: damaged files could not be copied; the next open tries again: %s", self._root, error)
            return
        self._swap(healed.retired, [group.uid for carried in healed.carried for group in carried.groups], ())
        copies = {one.name: map_file(self.store.paths.segments / str(one.name)) for one in healed.carried}
        read_groups(copies, self.store.manifest, state)  # mapped, since a restore hands them back
        try:
            self.store.commit(Change())  # which takes away the damaged files
        except OSError as error:
            self._check_fence()
            _log.warning("%s: damaged files were copied, and could not be removed yet: %s", self._root, error)

    def revive(self, iteration: int) -> int:
        """Bring groups that a restore of ``iteration`` rolls back out of the archive; return how many.

        Durability: one commit. Raises ReplayUnavailableError, CorruptionError, FencedError, OSError; then nothing has
        changed.
        """
        try:
            with told_as_damage(self.store.paths.version(self.store.manifest.version)):
                made = revival.prepare(self.store, self._ledger.state.history, iteration)
        except BaseException:
            self.store.discard_unfinished()
            raise
        history = self._ledger.state.history.copy()
        history.revive(made.draws)
        history.evicted = made.evicted | history.evicted
        change = Change(
            file=made.file,
            replaced=made.replaced,
            carried=tuple(carried.name for carried in made.carried),
            archived_through=iteration,
        )
        self.store.commit(change, lambda: self._sum_up(history, made.carried))
        self.compactor.error = self.store.unfinished or self.compactor.error
        state, old = read_state(self.store.paths, self.store.manifest), self._ledger.state
        # Damage of files that are not read any more is still to be told.
        found = set(state.damage)
        state.damage[:0] = [damage for damage in old.damage if damage not in found]
        state.lost = old.lost | state.lost
        self._ledger.reload(state)
        return sum(len(carried.groups) for carried in made.carried)

    # -- what the compactor asks

    def _plan(self, settled_by: int) -> Task | None:
        """Tell the compactor what is finished; nothing, while a damaged journal may hide what became of it."""
        with self._lock:
            self._check_fence()
            if self._ledger.state.hidden:
                return None
            # In this order: a segment that was made before the first look and is not active at the second one gets
            # no more groups, and those it has got are among the arrivals.
            state = self._ledger.state
            made = {*state.segment_bytes, *self._appender.sizes.copy()}
            active = self._appender.active_names()
            self._ledger.take_arrivals()
            made |= self._ledger.look_at_writers()
            return compaction.plan(
                self.store.paths.root,
                self.store.manifest.bank_id,
                state,
                settled_by,
                [name for name in made if str(name) not in active],
                self.store.target(),
                session=self.store.session,
                number=self.store.next_number(),
            )

    def _roll(self, task: Task, made: Made) -> JournalName:
        """Begin a new part of the journal, without what the task archives."""
        leaving = set(map(str, task.segments))
        with self._lock:
            self._ledger.take_arrivals()
            self._ledger.let_go(leaving)
            history = self._ledger.state.history.copy()
            history.forget(task.fates, self._ledger.state.groups.keys() - task.fates.keys())
            return self._sum_up(history, made.carried, leaving)

    def _forget(self, task: Task, made: Made) -> None:
        """Let go of what is archived now."""
        with self._lock:
            self._ledger.take_arrivals()
            self._swap(task.segments, task.fates, made.carried)
            self._ledger.state.history.forget(task.fates, self._ledger.state.groups)
            self._on_freed()

    def _swap(self, retired: Collection[SegmentName], archived: Iterable[str], carried: Iterable[Carried]) -> None:
        """Carried segments, and the archive, have taken the place of others."""
        state = self._ledger.state
        for uid in archived:
            state.groups.pop(uid, None)
        for name in retired:
            state.segment_bytes.pop(name, None)
            self._appender.sizes.pop(name, None)
        self._ledger.writers.let_go(retired)
        for segment in carried:
            state.segment_bytes[segment.name] = segment.nbytes
            state.groups |= {group.uid: group for group in segment.groups}
        self._journal.forget(map(str, retired))

    def _sum_up(self, history: History, carried: tuple[Carried, ...], leaving: set[str] | None = None) -> JournalName:
        """Begin a new part of the journal that sums up a history, and the facts of segments that stay."""
        damage = {part for part in _journal_damage(self._ledger.state) if part.length} - self._kept
        quarantine.keep(self.store.paths, self.store.tmp, damage)  # a later commit removes the parts so far

        def snapshot(facts: Facts) -> Snapshot:
            # By what is known to be gone, not by what is known to be there: an append may open a segment just now and
            # fail. Of parts of the journal before this one nothing need be known any more.
            named = {*facts.abandoned, *facts.records}
            kept = facts.without({*(leaving or ()), *filter(JournalName.parse, named)})
            kept.records |= {str(segment.name): len(segment.groups) for segment in carried}
            return make_snapshot(history, kept)

        self._kept |= damage
        return self._journal.roll(snapshot)


def _journal_damage(state: State) -> list[Damage]:
    return [part for part in state.damage if JournalName.parse(part.name)]
