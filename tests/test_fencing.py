"""Who lost a bank to another coordinator: it commits and acknowledges nothing more, and harms nothing of the other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from runs import kill

from arrowbank import BankLockedError, DuplicateGroupError, FencedError, RolloutBank
from arrowbank.archive.store import ArchiveStore
from arrowbank.durable import files, session
from arrowbank.durable.layout import BankPaths


def fenced(tmp_path: Path) -> tuple[RolloutBank, RolloutBank, str]:
    first = RolloutBank.open(tmp_path / "bank")
    uid = first.append(token_group(1))
    second = RolloutBank.open(tmp_path / "bank", takeover="force")
    second.restore(0)
    return first, second, uid


def test_who_lost_its_place_can_neither_commit_nor_acknowledge(tmp_path: Path) -> None:
    first, second, uid = fenced(tmp_path)
    calls = {
        "append": lambda: first.append(token_group(2)),
        "append_many": lambda: first.append_many([token_group(3)]),
        "mark_consumed": lambda: first.mark_consumed([uid], 0),
        "evict": lambda: first.evict([uid], "why"),
        "append at another iteration": lambda: (first.begin_iteration(4), first.append(token_group(4))),
        "checkpoint": lambda: first.checkpoint(1),
        "restore": lambda: first.restore(0),
    }
    for name, call in calls.items():
        with pytest.raises(FencedError):
            call()
            pytest.fail(name)
    first.close()
    second.append(token_group(5))
    second.mark_consumed([uid], 0)
    second.close()
    with RolloutBank.open(tmp_path / "bank") as third:
        restored = third.restore(0)
        assert [group.uid for draw in restored.draws for group in draw.groups] == [uid]
        assert sum(map(len, restored.pending.values())) == 1
        assert restored.report.damage == ()


def test_closing_a_fenced_handle_harms_nothing_of_the_new_holder(tmp_path: Path) -> None:
    first, second, uid = fenced(tmp_path)
    lock = (tmp_path / "bank/LOCK").read_bytes()
    first.close()
    assert (tmp_path / "bank/LOCK").read_bytes() == lock
    assert second._claim.tmp.is_dir()
    second.mark_consumed([uid], 0)
    with pytest.raises(BankLockedError):
        RolloutBank.open(tmp_path / "bank")
    second.close()


def overtake_at_the_next_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let another handle take the bank over between a sync and what follows it; return where that handle will be."""
    fdatasync, others = os.fdatasync, []

    def overtaken(descriptor: int) -> None:
        fdatasync(descriptor)
        if not others:
            others.append(None)
            others[0] = RolloutBank.open(path, takeover="force")

    monkeypatch.setattr(os, "fdatasync", overtaken)
    return others


def test_an_append_that_a_takeover_overtakes_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RolloutBank.open(tmp_path / "bank")
    first.restore(0)
    kept = first.append(token_group(1))
    others = overtake_at_the_next_sync(tmp_path / "bank", monkeypatch)
    with pytest.raises(FencedError):
        first.append(token_group(2))
    first.close()
    others[0].close()
    with RolloutBank.open(tmp_path / "bank") as bank:
        assert [group.uid for group in bank.restore(0).pending["math"]] == [kept]


def test_a_group_that_a_takeover_overtook_is_no_retry_for_the_next_handle(path: Path) -> None:
    """Who took over may have read it, and trained on it: there it is pending, or not at all."""
    first = RolloutBank.open(path)
    first.restore(0)
    second = RolloutBank.open(path, takeover="force")
    group = token_group(1)
    with pytest.raises(FencedError):
        first.append(group)
    second.restore(0)
    with pytest.raises(DuplicateGroupError, match="may be pending"):
        second.append(group)
    group.uid = None
    second.append(group)
    second.close()


def test_a_draw_that_a_takeover_overtakes_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RolloutBank.open(tmp_path / "bank")
    uid = first.append(token_group(1))
    others = overtake_at_the_next_sync(tmp_path / "bank", monkeypatch)
    with pytest.raises(FencedError):
        first.mark_consumed([uid], 0)
    others[0].close()
    with RolloutBank.open(tmp_path / "bank") as bank:
        restored = bank.restore(0)
        assert (restored.draws, len(restored.pending["math"])) == ([], 1)


def test_what_an_overtaken_append_adds_after_it_was_read_stays_out_for_good(path: Path) -> None:
    """Its owner stops between writing and looking at the claims, and goes on when its file is read already."""
    first = RolloutBank.open(path)
    first.restore(0)
    kept = first.append(token_group(1))
    with RolloutBank.open(path, takeover="force") as second:
        second.restore(0)
        # What a process does that was stopped just before its write, and has looked already.
        first._appender._check_fence = lambda: None
        first.append(token_group(2))
        second.append(token_group(3))
    for _ in range(3):
        with RolloutBank.open(path) as bank:
            restored = bank.restore(0)
            assert restored.pending["math"][0].uid == kept
            assert (len(restored.pending["math"]), restored.report.damage) == (2, ())


def test_what_an_overtaken_holder_says_in_its_journal_after_it_was_read_does_not_count(path: Path) -> None:
    """It annuls an append that the new holder has read, and drawn."""
    first = RolloutBank.open(path)
    first.restore(0)
    uid = first.append(token_group(1))
    second = RolloutBank.open(path, takeover="force")
    second.restore(0)
    second.mark_consumed([uid], 0)
    first._journal.check_fence = lambda: None
    first._journal.abandon("00000000-main-s0001-0000.arrows", 0, 1)
    with RolloutBank.open(path, takeover="force") as third:
        (draw,) = third.restore(0).draws
        assert ([group.uid for group in draw.groups], draw.lost) == ([uid], ())


def test_a_restore_whose_dead_files_a_takeover_took_away_is_fenced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = RolloutBank.open(path)
    dead.restore(0)
    dead.append(token_group(1))
    bank, fsync = kill(path), files.fsync_file

    def overtaken(file: Path) -> int:
        monkeypatch.setattr(files, "fsync_file", fsync)
        kill(path).restore(0)
        file.unlink()  # as the new holder's compaction does
        return fsync(file)

    monkeypatch.setattr(files, "fsync_file", overtaken)
    with pytest.raises(FencedError):
        bank.restore(0)


def test_background_compaction_of_a_fenced_handle_commits_nothing(tmp_path: Path) -> None:
    first = RolloutBank.open(tmp_path / "bank", keep_checkpoints=1)
    uid = first.append(token_group(1))
    first.mark_consumed([uid], 0)
    first.begin_iteration(1)
    second = RolloutBank.open(tmp_path / "bank", takeover="force")
    manifest = (tmp_path / "bank/MANIFEST.json").read_bytes()
    first._compactor.start(1)
    first._compactor.wait()
    assert "lost its place" in str(first.stats().compaction_error)
    assert (tmp_path / "bank/MANIFEST.json").read_bytes() == manifest
    first.close()
    second.close()


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_opener_that_slept_through_a_takeover_removes_nothing_of_the_new_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    with RolloutBank.open(tmp_path / "bank") as bank:
        uid = bank.append(token_group(1))
    settle = ArchiveStore.settle

    def late(self: ArchiveStore, **_: object) -> None:
        monkeypatch.setattr(ArchiveStore, "settle", settle)
        with RolloutBank.open(tmp_path / "bank", takeover="force", keep_checkpoints=1) as other:
            other.restore(0)
            other.mark_consumed([uid], 0)
            other.checkpoint(1, wait=True)
            assert other.stats().archived_groups == 1
        settle(self, is_whole=is_whole)

    monkeypatch.setattr(ArchiveStore, "settle", late)
    with pytest.raises(FencedError):
        RolloutBank.open(tmp_path / "bank")
    assert len(list((tmp_path / "bank/archive").iterdir())) == 2


def test_a_claim_that_was_overtaken_before_it_cleared_tmp_leaves_the_new_holders_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RolloutBank.open(tmp_path / "bank").close()
    clear = session._clear_tmp
    overtaking: list[RolloutBank] = []

    def late(paths: BankPaths, number: int) -> None:
        monkeypatch.setattr(session, "_clear_tmp", clear)
        overtaking.append(RolloutBank.open(tmp_path / "bank", takeover="force"))
        clear(paths, number)

    monkeypatch.setattr(session, "_clear_tmp", late)
    with pytest.raises((BankLockedError, FencedError)):
        RolloutBank.open(tmp_path / "bank")
    (bank,) = overtaking
    bank.restore(0)
    for at in range(3):
        bank.begin_iteration(at)
        bank.append(token_group(at))
    bank.close()
