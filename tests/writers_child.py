"""What ``test_writers_kill`` kills: the coordinator and the writers of one run, each telling what it was promised.

Run as ``writers_child.py REPORT_FD`` this is a server that has arrowbank imported and forks a process for each job, a
JSON line on its standard input. Every process reports into the one pipe, each line in one ``os.write`` and with the
process's name before it, so that the lines lie in the order in which they were written. Lines are those of
``kill_child``, and:

    b serials                     an append of these begins, or begins again
    A uid serial session          a group is acknowledged
    F serials                     FencedError: these were refused
    K session token               the coordinator has restored, and hands out its token
    J session                     a writer has joined

Through its FIFO a process is told, a line each:

    T uid                         the coordinator: a writer's append was acknowledged
    I iteration                   a writer: this one is collected now
    S token                       a writer: join this session once fenced
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

from forked import Report, be_ready, run_child
from kill_child import EVAL, MOST_DRAWN, Job, Trainer, fate_of, make_group, observe, slow_disk

from arrowbank import BankWriter, FencedError, RolloutBank, RolloutGroup, WriterToken

MOST_SECONDS = 600
"""A process that nobody kills ends itself."""


@dataclass
class Start(Job):
    """What one process is told."""

    name: str = ""
    fifo: str = ""
    token: str = ""
    """Of a writer."""


class Named(Report):
    """Tells whose lines these are."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor)
        self._name = name

    def say(self, *words: object) -> None:
        super().say(self._name, *words)


class Told:
    """Lines from a FIFO, as they come."""

    def __init__(self, fifo: str) -> None:
        self.lines: deque[tuple[str, str]] = deque()
        threading.Thread(target=self._read, args=[os.open(fifo, os.O_RDONLY)], daemon=True).start()

    def _read(self, descriptor: int) -> None:
        with open(descriptor) as lines:
            for line in lines:
                kind, word = line.split()
                self.lines.append((kind, word))


class Coordinator(Trainer):
    """Draws what the writers append, as fast as it can, and appends a little itself."""

    evict_odds = 0.4

    def __init__(self, job: Start, report: Report, told: Told) -> None:
        self.told = told
        self.known: set[str] = set()
        """Groups that were in the pool, or planned."""
        super().__init__(job, report)
        report.say("K", self.bank.session, pickle.dumps(self.bank.writer_token()).hex())

    def open(self) -> RolloutBank:
        return RolloutBank.open(self.job.path, keep_checkpoints=1)

    def give_back(self, group: RolloutGroup) -> str:
        uid = super().give_back(group)
        self.known.add(uid)
        return uid

    def coordinate(self) -> None:
        while True:
            planned = self.begin()
            size = self.random.randint(3, 30)
            waited_until = time.monotonic() + 0.05
            self.hear()
            while not planned and len(self.pool) < size:
                if time.monotonic() > waited_until:  # the writers may all be dead or fenced
                    self.append_one(self.next_serial())
                time.sleep(0.002)
                self.hear()
            if self.random.random() < 0.3:
                self.append_three()
            if not planned:
                self.random.shuffle(self.pool)
                size = max(size, min(len(self.pool) - 20, MOST_DRAWN))
            self.end(planned, size)

    def hear(self) -> None:
        while self.told.lines:
            _, uid = self.told.lines.popleft()
            if uid not in self.known:
                self.known.add(uid)
                self.pool.append(uid)

    def next_serial(self) -> int:
        serial = super().next_serial()
        self.report.say("b", serial)
        return serial

    def acknowledge(self, uid: str, serial: int) -> None:
        self.report.say("A", uid, serial, self.bank.session)
        self.known.add(uid)
        if fate_of(serial) == "train":
            self.pool.append(uid)


class Writer:
    """Appends in every way there is; who is fenced joins the next session."""

    def __init__(self, job: Start, report: Report, told: Told) -> None:
        self.job, self.report, self.told = job, report, told
        self.random = random.Random(job.seed)
        self.made = 0
        self.iteration = -1
        self.refused: list[tuple[int, RolloutGroup]] = []
        self.token: WriterToken = pickle.loads(bytes.fromhex(job.token))
        self.next_token = self.token
        self.writer: BankWriter | None = None

    def work(self) -> None:
        while True:
            self.hear()
            try:
                if self.writer is None:
                    self.join()
                self.append()
            except FencedError:
                self.rejoin()
            time.sleep(self.random.uniform(0, 0.02))

    def hear(self) -> None:
        while self.told.lines:
            kind, word = self.told.lines.popleft()
            if kind == "I":
                self.iteration = int(word)
            else:
                self.next_token = pickle.loads(bytes.fromhex(word))

    def join(self) -> None:
        self.writer = BankWriter.open(self.token, self.job.name.split(".")[0])
        self.report.say("J", self.token.session)
        self.iteration = self.began = self.token.iteration

    def rejoin(self) -> None:
        self.report.say("F", ",".join(str(serial) for serial, _ in self.refused) or "-")
        while self.next_token.session <= self.token.session:
            time.sleep(0.002)
            self.hear()
        time.sleep(self.random.choice([0, 0.05, 0.5]) * self.random.random())  # the coordinator may be far by then
        self.hear()
        self.token, self.writer = self.next_token, None
        self.refused = []

    def append(self) -> None:
        assert self.writer is not None
        if self.iteration > self.began:
            self.writer.begin_iteration(self.iteration)
            self.began = self.iteration
        way = self.random.choice([self.one, self.three, self.burst])
        way()

    def append_one(self, serial: int, group: RolloutGroup) -> None:
        assert self.writer is not None
        self.report.say("b", serial)
        with self.report.phase("append"):
            fate = fate_of(serial)
            split, evicted = (EVAL, None) if fate == EVAL else ("train", None if fate == "train" else fate)
            self.acknowledge(self.writer.append(group, split=split, evicted=evicted), serial)

    def acknowledge(self, uid: str, serial: int) -> None:
        self.report.say("A", uid, serial, self.token.session)

    def make(self, count: int, *, fates: bool = False) -> list[tuple[int, RolloutGroup]]:
        made: list[tuple[int, RolloutGroup]] = []
        while len(made) < count:
            self.made += 1
            serial = self.job.cycle * 100_000 + self.made
            if fates or fate_of(serial) == "train":
                made.append((serial, make_group(serial)))
        return made

    def one(self) -> None:
        [(serial, group)] = self.refused = self.make(1, fates=True)
        self.append_one(serial, group)
        self.refused = []

    def three(self) -> None:
        assert self.writer is not None
        self.refused = self.make(3)
        serials = ",".join(str(serial) for serial, _ in self.refused)
        self.report.say("b", serials)
        with self.report.phase("append_many"):
            self.report.say("M", serials)
            uids = self.writer.append_many([group for _, group in self.refused])
            for uid, (serial, _) in zip(uids, self.refused, strict=True):
                self.acknowledge(uid, serial)
        self.refused = []

    def burst(self) -> None:
        asyncio.run(self.append_all(self.make(self.random.randint(2, 8))))

    async def append_all(self, made: list[tuple[int, RolloutGroup]]) -> None:
        with self.report.phase("append_async"):
            ends = await asyncio.gather(*(self.append_async(*each) for each in made), return_exceptions=True)
        self.refused = [each for each, end in zip(made, ends, strict=True) if end is not None]
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def append_async(self, serial: int, group: RolloutGroup) -> None:
        assert self.writer is not None
        self.report.say("b", serial)
        self.acknowledge(await self.writer.append_async(group), serial)


# -- the server


def work(job: Start, report: Named) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told = Told(job.fifo)
    observe(report)
    slow_disk(random.Random(job.seed + 1), job.longest_wait_s)
    if job.token:
        Writer(job, report, told).work()
    else:
        Coordinator(job, report, told).coordinate()


def main() -> None:
    be_ready()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of who was killed
    for line in sys.stdin:  # several at a time, and nobody waits for them
        job = Start(**json.loads(line))
        if os.fork() == 0:
            report = Named(int(sys.argv[1]), job.name)
            run_child(report, partial(work, job, report), MOST_SECONDS)


if __name__ == "__main__":
    main()
