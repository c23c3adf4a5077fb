"""Damage of every kind to every file of a bank: it costs what was hit, it is told, and nothing wrong is handed back.

Three parts: readers on single bytes of a small bank, each bit and each length in turn; whole opens of damaged copies of
a bank with everything in it, compared with what was appended; banks that somebody made up to do harm.
``python tests/test_corruption.py --every-bit`` does all of the first and the third part; pytest takes a sample.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import corruptors
import polars
import pyarrow as pa
import pytest
from corruptors import KINDS, SEED, small

from arrowbank import (
    ArrowbankError,
    CorruptionError,
    CorruptRecordError,
    RolloutBank,
    RolloutGroup,
    scan,
)
from arrowbank.durable.journal import JOURNAL_SCHEMA, read_journal
from arrowbank.durable.layout import BankPaths, JournalName, SegmentName
from arrowbank.durable.manifest import Manifest, read_manifest
from arrowbank.durable.recovery import live_segments, read_state
from arrowbank.durable.segment import load_rollouts, read_segment
from arrowbank.durable.stream import Record, Scan, map_file
from arrowbank.durable.stream import scan as scan_stream
from arrowbank.restored import Restored
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.types import Rollouts

CHECKPOINT = 2
"""What the whole bank is restored at."""


def read_stream(data: bytes, name: str, bank_id: str) -> Scan:
    """Scan the bytes of a segment or of a part of the journal as their readers do."""
    schema = SEGMENT_SCHEMA if JournalName.parse(name) is None else JOURNAL_SCHEMA
    return scan_stream(memoryview(data), name, bank_id, schema)


def give_up(bank: RolloutBank) -> None:
    """As after a kill: nothing more is written."""
    bank._claim.forget()


def scratch() -> Path:
    """A directory in memory where there is one: thousands of copies are made."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="corruption-", dir=shared if os.access(shared, os.W_OK) else None))


# -- the first part: readers


@dataclass(frozen=True)
class Small:
    """A bank of one session, one segment and one journal part."""

    root: Path
    manifest: Manifest
    segment: Path
    journal: Path
    segment_bytes: bytes
    journal_bytes: bytes
    messages: list[bytes]
    edges: list[int]
    groups: list[Rollouts]
    entries: list[Any]
    entry_edges: list[int]

    @property
    def paths(self) -> BankPaths:
        return BankPaths(self.root)


def make_small(root: Path, *, close: bool = True) -> Small:
    """One group of each kind: a planned draw of two, an evicted one, the rest pending."""
    bank = RolloutBank.open(root)
    bank.restore(0)
    groups = [small(kind, number) for number, kind in enumerate(KINDS)]
    uids = [bank.append(group) for group in groups]
    bank.mark_consumed(uids[:2], 0, state=b"cursor")
    bank.evict(uids[2:3], "stale")
    if close:
        bank.close()
    else:
        give_up(bank)
    manifest = read_manifest(BankPaths(root))
    (segment,), (journal,) = (root / "segments").iterdir(), (root / "journal").iterdir()
    records = read_stream(segment.read_bytes(), segment.name, manifest.bank_id).records
    entries, _ = read_journal(BankPaths(root), JournalName(1, 0), manifest.bank_id)
    return Small(
        root, manifest, segment, journal, segment.read_bytes(), journal.read_bytes(),
        [bytes(record.message) for record in records], _edges(records), [group.rollouts for group in groups],
        [entry for _, entry in entries], _edges([record for record, _ in entries]),
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
        return {"segment": case.segment_bytes, "journal": case.journal_bytes}.get(self.file) or _manifest_bytes(case)

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
            case.paths.manifest.write_bytes(_manifest_bytes(case))
        return count, wrong


@cache
def _first_manifest(root: Path) -> bytes:
    return BankPaths(root).manifest.read_bytes()


def _manifest_bytes(case: Small) -> bytes:
    return _first_manifest(case.root)


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
def shared() -> Iterator[Path]:
    directory = scratch()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def case(shared: Path) -> Small:
    made = make_small(shared / "small")
    _manifest_bytes(made)
    return made


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


# -- the second part: whole opens


@dataclass(frozen=True)
class Stream:
    """A segment or a part of the journal as it was written."""

    data: bytes
    ranges: list[tuple[int, int]]
    keys: list[Any]
    """The groups' uids, or the entries."""
    appends: list[int]
    """Which append each of them was written by."""


@dataclass(frozen=True)
class Model:
    """A bank as it was before the damage, and what was put into it."""

    root: Path
    groups: dict[str, RolloutGroup]
    """All that were ever appended."""
    draws: list[tuple[int, tuple[str, ...], int, bytes | None]]
    """To be replayed: iteration, groups, span, state."""
    pending: list[str]
    segments: dict[str, Stream]
    """Live ones."""
    journal: dict[str, Stream]
    rows: dict[str, list[dict[str, Any]]]
    """What ``scan`` shows of each group."""
    manifest: Manifest
    closed: bool
    """Whether the last session was closed: then the journal says how many records each segment has."""

    @property
    def live(self) -> set[str]:
        return {uid for stream in self.segments.values() for uid in stream.keys}

    def cut(self, root: Path) -> set[str]:
        """Segments that are not there, or end with a whole record, earlier than they did."""
        found = set()
        for name, stream in self.segments.items():
            path = root / "segments" / name
            size = path.stat().st_size if path.is_file() else 0
            if size in {0, *(start for start, _ in stream.ranges)}:
                found.add(name)
        return found

    def hurt_groups(self, root: Path) -> set[str]:
        """Groups whose records are not in their places any more, in ``root``."""
        return {key for name, stream in self.segments.items() for key in _hurt(stream, root / "segments" / name)}

    def hurt_entries(self, root: Path) -> list[tuple[str, int]]:
        """Journal records that are not in their places any more."""
        found = []
        for name, stream in self.journal.items():
            numbered = replace(stream, keys=list(range(len(stream.keys))))
            found += [(name, number) for number in _hurt(numbered, root / "journal" / name)]
        return found


def _hurt(stream: Stream, path: Path) -> list[Any]:
    data = path.read_bytes() if path.is_file() else b""
    return [
        key for key, (start, stop) in zip(stream.keys, stream.ranges, strict=True)
        if data[start:stop] != stream.data[start:stop]
    ]  # fmt: skip


def make_whole(root: Path, *, close: bool) -> Model:
    """Two sessions: an archive, a carried segment, a journal that begins with a snapshot, planned draws, pending,
    evicted and validation groups."""
    bank = RolloutBank.open(root, keep_checkpoints=1)
    bank.restore(0)
    groups: dict[str, RolloutGroup] = {}
    count = iter(range(100))

    def put(kind: str, **options: Any) -> str:
        group = small(kind, next(count))
        uid = bank.append(group, **options)
        groups[uid] = group
        return uid

    first = [put("tokens"), put("texts")]
    gone = put("bare", evicted="at birth")
    bank.mark_consumed(first, 0, state=b"zero")
    bank.begin_iteration(1)
    second, waiting = [put("tokens"), put("empty")], [put("extras"), put("texts")]
    bank.mark_consumed(second, 1)
    bank.begin_iteration(2)
    bank.checkpoint(2, wait=True)  # iterations 0 and 1 go to the archive, what waits is carried on
    third, waiting2 = [put("arrays"), put("tokens")], [put("arrays")]
    bank.mark_consumed(third, 2, state=b"two")
    bank.close()

    bank = RolloutBank.open(root, keep_checkpoints=1)
    bank.restore(2)
    bank.mark_consumed(third, 2, state=b"two")
    bank.begin_iteration(3)
    fourth, stale = [put("texts"), put("bare"), put("tokens")], put("tokens")
    waiting3 = [put("bare"), put("extras"), put("tokens")]
    put("texts", split="validation")
    bank.mark_consumed(fourth, 3, span=2, state=b"three")
    bank.evict([stale], "stale")
    if close:
        bank.close()
    else:
        give_up(bank)
    assert gone in groups
    draws = [(2, tuple(third), 1, b"two"), (3, tuple(fourth), 2, b"three")]
    return look(root, groups, draws, [*waiting, *waiting2, *waiting3], closed=close)


def look(root: Path, groups: dict[str, RolloutGroup], draws: list[Any], pending: list[str], *, closed: bool) -> Model:
    """Take down what is in a bank's files."""
    paths = BankPaths(root)
    manifest = read_manifest(paths)
    segments, journal = {}, {}
    for name in map(str, live_segments(paths, manifest)):
        found, data = read_segment(paths.segments / name, manifest.bank_id)
        segments[name] = _stream(data, found.records, [record.head["uid"] for record in found.records])
    for part in paths.journal_names():
        if str(part) >= manifest.journal:
            entries, _ = read_journal(paths, part, manifest.bank_id)
            data = map_file(paths.journal / str(part))
            journal[str(part)] = _stream(data, [record for record, _ in entries], [entry for _, entry in entries])
    return Model(root, groups, draws, pending, segments, journal, rows_of(root), manifest, closed)


def _stream(data: memoryview, records: list[Record], keys: list[Any]) -> Stream:
    ranges = [(record.offset, record.offset + len(record.message)) for record in records]
    return Stream(bytes(data), ranges, keys, [record.first for record in records])


def rows_of(root: Path) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in scan(root).to_polars().collect().to_dicts():
        rows.setdefault(row["group_uid"], []).append(row)
    return rows


@dataclass(frozen=True)
class Found:
    """What one restore handed back."""

    draws: list[tuple[int, tuple[str, ...], int, bytes | None, tuple[str, ...]]]
    pending: list[str]
    groups: dict[str, RolloutGroup]
    report: Any
    refused: CorruptRecordError | None = None
    """It was told to accept damage after that."""

    @property
    def handed(self) -> list[str]:
        return [uid for draw in self.draws for uid in draw[1]] + self.pending


def restore(bank: RolloutBank) -> Found:
    refused = None
    try:
        restored = bank.restore(CHECKPOINT)
    except CorruptRecordError as error:
        refused = error
        restored = bank.restore(CHECKPOINT, accept_damage=True)
    return _found(restored, refused)


def _found(restored: Restored, refused: CorruptRecordError | None = None) -> Found:
    groups: dict[str, RolloutGroup] = {}
    draws = []
    for draw in restored.draws:
        draws.append((draw.iteration, tuple(str(g.uid) for g in draw.groups), draw.span, draw.state, draw.lost))
        groups |= {str(group.uid): group for group in draw.groups}
    pending = restored.take(10**6)
    groups |= {str(group.uid): group for group in pending}
    return Found(draws, [str(group.uid) for group in pending], groups, restored.report, refused)


def tree(root: Path) -> dict[str, bytes | str]:
    """Everything below a directory, links not followed."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = path.read_bytes()
        else:  # FIFOs and the like
            found[name] = f"mode {path.stat().st_mode:o}"
    return found


def copy(model: Model, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model.root, target, symlinks=True)
    return target


def judge(model: Model, root: Path, *, takeover: Any = "force") -> Found | ArrowbankError:
    """Open a damaged copy twice, and compare what comes back with what was put in. Raises AssertionError."""
    hurt, entries = model.hurt_groups(root), model.hurt_entries(root)
    behind = any(
        (root / "journal" / name).read_bytes()[stream.ranges[-1][1] :] != stream.data[stream.ranges[-1][1] :]
        for name, stream in model.journal.items() if (root / "journal" / name).is_file()
    )  # fmt: skip
    cut = set() if model.closed and not entries else model.cut(root)
    damaged = _damaged_bytes(model, root)
    before = tree(root)
    check_scan(model, root, hurt, entries)
    assert tree(root) == before, "scan wrote something"
    manifest_is_whole = (root / "MANIFEST.json").is_file() and before["MANIFEST.json"] == tree(model.root)[
        "MANIFEST.json"
    ]  # fmt: skip
    try:
        bank = RolloutBank.open(root, takeover=takeover, keep_checkpoints=1)
    except ArrowbankError as error:
        if not manifest_is_whole:
            assert tree(root) == before, "open refused, but changed something"
        return error
    with bank:
        found = restore(bank)
        assert found.refused is None or entries or behind
        check(model, found, hurt, entries, cut)
        group = small("tokens", 999)
        extra = bank.append(group)
    with RolloutBank.open(root, takeover="never", keep_checkpoints=1) as bank:
        again = restore(bank)
        assert (again.draws, again.pending) == (found.draws, [*found.pending, extra])
        assert again.groups == found.groups | {extra: group}
    _check_quarantine(root, damaged)
    return found


def check(model: Model, found: Found, hurt: set[str], entries: list[tuple[str, int]], cut: set[str]) -> None:
    """Nothing that was hit is handed back, everything else is, once, and what is missing is told.

    cut: segments that end cleanly where nothing says that there was more.
    """
    report = found.report
    assert len(set(found.handed)) == len(found.handed), "a group was handed out twice"
    for uid, group in found.groups.items():
        assert uid in model.groups and group == model.groups[uid], f"{uid} is not what was appended"
    assert not hurt & set(found.handed)
    wanted = {uid for _, uids, _, _ in model.draws for uid in uids} | set(model.pending)
    lost = wanted & hurt
    assert wanted - hurt <= set(found.handed), "groups that were not hit are missing"
    for name, stream in model.segments.items():
        gone = hurt & set(stream.keys)
        named = any(f"{name} at byte" in line for line in report.damage)
        assert not gone or named or name in cut, f"{name} lost {len(gone)} groups without a word"
    if model.closed and not entries:
        assert report.lost_records == len(hurt)
    if not entries:
        draws = [
            (at, tuple(uid for uid in uids if uid not in hurt), span, state, tuple(uid for uid in uids if uid in hurt))
            for at, uids, span, state in model.draws
        ]
        assert found.draws == draws
        assert sorted(found.pending) == sorted(set(model.pending) - hurt)
        assert report.lost_groups == len(lost - set(model.pending))
    elif found.refused is None:
        assert all(_is_tail(model.journal[name], name, at, entries) for name, at in entries), (
            f"entries {entries} are lost, and restore did not refuse"
        )
    else:
        assert "may be hidden" in str(found.refused)


def _is_tail(part: Stream, name: str, at: int, entries: list[tuple[str, int]]) -> bool:
    """Whether nothing of a later append is there: a torn tail, as a power cut in the middle of an append leaves it."""
    return not any((name, after) not in entries and part.appends[after] != part.appends[at]
                   for after in range(at, len(part.keys)))  # fmt: skip


def check_scan(model: Model, root: Path, hurt: set[str], entries: list[tuple[str, int]]) -> None:
    """Rows are right or missing; with a whole journal only those that were hit are missing."""
    try:
        rows = rows_of(root)
        groups = {str(group.uid): group for group in scan(root).groups()}
    except ArrowbankError:
        return
    fate = {"outcome", "consumed_iteration", "consumed_draw", "consumed_position", "draw_size", "draw_session",
            "span", "evict_reason", "draw_state", "lag"}  # fmt: skip
    for uid, found in rows.items():
        known = model.rows.get(uid)
        assert known is not None, f"scan shows {uid}, which was never appended"
        if entries:
            found, known = ([{key: row[key] for key in row.keys() - fate} for row in part] for part in (found, known))
        assert repr(found) == repr(known), f"scan shows wrong rows of {uid}"
        assert groups[uid] == model.groups[uid]
    assert model.rows.keys() - rows.keys() <= hurt, "scan leaves out groups that were not hit"


def _damaged_bytes(model: Model, root: Path) -> list[tuple[str, int, bytes]]:
    """Damaged parts of live segments and of the journal, as a reader sees them."""
    found = []
    for directory, names in (("segments", model.segments), ("journal", model.journal)):
        for name in names:
            path = root / directory / name
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                for damage in read_stream(data, name, model.manifest.bank_id).damage if data else ():
                    found.append((name, damage.offset, data[damage.offset : damage.offset + damage.length]))
    return found


def _check_quarantine(root: Path, damaged: list[tuple[str, int, bytes]]) -> None:
    """Every damaged part is in its file still, or in quarantine with a note that says where it was."""
    for name, offset, part in damaged:
        path = root / ("journal" if JournalName.parse(name) else "segments") / name
        if path.exists() and path.read_bytes()[offset : offset + len(part)] == part:
            continue
        notes = [json.loads(note.read_text()) for note in (root / "quarantine").glob("*.json")]
        kept = b"".join(copy.read_bytes() for copy in sorted((root / "quarantine").glob(f"{name}-*.bytes")))
        assert part in kept, f"{name}: {len(part)} damaged bytes at {offset} are gone"
        assert any(note["file"] == name for note in notes)


@pytest.fixture(scope="module", params=["closed", "killed"])
def model(request: pytest.FixtureRequest, shared: Path) -> Model:
    return make_whole(shared / f"whole-{request.param}", close=request.param == "closed")


@pytest.fixture(scope="module")
def other(shared: Path) -> Model:
    """Another bank."""
    return make_whole(shared / "other", close=True)


@pytest.fixture
def root(shared: Path, model: Model) -> Path:
    return copy(model, shared / "copy")


def test_without_damage_all_of_it_comes_back(model: Model, root: Path) -> None:
    found = judge(model, root)
    assert isinstance(found, Found)
    assert (found.report.damage, found.report.lost_records) == ((), 0)


# Named cases: what is done to a copy of the whole bank.

Harm = Callable[[Path, Model, Model], None]
"""Does something to a copy of a bank; the last one is another bank."""


def pick(model: Model, which: str) -> str:
    """Name a segment: "own" is the one with most groups that a session wrote itself, "carried" the carried one."""
    names = [
        name
        for name in model.segments
        if (SegmentName.parse(name) or pytest.fail(name)).is_carried == (which == "carried")
    ]
    return max(names, key=lambda name: len(model.segments[name].keys))


def middle(stream: Stream) -> tuple[int, int]:
    return stream.ranges[len(stream.ranges) // 2]


def in_segment(change: Callable[[bytes, Stream], bytes], which: str = "own") -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        name = pick(model, which)
        corruptors.rewrite(root / "segments" / name, lambda data: change(data, model.segments[name]))

    return harm


def in_journal(change: Callable[[bytes, Stream], bytes], part: int = -1) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        name = sorted(model.journal)[part]
        corruptors.rewrite(root / "journal" / name, lambda data: change(data, model.journal[name]))

    return harm


def swap_segments(root: Path, model: Model, _: Model) -> None:
    corruptors.swap(*(root / "segments" / name for name in sorted(model.segments)[-2:]))


def foreign_segment(root: Path, model: Model, other: Model) -> None:
    corruptors.copy_over(other.root / "segments" / pick(other, "own"), root / "segments" / pick(model, "own"))


def foreign_segments_all(root: Path, model: Model, other: Model) -> None:
    for name in other.segments:
        corruptors.copy_over(other.root / "segments" / name, root / "segments" / name)


def second_name(root: Path, model: Model, _: Model) -> None:
    name = SegmentName.parse(pick(model, "own"))
    assert name is not None
    corruptors.copy_over(root / "segments" / str(name), root / "segments" / str(replace(name, part=7)))


def swap_journal(root: Path, model: Model, _: Model) -> None:
    names = sorted(model.journal)
    corruptors.swap(root / "journal" / names[0], root / "journal" / names[-1])


def foreign_journal(root: Path, model: Model, other: Model) -> None:
    for name, theirs in zip(sorted(model.journal), sorted(other.journal), strict=True):
        corruptors.copy_over(other.root / "journal" / theirs, root / "journal" / name)


def drop_journal(part: int | None) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        for name in sorted(model.journal) if part is None else [sorted(model.journal)[part]]:
            corruptors.delete(root / "journal" / name)

    return harm


def archive_file(root: Path, model: Model, number: int = 0) -> Path:
    return BankPaths(root).version(model.manifest.version) / model.manifest.files[number].name


def in_archive(change: Callable[[bytes], bytes] | None) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        path = archive_file(root, model)
        if change is None:
            corruptors.delete(path)
        else:
            corruptors.rewrite(path, change)

    return harm


def foreign_archive(root: Path, model: Model, other: Model) -> None:
    corruptors.copy_over(archive_file(other.root, other), archive_file(root, model))


def swap_archive_with_empty(root: Path, model: Model, _: Model) -> None:
    path = archive_file(root, model)
    corruptors.swap(path, path.with_name("c000000-s0000.parquet"))


def in_file(name: str, change: Callable[[bytes], bytes] | None) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        if change is None:
            corruptors.delete(root / name)
        else:
            corruptors.rewrite(root / name, change)

    return harm


def no_sessions(root: Path, model: Model, _: Model) -> None:
    for path in (root / "sessions").iterdir():
        path.unlink()


def archive_link(target: str | None) -> Harm:
    def harm(root: Path, model: Model, _: Model) -> None:
        (root / "archive").unlink()
        if target:
            (root / "archive").symlink_to(target)

    return harm


def archive_directory(root: Path, model: Model, _: Model) -> None:
    (root / "archive").unlink()
    (root / "archive").mkdir()
    (root / "archive" / "mine.txt").write_text("not ours")


def unknown_files(root: Path, model: Model, _: Model) -> None:
    for name in (
        "notes.txt",
        "quarantine/x",
        "tmp/x",
        "sessions/x",
        ".archive/x",
        "segments/.nfs0001",
        "journal/.nfs1",
    ):
        (root / name).write_text("not ours")
    (root / ".archive/v000099").mkdir()
    (root / "tmp/s0001").mkdir(exist_ok=True)
    (root / "tmp/s0001/half").write_text("unfinished")


def unknown_segment(root: Path, model: Model, _: Model) -> None:
    (root / "segments/notes.txt").write_text("not ours")


def _middle_start(stream: Stream) -> int:
    return middle(stream)[0]


def _flip_middle(data: bytes, stream: Stream) -> bytes:
    return corruptors.flip(data, 8 * sum(middle(stream)) // 2)


def _flip_last(data: bytes, stream: Stream) -> bytes:
    return corruptors.flip(data, 8 * sum(stream.ranges[-1]) // 2)


def _flip_first(data: bytes, stream: Stream) -> bytes:
    return corruptors.flip(data, 8 * sum(stream.ranges[0]) // 2)


def _zero_header(data: bytes, stream: Stream) -> bytes:
    return corruptors.zero(data, _middle_start(stream), _middle_start(stream) + 8)


def _zero_record(data: bytes, stream: Stream) -> bytes:
    return corruptors.zero(data, *middle(stream))


def _cut_middle(data: bytes, stream: Stream) -> bytes:
    return corruptors.truncate(data, sum(middle(stream)) // 2)


def _cut_between(data: bytes, stream: Stream) -> bytes:
    return corruptors.truncate(data, _middle_start(stream))


def _cut_last(data: bytes, stream: Stream) -> bytes:
    return corruptors.truncate(data, sum(stream.ranges[-1]) // 2)


def _take_out(data: bytes, stream: Stream) -> bytes:
    start, stop = middle(stream)
    return data[:start] + data[stop:]


def _first_over_middle(data: bytes, stream: Stream) -> bytes:
    return corruptors.move(data, *stream.ranges[0], _middle_start(stream))


def _zero_schema(data: bytes, stream: Stream) -> bytes:
    return corruptors.zero(data, 0, stream.ranges[0][0])


def _zeros_behind(data: bytes, _: Stream) -> bytes:
    return corruptors.append(data, bytes(1 << 16))


def _junk_behind(data: bytes, _: Stream) -> bytes:
    return corruptors.append(data, corruptors.junk(5000))


def _twice(data: bytes, _: Stream) -> bytes:
    return corruptors.second_stream(data, data)


def _nothing(data: bytes, _: Stream) -> bytes:
    return b""


STREAM_CHANGES: dict[str, Callable[[bytes, Stream], bytes]] = {
    "a bit of the first record": _flip_first,
    "a bit of a middle record": _flip_middle,
    "a bit of the last record": _flip_last,
    "first eight bytes of a middle record zeroed": _zero_header,
    "a middle record zeroed": _zero_record,
    "cut in a middle record": _cut_middle,
    "cut between two records": _cut_between,
    "cut in the last record": _cut_last,
    "a middle record taken out": _take_out,
    "the first record over a middle one": _first_over_middle,
    "schema zeroed": _zero_schema,
    "64 KiB of zeros behind": _zeros_behind,
    "junk behind": _junk_behind,
    "a second stream behind the end mark": _twice,
    "empty": _nothing,
}


def _flip_footer(data: bytes) -> bytes:
    return corruptors.flip(data, 8 * (len(data) - 40))


def _flip_page(data: bytes) -> bytes:
    return corruptors.flip(data, 8 * (len(data) // 4))


NAMED: dict[str, Harm] = {
    **{f"segment: {name}": in_segment(change) for name, change in STREAM_CHANGES.items()},
    **{f"carried segment: {name}": in_segment(change, "carried") for name, change in STREAM_CHANGES.items()},
    **{f"journal's last part: {name}": in_journal(change) for name, change in STREAM_CHANGES.items()},
    **{f"journal's first part: {name}": in_journal(change, 0) for name, change in STREAM_CHANGES.items()},
    "segments: two swapped": swap_segments,
    "segments: another bank's": foreign_segment,
    "segments: all of another bank's": foreign_segments_all,
    "segments: one under a second name": second_name,
    "segments: one deleted": lambda root, model, _: corruptors.delete(root / "segments" / pick(model, "own")),
    "segments: carried one deleted": lambda root, model, _: corruptors.delete(
        root / "segments" / pick(model, "carried")
    ),
    "segments: a file of no known name": unknown_segment,
    "journal: first and last part swapped": swap_journal,
    "journal: another bank's": foreign_journal,
    "journal: all deleted": drop_journal(None),
    "journal: first part deleted": drop_journal(0),
    "journal: last part deleted": drop_journal(-1),
    "archive: a bit of a page": in_archive(_flip_page),
    "archive: a bit of the footer": in_archive(_flip_footer),
    "archive: cut": in_archive(lambda data: data[: len(data) // 2]),
    "archive: a file deleted": in_archive(None),
    "archive: another bank's file": foreign_archive,
    "archive: swapped with the empty one": swap_archive_with_empty,
    "archive link: deleted": archive_link(None),
    "archive link: elsewhere": archive_link("/tmp"),
    "archive link: a loop": archive_link("archive"),
    "archive link: a directory": archive_directory,
    "LOCK: a bit": in_file("LOCK", lambda data: corruptors.flip(data, 100)),
    "LOCK: empty": in_file("LOCK", lambda data: b""),
    "LOCK: deleted": in_file("LOCK", None),
    "claim: a bit of the last": in_file("sessions/0002", lambda data: corruptors.flip(data, 100)),
    "claim: last empty": in_file("sessions/0002", lambda data: b""),
    "claim: last deleted": in_file("sessions/0002", None),
    "claim: first deleted": in_file("sessions/0001", None),
    "claims: all deleted": no_sessions,
    "manifest: a bit": in_file("MANIFEST.json", lambda data: corruptors.flip(data, 1003)),
    "manifest: cut": in_file("MANIFEST.json", lambda data: data[:200]),
    "manifest: empty": in_file("MANIFEST.json", lambda data: b""),
    "manifest: deleted": in_file("MANIFEST.json", None),
    "unknown files": unknown_files,
}
REFUSED_AT_OPEN = ("manifest", "segments: a file of no known name", "archive link: a directory")


@pytest.mark.parametrize("name", NAMED)
def test_named_damage_is_contained_and_told(model: Model, other: Model, root: Path, name: str) -> None:
    NAMED[name](root, model, other)
    found = judge(model, root)
    if name.startswith("manifest"):
        assert isinstance(found, ArrowbankError)


# A seeded sample of any damage to any file.


def at_random(picked: random.Random, root: Path, model: Model, other: Model) -> str:
    """Do one thing to one file; say what."""
    paths = BankPaths(root)
    files = [root / "segments" / name for name in model.segments] + [root / "journal" / name for name in model.journal]
    files += [archive_file(root, model), paths.manifest, paths.lock, paths.claim(1), paths.claim(2)]
    path = picked.choice(files)
    data = path.read_bytes()
    start = picked.randrange(len(data))
    stop = min(start + picked.choice([1, 8, 100, 4096]), len(data))
    match picked.choice(["flip", "flip", "flip", "truncate", "zero", "junk", "second", "move", "copy", "delete"]):
        case "flip":
            bit = picked.randrange(8 * len(data))
            corruptors.rewrite(path, partial(corruptors.flip, bit=bit))
            return f"bit {bit} of {path.name}"
        case "truncate":
            corruptors.rewrite(path, partial(corruptors.truncate, length=start))
            return f"{path.name} cut at {start}"
        case "zero":
            corruptors.rewrite(path, partial(corruptors.zero, start=start, stop=stop))
            return f"{path.name}: zeros in {start} … {stop}"
        case "junk":
            corruptors.rewrite(path, partial(corruptors.append, tail=corruptors.junk(stop - start, start)))
            return f"{path.name}: {stop - start} bytes of junk behind"
        case "second":
            source = picked.choice(files)
            corruptors.rewrite(path, partial(corruptors.second_stream, other=source.read_bytes()))
            return f"{source.name} behind the end of {path.name}"
        case "move":
            to = picked.randrange(len(data)) // 8 * 8
            corruptors.rewrite(path, partial(corruptors.move, start=start, stop=stop, to=to))
            return f"{path.name}: {start} … {stop} over {to}"
        case "copy":
            source = picked.choice([*files, other.root / "segments" / pick(other, "own")])
            corruptors.copy_over(source, path)
            return f"{source.name} over {path.name}"
    corruptors.delete(path)
    return f"{path.name} deleted"


OPENS = 75
"""Of each of the two banks."""


@pytest.mark.parametrize("part", range(5))
def test_any_damage_to_any_file_is_contained_and_told(model: Model, other: Model, shared: Path, part: int) -> None:
    picked = random.Random(SEED + part)
    for number in range(OPENS // 5):
        root = copy(model, shared / "copy")
        done = at_random(picked, root, model, other)
        try:
            judge(model, root)
        except Exception as error:
            error.add_note(f"seed {SEED} + {part}, number {number}: {done}")
            raise


def test_two_damages_at_once_are_contained_and_told(model: Model, other: Model, shared: Path) -> None:
    picked = random.Random(SEED)
    for number in range(OPENS // 3):
        root = copy(model, shared / "copy")
        done = [at_random(picked, root, model, other)]
        with contextlib.suppress(FileNotFoundError, ValueError):  # what the first one deleted or emptied
            done.append(at_random(picked, root, model, other))
        try:
            judge(model, root)
        except Exception as error:
            error.add_note(f"seed {SEED}, number {number}: {done}")
            raise


# What a coordinator does about damage when it opens the bank.

HEALED = [name for name in NAMED if name.startswith(("segment: ", "carried segment: "))]


@pytest.mark.parametrize("name", HEALED)
def test_after_an_open_every_segment_is_read_by_plain_readers(
    model: Model, other: Model, root: Path, name: str
) -> None:
    NAMED[name](root, model, other)
    with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
        restored = bank.restore(CHECKPOINT)
    paths = BankPaths(root)
    manifest = read_manifest(paths)
    seen = set()
    for segment in live_segments(paths, manifest):
        path = paths.segments / str(segment)
        by_pyarrow = set(pa.ipc.open_stream(path.read_bytes()).read_all()["group_uid"].to_pylist())
        assert set(polars.read_ipc_stream(path)["group_uid"].to_list()) == by_pyarrow
        seen |= by_pyarrow
    handed = {str(group.uid) for draw in restored.draws for group in draw.groups}
    handed |= {str(group.uid) for queue in restored.pending.values() for group in queue}
    assert handed <= seen
    assert restored.report.quarantined == len(list(paths.quarantine.glob("*.json")))


def test_the_report_and_the_note_in_quarantine_name_file_offset_and_group(model: Model, root: Path) -> None:
    name = pick(model, "own")
    stream = model.segments[name]
    at = len(stream.keys) // 2
    start, stop = stream.ranges[at]
    corruptors.rewrite(root / "segments" / name, partial(corruptors.flip, bit=8 * (stop - 100)))
    with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
        report = bank.restore(CHECKPOINT).report
    (told,) = report.corrupt
    assert f"{name} at byte {start}: corrupt" in told
    assert stream.keys[at] in told
    assert (report.lost_records, report.quarantined) == (1, 1)
    (note,) = (json.loads(path.read_text()) for path in (root / "quarantine").glob("*.json"))
    assert (note["file"], note["offset"], note["length"], note["uid"]) == (name, start, stop - start, stream.keys[at])
    (kept,) = (path.read_bytes() for path in (root / "quarantine").glob("*.bytes"))
    assert kept == corruptors.flip(stream.data, 8 * (stop - 100))[start:stop]


def test_what_a_dead_session_left_is_known_after_the_next_open(shared: Path) -> None:
    model = make_whole(shared / "dead", close=False)
    for harm in ("segment: cut between two records", "segments: one deleted", "segment: a bit of the last record"):
        root = copy(model, shared / "copy")
        with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
            bank.restore(CHECKPOINT)
        NAMED[harm](root, model, model)
        hurt = model.hurt_groups(root)
        with RolloutBank.open(root, keep_checkpoints=1) as bank:
            found = restore(bank)
        assert found.refused is None
        assert found.report.lost_records == len(hurt) > 0, harm
        assert any(pick(model, "own") in line for line in found.report.corrupt), harm


@pytest.mark.parametrize("kind", ["closed", "killed"])
def test_a_part_of_the_journal_that_goes_missing_later_is_refused(shared: Path, kind: str) -> None:
    model = make_whole(shared / f"parts-{kind}", close=kind == "closed")
    for number in range(len(model.journal)):
        root = copy(model, shared / "copy")
        with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
            bank.restore(CHECKPOINT)
        corruptors.delete(root / "journal" / sorted(model.journal)[number])
        with RolloutBank.open(root, keep_checkpoints=1) as bank:
            with pytest.raises(CorruptRecordError, match="may be hidden"):
                bank.restore(CHECKPOINT)
            bank.restore(CHECKPOINT, accept_damage=True)


def test_restoring_below_a_damaged_archive_changes_nothing_or_gives_all(
    model: Model, other: Model, shared: Path
) -> None:
    version = f".archive/v{model.manifest.version:06d}/"
    names = [name for name in NAMED if name.startswith("archive: ")]
    for name in [*names, "unknown files"]:
        root = copy(model, shared / "copy")
        NAMED[name](root, model, other)
        with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
            before = {path: data for path, data in tree(root).items() if path.startswith((version, "MANIFEST"))}
            try:
                restored = bank.restore(0)
            except ArrowbankError:
                assert name in names
                after = tree(root)
                assert all(after[path] == data for path, data in before.items())
                bank.restore(CHECKPOINT)
            else:
                assert [draw.iteration for draw in restored.draws] == [0, 1, 2, 3]
                for draw in restored.draws:
                    assert draw.lost == ()
                    assert all(group == model.groups[str(group.uid)] for group in draw.groups)


@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: data[:40], lambda data: b"{}"], ids=["0", "40", "{}"]
)
def test_a_claim_that_does_not_say_who_holds_the_bank_is_refused_until_forced(
    model: Model, root: Path, change: Callable[[bytes], bytes]
) -> None:
    corruptors.rewrite(root / "sessions/0002", change)
    corruptors.delete(root / "LOCK")
    before = tree(root)
    with pytest.raises(CorruptionError, match="sessions/0002"):
        RolloutBank.open(root)
    assert tree(root) == before
    assert isinstance(judge(model, root, takeover="force"), Found)


STRANGE = ["MANIFEST.json", "LOCK", "sessions/0002", "segments", "journal", "sessions", "quarantine", "tmp", ".archive"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "socket"])
def test_what_is_not_a_plain_file_or_directory_is_refused_at_open(model: Model, shared: Path, kind: str) -> None:
    for number, place in enumerate(STRANGE):
        root, outside = copy(model, shared / "copy"), shared / f"outside-{model.closed}-{kind}-{number}"
        outside.mkdir()
        corruptors.replaced(place, kind)(root, outside)
        before = tree(root)
        with pytest.raises(CorruptionError) as refused:
            RolloutBank.open(root, takeover="force")
        assert place in str(refused.value)
        assert tree(root) == before


def test_a_child_process_lives_through_all_of_it(shared: Path) -> None:
    done = _child("--opens", str(shared / "child"), str(OPENS))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"{OPENS} opens"


def _child(*arguments: str, stdin: str = "", timeout: float = 600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)


def _opens(directory: Path, count: int) -> None:
    """In a child: no checks but that the process lives."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    faulthandler.dump_traceback_later(240, exit=True)
    model, other = make_whole(directory / "whole", close=False), make_whole(directory / "other", close=True)
    picked = random.Random(SEED - 1)
    for _ in range(count):
        root = copy(model, directory / "copy")
        for _ in range(3):
            with contextlib.suppress(FileNotFoundError, ValueError):
                at_random(picked, root, model, other)
        with contextlib.suppress(ArrowbankError):
            rows_of(root)
        with contextlib.suppress(ArrowbankError), RolloutBank.open(root, takeover="force") as bank:
            for group in restore(bank).groups.values():
                repr(group.rollouts)
    print(f"{count} opens")


# -- the third part: strangers

LIMIT_S = 10.0
"""For everything that is done with one bank."""
ENDED = "the process ended"


def _steps(root: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a trainer and an analyst do with a bank."""
    bank: list[RolloutBank] = []

    def opened() -> None:
        bank.append(RolloutBank.open(root, takeover="force", keep_checkpoints=1))

    def used() -> None:
        found = restore(bank[0])
        str(found.report)
        lost = 0
        for uid in found.handed:
            try:
                repr(found.groups[uid].rollouts)
            except CorruptRecordError:
                lost += 1
        if lost:
            return
        for at, uids, span, state, _ in found.draws[:50]:
            bank[0].begin_iteration(at)
            bank[0].mark_consumed(uids, at, span=span, state=state)
        end = bank[0].iteration + 1
        bank[0].begin_iteration(end)
        bank[0].mark_consumed([bank[0].append(small("tokens", 998))], end)
        bank[0].checkpoint(end + 1, wait=True)

    def scanned() -> None:
        view = scan(root)
        view.to_arrow()
        for group in view.groups():
            repr(group.rollouts)

    def scanned_by_polars() -> None:
        scan(root).to_polars().select("group_uid", "reward").collect()

    yield "scan", scanned
    yield "scan by polars", scanned_by_polars
    yield "open", opened
    if not bank:
        return
    yield "use", used
    yield "restore 0", lambda: bank[0].restore(0, accept_damage=True)
    yield "close", lambda: bank[0].close(final=True)
    yield "scan again", scanned
    yield "open again", lambda: RolloutBank.open(root, takeover="force").close()


def _tried(step: Callable[[], Any]) -> str | None:
    """Do a step; return what is wrong with how it ended, or None."""
    try:
        step()
    except ArrowbankError:
        return None
    except BaseException as error:
        import traceback

        where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        return f"{type(error).__name__}: {str(error)[:200]} ({' '.join(where[-4:])})"
    return None


def _hostile(directory: Path, names: list[str]) -> None:
    """In a child: print, for each case, its name before and what went wrong after it."""
    import logging

    logging.disable()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = make_whole(directory / "whole", close=True)
    for name in names:
        print(json.dumps({"case": name}), flush=True)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        shutil.rmtree(directory / "box", ignore_errors=True)
        root = copy(model, directory / "box" / "bank")
        outside = directory / "box" / "outside"
        outside.mkdir()
        (outside / "victim").write_text("not to be touched")
        corruptors.HOSTILE[name](root, outside)
        before, started = tree(outside), time.monotonic()
        wrong = [f"{step}: {said}" for step, do in _steps(root) if (said := _tried(do))]
        if tree(outside) != before:
            wrong.append("something outside of the bank was touched")
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"wrong": wrong, "seconds": round(time.monotonic() - started, 2)}), flush=True)


def _outcomes(directory: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """What was wrong with each case; a child does them, and another goes on behind one that killed it."""
    found: dict[str, list[str]] = {}
    left = list(names)
    while left:
        done = _child("--hostile", str(directory), stdin="\n".join(left))
        said = [json.loads(line) for line in done.stdout.splitlines()]
        assert said, done.stderr
        for case, result in zip(said[::2], said[1::2], strict=False):
            found[case["case"]] = result["wrong"]
        if len(said) % 2:
            found[said[-1]["case"]] = [f"{ENDED} with {done.returncode}: {done.stderr[-1500:]}"]
        left = [name for name in left if name not in found]
    return found


HOSTILE_FAULTS: dict[str, str] = {}
"""What the names of cases begin with that are known to fail, and why."""
HOSTILE_SAMPLE = 150


def _family(name: str) -> str:
    return name.split(":")[0] if ":" in name else "places"


def _fault(name: str) -> str | None:
    return next((fault for fault in HOSTILE_FAULTS if name.startswith(fault)), None)


FAMILIES = sorted({_family(name) for name in corruptors.HOSTILE})


@pytest.fixture(scope="module")
def outcomes(shared: Path) -> dict[str, list[str]]:
    picked, names = random.Random(SEED), sorted(corruptors.HOSTILE)
    sample = set(picked.sample(names, HOSTILE_SAMPLE))
    for fault in HOSTILE_FAULTS:
        sample |= set([name for name in names if name.startswith(fault)][:5])
    return _outcomes(shared / "hostile", [name for name in corruptors.HOSTILE if name in sample])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hostile_bank_ends_in_an_error_of_ours_or_a_sound_result(outcomes: dict[str, list[str]], family: str) -> None:
    wrong = {name: said for name, said in outcomes.items() if said and _family(name) == family}
    assert {name: said for name, said in wrong.items() if not _fault(name) or said[0].startswith(ENDED)} == {}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.xfail(reason=reason)) for fault, reason in HOSTILE_FAULTS.items()]
)
def test_a_hostile_bank_whose_errors_are_not_all_ours_yet(outcomes: dict[str, list[str]], fault: str) -> None:
    assert {name: said for name, said in outcomes.items() if said and name.startswith(fault)} == {}


# -- everything, from the command line


def _every_bit() -> int:
    """Print a table; return how many were wrong."""
    directory, bad = scratch(), 0
    try:
        made = make_small(directory / "small")
        _manifest_bytes(made)
        print(f"{'case':45} {'count':>8} {'wrong':>6} {'seconds':>8}")
        for every in EVERY_ONE:
            started = time.monotonic()
            count, wrong = every.run(made, range(every.size(made)))
            bad += len(wrong)
            print(f"{every!s:45} {count:8,} {len(wrong):6,} {time.monotonic() - started:8.1f}", *wrong[:3], sep="\n  ")
    finally:
        shutil.rmtree(directory)
    return bad


def _every_bank() -> int:
    directory = scratch()
    try:
        started = time.monotonic()
        wrong = {name: said for name, said in _outcomes(directory, corruptors.HOSTILE).items() if said}
    finally:
        shutil.rmtree(directory)
    for name, said in wrong.items():
        print(name, *said, sep="\n    ")
    print(f"{len(corruptors.HOSTILE):,} hostile banks, {len(wrong):,} wrong, {time.monotonic() - started:.1f} seconds")
    return len(wrong)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--every-bit"]:
            sys.exit(bool(_every_bit() + _every_bank()))
        case ["--opens", directory, count]:
            _opens(Path(directory), int(count))
        case ["--hostile", directory, *names]:
            _hostile(Path(directory), names or sys.stdin.read().splitlines())
        case _:
            sys.exit("usage: test_corruption.py --every-bit | --hostile DIRECTORY CASE…")
