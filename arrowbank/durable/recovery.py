"""What a bank's files say: history from the journals, live groups from the segments. Reading only.

Opening a bank and looking at one share this. Nothing here writes, so a second reading finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arrowbank.durable.journal import Abandoned, Entry, Sealed, read_journal
from arrowbank.durable.layout import BankPaths, JournalName, SegmentName
from arrowbank.durable.line import History
from arrowbank.durable.manifest import Manifest
from arrowbank.durable.segment import GroupRef, read_segment
from arrowbank.durable.stream import Damage, Record

__all__ = ["State", "read_state"]


@dataclass(slots=True)
class State:
    """What is in the files."""

    history: History = field(default_factory=History)
    groups: dict[str, GroupRef] = field(default_factory=dict)
    """Live groups by uid, oldest first."""
    segment_bytes: dict[SegmentName, int] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)
    hidden: list[tuple[Damage, str]] = field(default_factory=list)
    """Damage of journals that may hide a draw, and between which iterations it would be."""
    lost: dict[str, int] = field(default_factory=dict)
    """Segment → records that were acknowledged there and cannot be read."""


def read_state(paths: BankPaths, manifest: Manifest) -> State:
    """Read journals and live segments.

    Raises: CorruptionError for files that are not arrowbank's; CorruptRecordError for a sealed record that is no
    journal entry. Damage does not raise: it is listed.
    """
    state = State()
    abandoned: dict[str, set[range]] = {}
    expected: dict[str, int] = {}
    for entry in _journal_entries(paths, manifest, state):
        if isinstance(entry, Abandoned):
            abandoned.setdefault(entry.name, set()).add(entry.sequences)
        elif isinstance(entry, Sealed):
            expected |= {facts.name: facts.records for facts in entry.facts}
    for name in paths.segment_names():
        if str(name) not in manifest.retired:
            _read_groups(paths, manifest, state, name, abandoned.get(str(name), set()), expected.get(str(name), 0))
    return state


def _journal_entries(paths: BankPaths, manifest: Manifest, state: State) -> list[Entry]:
    """Fold all journals into the history; return their entries."""
    parts: list[tuple[JournalName, list[tuple[int, Entry]]]] = []
    for name in paths.journal_names():
        entries, damage = read_journal(paths, name, manifest.bank_id)
        state.damage += damage
        hiding = (place for place in damage if not place.torn and place.lost != 0)
        state.hidden += [(place, _iterations_around(place, entries)) for place in hiding]
        parts.append((name, [(found.sequence, entry) for found, entry in entries]))
    phantom: dict[str, list[range]] = {}
    for _, numbered in parts:
        for _, entry in numbered:
            if isinstance(entry, Abandoned):
                phantom.setdefault(entry.name, []).append(entry.sequences)
    counted = []
    for name, numbered in parts:
        for sequence, entry in numbered:
            if not any(sequence in sequences for sequences in phantom.get(str(name), ())):
                state.history.apply(name.session, entry)
                counted.append(entry)
    return counted


def _iterations_around(damage: Damage, entries: list[tuple[Record, Entry]]) -> str:
    """Say where a hidden draw would be: between the iterations that the entries around the damage speak of."""
    known = [(record.offset, getattr(entry, "iteration", None)) for record, entry in entries]
    before = [at for offset, at in known if at is not None and offset < damage.offset]
    after = [at for offset, at in known if at is not None and offset > damage.offset]
    first = f"at iteration {before[-1]} or later" if before else "at any iteration"
    return f"{first}, up to {after[0]}," if after else first


def _read_groups(
    paths: BankPaths, manifest: Manifest, state: State, name: SegmentName, abandoned: set[range], expected: int
) -> None:
    found, data = read_segment(paths.segments / str(name), manifest.bank_id)
    state.segment_bytes[name] = len(data)
    state.damage += found.damage
    counted = [record for record in found.records if not any(record.sequence in gone for gone in abandoned)]
    written = max(expected, len(found.records) + found.missing)
    given_up = sum(len(range(gone.start, min(gone.stop, written))) for gone in abandoned)
    if written - given_up > len(counted):
        state.lost[str(name)] = written - given_up - len(counted)
    for record in counted:
        uid = record.head.get("uid")
        if isinstance(uid, str):
            state.groups.setdefault(uid, GroupRef(uid, name, record.sequence, record.head, record))
            if "evicted" in record.head:
                state.history.evicted.setdefault(uid, record.head["evicted"])
