"""What a commit of the archive leaves after a crash, a failure or damage: each rollout once, inputs until then."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import polars
import pytest
from builders import token_group
from runs import archive_files, archive_three, archived_rows, kill, train

from arrowbank import RolloutBank, scan
from arrowbank.archive import compaction, compactor, store
from arrowbank.durable import files
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest
from arrowbank.errors import CorruptManifestError, CorruptRecordError


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
        assert archived_rows(path) == []
        again.restore(1)
        again.begin_iteration(2)
        again.checkpoint(2)
        again.begin_iteration(3)
        again.checkpoint(3, wait=True)
        assert sorted(archived_rows(path)) == [(uid, member) for member in range(4)]


def test_an_old_copy_of_the_manifest_is_told_from_a_crash_and_no_file_goes(path: Path) -> None:
    archive_three(path)
    old = (path / "MANIFEST.json").read_bytes()
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(3)
        train(bank, range(3, 6))
        bank.close(final=True)
    (path / "MANIFEST.json").write_bytes(old)
    before = archive_files(path)
    with pytest.raises(CorruptManifestError, match="an old copy"):
        RolloutBank.open(path)
    assert archive_files(path) == before


def test_a_compaction_that_failed_leaves_nothing_that_takes_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank, _ = one_settled(path)
    bank.append(token_group(2))  # to be carried on
    settled = bank.append(token_group(3))
    bank.mark_consumed([settled], 1)
    bank.begin_iteration(2)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_manifest", full)
        bank.checkpoint(2)
        bank._compactor.wait()
        assert "planted" in str(bank.stats().compaction_error)
        made = list((path / "tmp/s0001").iterdir())
        carried = [name for name in (path / "segments").iterdir() if "carry" in name.name]
        assert (made, carried, len(archive_files(path))) == ([], [], 1)
        patch.setattr(compaction, "describe_file", full)  # with a carried segment and a Parquet file under tmp/
        bank.begin_iteration(3)
        bank.checkpoint(3)
        bank._compactor.wait()
        assert list((path / "tmp/s0001").iterdir()) == []
    bank.close()
    assert len(archive_files(path)) == 2


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
        assert len(archived_rows(path)) == 4


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
    assert Counter(archived_rows(path)) == Counter({(uid, member): 1 for member in range(4)})
    bank.close()
    assert scan(path).to_arrow().num_rows == 4


def test_a_link_that_points_elsewhere_is_set_right_at_open(path: Path) -> None:
    archive_three(path)
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
    rewards = polars.read_parquet(path / "archive/*.parquet", columns=["group_uid", "reward"]).rows()
    assert dict(rewards)[uid] == 77.0
    assert len(archived_rows(path)) == 2


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
