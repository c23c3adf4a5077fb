"""Restores below the archive's horizon: rolled-back rows leave the Parquet files and are live again, in one commit."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from builders import EVERY, build, token_group

from arrowbank import ReplayUnavailableError, RolloutBank, RolloutGroup, scan
from arrowbank.archive import carry, merging, parquet
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest, write_manifest
from arrowbank.errors import CorruptionError


class Run:
    """A run that is all archived but for its last iterations."""

    def __init__(self, path: Path, iterations: int = 8, **options: Any) -> None:
        self.path = path
        self.made: dict[str, RolloutGroup] = {}
        self.drawn: list[list[str]] = []
        self.left: list[str] = []
        kinds = sorted(EVERY)
        with RolloutBank.open(path, **options) as bank:
            bank.restore(0)
            for at in range(iterations):
                bank.begin_iteration(at)
                groups = [build(kinds[(3 * at + number) % len(kinds)], seed=at + 1) for number in range(3)]
                uids = [bank.append(group, source_index=at) for group in groups]
                self.made |= dict(zip(uids, groups, strict=True))
                bank.append(token_group(1000 + at), evicted="not good")
                bank.mark_consumed([uids[2], uids[0]], at, state=b"state %d" % at)
                self.drawn.append([uids[2], uids[0]])
                self.left.append(uids[1])
                bank.checkpoint(at + 1, wait=True)

    def archived(self) -> Counter[str]:
        """Groups under archive/, as any engine globs it, with their number of rows."""
        files = sorted((self.path / "archive").iterdir())
        return Counter(uid for file in files for uid in pq.read_table(file)["group_uid"].to_pylist())


def tree(path: Path) -> dict[Path, Any]:
    """Every file of a bank that a refused restore must leave as it is."""
    skipped = {"LOCK", "tmp", "sessions", "journal"}
    return {
        file: os.readlink(file) if file.is_symlink() else file.read_bytes() if file.is_file() else None
        for file in path.rglob("*")
        if file.relative_to(path).parts[0] not in skipped
    }


@pytest.mark.parametrize("fan_in", [2, 8])
@pytest.mark.parametrize("iteration", [0, 3, 6])
def test_rolled_back_groups_come_back_bit_for_bit_in_order_and_leave_the_archive(
    path: Path, iteration: int, fan_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "FAN_IN", fan_in)
    run = Run(path)
    before = run.archived()
    with RolloutBank.open(path) as bank:
        restored = bank.restore(iteration)
        assert [[group.uid for group in draw.groups] for draw in restored.draws] == run.drawn[iteration:]
        assert [draw.state for draw in restored.draws] == [b"state %d" % at for at in range(iteration, 8)]
        for draw in restored.draws:
            for group in draw.groups:
                assert group == run.made[str(group.uid)]
        rolled_back = {uid for uids in run.drawn[iteration:] for uid in uids}
        after = run.archived()
        assert after == Counter({uid: count for uid, count in before.items() if uid not in rolled_back})
        assert restored.report.revived_groups == len(before) - len(after)
        assert restored.source_indices == frozenset(range(8))
        rows = scan(path).to_arrow()
        assert set(Counter(rows["group_uid"].to_pylist())) >= run.made.keys()
        assert {str(group.uid): group for group in scan(path).groups() if group.uid in run.made} == run.made


def test_pending_groups_keep_their_order_of_completion(path: Path) -> None:
    run = Run(path)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0, mode="requeue")
        assert restored.draws == []
        groups = [group for queue in restored.pending.values() for group in queue]
        assert len(groups) == len(run.made)
        for queue in restored.pending.values():
            ranks = [list(run.made).index(str(group.uid)) for group in queue]
            assert ranks == sorted(ranks)
        assert [group.uid for group in restored.take(len(run.made))] == list(run.made)


def test_training_goes_on_from_there_and_archives_each_rollout_once(path: Path) -> None:
    run = Run(path)
    whole = run.archived()
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        for draw in bank.restore(2).draws:
            bank.begin_iteration(draw.iteration)
            bank.mark_consumed([str(group.uid) for group in draw.groups], draw.iteration, state=draw.state)
            bank.checkpoint(draw.iteration + 1, wait=True)
        bank.close(final=True)
    final = run.archived()
    assert whole.items() <= final.items()
    assert {uid for uid in final if uid in run.made} == {uid for uids in run.drawn for uid in uids}
    for file in (path / "archive").iterdir():
        for row in pq.read_table(file).to_pylist():
            if row["outcome"] == "consumed":
                at = row["consumed_iteration"]
                assert row["group_uid"] == run.drawn[at][row["consumed_position"]]


def test_a_span_that_the_checkpoint_cuts_comes_back_with_its_offset(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        first, second = bank.append_many([token_group(1), token_group(2)])
        bank.mark_consumed([first], 0, span=4)
        bank.mark_consumed([second], 2, span=1)
        bank.begin_iteration(6)
        for at in (1, 3, 5):
            bank.checkpoint(at, wait=True)
        assert bank.stats().archived_groups == 2
    with RolloutBank.open(path) as bank:
        draws = bank.restore(3).draws
        assert [(draw.iteration, draw.span, draw.offset) for draw in draws] == [(0, 4, 3)]
        assert bank.stats().archived_groups == 1


def test_an_eviction_on_another_line_holds_again_once_what_beat_it_is_rolled_back(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uid = bank.append(token_group(1))
        bank.mark_consumed([uid], 0)
        bank.checkpoint(1)
        bank.restore(0, mode="discard")
        bank.restore(1)
        bank.begin_iteration(2)
        bank.checkpoint(2)
        bank.close(final=True)
    (row, *_) = (row for file in (path / "archive").iterdir() for row in pq.read_table(file).to_pylist())
    assert (row["outcome"], row["consumed_iteration"]) == ("consumed", 0)
    with RolloutBank.open(path) as bank:
        (draw,) = bank.restore(0).draws
        assert (draw.groups, draw.lost) == ([], (uid,))


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_and_a_third_restore_below_it_are_as_right_as_the_first(path: Path, times: int) -> None:
    run = Run(path)
    with RolloutBank.open(path) as bank:
        for iteration in (5, 2, 0)[: times + 1]:
            restored = bank.restore(iteration)
            assert [[group.uid for group in draw.groups] for draw in restored.draws] == run.drawn[iteration:]


def test_the_parents_line_has_its_draws_back_too(path: Path) -> None:
    """The archive's draws are of all lines: after a restore of 2, a restore of 6 is the first session's again."""
    run = Run(path)
    with RolloutBank.open(path) as bank:
        bank.restore(2)
        bank.mark_consumed([run.left[0]], 2)
        restored = bank.restore(6)
        assert [[group.uid for group in draw.groups] for draw in restored.draws] == run.drawn[6:]
        assert {str(group.uid) for group in restored.take(100)} == set(run.left)


def test_draws_with_rows_missing_are_refused_by_iteration_and_nothing_changes(path: Path) -> None:
    run = Run(path)
    (victim,) = (
        file for file in (path / "archive").iterdir() if run.drawn[3][0] in pq.read_table(file)["group_uid"].to_pylist()
    )
    paths = BankPaths(path)
    manifest = read_manifest(paths)
    table = pq.read_table(victim)
    without = table.filter([uid != run.drawn[3][0] for uid in table["group_uid"].to_pylist()])
    pq.write_table(without, victim)  # as if a group of it had been deleted
    digest, nbytes = parquet.file_digest(victim)
    change = {"rows": without.num_rows, "digest": digest, "nbytes": nbytes}
    files = [file.model_copy(update=change if file.name == victim.name else {}) for file in manifest.files]
    write_manifest(paths, manifest.model_copy(update={"files": tuple(files)}), path)
    bank = RolloutBank.open(path)
    before = tree(path)
    with pytest.raises(ReplayUnavailableError, match=r"restore\(1\): of draws at iterations \[3\]"):
        bank.restore(1)
    assert tree(path) == before
    assert [draw.iteration for draw in bank.restore(6).draws] == [6, 7]
    bank.close()


@pytest.mark.parametrize("place", [100, -20, -600, None])
def test_a_damaged_or_missing_file_is_refused_and_nothing_changes(path: Path, place: int | None) -> None:
    run = Run(path)
    (victim,) = (
        file for file in (path / "archive").iterdir() if run.drawn[3][0] in pq.read_table(file)["group_uid"].to_pylist()
    )
    if place is None:
        victim.unlink()
    else:
        data = bytearray(victim.read_bytes())
        data[place] ^= 1
        victim.write_bytes(data)
    bank = RolloutBank.open(path)
    before = tree(path)
    with pytest.raises(CorruptionError, match=victim.name):
        bank.restore(1)
    assert tree(path) == before
    assert [draw.iteration for draw in bank.restore(7).draws] == [7]
    bank.close()


@pytest.mark.parametrize("call", ["rename", "link", "unlink", "fsync", "fdatasync", "symlink"])
def test_a_kill_at_any_step_of_it_loses_and_doubles_nothing(
    path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    run = Run(path, 6)
    whole = set(run.made)
    for step in range(40):
        bank = RolloutBank.open(path, takeover="force")
        calls, real = iter(range(10_000)), getattr(os, call)

        def counted(*args: Any, calls: Any = calls, real: Any = real, step: int = step, **options: Any) -> Any:
            if next(calls) >= step:
                raise Killed
            return real(*args, **options)

        monkeypatch.setattr(os, call, counted)
        try:
            bank.restore(5 - step % 6)
        except Killed:
            pass
        else:
            break
        finally:
            monkeypatch.undo()
        seen = scan(path).to_arrow().select(["group_uid", "member_index"]).to_pylist()
        rows = Counter((row["group_uid"], row["member_index"]) for row in seen)
        assert set(rows.values()) == {1}
        assert {uid for uid, _ in rows} >= whole
        with RolloutBank.open(path, takeover="force") as again:
            assert [[group.uid for group in draw.groups] for draw in again.restore(6).draws] == []
            glob = run.archived()
            live = {str(group.uid) for group in scan(path).groups()} - glob.keys()
            assert (glob.keys() | live) >= whole
    else:
        raise AssertionError("no restore got through: more steps than were tried")
    with RolloutBank.open(path, takeover="force") as bank:
        restored = bank.restore(0)
        assert [[group.uid for group in draw.groups] for draw in restored.draws] == run.drawn


def test_what_comes_back_is_cut_into_segments_at_iterations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(carry, "_FLUSH_BYTES", 1)
    run = Run(path)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(2)
        assert [[group.uid for group in draw.groups] for draw in restored.draws] == run.drawn[2:]
        assert len([name for name in read_manifest(BankPaths(path)).carried if "s0002" in name]) == 5
