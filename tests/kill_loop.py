"""Trainers that are forked on one bank and killed, and what they told before.

``KillLoop`` kills each at a seeded random moment after it entered a chosen phase (see ``kill_child``), and holds what
is left against a ``Model`` of what was acknowledged. ``ARROWBANK_KILL_SEED`` sets the seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import polars as pl
from forked import Server
from kill_child import Job
from kill_model import COLUMNS, Model, Restores, Violation, check_archive_once

import arrowbank
from arrowbank.errors import ArrowbankError

CHILD = Path(__file__).with_name("kill_child.py")
COMPACTION = ("execute", "publish", "manifest", "unlink")
"""Phases of it, in their order."""


@dataclass
class Kill:
    """What a trainer was doing when it died."""

    phases: tuple[str, ...]
    in_flight: int
    acknowledged: int
    """Groups, by this trainer."""


def start_server(fault: str | None = None) -> Server:
    """Start what forks trainers, with a planted fault if there is to be one."""
    return Server(CHILD, *([fault] if fault else []))


class KillLoop:
    """Starts trainers on one bank and kills them."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        *,
        fault: str | None = None,
        longest_wait_s: float = 0.0007,
        model: Model | None = None,
        before: int = 0,
        server: Server | None = None,
    ) -> None:
        """``model``: what others, ``before`` at most, were promised who worked on this bank.

        A ``server`` that forks the trainers, and that somebody else closes, spares its start.
        """
        self.bank = directory / "bank"
        self.model = model or Model()
        self._before = before
        self.kills: list[Kill] = []
        self._random = random.Random(seed)
        self._longest_wait_s = longest_wait_s
        self._own_server = server is None
        self._server = server or start_server(fault)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own_server:
            self._server.close()

    def cycle(self, target: str | None, *, in_flight: bool, seconds: float = 1.5) -> Kill:
        """Start a trainer, kill it soon after it entered the phase ``target``, and check what was left.

        It is killed after so many ``seconds`` anyway.
        """
        job = Job(
            path=str(self.bank),
            seed=self._random.getrandbits(32),
            cycle=self._before + len(self.kills) + 1,
            restore=self._random.choice(self.model.checkpoints()),
            in_flight=in_flight,
            longest_wait_s=self._longest_wait_s,
        )
        self._server.start(job)
        kill = self._run(target, seconds)
        self.kills.append(kill)
        self.check_left_over()
        return kill

    def follow(self) -> Followed:
        """Begin to read one trainer's report."""
        return Followed(self.model)

    def _run(self, target: str | None, seconds: float) -> Kill:
        """Follow a trainer's report to its end."""
        trainer = self.follow()
        nth = 1 if target in ("open", "restore") else self._random.randint(1, 3)
        enough = time.monotonic() + seconds
        for line in self._lines(until=lambda: enough if trainer.pid and not trainer.killed else None):
            if line is not None:
                trainer.take(line)
            if trainer.gone:
                break
            due = time.monotonic() > enough or (target is not None and trainer.entered[target] >= nth)
            if due and trainer.pid and not trainer.killed:
                time.sleep(self._random.choice([0, 0.0005, 0.002]) * self._random.random())
                trainer.kill()
        return Kill(tuple(trainer.phases), trainer.in_flight, trainer.acknowledged)

    def _lines(self, until: Callable[[], float | None]) -> Iterator[str | None]:
        """Yield lines of the report; None each time that ``until`` has come without one."""
        while True:
            deadline = until()
            lines = self._server.read(60.0 if deadline is None else deadline - time.monotonic())
            if lines is not None:
                yield from lines
            elif deadline is None:
                raise AssertionError("no word from the trainers for a minute")
            else:
                yield None

    def check_left_over(self) -> None:
        """Check a bank that nobody has open. A kill before it was made leaves none."""
        if not (self.bank / "MANIFEST.json").exists():
            if self.model.serials:
                raise Violation("the manifest is gone")
            return
        try:
            check_archive_once(self.bank)
            view = arrowbank.scan(self.bank)
            self.model.check_rows(view.to_polars().select(COLUMNS).collect())
        except (ArrowbankError, pl.exceptions.PolarsError, OSError) as error:
            raise Violation(f"what is left cannot be read: {error}") from error


class Followed:
    """One trainer, as far as its report was read."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.pid = 0
        self.killed = self.gone = False
        self.entered: Counter[str] = Counter()
        self.phases: list[str] = []
        """Entered and not left."""
        self.in_flight = 0
        self.acknowledged = 0
        self.restores = Restores(model)

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def take(self, line: str) -> None:
        kind, *words = line.split(" ")
        match kind:
            case "B":
                self.pid = int(words[0])
            case "X":
                if words != [str(int(signal.SIGKILL))]:
                    raise AssertionError(f"the trainer ended by itself: wait status {words}")
                self.gone = True
            case "!":
                raise Violation("the trainer failed: " + line.encode().decode("unicode_escape"))
            case ">":
                self.entered[" ".join(words)] += 1
                self.phases.append(" ".join(words))
            case "<":
                self.phases.remove(" ".join(words))
            case "F":
                self.in_flight = int(words[0])
                self.entered["in flight"] += 1
            case "R" | "P" | "G" | "Q" | "r":
                self.restores.take(kind, words)
            case _:
                self.acknowledged += kind == "A"
                self.in_flight -= kind == "A" and self.in_flight > 0
                self.model.take(kind, words)


def a_seed(variable: str = "ARROWBANK_KILL_SEED") -> int:
    return int(os.environ.get(variable) or secrets.randbits(32))


@contextlib.contextmanager
def telling_the_seed(seed: int) -> Iterator[None]:
    """Say how to run it again when something fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"ARROWBANK_KILL_SEED={seed} has the same jobs and delays; when they hit is up to the machine")
        raise
