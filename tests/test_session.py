"""One coordinator at a time: who holds a bank, and who may take it over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from builders import token_group

from arrowbank import BankLockedError, FencedError, RolloutBank
from arrowbank.durable import files, session
from arrowbank.durable.heartbeat import BEAT_S, last_beat
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.session import Claim, Holder, claim_session
from arrowbank.errors import CorruptionError

OPEN = "import sys; from arrowbank import RolloutBank; bank = RolloutBank.open(sys.argv[1]); print('open', flush=True)"


@contextmanager
def holder_process(path: Path, then: str = "sys.stdin.read()") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the bank until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{OPEN}; {then}", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def paths(tmp_path: Path) -> BankPaths:
    paths = BankPaths(tmp_path / "bank")
    files.make_directories([paths.root, *paths.directories])
    return paths


def rewrite_claim(paths: BankPaths, number: int, **changes: Any) -> None:
    claim = paths.claim(number)
    claim.write_text(json.dumps(json.loads(claim.read_text()) | changes))


# -- refused and taken over


def test_a_second_coordinator_is_refused_by_name_of_the_holder(tmp_path: Path) -> None:
    with holder_process(tmp_path / "bank") as process:
        with pytest.raises(BankLockedError) as refused:
            RolloutBank.open(tmp_path / "bank")
        said = str(refused.value)
        holder = Holder.model_validate_json((tmp_path / "bank/sessions/0001").read_bytes())
        for part in (str(process.pid), socket.gethostname(), holder.since, "session 1", "end that process"):
            assert part in said
        assert sorted(path.name for path in (tmp_path / "bank/sessions").iterdir()) == ["0001"]


def test_a_second_handle_of_the_same_process_is_refused_even_by_another_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with RolloutBank.open(tmp_path / "bank"):
        for path in (tmp_path / "bank", tmp_path / "link" / "bank"):
            with pytest.raises(BankLockedError, match=f"{os.getpid()}.*another handle of this very process"):
                RolloutBank.open(path)
    with RolloutBank.open(tmp_path / "bank") as bank:
        assert bank.session == 2


def test_a_dead_holder_is_taken_over(tmp_path: Path) -> None:
    with holder_process(tmp_path / "bank") as process:
        process.kill()
        process.wait()
        with pytest.raises(BankLockedError, match='takeover="auto"'):
            RolloutBank.open(tmp_path / "bank", takeover="never")
        with RolloutBank.open(tmp_path / "bank") as bank:
            assert bank.session == 2


def test_a_zombie_counts_as_gone(tmp_path: Path) -> None:
    with holder_process(tmp_path / "bank") as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        with RolloutBank.open(tmp_path / "bank") as bank:
            assert bank.session == 2


def test_a_reused_pid_counts_as_gone(paths: BankPaths) -> None:
    claim_session(paths, "auto", bank_id="b")
    rewrite_claim(paths, 1, started=1)
    assert claim_session(paths, "auto", bank_id="b").session == 2


class Time:
    """A clock that only sleeping moves on; what happens meanwhile may be told it."""

    def __init__(self, *happening: Callable[[], object]) -> None:
        self.now = 0.0
        self.happening = list(happening)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.happening:
            self.happening.pop(0)()


def claim_beside(paths: BankPaths, time: Time, lease_s: float = 60) -> Claim:
    return claim_session(paths, "auto", lease_s, bank_id="b", clock=time, sleep=time.sleep)


@pytest.fixture
def elsewhere(paths: BankPaths) -> BankPaths:
    """A bank whose holder cannot be asked about, and whose heart does not beat."""
    claim_session(paths, "auto", bank_id="b").forget()
    rewrite_claim(paths, 1, host="elsewhere", boot="another")
    return paths


@pytest.mark.parametrize("changes", [{"boot": "another"}, {"namespace": "pid:[1]"}, {"host": "elsewhere"}])
def test_of_another_host_boot_or_container_only_a_lease_without_a_heartbeat_tells(
    paths: BankPaths, changes: dict[str, str]
) -> None:
    claim_session(paths, "auto", bank_id="b").forget()
    rewrite_claim(paths, 1, **changes)
    time = Time()
    assert claim_beside(paths, time, lease_s=60).session == 2
    assert 60 <= time.now < 61


def test_a_holder_whose_heart_beats_is_refused_at_its_next_beat(elsewhere: BankPaths) -> None:
    time = Time(*[lambda: None] * 7, lambda: os.utime(elsewhere.claim(1)))
    with pytest.raises(BankLockedError, match=r"on elsewhere.* lives"):
        claim_beside(elsewhere, time)
    assert time.now < 2
    assert claim_session(elsewhere, "force", bank_id="b").session == 2


def test_never_takes_over_nobody_who_has_not_closed(elsewhere: BankPaths) -> None:
    with pytest.raises(BankLockedError, match=r'on elsewhere.*has not closed; open with takeover="auto"'):
        claim_session(elsewhere, "never", bank_id="b")


def test_a_holder_that_closes_while_somebody_watches_makes_room_at_once(paths: BankPaths) -> None:
    first = claim_session(paths, "auto", bank_id="b")
    rewrite_claim(paths, 1, host="elsewhere")
    time = Time(first.release)
    assert claim_beside(paths, time).session == 2
    assert time.now < 1


def test_who_watches_while_another_takes_over_watches_that_one(elsewhere: BankPaths) -> None:
    time = Time(lambda: claim_session(elsewhere, "force", bank_id="b"))
    with pytest.raises(BankLockedError, match="session 2"):
        claim_beside(elsewhere, time)


def test_a_heart_beats_without_the_bank_being_used_and_stops_with_the_claim(paths: BankPaths) -> None:
    claim = claim_session(paths, "auto", bank_id="b")
    first = last_beat(paths.claim(1))
    deadline = monotonic() + 60
    while last_beat(paths.claim(1)) == first:
        assert monotonic() < deadline
        sleep(0.05)
    claim.release()
    sleep(BEAT_S / 10)  # a beat that had begun
    last = last_beat(paths.claim(1))
    sleep(1.5 * BEAT_S)
    assert last_beat(paths.claim(1)) == last


def test_a_process_that_proc_hides_is_not_taken_for_dead(paths: BankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_session(paths, "auto", bank_id="b")
    rewrite_claim(paths, 1, pid=1, started=5)
    monkeypatch.setattr(session, "_process_start", lambda pid: None if pid == 1 else 7)

    def hidden(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", hidden)
    with pytest.raises(BankLockedError, match="lives"):
        claim_session(paths, "auto", bank_id="b")


def test_a_lease_shorter_than_two_heartbeats_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lease_s 1"):
        RolloutBank.open(tmp_path / "bank", lease_s=1)
    assert list(tmp_path.iterdir()) == []


def test_session_numbers_that_are_used_up_are_damage(paths: BankPaths) -> None:
    paths.claim(9999999999).write_text("{}")
    with pytest.raises(CorruptionError, match="no number is left"):
        claim_session(paths, "force", bank_id="b")


def test_what_lies_under_the_number_of_a_session_to_come_is_taken_away(paths: BankPaths) -> None:
    """A stranger's bank may hold files, and links, under names that the session is about to write."""
    for number, name in ((1, "00000000-carry-s0001-0000.arrows"), (2, "c000002-s0002.parquet")):
        paths.session_tmp(number).mkdir()
        (paths.session_tmp(number) / name).symlink_to("/etc/hostname")
        claim = claim_session(paths, "force", bank_id="b")
        assert (claim.session, list(claim.tmp.iterdir())) == (number, [])


def test_a_claim_that_says_nothing_needs_force(paths: BankPaths) -> None:
    claim_session(paths, "auto", bank_id="b")
    paths.claim(1).write_text("{")
    with pytest.raises(BankLockedError, match="another handle of this very process"):
        claim_session(paths, "auto", bank_id="b")
    paths.lock.write_text("{")
    with pytest.raises(BankLockedError, match="nor LOCK says who has the bank"):
        claim_session(paths, "auto", bank_id="b")
    assert claim_session(paths, "force", bank_id="b").session == 2


def test_force_takes_over_the_living(paths: BankPaths) -> None:
    first = claim_session(paths, "auto", bank_id="b")
    (first.tmp / "unfinished").touch()
    second = claim_session(paths, "force", bank_id="b")
    assert not first.tmp.exists()
    with pytest.raises(FencedError, match=rf"session 1 lost its place to session 2.*{os.getpid()}"):
        first.check()
    second.check()


def test_a_closed_bank_is_free_whoever_lives(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        with RolloutBank.open(tmp_path / "bank", takeover="never") as bank:
            assert bank.session == number


def test_closing_leaves_nothing_in_tmp(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path / "bank") as bank:
        bank.append(token_group(1))
    assert list((tmp_path / "bank/tmp").iterdir()) == []


# -- races


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns after a few lines."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("attempt", range(30))
def test_of_many_openers_the_first_wins_alone(paths: BankPaths, attempt: int) -> None:
    outcomes: list[Any] = []
    start = threading.Barrier(8)

    def open_it() -> None:
        start.wait()
        try:
            outcomes.append(claim_session(paths, "auto", bank_id="b"))
        except BankLockedError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if not isinstance(outcome, BankLockedError)]
    assert len(outcomes) == 8
    assert [winner.session for winner in winners] == [1]
    winners[0].check()
    winners[0].release()


def test_of_many_processes_that_open_exactly_one_wins(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path / "bank"):
        pass
    code = f"import sys; sys.stdin.read(1); {OPEN}; sys.stdin.read()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "bank")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("g")
        process.stdin.flush()
    losers = 0
    for process in processes:
        assert process.stdout is not None
        losers += process.stdout.readline() != "open\n"
    said = [process.communicate()[1] for process in processes]
    assert losers == 3
    assert sum("BankLockedError" in text for text in said) == 3
    assert sorted(path.name for path in (tmp_path / "bank/sessions").iterdir()) == ["0001", "0002"]


def test_who_loses_the_race_after_its_look_is_told_who_won(paths: BankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    create, raced = files.create_exclusive, []

    def racing(path: Path, data: bytes, tmp: Path) -> None:
        if not raced:
            raced.append(True)
            claim_session(paths, "auto", bank_id="b")
        create(path, data, tmp)

    monkeypatch.setattr(files, "create_exclusive", racing)
    with pytest.raises(BankLockedError, match="session 1"):
        claim_session(paths, "auto", bank_id="b")


def test_an_open_that_fails_after_its_claim_leaves_the_bank_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = files.replace

    def full(path: Path, data: bytes, tmp: Path) -> None:
        raise OSError(28, "planted")

    for _ in range(2):
        monkeypatch.setattr(files, "replace", full)
        with pytest.raises(OSError, match="planted"):
            RolloutBank.open(tmp_path / "bank")
        monkeypatch.setattr(files, "replace", replace)
    with RolloutBank.open(tmp_path / "bank") as bank:
        assert bank.session == 3
