"""A small bank with everything in it, copies of it that are damaged, and what must come back from them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from builders import empty_group, text_group, text_rollout, token_group, token_rollout

from arrowbank import ArrowbankError, CorruptRecordError, RolloutBank, RolloutGroup, TokenRollout, scan
from arrowbank.durable.journal import JOURNAL_SCHEMA, read_journal
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.manifest import Manifest, read_manifest
from arrowbank.durable.recovery import live_segments
from arrowbank.durable.segment import read_segment
from arrowbank.durable.stream import Record, Scan, map_file
from arrowbank.durable.stream import scan as scan_stream
from arrowbank.restored import Restored
from arrowbank.schema import SEGMENT_SCHEMA

__all__ = [
    "CHECKPOINT", "KINDS", "Found", "Model", "Stream", "child", "contents", "copy", "judge", "make_whole",
    "read_stream", "restore", "rows_of", "small",
]  # fmt: skip

CHECKPOINT = 2
"""What the bank is restored at."""
KINDS = ("tokens", "texts", "bare", "arrays", "extras", "empty")


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


def read_stream(data: bytes, name: str, bank_id: str) -> Scan:
    """Scan the bytes of a segment or of a part of the journal as their readers do."""
    schema = SEGMENT_SCHEMA if JournalName.parse(name) is None else JOURNAL_SCHEMA
    return scan_stream(memoryview(data), name, bank_id, schema)


def child(file: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a test file as a program: what kills it leaves the tests alive."""
    command = [sys.executable, file, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=600, check=False)


# -- as it was made


@dataclass(frozen=True)
class Stream:
    """A segment or a part of the journal as it was written."""

    data: bytes
    ranges: list[tuple[int, int]]
    keys: list[Any]
    """The groups' uids, or the entries."""
    appends: list[int]
    """Which append each of them was written by."""


@dataclass(frozen=True)
class Model:
    """A bank as it was before the damage, and what was put into it."""

    root: Path
    groups: dict[str, RolloutGroup]
    """All that were ever appended."""
    draws: list[tuple[int, tuple[str, ...], int, bytes | None]]
    """To be replayed: iteration, groups, span, state."""
    pending: list[str]
    segments: dict[str, Stream]
    """Live ones."""
    journal: dict[str, Stream]
    rows: dict[str, list[dict[str, Any]]]
    """What ``scan`` shows of each group."""
    manifest: Manifest
    closed: bool
    """Whether the last session was closed: then the journal says how many records each segment has."""

    def cut(self, root: Path) -> set[str]:
        """Segments that are not there, or end with a whole record, earlier than they did."""
        found = set()
        for name, stream in self.segments.items():
            path = root / "segments" / name
            size = path.stat().st_size if path.is_file() else 0
            if size in {0, *(start for start, _ in stream.ranges)}:
                found.add(name)
        return found

    def hurt_groups(self, root: Path) -> set[str]:
        """Groups whose records are not in their places any more, in ``root``."""
        return {key for name, stream in self.segments.items() for key in _hurt(stream, root / "segments" / name)}

    def hurt_entries(self, root: Path) -> list[tuple[str, int]]:
        """Journal records that are not in their places any more."""
        found = []
        for name, stream in self.journal.items():
            numbered = replace(stream, keys=list(range(len(stream.keys))))
            found += [(name, number) for number in _hurt(numbered, root / "journal" / name)]
        return found


def _hurt(stream: Stream, path: Path) -> list[Any]:
    data = path.read_bytes() if path.is_file() else b""
    return [
        key for key, (start, stop) in zip(stream.keys, stream.ranges, strict=True)
        if data[start:stop] != stream.data[start:stop]
    ]  # fmt: skip


def make_whole(root: Path, *, close: bool) -> Model:
    """Two sessions: an archive, a carried segment, a journal that begins with a snapshot, planned draws, pending,
    evicted and validation groups."""
    bank = RolloutBank.open(root, keep_checkpoints=1)
    bank.restore(0)
    groups: dict[str, RolloutGroup] = {}
    count = iter(range(100))

    def put(kind: str, **options: Any) -> str:
        group = small(kind, next(count))
        uid = bank.append(group, **options)
        groups[uid] = group
        return uid

    first = [put("tokens"), put("texts")]
    gone = put("bare", evicted="at birth")
    bank.mark_consumed(first, 0, state=b"zero")
    bank.begin_iteration(1)
    second, waiting = [put("tokens"), put("empty")], [put("extras"), put("texts")]
    bank.mark_consumed(second, 1)
    bank.begin_iteration(2)
    bank.checkpoint(2, wait=True)  # iterations 0 and 1 go to the archive, what waits is carried on
    third, waiting2 = [put("arrays"), put("tokens")], [put("arrays")]
    bank.mark_consumed(third, 2, state=b"two")
    bank.close()

    bank = RolloutBank.open(root, keep_checkpoints=1)
    bank.restore(2)
    bank.mark_consumed(third, 2, state=b"two")
    bank.begin_iteration(3)
    fourth, stale = [put("texts"), put("bare"), put("tokens")], put("tokens")
    waiting3 = [put("bare"), put("extras"), put("tokens")]
    put("texts", split="validation")
    bank.mark_consumed(fourth, 3, span=2, state=b"three")
    bank.evict([stale], "stale")
    if close:
        bank.close()
    else:
        bank._claim.forget()  # as after a kill: nothing more is written
    assert gone in groups
    draws = [(2, tuple(third), 1, b"two"), (3, tuple(fourth), 2, b"three")]
    return look(root, groups, draws, [*waiting, *waiting2, *waiting3], closed=close)


def look(root: Path, groups: dict[str, RolloutGroup], draws: list[Any], pending: list[str], *, closed: bool) -> Model:
    """Take down what is in a bank's files."""
    paths = BankPaths(root)
    manifest = read_manifest(paths)
    segments, journal = {}, {}
    for name in map(str, live_segments(paths, manifest)):
        found, data = read_segment(paths.segments / name, manifest.bank_id)
        segments[name] = _stream(data, found.records, [record.head["uid"] for record in found.records])
    for part in paths.journal_names():
        if str(part) >= manifest.journal:
            entries, _ = read_journal(paths, part, manifest.bank_id)
            data = map_file(paths.journal / str(part))
            journal[str(part)] = _stream(data, [record for record, _ in entries], [entry for _, entry in entries])
    return Model(root, groups, draws, pending, segments, journal, rows_of(root), manifest, closed)


def _stream(data: memoryview, records: list[Record], keys: list[Any]) -> Stream:
    ranges = [(record.offset, record.offset + len(record.message)) for record in records]
    return Stream(bytes(data), ranges, keys, [record.first for record in records])


def rows_of(root: Path) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in scan(root).to_polars().collect().to_dicts():
        rows.setdefault(row["group_uid"], []).append(row)
    return rows


# -- as it comes back


@dataclass(frozen=True)
class Found:
    """What one restore handed back."""

    draws: list[tuple[int, tuple[str, ...], int, bytes | None, tuple[str, ...]]]
    pending: list[str]
    groups: dict[str, RolloutGroup]
    report: Any
    refused: CorruptRecordError | None = None
    """It was told to accept damage after that."""

    @property
    def handed(self) -> list[str]:
        return [uid for draw in self.draws for uid in draw[1]] + self.pending


def restore(bank: RolloutBank) -> Found:
    refused = None
    try:
        restored = bank.restore(CHECKPOINT)
    except CorruptRecordError as error:
        refused = error
        restored = bank.restore(CHECKPOINT, accept_damage=True)
    return _found(restored, refused)


def _found(restored: Restored, refused: CorruptRecordError | None = None) -> Found:
    groups: dict[str, RolloutGroup] = {}
    draws = []
    for draw in restored.draws:
        draws.append((draw.iteration, tuple(str(g.uid) for g in draw.groups), draw.span, draw.state, draw.lost))
        groups |= {str(group.uid): group for group in draw.groups}
    pending = restored.take(10**6)
    groups |= {str(group.uid): group for group in pending}
    return Found(draws, [str(group.uid) for group in pending], groups, restored.report, refused)


def contents(root: Path) -> dict[str, bytes | str]:
    """Everything below a directory, links not followed."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = path.read_bytes()
        else:  # FIFOs and the like
            found[name] = f"mode {path.stat().st_mode:o}"
    return found


def copy(model: Model, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model.root, target, symlinks=True)
    return target


def judge(model: Model, root: Path, *, takeover: Any = "force") -> Found | ArrowbankError:
    """Open a damaged copy twice, and compare what comes back with what was put in. Raises AssertionError."""
    hurt, entries = model.hurt_groups(root), model.hurt_entries(root)
    behind = any(
        (root / "journal" / name).read_bytes()[stream.ranges[-1][1] :] != stream.data[stream.ranges[-1][1] :]
        for name, stream in model.journal.items() if (root / "journal" / name).is_file()
    )  # fmt: skip
    cut = set() if model.closed and not entries else model.cut(root)
    damaged = _damaged_bytes(model, root)
    before = contents(root)
    check_scan(model, root, hurt, entries)
    assert contents(root) == before, "scan wrote something"
    manifest_is_whole = (root / "MANIFEST.json").is_file() and before["MANIFEST.json"] == contents(model.root)[
        "MANIFEST.json"
    ]  # fmt: skip
    try:
        bank = RolloutBank.open(root, takeover=takeover, keep_checkpoints=1)
    except ArrowbankError as error:
        if not manifest_is_whole:
            assert contents(root) == before, "open refused, but changed something"
        return error
    with bank:
        found = restore(bank)
        assert found.refused is None or entries or behind
        check(model, found, hurt, entries, cut)
        group = small("tokens", 999)
        extra = bank.append(group)
    with RolloutBank.open(root, takeover="never", keep_checkpoints=1) as bank:
        again = restore(bank)
        assert (again.draws, again.pending) == (found.draws, [*found.pending, extra])
        assert again.groups == found.groups | {extra: group}
    _check_quarantine(root, damaged)
    return found


def check(model: Model, found: Found, hurt: set[str], entries: list[tuple[str, int]], cut: set[str]) -> None:
    """Nothing that was hit is handed back, everything else is, once, and what is missing is told.

    cut: segments that end cleanly where nothing says that there was more.
    """
    report = found.report
    assert len(set(found.handed)) == len(found.handed), "a group was handed out twice"
    for uid, group in found.groups.items():
        assert uid in model.groups and group == model.groups[uid], f"{uid} is not what was appended"
    assert not hurt & set(found.handed)
    wanted = {uid for _, uids, _, _ in model.draws for uid in uids} | set(model.pending)
    lost = wanted & hurt
    assert wanted - hurt <= set(found.handed), "groups that were not hit are missing"
    for name, stream in model.segments.items():
        gone = hurt & set(stream.keys)
        named = any(f"{name} at byte" in line for line in report.damage)
        assert not gone or named or name in cut, f"{name} lost {len(gone)} groups without a word"
    if model.closed and not entries:
        assert report.lost_records == len(hurt)
    if not entries:
        draws = [
            (at, tuple(uid for uid in uids if uid not in hurt), span, state, tuple(uid for uid in uids if uid in hurt))
            for at, uids, span, state in model.draws
        ]
        assert found.draws == draws
        assert sorted(found.pending) == sorted(set(model.pending) - hurt)
        assert report.lost_groups == len(lost - set(model.pending))
    elif found.refused is None:
        assert all(_is_tail(model.journal[name], name, at, entries) for name, at in entries), (
            f"entries {entries} are lost, and restore did not refuse"
        )
    else:
        assert "may be hidden" in str(found.refused)


def _is_tail(part: Stream, name: str, at: int, entries: list[tuple[str, int]]) -> bool:
    """Whether nothing of a later append is there: a torn tail, as a power cut in the middle of an append leaves it."""
    return not any((name, after) not in entries and part.appends[after] != part.appends[at]
                   for after in range(at, len(part.keys)))  # fmt: skip


def check_scan(model: Model, root: Path, hurt: set[str], entries: list[tuple[str, int]]) -> None:
    """Rows are right or missing; with a whole journal only those that were hit are missing."""
    try:
        rows = rows_of(root)
        groups = {str(group.uid): group for group in scan(root).groups()}
    except ArrowbankError:
        return
    fate = {"outcome", "consumed_iteration", "consumed_draw", "consumed_position", "draw_size", "draw_session",
            "span", "evict_reason", "draw_state", "lag"}  # fmt: skip
    for uid, found in rows.items():
        known = model.rows.get(uid)
        assert known is not None, f"scan shows {uid}, which was never appended"
        if entries:
            found, known = ([{key: row[key] for key in row.keys() - fate} for row in part] for part in (found, known))
        assert repr(found) == repr(known), f"scan shows wrong rows of {uid}"
        assert groups[uid] == model.groups[uid]
    assert model.rows.keys() - rows.keys() <= hurt, "scan leaves out groups that were not hit"


def _damaged_bytes(model: Model, root: Path) -> list[tuple[str, int, bytes]]:
    """Damaged parts of live segments and of the journal, as a reader sees them."""
    found = []
    for directory, names in (("segments", model.segments), ("journal", model.journal)):
        for name in names:
            path = root / directory / name
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                for damage in read_stream(data, name, model.manifest.bank_id).damage if data else ():
                    found.append((name, damage.offset, data[damage.offset : damage.offset + damage.length]))
    return found


def _check_quarantine(root: Path, damaged: list[tuple[str, int, bytes]]) -> None:
    """Every damaged part is in its file still, or in quarantine with a note that says where it was."""
    for name, offset, part in damaged:
        path = root / ("journal" if JournalName.parse(name) else "segments") / name
        if path.exists() and path.read_bytes()[offset : offset + len(part)] == part:
            continue
        notes = [json.loads(note.read_text()) for note in (root / "quarantine").glob("*.json")]
        kept = b"".join(copy.read_bytes() for copy in sorted((root / "quarantine").glob(f"{name}-*.bytes")))
        assert part in kept, f"{name}: {len(part)} damaged bytes at {offset} are gone"
        assert any(note["file"] == name for note in notes)
