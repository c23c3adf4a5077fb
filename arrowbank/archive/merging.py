"""Merging small Parquet files, so that their number stays about logarithmic in what is archived.

Files are in tiers by the number of their rows, each ``FAN_IN`` times as high as the one below; ``FAN_IN`` files of one
tier become one file of a higher one. So a row is rewritten once a tier, and there are fewer than ``FAN_IN`` files in
each. Files of ``LARGE_BYTES`` and more are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from arrowbank.archive.parquet import ROW_GROUP_BYTES, TABLE_BYTES, check_file, describe_file, write_parquet
from arrowbank.archive.rows import group_slices
from arrowbank.durable.manifest import ArchiveFile
from arrowbank.schema import ARCHIVE_SCHEMA

__all__ = ["FAN_IN", "LARGE_BYTES", "Source", "choose", "merge"]

FAN_IN = 8
LARGE_BYTES = 1 << 29

_KEYS = ("consumed_iteration", "consumed_draw", "consumed_position")
_LAST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read from."""

    path: Path
    file: ArchiveFile
    keep: NDArray[np.bool_] | None = None
    """Which of its rows to take; None for all."""

    @classmethod
    def checked(cls, directory: Path, file: ArchiveFile) -> Source:
        """Return a file that is, byte for byte, what the manifest says of it. Raises CorruptionError."""
        check_file(directory / file.name, file)
        return cls(directory / file.name, file)


def choose(listed: Sequence[ArchiveFile]) -> list[ArchiveFile]:
    """Return files to be merged into one; none while every tier has fewer than ``FAN_IN``."""
    tiers: dict[int, list[ArchiveFile]] = {}
    for file in listed:
        if file.nbytes < LARGE_BYTES:
            tiers.setdefault(_tier(file.rows), []).append(file)
    full = [tier for tier, files in tiers.items() if len(files) >= FAN_IN]
    return tiers[min(full)] if full else []


def merge(sources: Sequence[Source], target: Path) -> ArchiveFile | None:
    """Write the sources' rows, sorted as the archive's are, to a new file; None when there are none.

    Durability: the file's bytes survive power loss on return. Memory: a row group of each source, and a portion of
    output. Raises OSError.
    """
    order = _order(sources) if sources else np.zeros((0, 2), np.int64)
    if not len(order):
        return None
    rows = write_parquet(target, _tables(sources, order))
    return describe_file(target, rows=rows, expected=len(order), groups=sum(map(_groups, sources)))


def _groups(source: Source) -> int:
    """Count the groups of a source's rows; no group spans two files."""
    if source.keep is None:
        return source.file.groups
    uids = pq.read_table(source.path, columns=["group_uid"])["group_uid"].filter(pa.array(source.keep))
    return len(uids.unique())


def _tier(rows: int) -> int:
    tier = 0
    while rows >= FAN_IN:
        rows //= FAN_IN
        tier += 1
    return tier


def _order(sources: Sequence[Source]) -> NDArray[Any]:
    """Return the pairs (source, row), in the order in which they are to be written."""
    keys: list[list[NDArray[Any]]] = [[] for _ in _KEYS]
    pairs = []
    for number, source in enumerate(sources):
        table = pq.read_table(source.path, columns=list(_KEYS), page_checksum_verification=True)
        rows = np.arange(table.num_rows) if source.keep is None else np.flatnonzero(source.keep)
        pairs.append(np.stack([np.full(len(rows), number), rows], axis=1))
        for key, parts in zip(_KEYS, keys, strict=True):
            parts.append(table[key].fill_null(_LAST).to_numpy()[rows])
    pair = np.concatenate(pairs)
    iteration, draw, position = (np.concatenate(parts) for parts in keys)
    # Rows that compare equal, a group's members among them, stay as they stand in their file.
    order: NDArray[Any] = pair[np.lexsort((pair[:, 1], pair[:, 0], position, draw, iteration))]
    return order


def _tables(sources: Sequence[Source], order: NDArray[Any]) -> Iterator[pa.Table]:
    """Yield portions, each cut where an iteration ends, or a group if it gets too large."""
    readers = [_Reader(source.path) for source in sources]
    portion: list[pa.Table] = []
    nbytes = 0
    last: tuple[int | None, str | None] = None, None
    for number, first, end in _runs(order):
        for piece in readers[number].rows(first, end):
            is_small = nbytes + piece.nbytes < min(ROW_GROUP_BYTES, TABLE_BYTES)
            for start, stop in [(0, piece.num_rows)] if is_small else group_slices(piece):
                part = piece.slice(start, stop - start)
                iteration, uid = part["consumed_iteration"][0].as_py(), part["group_uid"][0].as_py()
                at_iteration = iteration != last[0] and nbytes >= ROW_GROUP_BYTES
                if portion and (at_iteration or (uid != last[1] and nbytes >= TABLE_BYTES)):
                    yield pa.concat_tables(portion)
                    portion, nbytes = [], 0
                portion.append(part)
                nbytes += part.nbytes
                last = part["consumed_iteration"][-1].as_py(), part["group_uid"][-1].as_py()
    if portion:
        yield pa.concat_tables(portion)


def _runs(order: NDArray[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield source, first row and end of rows that stand together in a source."""
    number, row = order[:, 0], order[:, 1]
    breaks = np.flatnonzero((number[1:] != number[:-1]) | (row[1:] != row[:-1] + 1)) + 1
    edges = [0, *breaks.tolist(), len(order)]
    for start, stop in pairwise(edges):
        yield int(number[start]), int(row[start]), int(row[stop - 1]) + 1


class _Reader:
    """Reads rows of a Parquet file in rising order, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path, page_checksum_verification=True)
        self._group = -1
        self._table = ARCHIVE_SCHEMA.empty_table()
        self._start = self._stop = 0

    def rows(self, start: int, stop: int) -> Iterator[pa.Table]:
        while start < stop:
            while start >= self._stop:
                self._group += 1
                self._table = self._file.read_row_group(self._group)
                self._start, self._stop = self._stop, self._stop + self._table.num_rows
            end = min(stop, self._stop)
            yield self._table.slice(start - self._start, end - start)
            start = end
