"""Where everything in a bank lies, and what its bytes are. Every file name is made and checked here.

    MANIFEST.json                                    see ``manifest``
    LOCK                                             see ``session``
    sessions/0003                                    see ``session``
    segments/00000021-main-s0003-0000.arrows         iteration 21, writer "main", session 3, part 0
    segments/00000021-carry-s0003-0007.arrows        groups that compaction carried on, see below
    journal/s0003-0000.arrows                        session 3, part 0; see ``journal`` and ``snapshot``
    archive -> .archive/v000001                      *.parquet, one of them with no rows; see ``archive/store.py``
    quarantine/                                      damaged bytes, each with a JSON note
    tmp/s0003/                                       everything unfinished of session 3

Segments and journals are Arrow IPC streams: a schema message, then record batch messages ("records"), then either
eight zero bytes (still open) or the end-of-stream marker FF FF FF FF 00 00 00 00 (closed). Every Arrow reader takes
both for a clean end.

    stream  = schema record* (zeros | end)
    record  = FF FF FF FF  header-length:int32  header  body      all little-endian, each part a multiple of 8 long

A record's header is an Arrow ``Message`` whose custom metadata has two entries: ``arrowbank.seal`` (see ``seal``) and
``arrowbank.head``, a JSON object padded with spaces. Of a group's record the head has: uid, iteration, env, problem,
split, size (rollouts), at (when it was finished, in µs since 1970), and where they say something source_index, evicted
(the reason), batch_id, index_in_batch, extra, and session: the one that appended it, in carried segments only.

Carried segments have the writer name "carry": compaction writes them, whole, with groups that are live still out of
segments that it retires. They count only if the manifest names them.

Writing records: all of them but each one's first eight bytes, which stay zero, with eight zeros behind the last; then
those first eight bytes, record by record; then fdatasync. Until a record's eight bytes are there, a reader sees zeros,
and so the end. Nothing is ever rewritten.

Reading: the seal is checked over the raw bytes before anything parses them. A reader that meets damage, or zeros with
bytes behind them, looks on for the next record whose seal names the very offset where it stands and a higher sequence
number; not one of an append that begins with those zeros, unless something later shows that it was finished. Sequence
numbers count a file's records from 0, so a gap tells how many are missing.

Downsides: a seal costs 270 bytes a record; a record cannot be moved to another place or file without sealing it
again; damage to a file's last record cannot be told from a torn tail unless the journal says how many records the
closed file had.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from arrowbank.errors import CorruptionError

__all__ = ["CARRY", "LAST_SESSION", "ArchiveName", "BankPaths", "JournalName", "SegmentName", "check_writer"]

_Name = TypeVar("_Name")
CARRY = "carry"
"""The writer's name of segments that compaction writes: groups that are live still, out of segments that are retired,
and groups that have left the archive."""
_WRITER = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_SEGMENT = re.compile(rf"(\d{{8,19}})-({_WRITER})-s(\d{{4,10}})-(\d{{4,10}})\.arrows")
_JOURNAL = re.compile(r"s(\d{4,10})-(\d{4,10})\.arrows")
_ARCHIVE = re.compile(r"c(\d{6,12})-s(\d{4,10})\.parquet")
_SESSION = re.compile(r"(\d{4,10})")
_TMP = re.compile(r"s(\d{4,10})")
_VERSION = re.compile(r"v(\d{6,12})")
LAST_SESSION = 10**10 - 1
"""The highest session number that a name can say."""


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """A segment's name. Orders by age: session, iteration, part."""

    session: int
    iteration: int
    part: int
    writer: str

    @property
    def is_carried(self) -> bool:
        """Whether compaction wrote it: then it counts only if the manifest names it."""
        return self.writer == CARRY

    def __str__(self) -> str:
        return f"{self.iteration:08d}-{self.writer}-s{self.session:04d}-{self.part:04d}.arrows"

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        match = _SEGMENT.fullmatch(name)
        return _canonical(match and cls(int(match[3]), int(match[1]), int(match[4]), match[2]), name)


@dataclass(frozen=True, slots=True, order=True)
class JournalName:
    session: int
    part: int

    def __str__(self) -> str:
        return f"s{self.session:04d}-{self.part:04d}.arrows"

    @classmethod
    def parse(cls, name: str) -> JournalName | None:
        match = _JOURNAL.fullmatch(name)
        return _canonical(match and cls(int(match[1]), int(match[2])), name)


@dataclass(frozen=True, slots=True, order=True)
class ArchiveName:
    """A Parquet file's name: the manifest commit that added it, and the session that made it."""

    commit: int
    session: int

    def __str__(self) -> str:
        return f"c{self.commit:06d}-s{self.session:04d}.parquet"

    @classmethod
    def parse(cls, name: str) -> ArchiveName | None:
        match = _ARCHIVE.fullmatch(name)
        return _canonical(match and cls(int(match[1]), int(match[2])), name)


@dataclass(frozen=True, slots=True)
class BankPaths:
    """The places inside one bank."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "MANIFEST.json"

    @property
    def lock(self) -> Path:
        return self.root / "LOCK"

    @property
    def sessions(self) -> Path:
        return self.root / "sessions"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def archive(self) -> Path:
        """The symbolic link that readers glob under."""
        return self.root / "archive"

    @property
    def versions(self) -> Path:
        return self.root / ".archive"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def directories(self) -> tuple[Path, ...]:
        return (self.sessions, self.segments, self.journal, self.versions, self.quarantine, self.tmp)

    def refuse_strangers(self) -> None:
        """Raise CorruptionError where a link, a FIFO or the like stands in the place of a file or directory of a bank.

        None of these is ever made by arrowbank but the link ``archive``; a bank from elsewhere may have been given one.
        """
        versions = [self.version(number) for number in self.version_numbers()]
        claims = [self.claim(number) for number in self.claimed_sessions()]
        unfinished = [self.session_tmp(number) for number in self.tmp_sessions()]
        for path in (*self.directories, *versions, *unfinished):
            _require_kind(path, stat.S_ISDIR, "directory")
        for path in (self.manifest, self.lock, *claims):
            _require_kind(path, stat.S_ISREG, "file")
        _require_kind(self.archive, stat.S_ISLNK, "symbolic link")

    def claim(self, session: int) -> Path:
        return self.sessions / f"{session:04d}"

    def session_tmp(self, session: int) -> Path:
        return self.tmp / f"s{session:04d}"

    def version(self, number: int) -> Path:
        return self.versions / f"v{number:06d}"

    def segment_names(self) -> list[SegmentName]:
        """The segments that are there, oldest first. Names of no known form are damage, not ours to skip."""
        return sorted(_names(self.segments, SegmentName.parse))

    def journal_names(self) -> list[JournalName]:
        return sorted(_names(self.journal, JournalName.parse))

    def claimed_sessions(self) -> list[int]:
        return sorted(_numbers(self.sessions, _SESSION, self.claim))

    def used_sessions(self) -> set[int]:
        """Sessions that left a claim or a file: no later one may have the number of any, even where claims are gone."""
        versions = [self.version(number) for number in self.version_numbers()]
        forms = [(self.segments, SegmentName.parse), (self.journal, JournalName.parse)]
        names = [
            parse(entry.name)
            for directory, parse in [*forms, *((version, ArchiveName.parse) for version in versions)]
            for entry in (directory.iterdir() if directory.is_dir() else ())
        ]
        return {*self.claimed_sessions(), *(name.session for name in names if name is not None)}

    def tmp_sessions(self) -> list[int]:
        """Sessions that have something unfinished."""
        return sorted(_numbers(self.tmp, _TMP, self.session_tmp))

    def version_numbers(self) -> list[int]:
        return sorted(_numbers(self.versions, _VERSION, self.version))


def check_writer(name: str) -> str:
    """Return a writer's name, or raise ValueError when it cannot be part of a file name."""
    if name == CARRY:
        raise ValueError(f"writer name {name!r} is kept for segments that compaction writes; choose another")
    if not re.fullmatch(_WRITER, name):
        raise ValueError(
            f"writer name {name!r}: use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return name


def _names(directory: Path, parse: Callable[[str], _Name | None]) -> list[_Name]:
    found = []
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.name.startswith("."):
            continue  # a file system's own, as .nfs0000…
        name = parse(entry.name)
        try:
            is_file = stat.S_ISREG(entry.lstat().st_mode)
        except FileNotFoundError:
            continue  # compaction unlinked it meanwhile
        if name is None or not is_file:
            raise CorruptionError(entry, "not a file that arrowbank writes here", hint="Move it out of the bank")
        found.append(name)
    return found


def _numbers(directory: Path, form: re.Pattern[str], place: Callable[[int], Path]) -> list[int]:
    """Return the numbers in a directory's names, where these are as ``place`` writes them."""
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    numbers = [int(match[1]) for match in map(form.fullmatch, names) if match]
    return [number for number in numbers if place(number).name in names]


def _canonical(parsed: _Name | None, name: str) -> _Name | None:
    """One name, one meaning: not the same numbers with more zeros."""
    return parsed if parsed is not None and str(parsed) == name else None


def _require_kind(path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not is_kind(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "not what belongs there"
        raise CorruptionError(path, f"{what}: arrowbank only ever makes a {kind} here", hint="Move it out of the bank")
