"""A handle's life: restore, training, checkpoints, and compaction behind it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from runs import archived_rows, kill, train

from arrowbank import HistoryGoneError, InvalidDrawError, RolloutBank, UnknownGroupError, scan
from arrowbank.archive import compactor
from arrowbank.archive.store import ArchiveStore

# -- I3, I4: resume


def test_rolled_back_draws_come_back_whole_in_order_with_their_state(bank: RolloutBank, path: Path) -> None:
    drawn = train(bank, range(4), checkpoints=False)
    extra = bank.append(token_group(1), source_index=4)
    bank.checkpoint(2)
    with kill(path) as again:
        restored = again.restore(2)
        assert [(draw.iteration, draw.state, draw.lost, draw.offset) for draw in restored.draws] == [
            (2, b"at 2", (), 0),
            (3, b"at 3", (), 0),
        ]
        assert [[group.uid for group in draw.groups] for draw in restored.draws] == drawn[2:]
        assert restored.draws[0].groups[1].rollouts == token_group(201).rollouts
        assert [group.uid for group in restored.pending["math"]] == [extra]
        assert (restored.iteration, again.iteration, restored.report.recorded) == (2, 2, True)
        for draw in restored.draws:
            again.mark_consumed([str(group.uid) for group in draw.groups], draw.iteration, state=draw.state)
        with pytest.raises(InvalidDrawError, match="this session drew"):
            again.mark_consumed(drawn[2], 4)
        with pytest.raises(InvalidDrawError, match="checkpoint 2 holds it"):
            again.mark_consumed(drawn[1], 4)


@pytest.mark.parametrize("mode", ["requeue", "discard"])
def test_the_plan_is_made_pending_or_evicted_when_told(bank: RolloutBank, path: Path, mode: Any) -> None:
    drawn = train(bank, range(3), checkpoints=False)
    bank.checkpoint(1)
    with kill(path) as again:
        restored = again.restore(1, mode=mode)
        pending = [str(group.uid) for queue in restored.pending.values() for group in queue]
        assert restored.draws == []
        assert pending == (drawn[1] + drawn[2] if mode == "requeue" else [])
    with RolloutBank.open(path) as third:
        restored = third.restore(1)
        assert restored.draws == []
        assert [str(group.uid) for queue in restored.pending.values() for group in queue] == pending


def test_a_second_restore_on_a_handle_begins_a_new_session(bank: RolloutBank, path: Path) -> None:
    drawn = train(bank, range(3), checkpoints=False)
    assert bank.session == 1
    restored = bank.restore(0)
    assert (bank.session, [draw.iteration for draw in restored.draws]) == (2, [0, 1, 2])
    assert restored.draws[2].groups[0].rollouts == token_group(200).rollouts
    bank.mark_consumed(drawn[0], 0)
    bank.checkpoint(1, wait=True)
    assert [draw.iteration for draw in bank.restore(1).draws] == [1, 2]
    assert bank.session == 3
    train(bank, range(3, 5))
    assert sorted(os.listdir(path / "tmp")) == ["s0003"]


def test_training_before_restore_is_refused_on_a_bank_with_groups(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        uid = bank.append(token_group(1))
        bank.mark_consumed([uid], 0)  # a new bank has nothing to restore
    with RolloutBank.open(path) as bank:
        bank.begin_iteration(3)
        bank.append(token_group(2))
        for call in (lambda: bank.mark_consumed([uid], 3), lambda: bank.evict([uid], "x"), lambda: bank.checkpoint(4)):
            with pytest.raises(InvalidDrawError, match="before restore"):
                call()
        restored = bank.restore(0)
        assert bank.session == 3  # what was appended before belongs to the session before
        assert (len(restored.draws), len(restored.pending["math"])) == (1, 1)


def test_a_checkpoint_that_nobody_recorded_is_told(bank: RolloutBank, path: Path) -> None:
    train(bank, range(3), checkpoints=False)
    with kill(path) as again:
        restored = again.restore(2)
        assert [draw.iteration for draw in restored.draws] == [2]
        assert not restored.report.recorded
        assert "no session recorded this checkpoint" in str(restored.report)


def test_an_evicted_group_of_a_planned_draw_is_named_as_lost(bank: RolloutBank, path: Path) -> None:
    ((first, second),) = train(bank, range(1), checkpoints=False)
    with kill(path) as again:
        again.restore(0)
        again.evict([first], "poisonous")
        again.evict([first], "again")
    with RolloutBank.open(path) as third:
        (draw,) = third.restore(0).draws
        assert ([group.uid for group in draw.groups], draw.lost) == ([second], (first,))
        assert (
            dict(zip(*scan(path).to_arrow().select(["group_uid", "evict_reason"]).to_pydict().values(), strict=True))[
                first
            ]
            == "poisonous"
        )


def test_a_restore_below_the_archive_brings_the_rolled_back_draws_back(bank: RolloutBank, path: Path) -> None:
    drawn = train(bank, range(5))
    bank.checkpoint(5, wait=True)
    bank.close()
    archived = {uid for uid, _ in archived_rows(path)}
    assert archived == {uid for uids in drawn[:4] for uid in uids}
    with RolloutBank.open(path) as again:
        restored = again.restore(2)
        assert [(draw.iteration, [group.uid for group in draw.groups]) for draw in restored.draws] == [
            (at, drawn[at]) for at in (2, 3, 4)
        ]
        assert restored.report.revived_groups == len(drawn[2] + drawn[3])
        assert {uid for uid, _ in archived_rows(path)} == {uid for uids in drawn[:2] for uid in uids}


def test_a_line_that_was_left_is_gone_after_a_checkpoint(bank: RolloutBank, path: Path) -> None:
    train(bank, range(4), checkpoints=False)
    bank.checkpoint(4)
    with kill(path) as again:
        again.restore(0)
        again.checkpoint(0)
        again.begin_iteration(0)
        again.checkpoint(1)
        with pytest.raises(HistoryGoneError):
            again.restore(4)


# -- checkpoints and compaction


def test_checkpoints_that_come_late_or_twice_change_nothing(bank: RolloutBank) -> None:
    train(bank, range(3))
    for late in (3, 2, 1, 0, 3):
        bank.checkpoint(late)
    assert bank.iteration == 2
    with pytest.raises(InvalidDrawError, match="the last iteration begun is 2"):
        bank.checkpoint(4)
    bank.begin_iteration(3)
    bank.checkpoint(4)
    assert bank.iteration == 3


def test_a_group_that_is_archived_cannot_be_drawn_again(bank: RolloutBank) -> None:
    drawn = train(bank, range(4))
    bank.checkpoint(4, wait=True)
    assert bank.stats().archived_groups == 6
    with pytest.raises(UnknownGroupError, match="archived"):
        bank.mark_consumed(drawn[0][:1], 4)
    with pytest.raises(UnknownGroupError):
        bank.mark_consumed(["x"], 4)


def test_max_bytes_warns_once_and_again_after_compaction_made_room(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "arrowbank")
    with RolloutBank.open(path, max_bytes=20_000, keep_checkpoints=1) as bank:
        bank.restore(0)
        for crossing in (1, 2):
            drawn = []
            for number in range(12):
                drawn.append(bank.append(token_group(number)))
            assert bank.live_bytes > 20_000
            assert caplog.text.count("more than max_bytes 20,000") == crossing
            bank.mark_consumed(drawn, crossing)
            bank.begin_iteration(crossing + 1)
            bank.checkpoint(crossing + 1, wait=True)
            assert bank.live_bytes == 0


def test_live_bytes_are_those_of_the_segments_that_are_there(bank: RolloutBank, path: Path) -> None:
    for number in range(5):
        bank.append(token_group(number))
        files = (path / "segments").iterdir()
        assert bank.live_bytes == sum(file.stat().st_size for file in files) - 8  # zeros behind the last record
    with kill(path) as again:
        again.restore(0)
        assert again.live_bytes == sum(file.stat().st_size for file in (path / "segments").iterdir())


def test_what_background_compaction_meets_is_told_and_tried_again(
    bank: RolloutBank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(task: Any) -> Any:
        raise OSError(28, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(compactor, "execute", full)
        train(bank, range(3))
        with pytest.raises(OSError, match="planted"):
            bank.checkpoint(3, wait=True)
    assert "planted" in str(bank.stats().compaction_error)
    assert "planted" in caplog.text
    train(bank, range(3, 4))
    bank.checkpoint(4, wait=True)
    assert bank.stats().compaction_error is None
    assert bank.stats().archived_groups == 6


def test_close_raises_what_compaction_met_and_gives_the_bank_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "planted")

    bank = RolloutBank.open(path)
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveStore, "commit", full)
        train(bank, range(3))
        with pytest.raises(OSError, match="planted"):
            bank.close()
    with RolloutBank.open(path) as again:
        assert len(again.restore(3).draws) == 0
        train(again, range(3, 5))
        again.checkpoint(5, wait=True)
        assert again.stats().archived_groups == 8


@pytest.mark.parametrize("failing", ["_plan", "_forget"])
def test_appends_and_draws_go_on_while_compaction_runs(
    bank: RolloutBank, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    execute, may_go = compactor.execute, threading.Event()

    def slow(task: Any) -> Any:
        assert may_go.wait(30)
        return execute(task)

    monkeypatch.setattr(compactor, "execute", slow)
    train(bank, range(6))
    assert bank.stats().archived_groups == 0
    may_go.set()
    bank.checkpoint(6, wait=True)
    assert bank.stats().archived_groups == 10


def test_a_restore_waits_for_compaction_and_both_end(bank: RolloutBank, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = compactor.execute

    def slow(task: Any) -> Any:
        time.sleep(0.2)
        return execute(task)

    monkeypatch.setattr(compactor, "execute", slow)
    train(bank, range(4))
    restored = bank.restore(4)
    assert restored.draws == []
    assert bank.stats().archived_groups == 6


def test_a_segment_with_nothing_but_abandoned_records_does_not_stay(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fdatasync, fail = os.fdatasync, [5]

    def sync(descriptor: int) -> None:
        if fail:
            raise OSError(fail.pop(), "planted")
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    with RolloutBank.open(path) as bank:
        with pytest.raises(OSError, match="planted"):
            bank.append(token_group(1))
        train(bank, range(3))
        bank.close(final=True)
    assert list((path / "segments").iterdir()) == []
    assert scan(path).to_arrow().num_rows == 24


def test_a_stress_of_everything_at_once_ends_with_everything_accounted_for(path: Path) -> None:
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        bank = RolloutBank.open(path, keep_checkpoints=1)
        bank.restore(0)
        queue: list[str] = []
        stop = threading.Event()

        def produce(first: int) -> None:
            number = first
            while not stop.is_set():
                number += 1
                queue.append(bank.append(token_group(number, members=1)))

        threads = [threading.Thread(target=produce, args=(1000 * number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        drawn: list[str] = []
        for iteration in range(40):
            while len(queue) < 3:
                time.sleep(0.001)
            batch = [queue.pop(0) for _ in range(3)]
            bank.mark_consumed(batch, iteration)
            drawn += batch
            bank.checkpoint(iteration + 1)
            bank.begin_iteration(iteration + 1)
            _ = bank.stats(), bank.live_bytes
        stop.set()
        for thread in threads:
            thread.join()
        bank.close()
    finally:
        sys.setswitchinterval(switch)
    rows = scan(path).to_arrow()
    known = rows["group_uid"].to_pylist()
    assert sorted(known) == sorted(drawn + queue)
    consumed = [uid for uid, outcome in zip(known, rows["outcome"].to_pylist(), strict=True) if outcome == "consumed"]
    assert sorted(consumed) == sorted(drawn)
