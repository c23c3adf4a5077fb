"""The end of a handle: close, with, fork."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from runs import archived_rows, train

from arrowbank import BankClosedError, RolloutBank, scan
from arrowbank.archive.store import ArchiveStore

# -- close, with, fork


def test_with_closes_and_a_closed_handle_refuses_everything(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        uid = bank.append(token_group(1))
    bank.close()
    calls = [
        lambda: bank.append(token_group(2)),
        lambda: bank.append_many([]),
        lambda: asyncio.run(bank.append_async(token_group(2))),
        lambda: bank.mark_consumed([uid], 0),
        lambda: bank.evict([uid], "x"),
        lambda: bank.begin_iteration(1),
        lambda: bank.checkpoint(1),
        lambda: bank.restore(0),
        lambda: bank.__enter__(),
    ]
    for call in calls:
        with pytest.raises(BankClosedError, match="was closed"):
            call()
    assert bank.stats().live_groups == 1


def test_appends_that_wait_when_the_bank_is_closed_end_one_way_or_the_other(path: Path) -> None:
    async def run() -> list[Any]:
        bank = RolloutBank.open(path)
        tasks = [asyncio.ensure_future(bank.append_async(token_group(number))) for number in range(20)]
        await asyncio.sleep(0)
        await asyncio.to_thread(bank.close)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    outcomes = asyncio.run(run())
    assert {type(outcome) for outcome in outcomes} <= {str, BankClosedError}
    with RolloutBank.open(path) as bank:
        kept = sum(map(len, bank.restore(0).pending.values()))
        assert kept == sum(isinstance(outcome, str) for outcome in outcomes)


def test_an_error_inside_with_is_not_hidden_by_one_of_closing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "planted")

    monkeypatch.setattr(ArchiveStore, "commit", full)
    with pytest.raises(KeyError) as raised, RolloutBank.open(path) as bank:
        train(bank, range(3))
        raise KeyError("the trainer's own")
    assert "planted" in raised.value.__notes__[0]


def test_a_final_close_archives_everything_and_leaves_no_segment(bank: RolloutBank, path: Path) -> None:
    train(bank, range(3))
    held_out = bank.append(token_group(7), split="eval")
    bank.evict([bank.append(token_group(8))], "left over")
    bank.close(final=True)
    assert list((path / "segments").iterdir()) == []
    assert list((path / "tmp").iterdir()) == []
    rows = scan(path, live=False).to_arrow()
    assert rows.num_rows == 8 * 4
    assert rows.filter([uid == held_out for uid in rows["group_uid"].to_pylist()])["outcome"].to_pylist() == [None] * 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # of Python 3.12 on
def test_a_handle_that_was_forked_refuses_and_closing_it_changes_nothing(bank: RolloutBank, path: Path) -> None:
    uid = bank.append(token_group(1))
    lock = (path / "LOCK").read_bytes()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for call in (lambda: bank.append(token_group(2)), lambda: bank.mark_consumed([uid], 0), bank.stats):
            try:
                call()
                said.append("went through")
            except BankClosedError as error:
                said.append("refused" if "forked" in str(error) else str(error))
        bank.close()
        os.write(writer, " ".join(said).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1000) == b"refused refused refused"
    for descriptor in (reader, writer):
        os.close(descriptor)
    assert (path / "LOCK").read_bytes() == lock
    bank.mark_consumed([uid], 0)


def test_two_threads_may_close_at_once(path: Path) -> None:
    bank = RolloutBank.open(path)
    train(bank, range(4))
    errors: list[Any] = []

    def close() -> None:
        try:
            bank.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_nothing_stays_open_behind_a_closed_bank(path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with RolloutBank.open(path):
        pass
    before, threads = descriptors(), threading.active_count()
    given = []
    for _ in range(3):
        with RolloutBank.open(path) as bank:
            given += [bank.restore(0), bank.restore(0)]
            asyncio.run(bank.append_async(token_group(1)))
    assert threading.active_count() == threads
    assert descriptors() == before  # the groups are mapped still
    assert given[-1].pending["math"][0].rollouts == token_group(1).rollouts


def test_while_the_interpreter_ends_compaction_is_done_by_the_caller(path: Path) -> None:
    """The main thread has ended, another one trains on: no thread can be started any more."""
    code = """
import sys, threading
from builders import token_group
from runs import train
from arrowbank import RolloutBank

def run():
    threading.main_thread().join()
    with RolloutBank.open(sys.argv[1], keep_checkpoints=1) as bank:
        bank.restore(0)
        train(bank, range(3))
        bank.close(final=True)

threading.Thread(target=run).start()
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=Path(__file__).parent)
    assert len({uid for uid, _ in archived_rows(path)}) == 6
