"""What a bank's files say: history from the journals, live groups from the segments. Reading only.

Opening a bank and looking at one share this. Nothing here writes, so a second reading finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arrowbank.durable.journal import Abandoned, Entry, Sealed, read_journal
from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.line import History
from arrowbank.durable.manifest import Manifest
from arrowbank.durable.segment import GroupRef, read_segment
from arrowbank.durable.stream import Damage

__all__ = ["State", "read_state"]


@dataclass(slots=True)
class State:
    """What is in the files."""

    history: History = field(default_factory=History)
    groups: dict[str, GroupRef] = field(default_factory=dict)
    """Live groups by uid, oldest first."""
    segment_bytes: dict[SegmentName, int] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    """Segment → records that were acknowledged there and cannot be read."""


def read_state(paths: BankPaths, manifest: Manifest) -> State:
    """Read journals and live segments.

    Raises: CorruptionError for files that are not arrowbank's; CorruptRecordError for a sealed record that is no
    journal entry. Damage does not raise: it is listed.
    """
    state = State()
    abandoned: dict[str, set[int]] = {}
    expected: dict[str, int] = {}
    for entry in _journal_entries(paths, manifest, state):
        if isinstance(entry, Abandoned):
            abandoned.setdefault(entry.name, set()).update(range(entry.first, entry.first + entry.count))
        elif isinstance(entry, Sealed):
            expected |= {facts.name: facts.records for facts in entry.facts}
    for name in paths.segment_names():
        if str(name) not in manifest.retired:
            _read_groups(paths, manifest, state, name, abandoned.get(str(name), set()), expected.get(str(name), 0))
    return state


def _journal_entries(paths: BankPaths, manifest: Manifest, state: State) -> list[Entry]:
    """Fold all journals into the history; return their entries."""
    parts = []
    for name in paths.journal_names():
        entries, damage = read_journal(paths, name, manifest.bank_id)
        state.damage += damage
        parts.append((name, entries))
    phantom = {
        (entry.name, sequence)
        for _, entries in parts
        for _, entry in entries
        if isinstance(entry, Abandoned)
        for sequence in range(entry.first, entry.first + entry.count)
    }
    counted = []
    for name, entries in parts:
        for sequence, entry in entries:
            if (str(name), sequence) not in phantom:
                state.history.apply(name.session, entry)
                counted.append(entry)
    return counted


def _read_groups(
    paths: BankPaths, manifest: Manifest, state: State, name: SegmentName, abandoned: set[int], expected: int
) -> None:
    found, data = read_segment(paths.segments / str(name), manifest.bank_id)
    state.segment_bytes[name] = len(data)
    state.damage += found.damage
    seen = {record.sequence for record in found.records}
    lost = set(range(max(expected, max(seen, default=-1) + 1))) - seen - abandoned
    if lost:
        state.lost[str(name)] = len(lost)
    for record in found.records:
        uid = record.head.get("uid")
        if record.sequence not in abandoned and isinstance(uid, str):
            state.groups.setdefault(uid, GroupRef(uid, name, record.sequence, record.head, record))
            if "evicted" in record.head:
                state.history.evicted.setdefault(uid, record.head["evicted"])
