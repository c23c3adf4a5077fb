"""What a bank tells the trainer: what a restore hands back, and counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from arrowbank.codec import StoredGroup
from arrowbank.durable.line import Line, LineDraw
from arrowbank.durable.recovery import State
from arrowbank.durable.segment import GroupRef, describe, load_rollouts
from arrowbank.types import GroupQueuesPerEnv, RolloutGroup

__all__ = ["BankStats", "Draw", "RestoreReport", "Restored", "hand_back"]


@dataclass(frozen=True, slots=True)
class Draw:
    """A batch to train on again, exactly as it was."""

    iteration: int
    """The iteration it was drawn at."""
    index: int
    """Its place among the draws of that iteration."""
    span: int
    """Optimizer steps that it feeds."""
    offset: int
    """How many of them the restored checkpoint already holds."""
    groups: list[RolloutGroup]
    """In the order of the batch."""
    state: bytes | None
    """What the trainer gave with ``mark_consumed``."""
    lost: tuple[str, ...] = ()
    """uids of groups of this draw that cannot be given back: damaged, or evicted since."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore found, as the files stood at open."""

    draws: int
    planned_groups: int
    pending_groups: int
    nbytes: int
    """Of live segments."""
    damage: tuple[str, ...]
    """One line for each damaged place: file, offset, what."""
    lost_records: int
    """Records that were acknowledged and cannot be read."""
    seconds: float
    """Of opening and restoring."""
    recorded: bool = True
    """Whether ``checkpoint`` was called for the restored checkpoint; otherwise its line was inferred."""

    def __str__(self) -> str:
        lines = [
            f"replay: {self.draws} draws, {self.planned_groups} groups",
            f"pending: {self.pending_groups} groups",
            f"read: {self.nbytes:,} bytes in {self.seconds:.2f} s",
            f"damage: {'; '.join(self.damage) or 'none'}",
            f"lost: {self.lost_records} records",
        ]
        if not self.recorded:
            lines.append("no session recorded this checkpoint: took the newest line that may have got to it")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Restored:
    """The state that a model checkpoint stands for."""

    iteration: int
    draws: list[Draw]
    """To be replayed, in order."""
    pending: GroupQueuesPerEnv
    """Finished groups that were never trained on, by environment, oldest first."""
    source_indices: frozenset[int]
    """Which prompts of their source the planned and the pending groups came from: no need to generate these again."""
    report: RestoreReport


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


def hand_back(state: State, line: Line, *, live_bytes: int, seconds: float) -> Restored:
    """Return what a line, just resumed, says of the groups that are there."""
    draws = [_draw(state, line, draw) for draw in line.plan()]
    handed = {group.uid for draw in draws for group in draw.groups}
    pending: GroupQueuesPerEnv = {}
    for uid, ref in sorted(state.groups.items(), key=lambda item: item[1].age):
        if ref.head["split"] == "train" and uid not in state.history.evicted and line.find(uid) is None:
            pending.setdefault(ref.head["env"], deque()).append(_stored(ref))
            handed.add(uid)
    sources = (ref.head.get("source_index") for uid, ref in state.groups.items() if uid in handed)
    report = RestoreReport(
        draws=len(draws),
        planned_groups=sum(len(draw.groups) for draw in draws),
        pending_groups=sum(map(len, pending.values())),
        nbytes=live_bytes,
        damage=tuple(map(describe, state.damage)),
        lost_records=sum(state.lost.values()),
        seconds=seconds,
        recorded=not line.resumed or line.resumed in line.checkpoints,
    )
    return Restored(line.resumed, draws, pending, frozenset(at for at in sources if at is not None), report)


def _draw(state: State, line: Line, draw: LineDraw) -> Draw:
    there = [uid for uid in draw.uids if uid in state.groups and uid not in state.history.evicted]
    return Draw(
        iteration=draw.iteration,
        index=line.planned[draw.iteration].index(draw),
        span=draw.span,
        offset=max(line.resumed - draw.iteration, 0),
        groups=[_stored(state.groups[uid]) for uid in there],
        state=draw.state,
        lost=tuple(uid for uid in draw.uids if uid not in there),
    )


def _stored(ref: GroupRef) -> StoredGroup:
    assert ref.record is not None  # a restore hands back what was read from files
    return StoredGroup.of(ref.head, partial(load_rollouts, ref.record))
