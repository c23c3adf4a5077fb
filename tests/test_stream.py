"""Sealed streams: what a reader may see at any moment, and what damage costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pytest
from builders import EVERY, build, token_group

from arrowbank import codec
from arrowbank.durable import files
from arrowbank.durable.message import MessageTemplate
from arrowbank.durable.stream import Scan, StreamWriter, map_file, scan
from arrowbank.schema import SEGMENT_SCHEMA

BANK = "b" * 32
NAME = "00000003-main-s0001-0000.arrows"
END = b"\xff\xff\xff\xff\0\0\0\0"
TEMPLATE = MessageTemplate(SEGMENT_SCHEMA)


def message(number: int, **fields: Any) -> bytearray:
    group = token_group(number, members=1, prompt=2, generated=2, **fields)
    encoded = codec.encode_group(
        group, uid=f"u{number}", iteration=3, session=1, writer="main", completed_at_us=1_000_000 + number
    )
    return TEMPLATE.build(encoded.columns, encoded.head)


def create(directory: Path, name: str = NAME) -> StreamWriter:
    (directory / "tmp").mkdir(exist_ok=True)
    return StreamWriter.create(directory / name, directory / "tmp", BANK, SEGMENT_SCHEMA)


def write(directory: Path, records: int = 3, *, close: bool = False, name: str = NAME) -> tuple[bytes, list[int]]:
    """Return a stream's bytes and where its records start, and the last one ends."""
    writer = create(directory, name)
    edges = [writer.offset]
    for number in range(records):
        writer.append([message(number)])
        edges.append(writer.offset)
    if close:
        writer.close()
    else:
        os.close(writer._descriptor)
    return (directory / name).read_bytes(), edges


def read(data: bytes, name: str = NAME, bank: str = BANK) -> Scan:
    return scan(memoryview(data), name, bank, SEGMENT_SCHEMA)


def sequences(found: Scan) -> list[int]:
    return [record.sequence for record in found.records]


def uids_by_pyarrow(data: bytes) -> list[str]:
    rows = pa.ipc.open_stream(data).read_all()
    rows.validate(full=True)
    return rows["group_uid"].to_pylist()


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int]]:
    return write(tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int]]:
    return write(tmp_path_factory.mktemp("closed"), close=True)


# -- writing


def test_eight_zeros_always_stand_behind_the_last_record(tmp_path: Path) -> None:
    writer = create(tmp_path)
    for number in range(4):
        data = writer.path.read_bytes()
        assert (len(data), data[-8:]) == (writer.offset + 8, bytes(8))
        writer.append([message(number), message(number + 10)])
    writer.close()
    assert writer.path.read_bytes()[writer.offset :] == END


def test_between_any_two_system_calls_the_file_is_a_valid_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = create(tmp_path)
    seen: list[list[str]] = []
    write_at = files.write_at

    def watched(descriptor: int, parts: Sequence[Any], offset: int) -> None:
        write_at(descriptor, parts, offset)
        data = writer.path.read_bytes()
        seen.append(uids_by_pyarrow(data))
        assert polars.read_ipc_stream(writer.path)["group_uid"].to_list() == seen[-1]
        assert [record.head["uid"] for record in read(data).records] == seen[-1]

    monkeypatch.setattr(files, "write_at", watched)
    writer.append([message(0)])
    writer.append([message(1), message(2)])
    writer.close()
    assert seen == [[], ["u0"], ["u0"], ["u0", "u1"], ["u0", "u1", "u2"], ["u0", "u1", "u2"]]


def three_appends(directory: Path) -> tuple[bytes, list[int]]:
    """Return a stream of appends of one, two and one record, and where each append starts."""
    writer = create(directory)
    starts = []
    for numbers in ([0], [1, 2], [3]):
        starts.append(writer.offset)
        writer.append([message(number) for number in numbers])
    return writer.path.read_bytes(), starts


def test_whole_records_of_an_append_that_looks_unfinished_come_back(tmp_path: Path) -> None:
    # Damage to the last append's first prefix looks the same, and then its other records were acknowledged.
    data, (_, start, end) = three_appends(tmp_path)
    found = read(data[:start] + bytes(8) + data[start + 8 : end] + bytes(8))
    assert sequences(found) == [0, 2]
    assert [(damage.offset, damage.torn) for damage in found.damage] == [(start, True)]


def test_a_prefix_that_never_came_within_an_unfinished_append_is_torn_too(tmp_path: Path) -> None:
    # Prefixes are written in order, but may lie in pages that a power cut keeps in any order.
    writer = create(tmp_path)
    for numbers in ([0], [1, 2, 3, 4]):
        writer.append([message(number) for number in numbers])
    data = writer.path.read_bytes()
    place = read(data).records[2].offset
    gone = data[:place] + bytes(8) + data[place + 8 :]
    found = read(gone)
    assert sequences(found) == [0, 1, 3, 4]
    assert [(damage.offset, damage.torn, damage.lost) for damage in found.damage] == [(place, True, 1)]
    finished = read(gone[:-8] + END)
    assert [(damage.offset, damage.torn, damage.lost) for damage in finished.damage] == [(place, False, 1)]


def test_of_a_finished_append_a_zeroed_first_prefix_costs_one_record(tmp_path: Path) -> None:
    data, (_, start, end) = three_appends(tmp_path)
    for rest in (data[end:], END):  # a later append, or the end mark, shows that it was finished
        found = read(data[:start] + bytes(8) + data[start + 8 : end] + rest)
        assert sequences(found)[:2] == [0, 2]
        assert [(damage.offset, damage.torn, damage.lost) for damage in found.damage] == [(start, False, 1)]


def test_a_record_written_in_pieces_shows_only_when_its_prefix_is_there(intact: tuple[bytes, list[int]]) -> None:
    data, edges = intact
    start, end = edges[2], edges[3]
    for cut in range(start + 8, end + 8, 40):  # as if the first write had got so far
        partial = data[:start] + bytes(8) + data[start + 8 : cut]
        assert uids_by_pyarrow(partial) == ["u0", "u1"]
        found = read(partial)
        assert sequences(found) == [0, 1]
        assert all(damage.torn for damage in found.damage)


def test_several_records_of_one_append_become_visible_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = create(tmp_path)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: counts.append(len(read(writer.path.read_bytes()).records)))
    counts: list[int] = []
    writer.append([message(number) for number in range(5)])
    assert counts == [5]


@pytest.mark.parametrize("failing", ["pwritev", "fdatasync"])
def test_a_file_whose_write_or_sync_failed_takes_no_further_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    writer = create(tmp_path)
    writer.append([message(0)])

    def fail(*_: Any) -> int:
        raise OSError(5, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        with pytest.raises(OSError, match="planted"):
            writer.append([message(1)])
    assert writer.poisoned
    with pytest.raises(AssertionError, match="new file"):
        writer.append([message(2)])
    writer.close()
    assert END not in writer.path.read_bytes()[writer.offset :]
    assert sequences(read(writer.path.read_bytes()))[:1] == [0]


def test_creation_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "planted")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="planted"):
        create(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not (tmp_path / NAME).exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_head_that_contains_a_seal_does_not_mislead_writer_or_reader(tmp_path: Path) -> None:
    fake = "arrowbank-seal-1:" + ":".join(["0" * 16] * 3) + ":" + "0" * 32
    writer = create(tmp_path)
    writer.append([message(0, problem_id=fake), message(1, problem_id=fake * 3)])
    writer.close()
    found = read(writer.path.read_bytes())
    assert [record.head["problem"] for record in found.records] == [fake, fake * 3]
    assert found.damage == []


# -- reading what is whole


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_kind_of_group_is_read_back_and_readable_by_polars(tmp_path: Path, name: str) -> None:
    group = build(name)
    encoded = codec.encode_group(group, uid="u", iteration=3, session=1, writer="main", completed_at_us=1)
    writer = create(tmp_path)
    writer.append([TEMPLATE.build(encoded.columns, encoded.head)])
    writer.close()
    found = read(writer.path.read_bytes())
    assert codec.decode_group(found.records[0].batch(SEGMENT_SCHEMA)) == group.rollouts
    assert polars.read_ipc_stream(writer.path).height == max(len(group), 1)


def test_open_and_closed_streams_have_no_damage(
    intact: tuple[bytes, list[int]], closed: tuple[bytes, list[int]]
) -> None:
    for (data, edges), is_closed in ((intact, False), (closed, True)):
        found = read(data)
        assert (found.damage, found.missing, found.closed) == ([], 0, is_closed)
        assert [record.offset for record in found.records] == edges[:-1]


def test_records_of_another_bank_or_under_another_name_are_not_taken(intact: tuple[bytes, list[int]]) -> None:
    data, _ = intact
    assert read(data, bank="c" * 32).records == []
    assert read(data, name=NAME.replace("s0001", "s0002")).records == []


def test_a_mapped_file_is_read_like_its_bytes(tmp_path: Path) -> None:
    data, _ = write(tmp_path)
    assert sequences(scan(map_file(tmp_path / NAME), NAME, BANK, SEGMENT_SCHEMA)) == sequences(read(data))


# -- damage


def test_each_single_bit_flip_costs_at_most_the_record_hit_and_nothing_is_changed(
    closed: tuple[bytes, list[int]],
) -> None:
    data, edges = closed
    good = {record.sequence: bytes(record.message) for record in read(data).records}
    for byte in range(len(data)):
        hit = next((at for at, (start, end) in enumerate(pairwise(edges)) if start <= byte < end), None)
        for bit in range(8) if byte % 5 == 0 or byte % 256 < 16 else (byte % 8,):
            changed = bytearray(data)
            changed[byte] ^= 1 << bit
            found = read(bytes(changed))
            assert set(sequences(found)) == {0, 1, 2} - {hit}, (byte, bit)
            assert all(bytes(record.message) == good[record.sequence] for record in found.records), (byte, bit)
            if hit is not None:
                assert found.damage[0].offset == edges[hit], (byte, bit)
                assert not found.damage[0].torn
                assert found.damage[0].lost == (1 if hit < 2 else None)


def test_every_truncation_keeps_the_whole_records(
    intact: tuple[bytes, list[int]], closed: tuple[bytes, list[int]]
) -> None:
    for data, edges in (intact, closed):
        for length in range(len(data)):
            found = read(data[:length])
            whole = sum(end <= length for end in edges[1:])
            assert sequences(found) == list(range(whole)), length
            # A file has its schema before it has its name, so that no kill leaves it without.
            assert all(damage.torn == (length >= edges[0]) for damage in found.damage), length
            assert bool(found.damage) == (length < edges[0] or data[edges[whole] : length].strip(b"\0") != b""), length


@pytest.mark.parametrize("fill", [bytes(8), END])
def test_records_behind_a_zeroed_prefix_or_an_end_mark_are_found(intact: tuple[bytes, list[int]], fill: bytes) -> None:
    data, edges = intact
    changed = data[: edges[1]] + fill + data[edges[1] + 8 :]
    found = read(changed)
    assert (sequences(found), found.missing) == ([0, 2], 1)
    (damage,) = found.damage
    assert (damage.offset, damage.length, damage.torn, damage.lost) == (edges[1], edges[2] - edges[1], False, 1)
    assert uids_by_pyarrow(changed) == ["u0"]  # what others silently lose


def test_a_wholly_zeroed_record_is_told_by_the_gap_in_the_numbers(intact: tuple[bytes, list[int]]) -> None:
    data, edges = intact
    found = read(data[: edges[1]] + bytes(edges[2] - edges[1]) + data[edges[2] :])
    assert (sequences(found), found.missing, found.damage[0].lost) == ([0, 2], 1, 1)


def test_a_damaged_schema_message_costs_no_record(intact: tuple[bytes, list[int]]) -> None:
    data, edges = intact
    for schema in (bytes(edges[0]), b"\xff" * edges[0], bytes(8) + data[8 : edges[0]]):
        found = read(schema + data[edges[0] :])
        assert sequences(found) == [0, 1, 2]
        (damage,) = found.damage
        assert (damage.offset, damage.lost, damage.torn) == (0, 0, False)


def test_a_second_stream_behind_the_end_mark_is_damage_and_not_data(
    closed: tuple[bytes, list[int]], tmp_path: Path
) -> None:
    data, edges = closed
    other, _ = write(tmp_path, close=True)
    for second in (data, other, data[edges[0] : edges[1]]):
        found = read(data + second)
        assert sequences(found) == [0, 1, 2]
        (damage,) = found.damage
        assert (damage.offset, damage.torn) == (edges[3], False)


def test_a_payload_with_a_whole_sealed_record_in_it_is_not_taken(tmp_path: Path) -> None:
    inner, edges = write(tmp_path, records=3)
    record = inner[edges[2] : edges[3]]
    writer = create(tmp_path, NAME.replace("-0000", "-0001"))
    for payload in (record, inner):
        encoded = codec.encode_group(
            token_group(1, members=1, arrays={"blob": memoryview(payload)}),
            uid="outer", iteration=3, session=1, writer="main", completed_at_us=1,
        )  # fmt: skip
        writer.append([TEMPLATE.build(encoded.columns, encoded.head)])
    data = bytearray(writer.path.read_bytes())
    writer.close()
    data[edges[0] // 2] ^= 1  # in the schema
    data[data.index(b"outer") - 1] ^= 1  # in the first record, and scan looks on through its payload
    found = read(bytes(data), writer.path.name)
    assert [(record.head["uid"], record.sequence) for record in found.records] == [("outer", 1)]


def test_a_record_in_another_place_of_its_own_file_is_not_taken(intact: tuple[bytes, list[int]]) -> None:
    data, edges = intact
    first = data[edges[0] : edges[1]]
    assert sequences(read(data[: edges[3]] + first + bytes(8))) == [0, 1, 2]  # repeated behind the last
    swapped = data[: edges[0]] + data[edges[1] : edges[2]] + first + data[edges[2] :]
    assert sequences(read(swapped)) == [2]


@pytest.mark.parametrize("junk", [b"x", b"junk" * 100, b"\xff" * 64, END * 3, b"\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_junk_behind_an_open_stream_is_a_torn_tail(intact: tuple[bytes, list[int]], junk: bytes) -> None:
    data, edges = intact
    found = read(data[: edges[3]] + junk)
    assert sequences(found) == [0, 1, 2]
    assert [damage.offset for damage in found.damage] == [edges[3]]
    assert read(data + junk).damage[0].torn


def test_minus_ones_as_far_as_the_eye_reaches_are_scanned_in_no_time(tmp_path: Path) -> None:
    writer = create(tmp_path)
    group = token_group(1, members=1, arrays={"minus": memoryview(b"\xff" * (1 << 20))})
    encoded = codec.encode_group(group, uid="u", iteration=3, session=1, writer="main", completed_at_us=1)
    writer.append([TEMPLATE.build(encoded.columns, encoded.head), message(1)])
    writer.close()
    data = bytearray(writer.path.read_bytes())
    data[len(data) // 2] ^= 1
    assert sequences(read(bytes(data))) == [1]


def test_a_damaged_last_record_is_corrupt_in_a_closed_stream_and_torn_in_an_open_one(
    intact: tuple[bytes, list[int]], closed: tuple[bytes, list[int]]
) -> None:
    for (data, edges), torn in ((intact, True), (closed, False)):
        changed = bytearray(data)
        changed[edges[2] + 100] ^= 1
        (damage,) = read(bytes(changed)).damage
        assert (damage.offset, damage.torn, damage.lost) == (edges[2], torn, None)


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff\xff\xff", bytes(7), bytes(8), b"\xff" * 8, END, b"text" * 9])
def test_a_file_too_short_for_anything_is_damage_and_no_error(data: bytes) -> None:
    found = read(data)
    assert (found.records, found.missing) == ([], 0)
    assert len(found.damage) == 1


def test_an_empty_file_is_mapped(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    assert len(map_file(tmp_path / NAME)) == 0


def test_forged_lengths_allocate_nothing(intact: tuple[bytes, list[int]]) -> None:
    data, edges = intact
    for length in (2**31 - 1, 2**31 - 8, len(data)):
        changed = bytearray(data)
        changed[edges[1] + 4 : edges[1] + 8] = length.to_bytes(4, "little")
        assert sequences(read(bytes(changed))) == [0, 2]
