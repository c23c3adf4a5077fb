"""``scan``: one view of everything a bank holds, archived and live, each rollout once. Reading only.

The archived part is read from the files that the manifest names, lazily where the engine can; the live part (pending,
planned, and settled but not archived) from segments, in memory. A trainer may be writing meanwhile: when the manifest
has changed, or a file is gone, by the time everything is open, the view is made again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from arrowbank.archive.compaction import Fate, archive_rows, fates
from arrowbank.archive.rows import group_slices, head_of, narrow
from arrowbank.codec import StoredGroup, decode_group
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import Manifest, read_manifest
from arrowbank.durable.recovery import read_state
from arrowbank.errors import CorruptionError
from arrowbank.schema import ARCHIVE_SCHEMA
from arrowbank.types import RolloutGroup

if TYPE_CHECKING:
    import polars

__all__ = ["BankView", "scan"]

_TRIES = 20


@dataclass(frozen=True)
class BankView:
    """The rows of a bank as they were at one moment: one row a rollout, ``ARCHIVE_SCHEMA``'s columns."""

    files: tuple[Path, ...]
    """Parquet files of the archived rows, as they were named when the view was made."""
    live: pa.Table
    """Rows that are not archived: ``outcome`` is null for those that are pending or planned."""
    _held: _HeldFiles = field(repr=False, compare=False)

    def to_arrow(self) -> pa.Table:
        """Return all rows in memory: those of each file in order of consumption, then the live ones likewise."""
        tables = [
            pq.read_table(file, schema=ARCHIVE_SCHEMA, page_checksum_verification=True) for file in self._held.paths
        ]
        return pa.concat_tables([*tables, self.live])

    def to_polars(self) -> polars.LazyFrame:
        """Return a lazy frame; of the archived rows only the columns that a query asks for are read."""
        try:
            import polars  # optional
            from polars.io.plugins import register_io_source
        except ModuleNotFoundError as error:
            error.add_note("to_polars needs polars: pip install 'arrowbank[analysis]'; to_arrow does without")
            raise
        live = polars.from_arrow(self.live)
        assert isinstance(live, polars.DataFrame)
        if not self._held.paths:
            return live.lazy()
        archived = polars.scan_parquet(self._held.paths)
        # The plan, and every one made of it, holds on to the files through the source's function.
        kept = register_io_source(self._held.read_polars, schema=archived.collect_schema(), is_pure=True)
        return polars.concat([kept, live.lazy()])

    def groups(self) -> Iterator[RolloutGroup]:
        """Yield the groups, each once, in the order of ``to_arrow``."""
        for file in self._held.paths:
            source = pq.ParquetFile(file, page_checksum_verification=True)
            for index in range(source.num_row_groups):
                yield from _groups_of(source.read_row_group(index))
        yield from _groups_of(self.live)


class _HeldFiles:
    """Open files: a merge may take their names away while somebody looks at a view."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._descriptors: list[int] = []
        for file in files:
            self._descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        self.paths = [f"/proc/self/fd/{descriptor}" for descriptor in self._descriptors]
        """For any reader in this process, which opens them anew."""

    def read_polars(
        self, columns: list[str] | None, predicate: polars.Expr | None, n_rows: int | None, _: int | None
    ) -> Iterator[polars.DataFrame]:
        """Yield each file's rows, as far as a query asks for them."""
        import polars  # optional, and there: polars itself calls this

        for path in self.paths:
            rows = polars.scan_parquet(path)
            rows = rows if predicate is None else rows.filter(predicate)
            rows = rows if columns is None else rows.select(columns)
            found = (rows if n_rows is None else rows.head(n_rows)).collect()
            if n_rows is not None:
                n_rows -= found.height
            yield found

    def __del__(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def scan(path: str | Path, *, live: bool = True) -> BankView:
    """Return a view of the bank at ``path``, which may be in use; nothing is written.

    ``live=False`` leaves out what is not archived yet. Needs no lock.
    Raises: BankNotFoundError, CorruptManifestError, FormatVersionError, SchemaMismatchError, CorruptionError.
    """
    paths = BankPaths(Path(path))
    paths.refuse_links()
    for attempt in range(_TRIES):
        manifest = read_manifest(paths)
        try:
            view = _view(paths, manifest, live=live)
        except (FileNotFoundError, CorruptionError):
            if attempt + 1 == _TRIES or read_manifest(paths).commit == manifest.commit:
                raise
            continue
        if read_manifest(paths).commit == manifest.commit:
            return view
    return view


def _view(paths: BankPaths, manifest: Manifest, *, live: bool) -> BankView:
    directory = paths.version(manifest.version)
    names = tuple(directory / file.name for file in manifest.files)
    held = _HeldFiles(names)
    return BankView(names, _live_rows(paths, manifest) if live else ARCHIVE_SCHEMA.empty_table(), held)


def _live_rows(paths: BankPaths, manifest: Manifest) -> pa.Table:
    state = read_state(paths, manifest)
    if not state.groups:
        return ARCHIVE_SCHEMA.empty_table()
    newest = max(state.history.lines, default=None)
    line = None if newest is None else state.history.lines[newest]
    known = fates(state.history, line, line.last_checkpoint if line else 0, state.groups)
    groups = sorted(state.groups.values(), key=lambda group: (known.get(group.uid, Fate()).order, group.age))
    return archive_rows(groups, known, manifest.bank_id)


def _groups_of(rows: pa.Table) -> Iterator[RolloutGroup]:
    """Decode rows in which each group's rows stand together."""
    lean = narrow(rows)
    for start, stop in group_slices(rows):
        batch = lean.slice(start, stop - start).combine_chunks().to_batches()[0]
        yield StoredGroup.of(head_of(rows.slice(start, stop - start)), partial(decode_group, batch))
