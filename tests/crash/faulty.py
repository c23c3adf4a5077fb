"""The program in which calls go wrong: a server that forks a child for each job, ``interpose.c`` preloaded.

Jobs are JSON lines on its standard input. What a child tells, acknowledgements and what raised, goes to the file
``facts`` beside its bank, one JSON line each.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from forked import be_ready, serve_silently
from small_disks import BRIEF, Trainer, insist

from arrowbank.archive import archivist, merging
from crash.scenarios import SCENARIOS, Player

__all__ = ["Job"]

MOST_SECONDS = 60
FOR_GOOD = 1 << 40
STORM = 50
"""What is for good of interrupted calls, which Python makes again until they pass: so many in succession."""
KINDS = {"pass": 0, "fail": 1, "short": 2, "kill": 3, "half and kill": 4, "tell": 5}


@dataclass(frozen=True)
class Job:
    """What one child does, and what happens to it."""

    root: str
    kind: str = "pass"
    """One of KINDS."""
    code: int = 0
    """errno of what fails."""
    at: int = 1
    """The number of the call, of all that change the bank's files."""
    for_good: bool = False
    """Also later calls of that name, until the trainer was in vain for the second time."""
    way: str = "retry"
    """One of WAYS in ``small_disks``."""
    scenario: str = ""
    """Of ``scenarios``, for what ends with a kill; empty: ``BRIEF`` of ``small_disks``, whose trainer goes on."""


def work(job: Job) -> None:
    library = ctypes.CDLL(None)
    root = Path(job.root)
    facts = os.open(root / "facts", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def tell(event: list[Any]) -> None:
        os.write(facts, json.dumps(event).encode() + b"\n")

    times = ctypes.c_long((STORM if _is_interrupt(job) else FOR_GOOD) if job.for_good else 1)
    place = os.fsencode(root / "bank")
    library.interpose(place, KINDS[job.kind], job.code, ctypes.c_long(job.at), times, facts)
    if job.scenario:
        SCENARIOS[job.scenario](Player(root))
    else:
        lift: Callable[[], object] = library.interpose_end if job.for_good else lambda: None
        trainer = Trainer(root / "bank", tell)
        insist(trainer, BRIEF, job.way, expected=lambda error: error.errno == job.code, tell=tell, lift=lift)
    library.interpose_calls.restype = ctypes.c_long
    tell(["calls", library.interpose_calls()])


def _is_interrupt(job: Job) -> bool:
    return job.kind == "fail" and job.code == 4


def serve() -> None:
    be_ready()
    logging.getLogger("arrowbank").setLevel(logging.CRITICAL)
    merging.FAN_IN = 2
    archivist.MAX_JOURNAL_PARTS = 2
    serve_silently(Job, work, MOST_SECONDS)


if __name__ == "__main__":
    serve()
