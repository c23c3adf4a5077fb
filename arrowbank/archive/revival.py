"""Restoring below the archive's horizon: rolled-back rows leave the Parquet files and become live records again.

One commit: the files that hold such rows are replaced by one with their other rows, the rolled-back groups are written
to carried segments, the draws that they were in are every line's again, and the manifest says all of it at once.
Evicted rows stay: evictions hold on every line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from arrowbank.archive.carry import Carried, CarryWriter
from arrowbank.archive.merging import Source, merge
from arrowbank.archive.parquet import row_group_end
from arrowbank.archive.rows import group_slices, head_of, narrow
from arrowbank.archive.store import ArchiveStore
from arrowbank.durable.history import History
from arrowbank.durable.layout import CARRY, SegmentName
from arrowbank.durable.line import LineDraw
from arrowbank.durable.manifest import ArchiveFile
from arrowbank.errors import ReplayUnavailableError

__all__ = ["Revival", "prepare"]

_COLUMNS = [
    "group_uid", "consumed_iteration", "consumed_draw", "consumed_position", "draw_size",
    "draw_session", "span", "draw_state", "evict_reason",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Revival:
    """What has been made under tmp/, for one commit."""

    iteration: int
    replaced: tuple[str, ...]
    """Files of the archive that the commit takes out."""
    file: ArchiveFile | None
    """With the rows of these that stay."""
    carried: tuple[Carried, ...]
    draws: tuple[LineDraw, ...]
    """What has left the archive."""
    evicted: dict[str, str]
    """Groups of these that another line evicted, with the reason."""


def prepare(store: ArchiveStore, history: History, iteration: int) -> Revival:
    """Make what a restore of ``iteration`` needs. Nothing of the bank is changed yet.

    Memory: a row group and a portion of output, however much comes back.
    Raises ReplayUnavailableError, naming the iterations, when a draw's rows are not all there; CorruptionError;
    OSError.
    """
    affected = list(_affected(store, iteration))
    draws = _draws(affected)
    _require_whole(draws, history, iteration)
    replaced = tuple(source.file.name for source, _ in affected)
    carried = _carry(store, affected)
    file = merge([source for source, _ in affected], store.target())
    evicted = {
        row["group_uid"]: row["evict_reason"]
        for _, table in affected
        for row in table.select(["group_uid", "evict_reason"]).to_pylist()
        if row["evict_reason"] is not None
    }
    return Revival(iteration, replaced, file, carried, tuple(draw for draw, _ in draws.values()), evicted)


def _affected(store: ArchiveStore, iteration: int) -> Iterator[tuple[Source, pa.Table]]:
    """Yield the files that hold rolled-back rows, and what these say of their draws."""
    directory = store.paths.version(store.manifest.version)
    for file in store.manifest.files:
        if file.last_end <= iteration:
            continue
        source = Source.checked(directory, file)  # before anything that it says is believed
        table = _rolled_back(source.path, iteration)
        if table.num_rows:
            keep = np.ones(file.rows, np.bool_)
            keep[table["row"].to_numpy()] = False
            yield replace(source, keep=keep), table


def _rolled_back(path: Path, iteration: int) -> pa.Table:
    """Read the draws' columns of the rows whose training ends after ``iteration``."""
    source = pq.ParquetFile(path, page_checksum_verification=True)
    found, first = [], 0
    for index in range(source.num_row_groups):
        count = source.metadata.row_group(index).num_rows
        if row_group_end(source.metadata.row_group(index)) > iteration:
            rows = source.read_row_group(index, columns=_COLUMNS)
            ends = rows["consumed_iteration"].fill_null(0).to_numpy() + rows["span"].fill_null(0).to_numpy()
            at = np.flatnonzero((ends > iteration) & rows["consumed_iteration"].is_valid().to_numpy())
            found.append(rows.take(at).append_column("row", pa.array(first + at)))
        first += count
    empty = pa.table({name: [] for name in ("row", *_COLUMNS)})
    return pa.concat_tables(found) if found else empty


def _draws(affected: list[tuple[Source, pa.Table]]) -> dict[tuple[int, int], tuple[LineDraw, int]]:
    """Return each rolled-back draw, with those of its groups that were found, and how many it had."""
    members: dict[tuple[int, int], dict[int, str]] = {}
    facts: dict[tuple[int, int], dict[str, Any]] = {}
    for _, table in affected:
        for row in table.to_pylist():
            key = row["consumed_iteration"], row["consumed_draw"]
            members.setdefault(key, {})[row["consumed_position"]] = row["group_uid"]
            known = facts.setdefault(key, row)
            if row["draw_state"] is not None:
                known["draw_state"] = row["draw_state"]
    draws = {}
    for key, row in sorted(facts.items()):
        uids = tuple(members[key][position] for position in sorted(members[key]))
        draw = LineDraw(key[0], uids, row["span"], row["draw_state"], row["draw_session"], key[1])
        draws[key] = draw, row["draw_size"]
    return draws


def _require_whole(draws: dict[tuple[int, int], tuple[LineDraw, int]], history: History, iteration: int) -> None:
    """Raise unless every draw is there with all its groups, in the archive or in what the journal still says of it."""
    known = {(draw.iteration, draw.index): draw for line in history.lines.values() for draw in line.draws()}
    missing = set()
    for key, (draw, size) in draws.items():
        if key in known:
            whole = not {uid for uid in known[key].uids if uid in history.archived} - set(draw.uids)
        else:
            whole = len(draw.uids) == size
        if not whole:
            missing.add(draw.iteration)
    if missing:
        raise ReplayUnavailableError(
            f"restore({iteration}): of draws at iterations {sorted(missing)} not all rows are in the archive any more, "
            "so they cannot be replayed; restore a later checkpoint. Nothing was changed"
        )


def _carry(store: ArchiveStore, affected: list[tuple[Source, pa.Table]]) -> tuple[Carried, ...]:
    def name(iteration: int) -> SegmentName:
        return SegmentName(store.session, iteration, store.next_number(), CARRY)

    writer = CarryWriter(store.paths, store.tmp, store.manifest.bank_id, name)
    try:
        for source, _ in affected:
            assert source.keep is not None
            last = None
            for rows, batch in _wanted(source.path, ~source.keep):
                iteration = rows["consumed_iteration"][0].as_py()
                if iteration != last:
                    writer.may_cut()
                    last = iteration
                writer.add(batch, head_of(rows))
        writer.finish()
    finally:
        writer.close()
    return tuple(writer.done)


def _wanted(path: Path, wanted: NDArray[np.bool_]) -> Iterator[tuple[pa.Table, pa.RecordBatch]]:
    """Yield each group that is wanted: its rows, and these as its record has them."""
    source = pq.ParquetFile(path, page_checksum_verification=True)
    first = 0
    for index in range(source.num_row_groups):
        count = source.metadata.row_group(index).num_rows
        at = np.flatnonzero(wanted[first : first + count])
        first += count
        if len(at):
            rows = source.read_row_group(index).take(at)
            lean = narrow(rows).combine_chunks()
            for start, stop in group_slices(rows):
                (batch,) = lean.slice(start, stop - start).to_batches()
                yield rows.slice(start, stop - start), batch
