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
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kill_child import make_group
from kill_loop import KillLoop, a_seed, telling_the_seed
from kill_model import Found, LineModel, Violation, check_archive_once
from live_readers import COLUMNS, READERS, NotAll, Reader, Seen, arrow_file, is_merged_away, of_archive, of_segments

import arrowbank
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import Manifest, read_manifest

SECONDS = 7.0
LONGEST_CYCLE_S = 6.0
MOST_BAD = 20
"""With so many a reader gives up."""


class RollingBackModel(LineModel):
    """Also has a checkpoint of its line restored."""

    def __init__(self) -> None:
        super().__init__()
        self.horizon = self.restores = 0
        """How far the archive reached, and how many restores went below."""
        self._next: int | None = None

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


@dataclass
class Writer:
    """Trainers, one after another."""

    loop: KillLoop
    model: RollingBackModel
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
        old = [checkpoint for checkpoint in sorted(self.model.recorded) if horizon - 40 < checkpoint < horizon]
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
        loop.model = model = RollingBackModel()
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
