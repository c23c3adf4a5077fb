"""Rounds of takeovers: ``Takeovers`` stops a trainer, takes its bank over in this process, and lets the old one go on.

The trainers are forked (see ``takeover_child``) and stopped with SIGSTOP at a random moment or at a chosen call. What
the new holder is given back is held against a plain model of what was acknowledged (``kill_model``'s); then the old one
gets SIGCONT and tries everything; then a third opening, plain Parquet readers and ``scan`` are compared. A
``Violation`` is a broken promise.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked import Server
from kill_loop import Followed
from kill_model import COLUMNS, LineModel, Model, Violation, check_archive_once, check_contents
from takeover_child import CALLS, FAN_IN, Bank, Holder, StoppingJob
from takeover_report import Direct, Known, Old

import arrowbank
from arrowbank import BankLockedError
from arrowbank.archive import merging

__all__ = ["SEED", "Round", "Takeovers", "play"]

SEED = "ARROWBANK_TAKEOVER_SEED"

CHILD = Path(__file__).with_name("takeover_child.py")
LEASE_S = 2.0
ROUNDS_A_BANK = 6
KINDS = ("force", "lease", "running", "kill", "force", "refused", "lease", "paused")
"""running: taken over by force without being stopped before."""
OPENING = 0.2


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
        self._server = Server(CHILD, *([fault] if fault else []))
        with contextlib.suppress(OSError):  # it writes on while this process waits elsewhere
            fcntl.fcntl(self._server.reports, fcntl.F_SETPIPE_SZ, 1 << 20)
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
        self._server.close()

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
        self._server.start(job)
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
            lines = self._server.read(deadline - time.monotonic())
            if lines is None:
                return
            self._lines += lines
            if seconds and time.monotonic() > deadline:
                return

    def _stop(self, old: Old) -> None:
        if not old.pid:
            raise AssertionError("the trainer never began")
        os.kill(old.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 60
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
        followed = Followed(self.model)
        try:
            holder = Holder(self._job(), Direct(followed), between=between, **options)
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
        deadline = time.monotonic() + 60
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
        third = Holder(self._job(), Direct(Followed(self.model)), takeover=takeover)
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
        self.model.check_rows(arrowbank.scan(self._bank).to_polars().select(COLUMNS).collect())
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
                error.add_note(f"{SEED}={seed}: the same jobs; when they are hit is up to the machine")
                if stop or not isinstance(error, Exception):
                    raise
                print(f"--- violation, seed {seed}", flush=True)
                traceback.print_exc()
        return takeovers.rounds
