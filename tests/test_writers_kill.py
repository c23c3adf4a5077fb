"""SIGKILL to a coordinator and its writers: what any of them was promised is there, once, bit for bit.

``python tests/test_writers_kill.py --kills 200 [--seed N]`` is the campaign. A coordinator and WRITERS processes of one
run append at once; the coordinator draws, evicts and checkpoints, with compaction beside the writers. Each is killed at
seeded random moments and started again: a writer under its name, with the session's token; a coordinator restores at
the last checkpoint, and the writers of before must be refused. All report into one pipe (see ``writers_child``), and
``WritersModel`` says what must be there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import polars as pl
import pytest
from forked import Server
from kill_child import fate_of
from kill_loop import COMPACTION, a_seed, telling_the_seed
from kill_model import COLUMNS, Model, Restores, Violation, check_archive_once, check_contents
from writers_child import Start

import arrowbank
from arrowbank import RolloutBank

CHILD = Path(__file__).with_name("writers_child.py")
WRITERS = ("rank-0", "rank-1", "rank-2", "rank-3")
MAIN = "main"
PHASES = (None, None, "draw", "drawn", "evict", "checkpoint", "append", *COMPACTION)
"""Where to kill a coordinator; None: anywhere."""
EARLY = ("open", "restore")


# -- what was promised


@dataclass
class WritersModel(Model):
    """The model of ``kill_model``, for several who append."""

    session: int = 0
    """The last that a coordinator has restored in."""
    begun: dict[int, int] = field(default_factory=dict)
    """Serial number → the session known when its append began."""
    acked: set[str] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    """Serial numbers that FencedError refused, and that nobody acknowledged since."""
    refused_and_there: int = 0
    drawn: set[str] = field(default_factory=set)
    evictions: int = 0

    def take(self, kind: str, words: list[str]) -> None:
        match kind:
            case "b":
                self.begun |= dict.fromkeys(map(int, words[0].split(",")), self.session)
            case "A":
                self._acknowledge_in(words[0], int(words[1]), int(words[2]))
            case "F":
                self.refused |= {int(serial) for serial in words[0].split(",") if serial != "-"}
            case "K":
                self.session = int(words[0])
            case _:
                if kind == "D":
                    self._check_new_draw(int(words[0]), words[2].split(","))
                self.evictions += kind == "e"
                super().take(kind, words)

    def _acknowledge_in(self, uid: str, serial: int, session: int) -> None:
        if uid in self.acked:
            raise Violation(f"uid {uid} was given twice")
        if self.begun[serial] > session:
            raise Violation(f"session {session} acknowledged {uid}, begun after session {self.begun[serial]} restored")
        if uid not in self.serials and session < self.session and fate_of(serial) == "train":
            raise Violation(f"session {session} acknowledged {uid}, which the restore of {self.session} has not got")
        if self.serials.get(uid, serial) != serial:
            raise Violation(f"uid {uid} of serial {serial} is that of {self.serials[uid]}")
        self.acked.add(uid)
        self.acknowledged += 1
        self.refused.discard(serial)
        self._add(uid, serial)
        self.maybe_batches = [batch for batch in self.maybe_batches if serial not in batch]

    def _check_new_draw(self, iteration: int, uids: list[str]) -> None:
        others = {uid for at, draw in self.draws.items() if at != iteration for uid in draw.uids}
        if others & set(uids):
            raise Violation(f"iteration {iteration} draws again what was drawn: {sorted(others & set(uids))[:4]}")

    def _take_unacknowledged(self, more: dict[str, int]) -> None:
        if not self.begun.keys() >= set(more.values()):
            raise Violation(f"groups that nobody appended: {more}")
        self.refused_and_there += len(self.refused & set(more.values()))
        super()._take_unacknowledged(more)

    def check_makers(self, rows: pl.DataFrame) -> None:
        if not self.begun.keys() >= set(map(int, rows["problem_id"].drop_nulls())):
            raise Violation("scan has groups that nobody appended")


# -- the processes


@dataclass
class Process:
    """One that was started, as far as its report was read."""

    name: str
    told: int
    """The FIFO to it."""
    pid: int = 0
    pidfd: int = -1
    entered: Counter[str] = field(default_factory=Counter)
    is_joined: bool = False
    """It has restored, or has a token."""

    def tell(self, *words: object) -> None:
        with contextlib.suppress(BlockingIOError):  # one that does not listen; the next restore tells all
            os.write(self.told, (" ".join(map(str, words)) + "\n").encode())


class Run:
    """A coordinator and its writers on one bank, and how they are killed."""

    def __init__(self, directory: Path, seed: int, *, longest_wait_s: float = 0.0007) -> None:
        self.bank = directory / "bank"
        self.directory = directory
        self.model = WritersModel()
        self.counts: Counter[str] = Counter()
        self.alive: dict[str, Process] = {}
        self.by_line: dict[str, Process] = {}
        self.token = ""
        self._restores = Restores(self.model)
        self.random = random.Random(seed)
        self._longest_wait_s = longest_wait_s
        self._started = 0
        self._server = Server(CHILD)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in list(self.alive.values()):
            if process.pid:
                self._end(process)
        self._server.close()

    # -- starting and killing

    def start(self, name: str, *, restore: int = 0, token: str = "") -> Process:
        self._started += 1
        fifo = self.directory / f"fifo-{self._started}"
        os.mkfifo(fifo)
        job = Start(
            path=str(self.bank), seed=self.random.getrandbits(32), cycle=self._started, restore=restore,
            in_flight=False, longest_wait_s=self._longest_wait_s, name=f"{name}.{self._started}", fifo=str(fifo),
            token=token,
        )  # fmt: skip
        process = Process(name, os.open(fifo, os.O_RDWR | os.O_NONBLOCK))
        self.alive[name] = self.by_line[job.name] = process
        self._server.start(job)
        self.follow(60, until=lambda: process.pid > 0)
        return process

    def kill(self, name: str) -> None:
        """Kill a process, wait until it is gone, and read all that it told."""
        self._end(self.alive.pop(name))
        self.counts["coordinators" if name == MAIN else "writers"] += 1
        self._read_all()

    def _end(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        select.select([process.pidfd], [], [])
        os.close(process.pidfd)
        os.close(process.told)
        while Path(f"/proc/{process.pid}").exists():  # until its parent has noticed
            time.sleep(0.0005)

    def kill_writer(self, name: str) -> None:
        self.kill(name)
        self.start(name, token=self.token)

    def kill_coordinator(self, phase: str | None) -> None:
        """Kill it soon after it entered a phase; start the next one, which may be killed before it has restored."""
        process, nth = self.alive[MAIN], self.random.randint(1, 3)
        before = process.entered[str(phase)]
        seconds = self.random.uniform(0, 0.3) if phase is None else 1.0
        self.follow(seconds, until=lambda: process.entered[str(phase)] - before >= nth)
        time.sleep(self.random.choice([0, 0.0005, 0.002]) * self.random.random())
        self.kill(MAIN)
        for name in WRITERS:  # some go with it; of these, some come back before the next one
            if self.random.random() < 0.2:
                self.kill(name)
                if self.random.random() < 0.5:
                    self.start(name, token=self.token)
        self.follow(self.random.choice([0, 0, 0.05]))
        self.check_left_over()
        while self.random.random() < 0.25:
            self._start_coordinator()
            phase, process = self.random.choice(EARLY), self.alive[MAIN]
            self.follow(10, until=lambda: process.entered[phase] > 0 or process.is_joined)  # noqa: B023
            time.sleep(self.random.uniform(0, 0.02))
            self.kill(MAIN)
        self.coordinate()

    def _start_coordinator(self) -> Process:
        return self.start(MAIN, restore=self.random.choice(self.model.checkpoints()))

    def coordinate(self) -> None:
        """Have a coordinator, and all writers."""
        process = self._start_coordinator()
        self.follow(60, until=lambda: process.is_joined)
        if not process.is_joined:
            raise Violation("no coordinator within a minute")
        for name in WRITERS:
            if name in self.alive:
                self.alive[name].tell("S", self.token)
            else:
                self.start(name, token=self.token)

    # -- following

    def follow(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Read reports for so long, or until something is so."""
        deadline = time.monotonic() + seconds
        while not until() and (wait := deadline - time.monotonic()) > 0:
            self._read(wait)
            for process in self.alive.values():
                if process.pid and select.select([process.pidfd], [], [], 0)[0]:
                    self._read(0)
                    raise AssertionError(f"{process.name} ended by itself")

    def _read_all(self) -> None:
        for _ in range(4):  # a pipe holds no more
            self._read(0)

    def _read(self, wait: float) -> None:
        for line in self._server.read(min(wait, 0.05)) or ():
            name, kind, *words = line.split(" ")
            self._take(self.by_line[name], kind, words)

    def _take(self, process: Process, kind: str, words: list[str]) -> None:
        match kind:
            case "B":
                process.pid = int(words[0])
                process.pidfd = os.pidfd_open(process.pid)
            case "!":
                raise Violation(f"{process.name} failed: " + " ".join(words).encode().decode("unicode_escape"))
            case ">":
                process.entered[" ".join(words)] += 1
            case "<":
                process.entered["left " + " ".join(words)] += 1
            case "R" | "P" | "G" | "Q" | "r":
                self._restores.take(kind, words)
                self.counts["restores"] += kind == "r"
            case "J":
                process.is_joined = True
                self.counts["joins"] += 1
            case _:
                self.model.take(kind, words)
                self._pass_on(process, kind, words)

    def _pass_on(self, process: Process, kind: str, words: list[str]) -> None:
        main = self.alive.get(MAIN)
        if kind == "K":
            process.is_joined, self.token = True, words[1]
        elif kind == "A" and process.name != MAIN and fate_of(int(words[1])) == "train":
            if main is not None and main.is_joined:
                main.tell("T", words[0])
        elif kind == "d":
            self.counts["draws"] += 1
            for name in WRITERS:
                if name in self.alive:
                    self.alive[name].tell("I", max(self.model.draws) + 1)
        elif kind == "F":
            self.counts["fenced"] += 1

    # -- checking

    def check_left_over(self) -> None:
        """Check a bank that has no coordinator, beside the writers."""
        check_archive_once(self.bank)
        rows = arrowbank.scan(self.bank).to_polars().select(COLUMNS).collect()
        self.model.check_rows(rows)
        self._read_all()  # an append may have begun meanwhile
        self.model.check_makers(rows)

    def go(self, kills: int) -> None:
        """Kill so many, and check the whole at the end."""
        self.coordinate()
        while self.killed < kills:
            if self.random.random() < 0.25:
                self.kill_coordinator(self.random.choice(PHASES))
            else:
                self.follow(self.random.uniform(0, 0.2))
                self.kill_writer(self.random.choice(WRITERS))
        self.follow(0.3)
        main = self.counts.copy()
        for name in (MAIN, *WRITERS):
            self.kill(name)
        self.counts["writers"], self.counts["coordinators"] = main["writers"], main["coordinators"]
        self.check_left_over()
        process = self._start_coordinator()
        self.follow(60, until=lambda: process.is_joined)
        self._end(self.alive.pop(MAIN))
        self._read_all()
        self.finish()

    def finish(self) -> None:
        """Resume a last time, here, archive what can be, and compare every group bit for bit."""
        with RolloutBank.open(self.bank, keep_checkpoints=1) as bank:
            restored = bank.restore(self.model.checkpoint)
            if restored.report.lost_records or restored.report.corrupt:
                raise Violation(f"kills are no damage, but: {restored.report}")
            self.model.maybe_checkpoint = None
            bank.close(final=True)
        self.check_left_over()
        if check_contents(self.bank) < len(self.model.serials):
            raise Violation("groups are gone")

    @property
    def killed(self) -> int:
        return self.counts["writers"] + self.counts["coordinators"]

    def table(self, violations: int, seconds: float) -> str:
        model = self.model
        rows = {
            "kills of writers": self.counts["writers"], "kills of coordinators": self.counts["coordinators"],
            "restores checked": self.counts["restores"], "writers joined": self.counts["joins"],
            "writers fenced": self.counts["fenced"], "refused, and there": model.refused_and_there,
            "groups acknowledged": model.acknowledged, "groups": len(model.serials), "draws": self.counts["draws"],
            "evictions": model.evictions, "checkpoint": model.checkpoint, "violations": violations,
            "seconds": round(seconds, 1),
        }  # fmt: skip
        return "\n".join(f"{name:22} {value:>10}" for name, value in rows.items())


@contextlib.contextmanager
def telling(run: Run) -> Iterator[None]:
    """Print the table, whatever happens."""
    began, violations = time.monotonic(), 1
    try:
        yield
        violations = 0
    finally:
        print(run.table(violations, time.monotonic() - began), flush=True)


@pytest.mark.slow
def test_kills_of_writers_and_coordinators_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    seed = a_seed()
    with telling_the_seed(seed), Run(tmp_path, seed) as run, telling(run):
        run.go(12)
        assert run.model.acknowledged > 100
        assert len(run.model.draws) > 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--keep", type=Path, help="an empty directory to make the bank in, and leave it")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with contextlib.ExitStack() as stack:
        directory = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arrowbank-")))
        run = stack.enter_context(Run(directory, arguments.seed))
        with telling_the_seed(arguments.seed), telling(run):
            run.go(arguments.kills)


if __name__ == "__main__":
    main()
