"""Writing the archive's Parquet files: encodings, row groups, digests."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from arrowbank.durable import files
from arrowbank.durable.manifest import ArchiveFile
from arrowbank.errors import CorruptionError, CorruptRecordError
from arrowbank.schema import ARCHIVE_SCHEMA

__all__ = [
    "ROW_GROUP_BYTES", "TABLE_BYTES", "check_content", "check_file", "describe_file", "descriptor_digest",
    "file_digest", "is_of_bank", "row_group_end", "told_as_damage", "write_parquet", "write_tables",
]  # fmt: skip

ROW_GROUP_BYTES = 8 << 20
"""A row group is cut at the next iteration's first group once it has this much payload."""
TABLE_BYTES = 256 << 20
"""Rows are made and written in portions of about this many bytes, which bounds memory."""

_BLOCK = 1 << 22
_FOOTER_END = struct.Struct("<I4s")
"""The footer's length in bytes, and what every Parquet file ends with."""
_UNCHANGED = "Nothing was changed. Put the file back from a copy"
_SPLIT_COLUMNS = ("tokens.list.element", "logprobs.list.element", "reward", "advantage_override")
_DICTIONARY_COLUMNS = [
    "group_uid", "env_id", "problem_id", "prompt_hash", "split", "kind", "run_id", "writer", "rollout_status",
    "failure_reason", "outcome", "evict_reason", "metrics.list.element.key",
]  # fmt: skip
_WRITER_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": _DICTIONARY_COLUMNS,
    "column_encoding": dict.fromkeys(_SPLIT_COLUMNS, "BYTE_STREAM_SPLIT"),
    "write_page_index": True,
    "write_page_checksum": True,
    "store_schema": True,
}


def write_parquet(path: Path, tables: Iterable[pa.Table]) -> int:
    """Write tables to a new file and sync it; return the number of rows. A failure leaves no file.

    No row group takes in rows of two tables.
    """
    try:
        rows = write_tables(path, tables)
        files.fsync_file(path)
    except BaseException:
        files.discard(path)  # the writer finishes even a partial file with a valid footer
        raise
    return rows


def write_tables(where: Path | pa.NativeFile, tables: Iterable[pa.Table]) -> int:
    """Write tables as a file of the archive; return the number of rows."""
    rows = 0
    with pq.ParquetWriter(where, ARCHIVE_SCHEMA, **_WRITER_OPTIONS) as writer:
        for table in tables:
            for start, length in _row_groups(table):
                writer.write_table(table.slice(start, length), row_group_size=max(length, 1))
            rows += table.num_rows
    return rows


def is_of_bank(path: Path, bank_id: str) -> bool | None:
    """Whether a file is one of the bank's archive, by its footer, which has the least and the greatest ``run_id`` of
    each row group; None when it cannot be read.

    Only bytes are looked for: nothing vouches for such a file, and what parses a damaged footer may end the process.
    """
    wanted, before = bank_id.encode(), b""
    try:
        with files.reading(path) as descriptor:
            end = os.fstat(descriptor).st_size - _FOOTER_END.size
            length, magic = _FOOTER_END.unpack(os.pread(descriptor, _FOOTER_END.size, max(end, 0)))
            if magic != b"PAR1" or length > end:
                return False
            for at in range(end - length, end, _BLOCK):
                block = before + os.pread(descriptor, min(_BLOCK, end - at), at)
                if wanted in block:
                    return True
                before = block[-len(wanted) :]
    except (CorruptionError, FileNotFoundError, struct.error):
        return False
    except OSError:
        return None
    return False


def describe_file(path: Path, *, rows: int, expected: int, groups: int) -> ArchiveFile:
    """Return what the manifest is to say of a file just written, once it has the rows that went into it."""
    metadata = pq.read_metadata(path)
    if rows != expected or metadata.num_rows != expected:
        raise CorruptRecordError(path, f"{rows} rows were written where {expected} were read")
    digest, nbytes = file_digest(path)
    last_end = max((row_group_end(metadata.row_group(at)) for at in range(metadata.num_row_groups)), default=0)
    return ArchiveFile(name=path.name, rows=rows, groups=groups, nbytes=nbytes, last_end=last_end, digest=digest)


def row_group_end(group: Any) -> int:
    """An iteration count after which no training of a row group's rows ends, by its statistics.

    Raises ValueError where there are none.
    """
    end = 0
    for column in range(group.num_columns):
        chunk = group.column(column)
        if chunk.path_in_schema in ("consumed_iteration", "span"):
            is_one = chunk.physical_type == "INT64"  # asked for statistics of another type, Arrow ends the process
            told = chunk.statistics if is_one else None
            if told is None or not (told.has_null_count and (told.has_min_max or told.null_count == group.num_rows)):
                raise ValueError(f"its footer does not tell of {chunk.path_in_schema}")
            if told.null_count == group.num_rows:
                return 0
            end += told.max
    return end


def check_file(path: Path, file: ArchiveFile) -> None:
    """Raise CorruptionError unless a file is, byte for byte, the one that the manifest speaks of."""
    try:
        found = file_digest(path)
    except FileNotFoundError:
        raise CorruptionError(path, "the manifest names this file, and it is not there", hint=_UNCHANGED) from None
    if found != (file.digest, file.nbytes):
        raise CorruptionError(path, "its digest is not the one in the manifest", hint=_UNCHANGED)
    check_content(path, path, file)


def check_content(opened: Path | str, path: Path, file: ArchiveFile) -> None:
    """Raise CorruptionError unless a file, opened by whatever name, has the archive's columns and as many rows."""
    with told_as_damage(path):
        metadata = pq.read_metadata(opened)
        if (metadata.num_rows, metadata.schema.to_arrow_schema()) != (file.rows, ARCHIVE_SCHEMA):
            raise ValueError(f"{metadata.num_rows} rows where the manifest says {file.rows}, or other columns")


@contextlib.contextmanager
def told_as_damage(path: Path) -> Iterator[None]:
    """Turn what a Parquet reader says of a file that is not what it should be into CorruptionError.

    Such a file has the right digest: another program has made it.
    """
    try:
        yield
    except (pa.ArrowException, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise CorruptionError(path, f"not a file of the archive ({error})", hint=_UNCHANGED) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise CorruptionError(path, f"not a file of the archive ({error})", hint=_UNCHANGED) from error


def file_digest(path: Path) -> tuple[str, int]:
    """Return the xxh3-128 of a whole file, and its size in bytes."""
    with files.reading(path) as descriptor:
        return descriptor_digest(descriptor)


def descriptor_digest(descriptor: int) -> tuple[str, int]:
    digest, nbytes = xxhash.xxh3_128(), 0
    while block := os.pread(descriptor, _BLOCK, nbytes):
        digest.update(block)
        nbytes += len(block)
    return digest.hexdigest(), nbytes


def _row_groups(table: pa.Table) -> Iterator[tuple[int, int]]:
    """Cut a sorted table at iteration boundaries, once over ROW_GROUP_BYTES; yield start and length."""
    if not table.num_rows:
        yield 0, 0
        return
    iterations = table["consumed_iteration"].fill_null(-1).to_numpy()
    bytes_per_row = table.nbytes / table.num_rows
    start = 0
    for edge in (np.flatnonzero(iterations[1:] != iterations[:-1]) + 1).tolist():
        if (edge - start) * bytes_per_row >= ROW_GROUP_BYTES:
            yield start, edge - start
            start = edge
    yield start, table.num_rows - start
