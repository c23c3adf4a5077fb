"""Another handle takes over at the nth system call of a holder, which learns of it and spoils nothing.

Each of these points was wrong once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from kill_model import check_archive_once
from runs import train

from arrowbank import BankLockedError, FencedError, RolloutBank
from arrowbank import bank as bank_module
from arrowbank.archive import store
from arrowbank.durable import files


class Overtaken:
    """A holder, and what takes its place within a call of its own."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._patch = path, monkeypatch
        self.new: RolloutBank | None = None

    def within(self, module: Any, name: str, when: Callable[..., bool], work: Callable[[RolloutBank], object]) -> None:
        """Before that call, when it is the right one, another handle takes over and works."""
        call = getattr(module, name)

        def overtaken(*args: Any, **kwargs: Any) -> Any:
            if self.new is None and when(*args):
                self._patch.setattr(module, name, call)
                self.new = RolloutBank.open(self.path, takeover="force", keep_checkpoints=1)
                work(self.new)
            return call(*args, **kwargs)

        self._patch.setattr(module, name, overtaken)

    def finish(self) -> RolloutBank:
        """Close the new holder; return a third one."""
        assert self.new is not None, "never overtaken"
        check_archive_once(self.path)
        self.new.close()
        return RolloutBank.open(self.path, takeover="never", keep_checkpoints=1)


@pytest.fixture
def overtaken(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Overtaken]:
    overtaken = Overtaken(path, monkeypatch)
    yield overtaken
    if overtaken.new is not None:  # it may have come only while the old one closed
        overtaken.new.close()


def one_at_a_time(bank: RolloutBank, iterations: range, size: int = 1) -> None:
    """A file of the archive for each iteration."""
    for iteration in iterations:
        train(bank, range(iteration, iteration + 1), size=size)
        bank._compactor.wait()


def until_call(nth: int) -> Callable[..., bool]:
    calls = itertools.count(1)
    return lambda *_: next(calls) == nth


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank that a kill within a merge has left."""
    path = tmp_path_factory.mktemp("interrupted") / "bank"
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        one_at_a_time(bank, range(7))
        left = path / f".archive/v{bank._store.manifest.version + 1:06d}"
        left.mkdir()
        (left / "c000000-s0000.parquet").hardlink_to(path / "archive" / "c000000-s0000.parquet")
    return path


@pytest.mark.parametrize("name", ["open", "stat", "rename", "unlink", "rmdir", "fsync"])
@pytest.mark.parametrize("nth", range(1, 10))
def test_an_overtaken_opener_does_not_clear_the_archive_of_the_new_holder(
    path: Path, overtaken: Overtaken, interrupted: Path, name: str, nth: int
) -> None:
    """The new holder takes away what the kill left, and its own next version may be of the same number."""
    shutil.copytree(interrupted, path, symlinks=True)

    def work(new: RolloutBank) -> None:
        new.restore(7)
        one_at_a_time(new, range(7, 9))

    overtaken.within(os, name, until_call(nth), work)
    try:
        old = RolloutBank.open(path, keep_checkpoints=1)
    except (FencedError, BankLockedError):
        assert overtaken.new is not None
    else:
        old.close()
        if overtaken.new is None:
            return
    with overtaken.finish() as third:
        assert third.stats().archived_groups >= 7


@pytest.mark.parametrize("name", ["open", "stat", "lstat", "fstat"])
@pytest.mark.parametrize("nth", range(1, 60, 4))
def test_who_is_overtaken_while_it_opens_and_restores_learns_that_and_no_other_error(
    path: Path, overtaken: Overtaken, interrupted: Path, name: str, nth: int
) -> None:
    """Journals and segments that the new holder took away are no damage."""
    shutil.copytree(interrupted, path, symlinks=True)

    def work(new: RolloutBank) -> None:
        new.restore(7)
        one_at_a_time(new, range(7, 12))

    overtaken.within(os, name, until_call(nth), work)
    with contextlib.suppress(FencedError, BankLockedError):
        old = RolloutBank.open(path, keep_checkpoints=1)
        try:
            old.restore(7)
        finally:
            old.close()
    if overtaken.new is not None:
        overtaken.finish().close()


@pytest.mark.parametrize("nth", range(1, 6))
def test_an_overtaken_merge_puts_nothing_in_the_new_holders_archive(path: Path, overtaken: Overtaken, nth: int) -> None:
    old = RolloutBank.open(path, keep_checkpoints=1)
    old.restore(0)
    one_at_a_time(old, range(2), size=8)  # files of a higher tier, which the merge keeps
    one_at_a_time(old, range(2, 9))
    links = itertools.count(1)
    overtaken.within(files, "link", lambda *_: next(links) == nth, lambda new: new.restore(1))
    with contextlib.suppress(FencedError):
        one_at_a_time(old, range(9, 13))
    old.close()
    new = overtaken.new
    if new is None:
        assert nth > 3
        return
    listed = {file.name for file in new._store.manifest.files}
    assert {file.name for file in (path / "archive").iterdir()} == {"c000000-s0000.parquet", *listed}
    overtaken.finish().close()


@pytest.mark.parametrize("name", ["pwritev", "fdatasync", "fsync", "rename", "open", "link", "unlink"])
@pytest.mark.parametrize("nth", range(1, 7))
def test_whoever_is_overtaken_within_a_call_learns_that_and_no_other_error(
    path: Path, overtaken: Overtaken, name: str, nth: int
) -> None:
    """Whatever the new holder has healed, archived and removed meanwhile."""
    old = RolloutBank.open(path, keep_checkpoints=1)
    old.restore(0)
    kept = [old.append(token_group(1))]

    def work(new: RolloutBank) -> None:
        new.restore(0)
        train(new, range(2))
        new._compactor.wait()

    overtaken.within(os, name, until_call(nth), work)
    calls: list[Callable[[], object]] = [
        lambda: kept.append(old.append(token_group(2))),
        lambda: old.begin_iteration(1),
        lambda: kept.extend(old.append_many([token_group(3), token_group(4)])),
        lambda: old.evict(kept[1:2], "why"),
        lambda: old.mark_consumed(kept[:1], 1),
    ]
    for call in calls:
        before = overtaken.new
        try:
            call()
        except FencedError:
            assert overtaken.new is not None
            break
        assert before is None or call is calls[1], "acknowledged after a takeover"
    old.close()
    if overtaken.new is None:
        return
    with overtaken.finish() as third:
        restored = third.restore(0)
        assert restored.report.damage == ()
        seen = [group.uid for queue in restored.pending.values() for group in queue]
        assert len(seen) == len(set(seen))


def test_an_append_that_fails_while_its_holder_is_overtaken_says_fenced(
    path: Path, overtaken: Overtaken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new holder's compaction has removed the journal that is to tell of the failure."""
    old = RolloutBank.open(path)
    old.restore(0)
    old.append(token_group(1))
    fdatasync, calls = os.fdatasync, itertools.count(1)

    def failing(descriptor: int) -> None:
        if next(calls) == 1:
            raise OSError(5, "planted")
        fdatasync(descriptor)

    def work(new: RolloutBank) -> None:
        new.restore(0)
        train(new, range(3))
        new._compactor.wait()

    monkeypatch.setattr(os, "fdatasync", failing)
    overtaken.within(os, "fdatasync", until_call(2), work)
    with pytest.raises((FencedError, OSError)):
        old.append(token_group(2))
    with pytest.raises(FencedError):
        old.append(token_group(3))
    old.close()
    overtaken.finish().close()


@pytest.mark.parametrize("name", ["pwritev", "fsync", "rename", "open", "stat"])
@pytest.mark.parametrize("nth", range(1, 8))
def test_closing_is_quiet_wherever_a_takeover_comes_between(
    path: Path, overtaken: Overtaken, name: str, nth: int
) -> None:
    old = RolloutBank.open(path)
    old.restore(0)
    uid = old.append(token_group(1))
    overtaken.within(os, name, until_call(nth), lambda new: new.append(token_group(2)))
    old.close()
    if overtaken.new is not None:
        with overtaken.finish() as third:
            found = [group.uid for queue in third.restore(0).pending.values() for group in queue]
            assert (len(found), found[0]) == (2, uid)


@pytest.mark.parametrize("name", ["link", "unlink", "rename", "symlink", "mkdir", "open", "fsync"])
@pytest.mark.parametrize("nth", range(1, 5))
def test_who_makes_a_new_bank_and_is_overtaken_spoils_nothing_of_it(
    path: Path, overtaken: Overtaken, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    create = store.create_bank

    def creating(*args: Any) -> None:
        monkeypatch.setattr(bank_module, "create_bank", create)
        overtaken.within(os, name, until_call(nth), lambda new: new.restore(0))
        create(*args)

    monkeypatch.setattr(bank_module, "create_bank", creating)
    try:
        old = RolloutBank.open(path)
    except FencedError:
        pass
    else:
        if overtaken.new is None:
            old.close()
            return
        with pytest.raises(FencedError):
            old.append(token_group(1))
        old.close()
    assert overtaken.new is not None
    one_at_a_time(overtaken.new, range(9))  # with a merge
    assert overtaken.new.stats().compaction_error is None
    with overtaken.finish() as third:
        stats = third.stats()
        assert (stats.archived_files, stats.archived_groups, stats.live_groups) == (1, 8, 1)
