"""Damaged segments: their damage to quarantine, their good records to carried segments, for one commit.

A torn tail is as normal as a kill; anything else is not expected, and is told. Either way a bank that has been opened
holds whole streams only, which any Arrow reader takes, and no damaged byte goes before a copy of it lies in quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from arrowbank.archive.carry import Carried, CarryWriter
from arrowbank.archive.store import ArchiveStore
from arrowbank.durable import quarantine
from arrowbank.durable.layout import CARRY, SegmentName
from arrowbank.durable.recovery import State
from arrowbank.durable.segment import GroupRef, load_batch
from arrowbank.durable.stream import Damage, Record
from arrowbank.errors import CorruptRecordError

__all__ = ["Healed", "copy", "drop_undecodable"]


@dataclass(frozen=True, slots=True)
class Healed:
    """What has been made under tmp/, for one commit."""

    retired: tuple[SegmentName, ...]
    carried: tuple[Carried, ...]


def copy(store: ArchiveStore, state: State, damaged: Container[str]) -> Healed:
    """Copy what is good in the ``damaged`` segments. A record that no group can be read from is damage, too.

    Durability: what is in quarantine survives power loss on return; of the rest nothing counts yet.
    Raises OSError.
    """
    names = tuple(sorted(name for name in state.segment_bytes if str(name) in damaged))
    drop_undecodable(state, names, lambda group: load_batch(_record(group)))
    groups = sorted((group for group in state.groups.values() if group.segment in names), key=lambda group: group.age)
    quarantine.keep(store.paths, store.tmp, [part for part in state.damage if part.name in damaged and part.length])

    def name(iteration: int) -> SegmentName:
        return SegmentName(store.session, iteration, store.next_number(), CARRY)

    writer = CarryWriter(store.paths, store.tmp, store.manifest.bank_id, name)
    last = None
    try:
        for group in groups:
            if group.segment.iteration != last:
                writer.may_cut()
                last = group.segment.iteration
            writer.add(load_batch(_record(group)), {"session": group.segment.session} | group.head)
        writer.finish()
    finally:
        writer.close()
    return Healed(names, tuple(writer.done))


def drop_undecodable(state: State, names: Container[SegmentName], decode: Callable[[GroupRef], object]) -> None:
    """Note as damage those records of some segments that are sealed and that ``decode`` takes for no group's."""
    for uid, group in list(state.groups.items()):
        if group.segment not in names:
            continue
        record = _record(group)
        try:
            decode(group)
        except CorruptRecordError as error:
            place = Damage(record.name, record.offset, len(record.message), error.reason, torn=False, lost=1, uid=uid)
            state.damage.append(place)
            state.lost[record.name] = state.lost.get(record.name, 0) + 1
            del state.groups[uid]


def _record(group: GroupRef) -> Record:
    assert group.record is not None  # read from a file
    return group.record
