"""However a process ends, its bank is closed where that is possible, and never closed by a process that is not its own.

Each script is a process of its own. What it says on standard output, a uid a line, was acknowledged.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import token_group

from arrowbank import BankLockedError, RolloutBank, exits

TERMINATED = 143
PRELUDE = """
import asyncio, multiprocessing, os, signal, sys, threading, time
from arrowbank import BankClosedError, BankLockedError, RolloutBank, RolloutGroup, TokenRollout
path = sys.argv[1]
def group():
    one = TokenRollout(trajectory=[[5, 6, 7]], logprobs=[[-0.5]], generation_mask=[[0, 0, 1]], reward=1.0)
    return RolloutGroup(rollouts=[one])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def signalled(pid):
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
"""
APPENDING = "\n    while True: say(bank.append(group()))"


@contextmanager
def script(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code`` on the bank at ``path``; killed when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def run(code: str, path: Path, *, status: int = 0) -> tuple[list[str], str]:
    """Run ``code`` to its end; return what it said, and its standard error."""
    with script(code, path) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    return out.split(), err


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Read at least so many lines, past Python's own buffer, which ``communicate`` would not look into."""
    assert process.stdout is not None
    data = b""
    while data.count(b"\n") < count or not data.endswith(b"\n"):
        more = os.read(process.stdout.fileno(), 1 << 16)
        assert more, "it ended"
        data += more
    return data.decode().split()


def interrupt(code: str, path: Path, number: int, *, lines: int = 1, times: int = 1) -> tuple[list[str], str, int]:
    """Send a signal when so many lines were said; return all that was said, standard error, and the exit status."""
    with script(code, path) as process:
        said = read_lines(process, lines)
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.002)
        out, err = process.communicate(timeout=60)
    return [*said, *out.split()], err, process.returncode


def kept(path: Path, *, takeover: str = "never") -> list[str]:
    """Open at once; return what is pending."""
    began = time.monotonic()
    with RolloutBank.open(path, takeover=takeover) as bank:  # type: ignore[arg-type]
        assert time.monotonic() - began < 5  # not a lease of 60
        restored = bank.restore(0)
        assert (restored.report.corrupt, restored.report.lost_records) == ((), 0)  # an interrupted append may be torn
        return [str(group.uid) for queue in restored.pending.values() for group in queue]


def was_closed(path: Path) -> bool:
    lock = json.loads((path / "LOCK").read_bytes())
    newest = max(int(claim.name) for claim in (path / "sessions").iterdir())
    return lock["closed"] is True and lock["holder"]["session"] == newest


# -- the interpreter exits


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise RuntimeError('planted')", 1), ("raise SystemExit('planted')", 1)],
)
def test_a_bank_that_nobody_closed_is_closed_when_the_interpreter_exits(path: Path, end: str, status: int) -> None:
    said, err = run(f"bank = RolloutBank.open(path)\nsay(bank.append(group()))\n{end}", path, status=status)
    assert ("planted" in err) == ("planted" in end)
    assert was_closed(path)
    assert kept(path) == said


def test_appends_of_an_event_loop_that_nobody_waits_for_are_in_the_bank_or_not_and_it_is_closed(path: Path) -> None:
    code = """
bank = RolloutBank.open(path)
async def main():
    tasks = [asyncio.ensure_future(bank.append_async(group())) for _ in range(50)]
    for task in tasks[:5]: say(await task)
asyncio.run(main())
"""
    said, _ = run(code, path)
    assert was_closed(path)
    assert set(said) <= set(kept(path))


def test_a_daemon_thread_that_appends_does_not_keep_the_interpreter_from_closing(path: Path) -> None:
    code = """
bank = RolloutBank.open(path)
def work():
    try:
        while True: say(bank.append(group()))
    except BankClosedError: pass
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    said, _ = run(code, path)
    assert was_closed(path)
    assert len(said) > 5
    assert set(said) <= set(kept(path))


def test_os_exit_closes_nothing_and_the_dead_holder_is_taken_over_at_once(path: Path) -> None:
    said, _ = run("bank = RolloutBank.open(path)\nsay(bank.append(group()))\nos._exit(0)", path)
    assert not was_closed(path)
    with pytest.raises(BankLockedError, match="gone without closing"):
        RolloutBank.open(path, takeover="never")
    assert kept(path, takeover="auto") == said


# -- SIGTERM

IN_WITH = "with RolloutBank.open(path) as bank:"
WITHOUT = "bank = RolloutBank.open(path)\nif True:"
SLEEPING = "\n    say(bank.append(group()))\n    time.sleep(60)"
IN_ASYNCIO = """
async def work(bank):
    while True: say(await bank.append_async(group()))
async def main():
    with RolloutBank.open(path) as bank:
        await asyncio.gather(*[work(bank) for _ in range(8)])
asyncio.run(main())
"""
SLEEPING_IN_ASYNCIO = IN_ASYNCIO.replace("while True: say(", "say(").replace(
    "group()))", "group())); await asyncio.sleep(60)"
)


@pytest.mark.parametrize("code", [IN_WITH + SLEEPING, WITHOUT + SLEEPING], ids=["with", "without"])
def test_sigterm_closes_and_exits_with_143(path: Path, code: str) -> None:
    said, err, status = interrupt(code, path, signal.SIGTERM)
    assert (status, err) == (TERMINATED, "")
    assert was_closed(path)
    assert kept(path) == said


@pytest.mark.parametrize("lines", [1, 2, 3, 40])
@pytest.mark.parametrize("code", [IN_WITH + APPENDING, WITHOUT + APPENDING], ids=["with", "without"])
def test_sigterm_within_an_append_loop_loses_nothing_acknowledged(path: Path, code: str, lines: int) -> None:
    said, err, status = interrupt(code, path, signal.SIGTERM, lines=lines)
    assert (status, err) == (TERMINATED, "")
    assert was_closed(path)
    found = kept(path)
    assert set(said) <= set(found)
    assert len(found) - len(said) <= 1  # durable, and not said


@pytest.mark.parametrize("lines", [1, 30])
def test_sigterm_in_an_event_loop_closes_and_exits_with_143(path: Path, lines: int) -> None:
    said, err, status = interrupt(IN_ASYNCIO, path, signal.SIGTERM, lines=lines)
    assert status == TERMINATED, err
    assert was_closed(path)
    found = kept(path)
    assert set(said) <= set(found)
    assert len(found) - len(said) <= 8


def test_sigterm_in_an_event_loop_that_sleeps_closes_and_exits_with_143(path: Path) -> None:
    said, err, status = interrupt(SLEEPING_IN_ASYNCIO, path, signal.SIGTERM, lines=8)
    assert status == TERMINATED, err
    assert was_closed(path)
    assert sorted(kept(path)) == sorted(said)


def test_an_impatient_second_sigterm_loses_nothing_acknowledged(path: Path) -> None:
    said, err, status = interrupt(IN_WITH + APPENDING, path, signal.SIGTERM, lines=20, times=5)
    assert status in (TERMINATED, -signal.SIGTERM), err  # once it has closed, SIGTERM is as by default
    assert set(said) <= set(kept(path, takeover="auto"))


def test_a_handler_that_a_user_has_set_is_left_alone(path: Path) -> None:
    code = """
def mine(*_): say("mine")
signal.signal(signal.SIGTERM, mine)
with RolloutBank.open(path) as bank:
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is mine
    bank.append(group())
assert signal.getsignal(signal.SIGTERM) is mine
with RolloutBank.open(path) as bank:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
with RolloutBank.open(path) as bank:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
with RolloutBank.open(path) as bank:
    signal.signal(signal.SIGTERM, mine)
assert signal.getsignal(signal.SIGTERM) is mine
"""
    assert run(code, path)[0] == ["mine"]
    assert was_closed(path)


def test_a_users_handler_may_end_the_program_which_closes(path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n" + IN_WITH + APPENDING
    said, err, status = interrupt(code, path, signal.SIGTERM, lines=5)
    assert (status, err) == (7, "")
    assert was_closed(path)
    assert set(said) <= set(kept(path))


def test_sigterm_is_as_it_was_once_the_last_bank_is_closed(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    first, second = RolloutBank.open(tmp_path / "1"), RolloutBank.open(tmp_path / "2")
    for bank in (first, first, second):
        assert signal.getsignal(signal.SIGTERM) is exits._leave
        bank.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_is_as_it_was_after_an_open_that_was_refused(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        with pytest.raises(BankLockedError):
            RolloutBank.open(path)
        bank.append(token_group(1))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    path.joinpath("MANIFEST.json").write_text("{")
    with pytest.raises(Exception, match=r"MANIFEST\.json"):
        RolloutBank.open(path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_after_the_last_close_ends_the_process_as_by_default(path: Path) -> None:
    code = "RolloutBank.open(path).close()\nsay('closed')\ntime.sleep(60)"
    assert interrupt(code, path, signal.SIGTERM)[2] == -signal.SIGTERM


def test_sigterm_after_a_close_in_another_thread_ends_the_process(path: Path) -> None:
    code = """
bank = RolloutBank.open(path)
closing = threading.Thread(target=bank.close)
closing.start()
closing.join()
say("closed")
time.sleep(60)
"""
    said, err, status = interrupt(code, path, signal.SIGTERM)
    assert said == ["closed"]
    assert status in (TERMINATED, -signal.SIGTERM), err  # only the main thread can set the handler back
    assert was_closed(path)


# -- threads


def test_a_bank_opened_in_another_thread_works_and_leaves_sigterm_alone(path: Path) -> None:
    code = """
def work():
    bank = RolloutBank.open(path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    while True: say(bank.append(group()))
threading.Thread(target=work, daemon=True).start()
time.sleep(60)
"""
    said, err, status = interrupt(code, path, signal.SIGTERM, lines=10)
    assert (status, err) == (-signal.SIGTERM, "")
    assert not was_closed(path)
    assert set(said) <= set(kept(path, takeover="auto"))


def test_a_bank_opened_in_another_thread_is_closed_at_exit(path: Path) -> None:
    code = """
said = []
def work():
    said.append(RolloutBank.open(path))
    say(said[0].append(group()))
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    said, _ = run(code, path)
    assert was_closed(path)
    assert kept(path) == said


# -- KeyboardInterrupt


@pytest.mark.parametrize("lines", [1, 2, 30])
def test_a_keyboard_interrupt_within_an_append_loop_closes(path: Path, lines: int) -> None:
    said, err, status = interrupt(IN_WITH + APPENDING, path, signal.SIGINT, lines=lines)
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "Error:" not in err
    assert was_closed(path)
    found = kept(path)
    assert set(said) <= set(found)
    assert len(found) - len(said) <= 1


def test_who_catches_a_keyboard_interrupt_goes_on_appending(path: Path) -> None:
    code = """
with RolloutBank.open(path) as bank:
    for _ in range(3):
        try:
            while True: say(bank.append(group()))
        except KeyboardInterrupt: pass
    say(bank.append(group()))
"""
    with script(code, path) as process:
        said = []
        for _ in range(3):
            said += read_lines(process, 7)
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    found = kept(path)
    said += out.split()
    assert set(said) <= set(found)
    assert len(found) - len(said) <= 3


# -- forks


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
    there, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(said, b"1")
        time.sleep(60)
        os._exit(1)
    os.read(there, 1)
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
    there, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(said, b"1")
        time.sleep(60)
        os._exit(1)
    os.read(there, 1)
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


# -- two handles


def test_a_second_open_in_one_process_says_so(path: Path) -> None:
    code = """
bank = RolloutBank.open(path)
for takeover in ("auto", "never"):
    try: RolloutBank.open(path, takeover=takeover)
    except BankLockedError as error: assert "another handle of this very process" in str(error), error
    else: raise AssertionError("opened twice")
say(bank.append(group()))
"""
    said, _ = run(code, path)
    assert was_closed(path)
    assert kept(path) == said


def test_banks_that_are_left_open_are_all_closed_at_exit(tmp_path: Path) -> None:
    code = "banks = [RolloutBank.open(path + at) for at in '012']\nfor bank in banks: bank.append(group())"
    run(code, tmp_path / "bank")
    for number in range(3):
        assert was_closed(tmp_path / f"bank{number}")
        assert len(kept(tmp_path / f"bank{number}")) == 1
