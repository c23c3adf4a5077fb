"""What a session archives and sums up, beside a trainer that goes on: nothing that still matters is forgotten."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from builders import token_group
from runs import kill, train

from arrowbank import FencedError, RolloutBank
from arrowbank.archive import archivist, compaction, revival
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest


def test_sessions_that_never_got_to_a_checkpoint_leave_few_journals_in_the_end(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        drawn = train(bank, range(2), checkpoints=False)
        waiting = bank.append(token_group(9))
    for _ in range(archivist.MAX_JOURNAL_PARTS + 3):
        with kill(path) as bank:
            restored = bank.restore(0)
            assert [[group.uid for group in draw.groups] for draw in restored.draws] == drawn
            assert [group.uid for group in restored.take(9)] == [waiting]
    RolloutBank.open(path).close()
    assert len(BankPaths(path).journal_names()) < 6
    assert read_manifest(BankPaths(path)).journal


def test_an_append_that_fails_while_the_journal_is_summed_up_stays_abandoned(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = RolloutBank.open(path, keep_checkpoints=1)
    bank.restore(0)
    train(bank, range(2))
    bank.begin_iteration(2)
    roll, fdatasync = bank._journal.roll, os.fdatasync

    def fail_an_append() -> None:
        def failing(descriptor: int) -> None:
            monkeypatch.setattr(os, "fdatasync", fdatasync)
            raise OSError(errno.EIO, "planted")

        monkeypatch.setattr(os, "fdatasync", failing)
        with pytest.raises(OSError, match="planted"):
            bank.append(token_group(99))

    def meanwhile(snapshot: Callable[..., Any]) -> Any:
        thread = threading.Thread(target=fail_an_append)
        thread.start()
        thread.join()
        return roll(snapshot)

    monkeypatch.setattr(bank._journal, "roll", meanwhile)
    bank.checkpoint(2)
    bank.checkpoint(2, wait=True)
    with kill(path) as again:
        assert again.restore(2).take(9) == []


def test_many_carried_segments_become_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "MAX_CARRIED", 3)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        left = []
        for at in range(8):
            bank.begin_iteration(at)
            used, kept = bank.append_many([token_group(10 * at), token_group(10 * at + 1)])
            left.append(kept)
            bank.mark_consumed([used], at)
            bank.checkpoint(at + 1, wait=True)
        assert len(read_manifest(BankPaths(path)).carried) <= 4
    with RolloutBank.open(path) as bank:
        assert [group.uid for group in bank.restore(8).take(99)] == left


@pytest.mark.parametrize("step", ["_affected", "_carry"])
def test_a_restore_below_the_horizon_that_is_overtaken_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        drawn = train(bank, range(4))
    real, others = getattr(revival, step), []

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(revival, step, real)
        others.append(RolloutBank.open(path, takeover="force"))
        return real(*given)

    monkeypatch.setattr(revival, step, overtaken)
    bank = RolloutBank.open(path)
    with pytest.raises(FencedError):
        bank.restore(1)
    restored = others[0].restore(1)
    assert [[group.uid for group in draw.groups] for draw in restored.draws] == drawn[1:]
    others[0].close()


def test_a_torn_segment_is_archived_once_its_tail_is_in_quarantine(tmp_path: Path) -> None:
    path = tmp_path / "bank"
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uids = bank.append_many([token_group(seed) for seed in range(3)])
        bank.mark_consumed(uids, 0)
    (segment,) = (path / "segments").iterdir()
    whole = segment.read_bytes()[:-8] + bytes(8)
    segment.write_bytes(whole + b"\x11" * 1000)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        assert [len(draw.groups) for draw in restored.draws] == [3]
        bank.mark_consumed(uids, 0)
        bank.checkpoint(1)
        bank.close(final=True)
    rows = sum(pq.read_metadata(file).num_rows for file in (path / "archive").glob("*.parquet"))
    assert rows == sum(len(draw) for draw in restored.draws[0].groups)
    assert not list((path / "segments").iterdir())
    (kept,) = (path / "quarantine").glob("*.bytes")
    assert (whole + b"\x11" * 1000).endswith(kept.read_bytes()) and kept.read_bytes().endswith(b"\x11" * 1000)
    assert json.loads(kept.with_suffix(".json").read_text())["torn"] is True
