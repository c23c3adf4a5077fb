"""What ``takeovers`` stops and overtakes: the trainer of ``kill_child``, that can stop itself at a chosen call.

Run as ``takeover_child.py REPORT_FD [FAULT]`` this is a server that forks one trainer for each job, a JSON line on its
standard input. The report is that of ``kill_child``, and besides:

    S call when          the trainer stops itself now (SIGSTOP), before, within or after that call
    f where              the first FencedError; what follows is said after it
    n call               a call after that raised FencedError, as it must
    v call what          it did not
    z                    closed without a word

``Holder`` is also what takes over, within the parent: its report goes straight to the model.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forked import Report, be_ready, serve
from kill_child import Job, Trainer, make_group

from arrowbank import BankLockedError, FencedError, RolloutBank
from arrowbank.archive import merging
from arrowbank.durable.session import Claim
from arrowbank.restored import Restored

FAN_IN = 3
"""Of merges, so that there are some in half a second."""
MOST_SECONDS = 60
CALLS = ("pwritev", "fdatasync", "fsync", "link", "rename", "unlink", "mkdir", "rmdir", "symlink", "open", "check")
ATOMIC = 8
"""A record's prefix lies within a page, and no kill divides it."""


@dataclass
class StoppingJob(Job):
    """A job with a place to stop at."""

    call: str | None = None
    """One of CALLS; "check" is a look for a later claim that found none."""
    when: str = "before"
    nth: int = 1
    thread: str = ""
    """Only calls of threads whose names begin so."""
    armed: bool = True
    """Otherwise SIGUSR1 arms it."""


class Bank(RolloutBank):
    """Keeps what it handed back last."""

    handed: Restored | None = None

    def restore(self, *args: Any, **kwargs: Any) -> Restored:
        self.handed = super().restore(*args, **kwargs)
        return self.handed


class Holder(Trainer):
    """Trains as kill_child's does, for so many iterations, compacting at every checkpoint."""

    bank: Bank
    checkpoint_odds = 0.7

    def __init__(
        self, job: Job, report: Report, *, between: Callable[[Holder], None] = lambda holder: None, **options: Any
    ) -> None:
        """between: called when the bank is open, and nothing was restored yet."""
        self._between, self._options = between, options
        super().__init__(job, report)

    def open(self) -> Bank:
        bank = Bank.open(self.job.path, keep_checkpoints=1, **self._options)
        self.opened = time.monotonic()
        self._between(self)
        return bank

    async def train_some(self, iterations: float) -> None:
        while iterations > 0:
            await self.one_iteration()
            iterations -= 1
        for task in self.flying:
            await task
        self.flying.clear()

    # -- having lost its place

    async def lose(self) -> None:
        """Train until that is no longer possible, then try everything."""
        asyncio.get_running_loop().set_exception_handler(self.note)
        try:
            await self.train_some(float("inf"))
        except FencedError:
            self.report.say("f", "train")
        for outcome in await asyncio.gather(*self.flying, return_exceptions=True):
            self.note_failure("append_async", outcome)
        uid, k = (self.pool or ["0" * 32])[0], self.iteration
        calls: dict[str, Callable[[], Any]] = {
            "append": lambda: self.bank.append(make_group(self.next_serial())),
            "append_many": lambda: self.bank.append_many([make_group(self.next_serial()) for _ in range(3)]),
            "append at the next iteration": lambda: (self.bank.begin_iteration(k + 1), self.bank.append(make_group(1))),
            "checkpoint": lambda: self.bank.checkpoint(k + 1, wait=True),
        }
        if self.pool:
            calls |= {
                "mark_consumed": lambda: self.bank.mark_consumed([uid], k + 1, state=b"late"),
                "evict": lambda: self.bank.evict([uid], "late"),
            }
        for name, call in calls.items():
            self.expect_fenced(name, call)
        try:
            await self.bank.append_async(make_group(self.next_serial()))
        except FencedError:
            self.report.say("n", "append_async")
        else:
            self.report.say("v", "append_async", "was acknowledged")
        if self.random.random() < 0.5:
            self.expect_fenced("restore", lambda: self.bank.restore(self.job.restore))
        self.bank.close()
        self.report.say("z")

    def note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of appends that nobody waited for to the end."""
        self.note_failure("append_async", context.get("exception"))

    def note_failure(self, name: str, error: object) -> None:
        if isinstance(error, BaseException) and not isinstance(error, FencedError):
            self.report.say("v", name, repr(error)[:1000])

    def expect_fenced(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except FencedError:
            self.report.say("n", name)
        except BaseException as error:
            self.note_failure(name, error)
        else:
            self.report.say("v", name, "was acknowledged")


# -- stopping


def stop_at(job: StoppingJob, report: Report) -> None:
    """Have the nth of the chosen calls stop the whole process."""
    if job.call is None:
        return
    owner: Any = Claim if job.call == "check" else os
    function, lock = getattr(owner, job.call), threading.Lock()
    armed, left = [job.armed], [job.nth]
    signal.signal(signal.SIGUSR1, lambda *_: armed.__setitem__(0, True))

    def is_due() -> bool:
        if not armed[0] or not threading.current_thread().name.startswith(job.thread):
            return False
        with lock:
            left[0] -= 1
            return left[0] == 0

    def stop() -> None:
        report.say("S", job.call, job.when)
        os.kill(os.getpid(), signal.SIGSTOP)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        due = is_due()
        if due and job.when == "before":
            stop()
        if due and job.when == "within" and job.call == "pwritev":
            descriptor, parts, offset = args
            if len(parts[0]) > ATOMIC:
                args = descriptor, [memoryview(parts[0])[: len(parts[0]) // 2]], offset
        result = function(*args, **kwargs)
        if due and job.when != "before":
            stop()
        return result

    setattr(owner, job.call, stopping)


# -- planted faults


def no_fence() -> None:
    """Never look for a later claim."""
    Claim.check = lambda self: None  # type: ignore[method-assign]


def writes_lock() -> None:
    """Say at the end that the bank is free, whoever has it."""

    def release(self: Claim) -> None:
        self.paths.lock.write_bytes(b"{}")

    Claim.release = release  # type: ignore[method-assign]


FAULTS = {"no-fence": no_fence, "writes-lock": writes_lock}


# -- the server


def hold(job: StoppingJob, report: Report) -> None:
    stop_at(job, report)
    try:
        holder = Holder(job, report)
    except (FencedError, BankLockedError) as error:
        report.say("f", f"open: {type(error).__name__}")
    else:
        asyncio.run(holder.lose())


def main() -> None:
    be_ready()
    logging.getLogger("arrowbank").setLevel(logging.CRITICAL)
    merging.FAN_IN = FAN_IN
    if len(sys.argv) > 2:
        FAULTS[sys.argv[2]]()
    serve(Report(int(sys.argv[1])), StoppingJob, hold, MOST_SECONDS)


if __name__ == "__main__":
    main()
