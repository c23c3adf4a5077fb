"""Journals and segments: every seal, what the journal says of files and groups, and each group once. Reading only."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arrowbank.archive.healing import drop_undecodable
from arrowbank.durable.files import read_small
from arrowbank.durable.journal import JOURNAL_SCHEMA
from arrowbank.durable.layout import BankPaths, JournalName, SegmentName
from arrowbank.durable.line import Line
from arrowbank.durable.manifest import Manifest
from arrowbank.durable.recovery import State, read_state
from arrowbank.durable.segment import GroupRef, load_batch
from arrowbank.durable.stream import Damage, begins_as_here, map_file, scan
from arrowbank.errors import CorruptionError, CorruptRecordError
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.verification.archived import ArchiveCheck
from arrowbank.verification.report import Counts, Finding, Mending, counted, damage, note

__all__ = ["LiveCheck", "Quarantined", "check_live", "check_quarantine", "check_superseded", "require_group"]

_ACCEPT = "Put the file back from a copy, or let repair --accept-damage go on with what can be read"
_BLOCKED = "repair gets to it once the journal's damage is accepted"
_PUT_BACK = "Put the file back from a copy, or let repair --accept-damage write down what is lost"
_COPIED = "repair copies the good records and keeps the damaged bytes in quarantine/"
_NOTE_BYTES = 1 << 20


@dataclass(slots=True)
class Quarantined:
    """What the notes in quarantine/ tell of."""

    notes: int = 0
    records: int = 0
    uids: set[str] = field(default_factory=set)
    """Groups that are known to be lost."""
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class LiveCheck:
    """What was found in journals and live segments."""

    state: State | None = None
    findings: list[Finding] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def check_live(
    paths: BankPaths, manifest: Manifest, archive: ArchiveCheck, told: Quarantined, passed: Callable[[str], None]
) -> LiveCheck:
    """Check what is not archived, and that nothing of it is archived as well."""
    found = LiveCheck()
    try:
        state = found.state = read_state(paths, manifest, passed)
    except CorruptRecordError as error:
        name = Path(error.path).name
        advice = "A program that is not arrowbank wrote it, or a newer one. repair leaves it alone"
        found.findings.append(damage(_place(name), error.reason, advice, offset=error.offset))
        return found
    drop_undecodable(state, state.segment_bytes, require_group)
    found.findings += map(_Told(state), state.damage)
    found.findings += _untold_losses(state)
    found.findings += _other_schema_messages(paths, manifest, state)
    found.findings += _twice(state, archive)
    found.findings += _draws(state, archive, told)
    files = state.journal_parts + len(state.segment_bytes)
    rollouts = sum(group.head["size"] for group in state.groups.values())
    nbytes = sum(state.segment_bytes.values())
    found.counts = Counts(files, state.records, len(state.groups), rollouts, nbytes)
    return found


def require_group(group: GroupRef) -> None:
    """Raise CorruptRecordError unless a live group's record has the rows that its head speaks of."""
    assert group.record is not None  # read from a file
    batch = load_batch(group.record)
    uids = set(batch.column("group_uid").to_pylist())
    if uids != {group.uid} or batch.num_rows != max(group.head["size"], 1):
        reason = "the seal matches, but the rows are not those that the head speaks of"
        raise CorruptRecordError(group.record.name, reason, offset=group.record.offset)


class _Told:
    """Tells of damage as a finding."""

    def __init__(self, state: State) -> None:
        self._hiding = dict(state.hidden)
        self._is_blocked = bool(state.hidden)
        self._there = set(map(str, state.segment_bytes))

    def __call__(self, place: Damage) -> Finding:
        is_journal = JournalName.parse(place.name) is not None
        reason = place.reason
        if place.lost:
            reason += f", {counted(place.lost, 'record')} lost"
        if place.torn:
            advice = "Left by a kill or a power cut; the next open copies what is good"
            mending = Mending.ACCEPT if self._is_blocked else Mending.REPAIR
            if is_journal and not place.length:
                advice, mending = "Left by a kill or a power cut; nothing was in it", Mending.NONE
            return note(_place(place.name), f"torn: {reason}", advice, mending, offset=place.offset)
        advice, mending = _COPIED, Mending.REPAIR
        if is_journal and place in self._hiding:
            reason += f": a draw {self._hiding[place].removesuffix(',')} may be hidden"
            advice, mending = _ACCEPT, Mending.ACCEPT
        elif not is_journal and place.name not in self._there:
            advice, mending = _PUT_BACK, Mending.ACCEPT
        elif self._is_blocked:
            advice, mending = _BLOCKED, Mending.ACCEPT
        uids = (place.uid,) if place.uid else ()
        return damage(_place(place.name), reason, advice, mending, offset=place.offset, uids=uids)


def _untold_losses(state: State) -> Iterator[Finding]:
    """Numbers that are missing where no bytes are damaged: not the work of arrowbank's writers."""
    told = {place.name for place in state.damage}
    for name, count in sorted(state.lost.items()):
        if name not in told:
            yield damage(_place(name), f"{counted(count, 'record')} missing by number alone", _COPIED)


def _other_schema_messages(paths: BankPaths, manifest: Manifest, state: State) -> Iterator[Finding]:
    """Schema messages that say the same in other bytes. No seal covers them, and arrowbank does without."""
    told = {place.name for place in state.damage}
    base = JournalName.parse(manifest.journal)
    segments = [(paths.segments / str(name), SEGMENT_SCHEMA) for name in state.segment_bytes]
    parts = [(paths.journal / str(name), JOURNAL_SCHEMA) for name in paths.journal_names() if not base or name >= base]
    for path, schema in (*segments, *parts):
        if path.name not in told and not begins_as_here(map_file(path), schema):
            reason = "its schema message has other bytes than this version of Arrow writes, which say the same"
            yield note(_place(path.name), reason, "Another version wrote it, or a bit is flipped that nothing reads")


def _twice(state: State, archive: ArchiveCheck) -> Iterator[Finding]:
    for uid, name in state.twice.items():
        yield note(f"segments/{name}", f"group {uid} stands twice; the first one counts", uids=(uid,))
    both = [uid for uid in state.groups if uid in archive.uids] if len(archive.uids) else []
    by_segment: dict[SegmentName, list[str]] = {}
    for uid in both:
        by_segment.setdefault(state.groups[uid].segment, []).append(uid)
    for segment, uids in sorted(by_segment.items()):
        reason = f"{len(uids)} of its groups are in the archive as well, {uids[0]} for one"
        advice = "The manifest is not the newest, or a program that is not arrowbank wrote it"
        yield damage(f"segments/{segment}", reason, advice, uids=tuple(uids))


def _draws(state: State, archive: ArchiveCheck, told: Quarantined) -> Iterator[Finding]:
    """Draws whose groups are nowhere, and groups in two draws of a line."""
    history = state.history
    there = {*map(str, state.segment_bytes), *map(str, state.unsealed)}
    missing_files = any(not place.length and not place.torn and place.name not in there for place in state.damage)
    advice, mending = "Restores say so in Draw.lost; repair writes it down in quarantine/", Mending.REPAIR
    if state.hidden or missing_files:
        advice, mending = "Restores say so in Draw.lost. " + _PUT_BACK, Mending.ACCEPT
    seen: set[tuple[int, str]] = set()
    for number, line in sorted(history.lines.items(), reverse=True):
        yield from _in_two_draws(number, line, history.evicted)
        for draw in line.draws():
            unknown = [
                uid for uid in draw.uids
                if (draw.iteration, uid) not in seen and uid not in state.groups and uid not in history.archived
                and uid not in archive.uids
            ]  # fmt: skip
            if not unknown:
                continue
            seen |= {(draw.iteration, uid) for uid in unknown}
            known_lost = told.uids | line.lost
            for make, uids in (
                (note, tuple(uid for uid in unknown if uid in known_lost)),
                (damage, tuple(uid for uid in unknown if uid not in known_lost)),
            ):
                if uids:
                    reason = f"the draw at iteration {draw.iteration} lacks {len(uids)} of its {len(draw.uids)} groups"
                    todo = (advice, mending) if make is damage else ("It was told before", Mending.NONE)
                    yield make("journal", reason, *todo, uids=uids, iteration=draw.iteration)


def _in_two_draws(number: int, line: Line, evicted: Container[str]) -> Iterator[Finding]:
    seen: set[str] = set()
    for draw in line.draws():
        again = [uid for uid in draw.uids if uid in seen and uid not in evicted]
        seen.update(draw.uids)
        if again:
            reason = f"on the line of session {number}, {len(again)} groups of the draw at iteration {draw.iteration} "
            yield damage("journal", reason + "are in another draw as well", "No arrowbank writes such a journal")


def check_superseded(paths: BankPaths, manifest: Manifest, passed: Callable[[str], None]) -> LiveCheck:
    """Check the files that do not count any more and are not gone yet: whatever is wrong with them is a note."""
    found = LiveCheck()
    base = JournalName.parse(manifest.journal)
    for name in (*paths.segment_names(), *paths.journal_names()):
        is_retired = isinstance(name, SegmentName) and str(name) in manifest.retired
        if not is_retired and not (isinstance(name, JournalName) and base is not None and name < base):
            continue
        is_segment = isinstance(name, SegmentName)
        path = (paths.segments if is_segment else paths.journal) / str(name)
        data = map_file(path)
        read = scan(data, path.name, manifest.bank_id, SEGMENT_SCHEMA if is_segment else JOURNAL_SCHEMA)
        passed(str(name))
        found.counts += Counts(1, len(read.records), 0, 0, len(data))
        for place in read.damage:
            reason = f"{place.reason}; the file is superseded, and goes with a later commit"
            found.findings.append(note(_place(place.name), reason, offset=place.offset))
    return found


def check_quarantine(paths: BankPaths) -> Quarantined:
    """Read the notes in quarantine/: what is told there was handled, and is no damage any more."""
    told = Quarantined()
    is_there = not paths.quarantine.is_symlink() and paths.quarantine.is_dir()
    for path in sorted(paths.quarantine.iterdir()) if is_there else ():
        if path.suffix == ".json":
            told.notes += 1
            said = _read_note(path)
            if said is None:
                told.findings.append(note(f"quarantine/{path.name!a}", "no note that can be read"))
                continue
            told.records += said["records"] if isinstance(said.get("records"), int) else 0
            told.uids.update(uid for uid in _uids(said) if isinstance(uid, str))
    if told.notes:
        lost = counted(told.records, "record")
        reason = f"{counted(told.notes, 'place')} of handled damage, {lost} lost there"
        told.findings.insert(0, note("quarantine", reason, "Remove it once nobody will look at it any more"))
    return told


def _read_note(path: Path) -> dict[str, Any] | None:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        said = json.loads(read_small(path, _NOTE_BYTES))
    except (CorruptionError, FileNotFoundError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _uids(said: dict[str, Any]) -> Iterable[Any]:
    many = said.get("uids")
    return [said.get("uid"), *(many if isinstance(many, list) else ())]


def _place(name: str) -> str:
    return f"{'segments' if JournalName.parse(name) is None else 'journal'}/{name}"
