"""Plain Arrow and Parquet readers, and ``scan``, beside a bank that is being written: every row they see is right.

A trainer (``kill_child``) appends, draws, evicts and checkpoints for some seconds while each reader here reads in a
loop. A row's reward tells its group's serial number and its place, and so all that must be in it. The one error that a
reader may meet is a file that vanished between listing and opening, because compaction took its place; for mapped
files see ``read_mapped_streams``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from kill_child import make_group, reward_of
from test_kill import KillLoop, Violation, a_seed, check_archive_once, check_each_rollout_once, telling_the_seed

import arrowbank
from arrowbank import TokenRollout

SECONDS = 6.0
COLUMNS = [
    "group_uid", "member_index", "group_size", "reward", "kind", "env_id", "num_tokens", "tokens", "generation_mask",
    "logprobs", "text",
]  # fmt: skip


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
    return [_expected(serial, member) for member in range(len(make_group(serial)))]


def _expected(serial: int, member: int) -> Row:
    group = make_group(serial)
    rollout = group[member]
    assert rollout.reward == reward_of(serial, member)
    if not isinstance(rollout, TokenRollout):
        return Row(member, len(group), rollout.env_id or "", None, None, None, rollout.trajectory[-1])
    assert rollout.generation_mask and rollout.logprobs
    parts = (rollout.trajectory[-1], rollout.generation_mask[-1], rollout.logprobs[-1])
    tokens, mask, logprobs = (part.tobytes() for part in parts)
    return Row(member, len(group), rollout.env_id or "", tokens, mask, logprobs, None)


class Seen:
    """What a reader read: it raises for a wrong row, and remembers which uid went with which serial number."""

    def __init__(self) -> None:
        self.rows = 0
        self.rounds = 0
        self.vanished = 0
        self.outgrown = 0
        self.uids: dict[str, int] = {}

    def row(self, uid: str, reward: float | None, row: Row) -> None:
        serial, member = divmod(int(-1 if reward is None else reward), 8)
        if serial < 0 or member != row.member or self.uids.setdefault(uid, serial) != serial:
            raise Violation(f"group {uid}: no such reward or member: {reward}, {row}")
        if row != expected(serial)[member]:
            raise Violation(f"group {uid}: {row} where {expected(serial)[member]} was written")
        self.rows += 1

    def table(self, table: pa.Table | pa.RecordBatch) -> None:
        """Check Arrow rows."""
        lists = {name: _buffers(table, name) for name in ("tokens", "generation_mask", "logprobs")}
        plain = [
            table[name].to_pylist() for name in ("group_uid", "reward", "member_index", "group_size", "env_id", "text")
        ]
        for index, (uid, reward, member, size, env, text) in enumerate(zip(*plain, strict=True)):
            tokens, mask, logprobs = (found[index] for found in lists.values())
            self.row(uid, reward, Row(member, size, env, tokens, mask, logprobs, text))


def _buffers(table: pa.Table | pa.RecordBatch, name: str) -> list[bytes | None]:
    """Each row's list as bytes, bit for bit."""
    column = table[name]
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [_bytes(scalar.values) for chunk in chunks for scalar in chunk]


def _bytes(values: pa.Array | None) -> bytes | None:
    if values is None:
        return None
    if values.null_count:
        raise Violation("a null in a list that was written without any")
    if pa.types.is_boolean(values.type):
        return bytes(values.to_pylist())
    width = values.type.bit_width // 8
    start = values.offset * width
    return memoryview(values.buffers()[1])[start : start + len(values) * width].tobytes()


# -- readers: each reads once


def newest_segments(bank: Path) -> list[Path]:
    """Those that are being written, and the ones before."""
    return sorted((bank / "segments").iterdir())[-3:]


def read_arrow_streams(bank: Path, seen: Seen) -> None:
    for path in newest_segments(bank):
        try:
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
                for batch in stream:
                    batch.validate(full=True)
                    seen.table(batch)
        except FileNotFoundError:
            seen.vanished += 1


def read_mapped_streams(bank: Path, seen: Seen) -> None:
    """A mapping stays as long as the file was: at its end a record's first bytes may appear without the rest.

    Arrow says so with an error, after all records that were there; that is the limit of mapped files that grow.
    """
    for path in newest_segments(bank):
        with suppress(FileNotFoundError), pa.memory_map(str(path)) as file:
            length = file.size()
            try:
                with pa.ipc.open_stream(file) as stream:
                    for batch in stream:
                        seen.table(batch)
            except (pa.ArrowInvalid, OSError) as error:
                cut = re.search(r"but only read|for message body", str(error))
                if not cut or path.stat().st_size <= length:  # the file did not outgrow its mapping: it is torn
                    raise
                seen.outgrown += 1


def read_polars_streams(bank: Path, seen: Seen) -> None:
    for path in newest_segments(bank):
        try:
            seen.table(pl.read_ipc_stream(path, columns=COLUMNS).to_arrow())
        except FileNotFoundError:
            seen.vanished += 1


def read_polars_archive(bank: Path, seen: Seen) -> None:
    rows = pl.read_parquet(bank / "archive" / "*.parquet", columns=COLUMNS)
    check_each_rollout_once(rows)
    seen.table(rows.to_arrow())


def read_duckdb_archive(bank: Path, seen: Seen) -> None:
    with duckdb.connect() as database:
        query = f"SELECT {', '.join(COLUMNS)} FROM read_parquet('{bank}/archive/*.parquet')"
        rows = database.sql(query).to_arrow_table()
    seen.table(rows)


def read_pandas_archive(bank: Path, seen: Seen) -> None:
    rows = pd.read_parquet(bank / "archive", columns=COLUMNS)
    if rows.duplicated(["group_uid", "member_index"]).any():
        raise Violation("pandas sees a rollout twice")
    for uid, reward, tokens, text in zip(rows["group_uid"], rows["reward"], rows["tokens"], rows["text"], strict=True):
        serial, member = divmod(int(reward), 8)
        wanted = expected(serial)[member]
        if (None if tokens is None else np.asarray(tokens, np.int32).tobytes()) != wanted.tokens:
            raise Violation(f"pandas sees other tokens of {uid} than were written")
        if (None if pd.isna(text) else text) != wanted.text:
            raise Violation(f"pandas sees another text of {uid} than was written")
        seen.rows += 1


READERS: dict[str, Callable[[Path, Seen], None]] = {
    "arrow streams": read_arrow_streams,
    "mapped arrow streams": read_mapped_streams,
    "polars streams": read_polars_streams,
    "polars archive": read_polars_archive,
    "duckdb archive": read_duckdb_archive,
    "pandas archive": read_pandas_archive,
}


# -- the test


def is_merged_away(error: Exception) -> bool:
    """Whether a file's name, found by a glob, was gone when the file was to be opened."""
    return "No such file" in str(error) and "archive/" in str(error)


class Readers:
    """A thread for each reader, until told to stop."""

    def __init__(self, bank: Path, readers: dict[str, Callable[[Path, Seen], None]]) -> None:
        self.seen = {name: Seen() for name in readers}
        self.errors: dict[str, BaseException] = {}
        self._bank = bank
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(name, readers[name])) for name in readers]

    def _run(self, name: str, reader: Callable[[Path, Seen], None]) -> None:
        try:
            while not self._stop.wait(0.005):
                try:
                    reader(self._bank, self.seen[name])
                except Exception as error:
                    if not is_merged_away(error):
                        raise
                    continue  # as the README says: glob again
                self.seen[name].rounds += 1
        except BaseException as error:
            self.errors[name] = error

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def read_view(loop: KillLoop, seen: Seen) -> None:
    """Read all rows of ``scan``: whatever was acknowledged before it began is there."""
    before = dict(loop.model.serials)
    rows = arrowbank.scan(loop.bank).to_arrow().select(COLUMNS)
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    check_each_rollout_once(frame)
    seen.table(rows)
    missing = before.keys() - set(frame["group_uid"])
    if missing:
        raise Violation(f"{len(missing)} acknowledged groups are not in scan")


def test_every_row_read_beside_the_writer_is_right(tmp_path: Path) -> None:
    seed = a_seed()
    with telling_the_seed(seed), KillLoop(tmp_path, seed) as loop:
        while not loop.model.draws:
            loop.cycle("drawn", in_flight=False)  # so that there is something to read from the start
        readers = {**READERS, "scan": lambda _, seen: read_view(loop, seen)}
        with Readers(loop.bank, readers) as reading:
            loop.cycle(None, in_flight=True, seconds=SECONDS)
        for name, error in reading.errors.items():
            error.add_note(f"the reader: {name}")
            raise error
        archived = check_archive_once(loop.bank)
        check_uids(loop.bank, reading.seen)
    counts = {name: (seen.rounds, seen.rows, seen.vanished, seen.outgrown) for name, seen in reading.seen.items()}
    print(f"seed {seed}: {loop.model.acknowledged} groups, {archived} rows archived")
    print(f"rounds, rows, vanished, outgrown: {counts}")
    assert loop.model.acknowledged > 150
    assert archived > 150
    for name, seen in reading.seen.items():
        assert seen.rounds >= 2, name  # scan checks everything in each
        assert seen.rows > 300, name


def check_uids(bank: Path, seen_by: dict[str, Seen]) -> None:
    """Check that every uid that anybody read is one of the bank's, with the same serial number."""
    rows = arrowbank.scan(bank).to_polars().select("group_uid", "problem_id").unique().collect()
    serials = {uid: int(problem) for uid, problem in rows.iter_rows()}
    for name, seen in seen_by.items():
        wrong = [uid for uid, serial in seen.uids.items() if serials.get(uid) != serial]
        assert wrong == [], name


@pytest.mark.parametrize("name", ["arrow streams", "polars streams"])
def test_a_wrong_row_does_not_pass(tmp_path: Path, name: str) -> None:
    with arrowbank.RolloutBank.open(tmp_path / "bank") as bank:
        bank.append(make_group(1))
        [segment] = (tmp_path / "bank" / "segments").iterdir()
        READERS[name](tmp_path / "bank", Seen())
        tokens = make_group(1)[0].trajectory[-1].tobytes()  # type: ignore[union-attr]
        segment.write_bytes(segment.read_bytes().replace(tokens, bytes(len(tokens))))
        with pytest.raises(Violation, match="was written"):
            READERS[name](tmp_path / "bank", Seen())
