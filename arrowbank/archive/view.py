"""``scan``: one view of everything a bank holds, archived and live, each rollout once. Reading only.

The archived part is read from the files that the manifest names, lazily where the engine can; the live part (pending,
planned, and settled but not archived) from segments, in memory. A trainer may be writing meanwhile: when the manifest
has changed, or a file is gone, by the time everything is open, which takes a moment, all is opened again.

Nothing damaged is returned as data: records are sealed, and each archived file is compared with its digest in the
manifest before its first use, since some flipped bits pass Parquet's page checksums, which not every engine looks at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from arrowbank.archive.compaction import Fate, archive_rows, fates
from arrowbank.archive.healing import drop_undecodable
from arrowbank.archive.parquet import check_content, descriptor_digest, told_as_damage
from arrowbank.archive.rows import group_slices, head_of, narrow
from arrowbank.codec import StoredGroup, decode_group
from arrowbank.durable.files import open_regular
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import ArchiveFile, Manifest, read_manifest
from arrowbank.durable.recovery import LiveFiles, State, map_live_files, read_state
from arrowbank.durable.segment import describe
from arrowbank.errors import ArrowbankError, CorruptionError, CorruptRecordError
from arrowbank.schema import ARCHIVE_SCHEMA
from arrowbank.types import RolloutGroup, Rollouts

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars

__all__ = ["BankView", "scan"]

_PATIENCE_S = 30.0
"""A view of a small bank is made in milliseconds, and a trainer commits once in minutes."""
_RESTORE = "Put the file back from a copy"


@dataclass(frozen=True)
class BankView:
    """The rows of a bank as they were at one moment: one row a rollout, ``ARCHIVE_SCHEMA``'s columns.

    Each method raises CorruptionError when it meets a damaged file of the archive, unless ``scan`` was told not to
    verify: then damage is whatever the reader says, or goes unseen.
    """

    files: tuple[Path, ...]
    """Parquet files of the archived rows, as they were named when the view was made."""
    live: pa.Table
    """Rows that are not archived: ``outcome`` is null for those that are pending or planned."""
    damage: tuple[str, ...]
    """One line for each damaged place of the segments and journals, whose groups are not here. A kill leaves torn
    ones, which the next open by a trainer takes away; a record that is being written looks torn, too."""
    _held: _HeldFiles = field(repr=False, compare=False)

    def to_arrow(self) -> pa.Table:
        """Return all rows in memory: those of each file in order of consumption, then the live ones likewise."""
        tables = []
        for path, _ in self._held.verified():
            with self._told():
                tables.append(pq.read_table(path, schema=ARCHIVE_SCHEMA, page_checksum_verification=True))
        return pa.concat_tables([*tables, self.live])

    def to_polars(self) -> polars.LazyFrame:
        """Return a lazy frame; of the archived rows only the columns that a query asks for are read.

        Files are verified when it is collected, which then raises what is said of damaged ones.
        """
        try:
            import polars  # optional
            from polars.io.plugins import register_io_source
        except ModuleNotFoundError as error:
            error.add_note("to_polars needs polars: pip install 'arrowbank[analysis]'; to_arrow does without")
            raise
        live = polars.from_arrow(self.live)
        assert isinstance(live, polars.DataFrame)
        if not self.files:
            return live.lazy()
        # The plan, and every one made of it, holds on to the files through the source's function.
        archived = register_io_source(self._held.read_polars, schema=live.schema, is_pure=True)
        return polars.concat([archived, live.lazy()])

    def to_pandas(self) -> pandas.DataFrame:
        """Return all rows in memory, with the types that ``pandas.read_parquet`` gives.

        There integers are floats in a column with nulls, which is not exact beyond 2**53; ``to_arrow`` always is.
        """
        rows = self.to_arrow()
        try:
            frame: pandas.DataFrame = rows.to_pandas()  # which imports pandas, if it is there
        except ModuleNotFoundError as error:
            error.add_note("to_pandas needs pandas: pip install 'arrowbank[analysis]'; to_arrow does without")
            raise
        return frame

    def to_duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """Return a relation over all rows, held in memory; on DuckDB's default connection when none is given."""
        try:
            import duckdb  # optional
        except ModuleNotFoundError as error:
            error.add_note("to_duckdb needs duckdb: pip install 'arrowbank[analysis]'; to_arrow does without")
            raise
        return (duckdb if connection is None else connection).from_arrow(self.to_arrow())

    def groups(self) -> Iterator[RolloutGroup]:
        """Yield the groups, each once, in the order of ``to_arrow``."""
        for path, _ in self._held.verified():
            with self._told():
                source = pq.ParquetFile(path, page_checksum_verification=True)
            for index in range(source.num_row_groups):
                with self._told():
                    rows = source.read_row_group(index)
                yield from self._groups_of(rows)
        yield from self._groups_of(self.live)

    def _groups_of(self, rows: pa.Table) -> Iterator[RolloutGroup]:
        """Decode rows in which each group's rows stand together."""
        with self._told():
            lean = narrow(rows)
        for start, stop in group_slices(rows):
            with self._told():
                batch = lean.slice(start, stop - start).combine_chunks().to_batches()[0]
                head = head_of(rows.slice(start, stop - start))
            yield StoredGroup.of(head, partial(self._decoded, batch))

    def _decoded(self, batch: pa.RecordBatch) -> Rollouts:
        with self._told():
            return decode_group(batch)

    def _told(self) -> AbstractContextManager[None]:
        """What is whole, and still no rows of ours, was written by somebody else's program."""
        return told_as_damage(self.files[0].parent if self.files else Path("the live rows"))


class _HeldFiles:
    """Open files: a merge may take their names away while somebody looks at a view."""

    def __init__(self, directory: Path, files: Iterable[ArchiveFile], *, verify: bool) -> None:
        self._held: dict[int, tuple[Path, ArchiveFile]] = {}
        for file in files:
            path = directory / file.name
            try:
                descriptor = open_regular(path)
            except (FileNotFoundError, NotADirectoryError):
                reason = "the manifest names this file, and it is not there"
                raise CorruptionError(path, reason, hint=_RESTORE) from None
            self._held[descriptor] = path, file
        self._unverified = set(self._held) if verify else set()

    def verified(self) -> Iterator[tuple[str, ArchiveFile]]:
        """Yield each file, once its digest is right, with a path for any reader in this process, which opens it anew.

        Raises CorruptionError.
        """
        for descriptor, (path, file) in self._held.items():
            if descriptor in self._unverified:
                if descriptor_digest(descriptor) != (file.digest, file.nbytes):
                    hint = f"{_RESTORE}, or scan with verify=False for what can still be read"
                    raise CorruptionError(path, "its digest is not the one in the manifest", hint=hint)
                check_content(f"/proc/self/fd/{descriptor}", path, file)
                self._unverified.discard(descriptor)
            yield f"/proc/self/fd/{descriptor}", file

    def read_polars(
        self, columns: list[str] | None, predicate: polars.Expr | None, n_rows: int | None, _: int | None
    ) -> Iterator[polars.DataFrame]:
        """Yield each file's rows, as far as a query asks for them."""
        import polars  # optional, and there: polars itself calls this

        for path, file in self.verified():
            rows = polars.scan_parquet(path)
            if n_rows is not None:  # counted before the predicate, as polars does
                rows, n_rows = rows.head(n_rows), max(n_rows - file.rows, 0)
            rows = rows if predicate is None else rows.filter(predicate)
            try:
                yield (rows if columns is None else rows.select(columns)).collect()
            except polars.exceptions.PolarsError as error:
                try:
                    polars.read_parquet(path)
                except polars.exceptions.PolarsError:
                    real = next(place for place, known in self._held.values() if known is file)
                    raise CorruptionError(real, f"polars cannot read it ({error})", hint=_RESTORE) from error
                raise  # of the query, then
            if n_rows == 0:
                return

    def __reduce__(self) -> NoReturn:
        raise TypeError("a view holds open files of this process; scan the bank again where it is needed")

    def __del__(self) -> None:
        while self._held:
            os.close(self._held.popitem()[0])


def scan(path: str | Path, *, live: bool = True, verify: bool = True) -> BankView:
    """Return a view of the bank at ``path``, which may be in use; nothing is written.

    ``live=False`` leaves out what is not archived yet. ``verify=False`` spares reading each archived file whole, once
    a view, for its digest, as may be wanted of a very large archive. Needs no lock.
    Raises: BankNotFoundError, CorruptManifestError, FormatVersionError, SchemaMismatchError, CorruptionError;
    ArrowbankError when the archive never stood still long enough.
    """
    paths = BankPaths.at(path)
    paths.refuse_strangers(link=False)
    until = time.monotonic() + _PATIENCE_S
    files: LiveFiles | None = None
    while True:
        manifest = read_manifest(paths)
        try:
            files = map_live_files(paths, manifest, files) if live else None
            held = _HeldFiles(paths.version(manifest.version), manifest.files, verify=verify)
        except (FileNotFoundError, CorruptionError):
            if read_manifest(paths).commit == manifest.commit:
                raise
        else:
            if files is None or read_manifest(paths).commit == manifest.commit:
                break  # what is held stays as it is, whatever a trainer does from now on
        if time.monotonic() > until:
            raise ArrowbankError(
                f"{paths.root}: the archive changed at each look for {_PATIENCE_S:g} s; scan it again, "
                "when its trainer commits less often"
            )
    names = tuple(paths.version(manifest.version) / file.name for file in manifest.files)
    rows, damage = (ARCHIVE_SCHEMA.empty_table(), ()) if files is None else _live_rows(paths, manifest, files)
    return BankView(names, rows, damage, held)


def _live_rows(paths: BankPaths, manifest: Manifest, files: LiveFiles) -> tuple[pa.Table, tuple[str, ...]]:
    """Return the rows that are not archived, and what is damaged."""
    state = read_state(paths, manifest, files=files)
    try:
        rows = _rows_of(state, manifest)
    except CorruptRecordError:
        drop_undecodable(state, state.segment_bytes, lambda group: archive_rows([group], {}, manifest.bank_id))
        rows = _rows_of(state, manifest)
    return rows, tuple(map(describe, state.damage))


def _rows_of(state: State, manifest: Manifest) -> pa.Table:
    if not state.groups:
        return ARCHIVE_SCHEMA.empty_table()
    newest = max(state.history.lines, default=None)
    line = None if newest is None else state.history.lines[newest]
    known = fates(state.history, line, line.last_checkpoint if line else 0, state.groups)
    groups = sorted(state.groups.values(), key=lambda group: (known.get(group.uid, Fate()).order, group.age))
    return archive_rows(groups, known, manifest.bank_id)
