"""Holds a bank that a crash has left against what had been acknowledged: does it open, is everything there once, does
it work on?

Checked of each state: the archive that plain readers see, before anything opens the bank; open; ``restore`` at the
model's checkpoint; plan, pending, evicted and settled groups against the plain model, with the content of every group
that is handed back, bit for bit; what the archive says of each row; a report without damage, but for torn tails; that
the bank takes another group, another draw, and closes; segments that are whole Arrow streams. Of the ``thorough`` ones
also: that a second open changes no file of data; a restore of checkpoint 0 in a further session, with all that it
brings back; ``scan``, with the content of every group.

Nothing is traced here. The same bytes of a file or a record are read once, whichever state they are in.
"""

from __future__ import annotations

import itertools
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from kill_child import digest, make_group, serial_of
from knowing_trainer import COLUMNS, drop
from plain_model import Fate, PlainModel

from arrowbank import HistoryGoneError, RolloutBank, scan
from arrowbank.restored import Restored
from arrowbank.types import RolloutGroup
from crash.disk import State
from crash.facts import Known, Violation, digest_of, group_of

__all__ = ["Checker"]

FIRST_NEW = 100_000
"""Serial numbers of groups that the check appends."""


@dataclass
class Checker:
    """Opens states, one after another, in a directory."""

    root: Path

    def __post_init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        self._streams: set[str] = set()
        self.contents: dict[str, int] = {}
        """Digest of a record that decodes to what was appended → serial number."""

    def check(self, state: State, known: Known, *, thorough: bool, later: bool = False) -> None:
        """Raise Violation when the bank breaks a promise.

        later: load the checkpoint that was being recorded, where there is one.
        """
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        state.write(self.root)
        self.check_bank(self.root, known, thorough=thorough, later=later)

    def check_bank(self, root: Path, known: Known, *, thorough: bool, later: bool = False) -> None:
        """Check the bank that is in a directory."""
        try:
            _Case(self, root / "bank", known.copy(), thorough).run(known.checkpoints[-1 if later else 0])
        except Violation:
            raise
        except Exception as error:
            where = traceback.format_exc(limit=-3)
            raise Violation(f"{type(error).__name__}: {error}\n{where}") from error

    def rows(self, path: Path) -> list[tuple[Any, ...]]:
        """Return the rows of a Parquet file, as any reader sees them."""
        data = path.read_bytes()
        key = xxhash.xxh3_128_hexdigest(data)
        if key not in self._rows:
            columns = pq.read_table(pa.BufferReader(data), columns=COLUMNS).to_pydict().values()
            self._rows[key] = list(zip(*columns, strict=True))
        return self._rows[key]

    def require_stream(self, path: Path) -> None:
        """A segment is a whole stream for any Arrow reader."""
        data = path.read_bytes()
        key = xxhash.xxh3_128_hexdigest(data)
        if key not in self._streams:
            with pa.ipc.open_stream(pa.BufferReader(data)) as stream:
                for batch in stream:
                    batch.validate(full=True)
            self._streams.add(key)


class _Case:
    """One bank, opened twice."""

    def __init__(self, checker: Checker, path: Path, known: Known, thorough: bool) -> None:
        self.checker, self.path, self.known, self.thorough = checker, path, known, thorough
        self.bank: RolloutBank
        self._opened: list[RolloutBank] = []

    def run(self, checkpoint: int) -> None:
        self.archived()
        with self._let_go_on_failure():
            if self.thorough:
                self.open_twice()
            else:
                self.open()
            self.check_restored(checkpoint)
            self.check_archive()
            self.work_on(checkpoint)
            self.bank.close()
            self.check_files()
            if self.thorough:
                self.come_again()

    @contextmanager
    def _let_go_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for bank in self._opened:
                if not bank._closed:
                    drop(bank)
            raise

    def come_again(self) -> None:
        """Go back to the very beginning, on what the first session has made of it."""
        self.open()
        self.check_restored(0)
        self.check_archive()
        self.check_scan()
        self.bank.close()
        self.check_files()

    def open_twice(self) -> None:
        """The second open changes no file of data."""
        self.open()
        self.bank.close()
        before = data_files(self.path)
        self.open()
        if gone := changed(before, data_files(self.path)):
            raise Violation(f"a second open changed {sorted(gone)}")

    def open(self) -> None:
        self.bank = RolloutBank.open(self.path, keep_checkpoints=1)
        self._opened.append(self.bank)
        if self.bank.session <= self.known.session:
            raise Violation(f"session {self.bank.session}, after session {self.known.session} had been told")
        self.known.opened(self.bank.session)

    # -- what is there

    def archived(self) -> list[tuple[Any, ...]]:
        """Return what a glob of the archive shows: each rollout once."""
        archive = self.path / "archive"
        files = sorted(archive.iterdir()) if archive.is_dir() else []
        rows = [row for file in files for row in self.checker.rows(file)]
        if len({row[:2] for row in rows}) < len(rows):
            raise Violation("the archive shows a rollout twice")
        return rows

    def check_files(self) -> None:
        for path in (self.path / "segments").iterdir():
            self.checker.require_stream(path)

    def check_restored(self, checkpoint: int) -> None:
        """Restore, and compare with every world; those that say the same stay."""
        try:
            restored = self.bank.restore(checkpoint)
        except HistoryGoneError as error:
            self.known.worlds = [world for world in self.known.worlds if not world.keeps(checkpoint, None)]
            if not self.known.worlds:
                raise Violation(f"restore({checkpoint}): {error}") from error
            restored, checkpoint = self.bank.restore(0), 0
        self._take_in_flight()
        self._check_report(restored)
        session = self.bank.session
        worlds = [world for world in self.known.worlds if world.keeps(checkpoint, None)]
        for world in worlds:
            world.restore(session, checkpoint, "replay", None)
        seen = _seen(restored)
        self.known.worlds = [world for world in worlds if _expected(world, session) == seen]
        if not self.known.worlds:
            expected = " or ".join(str(_expected(world, session)) for world in worlds)
            raise Violation(f"restore({checkpoint}) handed back\n  {seen}\nexpected\n  {expected}")
        for group in handed(restored):
            ref = self.bank._ledger.state.groups[str(group.uid)]
            assert ref.record is not None
            key = xxhash.xxh3_128_hexdigest(ref.record.message)
            if self.checker.contents.get(key) != self.known.serials[ref.uid]:
                self._check_content(group)
                self.checker.contents[key] = self.known.serials[ref.uid]

    def _take_in_flight(self) -> None:
        for uid, ref in sorted(self.bank._ledger.state.groups.items(), key=lambda item: item[1].age):
            if uid not in self.known.serials:
                self.known.found(uid, int(ref.head["problem"]))
        for row in self.archived():
            if row[0] not in self.known.serials:
                raise Violation(f"{row[0]} is in the archive, and was never acknowledged")

    def _check_report(self, restored: Restored) -> None:
        report = restored.report
        if report.corrupt or report.lost_records:
            raise Violation(f"a crash is no damage, but the report tells of some:\n{report}")

    def _check_content(self, group: RolloutGroup) -> None:
        serial = self.known.serials[str(group.uid)]
        if digest(group) != digest_of(serial):
            raise Violation(f"group {group.uid} is not what was appended as serial {serial}")

    def check_archive(self) -> None:
        """Each group is live or archived, and what is archived has the fate that the model gives it."""
        rows, session = self.archived(), self.bank.session
        archived, live = {row[0] for row in rows}, self.bank._ledger.state.groups.keys()
        if both := archived & live:
            raise Violation(f"both live and archived: {sorted(both)}")
        if lost := self.known.serials.keys() - archived - live:
            raise Violation(f"acknowledged groups lost: {[self.known.serials[uid] for uid in lost]}")
        problems = [_wrong_in(world, rows, session) for world in self.known.worlds]
        if None not in problems:
            raise Violation(str(problems))

    def check_scan(self) -> None:
        view = scan(self.path)
        if any("unfinished" not in line for line in view.damage):
            raise Violation(f"scan tells of damage: {view.damage}")
        uids = [str(group.uid) for group in map(self._checked, view.groups())]
        if sorted(uids) != sorted(self.known.serials):
            raise Violation(f"scan shows {len(uids)} groups, acknowledged are {len(self.known.serials)}")

    def _checked(self, group: RolloutGroup) -> RolloutGroup:
        if self.known.serials.get(str(group.uid)) != serial_of(group):
            raise Violation(f"scan shows {group.uid}, which is serial {serial_of(group)}")
        self._check_content(group)
        return group

    # -- that it works on

    def work_on(self, checkpoint: int) -> None:
        """Append two groups, draw one of them, evict the other."""
        first = FIRST_NEW + 11 * 13 * self.bank.session
        bank, session = self.bank, self.bank.session
        uids = bank.append_many([make_group(first), make_group(first + 1)])
        bank.mark_consumed(uids[:1], checkpoint, state=b"worked on")
        bank.evict(uids[1:], "worked on")
        self.known.serials |= {uids[0]: first, uids[1]: first + 1}
        self.known.session = session
        for world in self.known.worlds:
            for uid, serial in zip(uids, (first, first + 1), strict=True):
                world.append(group_of(uid, serial))
            world.draw(session, checkpoint, tuple(uids[:1]), 1, b"worked on")
            world.evict(uids[1:], "worked on")


def handed(restored: Restored) -> Iterator[RolloutGroup]:
    yield from (group for draw in restored.draws for group in draw.groups)
    yield from itertools.chain.from_iterable(restored.pending.values())


def _seen(restored: Restored) -> tuple[Any, ...]:
    draws = [
        (one.iteration, one.index, one.span, one.offset, [group.uid for group in one.groups], one.state, one.lost)
        for one in restored.draws
    ]
    pending = {str(env): sorted(str(group.uid) for group in queue) for env, queue in restored.pending.items() if queue}
    return draws, pending


def _expected(world: PlainModel, session: int) -> tuple[Any, ...]:
    draws = [
        (one.iteration, one.index, one.span, one.offset, list(one.uids), one.state, one.lost)
        for one in world.plan(session)
    ]
    return draws, {env: sorted(queue) for env, queue in world.pending(session).items() if queue}


def _wrong_in(world: PlainModel, rows: list[tuple[Any, ...]], session: int) -> str | None:
    by, groups = world.last_checkpoint(session), world.groups
    members = {uid: 0 for uid, *_ in rows}
    for uid, _, *told in rows:
        members[uid] += 1
        fate = world.fate(session, uid, by)
        never_drawn = groups[uid].split != "train" and fate == Fate()
        if Fate(*told) != fate or (fate == Fate() and not never_drawn):
            return f"the archive says of {uid} {Fate(*told)}, the model {fate}"
    partial = [uid for uid, count in members.items() if count != groups[uid].members]
    return f"archived in part: {partial}" if partial else None


def data_files(path: Path) -> dict[str, tuple[int, int]]:
    """Every file of data, with what tells that it was written."""
    found = {}
    for name in ("segments", "journal", ".archive", "quarantine"):
        for directory, _, files in os.walk(path / name):
            for file in files:
                status = os.stat(os.path.join(directory, file))
                found[os.path.join(directory, file)] = status.st_ino, status.st_mtime_ns
    return found


def changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> set[str]:
    """Return files that were written or went. A session of its own writes files of its own."""
    return {name.partition("/bank/")[2] for name, was in before.items() if after.get(name) != was}
