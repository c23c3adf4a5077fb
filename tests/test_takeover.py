"""A holder that is stopped, overtaken and goes on: it acknowledges nothing more, and spoils nothing of the new one's.

``Takeovers`` has trainers forked (see ``takeover_child``), stops each with SIGSTOP at a random moment or at a chosen
call, and takes the bank over in this process. What the new holder is given back is held against a plain model of what
was acknowledged (``test_kill``'s); then the old one gets SIGCONT and tries everything; then a third opening, plain
Parquet readers and ``scan`` are compared. A ``Violation`` is a broken promise.

    python tests/test_takeover.py --rounds 200 [--seed N]

prints a table. The seed is in every failure; ``ARROWBANK_TAKEOVER_SEED`` sets it for pytest.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import random
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from kill_child import Report
from runs import train
from takeover_child import CALLS, FAN_IN, Bank, Holder, StoppingJob
from test_kill import _COLUMNS, DrawMade, Found, Model, Violation, _Followed, check_archive_once, check_contents

import arrowbank
from arrowbank import BankLockedError, FencedError, RolloutBank
from arrowbank import bank as bank_module
from arrowbank.archive import merging, store
from arrowbank.durable import files

CHILD = Path(__file__).with_name("takeover_child.py")
LEASE_S = 2.0
ROUNDS_A_BANK = 6
KINDS = ("force", "lease", "running", "kill", "force", "refused", "lease", "paused")
"""running: taken over by force without being stopped before."""
SAMPLE = 12
OPENING = 0.2


# -- the report of the old holder


@dataclass
class Known:
    """What the new holder was given back: only that may the old one still acknowledge."""

    serials: dict[str, int]
    draws: dict[int, DrawMade]
    evicted: dict[str, str]
    checkpoints: set[int]


@dataclass
class LineModel(Model):
    """Also knows which checkpoints its line recorded: of these any may be restored."""

    recorded: set[int] = field(default_factory=set)

    def take(self, kind: str, words: list[str]) -> None:
        super().take(kind, words)
        if kind == "c":
            self.recorded.add(self.checkpoint)

    def check_restored(self, found: Found) -> None:
        super().check_restored(found)
        self.recorded = {at for at in self.recorded if at <= found.checkpoint}


class Old(_Followed):
    """The old holder, as far as its report was read. After ``overtake`` nothing of it changes the model."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.known: Known | None = None
        self.stopped_itself = ""
        self.stopped_at = 0.0
        self.fenced = ""
        self.status: int | None = None
        self.said: collections.deque[str] = collections.deque(maxlen=40)
        self.late = 0
        """Right acknowledgements of calls that were on their way."""
        self.tried = 0
        self.wrong: list[str] = []
        self._called = Model()
        """Only what was called and not acknowledged before the takeover."""

    def overtake(self, known: Known, called: Model) -> None:
        self.known, self._called = known, called

    def take(self, line: str) -> None:
        kind, *words = line.split(" ")
        self.said.append(line[:60])
        match kind:
            case "S":
                self.stopped_itself = " ".join(words)
            case "X":
                self.status, self.gone = int(words[0]), True
            case "f":
                self.fenced = " ".join(words)
            case "n":
                self.tried += 1
            case "v":
                self.wrong.append(" ".join(words))
            case "z":
                pass
            case "!" if self.known is not None:
                self.wrong.append("failed: " + " ".join(words).encode().decode("unicode_escape"))
            case _ if self.known is None or kind in ("B", ">", "<", "F"):
                super().take(line)
            case _:
                self._take_late(kind, words, self.known)

    def _take_late(self, kind: str, words: list[str], known: Known) -> None:
        """Take in what was said after the takeover; calls that begin now can only fail."""
        right: bool | None = None
        match kind:
            case "A":
                right = known.serials.get(words[0]) == int(words[1])
                if right and words[0] not in self.model.serials:  # of a split that is not handed out, or evicted
                    self.model.take(kind, words)
            case "D" | "E" | "C":
                self._called.take(kind, words)
            case "d":
                draw, self._called.maybe_draw = self._called.maybe_draw, None
                right = draw is not None and known.draws.get(draw.iteration) == draw
            case "e":
                right = self._called.maybe_evicted.items() <= known.evicted.items()
            case "c":
                right = self._called.maybe_checkpoint in known.checkpoints
            case "r":  # of a restore that was on its way
                right = not self.fenced
            case _:
                pass
        if right is False:
            self.wrong.append(f"acknowledged after the takeover: {kind} {' '.join(words)[:200]}")
        self.late += bool(right)


class _Direct(Report):
    """The report of a holder in this process."""

    def __init__(self, followed: _Followed) -> None:
        self.followed = followed

    def say(self, *words: object) -> None:
        self.followed.take(" ".join(map(str, words)))


# -- rounds


@dataclass
class Round:
    """What happened in one."""

    kind: str
    point: str = ""
    seconds: float = 0.0
    late: int = 0
    tried: int = 0
    acknowledged: int = 0
    violations: list[str] = field(default_factory=list)


class Takeovers:
    """Rounds on one bank after another."""

    def __init__(self, directory: Path, seed: int, fault: str | None = None) -> None:
        self.rounds: list[Round] = []
        self._directory, self._random = directory, random.Random(seed)
        self._bank = directory
        self.model = LineModel()
        self._cycle = 0
        self._fan_in = merging.FAN_IN
        self._reports, write_end = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._reports, fcntl.F_SETPIPE_SZ, 1 << 20)  # it writes on while this process waits elsewhere
        command = [sys.executable, str(CHILD), str(write_end), *([fault] if fault else [])]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write_end], text=True)
        os.close(write_end)
        self._unread = b""
        self._lines: collections.deque[str] = collections.deque()
        self._old: Old | None = None

    def __enter__(self) -> Takeovers:
        merging.FAN_IN = FAN_IN
        return self

    def __exit__(self, *_: object) -> None:
        merging.FAN_IN = self._fan_in
        if self._old is not None and self._old.pid and not self._old.gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._old.pid, signal.SIGKILL)
        self._server.kill()
        self._server.communicate()
        os.close(self._reports)

    def run(self, kind: str, call: str | None) -> Round:
        """Run one round; a violation raises, with what is known of the round."""
        if len(self.rounds) % ROUNDS_A_BANK == 0 or self.rounds[-1].violations:
            self._bank, self.model = self._directory / f"bank{len(self.rounds)}", LineModel()
        round_ = Round(kind)
        self.rounds.append(round_)
        began = time.monotonic()
        try:
            self._play(round_, kind, call)
            if len(self.rounds) % ROUNDS_A_BANK == 0:
                check_contents(self._bank)
        except BaseException as error:
            round_.violations.append(f"{type(error).__name__}: {error}")
            if self._old is not None and self._old.pid and not self._old.gone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._old.pid, signal.SIGKILL)
                self._follow(5, lambda old: old.gone)
            error.add_note(f"round {len(self.rounds)}, {kind}, {round_.point}, {self._bank}")
            raise
        finally:
            round_.seconds = time.monotonic() - began
        return round_

    def _job(self, **options: Any) -> StoppingJob:
        self._cycle += 1
        return StoppingJob(
            path=str(self._bank),
            seed=self._random.getrandbits(32),
            cycle=self._cycle,
            restore=self._where_to_restore(),
            in_flight=self._random.random() < 0.5,
            longest_wait_s=0,
            **options,
        )

    def _where_to_restore(self) -> int:
        last = self._random.choice(self.model.checkpoints())
        older = sorted(self.model.recorded)[-5:]
        return self._random.choice([*older, last]) if self._random.random() < 0.2 else last

    def _play(self, round_: Round, kind: str, call: str | None) -> None:
        at_rest = kind in ("force", "kill", "running")
        call = None if kind == "running" else call
        job = self._job(
            call=call,
            when=self._random.choice(["before", "after", "within"] if call == "pwritev" else ["before", "after"]),
            nth=int(10 ** self._random.uniform(0, 2.2)),
            thread=self._random.choice(["", "", "arrowbank-compact"]),
            armed=at_rest,
        )
        old = self._old = Old(self.model)
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(asdict(job)) + "\n")
        self._server.stdin.flush()
        self._follow(30, lambda old: bool(old.pid))
        if kind in ("force", "kill") and call is not None:
            self._follow(1.5, lambda old: bool(old.stopped_itself))
        elif kind == "force" and self._random.random() < OPENING:  # while it opens, or restores
            self._follow(self._random.uniform(0, 0.05), lambda old: False)
        else:
            self._follow(20, lambda old: old.acknowledged > 5)
            self._follow(self._random.uniform(0, 0.6), lambda old: False)
        if not at_rest:
            self._refused_while_it_lives(old, pause=kind == "paused")
        if kind in ("refused", "paused"):
            before = old.acknowledged
            self._follow(10, lambda old: old.acknowledged > before)
            if old.acknowledged == before:
                raise Violation("who refused a second coordinator did not go on")
        if not at_rest and call is not None:
            os.kill(old.pid, signal.SIGUSR1)
            self._follow(1.5, lambda old: bool(old.stopped_itself))
        if kind != "running":
            self._stop(old)
        round_.point = old.stopped_itself and f"{old.stopped_itself} {job.nth} {job.thread}".strip()
        round_.acknowledged = old.acknowledged
        if kind in ("kill", "refused", "paused"):
            os.kill(old.pid, signal.SIGKILL)
            if self._random.random() < 0.5:  # or it may still be a zombie
                self._follow(5, lambda old: old.gone)
        holder = self._take_over(old, kind)
        if kind in ("force", "lease"):
            self._go_on(old, holder)
        else:
            self._follow(5, lambda old: old.gone)
        round_.late, round_.tried = old.late, old.tried
        if old.wrong:
            raise Violation(f"{len(old.wrong)}: {'; '.join(old.wrong[:3])}; last said: {list(old.said)}")
        self._work(holder)
        if self._random.random() < 0.5:
            holder.bank.close()
            self._third("never")
        else:
            self._third("force", left_open=holder)
        self._old = None

    # -- the old holder

    def _follow(self, seconds: float, until: Any) -> None:
        """Take in the report for so long, or until that holds."""
        old, deadline = self._old, time.monotonic() + seconds
        assert old is not None
        while not until(old):
            if self._lines:
                old.take(self._lines.popleft())
                continue
            if not select.select([self._reports], [], [], max(deadline - time.monotonic(), 0))[0]:
                return
            *lines, self._unread = (self._unread + os.read(self._reports, 1 << 20)).split(b"\n")
            self._lines += [line.decode() for line in lines]
            if seconds and time.monotonic() > deadline:
                return

    def _stop(self, old: Old) -> None:
        if not old.pid:
            raise AssertionError("the trainer never began")
        os.kill(old.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while any(state not in "TZ" for state in _states(old.pid)):
            assert time.monotonic() < deadline, _states(old.pid)
            time.sleep(0.001)
        old.stopped_at = time.time()
        self._follow(0, lambda old: False)  # all that was said before
        if old.gone:
            raise Violation("the trainer ended by itself")

    def _refused_while_it_lives(self, old: Old, *, pause: bool) -> None:
        """A second coordinator learns who holds the bank. pause: who holds it is stopped for less than the lease."""
        waking = threading.Timer(1.6, os.kill, (old.pid, signal.SIGCONT))
        if pause:
            os.kill(old.pid, signal.SIGSTOP)
            waking.start()
        for options in ({"takeover": "never"}, {"lease_s": LEASE_S + pause}):
            try:
                Bank.open(self._bank, **options)
            except BankLockedError as error:
                for part in (str(old.pid), socket.gethostname(), "since 20", f"session {len(self._claims())}"):
                    if part not in str(error):
                        raise Violation(f"{options}: {error} does not say {part}") from None
            else:
                raise Violation(f"{options}: opened while process {old.pid} holds it and lives")
        if pause:
            waking.join()

    def _claims(self) -> list[Path]:
        return sorted((self._bank / "sessions").iterdir())

    # -- the new holder

    def _take_over(self, old: Old, kind: str) -> Holder:
        before = Model(
            maybe_draw=self.model.maybe_draw,
            maybe_evicted=self.model.maybe_evicted,
            maybe_checkpoint=self.model.maybe_checkpoint,
        )
        options: dict[str, Any] = {"lease_s": LEASE_S} if kind == "lease" else {}
        if kind in ("force", "running"):
            options = {"takeover": "force"}

        def between(holder: Holder) -> None:
            if kind == "running":  # what it says until its end must be what this holder has read just now
                self._follow(30, lambda old: old.gone)
                self._check_end(old)
                holder.job.restore = self._where_to_restore()

        claimed = bool((self._bank / "sessions").is_dir() and self._old_claim(old))
        began = time.monotonic()
        followed = _Followed(self.model)
        try:
            holder = Holder(self._job(), _Direct(followed), between=between, **options)
        except BankLockedError as error:
            raise Violation(
                f"refused after {time.monotonic() - began:.3f} s: {error}; threads {_states(old.pid)}, stopped at "
                f"{old.stopped_at:.6f}, last beat {self._claims()[-1].stat().st_mtime:.6f}, now {time.time():.6f}"
            ) from error
        seconds = holder.opened - began
        if kind == "lease" and claimed and not LEASE_S <= seconds < LEASE_S + 5:
            raise Violation(f"took over after {seconds:.2f} s of a lease of {LEASE_S} s")
        if kind in ("kill", "refused", "paused") and seconds > 5:
            raise Violation(f"a dead holder was taken over after {seconds:.2f} s only")
        state = holder.bank._ledger.state
        recorded = {at for line in state.history.lines.values() for at, _ in line.checkpoints.items()}
        known = Known(
            self.model.serials | {uid: int(ref.head["problem"]) for uid, ref in state.groups.items()},
            dict(self.model.draws),
            dict(self.model.evicted),
            recorded | {self.model.checkpoint},
        )
        old.overtake(known, before)
        return holder

    def _old_claim(self, old: Old) -> bool:
        claims = self._claims()
        return bool(claims) and json.loads(claims[-1].read_bytes())["pid"] == old.pid

    def _work(self, holder: Holder) -> None:
        """Train on; with an end at which nothing is on its way."""
        asyncio.run(holder.train_some(self._random.randint(1, 4)))
        holder.checkpoint(holder.iteration)
        holder.bank._compactor.wait()
        holder.bank._compactor.raise_error()

    def _go_on(self, old: Old, holder: Holder) -> None:
        """Let the old holder go on, beside a new one that rests, or that works."""
        rests = self._random.random() < 0.6
        if self._random.random() < 0.7:
            self._work(holder)
        hashes = _hashes(self._bank) if rests else {}
        deadline = time.monotonic() + 30
        while not old.gone and not old.wrong and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(old.pid, signal.SIGCONT)  # again and again: only now it may come to where it stops itself
            if not rests:
                self._work(holder)
            self._follow(0.05, lambda old: old.gone)
        self._check_end(old)
        if rests and not old.wrong:
            self._compare_files(hashes, _hashes(self._bank), old, holder)

    def _check_end(self, old: Old) -> None:
        """Who was overtaken has learned that, and ended well."""
        if old.wrong:
            return
        if not old.gone:
            raise Violation(f"the old holder hangs: {old.phases}, {_stacks(old.pid)}")
        if old.status != 0:
            old.wrong.append(f"the old holder ended with {old.status}")
        if not old.fenced:
            old.wrong.append("the old holder was never told")

    def _compare_files(self, before: dict[str, str], after: dict[str, str], old: Old, holder: Holder) -> None:
        """Only files that the old holder has open may have changed."""
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        mine = f"s{holder.bank.session:04d}"
        # Its own, of the journal or groups, that it had open; a version directory that nobody reads.
        version = f".archive/v{holder.bank._store.manifest.version:06d}/"
        allowed = {
            name for name in changed
            if (name in before and name in after and name.startswith(("segments/", "journal/")) and mine not in name)
            or (name.startswith(".archive/") and not name.startswith(version) and name not in before)
            or (name.startswith("tmp/") and f".{old.pid}" in name)
        }  # fmt: skip
        if changed - allowed:
            raise Violation(f"the old holder changed {sorted(changed - allowed)}")

    # -- the end of a round

    def _third(self, takeover: str, left_open: Holder | None = None) -> None:
        """Open once more, compare, and close; one that was left open is fenced by that, and closed after."""
        began = time.monotonic()
        third = Holder(self._job(), _Direct(_Followed(self.model)), takeover=takeover)
        assert third.bank.handed is not None
        if third.opened - began > 5:
            raise Violation(f"a free bank opened after {third.opened - began:.2f} s only")
        report = third.bank.handed.report
        if report.damage or report.lost_records or report.lost_groups:
            raise Violation(f"a holder that ended well left damage: {report}")
        if self._random.random() < 0.3:
            self._work(third)
        if left_open is not None:
            left_open.bank.close()
        third.bank.close()
        check_archive_once(self._bank)
        self.model.check_rows(arrowbank.scan(self._bank).to_polars().select(_COLUMNS).collect())
        for note in (self._bank / "quarantine").glob("*.json"):
            if not json.loads(note.read_bytes())["torn"]:
                raise Violation(f"stopped, not damaged, but quarantined: {note.read_text()}")


def _states(pid: int) -> list[str]:
    """Of each thread."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states


def _stacks(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{_states(pid)} {Path(f'/proc/{pid}/wchan').read_text()}"
    return "gone"


def _hashes(bank: Path) -> dict[str, str]:
    return {
        str(path.relative_to(bank)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(bank.rglob("*"))
        if path.is_file() and not path.is_symlink()
    } | {"archive": os.readlink(bank / "archive")}


# -- campaign and sample


def play(directory: Path, seed: int, rounds: int, *, stop: bool) -> list[Round]:
    """Play rounds of every kind. stop: at the first violation."""
    rng = random.Random(f"kinds {seed}")
    calls = [call for call in CALLS for _ in range(1 + (call in ("check", "pwritev", "fdatasync", "link", "unlink")))]
    with Takeovers(directory, seed) as takeovers:
        for number in range(rounds):
            call = rng.choice(calls) if rng.random() < 0.65 else None
            try:
                takeovers.run(KINDS[number % len(KINDS)], call)
            except BaseException as error:
                error.add_note(f"ARROWBANK_TAKEOVER_SEED={seed}: the same jobs; when they are hit is up to the machine")
                if stop or not isinstance(error, Exception):
                    raise
                print(f"--- violation, seed {seed}", flush=True)
                traceback.print_exc()
        return takeovers.rounds


def table(rounds: list[Round]) -> str:
    """Return what happened, a line for each kind of round."""
    lines = [f"{'round':24}{'rounds':>8}{'violations':>12}{'groups':>8}{'late acks':>11}{'refused':>9}{'seconds':>9}"]
    for kind in sorted({round_.kind for round_ in rounds}):
        for at_call in (False, True):
            those = [one for one in rounds if one.kind == kind and bool(one.point) == at_call]
            if those:
                name = f"{kind}, at a call" if at_call else f"{kind}, at random"
                numbers = [len(those), sum(bool(one.violations) for one in those)]
                numbers += [sum(one.acknowledged for one in those), sum(one.late for one in those)]
                numbers += [sum(one.tried for one in those)]
                widths = (8, 12, 8, 11, 9)
                cells = "".join(f"{number:>{width}}" for number, width in zip(numbers, widths, strict=True))
                lines.append(f"{name:24}{cells}{sum(one.seconds for one in those):>9.1f}")
    points = Counter(" ".join(one.point.split(" ")[:2]) for one in rounds if one.point)
    lines.append("stopped at: " + ", ".join(f"{point} {count}" for point, count in sorted(points.items())))
    return "\n".join(lines)


def a_seed() -> int:
    return int(os.environ.get("ARROWBANK_TAKEOVER_SEED") or secrets.randbits(32))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("CRITICAL", logger="arrowbank")
    yield


def test_a_holder_that_was_stopped_and_overtaken_does_and_spoils_nothing_more(tmp_path: Path, quiet: None) -> None:
    seed = a_seed()
    rounds = play(tmp_path, seed, SAMPLE, stop=True)
    print(f"seed {seed}\n{table(rounds)}")
    assert sum(one.acknowledged for one in rounds) > 20
    assert sum(one.tried for one in rounds) > 10


@pytest.mark.parametrize(
    ("fault", "said"), [("no-fence", "acknowledged|failed: |changed"), ("writes-lock", "changed .'LOCK'")]
)
def test_a_planted_fault_is_caught(tmp_path: Path, quiet: None, fault: str, said: str) -> None:
    with Takeovers(tmp_path, a_seed(), fault) as takeovers:
        for _ in range(8):
            try:
                takeovers.run("force", None)
            except Violation as violation:
                assert re.search(said, str(violation))
                return
    pytest.fail("8 rounds, and nobody noticed")


# -- points that were wrong once


class Overtaken:
    """A holder, and what takes its place within a call of its own."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._patch = path, monkeypatch
        self.new: RolloutBank | None = None

    def within(self, module: Any, name: str, when: Callable[..., bool], work: Callable[[RolloutBank], object]) -> None:
        """Before that call, when it is the right one, another handle takes over and works."""
        call = getattr(module, name)

        def overtaken(*args: Any, **kwargs: Any) -> Any:
            if self.new is None and when(*args):
                self._patch.setattr(module, name, call)
                self.new = RolloutBank.open(self.path, takeover="force", keep_checkpoints=1)
                work(self.new)
            return call(*args, **kwargs)

        self._patch.setattr(module, name, overtaken)

    def finish(self) -> RolloutBank:
        """Close the new holder; return a third one."""
        assert self.new is not None, "never overtaken"
        check_archive_once(self.path)
        self.new.close()
        return RolloutBank.open(self.path, takeover="never", keep_checkpoints=1)


@pytest.fixture
def overtaken(path: Path, monkeypatch: pytest.MonkeyPatch) -> Overtaken:
    return Overtaken(path, monkeypatch)


def one_at_a_time(bank: RolloutBank, iterations: range, size: int = 1) -> None:
    """A file of the archive for each iteration."""
    for iteration in iterations:
        train(bank, range(iteration, iteration + 1), size=size)
        bank._compactor.wait()


def until_call(nth: int) -> Callable[..., bool]:
    calls = itertools.count(1)
    return lambda *_: next(calls) == nth


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank that a kill within a merge has left."""
    path = tmp_path_factory.mktemp("interrupted") / "bank"
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        one_at_a_time(bank, range(7))
        left = path / f".archive/v{bank._store.manifest.version + 1:06d}"
        left.mkdir()
        (left / "c000000-s0000.parquet").hardlink_to(path / "archive" / "c000000-s0000.parquet")
    return path


@pytest.mark.parametrize("name", ["open", "stat", "rename", "unlink", "rmdir", "fsync"])
@pytest.mark.parametrize("nth", range(1, 10))
def test_an_overtaken_opener_does_not_clear_the_archive_of_the_new_holder(
    path: Path, overtaken: Overtaken, interrupted: Path, name: str, nth: int
) -> None:
    """The new holder takes away what the kill left, and its own next version may be of the same number."""
    shutil.copytree(interrupted, path, symlinks=True)

    def work(new: RolloutBank) -> None:
        new.restore(7)
        one_at_a_time(new, range(7, 9))

    overtaken.within(os, name, until_call(nth), work)
    try:
        old = RolloutBank.open(path, keep_checkpoints=1)
    except (FencedError, BankLockedError):
        assert overtaken.new is not None
    else:
        old.close()
        if overtaken.new is None:
            return
    with overtaken.finish() as third:
        assert third.stats().archived_groups >= 7


@pytest.mark.parametrize("nth", range(1, 6))
def test_an_overtaken_merge_puts_nothing_in_the_new_holders_archive(path: Path, overtaken: Overtaken, nth: int) -> None:
    old = RolloutBank.open(path, keep_checkpoints=1)
    old.restore(0)
    one_at_a_time(old, range(2), size=8)  # files of a higher tier, which the merge keeps
    one_at_a_time(old, range(2, 9))
    links = itertools.count(1)
    overtaken.within(files, "link", lambda *_: next(links) == nth, lambda new: new.restore(1))
    with contextlib.suppress(FencedError):
        one_at_a_time(old, range(9, 13))
    old.close()
    new = overtaken.new
    if new is None:
        assert nth > 3
        return
    listed = {file.name for file in new._store.manifest.files}
    assert {file.name for file in (path / "archive").iterdir()} == {"c000000-s0000.parquet", *listed}
    overtaken.finish().close()


@pytest.mark.parametrize("name", ["pwritev", "fdatasync", "fsync", "rename", "open", "link", "unlink"])
@pytest.mark.parametrize("nth", range(1, 7))
def test_whoever_is_overtaken_within_a_call_learns_that_and_no_other_error(
    path: Path, overtaken: Overtaken, name: str, nth: int
) -> None:
    """Whatever the new holder has healed, archived and removed meanwhile."""
    old = RolloutBank.open(path, keep_checkpoints=1)
    old.restore(0)
    kept = [old.append(token_group(1))]

    def work(new: RolloutBank) -> None:
        new.restore(0)
        train(new, range(2))
        new._compactor.wait()

    overtaken.within(os, name, until_call(nth), work)
    calls: list[Callable[[], object]] = [
        lambda: kept.append(old.append(token_group(2))),
        lambda: old.begin_iteration(1),
        lambda: kept.extend(old.append_many([token_group(3), token_group(4)])),
        lambda: old.evict(kept[1:2], "why"),
        lambda: old.mark_consumed(kept[:1], 1),
    ]
    for call in calls:
        before = overtaken.new
        try:
            call()
        except FencedError:
            assert overtaken.new is not None
            break
        assert before is None or call is calls[1], "acknowledged after a takeover"
    old.close()
    if overtaken.new is None:
        return
    with overtaken.finish() as third:
        restored = third.restore(0)
        assert restored.report.damage == ()
        seen = [group.uid for queue in restored.pending.values() for group in queue]
        assert len(seen) == len(set(seen))


def test_an_append_that_fails_while_its_holder_is_overtaken_says_fenced(
    path: Path, overtaken: Overtaken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new holder's compaction has removed the journal that is to tell of the failure."""
    old = RolloutBank.open(path)
    old.restore(0)
    old.append(token_group(1))
    fdatasync, calls = os.fdatasync, itertools.count(1)

    def failing(descriptor: int) -> None:
        if next(calls) == 1:
            raise OSError(5, "planted")
        fdatasync(descriptor)

    def work(new: RolloutBank) -> None:
        new.restore(0)
        train(new, range(3))
        new._compactor.wait()

    monkeypatch.setattr(os, "fdatasync", failing)
    overtaken.within(os, "fdatasync", until_call(2), work)
    with pytest.raises((FencedError, OSError)):
        old.append(token_group(2))
    with pytest.raises(FencedError):
        old.append(token_group(3))
    old.close()
    overtaken.finish().close()


@pytest.mark.parametrize("name", ["pwritev", "fsync", "rename", "open", "stat"])
@pytest.mark.parametrize("nth", range(1, 8))
def test_closing_is_quiet_wherever_a_takeover_comes_between(
    path: Path, overtaken: Overtaken, name: str, nth: int
) -> None:
    old = RolloutBank.open(path)
    old.restore(0)
    uid = old.append(token_group(1))
    overtaken.within(os, name, until_call(nth), lambda new: new.append(token_group(2)))
    old.close()
    if overtaken.new is not None:
        with overtaken.finish() as third:
            found = [group.uid for queue in third.restore(0).pending.values() for group in queue]
            assert (len(found), found[0]) == (2, uid)


@pytest.mark.parametrize("name", ["link", "unlink", "rename", "symlink", "mkdir", "open", "fsync"])
@pytest.mark.parametrize("nth", range(1, 5))
def test_who_makes_a_new_bank_and_is_overtaken_spoils_nothing_of_it(
    path: Path, overtaken: Overtaken, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    create = store.create_bank

    def creating(*args: Any) -> None:
        monkeypatch.setattr(bank_module, "create_bank", create)
        overtaken.within(os, name, until_call(nth), lambda new: new.restore(0))
        create(*args)

    monkeypatch.setattr(bank_module, "create_bank", creating)
    try:
        old = RolloutBank.open(path)
    except FencedError:
        pass
    else:
        if overtaken.new is None:
            old.close()
            return
        with pytest.raises(FencedError):
            old.append(token_group(1))
    assert overtaken.new is not None
    one_at_a_time(overtaken.new, range(9))  # with a merge
    assert overtaken.new.stats().compaction_error is None
    with overtaken.finish() as third:
        stats = third.stats()
        assert (stats.archived_files, stats.archived_groups, stats.live_groups) == (1, 8, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--stop", action="store_true", help="at the first violation; its bank is kept")
    options = parser.parse_args()
    seed = a_seed() if options.seed is None else options.seed
    logging.getLogger("arrowbank").setLevel(logging.CRITICAL)
    print(f"seed {seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="takeover-"))
    rounds = play(directory, seed, options.rounds, stop=options.stop)
    print(table(rounds))
    failed = sum(bool(one.violations) for one in rounds)
    print(f"{len(rounds)} rounds, {failed} violations, seed {seed}; banks in {directory}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
