"""What a bank's files say: history from the journals, live groups from the segments. Reading only.

Opening a bank and looking at one share this. Nothing here writes, so a second reading finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arrowbank.durable.history import History
from arrowbank.durable.journal import Entry, Facts, Snapshot, read_journal
from arrowbank.durable.layout import BankPaths, JournalName, SegmentName
from arrowbank.durable.manifest import Manifest
from arrowbank.durable.segment import GroupRef, read_segment
from arrowbank.durable.snapshot import load_snapshot
from arrowbank.durable.stream import Damage, Record
from arrowbank.errors import CorruptRecordError

__all__ = ["State", "live_segments", "read_state"]


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


def read_state(paths: BankPaths, manifest: Manifest) -> State:
    """Read journals and live segments.

    Raises: CorruptionError for files that are not arrowbank's; CorruptRecordError for a sealed record that is no
    journal entry. Damage does not raise: it is listed.
    """
    state = State()
    _read_journals(paths, manifest, state)
    for name in live_segments(paths, manifest):
        _read_groups(paths, manifest, state, name)
    return state


def live_segments(paths: BankPaths, manifest: Manifest) -> list[SegmentName]:
    """Return the segments that count: not retired, and carried ones only when the manifest names them."""
    carried = set(manifest.carried)
    return [
        name for name in paths.segment_names()
        if str(name) not in manifest.retired and (not name.is_carried or str(name) in carried)
    ]  # fmt: skip


def _read_journals(paths: BankPaths, manifest: Manifest, state: State) -> None:
    """Fold the journals, from the base on, into history and facts."""
    base = JournalName.parse(manifest.journal)
    parts: list[tuple[JournalName, list[tuple[Record, Entry]]]] = []
    for name in paths.journal_names():
        if base is not None and name < base:
            continue
        entries, damage = read_journal(paths, name, manifest.bank_id)
        state.damage += damage
        hiding = [place for place in damage if not place.torn and place.lost != 0]
        state.hidden += [(place, _iterations_around(place, entries)) for place in hiding]
        state.journal_parts += 1
        parts.append((name, entries))
    if base is not None:
        _load_base(base, parts, state)
    for _, entries in parts:
        for _, entry in entries:
            state.facts.add(entry)
    for name, entries in parts:
        for record, entry in entries:
            if not isinstance(entry, Snapshot) and state.facts.counts(str(name), record.sequence):
                state.history.apply(name.session, entry)


def _load_base(base: JournalName, parts: list[tuple[JournalName, list[tuple[Record, Entry]]]], state: State) -> None:
    """Start from the snapshot that the manifest names. Without it, all that it summed up is hidden."""
    entries = next((entries for name, entries in parts if name == base), [])
    record, first = entries[0] if entries else (None, None)
    if record is not None and isinstance(first, Snapshot):
        try:
            state.history, state.facts = load_snapshot(first)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CorruptRecordError(
                str(base), f"the seal matches, but this is no snapshot ({error!r})", offset=record.offset
            ) from error
        return
    missing = Damage(str(base), 0, 0, "the snapshot that the journal starts with cannot be read", torn=False)
    if not any(damage.name == str(base) for damage, _ in state.hidden):
        state.damage.append(missing)
    state.hidden.insert(0, (missing, "at any iteration"))


def _iterations_around(damage: Damage, entries: list[tuple[Record, Entry]]) -> str:
    """Say where a hidden draw would be: between the iterations that the entries around the damage speak of."""
    known = [(record.offset, getattr(entry, "iteration", None)) for record, entry in entries]
    before = [at for offset, at in known if at is not None and offset < damage.offset]
    after = [at for offset, at in known if at is not None and offset > damage.offset]
    first = f"at iteration {before[-1]} or later" if before else "at any iteration"
    return f"{first}, up to {after[0]}," if after else first


def _read_groups(paths: BankPaths, manifest: Manifest, state: State, name: SegmentName) -> None:
    found, data = read_segment(paths.segments / str(name), manifest.bank_id)
    state.segment_bytes[name] = len(data)
    state.damage += found.damage
    counted = [record for record in found.records if state.facts.counts(str(name), record.sequence)]
    written = max(state.facts.records.get(str(name), 0), len(found.records) + found.missing)
    abandoned = state.facts.abandoned.get(str(name), ())
    given_up = len({sequence for gone in abandoned for sequence in range(gone.start, min(gone.stop, written))})
    if written - given_up > len(counted):
        state.lost[str(name)] = written - given_up - len(counted)
    for record in counted:
        uid = record.head.get("uid")
        if isinstance(uid, str):
            state.groups.setdefault(uid, GroupRef(uid, name, record.sequence, record.head, record))
            if "evicted" in record.head:
                state.history.evicted.setdefault(uid, record.head["evicted"])
