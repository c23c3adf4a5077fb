"""Compaction: finished segments to Parquet, in three steps: plan, execute, commit.

``plan`` picks whole finished segments whose groups are all settled, evicted or never to be drawn, and says what the
line knows of each group. ``execute`` writes one Parquet file under tmp/ from a picklable task; it may run in any
thread. The commit gives the file its name and replaces the manifest; only a later commit unlinks the segments, so that
readers who hold the old manifest can still open what it names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from arrowbank.archive.rows import widen
from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.line import History, Line, LineDraw
from arrowbank.durable.manifest import ArchiveFile
from arrowbank.durable.recovery import State
from arrowbank.durable.segment import GroupRef, read_segment
from arrowbank.durable.stream import Damage
from arrowbank.errors import CorruptRecordError
from arrowbank.schema import ARCHIVE_SCHEMA, SEGMENT_SCHEMA

__all__ = ["Fate", "Task", "archive_rows", "execute", "fates", "plan", "write_parquet"]

ROW_GROUP_BYTES = 8 << 20
"""A row group is cut at the next iteration's first group once it has this much payload."""
TABLE_BYTES = 256 << 20
"""Rows are widened and written in portions of about this many segment bytes, which bounds memory."""

_SPLIT_COLUMNS = ("tokens.list.element", "logprobs.list.element", "reward", "advantage_override")
_DICTIONARY_COLUMNS = [
    "group_uid", "env_id", "problem_id", "prompt_hash", "split", "kind", "run_id", "writer", "rollout_status",
    "failure_reason", "outcome", "evict_reason", "metrics.list.element.key",
]  # fmt: skip


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
    """One Parquet file to be made. Picklable."""

    root: Path
    bank_id: str
    segments: tuple[SegmentName, ...]
    fates: dict[str, Fate]
    """Of every group that goes into the file."""
    places: dict[str, tuple[SegmentName, int]]
    """Where it is: a failed append may have left another record of the same group."""
    torn: tuple[Damage, ...]
    """Unfinished tails of the segments: to be quarantined before anything is unlinked."""
    settled_by: int
    """The checkpoint whose settled draws are archived."""
    target: Path
    """Under the session's tmp/."""


def fates(history: History, line: Line | None, settled_by: int, uids: Iterable[str]) -> dict[str, Fate]:
    """Return what is known of those groups that were drawn on the line, or evicted; the others are pending."""
    known: dict[str, Fate] = {}
    places: dict[LineDraw, tuple[int, dict[str, int]]] = {}
    for uid in uids:
        draw = line.find(uid) if line else None
        settled = draw is not None and draw.end <= settled_by
        if uid in history.evicted and not settled:
            known[uid] = Fate(outcome="evicted", evict_reason=history.evicted[uid])
        elif draw is not None and line is not None:
            if draw not in places:
                positions = {drawn: position for position, drawn in enumerate(draw.uids)}
                places[draw] = line.at(draw.iteration).index(draw), positions
            index, positions = places[draw]
            known[uid] = Fate(
                draw.iteration, index, positions[uid], len(draw.uids), draw.session,
                draw.state if positions[uid] == 0 else None, draw.span, "consumed" if settled else None,
            )  # fmt: skip
    return known


def plan(
    root: Path, bank_id: str, state: State, line: Line, settled_by: int, finished: Iterable[SegmentName], target: Path
) -> Task | None:
    """Choose those ``finished`` segments that have nothing in them that a resume could still hand out.

    Corrupt ones, and those that lost a record, stay as they are; of torn ones the tail is to be quarantined first.
    Returns None when there is nothing to archive.
    """
    damaged = {damage.name for damage in state.damage if not damage.torn} | state.lost.keys()
    over = {name for name in finished if str(name) not in damaged}
    known = fates(state.history, line, settled_by, state.groups)
    for group in state.groups.values():
        fate = known.get(group.uid, Fate())
        never_drawn = group.head["split"] != "train" and fate == Fate()
        if fate.outcome is None and not never_drawn:
            over.discard(group.segment)
    if not over:
        return None
    taken = {group.uid: group for group in state.groups.values() if group.segment in over}
    places = {uid: (group.segment, group.sequence) for uid, group in taken.items()}
    chosen = {uid: known.get(uid, Fate()) for uid in taken}
    torn = tuple(damage for damage in state.damage if damage.name in set(map(str, over)))
    return Task(root, bank_id, tuple(sorted(over)), chosen, places, torn, settled_by, target)


def execute(task: Task) -> ArchiveFile | None:
    """Write the task's Parquet file, complete, synced and checked against what went in; None for no groups.

    Raises CorruptRecordError when a segment has not got every group that the task names; OSError.
    """
    paths = BankPaths(task.root)
    groups = _groups_of(paths, task)
    if not groups:
        return None
    groups.sort(key=lambda group: (task.fates[group.uid].order, group.age))
    portions = (archive_rows(portion, task.fates, task.bank_id) for portion in _portions(groups))
    rows = write_parquet(task.target, portions)
    expected = sum(max(group.head["size"], 1) for group in groups)
    if rows != expected or pq.read_metadata(task.target).num_rows != expected:
        raise CorruptRecordError(task.target, f"{rows} rows were written where the segments have {expected}")
    digest, nbytes = _digest(task.target)
    return ArchiveFile(name=task.target.name, rows=rows, groups=len(groups), nbytes=nbytes, digest=digest)


def archive_rows(groups: list[GroupRef], known: dict[str, Fate], bank_id: str) -> pa.Table:
    """Return the groups' rows, in this order, with every column of ``ARCHIVE_SCHEMA``."""
    batches = []
    for group in groups:
        assert group.record is not None
        batches.append(group.record.batch(SEGMENT_SCHEMA))
    rows = widen(pa.Table.from_batches(batches, SEGMENT_SCHEMA), bank_id)
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


def write_parquet(path: Path, tables: Iterable[pa.Table]) -> int:
    """Write tables to a new file and sync it; return the number of rows. A failure leaves no file."""
    rows = 0
    try:
        with pq.ParquetWriter(path, ARCHIVE_SCHEMA, **_WRITER_OPTIONS) as writer:
            for table in tables:
                for start, length in _row_groups(table):
                    writer.write_table(table.slice(start, length), row_group_size=max(length, 1))
                rows += table.num_rows
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)  # the writer finishes even a partial file with a valid footer
        raise
    return rows


_WRITER_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": _DICTIONARY_COLUMNS,
    "column_encoding": dict.fromkeys(_SPLIT_COLUMNS, "BYTE_STREAM_SPLIT"),
    "write_page_index": True,
    "write_page_checksum": True,
    "store_schema": True,
}


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
            uid = record.head["uid"]
            if task.places.get(uid) == (name, record.sequence):
                found[uid] = GroupRef(uid, name, record.sequence, record.head, record)
    missing = sorted(task.fates.keys() - found.keys())
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


def _row_groups(table: pa.Table) -> Iterator[tuple[int, int]]:
    """Cut a sorted table at iteration boundaries, once over ROW_GROUP_BYTES; yield start and length."""
    if not table.num_rows:
        yield 0, 0
        return
    iterations = table["consumed_iteration"].to_pylist()
    bytes_per_row = table.nbytes / table.num_rows
    start = 0
    for row in range(1, table.num_rows):
        if iterations[row] != iterations[row - 1] and (row - start) * bytes_per_row >= ROW_GROUP_BYTES:
            yield start, row - start
            start = row
    yield start, table.num_rows - start


def _digest(path: Path) -> tuple[str, int]:
    digest, nbytes = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            nbytes += len(block)
    return digest.hexdigest(), nbytes
