"""Readers on each bit and each length of a segment, a journal, a manifest: it costs what was hit, and it is told.

``python tests/test_corruption.py --every-bit`` does all of them; pytest takes a sample.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import corruptors
import pyarrow as pa
import pytest
from corruptors import SEED
from damaged_banks import KINDS, read_stream, small
from machine import directory_in_memory

from arrowbank import ArrowbankError, RolloutBank
from arrowbank.durable.journal import read_journal
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.manifest import Manifest, read_manifest
from arrowbank.durable.recovery import read_state
from arrowbank.durable.segment import load_rollouts, read_segment
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.types import Rollouts


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
SAMPLE = 1500


@pytest.fixture(scope="module")
def case(shared: Path) -> Small:
    return make_small(shared / "small")


@pytest.mark.parametrize("every", EVERY_ONE, ids=str)
def test_a_flipped_bit_or_a_cut_costs_what_it_hits_and_is_told(case: Small, every: Every) -> None:
    size = every.size(case)
    numbers = range(size) if size <= SAMPLE else random.Random(SEED).sample(range(size), SAMPLE)
    _, wrong = every.run(case, numbers)
    assert wrong == [], f"seed {SEED}"


def test_groups_of_a_damaged_segment_are_decoded_to_what_was_appended(case: Small) -> None:
    numbers = random.Random(SEED).sample(range(8 * len(case.segment_bytes)), 60)
    try:
        for number in numbers:
            changed = corruptors.flip(case.segment_bytes, number)
            case.segment.write_bytes(changed)
            found, _ = read_segment(case.segment, case.manifest.bank_id)
            for record in found.records:
                assert load_rollouts(record) == case.groups[record.sequence], number
            assert len(found.records) == len(KINDS) - len(hit(case.segment_bytes, changed, case.edges)), number
    finally:
        case.segment.write_bytes(case.segment_bytes)


def test_every_bit_of_the_schema_message_costs_nothing(case: Small) -> None:
    for bit in range(0, 8 * case.edges[0], 11):
        changed = corruptors.flip(case.segment_bytes, bit)
        found = read_stream(changed, case.segment.name, case.manifest.bank_id)
        assert len(found.records) == len(KINDS), bit


def test_a_schema_message_that_plain_readers_cannot_read_is_told(case: Small) -> None:
    for bit in range(0, 8 * case.edges[0], 11):
        changed = corruptors.flip(case.segment_bytes, bit)
        try:
            same = pa.ipc.open_stream(changed).schema.equals(SEGMENT_SCHEMA, check_metadata=True)
        except (pa.ArrowException, OSError):
            same = False
        found = read_stream(changed, case.segment.name, case.manifest.bank_id)
        assert same or [(place.offset, place.lost) for place in found.damage] == [(0, 0)], bit


@pytest.mark.parametrize("file", ["segment", "journal"])
def test_a_record_moved_to_any_other_place_is_not_taken(case: Small, file: str) -> None:
    segment = file == "segment"
    data, edges = (case.segment_bytes, case.edges) if segment else (case.journal_bytes, case.entry_edges)
    wrong = wrong_in_segment if segment else wrong_in_journal
    try:
        for start, stop in pairwise(edges):
            for to in [*edges, *range(edges[0], len(data), 8 * 37)]:
                if to + stop - start > edges[-1]:
                    continue  # with the end mark gone, the last record may be a torn tail
                assert wrong(case, corruptors.move(data, start, stop, to)) is None, (start, to)
    finally:
        case.journal.write_bytes(case.journal_bytes)


def test_damage_of_the_schema_and_the_first_record_is_told_from_where_it_starts(case: Small) -> None:
    start, stop = case.edges[:2]
    assert wrong_in_segment(case, corruptors.move(case.segment_bytes, start, stop, 0)) is None


def test_a_zeroed_range_anywhere_costs_what_it_hits(case: Small) -> None:
    picked = random.Random(SEED)
    for _ in range(300):
        start = picked.randrange(len(case.segment_bytes))
        stop = min(start + picked.choice([1, 8, 512, 4096]), len(case.segment_bytes))
        changed = corruptors.zero(case.segment_bytes, start, stop)
        assert wrong_in_segment(case, changed) is None, (SEED, start, stop)


def _every_bit() -> int:
    """Print a table; return how many were wrong."""
    bad = 0
    with directory_in_memory() as directory:
        made = make_small(directory / "small")
        print(f"{'case':45} {'count':>8} {'wrong':>6} {'seconds':>8}")
        for every in EVERY_ONE:
            started = time.monotonic()
            count, wrong = every.run(made, range(every.size(made)))
            bad += len(wrong)
            print(f"{every!s:45} {count:8,} {len(wrong):6,} {time.monotonic() - started:8.1f}", *wrong[:3], sep="\n  ")
    return bad


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--every-bit"]:
            sys.exit(bool(_every_bit()))
        case _:
            sys.exit("usage: test_corruption.py --every-bit")
