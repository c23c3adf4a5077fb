"""SIGTERM and Ctrl-C close a bank and end its process as they would without one; what was acknowledged is kept."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import token_group
from exit_scripts import interrupt, kept, read_lines, run, script, was_closed

from arrowbank import BankLockedError, RolloutBank, exits

TERMINATED = 143
IN_WITH = "with RolloutBank.open(path) as bank:"
WITHOUT = "bank = RolloutBank.open(path)\nif True:"
APPENDING = "\n    while True: say(bank.append(group()))"
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


@pytest.fixture
def none_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has no bank open, whatever other tests have left."""
    monkeypatch.setattr(exits, "_open", set())
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


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


def test_sigterm_is_as_it_was_once_the_last_bank_is_closed(tmp_path: Path, none_open: None) -> None:
    first, second = RolloutBank.open(tmp_path / "1"), RolloutBank.open(tmp_path / "2")
    for bank in (first, first, second):
        assert signal.getsignal(signal.SIGTERM) is exits._leave
        bank.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_is_as_it_was_after_an_open_that_was_refused(path: Path, none_open: None) -> None:
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
        except KeyboardInterrupt: say("caught")
    say(bank.append(group()))
"""
    with script(code, path) as process:
        said: list[str] = []
        for times in range(3):
            said += read_lines(process, 7)
            process.send_signal(signal.SIGINT)
            while said.count("caught") <= times:
                said += read_lines(process, 1)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    found = kept(path)
    said = [word for word in (*said, *out.split()) if word != "caught"]
    assert set(said) <= set(found)
    assert len(found) - len(said) <= 3
