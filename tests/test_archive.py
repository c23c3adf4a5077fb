"""The archive is plain Parquet: each rollout once, for every engine, at any moment."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import xxhash
from builders import EVERY, build, empty_group, token_group
from runs import archive_files

from arrowbank import RolloutBank, scan
from arrowbank.archive import compaction, parquet
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest
from arrowbank.errors import CorruptionError
from arrowbank.schema import ARCHIVE_SCHEMA


def run(path: Path, iterations: int = 4, *, size: int = 3, final: bool = True) -> list[list[str]]:
    """A run whose draws take groups in another order than they were appended."""
    drawn = []
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(iterations):
            bank.begin_iteration(at)
            uids = bank.append_many([token_group(100 * at + number) for number in range(size)])
            drawn.append(uids[::-1])
            bank.mark_consumed(drawn[-1], at, state=b"state %d" % at)
            bank.checkpoint(at + 1, wait=True)
        bank.close(final=final)
    return drawn


def rows_of(path: Path) -> list[tuple[str, int]]:
    """(group_uid, member_index) of every row that a glob sees."""
    table = polars.read_parquet(path / "archive/*.parquet", columns=["group_uid", "member_index"])
    return table.rows()


def columns(path: Path, *names: str) -> list[tuple[Any, ...]]:
    table = polars.read_parquet(path / "archive/*.parquet", columns=list(names)).select(names)
    return table.rows()


# -- plain files


def test_every_engine_reads_each_rollout_once(path: Path) -> None:
    drawn = run(path)
    glob = f"{path}/archive/*.parquet"
    count = 4 * 3 * 4
    assert polars.read_parquet(glob).height == count
    assert polars.scan_parquet(glob).select(polars.len()).collect().item() == count
    assert len(pd.read_parquet(path / "archive")) == count
    assert pyarrow.dataset.dataset(path / "archive").count_rows() == count
    assert pq.read_table(path / "archive").num_rows == count
    with duckdb.connect() as connection:
        distinct = "SELECT count(*), count(DISTINCT (group_uid, member_index)) FROM read_parquet(?)"
        assert connection.execute(distinct, [glob]).fetchone() == (count, count)
    found = rows_of(path)
    assert max(Counter(found).values()) == 1
    assert {uid for uid, _ in found} == {uid for uids in drawn for uid in uids}


def test_regular_rows_have_mask_and_logprobs_as_long_as_their_tokens(path: Path) -> None:
    run(path)
    lengths = polars.read_parquet(path / "archive/*.parquet").select(
        polars.col("tokens", "generation_mask", "logprobs").list.len(), "num_tokens"
    )
    assert all(len(set(row)) == 1 for row in lengths.rows())


def test_a_new_bank_has_one_file_with_every_column_and_no_row(path: Path) -> None:
    with RolloutBank.open(path):
        (file,) = archive_files(path)
        assert pq.read_schema(file).equals(ARCHIVE_SCHEMA)
        assert polars.read_parquet(path / "archive/*.parquet").height == 0
        assert len(pd.read_parquet(path / "archive")) == 0
        assert os.readlink(path / "archive") == ".archive/v000001"
        with duckdb.connect() as connection:
            count = connection.execute("SELECT count(*) FROM read_parquet(?)", [f"{path}/archive/*.parquet"])
            assert count.fetchone() == (0,)


def test_files_have_page_indexes_and_checksums_and_the_digest_of_the_manifest(path: Path) -> None:
    run(path)
    listed = read_manifest(BankPaths(path)).files
    assert {file.name for file in listed} | {"c000000-s0000.parquet"} == {file.name for file in archive_files(path)}
    for entry in listed:
        file = path / "archive" / entry.name
        assert (file.stat().st_size, xxhash.xxh3_128_hexdigest(file.read_bytes())) == (entry.nbytes, entry.digest)
        metadata = pq.read_metadata(file)
        assert (metadata.num_rows, metadata.num_columns) == (entry.rows, pq.read_metadata(file).num_columns)
        column = metadata.row_group(0).column(0)
        assert column.has_column_index and column.has_offset_index
        assert pq.read_table(file, page_checksum_verification=True).num_rows == entry.rows


def test_a_flipped_bit_in_a_page_is_caught_by_its_checksum(path: Path) -> None:
    run(path, 1)
    file = archive_files(path)[1]
    metadata = pq.read_metadata(file).row_group(0)
    at = next(
        index for index in range(metadata.num_columns) if metadata.column(index).path_in_schema.startswith("tokens")
    )
    column = metadata.column(at)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="CRC checksum"):
        scan(path, verify=False).to_arrow()


def test_rows_are_sorted_by_consumption_and_evicted_ones_come_last(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        uids = bank.append_many([token_group(number) for number in range(8)])
        bank.evict([uids[0]], "first of all")
        bank.mark_consumed([uids[5], uids[1]], 0)
        bank.mark_consumed([uids[2], uids[7]], 1)
        bank.mark_consumed([uids[6]], 1)
        bank.mark_consumed([uids[4], uids[3]], 2)
        bank.begin_iteration(3)
        bank.checkpoint(3, wait=True)
    order = ("consumed_iteration", "consumed_draw", "consumed_position", "member_index")
    rows = columns(path, "group_uid", *order)
    assert [uid for uid, *_, member in rows if member == 0] == [uids[at] for at in (5, 1, 2, 7, 6, 4, 3, 0)]
    keys = [tuple(9 if key is None else key for key in row[1:]) for row in rows]
    assert keys == sorted(keys)


def test_what_the_line_knows_of_a_group_stands_in_its_rows(path: Path) -> None:
    drawn = run(path, 2)
    names = (
        "group_uid",
        "consumed_iteration",
        "consumed_draw",
        "consumed_position",
        "draw_size",
        "draw_session",
        "span",
    )
    found = {row[0]: row[1:] for row in columns(path, *names)}
    for at, uids in enumerate(drawn):
        for position, uid in enumerate(uids):
            assert found[uid] == (at, 0, position, 3, 1, 1)
    assert {row[0] for row in columns(path, "outcome")} == {"consumed"}
    assert {row[0] for row in columns(path, "run_id")} == {read_manifest(BankPaths(path)).bank_id}


def test_a_draws_state_stands_on_its_first_row_only(path: Path) -> None:
    drawn = run(path, 3)
    states = [row for row in columns(path, "group_uid", "member_index", "draw_state") if row[2] is not None]
    assert states == [(uids[0], 0, b"state %d" % at) for at, uids in enumerate(drawn)]


def test_evicted_groups_have_their_reason_and_other_splits_no_outcome(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        at_append = bank.append(token_group(1), evicted="rejected")
        later = bank.append(token_group(2))
        held_out = bank.append(token_group(3), split="eval")
        nothing = bank.append(empty_group(4), evicted="empty")
        bank.evict([later], "too old")
        bank.begin_iteration(1)
        bank.checkpoint(1, wait=True)
        assert bank.stats().live_groups == 0
    found = {row[0]: row[1:] for row in columns(path, "group_uid", "split", "outcome", "evict_reason", "group_size")}
    assert found == {
        at_append: ("train", "evicted", "rejected", 4),
        later: ("train", "evicted", "too old", 4),
        held_out: ("eval", None, None, 4),
        nothing: ("train", "evicted", "empty", 0),
    }
    with RolloutBank.open(path) as bank:
        assert bank.restore(1).pending == {}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_group_of_every_kind_is_archived_and_comes_back_bit_for_bit(path: Path, name: str) -> None:
    group = build(name)
    with RolloutBank.open(path) as bank:
        bank.append(group, evicted="to the archive with it")
        bank.close(final=True)
    assert list((path / "segments").iterdir()) == []
    assert list(scan(path).groups()) == [group]


def test_lag_is_counted_from_the_oldest_policy_of_the_group(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        group = token_group(1, policy_versions=[(0, 0, 3), (0, 4, 5)])
        group.rollouts[0].policy_versions = None
        uids = [bank.append(group), bank.append(token_group(2))]
        bank.mark_consumed(uids, 7)
        bank.begin_iteration(8)
        bank.checkpoint(8, wait=True)
    assert dict(columns(path, "group_uid", "lag")) == {uids[0]: 4, uids[1]: None}


def test_row_groups_are_cut_at_iterations_once_they_are_large(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    monkeypatch.setattr(compaction, "TABLE_BYTES", 7000)  # two groups a portion
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        uids = bank.append_many([token_group(number) for number in range(6)])
        for at in range(3):
            bank.mark_consumed(uids[2 * at : 2 * at + 2], at)
        bank.begin_iteration(3)
        bank.checkpoint(3, wait=True)
    metadata = pq.read_metadata(archive_files(path)[1])
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [8, 8, 8]


def test_what_is_settled_is_archived_and_its_pending_neighbours_are_carried_on(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=2) as bank:
        bank.restore(0)
        first, second = bank.append_many([token_group(1), token_group(2)])
        bank.mark_consumed([first], 0)
        bank.begin_iteration(1)
        third = bank.append(token_group(3))
        bank.mark_consumed([third], 1)
        bank.begin_iteration(2)
        bank.checkpoint(1)
        bank.checkpoint(2, wait=True)
        assert {uid for uid, _ in rows_of(path)} == {first}  # third is settled by the last checkpoint only
        (carried,) = (name for name in BankPaths(path).segment_names() if name.is_carried)
        assert carried.iteration == 0
        assert read_manifest(BankPaths(path)).carried == (str(carried),)
        bank.evict([second], "x")
        bank.begin_iteration(3)
        bank.checkpoint(3, wait=True)
        assert dict(columns(path, "group_uid", "collected_iteration")) == {first: 0, second: 0, third: 1}
        assert read_manifest(BankPaths(path)).carried == ()
