"""A call to the system that fails in compaction, a merge or a restore below the horizon loses and doubles nothing.

Every call that writes, syncs, renames, links or unlinks fails once, each in turn. The handle goes on; afterwards, and
after the next open, each rollout is there once, in the archive as in ``scan``, and the archive's link leads somewhere.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from builders import token_group
from machine import directory_in_memory

from arrowbank import RolloutBank, scan
from arrowbank.archive import merging

pytestmark = pytest.mark.slow
CALLS = ("rename", "link", "unlink", "symlink", "fsync", "fdatasync", "pwritev", "mkdir", "rmdir")


@contextmanager
def failing_once(call: str, at: int) -> Iterator[list[int]]:
    """Let the n-th call of one function of ``os`` fail, before or (odd n) after it has had its effect."""
    real: Callable[..., Any] = getattr(os, call)
    calls = [0]

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] != at // 2 + 1:
            return real(*args, **options)
        if at % 2 and call != "pwritev":
            real(*args, **options)
        raise OSError(errno.EIO, "planted")

    setattr(os, call, counted)
    try:
        yield calls
    finally:
        setattr(os, call, real)


@pytest.fixture
def memory() -> Iterator[Path]:
    """One for each test."""
    with directory_in_memory() as directory:
        yield directory


class Trained:
    """A run, and what it has trained on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drawn: dict[int, list[str]] = {}
        self.made: set[str] = set()

    def train(self, bank: RolloutBank, at: int) -> None:
        bank.begin_iteration(at)
        uids = bank.append_many([token_group(10 * at + number, members=2) for number in range(3)])
        self.made.update(uids)
        bank.mark_consumed(uids[:2], at)
        self.drawn[at] = uids[:2]

    def check(self) -> None:
        rows: Counter[tuple[str, int]] = Counter()
        for file in (self.path / "archive").iterdir():
            table = pq.read_table(file, columns=["group_uid", "member_index"])
            rows.update(zip(*table.to_pydict().values(), strict=True))
        assert set(rows.values()) <= {1}, "the archive shows a rollout twice"
        seen = Counter(zip(*scan(self.path).to_arrow().select([0, 8]).to_pydict().values(), strict=True))
        assert set(seen.values()) == {1}, "scan shows a rollout twice"
        assert {uid for uid, _ in seen} == self.made
        assert rows.keys() <= seen.keys()


def outcome(work: Callable[[], object]) -> bool:
    """Whether the call raised what was planted."""
    try:
        work()
    except OSError as error:
        assert "planted" in str(error)
        return True
    return False


@pytest.mark.parametrize("call", CALLS)
def test_any_call_that_fails_in_compaction_and_merging_costs_nothing(
    memory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(merging, "FAN_IN", 2)
    failed = 0
    for at in range(80):
        run = Trained(memory / f"{call}-{at}")
        bank = RolloutBank.open(run.path, keep_checkpoints=1)
        bank.restore(0)
        for iteration in range(4):
            run.train(bank, iteration)
            bank.checkpoint(iteration + 1, wait=True)
        run.train(bank, 4)
        with failing_once(call, at) as calls:  # a fourth file, so that there are files to merge, twice
            failed += outcome(lambda bank=bank: bank.checkpoint(5, wait=True))  # type: ignore[misc]
        run.check()
        for iteration in (5, 6):
            run.train(bank, iteration)
            bank.checkpoint(iteration + 1, wait=True)
        assert bank.stats().compaction_error is None
        run.check()
        bank.close()
        with RolloutBank.open(run.path) as again:
            restored = again.restore(2)
            assert [[group.uid for group in draw.groups] for draw in restored.draws] == [
                run.drawn[iteration] for iteration in range(2, 7)
            ]
            run.check()
        if calls[0] < at // 2 + 1:
            break
    else:
        raise AssertionError("the work makes more calls than were made to fail")
    assert failed


@pytest.mark.parametrize("call", CALLS)
def test_any_call_that_fails_in_a_restore_below_the_horizon_costs_nothing(memory: Path, call: str) -> None:
    for at in range(80):
        run = Trained(memory / f"{call}-{at}")
        with RolloutBank.open(run.path, keep_checkpoints=1) as bank:
            bank.restore(0)
            for iteration in range(5):
                run.train(bank, iteration)
                bank.checkpoint(iteration + 1, wait=True)
        bank = RolloutBank.open(run.path, keep_checkpoints=1)
        wanted = [run.drawn[iteration] for iteration in range(1, 5)]
        with failing_once(call, at) as calls:
            raised = outcome(lambda bank=bank: bank.restore(1))  # type: ignore[misc]
        run.check()
        restored = bank.restore(1)
        assert [[group.uid for group in draw.groups] for draw in restored.draws] == wanted, f"raised: {raised}"
        run.check()
        bank.close()
        with RolloutBank.open(run.path) as again:
            assert [[group.uid for group in draw.groups] for draw in again.restore(1).draws] == wanted
            run.check()
        if calls[0] < at // 2 + 1:
            break
    else:
        raise AssertionError("the work makes more calls than were made to fail")
