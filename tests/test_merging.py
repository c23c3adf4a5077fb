"""Small Parquet files become one, sorted, with every row; their number stays about logarithmic."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import EVERY, build, token_group
from runs import train

from arrowbank import RolloutBank, scan
from arrowbank.archive import merging, parquet
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import ArchiveFile, read_manifest
from arrowbank.errors import CorruptionError


def file(rows: int, number: int = 0, nbytes: int = 1000) -> ArchiveFile:
    return ArchiveFile(name=f"c{number:06d}-s0001.parquet", rows=rows, groups=1, nbytes=nbytes, last_end=0, digest="")


def test_files_of_about_one_size_are_merged_once_there_are_enough_of_them() -> None:
    few = [file(70 + number, number) for number in range(merging.FAN_IN - 1)]
    assert merging.choose(few) == []
    assert merging.choose([*few, file(1000, 9)]) == []
    assert merging.choose([*few, file(100, 9)]) == [*few, file(100, 9)]
    large = [file(70, number, merging.LARGE_BYTES) for number in range(50)]
    assert merging.choose(large) == []


@pytest.mark.parametrize("rows", [1, 3, 40, 500])
def test_the_number_of_files_stays_logarithmic_and_so_does_what_is_rewritten(rows: int) -> None:
    listed: list[ArchiveFile] = []
    written = most = 0
    for number in range(4096):
        listed.append(file(rows, number))
        while chosen := merging.choose(listed):
            merged = sum(one.rows for one in chosen)
            listed = [one for one in listed if one not in chosen] + [file(merged, number)]
            written += merged
        most = max(most, len(listed))
    assert most <= 30
    assert written <= 5 * 4096 * rows


def run(path: Path, iterations: int) -> dict[str, Any]:
    """A run whose groups are drawn an iteration after they were made, with one evicted each."""
    made: dict[str, Any] = {}
    kinds = sorted(EVERY)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(iterations):
            bank.begin_iteration(at)
            groups = [build(kinds[(2 * at + number) % len(kinds)], seed=at + 1) for number in range(2)]
            uids = [bank.append(group) for group in groups]
            made |= dict(zip(uids, groups, strict=True))
            bank.append(token_group(1000 + at), evicted="not good")
            bank.mark_consumed(uids[::-1], at, state=b"%d" % at)
            bank.checkpoint(at + 1, wait=True)
    return made


def test_merged_rows_are_the_rows_that_were_there_sorted_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FAN_IN", 3)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 2000)
    monkeypatch.setattr(merging, "ROW_GROUP_BYTES", 2000)
    made = run(tmp_path / "bank", 40)
    manifest = read_manifest(BankPaths(tmp_path / "bank"))
    assert len(manifest.files) <= 2 * 6  # fewer than three in each tier up to 3^6 rows
    assert manifest.version > 10
    groups = {group.uid: group for group in scan(tmp_path / "bank").groups()}
    assert {uid: groups[uid] for uid in made} == made
    rows: Counter[tuple[str, int]] = Counter()
    for path in (tmp_path / "bank" / "archive").iterdir():
        table = pq.read_table(path, columns=["group_uid", "member_index", *merging._KEYS])
        rows.update(zip(table["group_uid"].to_pylist(), table["member_index"].to_pylist(), strict=True))
        keys = [
            tuple(float("inf") if part is None else part for part in row.values())
            for row in table.select(merging._KEYS).to_pylist()
        ]
        assert keys == sorted(keys)
    assert set(rows.values()) == {1}
    assert len({uid for uid, _ in rows}) == manifest_groups(tmp_path / "bank")


def manifest_groups(path: Path) -> int:
    return sum(one.groups for one in read_manifest(BankPaths(path)).files)


def test_a_glob_during_merges_and_a_restore_sees_every_archived_rollout_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two system calls that change names, ``archive/*.parquet`` holds no rollout twice and loses none."""
    import os

    monkeypatch.setattr(merging, "FAN_IN", 2)
    path = tmp_path / "bank"
    seen: list[int] = []

    def look() -> None:
        rows = Counter(
            row
            for file in sorted((path / "archive").iterdir())
            for row in pq.read_table(file, columns=["group_uid"])["group_uid"].to_pylist()
        )
        assert set(rows.values()) <= {4}
        seen.append(len(rows))

    for name in ("rename", "link", "unlink", "symlink"):
        real = getattr(os, name)

        def watched(*args: Any, real: Any = real, **options: Any) -> Any:
            result = real(*args, **options)
            if (path / "archive").exists():
                look()
            return result

        monkeypatch.setattr(os, name, watched)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(8):
            bank.begin_iteration(at)
            bank.mark_consumed([bank.append(token_group(at))], at)
            bank.checkpoint(at + 1, wait=True)
        assert seen == sorted(seen)
        assert seen[-1] >= 6
        bank.restore(2)
    assert seen[-1] == 2


def test_damaged_files_are_not_merged_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FAN_IN", 100)
    run(tmp_path / "bank", 5)
    monkeypatch.setattr(merging, "FAN_IN", 2)
    damaged = {}
    for victim in (tmp_path / "bank" / "archive").iterdir():
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        damaged[victim.name] = bytes(data)
    bank = RolloutBank.open(tmp_path / "bank", keep_checkpoints=1)
    bank.restore(5)
    bank.begin_iteration(5)
    bank.checkpoint(6)
    with pytest.raises(CorruptionError, match="digest"):
        bank.checkpoint(6, wait=True)
    with pytest.raises(CorruptionError):
        bank.close()
    left = {file.name: file.read_bytes() for file in (tmp_path / "bank" / "archive").iterdir()}
    assert damaged.items() <= left.items()


def test_a_damaged_file_is_told_and_the_others_are_merged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FAN_IN", 100)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        train(bank, range(2))
        bank._compactor.wait()
    (damaged,) = [name for name in (path / "archive").iterdir() if not name.name.startswith("c000000")][:1]
    with damaged.open("r+b") as opened:
        opened.seek(200)
        opened.write(b"\xff" * 8)
    monkeypatch.setattr(merging, "FAN_IN", 2)
    bank = RolloutBank.open(path, keep_checkpoints=1)
    bank.restore(2)
    train(bank, range(2, 6))
    bank._compactor.wait()
    assert damaged.name in str(bank.stats().compaction_error)
    listed = {file.name: file.groups for file in read_manifest(BankPaths(path)).files}
    assert damaged.name in listed
    assert len(listed) <= 3, "the four others are one or two"
    assert sum(listed.values()) == 2 * 5  # iterations 0 to 4, each with two groups
    with pytest.raises(CorruptionError, match=damaged.name):
        bank.close()


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    assert merging.merge([], tmp_path / "x.parquet") is None
    assert list(tmp_path.iterdir()) == []


def test_a_portion_is_cut_between_groups_when_an_iteration_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "TABLE_BYTES", 2000)
    monkeypatch.setattr(merging, "FAN_IN", 2)
    with RolloutBank.open(tmp_path / "bank", keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(2):
            bank.begin_iteration(at)
            bank.mark_consumed(bank.append_many([token_group(10 * at + n) for n in range(6)]), at)
            bank.checkpoint(at + 1, wait=True)
        bank.close(final=True)
    (merged,) = (one for one in (tmp_path / "bank" / "archive").iterdir() if pq.read_metadata(one).num_rows)
    metadata = pq.ParquetFile(merged)
    assert metadata.num_row_groups > 2
    for index in range(metadata.num_row_groups):
        uids = pa.Table.from_batches(metadata.iter_batches(row_groups=[index], columns=["group_uid"]))["group_uid"]
        assert set(Counter(uids.to_pylist()).values()) == {4}
