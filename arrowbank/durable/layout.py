"""The format of a bank: where everything lies, and what its bytes are. Every file name is made and checked here.

    MANIFEST.json                                    what is archived, and what of the rest counts
    LOCK                                             the newest holder, and whether it gave the bank back
    sessions/0003                                    who claimed session 3; its modification time is its heartbeat
    segments/00000021-main-s0003-0000.arrows         iteration 21, writer "main" (the coordinator), session 3, part 0
    segments/00000021-rank-1-s0003-10002.arrows      of another writer of the run: the second of that name, its part 2
    segments/00000021-carry-s0003-0007.arrows        groups copied out of segments that were retired
    journal/s0003-0000.arrows                        restores, draws, evictions, checkpoints of session 3, part 0
    archive -> .archive/v000012                      *.parquet, one of them (c000000-s0000) without rows
    quarantine/                                      damaged bytes, and what was moved away, each with a JSON note
    tmp/s0003/                                       everything unfinished of session 3; writer-rank-1-0 and so on count
                                                     the writers of a name

Numbers in names are decimal, filled with zeros to the width shown, wider when they need it, never otherwise. Names do
not recur. Nothing is a link but ``archive``. A file is made under tmp/, synced, linked to its name, and the directory
synced, before anything refers to it; MANIFEST.json, LOCK and ``archive`` are replaced by renaming. Journals and
segments are only appended to, by the session in their name; Parquet files never change.


What counts

MANIFEST.json is one JSON object:

    format_version   1
    bank_id          32 hexadecimal digits
    schema_hash      dbde6e6256971b56fbe08fc3d5b02e10, of the columns below and the archive's
    commit           how many times this file has been written
    version          the archive is .archive/v<version>
    files            [{name, rows, groups, nbytes, last_end, digest}]: Parquet files of the archive; digest is the
                     xxh3-128 of all bytes; no row's training ends after iteration count last_end
    archived_through draws settled by this iteration count may be in the archive
    journal          the part of the journal that reading starts with, its first record a snapshot; "" for the first
    carried          names of the segments with writer "carry" that count
    retired          {segment: commit}: their groups are elsewhere; they do not count, there or not
    checksum         xxh3-128 of the object without this key: keys sorted, no spaces, ASCII only

Every hash here is written in lower-case hexadecimal digits. The archive's rows are those of ``files``. Journal parts
count from ``journal`` on, ordered by session, then part. Segments count that are not retired and, with the writer
"carry", only when ``carried`` names them. Everything else was left by a crash and is taken away by the next open.

LOCK is {"holder": {…}, "closed": bool, "journal": {…}}, a claim the holder alone: {session, host, boot, namespace, pid,
started, since, token, journal} (host name, boot id, pid namespace, pid, its start in ticks since boot, ISO 8601,
random). ``journal``, null where nothing is known, is {name, records, checksum}: how many records that part had when its
session was closed, the last part of LOCK's own session, or of the session before the claim's; checksum is xxh3-64 of
"<name> <records>". Until a journal says ``sealed`` of it, that many count.


Streams

Segments and journals are Arrow IPC streams. All numbers little-endian, all parts a multiple of 8 bytes long:

    stream = schema record* (zeros | end)
    schema = FF FF FF FF  length:int32  header               an Arrow Schema message
    record = FF FF FF FF  length:int32  header  body         an Arrow RecordBatch message, not compressed
    zeros  = 00 00 00 00 00 00 00 00                          still open, or its writer was killed
    end    = FF FF FF FF 00 00 00 00                          closed

The custom metadata of a record's header (``Message.custom_metadata``) has two entries: ``arrowbank.head``, a JSON
object, which may be padded with spaces, and ``arrowbank.seal``, this text of 117 characters, which comes first in the
bytes:

  arrowbank-seal-1:SSSSSSSSSSSSSSSS:OOOOOOOOOOOOOOOO:FFFFFFFFFFFFFFFF:LLLLLLLLLLLLLLLL:DDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDD

S: the record's number in its file, from 0. O: where it starts in the file. F: where the first record of the same append
starts. L: its length in bytes, all of it. D: xxh3-128 of "<bank_id>/<file name>/" and then the whole record, in which
the 32 characters of D itself read "0". So a seal holds for one place in one file of one bank.

Writing an append: all of its records but each one's first eight bytes, which stay zero, with ``zeros`` behind the
last; then those first eight bytes, record by record; then fdatasync. Until a record's first eight bytes are there,
readers see the end. After a write or a sync that failed, nothing is written to that file any more.

Reading: a seal is checked over the raw bytes before anything parses them; the schema message is not needed, since the
columns are these. Where no record starts that is sealed for this place, or zeros or an end have bytes behind them, look
on for the next record whose seal names the very offset where it stands and a higher number. What lies in between is
damage; numbers that are missing are records lost. Without anything good behind it, it is a torn tail, as a kill leaves
it, unless a record stands there whole, sealed for another place of this file: bytes before it are gone. A torn tail is
also inside an append (F of the next record is not behind it) which nothing, neither a later append nor an end, shows to
be finished.

A file's schema is durable before it gets its name, so one without it is damaged. A session's journal is begun before
its first segment, so a session that has segments and no journal has lost it.

A record counts unless a journal entry says otherwise: ``abandoned`` (its append failed), or ``sealed`` with a count
that its number is not below (written by somebody who had lost his place). Writers other than "main" have no journal: of
an append that failed, the first record of their next segment says so. It has no rows, and this head alone:
{"abandoned": [[file, first, how many], ...]}.


Records of segments: one group, one row a rollout; a group without rollouts is one row with group_size 0

    head      uid, iteration, env, problem (or null), split, size (rollouts), at (when it was finished, µs since 1970);
              where they say something source_index, batch_id, index_in_batch, extra, evicted (the reason) and, in
              carried segments, session: the one that appended it
    columns   group_uid, env_id?, split, kind ("token"/"text"): string; member_index, group_size: int32;
              collected_iteration: int64; completed_at: timestamp[us, UTC]; reward?: double; num_tokens?,
              num_generated?: int64; tokens?: list<int32>; generation_mask?: list<bool>; logprobs?: list<float?>;
              text?: string; details: string; arrays: list<large_binary>. Those without ? are never null; the elements
              of lists are named "element" and null only in logprobs.

``details`` is a JSON object: session, writer, batch_id, index_in_batch, source_index, group_extra of the group; fields
of the rollout by their own names; turn_rewards where the reward is a list; started_at in µs; arrays: [name, dtype,
shape] each (the bytes are in the column, in this order); extra; ``turns``, [source, end] or [source, end, mask_from,
form, given] each, and ``irregular``. A number that JSON has not is {"f64": its 16 hexadecimal digits}. A turn is the
first ``end`` tokens (or characters) of its source: 0 the row's own sequence, k the k-th irregular one. Its mask is the
source's with the first ``mask_from`` cleared (-1: none). Its ``given`` logprobs are the first ones at (1) its mask, (2)
all its tokens, (3) the source's mask up to ``end``; (0) it has none.
``irregular`` has a text, or [has_mask, has_logprobs] and behind the arrays its tokens (int32), mask (a byte each),
logprobs (float32) and which of these are known (a byte each).


Records of journals: one entry, one row

    head      kind
    columns   kind: string; at: timestamp[us, UTC]; iteration?: int64; uids?: list<string>; state?: large_binary;
              details: string, a JSON object; its keys by kind:

    restored      iteration; mode, parent (session or null), lost (uids), guessed, named (the session that was named)
    drawn         iteration, uids in order, state; span
    evicted       uids; reason
    checkpointed  iteration
    abandoned     name, first, count: records of that file
    sealed        facts [[file, records, bytes]]: so many records of that file count
    snapshot      uids, state; all that the parts before say and that still matters: lines, evicted [[reason, how
                  many]], archived (how many), gone [checkpoints], abandoned [[file, first, count]], records {file: how
                  many count}. uids and state are those of the lines' draws, made then planned, and of each line's
                  ``lost``, in order; then the evicted ones; then archived ones that draws here still name. A line is
                  {session, parent, resumed, makers, checkpoints, last_checkpoint, last_drawn, reach, made, planned,
                  lost}, a draw [iteration, index, span, session, how many uids, bytes of state or null], checkpoints
                  runs as ``checkpoints`` tells them.

What restores, draws and checkpoints mean for one another is told in ``line`` and ``history``.


An example: record 0 of journal/s0001-0000.arrows in the bank 0000…0000 (32 digits), 848 bytes at offset 440 (1B8 in
hexadecimal): checkpointed, iteration 20, at 0. Where something is left out, it is Arrow's and zeros.

    0000  ff ff ff ff e0 02 00 00                            a message; its header has 736 (2E0) bytes
    0008  18 00 00 00                                        Flatbuffers: the Message is 18 bytes on
    0030  68 00 00 00 00 00 00 00                            length of the body
    0054  75 00 00 00                                        the seal has 117 bytes
    0058  61 72 72 6f 77 62 61 6e 6b 2d 73 65 61 6c 2d 31    arrowbank-seal-1
    0068  3a 30 30 30 30 30 30 30 30 30 30 30 30 30 30 30    :000000000000000
    0078  30 3a 30 30 30 30 30 30 30 30 30 30 30 30 30 31    0:00000000000001
    0088  62 38 3a 30 30 30 30 30 30 30 30 30 30 30 30 30    b8:0000000000000
    0098  31 62 38 3a 30 30 30 30 30 30 30 30 30 30 30 30    1b8:000000000000
    00a8  30 33 35 30 3a 36 33 33 64 64 35 30 63 30 30 32    0350:633dd50c002
    00b8  63 35 32 36 30 65 30 34 65 32 30 65 64 33 36 37    c5260e04e20ed367
    00c8  33 37 32 65 34                                     372e4
    00d4  61 72 72 6f 77 62 61 6e 6b 2e 73 65 61 6c          arrowbank.seal
    00f8  17 00 00 00                                        the head has 23 bytes
    00fc  7b 22 6b 69 6e 64 22 3a 22 63 68 65 63 6b 70 6f    {"kind":"checkpo
    010c  69 6e 74 65 64 22 7d                               inted"}
    0118  61 72 72 6f 77 62 61 6e 6b 2e 68 65 61 64          arrowbank.head
    0140  01 00 00 00 00 00 00 00                            RecordBatch: one row
    02e8  00 00 00 00 0c 00 00 00                            the body: kind, offsets
    02f0  63 68 65 63 6b 70 6f 69 6e 74 65 64                kind: checkpointed
    0300  00 00 00 00 00 00 00 00                            at: 0
    0308  14 00 00 00 00 00 00 00                            iteration: 20
    0340  00 00 00 00 02 00 00 00                            details, offsets
    0348  7b 7d 00 00 00 00 00 00                            details: {}

After it come eight zeros, or the next record, at 440 + 848.


Downsides

A seal costs 270 bytes a record. A record cannot be moved to another place or file without sealing it again. The schema
message is covered by no seal: it costs nothing when it is damaged, and no other reader than arrowbank knows. Damage to
the last record of a file that nobody has sealed or closed cannot be told from a torn tail. A segment that was never
sealed and is gone as a whole is not missed, but for its groups in draws; nor is the journal of a session that was not
closed, when all its segments are gone with it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

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

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """Return the places of a bank at a path, which need not be there.

        Raises OSError for an empty path, which would be the current directory, and for one that is not UTF-8.
        """
        name = os.fspath(path)
        if not name:
            raise FileNotFoundError(errno.ENOENT, "the path of the bank is empty", name)
        root = Path(path).absolute()
        try:
            os.fspath(root).encode()
        except UnicodeEncodeError:
            raise OSError(
                errno.EILSEQ, "not a path in UTF-8, and Arrow opens no other: rename it, or link to it", os.fspath(root)
            ) from None
        return cls(root)

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

    def refuse_strangers(self, *, link: bool) -> None:
        """Raise CorruptionError where a link, a FIFO or the like stands in the place of a file or directory of a bank.

        None of these is ever made by arrowbank but the link ``archive``; a bank from elsewhere may have been given one.
        link: whether ``archive`` must be one, too, where it is. A copy may have a directory there.
        """
        versions = [self.version(number) for number in self.version_numbers()]
        claims = [self.claim(number) for number in self.claimed_sessions()]
        unfinished = [self.session_tmp(number) for number in self.tmp_sessions()]
        for path in (*self.directories, *versions, *unfinished):
            _require_kind(path, stat.S_ISDIR, "directory")
        for path in (self.manifest, self.lock, *claims):
            _require_kind(path, stat.S_ISREG, "file")
        if link:
            _require_kind(self.archive, stat.S_ISLNK, "symbolic link, which is made anew")

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
    if not directory.is_dir():
        return []
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue  # a file system's own, as .nfs0000…
            name = parse(entry.name)
            if name is not None and entry.is_file(follow_symlinks=False):
                found.append(name)
            elif os.path.lexists(entry.path):  # not, when compaction unlinked it meanwhile
                reason = "not a file that arrowbank writes here"
                raise CorruptionError(entry.path, reason, hint="Move it out of the bank")
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
