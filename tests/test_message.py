"""Messages that were filled in are what pyarrow would have written, as far as any reader can tell."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pyarrow as pa
import pytest
from builders import EVERY, build

from arrowbank import codec
from arrowbank.columns import Columns
from arrowbank.durable.journal import (
    JOURNAL_SCHEMA,
    Abandoned,
    Checkpointed,
    Drawn,
    Entry,
    Evicted,
    Restored,
    Sealed,
    _encode,
)
from arrowbank.durable.message import HEAD_KEY, PREFIX, MessageTemplate, read_head
from arrowbank.durable.segment import SegmentFacts
from arrowbank.schema import SEGMENT_SCHEMA

SEGMENTS = MessageTemplate(SEGMENT_SCHEMA)
JOURNALS = MessageTemplate(JOURNAL_SCHEMA)
ENTRIES: list[Entry] = [
    Restored(0, "replay", None),
    Restored(7, "discard", 3),
    Drawn(5, ("a", "b", "ü"), 2, b"\0\xff"),
    Drawn(5, (), 1, None),
    Drawn(5, ("a",), 1, b""),
    Evicted(tuple(f"uid-{number}" for number in range(300)), "zu spät"),
    Checkpointed(2**40),
    Abandoned("file", 3, 2),
    Sealed((SegmentFacts("x", 1, 2), SegmentFacts("y", 3, 4))),
]


def encoded(name: str, **options: Any) -> codec.EncodedGroup:
    given = {"uid": "u1", "iteration": 3, "session": 1, "writer": "main", "completed_at_us": 5}
    return codec.encode_group(build(name), **given | options)


def parsed(message: bytes, schema: pa.Schema) -> pa.RecordBatch:
    batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
    batch.validate(full=True)
    return batch


def by_pyarrow(batch: pa.RecordBatch) -> bytes:
    """What pyarrow itself makes of a batch, with its own header, and only the bytes that count."""
    plain = pa.RecordBatch.from_arrays([pa.concat_arrays([column]) for column in batch.columns], schema=batch.schema)
    return plain.serialize().to_pybytes()


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_group_reads_as_after_a_trip_through_pyarrows_own_writer(name: str) -> None:
    group = encoded(name)
    batch = parsed(SEGMENTS.build(group.columns, group.head), SEGMENT_SCHEMA)
    again = parsed(by_pyarrow(batch), SEGMENT_SCHEMA)
    assert again.equals(batch) or name == "floats"  # NaN is not equal to itself there
    assert codec.decode_group(again) == codec.decode_group(batch) == build(name).rollouts


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_a_journal_entry_reads_as_pyarrow_would_have_written_it(entry: Entry) -> None:
    columns, head = _encode(entry)
    batch = parsed(JOURNALS.build(columns, head), JOURNAL_SCHEMA)
    row = batch.drop_columns(["at"]).to_pylist()[0]
    expected = pa.RecordBatch.from_pylist([row], schema=pa.schema([f for f in JOURNAL_SCHEMA if f.name != "at"]))
    assert batch.drop_columns(["at"]).equals(expected)
    assert row["kind"] == type(entry).__name__.lower()
    assert row["uids"] == (list(entry.uids) if isinstance(entry, Drawn | Evicted) else None)


@pytest.mark.parametrize("extra", [0, 1, 40, 90, 127, 128, 129, 1000, 70_000])
def test_heads_of_every_length_are_padded_and_read_back(extra: int) -> None:
    group = encoded("tokens" if "tokens" in EVERY else sorted(EVERY)[0])
    head = group.head | {"problem": "π" * extra}
    message = SEGMENTS.build(group.columns, head)
    assert len(message) % 8 == 0
    assert read_head(memoryview(message)) == head
    stream = io.BytesIO(SEGMENT_SCHEMA.serialize().to_pybytes() + message)
    batch, metadata = pa.ipc.open_stream(stream).read_next_batch_with_custom_metadata()
    assert json.loads(metadata[HEAD_KEY]) == head
    assert len(metadata[HEAD_KEY]) % 128 == 0
    assert batch.num_rows == group.columns.rows


def test_the_header_is_the_only_thing_that_the_heads_length_changes() -> None:
    group = encoded(sorted(EVERY)[0])
    short = SEGMENTS.build(group.columns, {"uid": "u"})
    long = SEGMENTS.build(group.columns, {"uid": "u" * 500})
    bodies = [bytes(message[PREFIX.size + PREFIX.unpack_from(message)[1] :]) for message in (short, long)]
    assert bodies[0] == bodies[1]


def test_columns_of_another_schema_are_a_bug_that_is_told() -> None:
    columns = Columns(1)
    columns.constant(b"x")
    with pytest.raises(AssertionError, match="another schema"):
        SEGMENTS.build(columns, {})


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, bytes(64), b"\xff" * 200, PREFIX.pack(0xFFFFFFFF, 64) + b"\x7f" * 64]
)
def test_a_header_that_is_none_of_ours_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        read_head(memoryview(data))


def test_a_header_whose_numbers_point_anywhere_is_a_value_error_or_read() -> None:
    group = encoded(sorted(EVERY)[0])
    message = SEGMENTS.build(group.columns, group.head)
    for place in range(PREFIX.size, PREFIX.size + PREFIX.unpack_from(message)[1]):
        for value in (0, 0x7F, 0x80, 0xFF):
            changed = bytearray(message)
            changed[place] = value
            with contextlib.suppress(ValueError):  # json's and unicode's own are ValueErrors too
                read_head(memoryview(changed))
