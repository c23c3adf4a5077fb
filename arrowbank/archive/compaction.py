"""Compaction: finished segments to Parquet, in three steps: plan, execute, commit.

``plan`` picks whole finished segments in which groups are settled, evicted or never to be drawn, and says what the
line knows of each of these. ``execute`` writes them to one Parquet file, and the segments' other groups to a carried
segment, both under tmp/, from a picklable task; it may run in any thread. The commit gives the files their names and
replaces the manifest; only a later commit unlinks the segments, so that readers who hold the old manifest can still
open what it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from arrowbank.archive.carry import Carried, CarryWriter
from arrowbank.archive.parquet import TABLE_BYTES, describe_file, write_parquet
from arrowbank.archive.rows import widen
from arrowbank.durable.history import History
from arrowbank.durable.layout import CARRY, BankPaths, SegmentName
from arrowbank.durable.line import Line, LineDraw
from arrowbank.durable.manifest import ArchiveFile
from arrowbank.durable.recovery import State
from arrowbank.durable.segment import NOT_A_GROUP, GroupRef, load_batch, read_segment, told_as_damage
from arrowbank.durable.stream import Damage
from arrowbank.errors import CorruptRecordError
from arrowbank.schema import ARCHIVE_SCHEMA, SEGMENT_SCHEMA

__all__ = ["Fate", "Made", "Task", "archive_rows", "execute", "fates", "plan"]

MAX_CARRIED = 16
"""With more carried segments than this, all of them are taken and become one."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What the line knows of a group: the archive's own columns. The defaults are those of a pending group."""

    consumed_iteration: int | None = None
    consumed_draw: int | None = None
    consumed_position: int | None = None
    draw_size: int | None = None
    draw_session: int | None = None
    draw_state: bytes | None = None
    span: int | None = None
    outcome: str | None = None
    evict_reason: str | None = None

    @property
    def order(self) -> tuple[float, float, float]:
        """Sorts groups by when they were consumed, those that were not last."""
        parts = (self.consumed_iteration, self.consumed_draw, self.consumed_position)
        iteration, draw, position = (float("inf") if part is None else part for part in parts)
        return iteration, draw, position


@dataclass(frozen=True, slots=True)
class Task:
    """One Parquet file and one carried segment to be made. Picklable."""

    root: Path
    bank_id: str
    segments: tuple[SegmentName, ...]
    fates: dict[str, Fate]
    """Of every group that goes into the file."""
    places: dict[str, tuple[SegmentName, int]]
    """Where each group is, these and the ones to be carried: a failed append may have left another record of it."""
    torn: tuple[Damage, ...]
    """Unfinished tails of the segments: to be quarantined before anything is unlinked."""
    settled_by: int
    """The checkpoint whose settled draws are archived."""
    target: Path
    """Under the session's tmp/."""
    session: int
    number: int
    """The carried segment's."""

    @property
    def carried(self) -> list[str]:
        """Groups that stay live."""
        return [uid for uid in self.places if uid not in self.fates]


@dataclass(frozen=True, slots=True)
class Made:
    """What a task has made under tmp/."""

    file: ArchiveFile | None
    carried: tuple[Carried, ...]


def fates(history: History, line: Line | None, settled_by: int, uids: Iterable[str]) -> dict[str, Fate]:
    """Return what is known of those groups that were drawn on the line, or evicted; the others are pending."""
    known: dict[str, Fate] = {}
    places: dict[LineDraw, dict[str, int]] = {}
    for uid in uids:
        draw = line.find(uid) if line else None
        settled = draw is not None and draw.end <= settled_by
        if uid in history.evicted and not settled:
            known[uid] = Fate(outcome="evicted", evict_reason=history.evicted[uid])
        elif draw is not None:
            if draw not in places:
                places[draw] = {drawn: position for position, drawn in enumerate(draw.uids)}
            positions = places[draw]
            known[uid] = Fate(
                draw.iteration, draw.index, positions[uid], len(draw.uids), draw.session,
                draw.state if positions[uid] == 0 else None, draw.span, "consumed" if settled else None,
                history.evicted.get(uid),  # on another line: settled beats evicted, until a restore rolls it back
            )  # fmt: skip
    return known


def plan(
    root: Path,
    bank_id: str,
    state: State,
    settled_by: int,
    finished: Iterable[SegmentName],
    target: Path,
    *,
    session: int,
    number: int,
) -> Task | None:
    """Choose those ``finished`` segments that have something in them that no resume hands out any more.

    Corrupt ones, and those that lost a record, stay as they are; of torn ones the tail is to be quarantined first.
    Returns None when there is nothing to archive.
    """
    damaged = {damage.name for damage in state.damage if not damage.torn} | state.lost.keys()
    whole = {name for name in finished if str(name) not in damaged}
    inside = [group for group in state.groups.values() if group.segment in whole]
    over = {group.uid for group in inside if _is_over(group, state.history, settled_by)}
    chosen = whole - {group.segment for group in inside if group.uid not in over}
    chosen |= {group.segment for group in inside if group.uid in over}
    carried = {name for name in whole if name.is_carried}
    if chosen and len(carried) > MAX_CARRIED:
        chosen |= carried
    if not chosen:
        return None
    taken = [group for group in inside if group.segment in chosen]
    archived = [group.uid for group in taken if group.uid in over]
    line = state.history.lines[max(state.history.lines)] if state.history.lines else None
    known = fates(state.history, line, settled_by, archived)
    names = set(map(str, chosen))
    return Task(
        root=root,
        bank_id=bank_id,
        segments=tuple(sorted(chosen)),
        fates={uid: known.get(uid, Fate()) for uid in archived},
        places={group.uid: (group.segment, group.sequence) for group in taken},
        torn=tuple(damage for damage in state.damage if damage.name in names),
        settled_by=settled_by,
        target=target,
        session=session,
        number=number,
    )


def _is_over(group: GroupRef, history: History, settled_by: int) -> bool:
    """Whether no resume hands the group out any more, and all lines that are kept agree why."""
    endings = {_ending(group, history, line, settled_by) for line in history.lines.values() or (None,)}
    return len(endings) == 1 and None not in endings


def _ending(group: GroupRef, history: History, line: Line | None, settled_by: int) -> object:
    """What became of a group on a line; None while that is open."""
    draw = line.find(group.uid) if line is not None else None
    if line is not None and draw is not None and (line.is_made(draw) or line.cuts(draw)):
        return (draw.iteration, draw.index, draw.span) if draw.end <= settled_by else None
    if group.uid in history.evicted:
        return "evicted"
    return "never drawn" if group.head["split"] != "train" else None


def execute(task: Task) -> Made:
    """Write the task's files, complete, synced and checked against what went in.

    Raises CorruptRecordError when a segment has not got every group that the task names; OSError.
    """
    paths = BankPaths(task.root)
    groups = _groups_of(paths, task)
    carried = _carry(paths, task, sorted((group for group in groups if group.uid not in task.fates), key=_age))
    archived = [group for group in groups if group.uid in task.fates]
    if not archived:
        return Made(None, carried)
    archived.sort(key=lambda group: (task.fates[group.uid].order, group.age))
    portions = (archive_rows(portion, task.fates, task.bank_id) for portion in _portions(archived))
    rows = write_parquet(task.target, portions)
    expected = sum(max(group.head["size"], 1) for group in archived)
    return Made(describe_file(task.target, rows=rows, expected=expected, groups=len(archived)), carried)


def _age(group: GroupRef) -> tuple[int, ...]:
    return group.age


def _carry(paths: BankPaths, task: Task, groups: list[GroupRef]) -> tuple[Carried, ...]:
    def name(iteration: int) -> SegmentName:
        return SegmentName(task.session, iteration, task.number, CARRY)

    writer = CarryWriter(paths, task.target.parent, task.bank_id, name)
    try:
        for group in groups:
            assert group.record is not None
            head = {"session": group.segment.session} | group.head
            writer.add(load_batch(group.record), head)
        writer.finish()
    finally:
        writer.close()
    return tuple(writer.done)


def archive_rows(groups: list[GroupRef], known: dict[str, Fate], bank_id: str) -> pa.Table:
    """Return the groups' rows, in this order, with every column of ``ARCHIVE_SCHEMA``.

    Raises CorruptRecordError for a record that is sealed and still no group's.
    """
    batches = []
    for group in groups:
        assert group.record is not None
        batches.append(load_batch(group.record))
    rows = _widened(groups, batches, bank_id)
    each = [
        (known.get(group.uid, Fate()), row) for group, batch in zip(groups, batches, strict=True)
        for row in range(batch.num_rows)
    ]  # fmt: skip
    columns = []
    for field in list(ARCHIVE_SCHEMA)[len(rows.schema) :]:
        values = [
            getattr(fate, field.name, None) if row == 0 or field.name != "draw_state" else None for fate, row in each
        ]
        columns.append(_lag(each, rows) if field.name == "lag" else pa.array(values, field.type))
    return pa.Table.from_arrays([*rows.columns, *columns], schema=ARCHIVE_SCHEMA)


def _widened(groups: list[GroupRef], batches: list[pa.RecordBatch], bank_id: str) -> pa.Table:
    """Widen all rows at once; when that fails, say whose they are."""
    try:
        return widen(pa.Table.from_batches(batches, SEGMENT_SCHEMA), bank_id)
    except NOT_A_GROUP:
        for group, batch in zip(groups, batches, strict=True):
            assert group.record is not None
            with told_as_damage(group.record):
                widen(pa.Table.from_batches([batch], SEGMENT_SCHEMA), bank_id)
        raise


def _lag(each: list[tuple[Fate, int]], rows: pa.Table) -> pa.Array:
    """Iteration of the draw minus the oldest policy version of the whole group."""
    oldest: dict[str, int] = {}
    uids, versions = rows["group_uid"].to_pylist(), rows["oldest_policy_version"].to_pylist()
    for uid, version in zip(uids, versions, strict=True):
        if version is not None:
            oldest[uid] = min(version, oldest.get(uid, version))
    lags = [
        None if fate.consumed_iteration is None or uid not in oldest else fate.consumed_iteration - oldest[uid]
        for uid, (fate, _) in zip(uids, each, strict=True)
    ]
    return pa.array(lags, pa.int64())


def _groups_of(paths: BankPaths, task: Task) -> list[GroupRef]:
    """Map the task's groups."""
    found: dict[str, GroupRef] = {}
    for name in task.segments:
        scan, _ = read_segment(paths.segments / str(name), task.bank_id)
        for record in scan.records:
            uid = record.head.get("uid")
            if uid is not None and task.places.get(uid) == (name, record.sequence):
                found[uid] = GroupRef(uid, name, record.sequence, record.head, record)
    missing = sorted(task.places.keys() - found.keys())
    if missing:
        raise CorruptRecordError(
            paths.segments, f"{len(missing)} groups cannot be read back, the first is {missing[0]}", hint="See verify"
        )
    return list(found.values())


def _portions(groups: list[GroupRef]) -> Iterator[list[GroupRef]]:
    portion: list[GroupRef] = []
    nbytes = 0
    for group in groups:
        assert group.record is not None
        if portion and nbytes + len(group.record.message) > TABLE_BYTES:
            yield portion
            portion, nbytes = [], 0
        portion.append(group)
        nbytes += len(group.record.message)
    if portion:
        yield portion
