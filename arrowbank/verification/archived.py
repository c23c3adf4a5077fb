"""The archive's Parquet files: digests, footers, counts, and that each group and rollout is there once. Reading only.

Memory: three columns of a row group, and sixteen bytes a group.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from arrowbank.archive.parquet import check_content, descriptor_digest, row_group_end, write_tables
from arrowbank.durable.files import reading
from arrowbank.durable.layout import ArchiveName, BankPaths
from arrowbank.durable.manifest import ArchiveFile, Manifest
from arrowbank.durable.segment import NOT_A_GROUP
from arrowbank.errors import CorruptionError
from arrowbank.verification.places import status_of
from arrowbank.verification.report import Counts, Finding, Mending, counted, damage

__all__ = [
    "EMPTY_FILE", "ArchiveCheck", "Copies", "Uids", "check_archive", "check_file", "rows_in", "wanted_files",
]  # fmt: skip

EMPTY_FILE = ArchiveFile(name=str(ArchiveName(0, 0)), rows=0, groups=0, nbytes=0, last_end=0, digest="")
"""The file without rows, of which the manifest says nothing."""
_WRITER = re.compile(r"parquet-cpp-arrow version \d+\.\d+\.\d+")
_COLUMNS = ["group_uid", "member_index", "group_size"]
_PUT_BACK = "Put it back from a copy; scan(verify=False) reads what can still be read"


class Uids:
    """A set of groups, sixteen bytes each."""

    def __init__(self, parts: Iterable[NDArray[np.uint64]] = ()) -> None:
        self._pairs = np.concatenate([np.zeros((0, 2), np.uint64), *parts])
        self._pairs = self._pairs[np.lexsort((self._pairs[:, 1], self._pairs[:, 0]))]

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, uid: str) -> bool:
        high, low = hashed([uid])[0]
        column = self._pairs[:, 0]
        start, stop = int(np.searchsorted(column, high, "left")), int(np.searchsorted(column, high, "right"))
        return bool((self._pairs[start:stop, 1] == low).any())

    def repeated(self) -> int:
        """Count the groups that are there more than once."""
        return int((self._pairs[1:] == self._pairs[:-1]).all(axis=1).sum())


def hashed(uids: Iterable[str]) -> NDArray[np.uint64]:
    """Return two numbers for each."""
    digests = b"".join(xxhash.xxh3_128_digest(uid.encode("utf-8", "surrogatepass")) for uid in uids)
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


@dataclass(slots=True)
class Rows:
    """What one file holds."""

    uids: NDArray[np.uint64]
    rows: int
    rollouts: int
    last_end: int


@dataclass(slots=True)
class ArchiveCheck:
    """What was found in the archive."""

    findings: list[Finding] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    uids: Uids = field(default_factory=Uids)
    is_whole: bool = True
    """Whether every file could be read: then ``uids`` are all of them."""


def check_archive(
    paths: BankPaths, manifest: Manifest, cache: dict[Any, Finding | Rows], passed: Callable[[int], None]
) -> ArchiveCheck:
    """Check every file that the manifest names. ``cache`` spares reading a file again that has not changed."""
    found, parts, copies = ArchiveCheck(), {}, Copies(paths, manifest)
    directory = paths.version(manifest.version)
    for file in wanted_files(manifest):
        path = directory / file.name
        status = status_of(path)
        if status is None:
            found.is_whole = False
            found.findings.append(_missing(paths, path, file, copies))
            continue
        key = (file, status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in cache:
            cache[key] = check_file(paths, path, file, copies)
        passed(status.st_size)
        result = cache[key]
        if isinstance(result, Finding):
            found.is_whole = False
            found.findings.append(result)
            continue
        parts[file.name] = result.uids
        found.counts += Counts(1, 0, len(result.uids), result.rollouts, status.st_size)
    found.uids = Uids(parts.values())
    found.findings += _repeated(paths, directory, found.uids, parts)
    return found


def wanted_files(manifest: Manifest) -> tuple[ArchiveFile, ...]:
    """Return the files that are to be in the archive's directory."""
    return (EMPTY_FILE, *manifest.files)


def check_file(paths: BankPaths, path: Path, file: ArchiveFile, copies: Copies) -> Finding | Rows:
    """Read one file; return what is wrong with it, or what it holds."""
    name = str(path.relative_to(paths.root))
    try:
        with reading(path) as descriptor:
            if file is EMPTY_FILE:
                _require_as_written(descriptor)
            elif descriptor_digest(descriptor) != (file.digest, file.nbytes):
                return _damaged(paths, name, file, "its digest is not the one in the manifest", copies)
            opened = f"/proc/self/fd/{descriptor}"
            check_content(opened, path, file)
            held = rows_in(opened)
    except CorruptionError as error:
        return _damaged(paths, name, file, error.reason)
    except NOT_A_GROUP as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        return _damaged(paths, name, file, f"it cannot be read ({error})")
    told = (file.rows, file.groups, file.last_end)
    if (held.rows, len(held.uids), held.last_end) != told:
        reason = f"{held.rows} rows, {len(held.uids)} groups, end {held.last_end}: the manifest says {told}"
        return _damaged(paths, name, file, reason)
    return held


def _require_as_written(descriptor: int) -> None:
    """Raise ValueError when the file without rows is not what this version of Arrow writes, if it was this version."""
    sink = pa.BufferOutputStream()
    write_tables(sink, [])
    fresh = sink.getvalue().to_pybytes()
    found = os.pread(descriptor, 2 * len(fresh), 0)
    written_by = [pq.read_metadata(pa.BufferReader(data)).created_by for data in (found, fresh)]
    if found != fresh and (written_by[0] == written_by[1] or not _WRITER.fullmatch(written_by[0])):
        raise ValueError("not the bytes that were written")


def rows_in(opened: str | Path) -> Rows:
    """Read which groups a file holds. Raises ValueError where a group is not whole, or what a reader says."""
    source = pq.ParquetFile(opened, page_checksum_verification=True)
    parts, rows, rollouts, end = [np.zeros((0, 2), np.uint64)], 0, 0, 0
    for index in range(source.num_row_groups):
        table = source.read_row_group(index, columns=_COLUMNS)
        if not table.num_rows:
            continue
        uids, sizes = _whole_groups(table)
        parts.append(hashed(uids))
        rows += table.num_rows
        rollouts += int(sizes.sum())
        end = max(end, row_group_end(source.metadata.row_group(index)))
    return Rows(np.concatenate(parts), rows, rollouts, end)


def _whole_groups(table: pa.Table) -> tuple[list[str], NDArray[Any]]:
    """Return each group's uid and size, in rows in which each must stand whole and in order."""
    table = table.combine_chunks()
    coded = table["group_uid"].chunk(0).dictionary_encode()
    codes = _numbers(coded.indices)
    starts = np.concatenate([[0], np.flatnonzero(codes[1:] != codes[:-1]) + 1])
    lengths = np.diff([*starts, len(codes)])
    sizes, members = (_numbers(table[name].chunk(0)) for name in ("group_size", "member_index"))
    position = np.arange(len(codes)) - np.repeat(starts, lengths)
    if (np.maximum(sizes, 1) != np.repeat(lengths, lengths)).any() or (members != position).any():
        raise ValueError("a group's rollouts are not all there, each once and in order")
    names = coded.dictionary.to_pylist()
    return [names[code] for code in codes[starts].tolist()], sizes[starts]


def _numbers(array: pa.Array) -> NDArray[Any]:
    """An array's int32 values. Not by ``to_numpy``, which imports pandas, most of a second."""
    if array.null_count or array.type != pa.int32():
        raise ValueError(f"{array.null_count} nulls in a column of {array.type} that has none")
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + array.offset)[array.offset :]


def _missing(paths: BankPaths, path: Path, file: ArchiveFile, copies: Copies) -> Finding:
    is_empty = file is EMPTY_FILE
    reason = "the file without rows is missing" if is_empty else "the manifest names this file, and it is not there"
    return _damaged(paths, str(path.relative_to(paths.root)), file, reason, copies)


def _damaged(paths: BankPaths, name: str, file: ArchiveFile, reason: str, copies: Copies | None = None) -> Finding:
    if file is EMPTY_FILE:
        return damage(name, reason, "repair writes it anew", Mending.REPAIR)
    copy = None if copies is None else copies.find(file)
    if copy is not None:
        return damage(name, reason, f"repair puts it back: {copy.relative_to(paths.root)} is it", Mending.REPAIR)
    held = f"it held {counted(file.groups, 'group')}, {counted(file.rows, 'row')}, of before iteration {file.last_end}"
    return damage(name, f"{reason}; {held}", _PUT_BACK)


def _repeated(paths: BankPaths, directory: Path, uids: Uids, parts: dict[str, NDArray[np.uint64]]) -> Iterator[Finding]:
    count = uids.repeated()
    if count:
        inside = [name for name, part in parts.items() if Uids([part]).repeated()]
        where = f"in {inside[0]} alone" if inside else "in several files"
        reason = f"{counted(count, 'group')} more than once, {where}"
        yield damage(str(directory.relative_to(paths.root)), reason, "No arrowbank writes such an archive")


class Copies:
    """Finds copies of files of the archive, under whatever name, anywhere in the bank. Looks at it when first asked."""

    def __init__(self, paths: BankPaths, manifest: Manifest) -> None:
        self._paths = paths
        self._named = Counter(file.digest for file in manifest.files)
        """No file is to be there twice, nor that without rows named: a manifest that says so is not arrowbank's."""
        self._by_size: dict[int, list[Path]] | None = None

    def find(self, file: ArchiveFile) -> Path | None:
        """Return a file that is byte for byte the one that the manifest names."""
        if self._named[file.digest] != 1 or file.name == EMPTY_FILE.name:
            return None
        if self._by_size is None:
            self._by_size = self._sizes()
        return next((path for path in self._by_size.get(file.nbytes, ()) if _is_file(path, file)), None)

    def _sizes(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for directory, inside, names in os.walk(self._paths.root):  # follows no link
            if directory == str(self._paths.root) and self._paths.tmp.name in inside:
                inside.remove(self._paths.tmp.name)  # whoever opens or mends the bank empties it first
            for path in (Path(directory, name) for name in sorted(names)):
                status = status_of(path)
                if status is not None and stat.S_ISREG(status.st_mode):
                    found.setdefault(status.st_size, []).append(path)
        return found


def _is_file(path: Path, file: ArchiveFile) -> bool:
    with reading(path) as descriptor:
        return descriptor_digest(descriptor) == (file.digest, file.nbytes)
