"""The coordinator's append-only log: restores, draws, evictions, checkpoints, and facts about segments.

A journal is a stream as ``layout`` tells it, one entry a record, whose columns any Arrow reader can show. A session
writes its own file; a part whose write failed is followed by the next part. An entry counts from the moment ``write``
returns. One whose write raised is named as abandoned by the next part's first record, so that it does not count.

Compaction rolls the journal: a new part begins with a snapshot of all that still matters. The manifest names the part
that reading starts with (its base); the snapshot of any other part is skipped, since what it sums up is read as well.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from arrowbank.columns import Columns
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.message import MessageTemplate
from arrowbank.durable.segment import SegmentFacts
from arrowbank.durable.session import JournalEnd
from arrowbank.durable.stream import Damage, Record, StreamWriter, map_file, scan
from arrowbank.errors import CorruptRecordError, FencedError

__all__ = [
    "JOURNAL_SCHEMA",
    "Abandoned",
    "Checkpointed",
    "Drawn",
    "Entry",
    "Evicted",
    "Facts",
    "Journal",
    "Restored",
    "Sealed",
    "Snapshot",
    "read_journal",
    "scan_journal",
]

_log = logging.getLogger("arrowbank")

JOURNAL_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("iteration", pa.int64()),
        pa.field("uids", pa.list_(pa.field("element", pa.string(), nullable=False))),
        pa.field("state", pa.large_binary()),
        pa.field("details", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Restored:
    """A session took up work with ``iteration`` iterations complete, on the line of session ``parent``."""

    iteration: int
    mode: str
    parent: int | None
    lost: tuple[str, ...] = ()
    """Groups of the plan that could not be read."""
    guessed: bool = False
    """Nothing said that the parent's line had got to this checkpoint."""
    named: int | None = None
    """The session that was said to have saved the model checkpoint."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One draw: the groups, in order, that a batch of ``iteration`` was made of."""

    iteration: int
    uids: tuple[str, ...]
    span: int = 1
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    uids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The model checkpoint that holds iterations 0 … ``iteration`` − 1 is durable."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """An append failed: these records of that file do not count, even if they are there."""

    name: str
    first: int
    count: int

    @property
    def sequences(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class Sealed:
    """Segments, or parts of dead sessions' journals, are finished, with so many records and bytes."""

    facts: tuple[SegmentFacts, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that earlier parts say and that still matters, as ``snapshot`` lays it out."""

    uids: tuple[str, ...]
    state: bytes
    details: dict[str, Any]


Entry: TypeAlias = Restored | Drawn | Evicted | Checkpointed | Abandoned | Sealed | Snapshot


@dataclass(slots=True)
class Facts:
    """What the journal says of segment and journal files."""

    abandoned: dict[str, list[range]] = field(default_factory=dict)
    """File → sequence numbers of records that do not count."""
    records: dict[str, int] = field(default_factory=dict)
    """Segment or part of the journal that is finished → how many records of it count."""

    def add(self, entry: Entry) -> None:
        """Take in what an entry says of files."""
        if isinstance(entry, Abandoned):
            self.abandoned.setdefault(entry.name, []).append(entry.sequences)
        elif isinstance(entry, Sealed):
            self.records |= {facts.name: facts.records for facts in entry.facts}

    def counts(self, name: str, sequence: int) -> bool:
        """Whether a record of a file counts."""
        return not any(sequence in gone for gone in self.abandoned.get(name, ()))

    def abandoned_before(self, name: str, end: int, besides: Iterable[range] = ()) -> int:
        """Count a file's sequence numbers below ``end`` that do not count, those of other ranges ``besides``."""
        count, start = 0, 0
        for gone in sorted([*self.abandoned.get(name, ()), *besides], key=lambda gone: gone.start):
            count += len(range(max(start, gone.start), min(gone.stop, end)))
            start = max(start, gone.stop)
        return count

    def without(self, names: Iterable[str]) -> Facts:
        """Return the part about other files."""
        gone = set(names)
        return Facts(
            {name: ranges for name, ranges in self.abandoned.items() if name not in gone},
            {name: count for name, count in self.records.items() if name not in gone},
        )


class Journal:
    """Appends entries to the session's journal. Thread-safe."""

    def __init__(
        self, paths: BankPaths, bank_id: str, session: int, check_fence: Callable[[], None], facts: Facts | None = None
    ) -> None:
        self._paths, self._bank_id, self._session = paths, bank_id, session
        self._facts = facts or Facts()
        self.check_fence = check_fence
        """Raises FencedError once a later session has the bank."""
        self._template = MessageTemplate(JOURNAL_SCHEMA)
        self._lock = threading.Lock()
        self._stream: StreamWriter | None = None
        self._part = 0
        self._abandoned: list[Abandoned] = []
        """Told with the next entries, because telling failed or because a write of the journal itself did."""

    def begin(self) -> None:
        """Make the first part, unless it is there: a session that has segments has a journal, or it was lost.

        Raises OSError, FencedError.
        """
        with self._lock:
            if not self._part:
                self._ready()

    def write(self, entries: Sequence[Entry]) -> None:
        """Make entries durable with one sync. Raises OSError, FencedError; then none of them counts."""
        with self._lock:
            self._write(entries)

    def roll(self, snapshot: Callable[[Facts], Snapshot]) -> JournalName:
        """Begin a new part with a snapshot; return its name, for the manifest to name as base.

        Until the manifest does, the snapshot says nothing, and nothing depends on it. Raises OSError, FencedError.
        """
        with self._lock:
            self._leave_part()
            self._write([snapshot(self._facts)])
            return JournalName(self._session, self._part - 1)

    def learn(self, entry: Abandoned) -> None:
        """Take in what a file says that is no journal, for the next snapshot to tell."""
        with self._lock:
            self._facts.add(entry)

    def forget(self, names: Iterable[str]) -> None:
        """Let go of facts of files that are gone."""
        with self._lock:
            self._facts = self._facts.without(names)

    def _write(self, entries: Sequence[Entry]) -> None:
        self.check_fence()
        stream = self._ready()
        first = stream.records
        told = [*entries, *self._abandoned]  # in this order: a snapshot comes first in its part
        messages = [self._template.build(*_encode(entry)) for entry in told]
        try:
            stream.append(messages)
            self.check_fence()
        except FencedError:
            self._annul(stream, Abandoned(stream.path.name, first, len(messages)))
            raise
        except BaseException as error:
            stream.poisoned = True
            self._abandoned.append(Abandoned(stream.path.name, first, len(messages)))
            if isinstance(error, OSError):
                self.check_fence()  # a takeover takes files away
            raise
        for entry in told:
            self._facts.add(entry)
        self._abandoned.clear()

    def abandon(self, name: str, first: int, count: int) -> None:
        """Say that records of a segment do not count: at once if that is possible, else with the next entry."""
        abandoned = Abandoned(name, first, count)
        try:
            self.write([abandoned])
        except OSError as error:
            _log.warning("journal: could not tell that an append to %s failed (%s); will tell later", name, error)
            with self._lock:
                self._abandoned.append(abandoned)
        except FencedError:
            with self._lock:
                if self._stream is not None:
                    self._annul(self._stream, abandoned)

    def close(self) -> JournalEnd | None:
        """Tell what is still to be told, and mark the end, durably: whoever opens the bank next looks for it.

        Returns how it ended; None without any part, or when the last one failed.
        """
        try:
            if self._abandoned:
                self.write(())
        finally:
            with self._lock:
                stream, self._stream = self._stream, None
                if stream is not None:
                    stream.close(sync=True)
        if stream is None or stream.poisoned:
            return None
        return JournalEnd.of(stream.path.name, stream.records)

    def _annul(self, stream: StreamWriter, abandoned: Abandoned) -> None:
        """Say in a file of a session that lost its place that what it just wrote does not count, if it still can."""
        if stream.poisoned:
            return
        try:
            stream.append([self._template.build(*_encode(abandoned))])
        except OSError as error:
            _log.warning("journal: could not annul what was written after a takeover (%s)", error)

    def _leave_part(self) -> None:
        """Let go of the part that was written to; a failure to mark its end leaves it as valid as it was."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _ready(self) -> StreamWriter:
        """Return the stream to write to: a new one at first, and after one that failed."""
        if self._stream is not None and not self._stream.poisoned:
            return self._stream
        self._leave_part()
        name = str(JournalName(self._session, self._part))
        path = self._paths.journal / name
        try:
            self._stream = StreamWriter.create(
                path, self._paths.session_tmp(self._session), self._bank_id, JOURNAL_SCHEMA
            )
            self._part += 1
        except BaseException as error:
            if path.exists():  # its name was given away; a part that is missing would look like a lost one
                self._abandoned.append(Abandoned(name, 0, 0))
                self._part += 1
            if isinstance(error, OSError):
                self.check_fence()  # a takeover takes tmp/ away: say that rather than "no such file"
            raise
        return self._stream


def read_journal(paths: BankPaths, name: JournalName, bank_id: str) -> tuple[list[tuple[Record, Entry]], list[Damage]]:
    """Read one part: see ``scan_journal``."""
    return scan_journal(map_file(paths.journal / str(name)), name, bank_id)


def scan_journal(data: memoryview, name: JournalName, bank_id: str) -> tuple[list[tuple[Record, Entry]], list[Damage]]:
    """Read one part: records and their entries. Damage is returned: the caller judges what it hides."""
    found = scan(data, str(name), bank_id, JOURNAL_SCHEMA)
    return [(record, _decode(record)) for record in found.records], found.damage


def _encode(entry: Entry) -> tuple[Columns, dict[str, Any]]:
    kind = type(entry).__name__.lower()
    uids = [uid.encode() for uid in entry.uids] if isinstance(entry, Drawn | Evicted | Snapshot) else None
    state = entry.state if isinstance(entry, Drawn | Snapshot) else None
    iteration = entry.iteration if isinstance(entry, Restored | Drawn | Checkpointed) else None
    columns = Columns(1)
    columns.constant(kind.encode())
    columns.numbers("q", [time.time_ns() // 1000])
    columns.numbers("q", [iteration])
    columns.lists([None if uids is None else len(uids)])
    columns.strings_child(uids or [])
    columns.large_binaries([state])
    columns.constant(json.dumps(_details(entry)).encode())
    return columns, {"kind": kind}


def _details(entry: Entry) -> dict[str, Any]:
    match entry:
        case Restored():
            said = {"mode": entry.mode, "parent": entry.parent, "lost": entry.lost, "guessed": entry.guessed}
            return said if entry.named is None else said | {"named": entry.named}
        case Drawn():
            return {"span": entry.span}
        case Evicted():
            return {"reason": entry.reason}
        case Abandoned():
            return {"name": entry.name, "first": entry.first, "count": entry.count}
        case Sealed():
            return {"facts": [[fact.name, fact.records, fact.nbytes] for fact in entry.facts]}
        case Snapshot():
            return entry.details
        case Checkpointed():
            return {}


def _decode(record: Record) -> Entry:
    try:
        # Without the time of day: converting timestamps imports pandas, a second in an open.
        row = record.batch(JOURNAL_SCHEMA).drop_columns(["at"]).to_pylist()[0]
        details = json.loads(row["details"])
        match row["kind"]:
            case "restored":
                said = _RestoredDetails.model_validate(details)
                return Restored(_count(row), said.mode, said.parent, said.lost, said.guessed, said.named)
            case "drawn":
                span = _DrawnDetails.model_validate(details).span
                return Drawn(_count(row), _uids(row), span, row["state"])
            case "evicted":
                return Evicted(_uids(row), _EvictedDetails.model_validate(details).reason)
            case "checkpointed":
                return Checkpointed(_count(row))
            case "abandoned":
                gone = _AbandonedDetails.model_validate(details)
                return Abandoned(gone.name, gone.first, gone.count)
            case "sealed":
                facts = _SealedDetails.model_validate(details).facts
                return Sealed(tuple(SegmentFacts(*fact) for fact in facts))
            case "snapshot":
                return Snapshot(tuple(row["uids"]), row["state"], details)
        raise ValueError(f"unknown kind {row['kind']!r}")
    except (ValueError, OSError, KeyError, TypeError, IndexError, RecursionError, pa.ArrowException) as error:
        raise CorruptRecordError(
            record.name, f"the seal matches, but this is no journal entry ({error})", offset=record.offset
        ) from error


def _count(row: dict[str, Any]) -> int:
    """Return an entry's iteration count."""
    iteration: int | None = row["iteration"]
    if iteration is None or iteration < 0:
        raise ValueError(f"iteration {iteration}")
    return iteration


def _uids(row: dict[str, Any]) -> tuple[str, ...]:
    uids = tuple(row["uids"])
    if not uids or len(set(uids)) < len(uids):
        raise ValueError(f"{len(uids)} uids, {len(set(uids))} of them different")
    return uids


class _Details(BaseModel):
    """What ``details`` says, as it must be: a seal tells who wrote an entry, not that it is sound."""

    model_config = ConfigDict(frozen=True)


_Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class _RestoredDetails(_Details):
    mode: Literal["replay", "requeue", "discard"]
    parent: _Count | None
    lost: tuple[str, ...]
    guessed: bool
    named: _Count | None = None


class _DrawnDetails(_Details):
    span: Annotated[int, Field(ge=1, lt=2**62, strict=True)]


class _EvictedDetails(_Details):
    reason: str


class _AbandonedDetails(_Details):
    name: str
    first: _Count
    count: _Count


class _SealedDetails(_Details):
    facts: tuple[tuple[str, _Count, _Count], ...]
