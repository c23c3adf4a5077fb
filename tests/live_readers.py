"""Readers of a bank that is being written: plain Arrow and Parquet ones, and ``scan``; each row they see is checked.

A row's reward tells its group's serial number and its place, and so all that must be in it (``kill_child``).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from kill_child import digest, make_group, reward_of, serial_of
from kill_model import Violation, check_each_rollout_once, expected_digest

import arrowbank
from arrowbank import TokenRollout

__all__ = [
    "COLUMNS", "READERS", "NotAll", "Reader", "Seen", "arrow_file", "is_merged_away", "of_archive", "of_segments",
]  # fmt: skip

GROUPS_S = 1.0
"""So long a reader takes groups from a view, which is slow, before it makes the next view."""
PLAIN = ["group_uid", "reward", "member_index", "group_size", "env_id", "text"]
LISTS = ["tokens", "generation_mask", "logprobs"]
COLUMNS = [*PLAIN, *LISTS]


class Row(NamedTuple):
    """What a row must be, all but its uid; float32 logprobs as the bits that they are."""

    member: int
    size: int
    env: str
    tokens: bytes | None
    mask: bytes | None
    logprobs: bytes | None
    text: str | None


@cache
def expected(serial: int) -> list[Row]:
    group = make_group(serial)
    rows = []
    for member, rollout in enumerate(group):
        assert rollout.reward == reward_of(serial, member)
        if isinstance(rollout, TokenRollout):
            assert rollout.generation_mask and rollout.logprobs
            parts = (rollout.trajectory[-1], rollout.generation_mask[-1], rollout.logprobs[-1])
            tokens, mask, logprobs = (part.tobytes() for part in parts)
            rows.append(Row(member, len(group), rollout.env_id or "", tokens, mask, logprobs, None))
        else:
            rows.append(Row(member, len(group), rollout.env_id or "", None, None, None, rollout.trajectory[-1]))
    return rows


@dataclass
class Seen:
    """What a reader read. The methods raise for what is wrong, and remember which uid went with which serial number."""

    reads: int = 0
    rows: int = 0
    vanished: int = 0
    """Files that were listed and gone when they were to be opened."""
    short: int = 0
    """Reads of a directory that was being removed."""
    outgrown: int = 0
    bad: list[BaseException] = field(default_factory=list)
    uids: dict[str, int] = field(default_factory=dict)
    now: set[str] = field(default_factory=set)
    """Groups of this read."""
    rows_now: int = 0
    records: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        self.now, self.rows_now = set(), 0

    def row(self, uid: str, reward: float | None, row: Row) -> None:
        serial, member = divmod(int(-1 if reward is None else reward), 8)
        if serial < 0 or member != row.member or self.uids.setdefault(uid, serial) != serial:
            raise Violation(f"group {uid}: no such reward or member: {reward}, {row}")
        if row != expected(serial)[member]:
            raise Violation(f"group {uid}: {row} where {expected(serial)[member]} was written")
        self.now.add(uid)
        self.rows_now += 1
        self.rows += 1

    def table(self, table: pa.Table | pa.RecordBatch) -> None:
        """Check Arrow rows."""
        plain = [table[name].to_numpy(zero_copy_only=False).tolist() for name in PLAIN]
        lists = [_buffers(table[name]) for name in LISTS]
        for uid, reward, member, size, env, text, *found in zip(*plain, *lists, strict=True):
            self.row(uid, reward, Row(member, size, env, *found, text))

    def frame(self, frame: pd.DataFrame) -> None:
        """Check pandas rows."""
        plain = [frame[name].tolist() for name in PLAIN]
        lists = [[None if part is None else part.tobytes() for part in frame[name]] for name in LISTS]
        for uid, reward, member, size, env, text, *found in zip(*plain, *lists, strict=True):
            self.row(uid, reward, Row(member, size, env, *found, None if pd.isna(text) else text))

    def group(self, group: arrowbank.RolloutGroup) -> None:
        """Check a group, with all its fields."""
        serial = serial_of(group)
        assert group.uid is not None
        if digest(group) != expected_digest(serial) or self.uids.setdefault(group.uid, serial) != serial:
            raise Violation(f"group {group.uid} changed: it says it is of serial {serial}")
        if group.uid in self.now:
            raise Violation(f"group {group.uid} is there twice")
        self.now.add(group.uid)
        self.rows += len(group)

    def segment(self, name: str) -> None:
        """Check that a segment that was read to its end has what it had."""
        if self.rows_now < self.records.get(name, 0):
            raise Violation(f"{name} shows {self.rows_now} rows, and {self.records[name]} before")
        self.records[name] = self.rows_now


def _buffers(column: pa.Array | pa.ChunkedArray) -> list[bytes | None]:
    """Each row's list as bytes, bit for bit."""
    found: list[bytes | None] = []
    for lists in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        values = lists.values
        if values.null_count:
            raise Violation("a null in a list that was written without any")
        if pa.types.is_boolean(values.type):
            data, width = memoryview(values.to_numpy(zero_copy_only=False).tobytes()), 1
        else:
            width = values.type.bit_width // 8
            data = memoryview(values.buffers()[1] or b"")[values.offset * width :]
        ends = (lists.offsets.to_numpy() * width).tolist()
        valid = lists.is_valid().to_numpy(zero_copy_only=False).tolist()
        found += [bytes(data[ends[at] : ends[at + 1]]) if is_there else None for at, is_there in enumerate(valid)]
    return found


# -- readers of segments


def newest_segments(bank: Path) -> list[Path]:
    """Those that are being written, and the ones before."""
    return sorted((bank / "segments").iterdir())[-3:]


def of_segments(batches: Callable[[Path], Iterable[pa.Table | pa.RecordBatch]]) -> Callable[[Path, Seen], None]:
    def read(bank: Path, seen: Seen) -> None:
        for path in newest_segments(bank):
            seen.begin()
            try:
                for batch in batches(path):
                    seen.table(batch)
            except FileNotFoundError:
                seen.vanished += 1
            except Outgrown:
                seen.outgrown += 1
            else:
                seen.segment(path.name)

    return read


class Outgrown(Exception):
    """See ``mapped``."""


def arrow_file(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            batch.validate(full=True)
            yield batch


def mapped(path: Path) -> Iterator[pa.RecordBatch]:
    """A mapping stays as long as the file was: at its end a record's first bytes may appear without the rest.

    Arrow says so with an error, after all records that were there; that is the limit of mapped files that grow.
    """
    with pa.memory_map(str(path)) as file:
        length = file.size()
        try:
            with pa.ipc.open_stream(file) as stream:
                yield from stream
        except (pa.ArrowInvalid, OSError) as error:
            cut = re.search(r"but only read|for message body", str(error))
            if not cut or path.stat().st_size <= length:  # the file did not outgrow its mapping: it is torn
                raise
            raise Outgrown from None


def polars_stream(path: Path) -> Iterator[pa.Table]:
    yield pl.read_ipc_stream(path, columns=COLUMNS).to_arrow()


def duckdb_over_arrow(path: Path) -> Iterator[pa.Table]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream, duckdb.connect() as database:
        yield database.from_arrow(stream).project(", ".join(COLUMNS)).to_arrow_table()


# -- readers of the archive


def archive_polars(directory: Path) -> pa.Table:
    return pl.read_parquet(directory / "*.parquet", columns=COLUMNS).to_arrow()


def archive_duckdb(directory: Path) -> pa.Table:
    with duckdb.connect() as database:
        query = f"SELECT {', '.join(COLUMNS)} FROM read_parquet('{directory}/*.parquet')"
        return database.sql(query).to_arrow_table()


def archive_arrow(directory: Path) -> pa.Table:
    """Not given the directory itself: there Arrow overlooks files that vanish between its listing and its stat."""
    return pq.read_table([str(file) for file in sorted(directory.glob("*.parquet"))], columns=COLUMNS)


def archive_pandas(directory: Path) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(file, columns=COLUMNS) for file in sorted(directory.glob("*.parquet"))])


def of_archive(load: Callable[[Path], Any], *, real: bool = False) -> Callable[[Path, Seen], None]:
    """real: list and open the files where the link ``archive`` leads, rather than through it."""

    def read(bank: Path, seen: Seen) -> None:
        directory = Path(os.path.realpath(bank / "archive")) if real else bank / "archive"
        rows = load(directory)
        check_each_rollout_once(pl.DataFrame({name: rows[name] for name in _KEYS}))
        seen.begin()
        if isinstance(rows, pd.DataFrame):
            seen.frame(rows)
        else:
            seen.table(rows)

    return read


_KEYS = ("group_uid", "member_index", "group_size")


def is_merged_away(error: Exception) -> bool:
    """Whether a file's name, found by a glob, was gone when the file was to be opened.

    A merge took it away, or the next session did: a kill had left it before the manifest named it.
    """
    return (isinstance(error, FileNotFoundError) or "No such file" in str(error)) and "archive/" in str(error)


# -- readers through scan


def scan_arrow(bank: Path, seen: Seen) -> None:
    _scanned(arrowbank.scan(bank).to_arrow().select(COLUMNS), seen)


def scan_polars(bank: Path, seen: Seen) -> None:
    _scanned(arrowbank.scan(bank).to_polars().select(COLUMNS).collect().to_arrow(), seen)


def _scanned(rows: pa.Table, seen: Seen) -> None:
    frame = pl.from_arrow(rows.select(_KEYS))
    assert isinstance(frame, pl.DataFrame)
    check_each_rollout_once(frame)
    seen.begin()
    seen.table(rows)


def scan_groups(bank: Path, seen: Seen) -> None:
    """Read the groups of a view, or the first of them."""
    seen.begin()
    view = arrowbank.scan(bank)
    began = time.monotonic()
    for group in view.groups():
        seen.group(group)
        if time.monotonic() > began + GROUPS_S:
            raise NotAll


class NotAll(Exception):
    """A read ended before it had seen everything."""


# -- all of them


@dataclass(frozen=True)
class Reader:
    read: Callable[[Path, Seen], None]
    of: str
    """"segments"; "link" or "real": the archive, by that path; "scan"."""


READERS: dict[str, Reader] = {
    "segments: pyarrow": Reader(of_segments(arrow_file), "segments"),
    "segments: pyarrow, mapped": Reader(of_segments(mapped), "segments"),
    "segments: polars": Reader(of_segments(polars_stream), "segments"),
    "segments: DuckDB over pyarrow": Reader(of_segments(duckdb_over_arrow), "segments"),
    "archive: pyarrow": Reader(of_archive(archive_arrow), "link"),
    "archive: pandas": Reader(of_archive(archive_pandas), "link"),
    "archive: polars": Reader(of_archive(archive_polars), "link"),
    "archive: DuckDB": Reader(of_archive(archive_duckdb), "link"),
    "realpath: pyarrow": Reader(of_archive(archive_arrow, real=True), "real"),
    "realpath: pandas": Reader(of_archive(archive_pandas, real=True), "real"),
    "realpath: polars": Reader(of_archive(archive_polars, real=True), "real"),
    "realpath: DuckDB": Reader(of_archive(archive_duckdb, real=True), "real"),
    "scan: to_arrow": Reader(scan_arrow, "scan"),
    "scan: to_polars": Reader(scan_polars, "scan"),
    "scan: groups": Reader(scan_groups, "scan"),
}
