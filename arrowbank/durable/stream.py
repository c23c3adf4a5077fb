"""Append-only Arrow IPC streams of sealed records: what segments and journals are made of.

``StreamWriter`` follows the writing order of ``layout`` and syncs once for all the records of one ``append``.
``scan`` reads a stream, believing nothing: neither lengths, nor a clean end, nor zeros. It never raises for damage;
it says where it is. Invariant: every record it returns carries a seal that matches its bytes and its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank.durable import files, seal
from arrowbank.durable.message import PREFIX, read_head

__all__ = ["Damage", "Record", "Scan", "StreamWriter", "begins_as_here", "binding", "follow", "map_file", "scan"]

_ZEROS = bytes(PREFIX.size)
_END = PREFIX.pack(0xFFFFFFFF, 0)
_CONTINUATION = 0xFFFFFFFF
_HEADER_BYTES = 1 << 16
_MOST_DISPLACED = 16
_STEP = 1 << 20
"""Bytes that are looked at at once, however large a file is."""
_UID = re.compile(r"[0-9a-f]{32}")


@cache
def _message_of(schema: pa.Schema) -> bytes:
    message: bytes = schema.serialize().to_pybytes()
    return message


def binding(bank_id: str, name: str) -> bytes:
    """What the seals of a file's records are bound to, besides their place in it."""
    return f"{bank_id}/{name}/".encode()


class StreamWriter:
    """Writes one stream. Not thread-safe: its owner serialises calls.

    After a failed write or sync the file is never trusted again: ``poisoned`` is set, and ``append`` refuses.
    """

    def __init__(self, path: Path, descriptor: int, bank_id: str, offset: int) -> None:
        self.path = path
        self.poisoned = False
        self.records = 0
        self.offset = offset
        """Where the next record goes."""
        self._descriptor = descriptor
        self._binding = binding(bank_id, path.name)

    @classmethod
    def create(cls, path: Path, tmp: Path, bank_id: str, schema: pa.Schema, *, publish: bool = True) -> StreamWriter:
        """Create the stream with its schema. Durability: on return the file is there after a power loss.

        Without ``publish`` it stays under ``tmp`` until ``finish``.
        """
        header = _message_of(schema)
        # Others of the same name may be at it, or have been killed at it: only one of them gets the name.
        unfinished = tmp / (f"{path.name}.{os.urandom(4).hex()}" if publish else path.name)
        descriptor = files.create(unfinished)
        try:
            files.write_at(descriptor, [header, _ZEROS], 0)
            files.sync(descriptor)
            if publish:
                files.publish(unfinished, path)
        except BaseException:
            os.close(descriptor)
            files.discard(unfinished)
            raise
        return cls(path, descriptor, bank_id, len(header))

    def append(self, messages: Sequence[bytearray]) -> None:
        """Seal and write records. Durability: all of them survive power loss on return. Raises OSError."""
        if self.poisoned:
            raise AssertionError(f"{self.path.name} failed before; records go to a new file")  # a bug of ours
        first, end = self.offset, self.offset
        for sequence, message in enumerate(messages, self.records):
            seal.stamp(message, self._binding, sequence=sequence, offset=end, first=first)
            end += len(message)
        # Every record's own prefix comes after all the bytes, in order: whoever looks meanwhile sees whole records and
        # then the end, never a later record behind one that seems to be missing.
        views: list[memoryview | bytes] = []
        for message in messages:
            views += (memoryview(message)[PREFIX.size :], _ZEROS)
        try:
            files.write_at(self._descriptor, views, first + PREFIX.size)
            place = first
            for message in messages:
                files.write_at(self._descriptor, [memoryview(message)[: PREFIX.size]], place)
                place += len(message)
            files.sync_data(self._descriptor)
        except BaseException:
            self.poisoned = True
            raise
        self.offset, self.records = end, self.records + len(messages)

    def finish(self) -> None:
        """Mark the end and sync all of it: a whole file, for its owner to publish."""
        files.write_at(self._descriptor, [_END], self.offset)
        files.sync(self._descriptor)
        self.close()

    def close(self, *, sync: bool = False) -> None:
        """Mark the end, unless the file failed. Seldom synced: a stream is as valid without the mark."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        try:
            if not self.poisoned:
                files.write_at(descriptor, [_END], self.offset)
                if sync:
                    files.sync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Record:
    """One sealed record as it stands in a file."""

    name: str
    offset: int
    sequence: int
    first: int
    """Where the first record of the same append stands."""
    head: dict[str, Any]
    message: memoryview
    """The whole encapsulated message, mapped."""

    def batch(self, schema: pa.Schema) -> pa.RecordBatch:
        """Parse and fully validate the record. Raises pyarrow's ValueError or OSError."""
        batch = pa.ipc.read_record_batch(pa.py_buffer(self.message), schema)
        batch.validate(full=True)
        return batch


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not what was written."""

    name: str
    offset: int
    length: int
    reason: str
    torn: bool
    """An unfinished tail, which a power cut leaves; anything else is corrupt."""
    lost: int | None = None
    """Records that were here, by the sequence numbers around; None where no record follows that would tell."""
    uid: str | None = None
    """Of the group whose record was here, as far as a damaged header can be believed."""


@dataclass(slots=True)
class Scan:
    """What a stream holds."""

    name: str
    records: list[Record] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    missing: int = 0
    """Records that the sequence numbers say were there and are not."""
    closed: bool = False
    after: int = -1
    """The sequence number before the first record that was looked for."""


def map_file(path: str | Path) -> memoryview:
    """Map a file for reading. The mapping lives as long as any view of it, and needs no descriptor."""
    if not os.stat(path).st_size:
        return memoryview(b"")
    with pa.memory_map(os.fspath(path)) as file:  # Python's own mmap keeps a descriptor for each mapped segment
        return memoryview(file.read_buffer())


def begins_as_here(data: memoryview, schema: pa.Schema) -> bool:
    """Whether a stream's schema message has the very bytes that this version of Arrow writes."""
    own = _message_of(schema)
    return data[: len(own)].tobytes() == own


def scan(data: memoryview, name: str, bank_id: str, schema: pa.Schema) -> Scan:
    """Read every record of the stream ``name`` that its seal vouches for, whatever lies between them.

    Its schema message must say what ``schema`` does: our reader does without it, others do not.
    """
    found = Scan(name)
    reader = _Reader(data, name, binding(bank_id, name), schema)
    place = reader.first_record(found)
    while place is not None:
        record = reader.record_at(place, found)
        if record is not None:
            found.records.append(record)
            place += len(record.message)
        else:
            place = reader.after_stop(found, place)
    found.missing = _last_sequence(found) + 1 - len(found.records)
    return found


def follow(data: memoryview, name: str, bank_id: str, schema: pa.Schema, place: int, after: int) -> tuple[Scan, int]:
    """Read the records that a living writer has added from ``place`` on, behind sequence number ``after``.

    Returns them and where to go on. place 0 is the start. Stops at whatever is no record: that is for the next open.
    """
    found = Scan(name, after=after)
    reader = _Reader(data, name, binding(bank_id, name), schema)
    if not place:
        message = _message_of(schema)
        place = len(message) if data[: len(message)].tobytes() == message else (reader.after_schema() or 0)
    while place and (record := reader.record_at(place, found)) is not None:
        found.records.append(record)
        place += len(record.message)
    found.closed = data[place : place + PREFIX.size].tobytes() == _END
    return found, place


def _last_sequence(found: Scan) -> int:
    return found.records[-1].sequence if found.records else found.after


class _Reader:
    def __init__(self, data: memoryview, name: str, bound: bytes, schema: pa.Schema) -> None:
        self.data = data
        self.name = name
        self.bound = bound
        self.schema = schema

    def first_record(self, found: Scan) -> int | None:
        """Return where to start: behind the schema, or at the first record when the schema is not what it was."""
        if begins_as_here(self.data, self.schema):
            return len(_message_of(self.schema))
        place, following = self.after_schema(), self._next_record(found, 0)
        if place is not None and self._is_schema(self.data[:place].tobytes()):
            # Another version of Arrow may write it so; it is whole if what it says comes next is there.
            if following is not None and following.offset == place:
                return place
            if following is None and self.data[place : place + PREFIX.size].tobytes() in (_END, _ZEROS):
                return place
        # No torn tail: a stream has its schema, synced, before it gets its name.
        return self._note(found, 0, "the schema message is damaged", following, torn=False)

    def after_schema(self) -> int | None:
        """Return where the first message says that it ends."""
        length = self._header_length(0)
        return PREFIX.size + length if length and length % 8 == 0 else None

    def _is_schema(self, message: bytes) -> bool:
        """Whether a message says what the schema does."""
        try:
            return bool(pa.ipc.read_schema(pa.py_buffer(message)).equals(self.schema, check_metadata=True))
        except (ValueError, OSError, pa.ArrowException):
            return False

    def record_at(self, place: int, found: Scan) -> Record | None:
        """Return the record at ``place`` if a matching seal says that it belongs there."""
        length = self._header_length(place)
        if not length:
            return None
        sealed = seal.find(self.data, place + PREFIX.size, place + PREFIX.size + length)
        while sealed is not None:
            record = self._checked(sealed, place, found)
            if record is not None:
                return record
            sealed = seal.find(self.data, sealed.place + 1, place + PREFIX.size + length)
        return None

    def _checked(self, sealed: seal.Seal, place: int, found: Scan) -> Record | None:
        if sealed.offset != place or sealed.sequence <= _last_sequence(found) or sealed.length % 8:
            return None
        if not sealed.place + len(seal.BLANK) - place <= sealed.length <= len(self.data) - place:
            return None
        message = self.data[place : place + sealed.length]
        if not seal.verify(message, sealed, self.bound, sealed.place - place):
            return None
        try:
            head = read_head(message)
        except ValueError:
            return None
        return Record(self.name, place, sealed.sequence, sealed.first, head, message)

    def _header_length(self, place: int) -> int:
        """Return the header's length that the prefix at ``place`` tells, or 0 when there is no whole header."""
        if place % 8 or place + PREFIX.size > len(self.data):
            return 0
        mark, length = PREFIX.unpack_from(self.data, place)
        return length if mark == _CONTINUATION and 0 < length <= len(self.data) - place - PREFIX.size else 0

    def after_stop(self, found: Scan, place: int) -> int | None:
        """Decide what it means that no record starts at ``place``; return where to go on, or None at the end."""
        prefix = bytes(self.data[place : place + PREFIX.size])
        if prefix == _END:
            found.closed = True
            return self._look_beyond(found, place, "a record or junk stands behind the end mark", torn=False)
        if prefix == _ZEROS[: len(prefix)]:
            return self._look_beyond(found, place, "an unfinished record", torn=True)
        return self.skip_damage(found, place, "no record with a matching seal")

    def _look_beyond(self, found: Scan, place: int, reason: str, *, torn: bool) -> int | None:
        """After an end: nothing but zeros is a clean one."""
        if self._is_zero_from(place + PREFIX.size):
            return None
        following = self._next_record(found, place)
        if following is not None:
            found.closed = False
            # An append of which a prefix never came was not acknowledged; its other records are good all the same.
            if not torn or following.first > place or self._was_finished(found, following):
                torn, reason = False, "zeros or an end mark where a record was"
        return self._note(found, place, reason, following, torn=torn)

    def _is_zero_from(self, start: int) -> bool:
        return not any(bytes(self.data[low : low + _STEP]).strip(b"\0") for low in range(start, len(self.data), _STEP))

    def skip_damage(self, found: Scan, place: int, reason: str) -> int | None:
        """Note damage from ``place`` up to the next good record; without one it is a torn tail."""
        following = self._next_record(found, place)
        if following is None:
            torn = not self._tail_is_whole(place)
        else:  # within an append that a power cut may have left half on the disk
            torn = following.first <= place and not self._was_finished(found, following)
        return self._note(found, place, reason, following, torn=torn)

    def _was_finished(self, found: Scan, record: Record) -> bool:
        """Whether the append that ``record`` belongs to was finished: a later one follows, or the end mark."""
        if self._tail_is_whole(record.offset):
            return True
        later = Scan(self.name, [record])
        following: Record | None = record
        while following is not None and following.first == record.first:
            later.records.append(following)
            following = self._next_record(later, following.offset)
        return following is not None

    def _note(self, found: Scan, place: int, reason: str, following: Record | None, *, torn: bool) -> int | None:
        """Note damage that reaches up to the following record, and return that one's place."""
        if torn and self._is_displaced(place):
            torn, reason = False, "records stand elsewhere than where they were written"
        end = len(self.data) if following is None else following.offset
        lost = None if following is None else following.sequence - _last_sequence(found) - 1
        uid = None if torn else self._uid_at(place)
        found.damage.append(Damage(self.name, place, end - place, reason, torn, lost, uid))
        return None if following is None else following.offset

    def _is_displaced(self, behind: int) -> bool:
        """Whether a whole record stands behind there, and not where it was written: nothing that was not finished
        leaves that. Looks at a few only: forged ones may be many.
        """
        for sealed in islice(self._seals(behind), _MOST_DISPLACED):
            for start in self._starts_before(sealed.place):
                message = self.data[start : start + sealed.length]
                is_whole = sealed.place + len(seal.BLANK) - start <= sealed.length == len(message)
                place = sealed.place - start
                if is_whole and start != sealed.offset and seal.verify(message, sealed, self.bound, place):
                    return True
        return False

    def _starts_before(self, place: int) -> Iterator[int]:
        """Yield where a message may start whose header has a seal at ``place``, nearest first."""
        low = max(0, place - _HEADER_BYTES)
        header, mark = bytes(self.data[low:place]), _CONTINUATION.to_bytes(4, "little")
        at = header.rfind(mark)
        for _ in range(_MOST_DISPLACED):
            if at < 0:
                return
            yield low + at
            at = header.rfind(mark, 0, at)

    def _uid_at(self, place: int) -> str | None:
        """Return the uid in a damaged record's head, if there is one of the form that arrowbank gives."""
        try:
            uid = read_head(self.data[place : place + _HEADER_BYTES]).get("uid")
        except ValueError:
            return None
        return uid if isinstance(uid, str) and _UID.fullmatch(uid) else None

    def _tail_is_whole(self, place: int) -> bool:
        """Whether what stands at ``place`` and does not verify was once finished: an end mark closes the file."""
        return bytes(self.data[-PREFIX.size :]) == _END and len(self.data) - place > PREFIX.size

    def _next_record(self, found: Scan, after: int) -> Record | None:
        """Return the next record whose seal names the very offset where it stands and a higher sequence number."""
        for sealed in self._seals(after):
            if after < sealed.offset < sealed.place:
                record = self.record_at(sealed.offset, found)
                if record is not None:
                    return record
        return None

    def _seals(self, start: int) -> Iterator[seal.Seal]:
        for low in range(start, len(self.data), _STEP):
            high = min(low + _STEP + len(seal.BLANK) - 1, len(self.data))
            sealed = seal.find(self.data, low, high)
            while sealed is not None:
                yield sealed
                sealed = seal.find(self.data, sealed.place + 1, high)
