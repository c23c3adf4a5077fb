"""Groups in segments: where they are, and reading them back. ``appender`` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import pyarrow as pa

from arrowbank import codec
from arrowbank.durable.layout import SegmentName
from arrowbank.durable.stream import Damage, Record, Scan, map_file, scan
from arrowbank.errors import CorruptRecordError
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.types import Rollouts

__all__ = [
    "NOT_A_GROUP",
    "GroupRef",
    "SegmentFacts",
    "abandoned_in",
    "check_head",
    "describe",
    "load_batch",
    "load_rollouts",
    "read_segment",
    "told_as_damage",
]


@dataclass(frozen=True, slots=True)
class GroupRef:
    """Where a live group is."""

    uid: str
    segment: SegmentName
    sequence: int
    head: dict[str, Any]
    record: Record | None = None
    """Mapped, for groups that were read; None for those that this session appended."""

    @property
    def age(self) -> tuple[int, int, int, int]:
        """Orders groups by when they were finished, oldest first, wherever they have been carried to since."""
        session = self.head.get("session", self.segment.session)
        return session, self.head.get("at", 0), self.segment.iteration, self.sequence


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What the journal remembers of a closed segment."""

    name: str
    records: int
    nbytes: int


def read_segment(path: Path, bank_id: str) -> tuple[Scan, memoryview]:
    """Scan a segment. The mapping may be kept: no file of a bank is ever truncated."""
    data = map_file(path)
    return scan(data, path.name, bank_id, SEGMENT_SCHEMA), data


NOT_A_GROUP = (
    ValueError, OSError, KeyError, TypeError, IndexError, AttributeError, StopIteration, OverflowError, RecursionError,
    pa.ArrowException,
)  # fmt: skip
"""What decoding bytes of another program may meet."""


def load_rollouts(record: Record) -> Rollouts:
    """Decode a record's rollouts. Raises CorruptRecordError when sealed bytes are not a group."""
    with told_as_damage(record):
        return codec.decode_group(record.batch(SEGMENT_SCHEMA))


def load_batch(record: Record) -> pa.RecordBatch:
    """Parse a record's rows. Raises CorruptRecordError when sealed bytes are not a group's."""
    with told_as_damage(record):
        return record.batch(SEGMENT_SCHEMA)


@contextmanager
def told_as_damage(record: Record) -> Iterator[None]:
    """Turn what decoding says of a record that is sealed and no group's into CorruptRecordError."""
    try:
        yield
    except NOT_A_GROUP as error:
        raise CorruptRecordError(
            record.name,
            f"the seal matches, but the record is not a group ({error})",
            offset=record.offset,
            hint="It was written by a program that is not arrowbank, or a newer one",
        ) from error


_HEAD: dict[str, tuple[type | tuple[type, ...], bool]] = {
    "uid": (str, True), "iteration": (int, True), "env": ((str, NoneType), True), "problem": ((str, NoneType), True),
    "split": (str, True), "size": (int, True), "at": (int, False), "session": (int, False),
    "source_index": (int, False), "evicted": (str, False),
}  # fmt: skip
_INT64 = range(-(2**63), 2**63)
_COUNTS = ("iteration", "size", "session")


def abandoned_in(head: dict[str, Any]) -> list[tuple[str, int, int]] | None:
    """Return what a record's head says of records that do not count: file, first, how many. None when it is a group's.

    A writer that is not the coordinator has no journal: it says so in the first record of its next segment.
    """
    if "uid" in head or not isinstance(head.get("abandoned"), list):
        return None
    found = []
    for told in head["abandoned"]:
        match told:
            case [str(name), int(first), int(count)] if 0 <= first < 2**62 and 0 <= count < 2**62:
                found.append((name, first, count))
    return found


def check_head(head: dict[str, Any]) -> str | None:
    """Return what is wrong with a group's head; None when nothing is. A seal does not say that it is sound."""
    for key, (kind, is_required) in _HEAD.items():
        if key not in head:
            if is_required:
                return f"no {key}"
        elif not isinstance(head[key], kind) or isinstance(head[key], bool):
            return f"{key} is a {type(head[key]).__name__}"
        elif isinstance(head[key], int) and (head[key] not in _INT64 or (key in _COUNTS and head[key] < 0)):
            return f"{key} is {head[key]}"
    return None


def describe(damage: Damage) -> str:
    """One line for a report."""
    kind = "torn" if damage.torn else "corrupt"
    group = f" (its header names group {damage.uid})" if damage.uid else ""
    return f"{damage.name} at byte {damage.offset}: {kind}, {damage.length:,} bytes: {damage.reason}{group}"
