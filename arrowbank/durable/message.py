"""Arrow IPC record batch messages: a header of known shape, filled in; and what recovery reads of a header.

The header (Flatbuffers, ``Message.fbs``) of every record of one schema has the same shape: so many field nodes,
buffers and metadata strings. pyarrow makes one; ``MessageTemplate`` finds where its numbers stand and afterwards only
fills them in, which costs a tenth of serialising a batch. The JSON head is padded with spaces to a few sizes, since
a header's shape depends on its length.
Source: https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from arrowbank.columns import Buffer, Columns
from arrowbank.durable import seal

__all__ = ["HEAD_KEY", "PREFIX", "MessageTemplate", "build_message", "empty_batch", "read_head"]

PREFIX = struct.Struct("<Ii")
"""Continuation marker 0xFFFFFFFF and the header's length in bytes; both 0 mean the end of the stream."""
HEAD_KEY = b"arrowbank.head"
_HEAD_STEP = 128
_MESSAGE_BODY_LENGTH, _MESSAGE_METADATA, _MESSAGE_HEADER = 3, 4, 2
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS = 0, 1, 2


class MessageTemplate:
    """Builds record batch messages of one schema from ready buffers."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._shapes: dict[int, _Shape] = {}

    def build(self, columns: Columns, head: dict[str, Any]) -> bytearray:
        """Return the whole message, its seal not yet filled in. Its length is a multiple of 8."""
        text = _text(head)
        size = -(-len(text) // _HEAD_STEP) * _HEAD_STEP
        shape = self._shapes.get(size)
        if shape is None:
            shape = self._shapes[size] = _Shape(self._schema, size)
        return shape.fill(columns, text.ljust(size))


class _Shape:
    """One header and the places of its numbers."""

    def __init__(self, schema: pa.Schema, head_bytes: int) -> None:
        message = _one_row_message(schema, head_bytes)
        flat = _Flatbuffer(message, PREFIX.size)
        batch = flat.table(flat.root, _MESSAGE_HEADER)
        self.header = bytes(message[: PREFIX.size + PREFIX.unpack_from(message)[1]])
        self.body_length = flat.field(flat.root, _MESSAGE_BODY_LENGTH)
        self.rows = flat.field(batch, _BATCH_LENGTH)
        self.nodes, self.node_count = flat.vector(batch, _BATCH_NODES)
        self.buffers, self.buffer_count = flat.vector(batch, _BATCH_BUFFERS)
        self.head = next(place for key, place, _ in flat.metadata() if key == HEAD_KEY)
        if not self.header.index(seal.MAGIC) < self.head:  # ``stamp`` takes the first; a head may contain anything
            raise AssertionError("pyarrow laid a header out in another order")

    def fill(self, columns: Columns, head: bytes) -> bytearray:
        if len(columns.nodes) != 2 * self.node_count or len(columns.buffers) != self.buffer_count:
            raise AssertionError("columns were laid out for another schema")  # a bug of ours, never of input
        places, end = array("q"), 0
        parts: list[memoryview | bytes] = [self.header]
        for buffer in columns.buffers:
            part = _flat(buffer)
            places.extend((end, len(part)))
            parts.append(part)
            end += len(part)
            if end % 8:
                parts.append(bytes(-end % 8))
                end += -end % 8
        message = bytearray().join(parts)
        struct.pack_into("<q", message, self.body_length, end)
        struct.pack_into("<q", message, self.rows, columns.rows)
        message[self.nodes : self.nodes + 16 * self.node_count] = array("q", columns.nodes).tobytes()
        message[self.buffers : self.buffers + 16 * self.buffer_count] = places.tobytes()
        message[self.head : self.head + len(head)] = head
        return message


def build_message(batch: pa.RecordBatch, head: dict[str, Any]) -> bytearray:
    """Return the message of a ready batch, its seal not yet filled in; slower than a template, for cold paths."""
    return _serialise(batch, _text(head))


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows, for a record that only has something to say in its head."""
    return pa.RecordBatch.from_arrays([_blank(field.type, 0) for field in schema], schema=schema)


def read_head(message: memoryview) -> dict[str, Any]:
    """Return the JSON head of a sealed message. Raises ValueError when the header is not one of ours."""
    try:
        for key, place, length in _Flatbuffer(message, PREFIX.size).metadata():
            if key == HEAD_KEY:
                head = json.loads(bytes(message[place : place + length]))
                if isinstance(head, dict):
                    return head
    except struct.error as error:
        raise ValueError(f"header points outside itself: {error}") from None
    raise ValueError("header has no head")


class _Flatbuffer:
    """The few steps through a Flatbuffer that a Message header needs. Reads out of bounds raise struct.error."""

    def __init__(self, data: Any, start: int) -> None:
        self._data = data
        self.root = start + self._number("<I", start)

    def field(self, table: int, slot: int) -> int:
        """Return where a table's field stands; ValueError when it is left at its default."""
        vtable = table - self._number("<i", table)
        entry = 4 + 2 * slot
        offset = self._number("<H", vtable + entry) if entry < self._number("<H", vtable) else 0
        if not offset:
            raise ValueError(f"header has no field {slot}")
        return table + offset

    def table(self, table: int, slot: int) -> int:
        place = self.field(table, slot)
        return place + self._number("<I", place)

    def vector(self, table: int, slot: int) -> tuple[int, int]:
        """Return where a vector's (or string's) elements start and how many there are."""
        start = self.table(table, slot)
        return start + 4, self._number("<I", start)

    def metadata(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield the key, and the value's place and length, of each custom metadata entry."""
        entries, count = self.vector(self.root, _MESSAGE_METADATA)
        for place in range(entries, entries + 4 * min(count, 16), 4):
            entry = place + self._number("<I", place)
            key, key_bytes = self.vector(entry, 0)
            yield bytes(self._data[key : key + min(key_bytes, 64)]), *self.vector(entry, 1)

    def _number(self, layout: str, place: int) -> int:
        if place < 0:
            raise struct.error("negative offset")
        found: int = struct.unpack_from(layout, self._data, place)[0]
        return found


def _text(head: dict[str, Any]) -> bytes:
    return json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()


def _one_row_message(schema: pa.Schema, head_bytes: int) -> bytearray:
    """Let pyarrow serialise a batch of one row with all metadata in place."""
    row = pa.RecordBatch.from_arrays([_blank(field.type, 1) for field in schema], schema=schema)
    return _serialise(row, b" " * head_bytes)


def _serialise(batch: pa.RecordBatch, head: bytes) -> bytearray:
    """Let pyarrow lay a message out; what it puts before (the schema) and after (the end mark) is left off."""
    metadata = {HEAD_KEY: head, seal.KEY: seal.BLANK}  # Flatbuffers puts the last one first
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch, custom_metadata=metadata)
    whole = memoryview(sink.getvalue())
    return bytearray(whole[len(batch.schema.serialize()) : len(whole) - PREFIX.size])


def _blank(kind: pa.DataType, length: int) -> pa.Array:
    """An array of zeros. Not by pa.array: given a list, that imports pandas, half a second inside an append."""
    zeros = pa.py_buffer(bytes(64))
    children = [_blank(kind.value_type, 0)] if pa.types.is_list(kind) else None
    return pa.Array.from_buffers(kind, length, [None] + [zeros] * (kind.num_buffers - 1), children=children)


def _flat(buffer: Buffer) -> memoryview | bytes:
    """The buffer's bytes as something whose ``len`` counts bytes."""
    return buffer if isinstance(buffer, bytes) else memoryview(buffer).cast("B")  # type: ignore[arg-type]  # NumPy arrays are buffers
