"""What ``kill_loop`` kills: a trainer that tells, over a pipe, what it was promised.

Run as ``kill_child.py REPORT_FD [FAULT]`` this is a server that has arrowbank imported and forks one trainer for each
job, a JSON line on its standard input. A trainer opens the bank, restores, reports all it got back, then replays,
appends, draws, evicts and checkpoints until it is killed. Each line of its report is one ``os.write``, made after the
call it speaks of returned; lines that announce a call are made before it.

    B pid                         a trainer began             X status         it is gone
    > phase   < phase             it entered, left a phase    ! text           it failed: a bug
    R T                           restore(T) is called        r damage         all that it gave back was told:
    P iteration state lost uids   a planned draw              Q uid            a pending group
    G uid serial digest           a group, as it was given back
    F count                       so many append_async are in flight
    M serials                     append_many is called       A uid serial     a group is acknowledged
    D iteration state uids        mark_consumed is called     d                acknowledged
    E reason uids                 evict is called             e                acknowledged
    C T                           checkpoint is called        c                acknowledged

A group's content follows from its serial number, so whoever knows that number can tell whether a byte changed.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from forked import Report, be_ready, serve

from arrowbank import RolloutBank
from arrowbank.archive import compactor, store
from arrowbank.durable import files
from arrowbank.durable.stream import StreamWriter
from arrowbank.types import Rollout, RolloutGroup, TokenRollout

IN_FLIGHT = 64
MOST_DRAWN = 100
"""A draw is one line of the report."""
EVAL, EVICTED_AT_APPEND = "eval", "planted at append"
MOST_SECONDS = 30
"""A trainer that nobody kills ends itself."""

# -- content from serial numbers


def fate_of(serial: int) -> str:
    """Return what is said of a group at append: "train", or why it is never drawn."""
    if serial % 11 == 5:
        return EVAL
    return EVICTED_AT_APPEND if serial % 13 == 7 else "train"


def reward_of(serial: int, member: int) -> float:
    return float(serial * 8 + member)


def serial_of(group: RolloutGroup) -> int:
    return int(group.rollouts[0].problem_id or -1)


def make_group(serial: int) -> RolloutGroup:
    """Return the group of a serial number: token and text members, one turn or two, any float32 bits."""
    rng = np.random.Generator(np.random.PCG64(serial))
    members = range(int(rng.integers(2, 5)))
    return RolloutGroup(
        rollouts=[_text(rng, serial, at) if serial % 7 == 3 and at == 1 else _tokens(rng, serial, at) for at in members]
    )


def _tokens(rng: np.random.Generator, serial: int, member: int) -> TokenRollout:
    length = int(rng.integers(6, 60))
    tokens = rng.integers(0, 2**31, length, dtype=np.int64).astype(np.int32)
    mask = rng.random(length) < 0.6
    logprobs = rng.integers(0, 2**32, length, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ends = [length // 2, length] if serial % 3 == 1 else [length]
    return TokenRollout(
        trajectory=[tokens[:end] for end in ends],
        generation_mask=[mask[:end] for end in ends],
        logprobs=[logprobs[:end] for end in ends],
        reward=reward_of(serial, member),
        env_id=f"env{serial % 3}",
        problem_id=str(serial),
        metrics={"length": float(length), "-0": -0.0},
        arrays={"experts": rng.integers(0, 255, (2, 3), dtype=np.uint8)} if serial % 5 == 2 else {},
        note=f"extra of {serial}",
    )


def _text(rng: np.random.Generator, serial: int, member: int) -> Rollout:
    text = "".join(chr(int(code)) for code in rng.integers(0x3B1, 0x3C9, 40))
    return Rollout(
        trajectory=[text[:15], text],
        prompt_length=[5, 20],
        reward=reward_of(serial, member),
        env_id=f"env{serial % 3}",
        problem_id=str(serial),
    )


def digest(group: RolloutGroup) -> str:
    """A digest of every field of every member, bits and types, that shares nothing with the bank's own equality."""
    found = xxhash.xxh3_128()
    for rollout in group.rollouts:
        fields = {name: getattr(rollout, name) for name in type(rollout).model_fields}
        _feed(found, [type(rollout).__name__, fields, rollout.__pydantic_extra__ or {}])
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        found.update(f"a{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        found.update(b"d%d" % len(value))
        for key in sorted(value):
            _feed(found, key)
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        found.update(b"l%d" % len(value))
        for item in value:
            _feed(found, item)
    elif isinstance(value, float):
        found.update(b"f" + struct.pack("<d", value))
    elif value is None or isinstance(value, bool | int | str | datetime):
        found.update(f"{type(value).__name__}:{value};".encode())
    else:
        raise TypeError(f"no digest for {type(value).__name__}")


def state_of(iteration: int, uids: Sequence[str]) -> bytes:
    """What the trainer gives with a draw."""
    return b"\0\xff" + xxhash.xxh3_64_digest(f"{iteration} {uids}".encode())


# -- what is told, and how fast


def observe(report: Report) -> None:
    """Have the steps of compaction report when they begin and end; what they do stays."""

    def reporting(function: Callable[..., Any], phase: Callable[..., str | None]) -> Callable[..., Any]:
        def reported(*args: Any, **kwargs: Any) -> Any:
            name = phase(*args)
            if name is None:
                return function(*args, **kwargs)
            with report.phase(name):
                return function(*args, **kwargs)

        return reported

    def of_archive(_: Path, path: Path) -> str | None:
        return "publish" if path.suffix == ".parquet" else None

    def of_segments(_: object, directory: Path) -> str | None:
        return "unlink" if directory.name == "segments" else None

    compactor.execute = reporting(compactor.execute, lambda *_: "execute")
    store.write_manifest = reporting(store.write_manifest, lambda *_: "manifest")
    files.publish = reporting(files.publish, of_archive)
    files.remove = reporting(files.remove, of_segments)


def slow_disk(rng: random.Random, longest_s: float) -> None:
    """Have each call that changes the disk wait first, so that kills land between any two of them."""

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(rng.uniform(0, longest_s))
            return function(*args, **kwargs)

        return slowed

    for name in ("fsync", "fdatasync", "rename", "link", "unlink", "pwritev"):
        setattr(os, name, slow(getattr(os, name)))


# -- planted faults (see test_planted_faults)


def acknowledge_before_write() -> None:
    """Have groups written only when their segment is closed, and acknowledged at once."""
    append, close = StreamWriter.append, StreamWriter.close
    held: dict[str, list[Sequence[bytearray]]] = {}

    def late(self: StreamWriter, messages: Sequence[bytearray]) -> None:
        if self.path.parent.name == "segments":
            held.setdefault(self.path.name, []).append(list(messages))
        else:
            append(self, messages)

    def close_late(self: StreamWriter) -> None:
        for messages in held.pop(self.path.name, ()):
            append(self, messages)
        close(self)

    StreamWriter.append, StreamWriter.close = late, close_late  # type: ignore[method-assign]


def sync_nothing() -> None:
    """Believe that data reaches the disk by itself."""
    os.fsync = os.fdatasync = lambda descriptor: None


FAULTS: dict[str, Callable[[], None]] = {
    "acknowledge-before-write": acknowledge_before_write,
    "sync-nothing": sync_nothing,
}


# -- the trainer


@dataclass
class Job:
    """What one trainer is told."""

    path: str
    seed: int
    cycle: int
    restore: int
    in_flight: bool
    """Appends with ``append_async``, IN_FLIGHT at once; otherwise ``append`` and ``append_many``."""
    longest_wait_s: float


class Trainer:
    """Trains on nothing, as fast as it can."""

    evict_odds, checkpoint_odds = 0.3, 0.4
    """Of either, in each iteration."""

    def __init__(self, job: Job, report: Report) -> None:
        self.job, self.report = job, report
        self.random = random.Random(job.seed)
        self.made = 0
        self.pool: list[str] = []
        self.flying: set[asyncio.Task[None]] = set()
        with report.phase("open"):
            self.bank = self.open()
        self.iteration = job.restore
        self.plan = self.restore()

    def open(self) -> RolloutBank:
        return RolloutBank.open(self.job.path)

    def restore(self) -> list[tuple[int, list[str], bytes | None]]:
        report, plan = self.report, []
        report.say("R", self.job.restore)
        with report.phase("restore"):
            restored = self.bank.restore(self.job.restore)
        for draw in restored.draws:
            uids = [self.give_back(group) for group in draw.groups]
            report.say("P", draw.iteration, (draw.state or b"").hex(), ",".join(draw.lost) or "-", ",".join(uids))
            plan.append((draw.iteration, uids, draw.state))
        for queue in restored.pending.values():
            for group in queue:
                self.pool.append(self.give_back(group))
                report.say("Q", self.pool[-1])
        bad = [line for line in restored.report.damage if ": torn," not in line]
        if restored.report.lost_records:
            bad.append(f"lost_records {restored.report.lost_records}")
        report.say("r", "; ".join(bad)[:3000])
        return plan

    def give_back(self, group: RolloutGroup) -> str:
        assert group.uid is not None
        self.report.say("G", group.uid, serial_of(group), digest(group))
        return group.uid

    async def train(self) -> None:
        while True:
            await self.one_iteration()

    async def one_iteration(self) -> None:
        planned = self.begin()
        await self.collect()  # however much there is, so that no kill finds a trainer that never appends
        size = max(self.random.randint(3, 10), min(len(self.pool) - IN_FLIGHT, MOST_DRAWN))
        while not planned and len(self.pool) < size:
            await self.collect()
        self.end(planned, size)

    def begin(self) -> list[tuple[int, list[str], bytes | None]]:
        """Begin an iteration; return the draw that is planned for it, if there is one."""
        self.bank.begin_iteration(self.iteration)
        return [draw for draw in self.plan if draw[0] == self.iteration]

    def end(self, planned: list[tuple[int, list[str], bytes | None]], size: int) -> None:
        """Draw what was planned, otherwise so many; now and then evict a group, or checkpoint."""
        if planned:
            _, uids, state = planned[0]
            assert state is not None
        else:
            uids, self.pool = self.pool[:size], self.pool[size:]
            state = state_of(self.iteration, uids)
        self.draw(self.iteration, uids, state)
        self.iteration += 1
        if self.pool and self.random.random() < self.evict_odds:
            self.evict([self.pool.pop()], f"evicted-at-{self.iteration}")
        if self.random.random() < self.checkpoint_odds:
            self.checkpoint(self.iteration)

    def draw(self, iteration: int, uids: list[str], state: bytes) -> None:
        with self.report.phase("draw"):
            self.report.say("D", iteration, state.hex(), ",".join(uids))
            self.bank.mark_consumed(uids, iteration, state=state)
            self.report.say("d")
        with self.report.phase("drawn"):
            time.sleep(self.random.uniform(0, 0.002))

    def evict(self, uids: list[str], reason: str) -> None:
        with self.report.phase("evict"):
            self.report.say("E", reason, ",".join(uids))
            self.bank.evict(uids, reason)
            self.report.say("e")

    def checkpoint(self, iteration: int) -> None:
        with self.report.phase("checkpoint"):
            self.report.say("C", iteration)
            self.bank.checkpoint(iteration)
            self.report.say("c")

    async def collect(self) -> None:
        if self.job.in_flight:
            await self.keep_in_flight()
        elif self.random.random() < 0.5:
            self.append_one(self.next_serial())
        else:
            self.append_three()

    def next_serial(self) -> int:
        self.made += 1
        return self.job.cycle * 100_000 + self.made

    async def keep_in_flight(self) -> None:
        """Fill up to IN_FLIGHT appends, and let some of them finish; draws are made while the others go on."""
        while len(self.flying) < IN_FLIGHT:
            self.flying.add(asyncio.create_task(self.append_async(self.next_serial())))
        self.report.say("F", len(self.flying))
        done, self.flying = await asyncio.wait(self.flying, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def append_async(self, serial: int) -> None:
        self.acknowledge(await self.bank.append_async(make_group(serial), **_options(serial)), serial)

    def append_one(self, serial: int) -> None:
        with self.report.phase("append"):
            self.acknowledge(self.bank.append(make_group(serial), **_options(serial)), serial)

    def append_three(self) -> None:
        serials = [serial for serial in (self.next_serial() for _ in range(3)) if fate_of(serial) == "train"]
        with self.report.phase("append"):
            self.report.say("M", ",".join(map(str, serials)))
            uids = self.bank.append_many([make_group(serial) for serial in serials])
            for uid, serial in zip(uids, serials, strict=True):
                self.acknowledge(uid, serial)

    def acknowledge(self, uid: str, serial: int) -> None:
        self.report.say("A", uid, serial)
        if fate_of(serial) == "train":
            self.pool.append(uid)


def _options(serial: int) -> dict[str, Any]:
    fate = fate_of(serial)
    if fate == EVAL:
        return {"split": EVAL}
    return {"evicted": fate} if fate != "train" else {}


# -- the server


def train(job: Job, report: Report) -> None:
    observe(report)
    slow_disk(random.Random(job.seed + 1), job.longest_wait_s)
    asyncio.run(Trainer(job, report).train())


def main() -> None:
    be_ready()
    if len(sys.argv) > 2:
        FAULTS[sys.argv[2]]()
    serve(Report(int(sys.argv[1])), Job, train, MOST_SECONDS)


if __name__ == "__main__":
    main()
