"""The bank's promises at its public API: durable, all or none, whole again after a failure."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import EVERY, build, token_group
from machine import require_mounts
from runs import kill

from arrowbank import (
    DuplicateGroupError,
    InvalidDrawError,
    RolloutBank,
    RolloutGroup,
    UnknownGroupError,
    UnrepresentableError,
    codec,
)


@pytest.fixture
def bank(path: Path) -> Iterator[RolloutBank]:
    """A new bank need not be restored."""
    with RolloutBank.open(path) as bank:
        yield bank


def pending(bank: RolloutBank, iteration: int = 0) -> list[RolloutGroup]:
    return [group for queue in bank.restore(iteration).pending.values() for group in queue]


def uids(groups: list[RolloutGroup]) -> list[str | None]:
    return [group.uid for group in groups]


def failing(monkeypatch: pytest.MonkeyPatch, name: str = "fdatasync", *, times: int = 1, code: int = errno.EIO) -> None:
    """Have the system call do its work and then fail, so many times."""
    real, left = getattr(os, name), [code] * times

    def fail(*args: Any, **options: Any) -> Any:
        if left:
            raise OSError(left.pop(), "planted")
        return real(*args, **options)

    monkeypatch.setattr(os, name, fail)


# -- I1: durable when append returns


@pytest.mark.parametrize("how", ["append", "append_many", "append_async"])
def test_an_appended_group_survives_the_process(path: Path, how: str) -> None:
    code = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from builders import token_group
from arrowbank import RolloutBank
bank, group = RolloutBank.open(sys.argv[1]), token_group(7)
append = {{"append": bank.append, "append_many": lambda g: bank.append_many([g]),
          "append_async": lambda g: asyncio.run(bank.append_async(g))}}[{how!r}]
append(group)
assert group.uid
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    with RolloutBank.open(path) as bank:
        assert [group.rollouts for group in pending(bank)] == [token_group(7).rollouts]


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_group_of_every_kind_comes_back_bit_for_bit(bank: RolloutBank, path: Path, name: str) -> None:
    group = build(name)
    bank.append(group, source_index=5)
    with kill(path) as again:
        restored = again.restore(0)
        ((found,),) = restored.pending.values()
        assert found == group
        assert restored.source_indices == {5}


def test_append_many_is_one_sync_and_append_one_each(bank: RolloutBank) -> None:
    bank.append_many([token_group(number) for number in range(10)])
    assert bank.stats().commits == 1
    for number in range(3):
        bank.append(token_group(number))
    stats = bank.stats()
    assert (stats.commits, stats.appended_groups, stats.live_groups) == (4, 13, 13)
    assert bank.append_many([]) == []


def test_append_many_with_one_group_that_cannot_be_kept_appends_none(bank: RolloutBank, path: Path) -> None:
    good, bad = token_group(1), token_group(2, extra_field=(1, 2))
    with pytest.raises(UnrepresentableError, match=r"rollouts\[0\]\.extra_field"):
        bank.append_many([good, bad])
    assert (good.uid, bad.uid) == (None, None)
    bank.append(good)
    with kill(path) as again:
        assert uids(pending(again)) == [good.uid]


def test_append_many_that_fails_on_the_disk_appends_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = RolloutBank.open(path)
    bank.restore(0)
    failing(monkeypatch)
    with pytest.raises(OSError, match="planted"):
        bank.append_many([token_group(1), token_group(2)])
    with kill(path) as again:
        assert pending(again) == []


@pytest.fixture
def slow_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs as a disk's: in memory they take no time, and none would be shared."""
    fdatasync = os.fdatasync

    def slow(descriptor: int) -> None:
        time.sleep(0.05)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)


@pytest.mark.usefixtures("slow_syncs")
def test_appends_in_flight_share_syncs(bank: RolloutBank, path: Path) -> None:
    groups = [token_group(number) for number in range(64)]

    async def append() -> list[str]:
        return await asyncio.gather(*(bank.append_async(group) for group in groups))

    assert asyncio.run(append()) == uids(groups)
    assert bank.stats().commits < 60
    with kill(path) as again:
        assert sorted(map(str, uids(pending(again)))) == sorted(map(str, uids(groups)))


@pytest.mark.usefixtures("slow_syncs")
def test_threads_that_append_share_syncs(path: Path, bank: RolloutBank) -> None:
    given: list[str] = []

    def append(first: int) -> None:
        given.extend(bank.append(token_group(first + number)) for number in range(5))

    threads = [threading.Thread(target=append, args=(10 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bank.stats().commits < 30
    with kill(path) as again:
        assert sorted(map(str, uids(pending(again)))) == sorted(given)


@pytest.mark.usefixtures("slow_syncs")
def test_the_event_loop_runs_between_encodings_and_during_syncs(
    bank: RolloutBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_group, encoded = codec.encode_group, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        encoded.append(None)
        return encode_group(*args, **kwargs)

    monkeypatch.setattr(codec, "encode_group", counted)

    async def append() -> list[int]:
        ticks = [0]
        work = asyncio.gather(*(bank.append_async(token_group(number)) for number in range(64)))
        while not work.done():
            await asyncio.sleep(0)
            ticks.append(len(encoded))
        await work
        return ticks

    ticks = asyncio.run(append())
    assert max(after - before for before, after in pairwise(ticks)) == 1
    assert ticks.count(64) > 10


def test_a_cancelled_append_async_disturbs_nobody(bank: RolloutBank, path: Path) -> None:
    async def append() -> None:
        tasks = [asyncio.ensure_future(bank.append_async(token_group(number))) for number in range(6)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[3].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, str) for one in done) == 4

    asyncio.run(append())
    assert bank.stats().live_groups in {4, 5, 6}
    bank.append(token_group(9))


# -- I9: failures


@pytest.mark.parametrize("name", ["pwritev", "fdatasync", "fsync", "link", "open"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_append_raises_its_errno_and_the_retry_is_kept_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    bank = RolloutBank.open(path)
    bank.restore(0)
    before = [bank.append(token_group(0))] if name in ("pwritev", "fdatasync") else []
    group = token_group(1)
    with monkeypatch.context() as patch:
        failing(patch, name, code=code)
        with pytest.raises(OSError) as raised:
            bank.append(group)
    assert raised.value.errno == code
    bank.append(group)
    with pytest.raises(DuplicateGroupError):
        bank.append(group)
    with kill(path) as again:
        assert uids(pending(again)) == [*before, group.uid]


def test_a_poisoned_file_is_never_used_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        bank.append(token_group(0))
        (segment,) = (path / "segments").iterdir()
        with monkeypatch.context() as patch:
            failing(patch)
            with pytest.raises(OSError, match="planted"):
                bank.append(token_group(1))
        size = segment.stat().st_size
        bank.append(token_group(2))
        bank.begin_iteration(1)
        assert segment.stat().st_size == size
        assert len(list((path / "segments").iterdir())) == 2


def test_everyone_in_a_failed_batch_is_told_and_may_retry(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = RolloutBank.open(path)
    bank.restore(0)
    groups = [token_group(number) for number in range(8)]

    async def append() -> list[Any]:
        return await asyncio.gather(*(bank.append_async(group) for group in groups), return_exceptions=True)

    with monkeypatch.context() as patch:
        failing(patch, times=100)
        assert all(isinstance(outcome, OSError) for outcome in asyncio.run(append()))
    asyncio.run(append())
    with kill(path) as again:
        assert sorted(map(str, uids(pending(again)))) == sorted(map(str, uids(groups)))


def test_a_full_disk_loses_nothing_and_the_bank_works_again(tmp_path: Path) -> None:
    require_mounts()
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", mount], check=True)
    try:
        ballast = mount / "ballast"
        ballast.write_bytes(bytes(200_000))
        with RolloutBank.open(mount / "bank") as bank:
            bank.restore(0)
            kept, group = [], token_group(0)
            with pytest.raises(OSError, match="No space left"):
                for number in range(10_000):
                    group = token_group(number, generated=500)
                    kept.append(bank.append(group))
            with pytest.raises(OSError, match="No space left"):
                bank.append(group)
            ballast.unlink()
            kept.append(bank.append(group))
            bank.mark_consumed(kept[:2], 0)
        with RolloutBank.open(mount / "bank") as bank:
            restored = bank.restore(0)
            assert [group.uid for group in restored.draws[0].groups] == kept[:2]
            assert uids(list(restored.pending["math"])) == kept[2:]
        assert list((mount / "bank/tmp").iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_failed_draw_was_not_made_and_may_be_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = RolloutBank.open(path)
    bank.restore(0)
    uid = bank.append(token_group(1))
    with monkeypatch.context() as patch:
        failing(patch)
        with pytest.raises(OSError, match="planted"):
            bank.mark_consumed([uid], 0)
    bank.mark_consumed([uid], 1)
    with kill(path) as again:
        assert [draw.iteration for draw in again.restore(0).draws] == [1]


def test_an_interrupt_while_another_thread_writes_leaves_the_append_out(
    bank: RolloutBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupted)
        group = token_group(1)
        with pytest.raises(KeyboardInterrupt):
            bank.append(group)
    assert bank.append(group) == group.uid
    assert bank.stats().live_groups == 1


# -- uids, splits, evictions


def test_a_group_that_was_appended_before_is_refused(bank: RolloutBank, path: Path) -> None:
    group = token_group(1)
    bank.append(group)
    twice = token_group(2)
    for given in ([group], [token_group(3), group], [twice, twice]):
        with pytest.raises(DuplicateGroupError):
            bank.append_many(given)
    with pytest.raises(DuplicateGroupError):
        asyncio.run(bank.append_async(group))
    assert twice.uid is None
    assert bank.stats().live_groups == 1
    with pytest.raises(TypeError, match="RolloutGroup"):
        bank.append("group")  # type: ignore[arg-type]


def test_other_splits_and_evicted_groups_are_kept_and_never_pending(bank: RolloutBank, path: Path) -> None:
    held_out = bank.append(token_group(1), split="eval")
    rejected = bank.append(token_group(2), evicted="too easy", source_index=9)
    train = bank.append(token_group(3), source_index=11)
    with pytest.raises(InvalidDrawError, match="split 'eval'"):
        bank.mark_consumed([held_out], 0)
    with pytest.raises(InvalidDrawError, match="evicted groups"):
        bank.mark_consumed([rejected], 0)
    with pytest.raises(ValueError, match="split"):
        bank.append(token_group(4), split="")
    with kill(path) as again:
        restored = again.restore(0)
        assert uids(list(restored.pending["math"])) == [train]
        assert restored.source_indices == {11}
        assert again.stats().live_groups == 3
        with pytest.raises(InvalidDrawError, match="evicted groups"):
            again.mark_consumed([rejected], 0)


def test_mark_consumed_waits_for_appends_in_flight(bank: RolloutBank, monkeypatch: pytest.MonkeyPatch) -> None:
    fdatasync = os.fdatasync
    syncing = threading.Event()

    def slow(descriptor: int) -> None:
        syncing.set()
        time.sleep(0.2)
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    group = token_group(1)
    thread = threading.Thread(target=bank.append, args=(group,))
    thread.start()
    assert syncing.wait(60)
    bank.mark_consumed([str(group.uid)], 0)
    thread.join()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda bank: bank.mark_consumed(["nobody"], 0), UnknownGroupError),
        (lambda bank: bank.evict(["nobody"], "x"), UnknownGroupError),
        (lambda bank: bank.mark_consumed("nobody", 0), TypeError),
        (lambda bank: bank.mark_consumed([token_group(1)], 0), TypeError),
        (lambda bank: bank.mark_consumed([], 0), InvalidDrawError),
        (lambda bank: bank.mark_consumed(["x"], 0, state=5), TypeError),
        (lambda bank: bank.mark_consumed(["x"], 0.5), TypeError),
        (lambda bank: bank.begin_iteration(-1), InvalidDrawError),
        (lambda bank: bank.begin_iteration("1"), TypeError),
        (lambda bank: bank.evict([], ""), ValueError),
        (lambda bank: bank.checkpoint(5), InvalidDrawError),
        (lambda bank: bank.restore(-1), ValueError),
        (lambda bank: bank.restore(0, mode="again"), ValueError),
    ],
)
def test_what_no_trainer_could_mean_is_refused(
    bank: RolloutBank, call: Callable[[RolloutBank], None], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        call(bank)
    assert bank.append(token_group(1))


def test_numbers_of_numpy_are_iterations(bank: RolloutBank, path: Path) -> None:
    import numpy as np

    bank.restore(np.int64(0))  # type: ignore[arg-type]
    bank.begin_iteration(np.int64(2))  # type: ignore[arg-type]
    uid = bank.append(token_group(1))
    bank.mark_consumed([uid], np.int64(2), span=np.int32(2))  # type: ignore[arg-type]
    bank.checkpoint(np.int64(3))  # type: ignore[arg-type]
    with kill(path) as again:
        (draw,) = again.restore(3).draws
        assert (draw.iteration, draw.span, draw.offset) == (2, 2, 1)


def test_reasons_and_splits_are_words(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path / "bank") as bank:
        bank.restore(0)
        with pytest.raises(ValueError, match="evicted=True"):
            bank.append(token_group(1), evicted=True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="split=3"):
            bank.append(token_group(1), split=3)  # type: ignore[arg-type]
        uid = bank.append(token_group(1))
        with pytest.raises(ValueError, match="in words, not 3"):
            bank.evict([uid], 3)  # type: ignore[arg-type]
        assert bank.stats().live_groups == 1
