"""A bank is never closed by a process that is not its own: forked children are refused, and end without harm to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from exit_scripts import PRELUDE, kept, read_lines, run, script, was_closed


def test_a_forked_child_is_refused_and_the_parent_works_on(path: Path) -> None:
    code = """
bank = RolloutBank.open(path)
say(bank.append(group()))
pid = os.fork()
if pid == 0:
    refused = 0
    for call in (lambda: bank.append(group()), lambda: bank.restore(0), bank.stats, bank.__enter__,
                 lambda: bank.checkpoint(1), lambda: bank.mark_consumed(["0" * 32], 0)):
        try: call()
        except BankClosedError as error: refused += str(os.getppid()) in str(error)
    bank.close()
    os._exit(refused)
assert signalled(pid) == 6
say(bank.append(group()))
bank.close()
"""
    said, _ = run(code, path)
    assert kept(path) == said


@pytest.mark.parametrize("end", ["os._exit(5)", "sys.exit(5)", "raise SystemExit(5)", "bank.close(); sys.exit(5)"])
def test_a_forked_child_that_ends_closes_nothing_of_its_parents(path: Path, end: str) -> None:
    code = f"""
bank = RolloutBank.open(path)
say(bank.append(group()))
before = [open(path + name).read() for name in ("/LOCK", "/sessions/0001")], sorted(os.listdir(path + "/tmp"))
pid = os.fork()
if pid == 0:
    {end}
assert signalled(pid) == 5
after = [open(path + name).read() for name in ("/LOCK", "/sessions/0001")], sorted(os.listdir(path + "/tmp"))
assert before == after
try: RolloutBank.open(path)
except BankLockedError: pass
else: raise AssertionError("free")
bank.begin_iteration(1)
say(bank.append(group()))
"""
    said, _ = run(code, path)
    assert was_closed(path)
    assert kept(path) == said


def test_a_forked_child_that_outlives_its_killed_parent_does_not_keep_the_bank(path: Path) -> None:
    code = """
bank = RolloutBank.open(path)
say(bank.append(group()))
pid = os.fork()
if pid == 0:
    time.sleep(60)
say(pid)
time.sleep(60)
"""
    with script(code, path) as process:
        uid, child = read_lines(process, 2)
        try:
            process.kill()
            process.wait()
            os.kill(int(child), 0)
            assert kept(path, takeover="auto") == [uid]
            os.kill(int(child), 0)
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_child_forked_while_a_bank_is_open_dies_of_sigterm_as_by_default(path: Path) -> None:
    code = """
with RolloutBank.open(path) as bank:
    pid = fork_sleeper()
    os.kill(pid, signal.SIGTERM)
    say(signalled(pid))
    say(bank.append(group()))
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
"""
    said, err = run(code, path)
    assert (said[0], err) == (str(-signal.SIGTERM), "")
    assert kept(path) == said[1:]


def test_a_sigterm_that_reaches_a_forked_child_at_once_is_not_lost(path: Path) -> None:
    """As multiprocessing's terminate right after start: the handler is its parent's still."""
    early = "import os, signal\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    code = """
with RolloutBank.open(path) as bank:
    pid = os.fork()
    if pid == 0:
        time.sleep(2)
        os._exit(1)
    say(signalled(pid))
"""
    with subprocess.Popen(
        [sys.executable, "-c", early + PRELUDE + code, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.communicate(timeout=60)[0].split() == [str(-signal.SIGTERM)]


def test_a_child_forked_in_another_thread_does_not_close_its_parents_bank_at_sigterm(path: Path) -> None:
    code = """
bank = RolloutBank.open(path)
def work():
    pid = fork_sleeper()
    os.kill(pid, signal.SIGTERM)
    say(signalled(pid) in (-15, 143))
thread = threading.Thread(target=work)
thread.start()
thread.join()
say(bank.append(group()))
"""
    said, _ = run(code, path)
    assert said[0] == "True"
    assert kept(path) == said[1:]


def test_a_forked_child_may_open_a_bank_of_its_own(path: Path) -> None:
    code = """
bank = RolloutBank.open(path)
say(bank.append(group()))
pid = os.fork()
if pid == 0:
    mine = RolloutBank.open(path + "-child")
    mine.append(group())
    try: RolloutBank.open(path)
    except BankLockedError as error: assert "process %d" % os.getppid() in str(error), error
    else: raise AssertionError("free")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert signalled(pid) == 143
say(bank.append(group()))
"""
    said, err = run(code, path)
    assert err == ""
    assert kept(path) == said
    child = path.with_name(path.name + "-child")
    assert was_closed(child)
    assert len(kept(child)) == 1


def test_workers_of_multiprocessing_that_are_forked_leave_the_bank_alone(path: Path) -> None:
    code = """
context = multiprocessing.get_context("fork")
def work(number):
    return number * number
def sleep():
    time.sleep(60)
with RolloutBank.open(path) as bank:
    say(bank.append(group()))
    with context.Pool(2) as pool:                 # leaving the block terminates its workers with SIGTERM
        assert pool.map(work, range(8)) == [number * number for number in range(8)]
        say(bank.append(group()))
    worker = context.Process(target=sleep)
    worker.start()
    time.sleep(0.2)
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == -signal.SIGTERM, worker.exitcode
    worker = context.Process(target=work, args=(1,))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0, worker.exitcode
    bank.begin_iteration(1)
    say(bank.append(group()))
"""
    said, err = run(code, path)
    assert err == ""
    assert was_closed(path)
    assert kept(path) == said
