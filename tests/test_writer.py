"""BankWriter: other processes of a run append beside the coordinator."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from runs import archived_rows, kill

from arrowbank import BankClosedError, BankWriter, FencedError, InvalidDrawError, RolloutBank, UnknownGroupError, scan
from arrowbank.durable import files
from arrowbank.durable.message import build_message, empty_batch
from arrowbank.durable.stream import StreamWriter
from arrowbank.schema import SEGMENT_SCHEMA


@pytest.fixture
def bank(path: Path) -> RolloutBank:
    bank = RolloutBank.open(path, keep_checkpoints=1)
    bank.restore(0)
    return bank


def join(bank: RolloutBank, name: str = "rank-1") -> BankWriter:
    return BankWriter.open(pickle.loads(pickle.dumps(bank.writer_token())), name)


def test_the_coordinator_draws_what_a_writer_has_appended(bank: RolloutBank, path: Path) -> None:
    with join(bank) as writer:
        uids = [writer.append(token_group(1)), *writer.append_many([token_group(2), token_group(3)])]
        uids.append(asyncio.run(writer.append_async(token_group(4))))
        bank.mark_consumed(uids[:2], 0)
        with pytest.raises(UnknownGroupError):
            bank.mark_consumed(["0" * 32], 0)
        late = writer.append(token_group(5))
        bank.evict([late], "no use")
    names = sorted(file.name for file in (path / "segments").iterdir())
    assert names == ["00000000-rank-1-s0001-0000.arrows"]
    with kill(path) as again:
        restored = again.restore(0)
        assert [group.uid for draw in restored.draws for group in draw.groups] == uids[:2]
        assert [group.uid for group in restored.pending["math"]] == uids[2:]
        assert restored.pending["math"][0].rollouts == token_group(3).rollouts


def test_groups_of_writers_are_ordered_by_when_they_were_finished(bank: RolloutBank, path: Path) -> None:
    with join(bank, "a") as first, join(bank, "b") as second:
        uids = [to.append(token_group(number)) for number, to in enumerate([second, first, bank, second, first])]
    with kill(path) as again:
        assert [group.uid for group in again.restore(0).pending["math"]] == uids


def test_what_a_writer_has_finished_is_archived(bank: RolloutBank, path: Path) -> None:
    writer = join(bank)
    uids = [writer.append(token_group(1))]
    bank.mark_consumed(uids, 0)
    for iteration in (1, 2):
        bank.begin_iteration(iteration)
        writer.begin_iteration(iteration)
        uids.append(writer.append(token_group(iteration)))
        bank.mark_consumed(uids[-1:], iteration)
        bank.checkpoint(iteration, wait=True)
    assert {uid for uid, _ in archived_rows(path)} == set(uids[:2])
    assert bank.live_bytes > 0
    writer.close()
    bank.begin_iteration(3)
    bank.checkpoint(3)
    bank.close(final=True)
    assert {uid for uid, _ in archived_rows(path)} == set(uids)
    assert list((path / "segments").iterdir()) == []
    assert set(scan(path).to_arrow()["writer"].to_pylist()) == {"rank-1"}


def test_a_writer_is_fenced_when_the_coordinator_changes(bank: RolloutBank, path: Path) -> None:
    writer, token = join(bank), bank.writer_token()
    writer.append(token_group(1))
    second = kill(path)
    with pytest.raises(FencedError):
        writer.append(token_group(2))
    with pytest.raises(FencedError):
        BankWriter.open(token, "rank-2")
    assert len(second.restore(0).pending["math"]) == 1
    with join(second) as next_one:
        next_one.append(token_group(3))
    second.close()
    with RolloutBank.open(path) as third:
        assert len(third.restore(0).pending["math"]) == 2


def test_a_second_restore_fences_the_writers_of_the_session_before(bank: RolloutBank) -> None:
    writer = join(bank)
    writer.append(token_group(1))
    bank.append(token_group(2))
    assert len(bank.restore(0).pending["math"]) == 2
    with pytest.raises(FencedError):
        writer.append(token_group(3))


def test_a_closed_session_takes_no_new_writer(bank: RolloutBank) -> None:
    token, writer = bank.writer_token(), join(bank)
    bank.close()
    with pytest.raises(FencedError, match="has ended"):
        BankWriter.open(token, "rank-1")
    with pytest.raises(FencedError, match="has ended"):
        writer.append(token_group(1))


def test_a_token_is_had_after_restore_only(path: Path) -> None:
    with RolloutBank.open(path) as bank, pytest.raises(InvalidDrawError, match="before restore"):
        bank.writer_token()


@pytest.mark.parametrize("name", ["main", "carry", "", "../x", "a/b", "-a", "a" * 65])
def test_a_writers_name_must_fit_a_file_name(bank: RolloutBank, name: str) -> None:
    with pytest.raises(ValueError, match="writer name"):
        join(bank, name)


def test_a_token_of_another_bank_is_refused(bank: RolloutBank, tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path / "other"), pytest.raises(ValueError, match="the token is of bank"):
        BankWriter.open(bank.writer_token(), "rank-1", path=tmp_path / "other")


def test_a_writer_of_the_same_name_may_be_started_again(bank: RolloutBank, path: Path) -> None:
    first, second = join(bank), join(bank)
    uids = [writer.append(token_group(number)) for number, writer in enumerate([first, second, first, second])]
    assert len(list((path / "segments").iterdir())) == 2
    with kill(path) as again:
        assert [group.uid for group in again.restore(0).pending["math"]] == uids


def test_no_segments_name_recurs_though_the_first_one_is_archived_and_gone(bank: RolloutBank, path: Path) -> None:
    for number in range(4):
        bank.begin_iteration(number)
        with BankWriter.open(replace(bank.writer_token(), iteration=0), "rank-1") as writer:
            bank.mark_consumed([writer.append(token_group(number))], number)
        bank.checkpoint(number + 1, wait=True)
    assert len(list((path / "segments").iterdir())) < 4
    late = BankWriter.open(replace(bank.writer_token(), iteration=0), "rank-1").append(token_group(9))
    bank.begin_iteration(4)
    bank.mark_consumed([late], 4)
    with kill(path) as again:
        assert [group.uid for draw in again.restore(4).draws for group in draw.groups] == [late]


def test_closing_twice_is_no_error_and_a_closed_writer_refuses(bank: RolloutBank) -> None:
    writer = join(bank)
    writer.close()
    writer.close()
    for call in (lambda: writer.append(token_group(1)), lambda: writer.begin_iteration(1)):
        with pytest.raises(BankClosedError, match="was closed"):
            call()


def test_in_a_forked_child_a_writer_is_closed(bank: RolloutBank) -> None:
    writer = join(bank)
    child = os.fork()
    if not child:
        try:
            writer.append(token_group(1))
        except BankClosedError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    writer.append(token_group(1))


@pytest.mark.parametrize("is_read", [False, True])
def test_a_failed_append_of_a_writer_is_not_in_the_bank(
    bank: RolloutBank, path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """Its record may be whole on the disk; the writer's next segment begins with saying that it does not count."""
    writer = join(bank)
    kept = [writer.append(token_group(1))]
    fdatasync, failed = os.fdatasync, []

    def fails(descriptor: int) -> None:
        fdatasync(descriptor)
        if not failed:
            failed.append(True)
            if is_read:
                bank._ledger.look_at_writers()
            raise OSError(5, "planted")

    group = token_group(2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(OSError, match="planted"):
            writer.append(group)
    with pytest.raises(UnknownGroupError):
        bank.mark_consumed([str(group.uid)], 0)
    with kill(path) as again:
        assert [found.uid for found in again.restore(0).pending["math"]] == kept
        again.mark_consumed(kept, 0)
        again.begin_iteration(1)
        again.checkpoint(1, wait=True)
        again.close(final=True)
    with RolloutBank.open(path) as last:
        assert last.restore(1).report.pending_groups == 0


def test_what_a_fenced_writer_says_late_takes_no_group_out_of_a_draw(bank: RolloutBank, path: Path) -> None:
    """It had made its next segment already when it was overtaken, and writes into it when its group is drawn."""
    writer = join(bank)
    uid = writer.append(token_group(1))
    _, late = writer._appender._open(1)
    second = kill(path)
    second.restore(0)
    second.mark_consumed([uid], 0)
    told = [["00000000-rank-1-s0001-0000.arrows", 0, 1]]
    late.append([build_message(empty_batch(SEGMENT_SCHEMA), {"abandoned": told})])
    with kill(path) as third:
        (draw,) = third.restore(0).draws
        assert ([group.uid for group in draw.groups], draw.lost) == ([uid], ())


def test_a_writer_that_was_fenced_makes_no_segment_to_say_so(
    bank: RolloutBank, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = join(bank)
    writer.append(token_group(1))
    looks = iter([None, FencedError("planted")])

    def check() -> None:
        found = next(looks, None)
        if found is not None:
            raise found

    monkeypatch.setattr(writer._appender, "_check_fence", check)
    with pytest.raises(FencedError, match="planted"):
        writer.append(token_group(2))
    assert len(list((path / "segments").iterdir())) == 1
    assert writer._appender._untold == []


def test_half_a_prefix_is_not_taken_for_the_end_of_a_segment(
    bank: RolloutBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight bytes may be seen half written: FFFFFFFF and zeros, as the end mark is."""
    writer = join(bank)
    writer.append(token_group(1))
    write_at = files.write_at

    def halting(descriptor: int, parts: Sequence[Any], offset: int) -> None:
        if [len(part) for part in parts] == [8]:
            os.pwrite(descriptor, bytes(parts[0])[:4], offset)
            bank._ledger.look_at_writers()
        write_at(descriptor, parts, offset)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_at", halting)
        uid = writer.append(token_group(2))
    assert bank._ledger.writers.finished == set()
    bank.mark_consumed([uid, writer.append(token_group(3))], 0)


def test_the_retry_of_a_failed_append_is_kept_once(
    bank: RolloutBank, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, group = join(bank), token_group(2)

    def fails(*_: Any) -> None:
        raise OSError(28, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(StreamWriter, "append", fails)
        for _ in range(3):
            with pytest.raises(OSError, match="planted"):
                writer.append(group)
    writer.append(group)
    bank.mark_consumed([str(group.uid)], 0)
    with kill(path) as again:
        restored = again.restore(0)
        assert [found.uid for found in restored.draws[0].groups] == [group.uid]
        assert restored.report.lost_records == 0


def test_appending_goes_on_while_another_thread_restores_anew(path: Path) -> None:
    bank = RolloutBank.open(path)
    bank.restore(0)
    uids: list[str] = []
    stop = threading.Event()

    def append() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            uids.append(bank.append(token_group(number)))

    threads = [threading.Thread(target=append) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        bank.restore(0)
    stop.set()
    for thread in threads:
        thread.join()
    bank.close()
    with RolloutBank.open(path) as again:
        assert {group.uid for group in again.restore(0).pending["math"]} == set(uids)


def test_writers_in_other_processes_append_at_once(bank: RolloutBank, path: Path) -> None:
    code = """
import pickle, sys
from builders import token_group
from arrowbank import BankWriter
token = pickle.loads(bytes.fromhex(sys.argv[1]))
with BankWriter.open(token, sys.argv[2]) as writer:
    for number in range(20):
        print(writer.append(token_group(number)), flush=True)
"""
    token = pickle.dumps(bank.writer_token()).hex()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, token, f"rank-{rank}"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        for rank in range(4)
    ]
    uids = [line for writer in writers for line in writer.communicate()[0].split()]
    assert len(set(uids)) == 80
    bank.mark_consumed(uids, 0)
    with kill(path) as again:
        assert [group.uid for group in again.restore(0).draws[0].groups] == uids
