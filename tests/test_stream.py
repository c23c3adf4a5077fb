"""Streams of sealed records: written so that any reader can look at any time, read without believing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from builders import token_group

from arrowbank.codec import decode_group, encode_group
from arrowbank.durable import files
from arrowbank.durable.message import MessageTemplate
from arrowbank.durable.stream import Scan, StreamWriter, map_file, scan
from arrowbank.schema import SEGMENT_SCHEMA

NAME = "00000000-main-s0001-0000.arrows"
TEMPLATE = MessageTemplate(SEGMENT_SCHEMA)
GROUPS = [token_group(seed, members=1, tokens=16) for seed in range(3)]
SCHEMA_BYTES = len(SEGMENT_SCHEMA.serialize())


def message(index: int) -> bytearray:
    encoded = encode_group(GROUPS[index], uid=f"u{index}", iteration=0, session=1, writer="main", completed_at_us=index)
    return TEMPLATE.build(encoded.columns, encoded.head)


@pytest.fixture
def writer(tmp_path: Path) -> StreamWriter:
    (tmp_path / "tmp").mkdir()
    return StreamWriter.create(tmp_path / NAME, tmp_path / "tmp", "bank", SEGMENT_SCHEMA)


@pytest.fixture
def content(writer: StreamWriter) -> bytes:
    """A stream of three records, still open."""
    writer.append([message(0)])
    writer.append([message(1), message(2)])
    return writer.path.read_bytes()


def read(content: bytes, bank_id: str = "bank", name: str = NAME) -> Scan:
    return scan(memoryview(content), name, bank_id)


def check_values(found: Scan) -> set[int]:
    """Every record returned is exactly what was written under its uid; return which ones."""
    indices = set()
    for record in found.records:
        index = int(record.head["uid"][1:])
        assert decode_group(record.batch(SEGMENT_SCHEMA)) == GROUPS[index].rollouts
        indices.add(index)
    return indices


def test_records_come_back_in_order(content: bytes) -> None:
    found = read(content)
    assert [record.sequence for record in found.records] == [0, 1, 2]
    assert check_values(found) == {0, 1, 2} and found.damage == [] and not found.closed


def test_eight_zeros_always_follow_the_last_record_until_the_end_mark(writer: StreamWriter) -> None:
    for index in range(3):
        writer.append([message(index)])
        assert writer.path.read_bytes()[writer.offset :] == bytes(8)
    writer.close()
    assert writer.path.read_bytes()[writer.offset :] == b"\xff\xff\xff\xff\0\0\0\0"
    assert read(writer.path.read_bytes()).closed


def test_plain_readers_see_a_valid_stream_between_any_two_writes(
    writer: StreamWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    write_at = files.write_at

    def look(*given: Any) -> None:
        for _ in range(2):
            raw = writer.path.read_bytes()
            rows = pa.ipc.open_stream(raw).read_all().num_rows
            assert rows == pl.read_ipc_stream(raw).height == len(check_values(read(raw)))
            seen.append(rows)
            if given:
                write_at(*given)
                given = ()

    monkeypatch.setattr(files, "write_at", look)
    writer.append([message(0)])
    writer.append([message(1), message(2)])
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]


def test_any_flipped_bit_costs_at_most_the_record_it_hits(content: bytes) -> None:
    check_flips(content)


def check_flips(content: bytes) -> None:
    """Flip bits, one at a time; only the record that was hit may be missing, and none may be wrong."""
    offsets = [record.offset for record in read(content).records] + [len(content) - 8]
    rng = np.random.default_rng(0)
    places = {int(place) for place in rng.integers(0, len(content) * 8, 6000)}
    places |= set(range(offsets[1] * 8, (offsets[1] + 900) * 8, 7))
    for place in sorted(places):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        found = read(bytes(flipped))
        lost = {0, 1, 2} - check_values(found)
        hit = {index for index in range(3) if offsets[index] <= place // 8 < offsets[index + 1]}
        assert lost == hit, place
        if hit:
            assert found.damage, place


def test_a_truncated_stream_keeps_every_whole_record(content: bytes) -> None:
    ends = [record.offset + len(record.message) for record in read(content).records]
    for size in range(0, len(content), 3):
        found = read(content[:size])
        assert check_values(found) == {index for index in range(3) if ends[index] <= size}
        assert all(damage.torn for damage in found.damage) or size < SCHEMA_BYTES


def test_a_zeroed_prefix_does_not_hide_what_follows(writer: StreamWriter) -> None:
    for index in range(3):
        writer.append([message(index)])
    zeroed = bytearray(writer.path.read_bytes())
    middle = read(bytes(zeroed)).records[1]
    zeroed[middle.offset : middle.offset + 8] = bytes(8)
    found = read(bytes(zeroed))
    assert check_values(found) == {0, 2} and found.missing == 1
    assert [(damage.offset, damage.torn) for damage in found.damage] == [(middle.offset, False)]


def test_of_an_append_that_a_power_cut_tore_what_is_whole_comes_back(content: bytes) -> None:
    middle = read(content).records[1]
    torn = bytearray(content)
    torn[middle.offset : middle.offset + 8] = bytes(8)
    found = read(bytes(torn))
    assert check_values(found) == {0, 2}
    assert [damage.torn for damage in found.damage] == [True]


def test_a_second_stream_behind_the_end_mark_is_damage_not_data(writer: StreamWriter, content: bytes) -> None:
    found = read(content[:-8] + b"\xff\xff\xff\xff\0\0\0\0" + content)
    assert check_values(found) == {0, 1, 2} and len(found.records) == 3
    assert [damage.torn for damage in found.damage] == [False]


def test_a_record_counts_only_in_its_own_place_file_and_bank(content: bytes) -> None:
    first, second, _ = read(content).records
    assert read(content, bank_id="other").records == []
    assert read(content, name="00000001-main-s0001-0000.arrows").records == []
    moved = content[: first.offset] + bytes(second.message) + content[second.offset :]
    assert check_values(read(moved)) <= {1, 2}
    doubled = content[:-8] + bytes(second.message) + bytes(8)
    assert [record.sequence for record in read(doubled).records] == [0, 1, 2]


def test_a_payload_that_holds_a_whole_record_is_not_taken_for_one(writer: StreamWriter) -> None:
    inner = message(0)
    writer.append([inner])
    carrier = GROUPS[1].model_copy(deep=True)
    carrier.rollouts[0].arrays = {"bytes": np.frombuffer(bytes(inner) * 3, np.uint8)}
    encoded = encode_group(carrier, uid="c", iteration=0, session=1, writer="main", completed_at_us=0)
    writer.append([TEMPLATE.build(encoded.columns, encoded.head)])
    writer.append([message(2)])
    raw = bytearray(writer.path.read_bytes())
    second = read(bytes(raw)).records[1]
    raw[second.offset + 16] ^= 1
    assert [record.head["uid"] for record in read(bytes(raw)).records] == ["u0", "u2"]


def test_junk_and_tiny_files_are_damage_or_nothing() -> None:
    rng = np.random.default_rng(1)
    assert read(b"").records == []
    for size in (1, 7, 8, 100, 5000):
        assert read(rng.bytes(size)).records == []
        assert read(b"\xff" * size).records == []
        assert read(bytes(size)).records == []


def test_a_damaged_schema_costs_no_record(content: bytes) -> None:
    broken = bytearray(content)
    broken[20:200] = bytes(180)
    assert check_values(read(bytes(broken))) == {0, 1, 2}


def test_a_file_is_not_trusted_after_a_failed_sync(writer: StreamWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr("os.fdatasync", fail)
    with pytest.raises(OSError, match="input/output"):
        writer.append([message(0)])
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="failed before"):
        writer.append([message(1)])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    pwritev = os.pwritev
    monkeypatch.setattr("os.pwritev", lambda fd, parts, at: pwritev(fd, [memoryview(parts[0])[:3]], at))
    with (tmp_path / "file").open("wb") as file:
        files.write_at(file.fileno(), [b"abcdefgh", b"", b"ijk"], 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0abcdefghijk"


def test_a_mapped_file_reads_as_its_bytes(content: bytes, writer: StreamWriter) -> None:
    assert bytes(map_file(writer.path)) == content
