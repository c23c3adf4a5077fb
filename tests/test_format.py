"""The format is what ``layout`` says: what another program writes or reads by that text alone is the same to us.

Nothing of arrowbank's reading or writing is used on the other side, only pyarrow, xxhash and the standard library.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from builders import EVERY, build, token_group

from arrowbank import RolloutBank, scan
from arrowbank.durable import layout
from arrowbank.durable.journal import JOURNAL_SCHEMA
from arrowbank.schema import ARCHIVE_SCHEMA, SCHEMA_HASH, SEGMENT_SCHEMA

TEXT = layout.__doc__ or ""
BANK = "0" * 32
UID = "7" * 32

COLUMNS = pa.schema(
    [
        pa.field("group_uid", pa.string(), nullable=False),
        pa.field("env_id", pa.string()),
        pa.field("split", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("member_index", pa.int32(), nullable=False),
        pa.field("group_size", pa.int32(), nullable=False),
        pa.field("collected_iteration", pa.int64(), nullable=False),
        pa.field("completed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("num_tokens", pa.int64()),
        pa.field("num_generated", pa.int64()),
        pa.field("tokens", pa.list_(pa.field("element", pa.int32(), nullable=False))),
        pa.field("generation_mask", pa.list_(pa.field("element", pa.bool_(), nullable=False))),
        pa.field("logprobs", pa.list_(pa.field("element", pa.float32()))),
        pa.field("text", pa.string()),
        pa.field("details", pa.string(), nullable=False),
        pa.field("arrays", pa.list_(pa.field("element", pa.large_binary(), nullable=False)), nullable=False),
    ]
)
ENTRIES = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("iteration", pa.int64()),
        pa.field("uids", pa.list_(pa.field("element", pa.string(), nullable=False))),
        pa.field("state", pa.large_binary()),
        pa.field("details", pa.string(), nullable=False),
    ]
)
ROW = {
    "group_uid": UID, "env_id": "math", "split": "train", "kind": "token", "member_index": 0, "group_size": 1,
    "collected_iteration": 4, "completed_at": 1_000_000, "reward": 0.5, "num_tokens": 4, "num_generated": 2,
    "tokens": [5, 6, 7, 8], "generation_mask": [False, True, False, True], "logprobs": [None, -0.5, None, -0.0],
    "text": None, "arrays": [],
    "details": '{"session":1,"writer":"main","batch_id":-1,"index_in_batch":-1,"turns":[[0,2,0,1,1],[0,4,0,1,2]]}',
}  # fmt: skip
HEAD = {"uid": UID, "iteration": 4, "env": "math", "problem": None, "split": "train", "size": 1, "at": 1_000_000}


# -- another program that writes


def sealed(batch: pa.RecordBatch, head: dict[str, Any], file: str, *, number: int, offset: int) -> bytes:
    """Build a record of a file, the first of its append."""
    blank = "arrowbank-seal-1:" + ":".join(["0" * 16] * 4) + ":" + "0" * 32
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        metadata = {"arrowbank.head": json.dumps(head, separators=(",", ":")), "arrowbank.seal": blank}
        stream.write_batch(batch, custom_metadata=metadata)
    record = bytearray(sink.getvalue().to_pybytes()[len(batch.schema.serialize()) : -8])
    place = record.index(b"arrowbank-seal-1:")
    numbers = "".join(f"{value:016x}:" for value in (number, offset, offset, len(record)))
    record[place : place + 117] = f"arrowbank-seal-1:{numbers}{'0' * 32}".encode()
    digest = xxhash.xxh3_128_hexdigest(f"{BANK}/{file}/".encode() + record)
    record[place + 85 : place + 117] = digest.encode()
    return bytes(record)


def stream(schema: pa.Schema, rows: list[dict[str, Any]], heads: list[dict[str, Any]], file: str) -> bytes:
    data = bytearray(schema.serialize())
    for number, (row, head) in enumerate(zip(rows, heads, strict=True)):
        batch = pa.RecordBatch.from_pylist([row], schema)
        data += sealed(batch, head, file, number=number, offset=len(data))
    return bytes(data + bytes(8))


def entry(kind: str, iteration: int | None = None, uids: list[str] | None = None, **details: Any) -> dict[str, Any]:
    return {
        "kind": kind, "at": 0, "iteration": iteration, "uids": uids, "state": b"here" if kind == "drawn" else None,
        "details": json.dumps(details),
    }  # fmt: skip


@pytest.fixture
def written_elsewhere(tmp_path: Path) -> Path:
    """A bank of one drawn group, made by another program."""
    root = tmp_path / "bank"
    for name in ("segments", "journal", "sessions", "quarantine", "tmp", ".archive/v000001"):
        (root / name).mkdir(parents=True)
    (root / "archive").symlink_to(".archive/v000001")
    pq.write_table(ARCHIVE_SCHEMA.empty_table(), root / ".archive/v000001/c000000-s0000.parquet")
    manifest: dict[str, Any] = {
        "format_version": 1, "bank_id": BANK, "schema_hash": re.findall(r"schema_hash +(\w{32})", TEXT)[0],
        "commit": 1, "version": 1, "files": [], "archived_through": 0, "journal": "", "carried": [], "retired": {},
    }  # fmt: skip
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    manifest["checksum"] = xxhash.xxh3_128_hexdigest(canonical)
    (root / "MANIFEST.json").write_text(json.dumps(manifest))
    name = "00000004-main-s0001-0000.arrows"
    (root / "segments" / name).write_bytes(stream(COLUMNS, [ROW], [HEAD], name))
    entries = [
        entry("restored", 0, mode="replay", parent=None, lost=[], guessed=False),
        entry("drawn", 4, [UID], span=2),
    ]
    data = stream(ENTRIES, entries, [{"kind": one["kind"]} for one in entries], "s0001-0000.arrows")
    (root / "journal/s0001-0000.arrows").write_bytes(data)
    return root


def test_a_bank_that_another_program_wrote_by_the_text_is_read_back(written_elsewhere: Path) -> None:
    with RolloutBank.open(written_elsewhere) as bank:
        restored = bank.restore(0)
        assert (restored.report.damage, restored.report.lost_records) == ((), 0)
        (draw,) = restored.draws
        assert (draw.iteration, draw.span, draw.state) == (4, 2, b"here")
        (rollout,) = draw.groups[0]
        assert [turn.tolist() for turn in rollout.trajectory] == [[5, 6], [5, 6, 7, 8]]
        assert [values.tolist() for values in rollout.logprobs] == [[-0.5], [-0.5, -0.0]]
        assert (draw.groups[0].uid, rollout.reward) == (UID, 0.5)
        bank.append(token_group(1))
    assert scan(written_elsewhere).to_arrow().num_rows == 1 + len(token_group(1))


def test_what_another_writer_says_of_a_failed_append_is_heeded(written_elsewhere: Path) -> None:
    """Its second segment begins with it; the record of the first one does not count, though it is whole."""
    names = [f"00000004-rank-1-s0001-000{part}.arrows" for part in range(2)]
    gone, kept = ("8" * 32, "9" * 32)
    rows = [ROW | {"group_uid": gone}]
    (written_elsewhere / "segments" / names[0]).write_bytes(stream(COLUMNS, rows, [HEAD | {"uid": gone}], names[0]))
    data = bytearray(COLUMNS.serialize())
    note = pa.RecordBatch.from_pylist([], COLUMNS)
    data += sealed(note, {"abandoned": [[names[0], 0, 1]]}, names[1], number=0, offset=len(data))
    group = pa.RecordBatch.from_pylist([ROW | {"group_uid": kept}], COLUMNS)
    data += sealed(group, HEAD | {"uid": kept}, names[1], number=1, offset=len(data)) + bytes(8)
    (written_elsewhere / "segments" / names[1]).write_bytes(data)
    with RolloutBank.open(written_elsewhere) as bank:
        restored = bank.restore(0)
        assert [pending.uid for pending in restored.pending["math"]] == [kept]
        assert (restored.report.damage, restored.report.lost_records) == ((), 0)


def test_the_columns_and_the_hash_are_those_of_the_text() -> None:
    assert (COLUMNS, ENTRIES) == (SEGMENT_SCHEMA, JOURNAL_SCHEMA)
    said = {
        name.strip("?")
        for part in re.findall(r"columns   (.*?)\.\s", TEXT, re.S)
        for name in re.findall(r"\w+\??", part)
    }
    assert {*COLUMNS.names, *ENTRIES.names} <= said
    assert re.findall(r"schema_hash +(\w{32})", TEXT) == [SCHEMA_HASH]


def test_the_worked_example_is_right_byte_by_byte() -> None:
    row = entry("checkpointed", 20) | {"details": "{}"}
    batch = pa.RecordBatch.from_pylist([row], ENTRIES)
    assert len(ENTRIES.serialize()) == 440
    record = sealed(batch, {"kind": "checkpointed"}, "s0001-0000.arrows", number=0, offset=440)
    assert len(record) == 848
    lines = re.findall(r"^    ([0-9a-f]{4})  ((?:[0-9a-f]{2} )+)", TEXT, re.M)
    assert len(lines) > 20
    for place, shown in lines:
        start, expected = int(place, 16), bytes.fromhex(shown)
        assert record[start : start + len(expected)] == expected, place


# -- another program that reads


def records(path: Path, bank_id: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Read an undamaged stream: each record's number and place by its seal, and its head."""
    data = path.read_bytes()
    place = 8 + struct.unpack_from("<i", data, 4)[0]
    found = []
    while data[place : place + 8] not in (bytes(8), b"\xff\xff\xff\xff" + bytes(4)):
        header = 8 + struct.unpack_from("<i", data, place + 4)[0]
        text = data.index(b"arrowbank-seal-1:", place, place + header)
        names = ("number", "offset", "first", "length")
        _, *numbers, digest = data[text : text + 117].split(b":")
        seal = {name: int(value, 16) for name, value in zip(names, numbers, strict=True)}
        record = data[place : place + seal["length"]]
        own = text - place + 85
        sealed = f"{bank_id}/{path.name}/".encode() + record[:own] + b"0" * 32 + record[own + 32 :]
        assert xxhash.xxh3_128_hexdigest(sealed).encode() == digest
        message = pa.ipc.read_message(record)
        batch = pa.ipc.read_record_batch(message, COLUMNS if "main" in path.name else ENTRIES)
        head = re.search(rb'\{"(uid|kind)".*?\} *(?=\0|[^ ])', record[:header], re.S)
        assert head is not None
        found.append((seal, {"head": head[0], "rows": batch.to_pylist()}))
        place += seal["length"]
    return found


def test_a_bank_of_ours_is_read_by_the_text_alone(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uids = bank.append_many([build(name) for name in EVERY])
        uids.append(bank.append(token_group(3)))
        bank.mark_consumed(uids[:1], 0)
    bank_id = json.loads((path / "MANIFEST.json").read_text())["bank_id"]
    (segment,), (journal,) = (path / "segments").iterdir(), (path / "journal").iterdir()
    found = records(segment, bank_id)
    assert [seal["number"] for seal, _ in found] == list(range(len(uids)))
    assert [seal["first"] for seal, _ in found] == [found[0][0]["offset"]] * len(EVERY) + [found[-1][0]["offset"]]
    assert [content["rows"][0]["group_uid"] for _, content in found] == uids
    kinds = [content["rows"][0]["kind"] for _, content in records(journal, bank_id)]
    assert kinds == ["restored", "drawn", "sealed"]
