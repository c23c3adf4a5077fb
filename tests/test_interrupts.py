"""Ctrl-C and SIGTERM, between any two lines of a call: nothing durable is told to be lost, nobody waits for ever."""

from __future__ import annotations

import linecache
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from builders import token_group
from runs import kill

import arrowbank
from arrowbank import BankClosedError, RolloutBank
from arrowbank.durable.intake import AppendOptions

HERE = str(Path(arrowbank.__file__).parent / "durable")
FILES = tuple(f"{HERE}/{name}.py" for name in ("appender", "journal", "ledger", "stream", "intake"))


@pytest.fixture
def place() -> Iterator[Path]:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="arrowbank-", dir=shared if shared.is_dir() else None) as directory:
        yield Path(directory)


def interrupted(work: Callable[[], object], at: int) -> bool:
    """Raise KeyboardInterrupt before the n-th line of the durable part that ``work`` comes to; tell if it came there.

    Not at the lines of with statements: a tracer comes there once more before they are left, a signal does not.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(
            "with"
        ):
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def pending(bank: RolloutBank) -> list[str]:
    return [str(group.uid) for queue in bank.restore(0).pending.values() for group in queue]


@pytest.mark.slow
def test_an_append_interrupted_at_any_line_is_in_the_bank_whole_or_not_at_all(place: Path) -> None:
    for at in range(1, 400):
        bank = RolloutBank.open(place / str(at))
        bank.restore(0)
        kept = bank.append(token_group(1))
        group = token_group(2)
        was_interrupted = interrupted(lambda bank=bank, group=group: bank.append(group), at)  # type: ignore[misc]
        later = bank.append(token_group(3))
        bank.close()
        with RolloutBank.open(place / str(at)) as again:
            found = pending(again)
        assert found[0] == kept and found[-1] == later, at
        assert found in ([kept, later], [kept, group.uid, later]), at
        if not was_interrupted:
            assert len(found) == 3
            return
    raise AssertionError("an append has more lines than were tried")


@pytest.mark.slow
def test_who_waits_for_an_interrupted_thread_is_told_what_became_of_his_append(place: Path) -> None:
    outcomes = set()
    for at in range(1, 400):
        bank = RolloutBank.open(place / str(at))
        bank.restore(0)
        bank.append(token_group(1))
        theirs = token_group(2)
        options = AppendOptions(split="train", evicted=None, source_index=None)
        waiting = bank._intake._ticket([theirs], 0, options)
        bank._appender._enqueue(waiting)  # as another thread does, which then waits
        was_interrupted = interrupted(lambda bank=bank: bank.append(token_group(3)), at)  # type: ignore[misc]
        bank._appender.flush()  # as that thread does when it gets the lock
        assert waiting.done, at
        bank.close()
        with RolloutBank.open(place / str(at)) as again:
            found = pending(again)
        outcomes.add(type(waiting.error))
        assert (theirs.uid in found) == (waiting.error is None), (at, waiting.error)
        if not was_interrupted:
            break
    assert outcomes == {type(None), InterruptedError}


@pytest.mark.slow
def test_a_draw_interrupted_at_any_line_was_made_or_not_and_the_handle_does_not_go_on_without_knowing(
    place: Path,
) -> None:
    for at in range(1, 400):
        bank = RolloutBank.open(place / str(at))
        bank.restore(0)
        uids = bank.append_many([token_group(number) for number in range(3)])
        was_interrupted = interrupted(lambda bank=bank, uids=uids: bank.mark_consumed(uids[:2], 0), at)  # type: ignore[misc]
        wanted = [uids[:2]]
        try:
            bank.mark_consumed(uids[1:], 1)
            wanted = [uids[1:]] if was_interrupted else []
        except BankClosedError as error:
            assert "interrupted" in str(error), at
        except arrowbank.InvalidDrawError:
            assert not was_interrupted
        bank.close()
        with kill(place / str(at)) as again:
            drawn = [[group.uid for group in draw.groups] for draw in again.restore(0).draws]
        assert drawn in ([], wanted), at
        if not was_interrupted:
            assert drawn == [uids[:2]]
            return
    raise AssertionError("a draw has more lines than were tried")


def test_a_handler_that_closes_while_its_thread_writes_is_refused_rather_than_stuck(path: Path) -> None:
    bank = RolloutBank.open(path)
    bank.restore(0)
    refused: list[str] = []

    def close(*_: Any) -> None:
        try:
            bank.close()
        except RuntimeError as error:
            refused.append(str(error))

    append = bank._appender._check_fence

    def signalled() -> None:
        signal.raise_signal(signal.SIGUSR1)
        append()

    bank._appender._check_fence = signalled
    before = signal.signal(signal.SIGUSR1, close)
    try:
        bank.append(token_group(1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused and all("raise SystemExit" in text for text in refused)
    bank._appender._check_fence = append
    bank.close()


def test_a_handle_that_was_lost_holds_its_bank_until_the_interpreter_exits_and_closes_it(path: Path) -> None:
    code = """
import gc, sys
from builders import token_group
from arrowbank import BankLockedError, RolloutBank
RolloutBank.open(sys.argv[1]).append(token_group(1))
gc.collect()
try:
    RolloutBank.open(sys.argv[1])
except BankLockedError as error:
    print(error)
"""
    run = [sys.executable, "-c", code, str(path)]
    said = subprocess.run(run, check=True, cwd=Path(__file__).parent, capture_output=True, text=True).stdout
    assert 'takeover="force"' in said
    with RolloutBank.open(path, takeover="never") as bank:
        assert bank.session == 2
