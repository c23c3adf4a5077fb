"""Plain Arrow and Parquet readers, and ``scan``, beside a bank that is being written: every row they see is right.

A trainer (``kill_child``) appends, draws, evicts and checkpoints while a thread for each reader here reads in a loop.
Every few seconds it is killed, and the next one restores, now and then below the archive's horizon. A row's reward
tells its group's serial number and its place, and so all that must be in it. What must be there is known, too: a
segment never shows fewer rows than before, the archive has the rows that the manifest had when a read began, and
``scan`` every group that had been acknowledged by then.

What a reader may meet, and is counted: a file that vanished between listing and opening, because compaction took its
place, and what ``mapped`` tells. ``python tests/test_live_readers.py --seconds 60`` is the campaign; the test is a
short one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kill_child import digest, make_group, reward_of, serial_of
from test_kill import (
    Found,
    KillLoop,
    Model,
    Violation,
    a_seed,
    check_archive_once,
    check_each_rollout_once,
    expected_digest,
    telling_the_seed,
)  # fmt: skip

import arrowbank
from arrowbank import TokenRollout
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import Manifest, read_manifest

SECONDS = 7.0
LONGEST_CYCLE_S = 6.0
GROUPS_S = 1.0
"""So long a reader takes groups from a view, which is slow, before it makes the next view."""
MOST_BAD = 20
"""With so many a reader gives up."""
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


class NotingModel(Model):
    """Also knows which checkpoints of this line may be restored, and has one of them restored."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[int] = []
        self.horizon = self.restores = 0
        """How far the archive reached, and how many restores went below."""
        self._next: int | None = None

    def take(self, kind: str, words: list[str]) -> None:
        super().take(kind, words)
        if kind == "c":
            self.recorded.append(self.checkpoint)

    def roll_back(self, checkpoint: int, horizon: int) -> None:
        """Have the next trainer restore ``checkpoint``. Until it has, both that and the last one are possible."""
        self.checkpoint, self.maybe_checkpoint = checkpoint, max(super().checkpoints())
        self.horizon, self._next = horizon, checkpoint

    def checkpoints(self) -> list[int]:
        if self._next is None:
            return super().checkpoints()
        chosen, self._next = self._next, None  # the first to ask is who starts the trainer
        return [chosen]

    def check_restored(self, found: Found) -> None:
        super().check_restored(found)
        self.restores += found.checkpoint < self.horizon
        self.horizon = 0
        self.recorded = [at for at in self.recorded if at <= found.checkpoint]


@dataclass
class Writer:
    """Trainers, one after another."""

    loop: KillLoop
    model: NotingModel
    random: random.Random
    cycle_began_with: int | None = None
    """Groups acknowledged, when the trainer that is at work began."""

    @property
    def bank(self) -> Path:
        return self.loop.bank

    def begin(self) -> None:
        while not self.model.draws:
            self.loop.cycle("drawn", in_flight=False)  # so that there is something to read from the start

    def write(self, seconds: float) -> None:
        """Run trainers for so long, or until a restore has gone below the horizon."""
        end, longest = time.monotonic() + seconds, min(LONGEST_CYCLE_S, seconds / 2)
        for number in itertools.count():
            left = end - time.monotonic()
            if left < 0.3 and (self.model.restores or number * longest > 4 * seconds):
                return
            if number % 2:
                self.roll_back()
            self.cycle_began_with = self.model.acknowledged
            a_while = self.random.uniform(longest / 2, longest)
            self.loop.cycle(None, in_flight=True, seconds=min(max(left, longest / 2), a_while))
            self.cycle_began_with = None

    def roll_back(self) -> None:
        """Have the next trainer restore an old checkpoint."""
        horizon = read_manifest(BankPaths(self.bank)).archived_through
        old = [checkpoint for checkpoint in self.model.recorded if horizon - 40 < checkpoint < horizon]
        if old:
            self.model.roll_back(self.random.choice(old), horizon)

    @property
    def is_past_restore(self) -> bool:
        began_with = self.cycle_began_with
        return began_with is not None and self.model.acknowledged > began_with

    def archived(self) -> Manifest | None:
        """What anybody must find in the archive from now on; None while a restore may take rows back."""
        if not self.is_past_restore:
            return None
        manifest = read_manifest(BankPaths(self.bank))
        is_settled = os.path.realpath(self.bank / "archive").endswith(f"v{manifest.version:06d}")
        return manifest if is_settled else None


class Readers:
    """A thread for each reader, until told to stop."""

    def __init__(self, writer: Writer, readers: dict[str, Reader]) -> None:
        self.seen = {name: Seen() for name in readers}
        self._writer = writer
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(readers[name], self.seen[name], name)) for name in readers
        ]

    def _run(self, reader: Reader, seen: Seen, name: str) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread: the writer is to be busy
        while not self._stop.wait(0.005) and len(seen.bad) < MOST_BAD:
            try:
                self._read(reader, seen)
            except BaseException as error:
                error.add_note(f"the reader: {name}")
                seen.bad.append(error)

    def _read(self, reader: Reader, seen: Seen) -> None:
        acknowledged = set(self._writer.model.serials)
        archived, cycle = self._writer.archived(), self._writer.cycle_began_with
        link = self._link()
        try:
            reader.read(self._writer.bank, seen)
        except NotAll:
            acknowledged = set()
        except Exception as error:
            is_gone = reader.of == "real" and not isinstance(error, Violation) and self._link() != link
            if reader.of not in ("link", "real") or not (is_gone or is_merged_away(error)):
                raise
            seen.vanished += 1  # as the README says: glob again
            return
        seen.reads += 1
        if reader.of == "scan" and acknowledged - seen.now:
            raise Violation(f"{len(acknowledged - seen.now)} acknowledged groups are not in scan")
        is_same_cycle = self._writer.cycle_began_with == cycle
        if reader.of in ("link", "real") and archived is not None and is_same_cycle:
            rows = sum(file.rows for file in archived.files)
            if seen.rows_now < rows and reader.of == "real" and self._link() != link:
                seen.short += 1
            elif seen.rows_now < rows:
                raise Violation(f"{seen.rows_now} rows where {rows} had been archived before")

    def _link(self) -> str:
        return os.path.realpath(self._writer.bank / "archive")

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def check_uids(bank: Path, seen_by: dict[str, Seen]) -> None:
    """Check that every uid that anybody read is one of the bank's, with the same serial number."""
    rows = arrowbank.scan(bank).to_polars().select("group_uid", "problem_id").unique().collect()
    serials = {uid: int(problem) for uid, problem in rows.iter_rows()}
    for name, seen in seen_by.items():
        wrong = [uid for uid, serial in seen.uids.items() if serials.get(uid) != serial]
        if wrong:
            seen.bad.append(Violation(f"{name}: {len(wrong)} groups that the bank does not have: {wrong[:4]}"))


def run(directory: Path, seed: int, seconds: float, readers: dict[str, Reader]) -> tuple[Writer, dict[str, Seen]]:
    with telling_the_seed(seed), KillLoop(directory, seed) as loop:
        loop.model = model = NotingModel()
        writer = Writer(loop, model, random.Random(seed))
        writer.begin()
        with Readers(writer, readers) as reading:
            writer.write(seconds)
        check_archive_once(loop.bank)
        check_uids(loop.bank, reading.seen)
    return writer, reading.seen


def table(seen_by: dict[str, Seen]) -> Iterator[str]:
    heads = ("reader", "reads", "rows compared", "vanished-file retries", "bad", "short", "outgrown")
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for name, seen in seen_by.items():
        counts = (seen.reads, seen.rows, seen.vanished, len(seen.bad), seen.short, seen.outgrown)
        yield f"| {name} | " + " | ".join(f"{count:,}" for count in counts) + " |"


def describe(writer: Writer) -> str:
    manifest, model = read_manifest(BankPaths(writer.bank)), writer.model
    return (
        f"{model.acknowledged:,} groups appended, {len(model.draws):,} draws on the line, "
        f"{len(model.evicted):,} evicted, {len(writer.loop.kills)} kills, {model.restores} restores below the horizon; "
        f"{manifest.commit:,} commits, {manifest.version - 1} of them switched the link; "
        f"{sum(file.rows for file in manifest.files):,} rows in {len(manifest.files)} Parquet files"
    )


# -- the tests


def test_every_row_read_beside_the_writer_is_right(tmp_path: Path) -> None:
    seed = a_seed()
    writer, seen_by = run(tmp_path, seed, SECONDS, READERS)
    print(f"seed {seed}: {describe(writer)}", *table(seen_by), sep="\n")
    for seen in seen_by.values():
        for error in seen.bad:
            raise error
    assert writer.model.acknowledged > 150
    assert writer.model.restores
    for name, seen in seen_by.items():
        assert seen.reads, name
        assert seen.rows > 50, name


def test_readers_that_miss_something_do_not_pass(tmp_path: Path) -> None:
    """Three planted readers: one overlooks a file of the archive, one a group of a view, one a segment's last rows."""

    def all_files_but_one(directory: Path) -> pa.Table:
        by_size = sorted(directory.glob("*.parquet"), key=lambda path: path.stat().st_size)
        return pa.concat_tables(pq.read_table(path, columns=COLUMNS) for path in by_size[:-1] or by_size)

    def all_groups_but_one(bank: Path, seen: Seen) -> None:
        seen.begin()
        for group in list(arrowbank.scan(bank).groups())[1:]:
            seen.group(group)

    def fewer_each_time(path: Path) -> Iterator[pa.RecordBatch]:
        batches = list(arrow_file(path))
        reads.append(path)
        yield from batches[: len(batches) // reads.count(path)]

    reads: list[Path] = []
    planted = {
        "archive": Reader(of_archive(all_files_but_one), "link"),
        "scan": Reader(all_groups_but_one, "scan"),
        "segments": Reader(of_segments(fewer_each_time), "segments"),
    }
    _, seen_by = run(tmp_path, a_seed(), 4.0, planted)
    for name, message in {"archive": "archived before", "scan": "not in scan", "segments": "before"}.items():
        assert any(message in str(error) for error in seen_by[name].bad), name


@pytest.mark.parametrize("name", [name for name in READERS if name.startswith("segments: ")])
def test_a_wrong_row_does_not_pass(tmp_path: Path, name: str) -> None:
    with arrowbank.RolloutBank.open(tmp_path / "bank") as bank:
        bank.append(make_group(1))
        [segment] = (tmp_path / "bank" / "segments").iterdir()
        READERS[name].read(tmp_path / "bank", Seen())
        tokens = make_group(1)[0].trajectory[-1].tobytes()  # type: ignore[union-attr]
        segment.write_bytes(segment.read_bytes().replace(tokens, bytes(len(tokens))))
        with pytest.raises(Violation, match="was written"):
            READERS[name].read(tmp_path / "bank", Seen())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Read a bank with every reader while it is being written.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args(arguments)
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        writer, seen_by = run(Path(directory), given.seed, given.seconds, READERS)
        print(describe(writer), *table(seen_by), sep="\n")
    bad = [error for seen in seen_by.values() for error in seen.bad]
    for error in bad[:5]:
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n  ")
    print(f"{len(bad)} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
