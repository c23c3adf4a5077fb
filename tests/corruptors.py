"""Small corruptors: of bytes, and of the files of a bank; and banks that somebody made up to do harm."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from builders import empty_group, text_group, text_rollout, token_group, token_rollout

from arrowbank import RolloutGroup, TokenRollout, codec
from arrowbank.columns import Columns
from arrowbank.durable import manifest as manifest_module
from arrowbank.durable import seal
from arrowbank.durable.journal import JOURNAL_SCHEMA, Snapshot, read_journal
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.manifest import read_manifest
from arrowbank.durable.message import PREFIX, MessageTemplate, _Flatbuffer, build_message
from arrowbank.durable.stream import StreamWriter
from arrowbank.schema import SEGMENT_SCHEMA

__all__ = [
    "END", "HOSTILE", "KINDS", "SEED", "Hostile", "append", "copy_over", "delete", "empty", "flip", "junk",
    "move", "replaced", "rewrite", "second_stream", "small", "swap", "truncate", "zero",
]  # fmt: skip

SEED = 20260801
KINDS = ("tokens", "texts", "bare", "arrays", "extras", "empty")
END = b"\xff\xff\xff\xff\0\0\0\0"


def small(kind: str, seed: int) -> RolloutGroup:
    """A small group of each kind."""
    match kind:
        case "tokens":
            return token_group(seed, members=2)
        case "texts":
            return text_group(seed, members=2, turns=1)
        case "bare":  # neither masks nor logprobs
            return RolloutGroup(rollouts=[TokenRollout(trajectory=[[seed, 1, 2]], env_id="code")])
        case "arrays":
            array = np.arange(6, dtype=np.float16).reshape(2, 3)
            return RolloutGroup(rollouts=[token_rollout(seed, env_id="math", arrays={"a": array})])
        case "extras":
            kept = text_rollout(seed, env_id="math", note={"a": [1, None]})
            return RolloutGroup(rollouts=[kept], wave=[seed], batch_id=3)
    return empty_group(seed)


# -- of bytes


def flip(data: bytes, bit: int) -> bytes:
    """Flip one bit; bit 0 is the lowest of the first byte."""
    byte = bit // 8
    return data[:byte] + bytes([data[byte] ^ (1 << bit % 8)]) + data[byte + 1 :]


def truncate(data: bytes, length: int) -> bytes:
    return data[:length]


def zero(data: bytes, start: int, stop: int) -> bytes:
    """Zero a range, as a lost page or a sector that was never written."""
    return data[:start] + bytes(stop - start) + data[stop:]


def append(data: bytes, tail: bytes) -> bytes:
    return data + tail


def junk(size: int, seed: int = 1) -> bytes:
    """Bytes of no meaning, the same for each seed."""
    return random.Random(seed).randbytes(size)


def second_stream(data: bytes, other: bytes) -> bytes:
    """Put a whole stream behind the end marker."""
    return data + (b"" if data.endswith(END) else END) + other


def move(data: bytes, start: int, stop: int, to: int) -> bytes:
    """Copy a range over another place of the same file."""
    part = data[start:stop]
    return data[:to] + part + data[to + len(part) :]


# -- of files


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Put other bytes under the same name; the file is a new one, so that hard links keep the old."""
    data = change(path.read_bytes())
    path.unlink()
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    """Swap two files."""
    third = one.with_name(".swap")
    os.rename(one, third)
    os.rename(other, one)
    os.rename(third, other)


def copy_over(source: Path, target: Path) -> None:
    """Put a copy of another file, of this bank or another, under a name."""
    data = source.read_bytes()
    target.unlink(missing_ok=True)
    target.write_bytes(data)


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    rewrite(path, lambda data: b"")


# -- banks that somebody made up to do harm: of the kind that ``test_corruption.make_whole`` makes

Hostile = Callable[[Path, Path], object]
"""Makes a bank hostile; the second path is a directory outside of it that nothing may touch."""
HOSTILE: dict[str, Hostile] = {}


def _content(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "MANIFEST.json").read_text())
    content.pop("checksum")
    return content


def _put_manifest(root: Path, content: dict[str, Any]) -> None:
    content = content | {"checksum": manifest_module._checksum(content)}
    (root / "MANIFEST.json").write_text(json.dumps(content))


def _with_manifest(change: Callable[[dict[str, Any], Path], None]) -> Hostile:
    def harm(root: Path, outside: Path) -> None:
        content = _content(root)
        change(content, outside)
        _put_manifest(root, content)

    return harm


def _set(key: str, value: Any) -> Hostile:
    return _with_manifest(lambda content, outside: content.update({key: _filled(value, outside)}))


def _set_file(key: str, value: Any) -> Hostile:
    return _with_manifest(lambda content, outside: content["files"][0].update({key: _filled(value, outside)}))


def _filled(value: Any, outside: Path) -> Any:
    """The value, with OUTSIDE replaced by the path of the directory outside."""
    return json.loads(json.dumps(value).replace("OUTSIDE", str(outside)))


_ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
_HUGE = 10**30
_SEGMENT_NAME, _JOURNAL_NAME, _ARCHIVE_NAME = (
    "00000002-main-s0001-0000.arrows",
    "s0001-0001.arrows",
    "c000002-s0001.parquet",
)
_CARRY_NAME = "00000001-carry-s0001-0000.arrows"
_BAD_NAMES = {
    "dots": "../../outside/victim", "absolute": "OUTSIDE/victim", "NUL": "\0", "empty": "", "dot": ".",
    "long": "a" * 5000,
    "a line break": "victim\n", "a surrogate": "\ud800",
}  # fmt: skip


def _wrong_names(form: str) -> dict[str, str]:
    """Bad names, and those that look like good ones."""
    like = {
        "other digits": form.translate(_ARABIC), "one zero more": form.replace("00", "000", 1),
        "a line break behind": form + "\n", "a directory before": "x/" + form, "dots before": "../journal/" + form,
        "a NUL behind": form + "\0", "huge numbers": form.replace("s0001", "s9999999999"),
    }  # fmt: skip
    return _BAD_NAMES | like


for _label, _name in _wrong_names(_ARCHIVE_NAME).items():
    HOSTILE[f"manifest: files named by {_label}"] = _set_file("name", _name)
for _label, _name in _wrong_names(_SEGMENT_NAME).items():
    HOSTILE[f"manifest: retired named by {_label}"] = _set("retired", {_name: 1})
for _label, _name in _wrong_names(_CARRY_NAME).items():
    HOSTILE[f"manifest: carried named by {_label}"] = _set("carried", [_name])
for _label, _name in _wrong_names(_JOURNAL_NAME).items():
    HOSTILE[f"manifest: journal named by {_label}"] = _set("journal", _name)
for _key in ("commit", "version", "archived_through"):
    for _number in (-1, 0, 10**12, 2**63, _HUGE, 10**3000):
        HOSTILE[f"manifest: {_key} {str(_number)[:40]}"] = _set(_key, _number)
for _key in ("rows", "groups", "nbytes", "last_end"):
    for _number in (-1, 0, 2**62, _HUGE):
        HOSTILE[f"manifest: file's {_key} {_number}"] = _set_file(_key, _number)
for _label, _value in {
    "dots": "../..",
    "empty": "",
    "long": "b" * 10**6,
    "NUL": "\0" * 32,
    "a surrogate": "\ud800",
}.items():
    HOSTILE[f"manifest: bank id of {_label}"] = _set("bank_id", _value)
    HOSTILE[f"manifest: digest of {_label}"] = _set_file("digest", _value)
HOSTILE |= {
    "manifest: retired at a huge commit": _set("retired", {_SEGMENT_NAME: _HUGE}),
    "manifest: retired live segments": _set("retired", {_SEGMENT_NAME: 1, "00000003-main-s0002-0000.arrows": -5}),
    "manifest: very many retired": _set("retired", {f"{n:08d}-main-s0001-0000.arrows": 1 for n in range(3_000)}),
    "manifest: very many carried": _set("carried", [f"{n:08d}-carry-s0001-0000.arrows" for n in range(3_000)]),
    "manifest: carried twice": _set("carried", [_CARRY_NAME, _CARRY_NAME]),
    "manifest: carried and retired": _with_manifest(
        lambda content, _: content.update(carried=[_CARRY_NAME], retired={_CARRY_NAME: 1})
    ),
    "manifest: a file twice": _with_manifest(lambda content, _: content["files"].append(content["files"][0])),
    "manifest: very many files": _with_manifest(
        lambda content, _: content.update(
            files=[content["files"][0] | {"name": f"c{n:06d}-s0001.parquet"} for n in range(3_000)]
        )
    ),
    "manifest: the file without rows among the files": _set_file("name", "c000000-s0000.parquet"),
    "manifest: numbers that are true": _set("commit", True),
    "manifest: numbers that are text": _set("commit", "2"),
    "manifest: not a number": _set("commit", float("nan")),
    "manifest: no number is larger": _set("version", float("inf")),
    "manifest: a deep nest": lambda root, _: write(root / "MANIFEST.json", b"[" * 10**6),
    "manifest: a long number": lambda root, _: write(root / "MANIFEST.json", b'{"commit": ' + b"9" * 10**6 + b"}"),
    "manifest: a list": lambda root, _: write(root / "MANIFEST.json", b"[]"),
    "manifest: not UTF-8": lambda root, _: write(root / "MANIFEST.json", b"\xff\xfe{}"),
    "manifest: sparse and huge": lambda root, _: os.truncate(root / "MANIFEST.json", 1 << 40),
}


def write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# Journal entries, sealed as they should be.

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
        content = _content(root)
        name = content["journal"] if first else "s0002-0001.arrows"
        _put_stream(root / "journal" / name, content["bank_id"], JOURNAL_SCHEMA, list(messages))

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
    HOSTILE[f"journal: a draw with {_label}"] = _entries(_entry("drawn", **(_drawn | _fields)))
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
    HOSTILE[f"journal: a restore with {_label}"] = _entries(
        _entry("restored", iteration=2, details=_restored | _change)
    )
for _at in (None, -5, 2**63 - 1, -(2**63), 0):
    HOSTILE[f"journal: a restore at {_at}"] = _entries(_entry("restored", iteration=_at, details=_restored))
    HOSTILE[f"journal: a checkpoint at {_at}"] = _entries(_entry("checkpointed", iteration=_at))
    HOSTILE[f"journal: checkpoints up from {_at}"] = _entries(
        _entry("checkpointed", iteration=_at), _entry("drawn", iteration=3, uids=[_UID], details={"span": 10**18}),
        _entry("checkpointed", iteration=10**18), _entry("restored", iteration=3, details=_restored),
    )  # fmt: skip
_ABANDONED: dict[str, dict[str, Any]] = {
    "a negative first": {"first": -1}, "a negative count": {"count": -1}, "a huge count": {"count": 2**62},
    "a huger count": {"count": 10**300}, "a count of text": {"count": "x"}, "half a count": {"count": 0.5},
    "a number as name": {"name": 5}, "a list as name": {"name": []}, "a null name": {"name": None},
    "dots": {"name": "../../outside/victim"}, "this very file": {"name": "s0002-0001.arrows", "count": 2**62},
    "the snapshot": {"name": _JOURNAL_NAME, "count": 1},
}  # fmt: skip
for _label, _change in _ABANDONED.items():
    _records_of: dict[str, Any] = {"name": _SEGMENT_NAME, "first": 0, "count": 0}
    HOSTILE[f"journal: abandoned records of {_label}"] = _entries(_entry("abandoned", details=_records_of | _change))
for _label, _facts in {
    "negative counts": [[_SEGMENT_NAME, -5, -5]], "huge counts": [[_SEGMENT_NAME, 10**18, 10**18]],
    "huger counts": [[_SEGMENT_NAME, 10**300, 1]], "counts of text": [[_SEGMENT_NAME, "5", "5"]],
    "half counts": [[_SEGMENT_NAME, 0.5, 1]], "null counts": [[_SEGMENT_NAME, None, None]],
    "too few": [[_SEGMENT_NAME]],
    "too many": [[_SEGMENT_NAME, 1, 1, 1]], "numbers as names": [[1, 2, 3]], "lists as names": [[[], 2, 3]],
    "text": "abc", "nothing": None, "a number": 5, "dots": [["../../outside/victim", 1, 1]],
    "an absolute name": [["/etc/passwd", 5, 5]], "the journal's own": [["s0002-0001.arrows", 0, 0]],
    "a huge part": [["s0002-9999999999.arrows", 5, 5]], "a huge session": [["s9999999999-0000.arrows", 5, 5]],
    "very many": [[f"{n:08d}-main-s0001-0000.arrows", 1, 1] for n in range(50_000)],
    "a NUL": [["\0", 1, 1]], "a surrogate": [["\ud800", 1, 1]],
}.items():  # fmt: skip
    HOSTILE[f"journal: sealed with {_label}"] = _entries(_entry("sealed", details={"facts": _facts}))
HOSTILE |= {
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
        HOSTILE[f"snapshot: {_key} {_label}"] = _line_says(_key, _number)
    for _key, _value in {
        "archived": _number, "evicted": [["x", _number]], "evicted for": [[_number, 0]], "records": {"x": _number},
        "records of a segment": {_SEGMENT_NAME: _number}, "abandoned": [[_SEGMENT_NAME, 0, _number]],
        "gone": [[0, _number, 1, 1], [_number, 2, 1, _number]],
    }.items():  # fmt: skip
        HOSTILE[f"snapshot: {_key} {_label}"] = _snapshot_says(_key.split()[0], _value)
    HOSTILE[f"snapshot: checkpoints {_label}"] = _line_says("checkpoints", [[1, _number, 1, 1]])
    HOSTILE[f"snapshot: makers {_label}"] = _line_says("makers", [[_number, 1], [0, _number]])
    for _place in range(6):
        HOSTILE[f"snapshot: a draw's number {_place} {_label}"] = _draw_says(_place, _number)
HOSTILE |= {
    "snapshot: a list": _snapshot(lambda said: "[]"),
    "snapshot: empty": _snapshot(lambda said: "{}"),
    "snapshot: deep": _snapshot(lambda said: _DEEP),
    "snapshot: lines twice": _snapshot(lambda said: said["lines"].append(said["lines"][0])),
    "snapshot: no lines": _snapshot_says("lines", []),
    "snapshot: lines of text": _snapshot_says("lines", "abc"),
    "snapshot: a wide run": _snapshot_says("gone", [[0, 10**15, 1, 1]]),
    "snapshot: wide runs": _line_says("checkpoints", [[0, 10**15, 1, 1], [0, 10**15, 10**15, 1]]),
}


# Groups, sealed as they should be.


def _records(*messages: bytearray, name: str = "00000002-main-s0002-0005.arrows") -> Hostile:
    def harm(root: Path, _: Path) -> None:
        _put_stream(root / "segments" / name, _content(root)["bank_id"], SEGMENT_SCHEMA, list(messages))

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
    HOSTILE[f"head: no {_key}"] = _headed({}, without=_key)
    for _label, _value in _VALUES.items():
        HOSTILE[f"head: {_key} {_label}"] = _headed({_key: _value})


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
            HOSTILE[f"forged: {_field} {_length}"] = _forged(_field, _length)


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
    HOSTILE[f"fuzzed: {_number}"] = partial(_fuzzed, SEED + _number)
HOSTILE |= {
    "segment: records of another schema": _records(build_message(pa.record_batch({"a": [1]}), _encoded().head)),
    "segment: journal entries": _records(_entry("checkpointed", iteration=1)),
    "segment: one uid in many records": _records(
        *(_GROUP.build(_encoded("tokens", 500).columns, _encoded().head) for _ in range(5))
    ),
    "segment: sparse and huge": lambda root, _: os.truncate(next(iter((root / "segments").iterdir())), 1 << 29),
    "segment: a huge session": _headed({}, name="00000002-main-s9999999999-0000.arrows"),
    "segment: a huge part": _headed({}, name="00000002-main-s0002-9999999999.arrows"),
    "segment: a huge iteration": _headed({}, name=f"{10**19 - 1}-main-s0002-0000.arrows"),
    "segment: other digits": _headed({}, name="00000002-main-s0002-0005.arrows".translate(_ARABIC).replace("ar", "ar")),
    "journal: a huge session": lambda root, _: _put_stream(
        root / "journal/s9999999999-0000.arrows", _content(root)["bank_id"], JOURNAL_SCHEMA,
        [_entry("checkpointed", iteration=2)],
    ),
    "journal: a huge part": lambda root, _: _put_stream(
        root / "journal/s0002-9999999999.arrows", _content(root)["bank_id"], JOURNAL_SCHEMA,
        [_entry("checkpointed", iteration=2)],
    ),
    "journal: this session's own": lambda root, _: _put_stream(
        root / "journal/s0003-0000.arrows", _content(root)["bank_id"], JOURNAL_SCHEMA,
        [_entry("drawn", iteration=9, uids=[_UID], details={"span": 1})],
    ),
}  # fmt: skip


# Links, FIFOs, sockets and directories in the place of files, and the other way round; claims and locks.


def replaced(place: str, kind: str) -> Hostile:
    def harm(root: Path, outside: Path) -> None:
        path = root / place
        if kind == "link":
            kept = outside / "moved"
            if path.exists() or path.is_symlink():
                shutil.move(path, kept)
            else:
                kept.write_bytes(b"")
            path.symlink_to(kept)
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        match kind:
            case "FIFO":
                os.mkfifo(path)
            case "socket":
                with socket.socket(socket.AF_UNIX) as made:
                    here = os.open(path.parent, os.O_RDONLY)
                    try:
                        made.bind(f"/proc/self/fd/{here}/{path.name}")
                    finally:
                        os.close(here)
            case "directory":
                path.mkdir()
                (path / "inside").write_text("not ours")
            case "file":
                path.write_bytes(b"not ours")
            case "dangling link":
                path.symlink_to(outside / "nowhere")
            case "loop":
                path.symlink_to(path.name)
            case "link to the root":
                path.symlink_to("/")
            case "device":
                path.symlink_to("/dev/zero")

    return harm


for _spot in ("MANIFEST.json", "LOCK", "sessions/0001", "sessions/0002", "sessions/0003", f"segments/{_SEGMENT_NAME}",
               f"journal/{_JOURNAL_NAME}", "journal/s0003-0000.arrows", f".archive/v000001/{_ARCHIVE_NAME}",
               ".archive/v000001/c000000-s0000.parquet", "quarantine/x.json", "tmp/s0003", "tmp/s0001", "tmp/x",
               ".archive/v000009", "segments", "journal", "sessions", "quarantine", "tmp", ".archive",
               ".archive/v000001", "archive"):  # fmt: skip
    for _kind in ("link", "FIFO", "socket", "directory", "file", "dangling link", "loop", "link to the root", "device"):
        HOSTILE[f"{_kind} at {_spot}"] = replaced(_spot, _kind)


def _claim(session: int, **change: Any) -> Hostile:
    def harm(root: Path, _: Path) -> None:
        said = json.loads((root / "sessions/0002").read_text()) | {"session": session} | change
        (root / "sessions" / f"{session:04d}").write_text(json.dumps(said))

    return harm


def _locked(data: Any) -> Hostile:
    return lambda root, _: write(root / "LOCK", data if isinstance(data, bytes) else json.dumps(data).encode())


def _linked_tmp(root: Path, outside: Path) -> None:
    (root / "tmp/s0001").mkdir()
    (root / "tmp/s0001/a").symlink_to(outside)
    (root / "tmp/s0001/b").symlink_to(outside / "victim")


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def _lying_archive(root: Path, data: bytes) -> None:
    """Put other bytes in the place of an archive file, and their digest into the manifest."""
    content = _content(root)
    write(root / ".archive/v000001" / content["files"][0]["name"], data)
    content["files"][0] |= {"digest": xxhash.xxh3_128_hexdigest(data), "nbytes": len(data)}
    _put_manifest(root, content)


def _fuzzed_archive(seed: int, root: Path, _: Path) -> None:
    picked = random.Random(SEED + seed)
    data = bytearray((root / ".archive/v000001" / _content(root)["files"][0]["name"]).read_bytes())
    for _time in range(picked.choice([1, 5])):
        data[picked.randrange(len(data) // 2 if picked.random() < 0.5 else 0, len(data))] ^= 1 << picked.randrange(8)
    _lying_archive(root, bytes(data))


def _guessed_links(root: Path, outside: Path) -> None:
    """Links under the names that this very process writes unfinished files under."""
    (root / "tmp/s0003").mkdir()
    for name in ("LOCK", "MANIFEST.json", "archive"):
        (root / "tmp/s0003" / f"{name}.{os.getpid()}").symlink_to(outside / "victim")


def _guessed_files(root: Path, _: Path) -> None:
    (root / "tmp/s0003").mkdir()
    for name in ("s0003-0000.arrows", "s0003-0001.arrows", "00000002-main-s0003-0000.arrows", "c000003-s0003.parquet"):
        (root / "tmp/s0003" / name).write_bytes(b"not ours")


def _guessed_quarantine(root: Path, _: Path) -> None:
    """A damaged segment, and directories where the copies of what is damaged go."""
    path = max((root / "segments").iterdir())
    data = path.read_bytes()
    write(path, flip(data, 8 * (len(data) - 100)))
    for offset in range(0, len(data), 8):
        (root / "quarantine" / f"{path.name}-{offset:016x}.bytes").mkdir()


HOSTILE |= {
    "claim: 9999999999": _claim(9999999999),
    "claim: 9999999998": _claim(9999999998),
    "claim: of one more digit": _claim(99999999999),
    "claim: of other digits": lambda root, _: shutil.copy(root / "sessions/0002", root / "sessions/٠٠٠٣"),
    "claim: one zero more": lambda root, _: shutil.copy(root / "sessions/0002", root / "sessions/00003"),
    "claim: says another session": lambda root, _: shutil.copy(root / "sessions/0002", root / "sessions/0003"),
    "claim: a gap": _claim(77),
    "claim: a process of 2**80": _claim(3, pid=2**80),
    "claim: a negative process": _claim(3, pid=-1),
    "claim: process 0": _claim(3, pid=0),
    "claim: a process of text": _claim(3, pid="x"),
    "claim: a long host": _claim(3, host="h" * 10**6),
    "claim: a list": lambda root, _: write(root / "sessions/0003", b"[]"),
    "claim: deep": lambda root, _: write(root / "sessions/0003", b"[" * 10**6),
    "claim: not UTF-8": lambda root, _: write(root / "sessions/0003", b"\xff" * 100),
    "claim: sparse and huge": lambda root, _: os.truncate(root / "sessions/0002", 1 << 40),
    "LOCK: a list": _locked([]),
    "LOCK: deep": _locked(b"[" * 10**6),
    "LOCK: not UTF-8": _locked(b"\xff" * 100),
    "LOCK: a huge session": _locked({"holder": {"session": 10**30}, "closed": True}),
    "LOCK: sparse and huge": lambda root, _: os.truncate(root / "LOCK", 1 << 40),
    "tmp: a huge session": lambda root, _: (root / "tmp/s9999999999").mkdir(),
    "tmp: a directory inside": lambda root, _: (root / "tmp/s0001/a/b").mkdir(parents=True),
    "tmp: links under the names to come": _guessed_links,
    "tmp: files under the names to come": _guessed_files,
    "quarantine: directories under the names to come": _guessed_quarantine,
    "tmp: a link inside": lambda root, outside: _linked_tmp(root, outside),
    "archive: a huge version": lambda root, _: (root / ".archive/v999999999999").mkdir(),
    "archive: a directory in the version": lambda root, _: (root / ".archive/v000001/x").mkdir(),
    "archive: a directory in another version": lambda root, _: (root / ".archive/v000005/x").mkdir(parents=True),
    "archive: not Parquet": lambda root, _: _lying_archive(root, junk(5000)),
    "archive: a footer that is a length": lambda root, _: _lying_archive(root, b"PAR1" + b"\xff" * 20 + b"PAR1"),
    "archive: other columns": lambda root, _: _lying_archive(root, _parquet(pa.table({"a": [1, 2]}))),
    "archive: no columns": lambda root, _: _lying_archive(root, _parquet(pa.table({}))),
    **{f"archive: fuzzed {n}": partial(_fuzzed_archive, n) for n in range(25)},
}
