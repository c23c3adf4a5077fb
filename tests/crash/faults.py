"""Faults of system calls: each call of a run that changes the bank's files goes wrong in turn, in every way.

Proves, of two kinds of runs: a trainer whose call raised (EIO, ENOSPC), was interrupted (EINTR) or cut short goes on
as a user would (calls again; does without the group; closes and opens again; ends without closing), and then nothing
acknowledged is lost, nothing is there twice, and everything works once the cause is gone. And a process that is killed
before any of its calls, or with half of a write done, leaves a bank that is held against what it had acknowledged, as a
crash state is.

A fault is for one call, or for good: for all later ones of the same name, until the trainer was in vain for the second
time. Interrupted calls are for good made again by Python until they pass, so that 50 in succession stand for that. A
short write is a real one: half of the bytes are there, and the call says so; for good, each later write is halved, too.

``interpose.c`` stands between libc and its callers, Arrow's C++ among them, so calls that bypass libc would go unseen
(there are none: ``test_faults`` compares with strace). Of the hundreds of small writes with which Arrow fills a Parquet
file, the first, a middle one and the last are taken. Calls are counted over all threads; where these race, a number
may stand for another call in another run. What a failed sync does to the bytes is up to ``states``: here they stay.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import directory_in_memory
from small_disks import WAYS, Model, find_problem

from crash.check import Checker
from crash.effects import Fact
from crash.facts import Violation, known_from
from crash.faulty import Job
from crash.scenarios import SCENARIOS

__all__ = ["Faults", "Outcome", "preloaded", "try_all"]

ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR)
WRITES = ("pwritev", "write")
TOLD_BESIDES = ("hit", "call", "calls", "raised", "sync failed")
"""Lines that are no acknowledgements."""
HERE = Path(__file__).parent


@dataclass
class Outcome:
    """What came of so many faults."""

    seed: int
    cases: int = 0
    hit: Counter[str] = field(default_factory=Counter)
    """Name of a call → how often one went wrong."""
    seconds: float = 0.0
    violations: list[tuple[str, str]] = field(default_factory=list)


class Faults:
    """Runs jobs in children of one preloaded server, and checks what is left."""

    def __init__(self, directory: Path, server: subprocess.Popen[str]) -> None:
        self._directory, self._server = directory, server
        self._checker = Checker(directory / "checked")
        self.root = directory / "run"

    def run(self, job: Job) -> tuple[int, list[list[Any]]]:
        """Do a job on a new bank; return how the child ended, and what it told."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(job)) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return status, [json.loads(line) for line in (self.root / "facts").read_text().splitlines()]

    def calls(self, scenario: str = "") -> dict[int, str]:
        """Return the calls of a run in which nothing goes wrong, by number: of Arrow's writes into one file some."""
        status, told = self.run(Job(str(self.root), "tell", scenario=scenario))
        if status or told[-1][0] != "calls":
            raise Violation(f"a run in which nothing went wrong ended with {status}")
        named = [(number, name, file) for kind, number, name, file in _padded(told) if kind == "call"]
        chosen = {number: name for number, name, _ in named if name != "write"}
        for _, group in itertools.groupby(named, key=lambda call: call[1:] if call[1] == "write" else None):
            writes = [number for number, name, _ in group if name == "write"]
            chosen |= dict.fromkeys([*writes[:2], *writes[len(writes) // 2 :][:1], *writes[-2:]], "write")
        return dict(sorted(chosen.items()))

    def try_one(self, job: Job) -> list[str]:
        """Do a job, and hold what is left against what was told; return the names of calls that went wrong."""
        status, told = self.run(job)
        if job.scenario:
            self._check_killed(status, told)
        else:
            self._check_went_on(status, told)
        return [event[1] for event in told if event[0] == "hit"]

    def _check_went_on(self, status: int, told: list[list[Any]]) -> None:
        if status:
            raise Violation(f"the trainer could not go on: it ended with {status}")
        model = Model()
        for event in told:
            if event[0] not in TOLD_BESIDES:
                model.take(event)
        find_problem(self.root / "bank", model)

    def _check_killed(self, status: int, told: list[list[Any]]) -> None:
        if status not in (0, 9):  # it may have had no such call
            raise Violation(f"the program failed: it ended with {status}")
        known = known_from(Fact(0, 0, event) for event in told if event[0] not in TOLD_BESIDES)
        self._checker.check_bank(self.root, known, thorough=True)


def jobs(faults: Faults) -> Iterator[Job]:
    """Every call of the short run in every way, and every call of every scenario with a kill."""
    root = str(faults.root)
    for at, name in faults.calls().items():
        for turn, (for_good, code) in enumerate(itertools.product((False, True), ERRORS)):
            yield Job(root, "fail", code, at, for_good, WAYS[(at + turn) % len(WAYS)])
        if name in WRITES:
            yield Job(root, "short", 0, at, False, "leave")
            yield Job(root, "short", 0, at, True, "leave")
    for scenario in SCENARIOS:
        for at, name in faults.calls(scenario).items():
            yield Job(root, "kill", 0, at, scenario=scenario)
            if name in WRITES:
                yield Job(root, "half and kill", 0, at, scenario=scenario)


def _padded(told: list[list[Any]]) -> Iterator[tuple[Any, Any, Any, Any]]:
    for event in told:
        kind, number, name, file, *_ = [*event, None, None, None]
        yield kind, number, name, file


def try_all(faults: Faults, seed: int, most: int | None = None) -> Outcome:
    """Try every fault, or a sample."""
    outcome = Outcome(seed)
    started = time.monotonic()
    chosen = list(jobs(faults))
    print(f"{len(chosen)} faults in all", file=sys.stderr)
    if most is not None:
        chosen = random.Random(seed).sample(chosen, min(most, len(chosen)))
    for job in chosen:
        outcome.cases += 1
        if outcome.cases % 500 == 0:
            print(f"{outcome.cases} faults, {len(outcome.violations)} violations", file=sys.stderr, flush=True)
        try:
            outcome.hit.update(faults.try_one(job))
        except Exception as error:  # whatever a broken bank raises
            told = {name: value for name, value in asdict(job).items() if name != "root"}
            outcome.violations.append((json.dumps(told), f"{type(error).__name__}: {error}"))
    outcome.seconds = time.monotonic() - started
    return outcome


@contextmanager
def preloaded() -> Iterator[Faults]:
    """Compile the library, and start the server."""
    with directory_in_memory() as directory:
        library = directory / "interpose.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, HERE / "interpose.c", "-ldl"], check=True)
        server = subprocess.Popen(
            [sys.executable, HERE / "faulty.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"LD_PRELOAD": str(library)},
        )
        try:
            yield Faults(directory, server)
        finally:
            server.communicate(timeout=60)
