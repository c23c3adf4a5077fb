"""Writing the archive's Parquet files: encodings, row groups, digests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from arrowbank.durable.manifest import ArchiveFile
from arrowbank.errors import CorruptRecordError
from arrowbank.schema import ARCHIVE_SCHEMA

__all__ = ["ROW_GROUP_BYTES", "TABLE_BYTES", "describe_file", "file_digest", "write_parquet"]

ROW_GROUP_BYTES = 8 << 20
"""A row group is cut at the next iteration's first group once it has this much payload."""
TABLE_BYTES = 256 << 20
"""Rows are made and written in portions of about this many bytes, which bounds memory."""

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
    rows = 0
    try:
        with pq.ParquetWriter(path, ARCHIVE_SCHEMA, **_WRITER_OPTIONS) as writer:
            for table in tables:
                for start, length in _row_groups(table):
                    writer.write_table(table.slice(start, length), row_group_size=max(length, 1))
                rows += table.num_rows
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)  # the writer finishes even a partial file with a valid footer
        raise
    return rows


def describe_file(path: Path, *, rows: int, expected: int, groups: int) -> ArchiveFile:
    """Return what the manifest is to say of a file just written, once it has the rows that went into it."""
    if rows != expected or pq.read_metadata(path).num_rows != expected:
        raise CorruptRecordError(path, f"{rows} rows were written where {expected} were read")
    digest, nbytes = file_digest(path)
    return ArchiveFile(name=path.name, rows=rows, groups=groups, nbytes=nbytes, digest=digest)


def file_digest(path: Path) -> tuple[str, int]:
    """Return the xxh3-128 of a whole file, and its size in bytes."""
    digest, nbytes = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
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
