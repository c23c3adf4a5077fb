"""Writing groups to segments, with group commit.

``Appender`` owns the active segments of one writer. Whoever appends while nobody else is writing becomes the one who
writes, for himself and for all who came while he did: one sync for everybody (group commit), and no hand-over to
another thread for a lone append. ``append_async`` leaves it to the appender's own thread.

Invariants: a ticket is acknowledged only after its record is durable and no later session has claimed the bank; a
file in which a write failed gets no further record, and its abandoned sequence numbers are journaled at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from arrowbank.durable.layout import BankPaths, SegmentName
from arrowbank.durable.message import MessageTemplate, build_message, empty_batch
from arrowbank.durable.segment import GroupRef, SegmentFacts
from arrowbank.durable.stream import StreamWriter
from arrowbank.errors import BankClosedError, FencedError
from arrowbank.schema import SEGMENT_SCHEMA

__all__ = ["Appender", "Ticket"]

_log = logging.getLogger("arrowbank")


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
        self.error: Exception | None = None


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
        abandon: Callable[[str, int, int], None] | None,
        begin: Callable[[], None] | None = None,
        first_part: int = 0,
    ) -> None:
        """abandon: tells the journal which records do not count; None: the next segment's first record does.
        begin: called before a segment is made, which then says that what was begun was there.
        """
        self.template = MessageTemplate(SEGMENT_SCHEMA)
        self.arrived: deque[GroupRef] = deque()
        """Durable groups, in order, for the bank to take over."""
        self.closed: deque[SegmentFacts] = deque()
        """Facts of segments closed since the bank last took them over."""
        self.sizes: dict[SegmentName, int] = {}
        """Bytes of each segment made by this appender; its owner takes out those that are archived."""
        self.commits, self.groups, self.nbytes = 0, 0, 0
        """Syncs, and what they made durable."""
        self._paths, self._bank_id, self._session, self._writer = paths, bank_id, session, writer
        self._check_fence = check_fence
        self._abandon = abandon
        self._begin = begin
        self._first_part = first_part
        self._lock = threading.Lock()
        """Held by the one who writes."""
        self._gate = threading.Lock()
        """Guards the queue. Never held for long: an event loop may wait for it."""
        self._queue: deque[Ticket] = deque()
        self._streams: dict[int, tuple[SegmentName, StreamWriter]] = {}
        self._parts: dict[int, int] = {}
        self._batch: deque[Ticket] = deque()
        """Being written now."""
        self._durable: tuple[SegmentName, int, list[GroupRef], int] | None = None
        """Set once the batch is on the disk, and nobody else's: its segment, the end of that, its groups, its bytes."""
        self._error: Exception | None = _interrupted()
        """What the batch's tickets are to be told, unless it is durable."""
        self._untold: list[tuple[str, int, int]] = []
        """Records that do not count, and of which no file says so yet."""
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def commit(self, ticket: Ticket) -> None:
        """Write the ticket and wait until it is durable, or raise what prevented that."""
        self._enqueue(ticket)
        try:
            while not ticket.done:
                with self._lock:
                    if not ticket.done:
                        self._write_waiting()
        except BaseException:  # interrupted: whoever writes next is not to write this
            with self._gate:
                if ticket in self._queue:
                    self._queue.remove(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error

    def commit_soon(self, ticket: Ticket) -> None:
        """Have the ticket written by the appender's thread; ``ticket.notify`` tells when."""
        self._enqueue(ticket, start=True)
        self._wake.set()

    def flush(self) -> None:
        """Write whatever waits."""
        with self._lock:
            self._settle()
            while self._queue:
                self._write_waiting()

    def roll(self, iteration: int | None) -> None:
        """Write whatever waits and close the segments of all other iterations."""
        self.flush()
        with self._lock:
            for other in [key for key in self._streams if key != iteration]:
                self._close(other)

    def close(self) -> None:
        """Refuse further tickets, write what waits, close all segments and end the thread."""
        with self._gate:
            self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.roll(None)

    def active_names(self) -> set[str]:
        """Names of segments that may still get records. What they got before is in ``arrived``, or is written now."""
        with self._lock:
            return {str(name) for name, _ in self._streams.values()}

    def _enqueue(self, ticket: Ticket, *, start: bool = False) -> None:
        with self._gate:
            if self._stopping:
                raise BankClosedError(f"{self._paths.root}: session {self._session} was closed; nothing was appended")
            self._queue.append(ticket)
            if start and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="arrowbank-append", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stopping or self._queue:
            self._wake.wait()
            if not self._stopping:
                self._wake.clear()
            while self._queue:
                with self._lock:
                    self._write_waiting()

    def _write_waiting(self) -> None:
        """Write one batch of waiting tickets, all of one iteration. Holds the lock.

        An interrupt (Ctrl-C) may come between any two steps, the last ones among them: then whoever comes next settles
        what became of the batch. What is durable is never told to be lost, and nobody waits for ever.
        """
        self._settle()
        try:
            self._choose_batch()
            if self._batch:
                self._write()
        except Exception as caught:  # whatever it is: every waiting ticket is told, and raises it in its own thread
            self._error = caught
        finally:
            self._settle()

    def _settle(self) -> None:
        """Tell every ticket of the batch what has become of it. May be interrupted, and done again."""
        if self._durable is not None:
            name, offset, refs, nbytes = self._durable
            self.sizes[name] = offset
            self.arrived.extend(refs)  # perhaps once more: they are the same
            self._error = None
            self._durable = None
            self.commits, self.groups, self.nbytes = self.commits + 1, self.groups + len(refs), self.nbytes + nbytes
        error = self._error
        while self._batch:
            ticket = self._batch[0]
            ticket.error, ticket.done = error, True
            self._notify(ticket)
            self._batch.popleft()
        self._error = _interrupted()

    def _notify(self, ticket: Ticket) -> None:
        try:
            if ticket.notify is not None:
                ticket.notify(ticket)
        except Exception:  # nobody else's append may fail or hang for it
            _log.exception("telling that an append was written failed")

    def _choose_batch(self) -> None:
        with self._gate:
            nbytes = 0
            while self._queue:
                ticket = self._queue[0]
                nbytes += sum(map(len, ticket.messages))
                is_apart = self._batch and ticket.iteration != self._batch[0].iteration
                if is_apart or (self._batch and nbytes > self.MAX_BATCH_BYTES):
                    break
                if not ticket.done:  # one that is was interrupted right here
                    self._batch.append(ticket)
                self._queue.popleft()

    def _write(self) -> None:
        iteration = self._batch[0].iteration
        self._check_fence()
        try:
            name, stream = self._streams.get(iteration) or self._open(iteration)
        except OSError:
            self._check_fence()  # a takeover takes tmp/ away: say that rather than "no such file"
            raise
        first = stream.records
        messages = [message for ticket in self._batch for message in ticket.messages]
        heads = (head for ticket in self._batch for head in ticket.heads)
        refs = [GroupRef(head["uid"], name, at, head) for at, head in enumerate(heads, first)]
        nbytes = sum(map(len, messages))
        try:
            stream.append(messages)
            self._check_fence()
            self._durable = name, stream.offset, refs, nbytes
        except BaseException as error:
            if self._durable is None:
                self._give_up(iteration, first, len(messages), is_fenced=isinstance(error, FencedError))
                if isinstance(error, OSError):
                    self._check_fence()  # a takeover takes damaged segments away
            raise

    def _give_up(self, iteration: int, first: int, count: int, *, is_fenced: bool) -> None:
        """Never write to the iteration's segment again, and say at once which of its records do not count.

        Who was fenced does not say so in a segment: the new coordinator may have read them, and says what counts.
        """
        name, stream = self._streams.pop(iteration)
        stream.poisoned = True
        try:
            if self._abandon is not None:
                self._abandon(str(name), first, count)
            elif not is_fenced:
                self._untold.append((str(name), first, count))
                with contextlib.suppress(OSError, FencedError):  # then the next segment says so
                    self._open(iteration)
        finally:
            stream.close()

    def _open(self, iteration: int) -> tuple[SegmentName, StreamWriter]:
        tmp = self._paths.session_tmp(self._session)
        if self._begin is not None:
            self._begin()
        while True:
            part = self._parts.get(iteration, self._first_part)
            self._parts[iteration] = part + 1
            name = SegmentName(self._session, iteration, part, self._writer)
            try:
                stream = StreamWriter.create(self._paths.segments / str(name), tmp, self._bank_id, SEGMENT_SCHEMA)
                break
            except FileExistsError:
                continue  # of a writer of this name that was killed, or lives
        self.sizes[name] = stream.offset
        if self._untold:
            self._tell(stream)
        self._streams[iteration] = name, stream
        return name, stream

    def _tell(self, stream: StreamWriter) -> None:
        """Begin a segment with what no journal says."""
        try:
            stream.append([build_message(empty_batch(SEGMENT_SCHEMA), {"abandoned": self._untold})])
            self._check_fence()
        except BaseException:
            stream.close()
            raise
        self._untold = []

    def _close(self, iteration: int) -> None:
        name, stream = self._streams.pop(iteration)
        self.closed.append(SegmentFacts(str(name), stream.records, stream.offset))
        stream.close()


def _interrupted() -> OSError:
    return OSError(errno.EINTR, "the thread that wrote this was interrupted; the group is not in the bank")
