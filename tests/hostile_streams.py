"""Journals and segments that somebody made up to do harm, sealed as they should be."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from corruptors import SEED
from damaged_banks import KINDS, small

from arrowbank import codec
from arrowbank.columns import Columns
from arrowbank.durable import seal
from arrowbank.durable.journal import JOURNAL_SCHEMA, Snapshot, read_journal
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.manifest import read_manifest
from arrowbank.durable.message import PREFIX, MessageTemplate, _Flatbuffer, build_message
from arrowbank.durable.stream import StreamWriter
from arrowbank.schema import SEGMENT_SCHEMA

__all__ = ["JOURNAL_NAME", "OTHER_DIGITS", "SEGMENT_NAME", "STREAMS", "Hostile"]

Hostile = Callable[[Path, Path], object]
"""Makes a bank, one of ``damaged_banks.make_whole``, hostile; the second path is a directory outside of it that nothing
may touch."""
STREAMS: dict[str, Hostile] = {}

SEGMENT_NAME, JOURNAL_NAME = "00000002-main-s0001-0000.arrows", "s0001-0001.arrows"
OTHER_DIGITS = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


# -- journal entries

_ENTRY, _GROUP = MessageTemplate(JOURNAL_SCHEMA), MessageTemplate(SEGMENT_SCHEMA)


def _entry(
    kind: str, *, iteration: Any = None, uids: Any = None, state: bytes | None = None, details: Any = None
) -> bytearray:
    text = details if isinstance(details, str) else json.dumps({} if details is None else details)
    columns = Columns(1)
    columns.constant(kind.encode())
    columns.numbers("q", [0])
    columns.numbers("q", [iteration])
    columns.lists([None if uids is None else len(uids)])
    columns.strings_child([uid if isinstance(uid, bytes) else str(uid).encode() for uid in uids or []])
    columns.large_binaries([state])
    columns.constant(text.encode())
    return _ENTRY.build(columns, {"kind": kind})


def _put_stream(path: Path, bank_id: str, schema: pa.Schema, messages: list[bytearray]) -> None:
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent.parent) as directory:
        stream = StreamWriter.create(path, Path(directory), bank_id, schema)
        if messages:
            stream.append(messages)
        stream.close()


def _entries(*messages: bytearray, first: bool = False) -> Hostile:
    """A further part of the journal with these entries; ``first``: instead of the part that it begins with."""

    def harm(root: Path, _: Path) -> None:
        manifest = read_manifest(BankPaths(root))
        name = manifest.journal if first else "s0002-0001.arrows"
        _put_stream(root / "journal" / name, manifest.bank_id, JOURNAL_SCHEMA, list(messages))

    return harm


_UID = "0" * 32
_DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
_DRAWS: dict[str, dict[str, Any]] = {
    "iteration -1": {"iteration": -1}, "a huge iteration": {"iteration": 2**63 - 1},
    "no iteration": {"iteration": None},
    "no groups": {"uids": []}, "null groups": {"uids": None}, "one group twice": {"uids": [_UID, _UID]},
    "groups that are not UTF-8": {"uids": [b"\xff\xfe"]}, "very many groups": {"uids": [_UID] * 100_000},
    "span 0": {"details": {"span": 0}}, "span -1": {"details": {"span": -1}},
    "a huge span": {"details": {"span": 10**18}},
    "a huger span": {"details": {"span": 10**300}}, "a span of text": {"details": {"span": "x"}},
    "a null span": {"details": {"span": None}}, "half a span": {"details": {"span": 1.5}}, "no span": {"details": {}},
    "a true span": {"details": {"span": True}}, "an infinite span": {"details": '{"span": Infinity}'},
    "a list of details": {"details": "[]"}, "no JSON": {"details": "{"}, "a number of details": {"details": "5"},
    "deep details": {"details": _DEEP}, "a long number": {"details": '{"span": ' + "9" * 5000 + "}"},
}  # fmt: skip
for _label, _fields in _DRAWS.items():
    _drawn: dict[str, Any] = {"iteration": 3, "uids": [_UID], "details": {"span": 1}}
    STREAMS[f"journal: a draw with {_label}"] = _entries(_entry("drawn", **(_drawn | _fields)))
_restored: dict[str, Any] = {"mode": "replay", "parent": 1, "lost": [], "guessed": False}
_RESTORES: dict[str, dict[str, Any]] = {
    "itself as parent": {"parent": 2}, "an unknown parent": {"parent": 10**9}, "a huge parent": {"parent": 10**300},
    "a parent of text": {"parent": "x"}, "a list as parent": {"parent": [1]}, "a fraction as parent": {"parent": 0.5},
    "an unknown mode": {"mode": "evil"}, "a number as mode": {"mode": 5}, "discard": {"mode": "discard"},
    "a number as lost": {"lost": 5}, "text as lost": {"lost": "abc"}, "numbers as lost": {"lost": [1, 2]},
    "lists as lost": {"lost": [[1], {}]}, "null as lost": {"lost": None},
    "a name of text": {"named": "x", "parent": None},
    "a negative name": {"named": -1, "parent": None}, "a list as name": {"named": [], "parent": None},
}  # fmt: skip
for _label, _change in _RESTORES.items():
    STREAMS[f"journal: a restore with {_label}"] = _entries(
        _entry("restored", iteration=2, details=_restored | _change)
    )
for _at in (None, -5, 2**63 - 1, -(2**63), 0):
    STREAMS[f"journal: a restore at {_at}"] = _entries(_entry("restored", iteration=_at, details=_restored))
    STREAMS[f"journal: a checkpoint at {_at}"] = _entries(_entry("checkpointed", iteration=_at))
    STREAMS[f"journal: checkpoints up from {_at}"] = _entries(
        _entry("checkpointed", iteration=_at), _entry("drawn", iteration=3, uids=[_UID], details={"span": 10**18}),
        _entry("checkpointed", iteration=10**18), _entry("restored", iteration=3, details=_restored),
    )  # fmt: skip
_ABANDONED: dict[str, dict[str, Any]] = {
    "a negative first": {"first": -1}, "a negative count": {"count": -1}, "a huge count": {"count": 2**62},
    "a huger count": {"count": 10**300}, "a count of text": {"count": "x"}, "half a count": {"count": 0.5},
    "a number as name": {"name": 5}, "a list as name": {"name": []}, "a null name": {"name": None},
    "dots": {"name": "../../outside/victim"}, "this very file": {"name": "s0002-0001.arrows", "count": 2**62},
    "the snapshot": {"name": JOURNAL_NAME, "count": 1},
}  # fmt: skip
for _label, _change in _ABANDONED.items():
    _records_of: dict[str, Any] = {"name": SEGMENT_NAME, "first": 0, "count": 0}
    STREAMS[f"journal: abandoned records of {_label}"] = _entries(_entry("abandoned", details=_records_of | _change))
for _label, _facts in {
    "negative counts": [[SEGMENT_NAME, -5, -5]], "huge counts": [[SEGMENT_NAME, 10**18, 10**18]],
    "huger counts": [[SEGMENT_NAME, 10**300, 1]], "counts of text": [[SEGMENT_NAME, "5", "5"]],
    "half counts": [[SEGMENT_NAME, 0.5, 1]], "null counts": [[SEGMENT_NAME, None, None]],
    "too few": [[SEGMENT_NAME]],
    "too many": [[SEGMENT_NAME, 1, 1, 1]], "numbers as names": [[1, 2, 3]], "lists as names": [[[], 2, 3]],
    "text": "abc", "nothing": None, "a number": 5, "dots": [["../../outside/victim", 1, 1]],
    "an absolute name": [["/etc/passwd", 5, 5]], "the journal's own": [["s0002-0001.arrows", 0, 0]],
    "a huge part": [["s0002-9999999999.arrows", 5, 5]], "a huge session": [["s9999999999-0000.arrows", 5, 5]],
    "very many": [[f"{n:08d}-main-s0001-0000.arrows", 1, 1] for n in range(50_000)],
    "a NUL": [["\0", 1, 1]], "a surrogate": [["\ud800", 1, 1]],
}.items():  # fmt: skip
    STREAMS[f"journal: sealed with {_label}"] = _entries(_entry("sealed", details={"facts": _facts}))
STREAMS |= {
    "journal: evicted without reason": _entries(_entry("evicted", uids=[_UID])),
    "journal: evicted for a number": _entries(_entry("evicted", uids=[_UID], details={"reason": 5})),
    "journal: evicted for a list": _entries(_entry("evicted", uids=[_UID], details={"reason": [[]]})),
    "journal: nobody evicted": _entries(_entry("evicted", uids=None, details={"reason": "x"})),
    "journal: an unknown kind": _entries(_entry("haunted")),
    "journal: a snapshot in the middle": _entries(_entry("snapshot", uids=[_UID], state=b"", details={"lines": 5})),
    "journal: a snapshot without state": _entries(_entry("snapshot", uids=[_UID], state=None), first=True),
    "journal: begins with a draw": _entries(_entry("drawn", iteration=1, uids=[_UID], details={"span": 1}), first=True),
    "journal: begins with nothing": _entries(first=True),
}


def _snapshot(change: Callable[[dict[str, Any]], Any]) -> Hostile:
    """Change the details of the snapshot that the journal begins with; an answer of text is taken for them."""

    def harm(root: Path, _: Path) -> None:
        paths, manifest = BankPaths(root), read_manifest(BankPaths(root))
        name = JournalName.parse(manifest.journal)
        assert name is not None
        entries, _damage = read_journal(paths, name, manifest.bank_id)
        first = entries[0][1]
        assert isinstance(first, Snapshot)
        details = json.loads(json.dumps(first.details))
        said = change(details)
        message = _entry(
            "snapshot", uids=first.uids, state=first.state, details=said if isinstance(said, str) else details
        )
        _put_stream(paths.journal / str(name), manifest.bank_id, JOURNAL_SCHEMA, [message])

    return harm


_NUMBERS: dict[str, Any] = {
    "-1": -1, "huge": 10**18, "huger": 10**300, "text": "x", "null": None, "a half": 0.5, "a list": [], "true": True,
}  # fmt: skip


def _line_says(key: str, value: Any) -> Hostile:
    return _snapshot(lambda said: said["lines"][0].update({key: value}))


def _snapshot_says(key: str, value: Any) -> Hostile:
    return _snapshot(lambda said: said.update({key: value}))


def _draw_says(place: int, value: Any) -> Hostile:
    return _snapshot(lambda said: said["lines"][0]["made"].append([value if at == place else 0 for at in range(6)]))


for _label, _number in _NUMBERS.items():
    for _key in ("session", "parent", "resumed", "last_checkpoint", "last_drawn", "reach", "lost"):
        STREAMS[f"snapshot: {_key} {_label}"] = _line_says(_key, _number)
    for _key, _value in {
        "archived": _number, "evicted": [["x", _number]], "evicted for": [[_number, 0]], "records": {"x": _number},
        "records of a segment": {SEGMENT_NAME: _number}, "abandoned": [[SEGMENT_NAME, 0, _number]],
        "gone": [[0, _number, 1, 1], [_number, 2, 1, _number]],
    }.items():  # fmt: skip
        STREAMS[f"snapshot: {_key} {_label}"] = _snapshot_says(_key.split()[0], _value)
    STREAMS[f"snapshot: checkpoints {_label}"] = _line_says("checkpoints", [[1, _number, 1, 1]])
    STREAMS[f"snapshot: makers {_label}"] = _line_says("makers", [[_number, 1], [0, _number]])
    for _place in range(6):
        STREAMS[f"snapshot: a draw's number {_place} {_label}"] = _draw_says(_place, _number)
STREAMS |= {
    "snapshot: a list": _snapshot(lambda said: "[]"),
    "snapshot: empty": _snapshot(lambda said: "{}"),
    "snapshot: deep": _snapshot(lambda said: _DEEP),
    "snapshot: lines twice": _snapshot(lambda said: said["lines"].append(said["lines"][0])),
    "snapshot: no lines": _snapshot_says("lines", []),
    "snapshot: lines of text": _snapshot_says("lines", "abc"),
    "snapshot: a wide run": _snapshot_says("gone", [[0, 10**15, 1, 1]]),
    "snapshot: wide runs": _line_says("checkpoints", [[0, 10**15, 1, 1], [0, 10**15, 10**15, 1]]),
}


# -- groups


def _records(*messages: bytearray, name: str = "00000002-main-s0002-0005.arrows") -> Hostile:
    def harm(root: Path, _: Path) -> None:
        _put_stream(root / "segments" / name, read_manifest(BankPaths(root)).bank_id, SEGMENT_SCHEMA, list(messages))

    return harm


def _encoded(kind: str = "tokens", number: int = 500) -> Any:
    return codec.encode_group(
        small(kind, number), uid=f"{number:032x}", iteration=2, session=2, writer="main", completed_at_us=10**15
    )


@cache
def _one() -> Any:
    return _encoded()


def _headed(change: dict[str, Any], *, without: str = "", name: str = "00000002-main-s0002-0005.arrows") -> Hostile:
    encoded = _one()
    head = {key: value for key, value in encoded.head.items() if key != without} | change
    return _records(_GROUP.build(encoded.columns, head), name=name)


_VALUES: dict[str, Any] = _NUMBERS | {
    "a dict": {"a": 1}, "long": "x" * 100_000, "empty": "", "a NUL": "\0", "dots": "../../x", "false": False,
    "an infinity": float("inf"), "no number": float("nan"), "-2**63": -(2**63), "2**63": 2**63,
}  # fmt: skip
for _key in ("uid", "iteration", "env", "problem", "split", "size", "at", "source_index", "evicted", "session",
             "batch_id", "index_in_batch", "extra"):  # fmt: skip
    STREAMS[f"head: no {_key}"] = _headed({}, without=_key)
    for _label, _value in _VALUES.items():
        STREAMS[f"head: {_key} {_label}"] = _headed({_key: _value})


def _forged(place: str, value: int) -> Hostile:
    """A record one number of whose header is another, sealed again."""
    encoded = _one()
    message = _GROUP.build(encoded.columns, encoded.head)
    flat = _Flatbuffer(message, PREFIX.size)
    batch = flat.table(flat.root, 2)
    nodes, buffers = flat.vector(batch, 1)[0], flat.vector(batch, 2)[0]
    where = {
        "header length": (4, 4), "body length": (flat.field(flat.root, 3), 8), "rows": (flat.field(batch, 0), 8),
        "a node's length": (nodes, 8), "a node's nulls": (nodes + 8, 8), "a list's items": (nodes + 16 * 20, 8),
        "a buffer's offset": (buffers, 8), "a buffer's length": (buffers + 8, 8),
        "a later buffer's length": (buffers + 16 * 30 + 8, 8), "nodes": (nodes - 4, 4), "buffers": (buffers - 4, 4),
    }  # fmt: skip
    start, size = where[place]
    message[start : start + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    return _records(message)


for _field in ("header length", "body length", "rows", "a node's length", "a node's nulls", "a list's items",
               "a buffer's offset", "a buffer's length", "a later buffer's length", "nodes", "buffers"):  # fmt: skip
    for _length in (0, 1, -1, -8, 2**31 - 1, 2**31 - 8, 2**62, 2**63 - 8):
        if not (_length >= 2**31 and _field in ("header length", "nodes", "buffers")):
            STREAMS[f"forged: {_field} {_length}"] = _forged(_field, _length)


def _fuzzed(seed: int, root: Path, outside: Path) -> None:
    """Records with some bits flipped, in the header or in the body, sealed again."""
    picked = random.Random(seed)
    messages = []
    for number in range(8):
        encoded = _encoded(picked.choice(KINDS), 600 + number)
        message = _GROUP.build(encoded.columns, encoded.head)
        length = PREFIX.unpack_from(message)[1]
        sealed = message.index(seal.MAGIC), message.index(seal.MAGIC) + len(seal.BLANK)
        for _ in range(picked.choice([1, 1, 3])):
            byte = (
                picked.randrange(8, 8 + length) if picked.random() < 0.5 else picked.randrange(8 + length, len(message))
            )
            if not sealed[0] <= byte < sealed[1]:
                message[byte] ^= 1 << picked.randrange(8)
        messages.append(message)
    _records(*messages)(root, outside)


for _number in range(40):
    STREAMS[f"fuzzed: {_number}"] = partial(_fuzzed, SEED + _number)
STREAMS |= {
    "segment: records of another schema": _records(build_message(pa.record_batch({"a": [1]}), _encoded().head)),
    "segment: journal entries": _records(_entry("checkpointed", iteration=1)),
    "segment: one uid in many records": _records(
        *(_GROUP.build(_encoded("tokens", 500).columns, _encoded().head) for _ in range(5))
    ),
    "segment: sparse and huge": lambda root, _: os.truncate(next(iter((root / "segments").iterdir())), 1 << 29),
    "segment: a huge session": _headed({}, name="00000002-main-s9999999999-0000.arrows"),
    "segment: a huge part": _headed({}, name="00000002-main-s0002-9999999999.arrows"),
    "segment: a huge iteration": _headed({}, name=f"{10**19 - 1}-main-s0002-0000.arrows"),
    "segment: other digits": _headed({}, name="00000002-main-s0002-0005.arrows".translate(OTHER_DIGITS)),
    "journal: a huge session": lambda root, _: _put_stream(
        root / "journal/s9999999999-0000.arrows", read_manifest(BankPaths(root)).bank_id, JOURNAL_SCHEMA,
        [_entry("checkpointed", iteration=2)],
    ),
    "journal: a huge part": lambda root, _: _put_stream(
        root / "journal/s0002-9999999999.arrows", read_manifest(BankPaths(root)).bank_id, JOURNAL_SCHEMA,
        [_entry("checkpointed", iteration=2)],
    ),
    "journal: this session's own": lambda root, _: _put_stream(
        root / "journal/s0003-0000.arrows", read_manifest(BankPaths(root)).bank_id, JOURNAL_SCHEMA,
        [_entry("drawn", iteration=9, uids=[_UID], details={"span": 1})],
    ),
}  # fmt: skip
