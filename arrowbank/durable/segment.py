"""Groups in segments: reading them back, and writing them with group commit.

``Appender`` owns the active segments of one writer. Whoever appends while nobody else is writing becomes the one who
writes, for himself and for all who came while he did: one sync for everybody (group commit), and no hand-over to
another thread for a lone append. ``append_async`` leaves it to the appender's own thread.

Invariants: a ticket is acknowledged only after its record is durable and no later session has claimed the bank; a
file in which a write failed gets no further record, and its abandoned sequence numbers are journaled at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arrowbank import codec
from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.message import MessageTemplate
from arrowbank.durable.stream import Damage, Record, Scan, StreamWriter, map_file, scan
from arrowbank.errors import CorruptRecordError
from arrowbank.schema import SEGMENT_SCHEMA
from arrowbank.types import Rollouts

__all__ = ["Appender", "GroupRef", "SegmentFacts", "Ticket", "describe", "load_rollouts", "read_segment"]


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
    def age(self) -> tuple[SegmentName, int]:
        """Orders groups by when they were finished, oldest first."""
        return self.segment, self.sequence


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What the journal remembers of a closed segment."""

    name: str
    records: int
    nbytes: int


def read_segment(path: Path, bank_id: str) -> tuple[Scan, memoryview]:
    """Scan a segment. The mapping may be kept: no file of a bank is ever truncated."""
    data = map_file(path)
    return scan(data, path.name, bank_id), data


def load_rollouts(record: Record) -> Rollouts:
    """Decode a record's rollouts. Raises CorruptRecordError when sealed bytes are not a group."""
    try:
        return codec.decode_group(record.batch(SEGMENT_SCHEMA))
    except (ValueError, OSError, KeyError, TypeError, IndexError, AttributeError, StopIteration) as error:
        raise CorruptRecordError(
            record.name,
            f"the seal matches, but the record is not a group ({error})",
            offset=record.offset,
            hint="It was written by a program that is not arrowbank, or a newer one",
        ) from error


class Ticket:
    """One append on its way to the disk: one group, or several that become durable together or not at all."""

    __slots__ = ("done", "error", "heads", "iteration", "messages", "notify")

    def __init__(self, messages: list[bytearray], heads: list[dict[str, Any]], iteration: int) -> None:
        self.messages = messages
        self.heads = heads
        self.iteration = iteration
        self.notify: Callable[[Ticket], None] | None = None
        """Called once by the thread that wrote, after ``done`` is set."""
        self.done = False
        self.error: BaseException | None = None


class Appender:
    """Makes records durable in the segments of one writer and session. Thread-safe."""

    MAX_BATCH_BYTES = 64 << 20
    """Records beyond this wait for the next sync."""

    def __init__(
        self,
        paths: BankPaths,
        bank_id: str,
        session: int,
        writer: str,
        *,
        check_fence: Callable[[], None],
        abandon: Callable[[str, int, int], None],
    ) -> None:
        self.template = MessageTemplate(SEGMENT_SCHEMA)
        self.arrived: deque[GroupRef] = deque()
        """Durable groups, in order, for the bank to take over."""
        self.closed: deque[SegmentFacts] = deque()
        """Facts of segments closed since the bank last took them over."""
        self.sizes: dict[SegmentName, int] = {}
        """Bytes of each segment written by this appender."""
        self.commits = 0
        self._paths, self._bank_id, self._session, self._writer = paths, bank_id, session, writer
        self._check_fence = check_fence
        self._abandon = abandon
        self._queue: deque[Ticket] = deque()
        self._lock = threading.Lock()
        self._streams: dict[int, StreamWriter] = {}
        self._names: dict[int, SegmentName] = {}
        self._parts: dict[int, int] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def commit(self, ticket: Ticket) -> None:
        """Write the ticket and wait until it is durable, or raise what prevented that."""
        self._queue.append(ticket)
        while not ticket.done:
            with self._lock:
                if not ticket.done:
                    self._write_waiting()
        if ticket.error is not None:
            raise ticket.error

    def commit_soon(self, ticket: Ticket) -> None:
        """Have the ticket written by the appender's thread; ``ticket.notify`` tells when."""
        self._queue.append(ticket)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="arrowbank-append", daemon=True)
                    self._thread.start()
        self._wake.set()

    def flush(self) -> None:
        """Write whatever waits."""
        with self._lock:
            while self._queue:
                self._write_waiting()

    def roll(self, iteration: int | None) -> None:
        """Write whatever waits and close the segments of all other iterations."""
        self.flush()
        with self._lock:
            for other in [key for key in self._streams if key != iteration]:
                self._close(other)

    def close(self) -> None:
        """Write whatever waits, close all segments and end the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.roll(None)

    def abort(self) -> None:
        """Close descriptors without writing anything: for a handle that lost its place."""
        self._stopping = True
        self._wake.set()
        for stream in self._streams.values():
            stream.poisoned = True
            stream.close()
        self._streams.clear()

    def active_names(self) -> set[str]:
        """Names of segments that may still get records."""
        with self._lock:
            return {stream.path.name for stream in self._streams.values()}

    def _run(self) -> None:
        while not self._stopping or self._queue:
            self._wake.wait()
            if not self._stopping:
                self._wake.clear()
            with self._lock:
                if self._queue:
                    self._write_waiting()
                if self._queue:
                    self._wake.set()

    def _write_waiting(self) -> None:
        """Write one batch of waiting tickets, all of one iteration. Holds the lock."""
        batch = [self._queue.popleft()]
        nbytes = sum(map(len, batch[0].messages))
        while self._queue and self._queue[0].iteration == batch[0].iteration:
            nbytes += sum(map(len, self._queue[0].messages))
            if nbytes > self.MAX_BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
        error: BaseException | None = None
        try:
            self._write(batch)
        except BaseException as caught:
            error = caught
        for ticket in batch:
            ticket.error, ticket.done = error, True
            if ticket.notify is not None:
                ticket.notify(ticket)
        if error is not None and not isinstance(error, Exception):
            raise error

    def _write(self, batch: list[Ticket]) -> None:
        iteration = batch[0].iteration
        stream = self._streams.get(iteration) or self._open(iteration)
        first = stream.records
        messages = [message for ticket in batch for message in ticket.messages]
        try:
            stream.append(messages)
        except BaseException:
            del self._streams[iteration]
            stream.close()
            self._abandon(stream.path.name, first, len(messages))
            raise
        self._check_fence()
        self.commits += 1
        name = self._names[iteration]
        self.sizes[name] = stream.offset
        heads = (head for ticket in batch for head in ticket.heads)
        self.arrived.extend(GroupRef(head["uid"], name, at, head) for at, head in enumerate(heads, first))

    def _open(self, iteration: int) -> StreamWriter:
        part = self._parts.get(iteration, 0)
        self._parts[iteration] = part + 1
        name = SegmentName(self._session, iteration, part, self._writer)
        tmp = self._paths.session_tmp(self._session)
        stream = StreamWriter.create(self._paths.segments / str(name), tmp, self._bank_id, SEGMENT_SCHEMA)
        self._streams[iteration] = stream
        self._names[iteration] = name
        return stream

    def _close(self, iteration: int) -> None:
        stream = self._streams.pop(iteration)
        self.closed.append(SegmentFacts(stream.path.name, stream.records, stream.offset))
        stream.close()


def describe(damage: Damage) -> str:
    """One line for a report."""
    kind = "torn" if damage.torn else "corrupt"
    return f"{damage.name} at byte {damage.offset}: {kind}, {damage.length:,} bytes: {damage.reason}"
