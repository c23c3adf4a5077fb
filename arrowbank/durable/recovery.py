"""What a bank's files say: history from the journals, live groups from the segments. Reading only.

Opening a bank and looking at one share this. Nothing here writes, so a second reading finds the same. Files are mapped
before any is read: what a trainer at work appends, or takes away, meanwhile changes nothing.

A file that was *sealed* (a journal entry says how many records of it count) has neither fewer nor more: what is missing
is told, and what came later, from somebody who had lost his place by then, does not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from arrowbank.durable.history import History
from arrowbank.durable.journal import Abandoned, Entry, Facts, Snapshot, scan_journal
from arrowbank.durable.layout import BankPaths, JournalName, SegmentName
from arrowbank.durable.manifest import Manifest
from arrowbank.durable.segment import GroupRef, abandoned_in, check_head
from arrowbank.durable.session import JournalEnd, journal_ends
from arrowbank.durable.snapshot import load_snapshot
from arrowbank.durable.stream import Damage, Record, Scan, map_file, scan
from arrowbank.errors import CorruptRecordError
from arrowbank.schema import SEGMENT_SCHEMA

__all__ = ["LiveFiles", "State", "live_segments", "map_live_files", "read_groups", "read_state"]


_Name = TypeVar("_Name", JournalName, SegmentName)


@dataclass(frozen=True, slots=True)
class LiveFiles:
    """Journals and live segments, mapped as long as they were at one moment: what is appended later is not seen."""

    ends: tuple[JournalEnd, ...]
    """What LOCK and claims say of how journals ended."""
    journal: dict[JournalName, memoryview]
    segments: dict[SegmentName, memoryview]
    """Those that count."""


@dataclass(slots=True)
class State:
    """What is in the files."""

    history: History = field(default_factory=History)
    facts: Facts = field(default_factory=Facts)
    groups: dict[str, GroupRef] = field(default_factory=dict)
    """Live groups by uid, oldest first."""
    journal_parts: int = 0
    """Files that the journal was read from."""
    segment_bytes: dict[SegmentName, int] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)
    hidden: list[tuple[Damage, str]] = field(default_factory=list)
    """Damage of journals that may hide a draw, and between which iterations it would be."""
    lost: dict[str, int] = field(default_factory=dict)
    """Segment → records that were acknowledged there and cannot be read."""
    unsealed: dict[str, int] = field(default_factory=dict)
    """Segments and parts of the journal of which no entry says how many records count → how many were found."""
    unfinished: dict[str, list[range]] = field(default_factory=dict)
    """Unsealed segment → sequence numbers of records that are not there, of appends that did not return."""
    twice: dict[str, SegmentName] = field(default_factory=dict)
    """Live groups that stand a second time → where. The first one counts."""
    records: int = 0
    """Sealed records that were read, of journals and segments."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing or damaged, but for the torn tails that kills leave."""
        return not self.hidden and not self.lost and all(place.torn for place in self.damage)


def map_live_files(paths: BankPaths, manifest: Manifest, before: LiveFiles | None = None) -> LiveFiles:
    """Map what is not archived. The manifest must still be the same when this returns: a commit takes files away.

    Whatever speaks of others is looked at before them, so that nothing is missed that only was not there yet.
    before: of an earlier try. A file that has not grown since is not mapped again: names are used once, and what is
    written stays.
    Raises: CorruptionError for files that are not arrowbank's; FileNotFoundError when one goes meanwhile.
    """
    base = JournalName.parse(manifest.journal)

    def parts() -> list[JournalName]:
        return [name for name in paths.journal_names() if base is None or name >= base]

    while True:
        ends = tuple(journal_ends(paths, max((name.session for name in parts()), default=0)))
        journal = _map(paths.journal, parts(), {} if before is None else before.journal)
        live = live_segments(paths, manifest)
        segments = _map(paths.segments, live, {} if before is None else before.segments)
        begun = {name.session for name in parts()} - {name.session for name in journal}
        if begun.isdisjoint(name.session for name in segments):
            return LiveFiles(ends, journal, segments)


def _map(directory: Path, names: Iterable[_Name], before: Mapping[_Name, memoryview]) -> dict[_Name, memoryview]:
    mapped = {}
    for name in names:
        path = f"{directory}/{name}"  # thousands of them are a moment faster than as a Path
        known = before.get(name)
        mapped[name] = known if known is not None and len(known) == os.stat(path).st_size else map_file(path)
    return mapped


def read_state(
    paths: BankPaths,
    manifest: Manifest,
    passed: Callable[[str], None] = lambda name: None,
    files: LiveFiles | None = None,
) -> State:
    """Read journals and live segments.

    passed: is told the name of each file that was read. files: where they were mapped before.
    Raises: CorruptionError for files that are not arrowbank's; CorruptRecordError for a sealed record that is no
    journal entry. Damage does not raise: it is listed.
    """
    state = State()
    files = files or map_live_files(paths, manifest)
    _read_journals(paths, manifest, state, files, passed)
    read_groups(files.segments, manifest, state, passed)
    _note_missing(state, manifest, set(map(str, files.segments)))
    return state


def live_segments(paths: BankPaths, manifest: Manifest) -> list[SegmentName]:
    """Return the segments that count: not retired, and carried ones only when the manifest names them."""
    carried = set(manifest.carried)
    return [
        name for name in paths.segment_names()
        if str(name) not in manifest.retired and (not name.is_carried or str(name) in carried)
    ]  # fmt: skip


def _read_journals(
    paths: BankPaths, manifest: Manifest, state: State, files: LiveFiles, passed: Callable[[str], None]
) -> None:
    """Fold the journals, from the base on, into history and facts."""
    base = JournalName.parse(manifest.journal)
    parts: list[_Part] = []
    for name, data in files.journal.items():
        parts.append(_Part(name, *scan_journal(data, name, manifest.bank_id)))
        passed(str(name))
    state.journal_parts = len(parts)
    state.records += sum(len(part.entries) for part in parts)
    if base is not None:
        _load_base(base, parts, state)
    ended = _note_ends(files.ends, base, state)
    for part in reversed(parts):  # a later session says how much of an earlier one's counts
        _judge(part, state, ended)
        for _, entry in part.entries:
            state.facts.add(entry)
    state.damage += [place for part in parts for place in part.damage]
    _note_missing_parts(base, parts, state, {name.session for name in files.segments})
    for part in parts:
        for record, entry in part.entries:
            if not isinstance(entry, Snapshot) and state.facts.counts(str(part.name), record.sequence):
                _apply(paths, part.name, record, entry, state)


@dataclass(slots=True)
class _Part:
    """A part of the journal as it was read."""

    name: JournalName
    entries: list[tuple[Record, Entry]]
    damage: list[Damage]


def _note_ends(ends: tuple[JournalEnd, ...], base: JournalName | None, state: State) -> set[str]:
    """Take in what LOCK and claims say of journals of closed sessions; return of which no journal says so yet."""
    ended = set()
    for said in ends:
        name = JournalName.parse(said.name)
        if name is not None and (base is None or name >= base) and said.name not in state.facts.records:
            state.facts.records[said.name] = said.records
            ended.add(said.name)
    return ended


def _judge(part: _Part, state: State, ended: Container[str]) -> None:
    """Say what a part's damage may hide, and leave out what came after it was sealed."""
    name, sealed = str(part.name), state.facts.records.get(str(part.name))
    found = part.entries[-1][0].sequence + 1 if part.entries else 0
    if sealed is not None and found < sealed:  # its end is gone: no torn tail, since all of it was acknowledged
        place = part.damage.pop() if part.damage and part.damage[-1].lost is None else _gap(name, None)
        part.damage.append(replace(place, torn=False, lost=sealed - found))
    elif sealed is not None:
        part.entries = [(record, entry) for record, entry in part.entries if record.sequence < sealed]
        part.damage = [place if place.lost is not None else replace(place, lost=0) for place in part.damage]
    hiding = [place for place in part.damage if not place.torn and place.lost != 0]
    if not hiding and (sealed is None or name in ended):
        state.unsealed[name] = found if sealed is None else sealed
    state.hidden[:0] = [(place, _iterations_around(place, part.entries)) for place in hiding]


def _note_missing_parts(base: JournalName | None, parts: list[_Part], state: State, appended: set[int]) -> None:
    """A part is missing when a later one of its session is there, or an entry speaks of its records; the first one,
    too, when its session has ``appended``: it was made before.
    """
    there = {part.name for part in parts}
    told = {name for name in map(JournalName.parse, state.facts.records) if name is not None}
    abandoned = set(map(JournalName.parse, state.facts.abandoned))
    missing = (told | {JournalName(session, 0) for session in appended - {name.session for name in there}}) - there
    expected: dict[int, int] = {} if base is None else {base.session: base.part}
    for name in sorted(there):
        gap = range(expected.get(name.session, 0), name.part)
        between = (JournalName(name.session, part) for part in islice(gap, len(abandoned) + 1))  # however wide it is
        missing |= set(islice((one for one in between if one not in abandoned), 1))
        expected[name.session] = name.part + 1
    for name in sorted(missing):
        count = state.facts.records.get(str(name))
        if count != 0 and (base is None or name > base):
            state.damage.append(_gap(str(name), count))
            state.hidden.append((state.damage[-1], "at any iteration"))


def _gap(name: str, lost: int | None) -> Damage:
    return Damage(name, 0, 0, "records that were here are missing", torn=False, lost=lost)


def _apply(paths: BankPaths, name: JournalName, record: Record, entry: Entry, state: State) -> None:
    try:
        state.history.apply(name.session, entry)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise CorruptRecordError(
            paths.journal / str(name),
            f"the seal matches, but the entry makes no sense here ({error!r})",
            offset=record.offset,
            hint="It was written by a program that is not arrowbank, or a newer one",
        ) from error


def _load_base(base: JournalName, parts: list[_Part], state: State) -> None:
    """Start from the snapshot that the manifest names. Without it, all that it summed up is hidden."""
    entries = next((part.entries for part in parts if part.name == base), [])
    record, first = entries[0] if entries else (None, None)
    if record is not None and isinstance(first, Snapshot):
        try:
            state.history, state.facts = load_snapshot(first)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            raise CorruptRecordError(
                str(base), f"the seal matches, but this is no snapshot ({error!r})", offset=record.offset
            ) from error
        return
    missing = Damage(str(base), 0, 0, "the snapshot that the journal starts with cannot be read", torn=False)
    state.damage.append(missing)
    state.hidden.append((missing, "at any iteration"))


def _iterations_around(damage: Damage, entries: list[tuple[Record, Entry]]) -> str:
    """Say where a hidden draw would be: between the iterations that the entries around the damage speak of."""
    known = [(record.offset, getattr(entry, "iteration", None)) for record, entry in entries]
    before = [at for offset, at in known if at is not None and offset < damage.offset]
    after = [at for offset, at in known if at is not None and offset > damage.offset]
    first = f"at iteration {before[-1]} or later" if before else "at any iteration"
    return f"{first}, up to {after[0]}," if after else first


def read_groups(
    segments: Mapping[SegmentName, memoryview],
    manifest: Manifest,
    state: State,
    passed: Callable[[str], None] = lambda name: None,
) -> None:
    """Read the groups of mapped segments into a state."""
    scans = {}
    for name, data in segments.items():
        scans[name] = scan(data, str(name), manifest.bank_id, SEGMENT_SCHEMA)
        passed(str(name))
        state.segment_bytes[name] = len(data)
        state.records += len(scans[name].records)
        sealed = state.facts.records.get(str(name))
        for record in scans[name].records:  # before any record is counted: they speak of other segments
            for gone in abandoned_in(record.head) or ():
                if sealed is None or record.sequence < sealed:
                    state.facts.add(Abandoned(*gone))
    for name, found in scans.items():
        _take_in_segment(state, name, found)


def _take_in_segment(state: State, name: SegmentName, found: Scan) -> None:
    sealed = state.facts.records.get(str(name))
    written = found.records[-1].sequence + 1 if found.records else 0
    unfinished: list[range] = []
    if sealed is None:
        if not name.is_carried:
            state.unsealed[str(name)] = written
        sealed = written
        unfinished = _unfinished(found)
        if unfinished:
            state.unfinished[str(name)] = unfinished
    if written < sealed:  # its end is gone: no torn tail, since all of it was acknowledged
        tail = found.damage.pop() if found.damage and found.damage[-1].lost is None else _gap(str(name), None)
        found.damage.append(replace(tail, torn=False, lost=sealed - written))
    state.damage += found.damage
    given_up = state.facts.abandoned_before(str(name), sealed, unfinished)
    count = 0
    for record in found.records:
        if record.sequence < sealed and state.facts.counts(str(name), record.sequence):
            count += abandoned_in(record.head) is not None or _take_in(state, name, record)
    if (lost := sealed - given_up - count) > 0:
        state.lost[str(name)] = lost


def _unfinished(found: Scan) -> list[range]:
    places = {record.offset: record.sequence for record in found.records}
    behind = [(places.get(part.offset + part.length), part.lost or 0) for part in found.damage if part.torn]
    return [range(sequence - lost, sequence) for sequence, lost in behind if sequence is not None and lost]


def _take_in(state: State, name: SegmentName, record: Record) -> bool:
    """Take in a record's group, if it is one."""
    complaint = check_head(record.head)
    if complaint is not None:
        reason = f"the seal matches, but the record is no group's ({complaint})"
        state.damage.append(Damage(str(name), record.offset, len(record.message), reason, torn=False, lost=1))
        return False
    uid = record.head["uid"]
    if uid in state.groups:
        state.twice[uid] = name
    state.groups.setdefault(uid, GroupRef(uid, name, record.sequence, record.head, record))
    if "evicted" in record.head:
        state.history.evicted.setdefault(uid, record.head["evicted"])
    return True


def _note_missing(state: State, manifest: Manifest, live: set[str]) -> None:
    """Segments that an entry or the manifest speaks of, and that are not there."""
    named = {name for name in state.facts.records if JournalName.parse(name) is None} | set(manifest.carried)
    for name in sorted(named - live - manifest.retired.keys()):
        count = state.facts.records.get(name)
        if count != 0:
            state.damage.append(_gap(name, count))
            state.lost[name] = count or 0
