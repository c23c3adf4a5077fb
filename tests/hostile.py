"""Banks that somebody made up to do harm: manifests, links in the place of files, claims, archives, and all others."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from corruptors import SEED, flip, junk, replaced
from hostile_streams import JOURNAL_NAME, OTHER_DIGITS, SEGMENT_NAME, STREAMS, Hostile

from arrowbank.durable import manifest as manifest_module

__all__ = ["HOSTILE"]

HOSTILE: dict[str, Hostile] = dict(STREAMS)


# -- manifests


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


_HUGE = 10**30
_ARCHIVE_NAME = "c000002-s0001.parquet"
_CARRY_NAME = "00000001-carry-s0001-0000.arrows"
_BAD_NAMES = {
    "dots": "../../outside/victim", "absolute": "OUTSIDE/victim", "NUL": "\0", "empty": "", "dot": ".",
    "long": "a" * 5000,
    "a line break": "victim\n", "a surrogate": "\ud800",
}  # fmt: skip


def _wrong_names(form: str) -> dict[str, str]:
    """Bad names, and those that look like good ones."""
    like = {
        "other digits": form.translate(OTHER_DIGITS), "one zero more": form.replace("00", "000", 1),
        "a line break behind": form + "\n", "a directory before": "x/" + form, "dots before": "../journal/" + form,
        "a NUL behind": form + "\0", "huge numbers": form.replace("s0001", "s9999999999"),
    }  # fmt: skip
    return _BAD_NAMES | like


for _label, _name in _wrong_names(_ARCHIVE_NAME).items():
    HOSTILE[f"manifest: files named by {_label}"] = _set_file("name", _name)
for _label, _name in _wrong_names(SEGMENT_NAME).items():
    HOSTILE[f"manifest: retired named by {_label}"] = _set("retired", {_name: 1})
for _label, _name in _wrong_names(_CARRY_NAME).items():
    HOSTILE[f"manifest: carried named by {_label}"] = _set("carried", [_name])
for _label, _name in _wrong_names(JOURNAL_NAME).items():
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
    "manifest: retired at a huge commit": _set("retired", {SEGMENT_NAME: _HUGE}),
    "manifest: retired live segments": _set("retired", {SEGMENT_NAME: 1, "00000003-main-s0002-0000.arrows": -5}),
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
    "manifest: a deep nest": lambda root, _: _write(root / "MANIFEST.json", b"[" * 10**6),
    "manifest: a long number": lambda root, _: _write(root / "MANIFEST.json", b'{"commit": ' + b"9" * 10**6 + b"}"),
    "manifest: a list": lambda root, _: _write(root / "MANIFEST.json", b"[]"),
    "manifest: not UTF-8": lambda root, _: _write(root / "MANIFEST.json", b"\xff\xfe{}"),
    "manifest: sparse and huge": lambda root, _: os.truncate(root / "MANIFEST.json", 1 << 40),
}


def _write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# -- links, FIFOs, sockets and directories in the place of files, and the other way round; claims and locks


for _spot in ("MANIFEST.json", "LOCK", "sessions/0001", "sessions/0002", "sessions/0003", f"segments/{SEGMENT_NAME}",
               f"journal/{JOURNAL_NAME}", "journal/s0003-0000.arrows", f".archive/v000001/{_ARCHIVE_NAME}",
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
    return lambda root, _: _write(root / "LOCK", data if isinstance(data, bytes) else json.dumps(data).encode())


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
    _write(root / ".archive/v000001" / content["files"][0]["name"], data)
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
    _write(path, flip(data, 8 * (len(data) - 100)))
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
    "claim: a list": lambda root, _: _write(root / "sessions/0003", b"[]"),
    "claim: deep": lambda root, _: _write(root / "sessions/0003", b"[" * 10**6),
    "claim: not UTF-8": lambda root, _: _write(root / "sessions/0003", b"\xff" * 100),
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
