"""A lost manifest, made again from what is there, where that leaves no doubt. Reading only.

One flipped bit is found by flipping each back: the checksum proves it. Otherwise:

* The bank's id stands in claims, in the archive's rows, or in what is left of a manifest. A seal that matches under it
  proves it.
* The archive is the version that ``archive`` points at. Its files have no digest any more that could tell of damage;
  their pages have checksums, and all of them are read.
* A segment all of whose groups are in the archive, or in a carried segment of later make, was retired. A carried one
  that only repeats what live segments hold was left by a kill. Before and after a commit a bank says the same, so where
  both can be read, the commit is taken as done.
* The journal is read from the part that knows most of live groups, if it knows all that any other part does.

Anything else is refused, saying why.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from arrowbank.archive.parquet import file_digest, is_of_bank
from arrowbank.durable.files import read_small
from arrowbank.durable.journal import JOURNAL_SCHEMA, Snapshot, read_journal
from arrowbank.durable.layout import ArchiveName, BankPaths, JournalName, SegmentName
from arrowbank.durable.manifest import FORMAT_VERSION, ArchiveFile, Manifest, read_manifest_bytes
from arrowbank.durable.recovery import State, read_state
from arrowbank.durable.segment import NOT_A_GROUP, abandoned_in, check_head, read_segment
from arrowbank.durable.stream import Scan, map_file, scan
from arrowbank.errors import ArrowbankError, CorruptionError, CorruptRecordError
from arrowbank.schema import ARCHIVE_SCHEMA, SCHEMA_HASH, SEGMENT_SCHEMA
from arrowbank.verification.archived import Uids, rows_in
from arrowbank.verification.flipped import content_of, flipped_back

__all__ = ["Rebuilt", "UnclearError", "is_old_copy", "rebuild"]

_ID = re.compile(rb"[0-9a-f]{32}")
_ID_IN_CLAIM = re.compile(rb'"bank":"([0-9a-f]{32})"')
_MOST_IDS = 1000
_MOST_BYTES = 1 << 24


class UnclearError(ArrowbankError):
    """What is there can be understood in more than one way, or in none; the message says why."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A manifest made again."""

    manifest: Manifest
    how: str
    is_exact: bool
    """Whether it is the lost one itself, to the bit."""


def rebuild(paths: BankPaths) -> Rebuilt:
    """Return the manifest that the files speak for. Raises UnclearError, saying why there is none; OSError."""
    text = _text(paths)
    flipped = flipped_back(text)
    if flipped is not None:
        return Rebuilt(flipped, "repair flips one bit back: then its checksum is right", is_exact=True)
    _refuse_newer(text)
    bank_id = _bank_id(paths, text)
    version = _version(paths)
    files, uids = _archive_files(paths, version, bank_id)
    commits = [name.commit for number in paths.version_numbers() for name in _archive_names(paths.version(number))]
    bare = Manifest(
        format_version=FORMAT_VERSION,
        bank_id=bank_id,
        schema_hash=SCHEMA_HASH,
        commit=max([1, *commits]),
        version=version,
        files=tuple(files),
        archived_through=max([0, *(file.last_end for file in files)]),
    )
    segments = _groups_by_segment(paths, bare)
    retired, carried = _sort_out(segments, uids)
    update = {"carried": carried, "retired": dict.fromkeys(retired, bare.commit)}
    manifest = _with_journal(paths, bare.model_copy(update=update))
    how = f"repair makes it again: {len(files)} files of the archive, {len(segments) - len(retired)} live segments"
    return Rebuilt(manifest, how, is_exact=False)


def is_old_copy(paths: BankPaths, manifest: Manifest) -> str | None:
    """Say which file of the archive is of a later commit than a manifest could know; None when none is."""
    directory = paths.version(manifest.version)
    later = [str(name) for name in _archive_names(directory) if name.commit > manifest.commit + 1]
    return next((name for name in later if is_of_bank(directory / name, manifest.bank_id)), None)


# -- what is left of the manifest itself


def _text(paths: BankPaths) -> bytes:
    try:
        return read_manifest_bytes(paths)
    except (FileNotFoundError, CorruptionError):
        return b""


def _refuse_newer(text: bytes) -> None:
    version = (content_of(text) or {}).get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UnclearError(f"it says format version {version}, and this arrowbank knows {FORMAT_VERSION}")


# -- the bank's id


def _bank_id(paths: BankPaths, text: bytes) -> str:
    """Return the id under which the seals match."""
    claimed = list(_ids_in_claims(paths))
    candidates = list(dict.fromkeys([*claimed, *_ids_in_archive(paths), *_ids_in_manifests(paths, text)]))[:_MOST_IDS]
    streams: list[SegmentName | JournalName] = [*paths.segment_names(), *paths.journal_names()]
    proven = [one for one in candidates if any(_is_sealed_under(paths, name, one) for name in streams)]
    if len(proven) == 1:
        return proven[0]
    if not proven and len(set(claimed)) == 1 and all(_is_empty(paths, name, claimed[0]) for name in streams):
        return claimed[0]
    if len(proven) > 1:
        raise UnclearError(f"it has files of several banks: {', '.join(proven[:3])}")
    reason = "no seal matches under any bank id that can be found" if candidates else "the bank's id is lost with it"
    raise UnclearError(f"{reason}, and seals cannot be checked without it")


def _ids_in_claims(paths: BankPaths) -> Iterator[str]:
    for path in (paths.lock, *map(paths.claim, reversed(paths.claimed_sessions()))):
        try:
            yield from (found.decode() for found in _ID_IN_CLAIM.findall(read_small(path, _MOST_BYTES)))
        except (CorruptionError, FileNotFoundError):
            continue


def _ids_in_archive(paths: BankPaths) -> Iterator[str]:
    for number in paths.version_numbers():
        for name in _archive_names(paths.version(number)):
            try:
                source = pq.ParquetFile(paths.version(number) / str(name))
                for index in range(min(source.num_row_groups, 1)):
                    found = set(source.read_row_group(index, columns=["run_id"])["run_id"].to_pylist())
                    yield from sorted(one for one in found if isinstance(one, str))
            except NOT_A_GROUP:
                continue


def _ids_in_manifests(paths: BankPaths, text: bytes) -> Iterator[str]:
    """Ids in what is left of the manifest, in one that was about to replace it, or was kept in quarantine."""
    kept = [path for number in paths.tmp_sessions() for path in _regular(paths.session_tmp(number))]
    for path in (*kept, *_regular(paths.quarantine)):
        if path.name.startswith("MANIFEST.json"):
            try:
                text += b"\n" + read_small(path, _MOST_BYTES)
            except (CorruptionError, FileNotFoundError):
                continue
    yield from (found.decode() for found in _ID.findall(text))


def _is_sealed_under(paths: BankPaths, name: SegmentName | JournalName, bank_id: str) -> bool:
    return bool(_scan(paths, name, bank_id).records)


def _is_empty(paths: BankPaths, name: SegmentName | JournalName, bank_id: str) -> bool:
    """Whether a stream was begun, and nothing was ever written into it."""
    found = _scan(paths, name, bank_id)
    return not found.records and not found.damage


def _scan(paths: BankPaths, name: SegmentName | JournalName, bank_id: str) -> Scan:
    is_segment = isinstance(name, SegmentName)
    data = map_file((paths.segments if is_segment else paths.journal) / str(name))
    return scan(data[:_MOST_BYTES], str(name), bank_id, SEGMENT_SCHEMA if is_segment else JOURNAL_SCHEMA)


# -- the archive


def _version(paths: BankPaths) -> int:
    there = paths.version_numbers()
    pointed = [number for number in there if _points_at(paths, number)]
    if len(pointed) == 1 or len(there) == 1:
        return (pointed or there)[0]
    raise UnclearError(
        f"{len(there)} versions of the archive are there, and the link archive does not say which one counts"
    )


def _points_at(paths: BankPaths, version: int) -> bool:
    return paths.archive.is_symlink() and os.readlink(paths.archive) == f".archive/v{version:06d}"


def _archive_names(directory: Path) -> list[ArchiveName]:
    names = [ArchiveName.parse(path.name) for path in _regular(directory)]
    return sorted(name for name in names if name is not None and name.commit > 0)


def _archive_files(paths: BankPaths, version: int, bank_id: str) -> tuple[list[ArchiveFile], Uids]:
    files, parts = [], []
    for name in _archive_names(paths.version(version)):
        path = paths.version(version) / str(name)
        try:
            _require_whole(path, bank_id)
            held = rows_in(path)
        except NOT_A_GROUP as error:
            raise UnclearError(f"{name} of the archive is damaged ({error})") from error
        digest, nbytes = file_digest(path)
        files.append(ArchiveFile(
            name=str(name), rows=held.rows, groups=len(held.uids), nbytes=nbytes, last_end=held.last_end, digest=digest
        ))  # fmt: skip
        parts.append(held.uids)
    uids = Uids(parts)
    if uids.repeated():
        raise UnclearError(f"{uids.repeated()} groups are in several files of the archive")
    return files, uids


def _require_whole(path: Path, bank_id: str) -> None:
    """Read every page. Raises what a reader says of one that does not match its checksum; ValueError."""
    source = pq.ParquetFile(path, page_checksum_verification=True)
    if source.schema_arrow != ARCHIVE_SCHEMA:
        raise ValueError("it has other columns")
    for index in range(source.num_row_groups):
        _require_types(source.metadata, index)
        rows = source.read_row_group(index)
        rows.validate(full=True)
        if set(rows["run_id"].to_pylist()) != {bank_id}:
            raise ValueError("it is another bank's")


def _require_types(metadata: pq.FileMetaData, index: int) -> None:
    """Raise ValueError unless the chunks are of their columns' types: Arrow ends the process when one that is not is
    asked for its statistics.
    """
    group = metadata.row_group(index)
    for column in range(group.num_columns):
        if group.column(column).physical_type != metadata.schema.column(column).physical_type:
            raise ValueError(f"its footer is of two minds about {group.column(column).path_in_schema}")


# -- segments


def _groups_by_segment(paths: BankPaths, manifest: Manifest) -> dict[SegmentName, set[str]]:
    """Return the groups of each segment that count by what segments themselves say."""
    scans = {name: read_segment(paths.segments / str(name), manifest.bank_id)[0] for name in paths.segment_names()}
    return {
        name: {record.head["uid"] for record in found.records if _is_group(record.head)}
        for name, found in scans.items()
    }


def _is_group(head: dict[str, object]) -> bool:
    return abandoned_in(head) is None and check_head(head) is None


def _sort_out(segments: dict[SegmentName, set[str]], archived: Uids) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which segments are retired, and which carried ones count."""
    strays: set[SegmentName] = set()
    while True:
        retired, carried = _covered(segments, archived, strays)
        counting = set(segments) - retired - strays
        repeating = [name for name in carried if segments[name] <= _in_earlier(name, counting, segments)]
        if not repeating:
            break
        strays.add(repeating[-1])
    for name in carried:
        if segments[name] & _in_earlier(name, counting, segments):
            raise UnclearError(f"some groups of {name} are in an earlier segment as well, and others are not")
    return tuple(sorted(map(str, retired))), tuple(map(str, carried))


def _in_earlier(name: SegmentName, counting: set[SegmentName], segments: dict[SegmentName, set[str]]) -> set[str]:
    """Return the groups of segments that a carried one may have been made of."""
    return {uid for other in counting if not other.is_carried or other < name for uid in segments[other]}


def _covered(
    segments: dict[SegmentName, set[str]], archived: Uids, strays: set[SegmentName]
) -> tuple[set[SegmentName], list[SegmentName]]:
    """Return the segments whose groups are all elsewhere, and the carried ones that hold what is not."""
    retired: set[SegmentName] = set()
    carried: list[SegmentName] = []
    later: set[str] = set()
    for name in sorted(segments, key=lambda name: (name.is_carried, name), reverse=True):  # carried ones, newest first
        uids = segments[name]
        if name in strays or not uids:
            continue
        elsewhere = {uid for uid in uids if uid in later or uid in archived}
        if elsewhere == uids:
            retired.add(name)
        elif name.is_carried:
            carried.insert(0, name)
            later |= uids
        elif any(uid in archived for uid in elsewhere):
            raise UnclearError(f"some groups of {name} are in the archive, and others nowhere else")
    return retired, carried


# -- the journal


def _with_journal(paths: BankPaths, manifest: Manifest) -> Manifest:
    """Return the manifest with the part of the journal that reading starts with."""
    known = []
    for base in _bases(paths, manifest):
        based = manifest.model_copy(update={"journal": base})
        try:
            known.append((based, _known_of_live(read_state(paths, based))))
        except CorruptRecordError:
            continue
    if not known:
        raise UnclearError("no part of the journal can be read from its beginning")
    most = [based for based, facts in known if all(facts >= other for _, other in known)]
    if not most:
        raise UnclearError("parts of the journal say different things of live groups")
    return most[-1]


def _bases(paths: BankPaths, manifest: Manifest) -> Iterator[str]:
    """Yield where reading may start: at the first part of all, and at each that begins with a snapshot."""
    for number, name in enumerate(paths.journal_names()):
        try:
            entries, damage = read_journal(paths, name, manifest.bank_id)
        except CorruptRecordError:
            continue
        if not entries:
            if not number and not name.part and not damage and not manifest.files:
                yield ""  # begun, and nothing said yet
            continue
        if entries[0][0].sequence:
            continue
        if isinstance(entries[0][1], Snapshot):
            yield str(name)
        elif not number and not name.part:
            yield ""


def _known_of_live(state: State) -> set[tuple[object, ...]]:
    """What is known of the groups that are live: which draws of which lines they are in, and which are evicted."""
    known: set[tuple[object, ...]] = {("evicted", uid) for uid in state.history.evicted if uid in state.groups}
    for number, line in state.history.lines.items():
        for draw in line.draws():
            place = (number, draw.iteration, draw.index, draw.span, draw.session, line.is_made(draw))
            known |= {(*place, uid) for uid in draw.uids if uid in state.groups}
    return known


def _regular(directory: Path) -> Iterable[Path]:
    if directory.is_symlink() or not directory.is_dir():
        return []
    return [path for path in sorted(directory.iterdir()) if stat.S_ISREG(path.lstat().st_mode)]
