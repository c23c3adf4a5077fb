"""The program that is traced: a server that forks a child for each job, so that all runs share one strace.

Run as a program, it takes jobs as JSON lines from its standard input. A child plays a scenario in a new
directory, or takes up the work on a bank that is there; then it ends without a word. Random numbers are seeded, so
that the same run makes the same calls.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from forked import be_ready, serve_silently
from machine import in_memory

from arrowbank.archive import archivist, merging
from crash import controls
from crash.effects import Trace, Tree
from crash.scenarios import SCENARIOS, Player
from crash.trace import COMMAND, calls

__all__ = ["Job", "Tracer", "tracing"]


RESUMED = 90_001
"""The serial number of the group that is appended after a restore."""


@dataclass(frozen=True)
class Job:
    """What one child does."""

    root: str
    scenario: str = ""
    """What to play; empty: open the bank that is there, restore ``iteration``, append a group and close."""
    iteration: int = 0
    mode: str = "replay"
    fault: str = ""
    """One of ``controls.FAULTS``."""


# -- in the traced processes


def work(job: Job) -> None:
    dice = random.Random(f"{job.scenario}")
    os.urandom = dice.randbytes
    uuid.uuid4 = lambda: uuid.UUID(int=dice.getrandbits(128), version=4)
    merging.FAN_IN = 2
    archivist.MAX_JOURNAL_PARTS = 2
    if job.fault:
        controls.FAULTS[job.fault]()
    run = Player(Path(job.root), sound=not job.fault)
    if job.scenario:
        SCENARIOS[job.scenario](run)
    else:
        run.open()
        run.restore(job.iteration, job.mode)
        run.append(RESUMED)
        run.close()


def serve() -> None:
    be_ready()
    logging.getLogger("arrowbank").setLevel(logging.CRITICAL)
    serve_silently(Job, work)


# -- in who has them traced


class Tracer:
    """Has jobs done under strace, and reads what they did."""

    def __init__(self, directory: Path) -> None:
        """directory: for the log and the runs."""
        self._directory = directory
        self._log = directory / "strace.log"
        self._runs = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*COMMAND, "-o", str(self._log), sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)

    @property
    def next_root(self) -> Path:
        """Where the next run takes place."""
        return self._directory / f"run{self._runs}"

    def run(self, *, scenario: str = "", iteration: int = 0, mode: str = "replay", fault: str = "") -> Trace:
        """Play a scenario in ``next_root``, or take up the work on the bank that is there."""
        root = self.next_root
        self._runs += 1
        root.mkdir(exist_ok=True)
        tree = Tree.of(root)
        start = self._log.stat().st_size if self._log.exists() else 0
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(Job(str(root), scenario, iteration, mode, fault))) + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline()
        if status != "0\n":
            raise AssertionError(f"the traced run of {scenario or 'an open'} failed: {status!r}")
        with self._log.open() as log:
            log.seek(start)
            found = calls(log.read().split("\n"), str(root))
        return Trace.of(found, root, tree)


@contextmanager
def tracing() -> Iterator[Tracer]:
    with tempfile.TemporaryDirectory(prefix="arrowbank-", dir=in_memory()) as directory, Tracer(Path(directory)) as one:
        yield one


if __name__ == "__main__":
    serve()
