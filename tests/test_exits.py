"""However a process ends, its bank is closed where that is possible: the interpreter exits."""

from __future__ import annotations

from pathlib import Path

import pytest
from exit_scripts import kept, run, was_closed

from arrowbank import BankLockedError, RolloutBank


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
