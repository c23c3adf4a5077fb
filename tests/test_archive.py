"""The archive is plain Parquet: each rollout once, for every engine, at any moment."""

from __future__ import annotations

import json
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
from runs import archived_rows, kill

from arrowbank import RolloutBank, scan
from arrowbank.archive import compaction, compactor, parquet, store
from arrowbank.durable import files
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest
from arrowbank.errors import CorruptionError, CorruptRecordError
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


def archive_files(path: Path) -> list[Path]:
    return sorted((path / "archive").iterdir())


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


# -- commits and crashes


def task_of(bank: RolloutBank, settled_by: int) -> compaction.Task:
    task = bank._archivist._plan(settled_by)
    assert task is not None
    return task


def one_settled(path: Path) -> tuple[RolloutBank, str]:
    bank = RolloutBank.open(path, keep_checkpoints=2)
    bank.restore(0)
    uid = bank.append(token_group(1))
    bank.mark_consumed([uid], 0)
    bank.begin_iteration(1)
    bank.checkpoint(1, wait=True)
    return bank, uid


def test_a_task_is_picklable(path: Path) -> None:
    import pickle

    bank, _ = one_settled(path)
    task = task_of(bank, 1)
    assert pickle.loads(pickle.dumps(task)) == task
    bank.close()


def test_a_crash_before_publishing_leaves_nothing(path: Path) -> None:
    bank, uid = one_settled(path)
    compaction.execute(task_of(bank, 1))
    with kill(path) as again:
        assert list((path / "tmp").rglob("*.parquet")) == []
        assert len(archive_files(path)) == 1
        assert again.restore(0).draws[0].groups[0].uid == uid


def test_a_crash_between_publishing_and_the_manifest_shows_nothing_twice(path: Path) -> None:
    bank, uid = one_settled(path)
    made = compaction.execute(task_of(bank, 1))
    assert made.file is not None
    files.publish(bank._claim.tmp / made.file.name, path / "archive" / made.file.name)
    assert scan(path).to_arrow()["group_uid"].to_pylist() == [uid] * 4  # follows the manifest
    with kill(path) as again:
        assert len(archive_files(path)) == 1
        assert rows_of(path) == []
        again.restore(1)
        again.begin_iteration(2)
        again.checkpoint(2)
        again.begin_iteration(3)
        again.checkpoint(3, wait=True)
        assert sorted(rows_of(path)) == [(uid, member) for member in range(4)]


def test_a_crash_after_the_manifest_keeps_the_archived_rows_only(path: Path) -> None:
    bank, uid = one_settled(path)
    task = task_of(bank, 1)
    made = compaction.execute(task)
    change = store.Change(file=made.file, retired=task.segments, archived_through=1)
    bank._store.commit(change, lambda: bank._archivist._roll(task, made))
    assert [file.name for file in (path / "segments").iterdir()] == [str(name) for name in task.segments]
    assert scan(path).to_arrow()["group_uid"].to_pylist() == [uid] * 4
    with kill(path) as again:
        assert list((path / "segments").iterdir()) == []
        restored = again.restore(1)
        assert (restored.draws, restored.pending) == ([], {})
        assert len(rows_of(path)) == 4


def test_inputs_are_unlinked_one_commit_later_and_named_until_then(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(3):
            bank.begin_iteration(at)
            bank.mark_consumed([bank.append(token_group(at))], at)
            bank.checkpoint(at + 1, wait=True)
            there = {int(file.name[:8]) for file in (path / "segments").iterdir()}
            retired = {int(name[:8]) for name in read_manifest(BankPaths(path)).retired}
            assert there == ({at - 1, at} if at else {0})  # the last one is written still
            assert retired == {0: set(), 1: {0}, 2: {0, 1}}[at]


def test_a_failed_manifest_is_committed_by_the_next_run_and_nothing_is_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, uid = one_settled(path)
    write = store.write_manifest

    def full(*_: Any) -> None:
        raise OSError(28, "planted")

    monkeypatch.setattr(store, "write_manifest", full)
    bank.begin_iteration(2)
    bank.checkpoint(2)
    with pytest.raises(OSError, match="planted"):
        bank.checkpoint(2, wait=True)
    monkeypatch.setattr(store, "write_manifest", write)
    bank.begin_iteration(3)
    bank.checkpoint(3, wait=True)
    assert Counter(rows_of(path)) == Counter({(uid, member): 1 for member in range(4)})
    bank.close()
    assert scan(path).to_arrow().num_rows == 4


def test_a_link_that_points_elsewhere_is_set_right_at_open(path: Path) -> None:
    run(path, 1)
    (path / "archive").unlink()
    os.symlink("/etc", path / "archive")
    with RolloutBank.open(path):
        assert os.readlink(path / "archive") == ".archive/v000001"


def test_of_a_damaged_segment_the_good_groups_are_archived_and_the_damage_is_in_quarantine(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        uids = bank.append_many([token_group(number) for number in range(3)])
        bank.mark_consumed(uids, 0)
    (segment,) = (path / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        report = bank.restore(1).report
        assert (report.lost_records, report.quarantined, len(report.corrupt)) == (1, 1, 1)
        bank.begin_iteration(1)
        bank.checkpoint(2, wait=True)
        bank.close(final=True)
    assert {uid for uid, _ in archived_rows(path)} == {uids[0], uids[2]}
    (note,) = (path / "quarantine").glob("*.json")
    said = json.loads(note.read_text())
    assert (said["file"], said["uid"], said["records"]) == (segment.name, uids[1], 1)
    kept = note.with_suffix(".bytes").read_bytes()
    assert kept == data[said["offset"] : said["offset"] + said["length"]]


def test_damage_that_comes_after_open_stops_compaction_and_loses_nothing(path: Path) -> None:
    bank, _ = one_settled(path)
    (segment,) = (path / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[len(data) - 100] ^= 1
    segment.write_bytes(data)
    bank.begin_iteration(2)
    bank.checkpoint(2)
    with pytest.raises(CorruptRecordError, match="cannot be read back"):
        bank.checkpoint(2, wait=True)
    with pytest.raises(CorruptRecordError):
        bank.close()
    assert segment.read_bytes() == data


def test_of_a_group_that_was_appended_again_the_second_record_is_archived(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fdatasync = os.fdatasync

    def written_and_failed(descriptor: int) -> None:
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        fdatasync(descriptor)
        raise OSError(5, "planted")

    with RolloutBank.open(path) as bank:
        group = token_group(1, members=1)
        bank.append(token_group(2, members=1), evicted="before it")
        monkeypatch.setattr(os, "fdatasync", written_and_failed)
        with pytest.raises(OSError, match="planted"):
            bank.append(group)
        group.rollouts[0].reward = 77.0
        uid = bank.append(group, evicted="x")
        bank.close(final=True)
    assert dict(columns(path, "group_uid", "reward"))[uid] == 77.0
    assert len(rows_of(path)) == 2


def test_a_partial_file_is_never_published(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, _ = one_settled(path)

    def interrupted(*_: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(compaction, "archive_rows", interrupted)
    bank.begin_iteration(2)
    bank.checkpoint(2)
    bank._compactor.wait()
    assert "planted" in str(bank.stats().compaction_error)
    assert len(archive_files(path)) == 1
    assert list((path / "tmp").rglob("*.parquet")) == []
    assert compactor.execute is compaction.execute
    with pytest.raises(MemoryError):
        bank.close()
