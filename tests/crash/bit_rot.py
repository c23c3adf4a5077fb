"""Bit rot: each bit and each length of each kind of file, one at a time, and what readers make of it.

Segments, journals and manifests are read by the very functions that an open uses, in this process; Parquet files by
what compares them with their digests. Claims, LOCK and the target of the link ``archive``, which an open acts on, are
tried by whole opens, as is a sample of the Parquet files' bits.

Proves that one hit costs what it hits and is told. Cannot prove anything of several hits at once (``fuzz`` tries some),
nor of what whole opens make of every bit: ``test_damaged_banks`` has the cases of these.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import corruptors
from damaged_banks import KINDS, Model, copy, judge, make_whole, read_stream, small
from machine import directory_in_memory

from arrowbank import ArrowbankError, RolloutBank
from arrowbank.archive.parquet import check_file
from arrowbank.durable.journal import read_journal
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.manifest import Manifest, read_manifest
from arrowbank.durable.recovery import read_state
from arrowbank.types import Rollouts

__all__ = [
    "EVERY_ONE", "WHOLE", "Every", "Small", "Whole", "every_bit", "hit", "make_small", "wrong_in_journal",
    "wrong_in_manifest", "wrong_in_segment",
]  # fmt: skip


@dataclass(frozen=True)
class Small:
    """A bank of one session, one segment and one journal part."""

    root: Path
    manifest: Manifest
    segment: Path
    journal: Path
    segment_bytes: bytes
    journal_bytes: bytes
    manifest_bytes: bytes
    messages: list[bytes]
    edges: list[int]
    groups: list[Rollouts]
    entries: list[Any]
    entry_edges: list[int]

    @property
    def paths(self) -> BankPaths:
        return BankPaths(self.root)


def make_small(root: Path) -> Small:
    """One group of each kind: a planned draw of two, an evicted one, the rest pending."""
    bank = RolloutBank.open(root)
    bank.restore(0)
    groups = [small(kind, number) for number, kind in enumerate(KINDS)]
    uids = [bank.append(group) for group in groups]
    bank.mark_consumed(uids[:2], 0, state=b"cursor")
    bank.evict(uids[2:3], "stale")
    bank.close()
    manifest = read_manifest(BankPaths(root))
    (segment,), (journal,) = (root / "segments").iterdir(), (root / "journal").iterdir()
    records = read_stream(segment.read_bytes(), segment.name, manifest.bank_id).records
    entries, _ = read_journal(BankPaths(root), JournalName(1, 0), manifest.bank_id)
    return Small(
        root, manifest, segment, journal, segment.read_bytes(), journal.read_bytes(),
        BankPaths(root).manifest.read_bytes(), [bytes(record.message) for record in records], _edges(records),
        [group.rollouts for group in groups], [entry for _, entry in entries],
        _edges([record for record, _ in entries]),
    )  # fmt: skip


def _edges(records: list[Any]) -> list[int]:
    return [record.offset for record in records] + [records[-1].offset + len(records[-1].message)]


def hit(data: bytes, changed: bytes, edges: list[int]) -> set[int]:
    """Which records are not in their places any more."""
    return {
        at for at, (start, stop) in enumerate(pairwise(edges)) if changed[start:stop] != data[start:stop]
    }  # fmt: skip


def wrong_in_segment(case: Small, changed: bytes) -> str | None:
    """What is wrong with how a changed segment is read; None when nothing is."""
    found = read_stream(changed, case.segment.name, case.manifest.bank_id)
    for record in found.records:
        if record.sequence >= len(case.messages) or bytes(record.message) != case.messages[record.sequence]:
            return f"record {record.sequence} is not what was written"
    missing = set(range(len(case.messages))) - {record.sequence for record in found.records}
    lost = hit(case.segment_bytes, changed, case.edges)
    if missing != lost:
        return f"records {sorted(missing)} are missing, {sorted(lost)} were hit"
    if missing and case.edges[min(missing)] < len(changed.rstrip(b"\0")):
        places = [(damage.offset, damage.offset + damage.length) for damage in found.damage]
        untold = [at for at in missing if case.edges[at] < len(changed)
                  and not any(start <= case.edges[at] < stop for start, stop in places)]  # fmt: skip
        if untold:
            return f"records {untold} are missing, and the damage told is {places}"
    if (
        changed != case.segment_bytes
        and not missing
        and changed[case.edges[0] :] != case.segment_bytes[case.edges[0] :]
    ):
        tail = changed[case.edges[-1] :]
        if not found.damage and tail.strip(b"\0") and tail != corruptors.END:
            return "what stands behind the last record is not told"
    return None


def wrong_in_journal(case: Small, changed: bytes) -> str | None:
    case.journal.write_bytes(changed)
    entries, damage = read_journal(case.paths, JournalName(1, 0), case.manifest.bank_id)
    for record, entry in entries:
        if record.sequence >= len(case.entries) or entry != case.entries[record.sequence]:
            return f"entry {record.sequence} is not what was written: {entry}"
    missing = set(range(len(case.entries))) - {record.sequence for record, _ in entries}
    lost = hit(case.journal_bytes, changed, case.entry_edges)
    if missing != lost:
        return f"entries {sorted(missing)} are missing, {sorted(lost)} were hit"
    if len(changed) < len(case.journal_bytes):
        if missing and case.entry_edges[min(missing)] < len(changed.rstrip(b"\0")) and not damage:
            return f"entries {sorted(missing)} are missing and no damage is told"
    elif missing and (not damage or not read_state(case.paths, case.manifest).hidden):
        return f"entries {sorted(missing)} are missing, and a restore would not refuse"
    return None


def wrong_in_manifest(case: Small, changed: bytes) -> str | None:
    case.paths.manifest.write_bytes(changed)
    try:
        found = read_manifest(case.paths)
    except ArrowbankError:
        return None
    return None if found == case.manifest else f"another manifest was read: {found}"


def wrong_in_state(case: Small, changed: bytes) -> str | None:
    """Of a closed segment the journal says how many records it had: whatever is missing is counted as lost."""
    case.segment.write_bytes(changed)
    state = read_state(case.paths, case.manifest)
    lost = len(hit(case.segment_bytes, changed, case.edges))
    if len(state.groups) != len(case.messages) - lost:
        return f"{len(state.groups)} groups, {lost} were hit"
    told = sum(state.lost.values())
    return None if told == lost else f"{lost} were hit, {told} are told as lost"


@dataclass(frozen=True)
class Every:
    """Each bit or each length of one file, and how to judge the result."""

    file: str
    what: str
    wrong: Callable[[Small, bytes], str | None]

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"

    def data(self, case: Small) -> bytes:
        return {"segment": case.segment_bytes, "journal": case.journal_bytes, "manifest": case.manifest_bytes}[
            self.file
        ]

    def size(self, case: Small) -> int:
        return len(self.data(case)) * (8 if self.what == "bits" else 1)

    def run(self, case: Small, numbers: Iterable[int]) -> tuple[int, list[str]]:
        """Return how many were tried, and what was wrong."""
        data, count, wrong = self.data(case), 0, []
        change = corruptors.flip if self.what == "bits" else corruptors.truncate
        try:
            for number in numbers:
                count += 1
                try:
                    said = self.wrong(case, change(data, number))
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"
                if said:
                    wrong.append(f"{self.what} {number}: {said}")
        finally:
            case.segment.write_bytes(case.segment_bytes)
            case.journal.write_bytes(case.journal_bytes)
            case.paths.manifest.write_bytes(case.manifest_bytes)
        return count, wrong


EVERY_ONE = [
    Every("segment", "bits", wrong_in_segment),
    Every("segment", "lengths", wrong_in_segment),
    Every("segment", "lengths, told by the journal", wrong_in_state),
    Every("journal", "bits", wrong_in_journal),
    Every("journal", "lengths", wrong_in_journal),
    Every("manifest", "bits", wrong_in_manifest),
    Every("manifest", "lengths", wrong_in_manifest),
]


@dataclass(frozen=True)
class Whole:
    """Each bit or each length of a file of a whole bank, each tried by opens of a copy, or by its digest alone."""

    file: str
    """Under the bank; of those that match, the largest. Of a link it is the target."""
    what: str
    by_digest: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.what}{', by digest' if self.by_digest else ''}"

    def size(self, model: Model) -> int:
        return len(_content(self._path(model))) * (8 if self.what == "bits" else 1)

    def run(self, model: Model, target: Path, numbers: Iterable[int]) -> tuple[int, list[str]]:
        """Return how many were tried, and what was wrong."""
        change = corruptors.flip if self.what == "bits" else corruptors.truncate
        path = self._path(model)
        data, count, wrong = _content(path), 0, []
        look = self._by_digest if self.by_digest else self._by_open
        for number in numbers:
            count += 1
            try:
                look(model, target, path.relative_to(model.root), change(data, number))
            except Exception as error:
                wrong.append(f"{self.what} {number}: {type(error).__name__}: {error}")
        return count, wrong

    def _path(self, model: Model) -> Path:
        return max(model.root.glob(self.file), key=lambda path: path.stat().st_size)

    def _by_open(self, model: Model, target: Path, name: Path, changed: bytes) -> None:
        changed_copy = copy(model, target) / name
        is_link = changed_copy.is_symlink()
        changed_copy.unlink()  # it may have a second name
        if not is_link:
            changed_copy.write_bytes(changed)
        elif changed:  # no link is empty: then there is none
            os.symlink(changed, changed_copy)
        judge(model, target)

    def _by_digest(self, model: Model, target: Path, name: Path, changed: bytes) -> None:
        (file,) = [file for file in model.manifest.files if file.name == name.name]
        target.with_suffix(".parquet").write_bytes(changed)
        try:
            check_file(target.with_suffix(".parquet"), file)
        except ArrowbankError:
            return
        raise AssertionError("the digest is right")


def _content(path: Path) -> bytes:
    return os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()


WHOLE = [
    Whole("LOCK", "bits"),
    Whole("LOCK", "lengths"),
    Whole("archive", "bits"),
    Whole("archive", "lengths"),
    Whole("sessions/0001", "bits"),
    Whole("sessions/0001", "lengths"),
    Whole("sessions/0002", "bits"),
    Whole("sessions/0002", "lengths"),
    Whole("archive/c*.parquet", "bits", by_digest=True),
    Whole("archive/c*.parquet", "lengths", by_digest=True),
]


def every_bit(part: int = 1) -> Iterator[tuple[str, int, list[str], float]]:
    """Try each bit and length, or one of every ``part``; yield what was tried, how many, what was wrong, seconds."""
    with directory_in_memory() as directory:
        made, model = make_small(directory / "small"), make_whole(directory / "whole", close=True)
        for every in EVERY_ONE:
            started = time.monotonic()
            count, wrong = every.run(made, range(0, every.size(made), part))
            yield str(every), count, wrong, time.monotonic() - started
        for whole in WHOLE:
            started = time.monotonic()
            count, wrong = whole.run(model, directory / "copy", range(0, whole.size(model), part))
            yield str(whole), count, wrong, time.monotonic() - started
