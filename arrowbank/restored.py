"""What a bank tells the trainer: what a restore hands back, and counts."""

from __future__ import annotations

import heapq
import operator
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from arrowbank.codec import StoredGroup
from arrowbank.durable.ledger import Ledger
from arrowbank.durable.line import Line, LineDraw
from arrowbank.durable.recovery import State
from arrowbank.durable.segment import GroupRef, describe, load_rollouts
from arrowbank.types import EnvId, GroupQueuesPerEnv, RolloutGroup

__all__ = ["BankStats", "Draw", "RestoreReport", "Restored", "hand_back"]


@dataclass(frozen=True, slots=True)
class Draw:
    """A batch to train on again, exactly as it was.

    Train on it and mark it like any other: ``mark_consumed(uids, k, span=draw.span, state=draw.state)``, with the k at
    which it is trained. One that is passed over is void: its groups are pending again.
    """

    iteration: int
    """The iteration it was drawn at."""
    index: int
    """Its place among the draws of that iteration."""
    span: int
    """Optimizer steps that it feeds."""
    offset: int
    """How many of them the restored checkpoint already holds: train the others, and mark the draw at the resumed
    iteration. It stays the draw that it was."""
    groups: list[RolloutGroup]
    """In the order of the batch."""
    state: bytes | None
    """What the trainer gave with ``mark_consumed``."""
    lost: tuple[str, ...] = ()
    """uids of groups of this draw that cannot be given back: damaged, or evicted since."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore found, as the files stood at open. Prints as five lines."""

    iteration: int
    """The restored checkpoint."""
    session: int
    """The session that the restore began."""
    parent: int | None
    """The session whose line it went on from; None on a bank without any."""
    recorded: bool
    """Whether ``checkpoint`` was called for the restored checkpoint; otherwise its line was inferred."""
    guessed: bool
    """Whether not even a session is known that got to it: then all that was drawn before it counts as trained on."""
    rivals: tuple[int, ...]
    """Newer sessions that may have saved a model at this checkpoint, too; empty when a session was named."""
    draws: int
    planned_groups: int
    pending_groups: int
    revived_groups: int
    """Groups that left the archive for this restore."""
    nbytes: int
    """Of live segments."""
    seconds: float
    """Of opening and restoring."""
    torn: tuple[str, ...]
    """One line for each unfinished tail, as a kill leaves it: file, offset, what."""
    corrupt: tuple[str, ...]
    """One line for each otherwise damaged place."""
    lost_records: int
    """Records that were acknowledged and cannot be read."""
    quarantined: int
    """Damaged parts of files that lie in quarantine/, from this open and from earlier ones."""
    lost_groups: int
    """Groups of planned draws that cannot be given back: damaged, or evicted since."""

    @property
    def damage(self) -> tuple[str, ...]:
        """All damaged places."""
        return self.torn + self.corrupt

    def __str__(self) -> str:
        line = "an empty bank" if self.parent is None else f"the line of session {self.parent}"
        inferred = "" if self.recorded else "; no session recorded this checkpoint: the line was inferred"
        if self.guessed:
            inferred = "; no session is known to have got there: all that was drawn before counts as trained on"
        if self.rivals:
            inferred += f"; sessions {list(self.rivals)} may have got there, too: session= says whose weights these are"
        lost = f", {self.lost_groups} more are lost" if self.lost_groups else ""
        revived = f"; {self.revived_groups} groups came back from the archive" if self.revived_groups else ""
        kept = f", {self.quarantined} places in quarantine/" if self.quarantined else ""
        places = f": {'; '.join(self.damage)}" if self.damage else ""
        return "\n".join(
            [
                f"checkpoint {self.iteration} on {line}, now session {self.session}{inferred}",
                f"replay: {self.draws} draws, {self.planned_groups} groups{lost}",
                f"pending: {self.pending_groups} groups",
                f"read: {self.nbytes:,} bytes in {self.seconds:.2f} s{revived}",
                f"damage: {len(self.torn)} torn, {len(self.corrupt)} corrupt, {self.lost_records} records lost"
                f"{kept}{places}",
            ]
        )


@dataclass(frozen=True, slots=True)
class Restored:
    """The state that a model checkpoint stands for."""

    iteration: int
    draws: list[Draw]
    """To be replayed, in order."""
    pending: GroupQueuesPerEnv
    """Finished groups that were never trained on, by environment, oldest first."""
    source_indices: frozenset[int]
    """Which prompts of their source the planned and the pending groups came from: no need to generate these again.
    Those of settled groups are not among them; the trainer's own ``state`` tells how far it had got."""
    report: RestoreReport
    _ages: dict[str, tuple[int, str | None, int]] = field(default_factory=dict, repr=False, compare=False)
    """Pending group → its rank by age, its problem where its rollouts agree on one, and the iteration of its finish."""
    _taking: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def take(self, n: int = 1, *, env_id: EnvId | None = None, problem_id: str | None = None) -> list[RolloutGroup]:
        """Take up to ``n`` pending groups, oldest first, each once: they leave ``pending``.

        env_id, problem_id: only groups of that environment, of that problem. For trainers that own their loop and ask
        for the groups of particular prompts; generate what is missing.

        Durability: nothing is recorded; that is ``mark_consumed``. A group taken and not drawn is pending again after
        the next restore. Thread-safe.
        """
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"take({n}): a number of groups, 0 or more")
        with self._taking:
            queues = self.pending.values() if env_id is None else [self.pending.get(env_id, deque())]
            matching = [
                group for queue in queues for group in queue if problem_id is None or self._age(group)[1] == problem_id
            ]
            taken = heapq.nsmallest(n, matching, key=lambda group: self._age(group)[0])
            gone = {id(group) for group in taken}
            for queue in queues if taken else ():
                left = [group for group in queue if id(group) not in gone]
                queue.clear()
                queue.extend(left)
        return taken

    def collected_iteration(self, group: RolloutGroup) -> int | None:
        """Return the iteration at which a pending group was finished; None when it is no group of this restore."""
        return self._age(group)[2]

    def _age(self, group: RolloutGroup) -> tuple[int, str | None, int | None]:
        """A group that somebody else has put into ``pending`` is the youngest."""
        return self._ages.get(str(group.uid), (len(self._ages), None, None))


@dataclass(frozen=True, slots=True)
class BankStats:
    """Counts of one bank handle at one moment."""

    session: int
    iteration: int
    """The iteration being collected."""
    live_groups: int
    """Groups that are not archived."""
    live_bytes: int
    appended_groups: int
    """By this handle."""
    appended_bytes: int
    commits: int
    """Syncs that made groups durable; fewer than groups when they were committed together."""
    archived_files: int
    archived_groups: int
    archived_rows: int
    compaction_error: str | None
    """Why the last background compaction failed; None when it did not."""


def hand_back(ledger: Ledger, *, revived_groups: int, quarantined: int, seconds: float) -> Restored:
    """Return what the line, just resumed, says of the groups that are there."""
    state, line = ledger.state, ledger.line
    draws = [_draw(state, line, draw) for draw in line.plan()]
    handed = {group.uid for draw in draws for group in draw.groups}
    pending: GroupQueuesPerEnv = {}
    ages: dict[str, tuple[int, str | None, int]] = {}
    for uid, ref in sorted(state.groups.items(), key=lambda item: item[1].age):
        if ref.head["split"] == "train" and uid not in state.history.evicted and line.find(uid) is None:
            pending.setdefault(ref.head["env"], deque()).append(_stored(ref))
            ages[uid] = len(ages), ref.head["problem"], ref.head["iteration"]
            handed.add(uid)
    sources = (ref.head.get("source_index") for uid, ref in state.groups.items() if uid in handed)
    report = RestoreReport(
        iteration=line.resumed,
        session=line.session,
        parent=line.parent,
        recorded=not line.resumed or line.resumed in line.checkpoints,
        guessed=ledger.guessed,
        rivals=ledger.rivals,
        draws=len(draws),
        planned_groups=sum(len(draw.groups) for draw in draws),
        pending_groups=len(ages),
        revived_groups=revived_groups,
        nbytes=ledger.live_bytes,
        seconds=seconds,
        torn=tuple(describe(damage) for damage in state.damage if damage.torn),
        corrupt=tuple(describe(damage) for damage in state.damage if not damage.torn),
        quarantined=quarantined,
        lost_records=sum(state.lost.values()),
        lost_groups=sum(len(draw.lost) for draw in draws),
    )
    return Restored(line.resumed, draws, pending, frozenset(at for at in sources if at is not None), report, ages)


def _draw(state: State, line: Line, draw: LineDraw) -> Draw:
    there = [uid for uid in draw.uids if uid in state.groups and uid not in state.history.evicted]
    return Draw(
        iteration=draw.iteration,
        index=draw.index,
        span=draw.span,
        offset=max(line.resumed - draw.iteration, 0),
        groups=[_stored(state.groups[uid]) for uid in there],
        state=draw.state,
        lost=tuple(uid for uid in draw.uids if uid not in there),
    )


def _stored(ref: GroupRef) -> StoredGroup:
    assert ref.record is not None  # a restore hands back what was read from files
    return StoredGroup.of(ref.head, partial(load_rollouts, ref.record))
