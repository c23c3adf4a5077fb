"""A bank's user that is killed with SIGKILL again and again, held against a plain model of what was acknowledged.

    python tests/kill_loop.py DIRECTORY CYCLES SEED [FAULT]

Each cycle forks a child that opens the bank, restores, checks everything against the model, and goes on working until
it is killed. It reports each acknowledgement through a pipe after the call has returned. Prints totals as JSON; a
violation prints what was found and ends with exit code 1. FAULT plants one below the public API, to prove the checks.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import xxhash

from arrowbank import RolloutBank, RolloutGroup, TokenRollout, scan
from arrowbank.archive.store import ArchiveStore
from arrowbank.durable.stream import StreamWriter

BATCH, EVERY, MEMBERS = 8, 2, 2


class Violation(Exception):
    """A promise was broken."""


@dataclass
class Model:
    """What was acknowledged, over all cycles."""

    digests: dict[str, str] = field(default_factory=dict)
    draws: dict[int, tuple[list[str], str]] = field(default_factory=dict)
    intended: tuple[int, list[str], str] | None = None
    evicted: set[str] = field(default_factory=set)
    may_be_evicted: set[str] = field(default_factory=set)
    """Killed before the eviction was acknowledged: it may or may not count."""
    checkpoint: int = 0
    called: int = 0
    last: str = ""

    def take(self, line: str) -> None:
        kind, *words = line.split(" ")
        self.last = kind
        if kind == "A":
            self.digests[words[0]] = words[1]
        elif kind == "d":
            self.intended = (int(words[0]), words[2].split(","), words[1])
        elif kind == "D":
            self.draws[int(words[0])] = (words[2].split(","), words[1])
            self.intended = None
        elif kind == "e":
            self.may_be_evicted.add(words[0])
        elif kind == "E":
            self.evicted.add(words[0])
        elif kind == "c":
            self.called = int(words[0])
        elif kind == "C":
            self.checkpoint = int(words[0])


def digest(group: RolloutGroup) -> str:
    total = xxhash.xxh3_64()
    for rollout in group:
        assert isinstance(rollout, TokenRollout) and rollout.logprobs
        total.update(rollout.trajectory[0].tobytes() + rollout.logprobs[0].tobytes())
    return total.hexdigest()


def check(model: Model, bank: RolloutBank, directory: Path, checkpoint: int, restored: Any) -> None:
    """Hold what a restore gives against the model. Raises Violation."""
    expected = [(at, *model.draws[at]) for at in sorted(model.draws) if at >= checkpoint]
    found = [(draw.iteration, [group.uid for group in draw.groups], draw.state.decode()) for draw in restored.draws]
    if found != expected and found != [*expected, model.intended]:
        raise Violation(f"plan {found} instead of {expected} (or with {model.intended})")
    pending = {group.uid: group for queue in restored.pending.values() for group in queue}
    drawn = {uid for uids, _ in model.draws.values() for uid in uids} | {uid for _, uids, _ in found for uid in uids}
    lost = model.digests.keys() - drawn - model.evicted - model.may_be_evicted - pending.keys()
    if lost:
        raise Violation(f"{len(lost)} acknowledged groups are lost")
    again = pending.keys() & (drawn | model.evicted)
    if again:
        raise Violation(f"{len(again)} groups are pending that were drawn or evicted")
    for group in [*pending.values(), *(group for draw in restored.draws for group in draw.groups)]:
        if model.digests.get(group.uid, digest(group)) != digest(group):
            raise Violation(f"group {group.uid} came back changed")
    rows = scan(directory).to_arrow().select(["group_uid", "member_index", "consumed_iteration"]).to_pylist()
    archived = ds.dataset(sorted((directory / "archive").glob("*.parquet"))).to_table(["group_uid", "member_index"])
    for where, table in (("scan", rows), ("archive/*.parquet", archived.to_pylist())):
        times = Counter((row["group_uid"], row["member_index"]) for row in table)
        if times and max(times.values()) > 1:
            raise Violation(f"a rollout stands {max(times.values())} times in {where}")
    consumed = {row["group_uid"]: row["consumed_iteration"] for row in rows}
    if model.digests.keys() - consumed.keys() or len(rows) != MEMBERS * len(consumed):
        raise Violation("scan does not show every acknowledged rollout")
    for at, (uids, _) in model.draws.items():
        if at < checkpoint and any(consumed[uid] != at for uid in uids):
            raise Violation(f"scan shows another draw than the one at {at}")


def work(bank: RolloutBank, restored: Any, start: int, rng: random.Random, tell: Any, *, in_flight: bool) -> None:
    """Train for ever, from the plan on."""
    plan = list(restored.draws)
    pool = [group.uid for queue in restored.pending.values() for group in queue]
    for k in range(start, 10**9):
        bank.begin_iteration(k)
        if plan and plan[0].iteration == k:
            uids = [group.uid for group in plan.pop(0).groups]
        else:
            if in_flight:
                pool += asyncio.run(append_together(bank, rng, tell))
            for _ in range(BATCH):
                pool.append(append_one(bank, rng, tell))
            if rng.random() < 0.3:
                tell(f"e {pool[-1]}")
                bank.evict([pool[-1]], "test")
                tell(f"E {pool.pop()}")
            uids, pool = pool[:BATCH], pool[BATCH:]
        state = f"state-{k}"
        tell(f"d {k} {state} {','.join(uids)}")
        bank.mark_consumed(uids, k, state=state.encode())
        tell(f"D {k} {state} {','.join(uids)}")
        if (k + 1) % EVERY == 0:
            tell(f"c {k + 1}")
            bank.checkpoint(k + 1)
            tell(f"C {k + 1}")


def make_group(rng: random.Random) -> RolloutGroup:
    source = np.random.default_rng(rng.getrandbits(32))
    members = [
        TokenRollout(
            trajectory=[source.integers(0, 9999, 64, np.int32)],
            logprobs=[source.standard_normal(64).astype(np.float32)],
            env_id="e",
        )
        for _ in range(MEMBERS)
    ]
    return RolloutGroup(rollouts=[*members])


def append_one(bank: RolloutBank, rng: random.Random, tell: Any) -> str:
    group = make_group(rng)
    uid = bank.append(group)
    tell(f"A {uid} {digest(group)}")
    return uid


async def append_together(bank: RolloutBank, rng: random.Random, tell: Any) -> list[str]:
    async def one() -> str:
        group = make_group(rng)
        uid = await bank.append_async(group)
        tell(f"A {uid} {digest(group)}")
        return uid

    return await asyncio.gather(*(one() for _ in range(64)))


def child(model: Model, directory: Path, checkpoint: int, seed: int, pipe: int, *, in_flight: bool) -> int:
    rng = random.Random(seed)
    bank = RolloutBank.open(directory)
    restored = bank.restore(checkpoint)
    try:
        check(model, bank, directory, checkpoint, restored)
    except Violation as violation:
        print(json.dumps({"violation": str(violation)}), flush=True)
        return 1
    os.write(pipe, b"R\n")
    work(bank, restored, checkpoint, rng, lambda line: os.write(pipe, line.encode() + b"\n"), in_flight=in_flight)
    return 0


def follow(pipe: int, pid: int, model: Model, rng: random.Random) -> None:
    """Read acknowledgements until it is time to kill; kill; read what was still in the pipe."""
    buffered = b""
    after_checkpoint = rng.random() < 0.4
    deadline: float | None = None
    while True:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not select.select([pipe], [], [], left)[0]:
            break
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            model.take(line.decode())
            if line == b"R" and not after_checkpoint:
                deadline = time.monotonic() + rng.uniform(0.0, 0.25)
            if line.startswith(b"C") and after_checkpoint and deadline is None:
                deadline = time.monotonic() + rng.uniform(0.0, 0.02)
    os.kill(pid, signal.SIGKILL)
    while data := os.read(pipe, 1 << 16):
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            model.take(line.decode())


def main(directory: Path, cycles: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    model = Model()
    kills: Counter[str] = Counter()
    for cycle in range(cycles):
        checkpoint = model.called if rng.random() < 0.5 else model.checkpoint
        reader, writer = os.pipe()
        model.last = ""
        in_flight = cycle % 2 == 1
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            code = 2
            try:
                code = child(model, directory, checkpoint, rng.getrandbits(32), writer, in_flight=in_flight)
            finally:
                os._exit(code)
        rng.getrandbits(32)
        os.close(writer)
        follow(reader, pid, model, rng)
        os.close(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != -signal.SIGKILL:
            raise SystemExit(f"seed {seed}, cycle {cycle}: the child ended with {status}")
        kills[model.last or "opening"] += 1
        kills["in flight"] += in_flight
    return {
        "cycles": cycles,
        "groups": len(model.digests),
        "draws": len(model.draws),
        "kills": kills,
        "archived": len(sorted((directory / "archive").glob("*.parquet"))) - 1,
        "seed": seed,
    }


def plant(fault: str) -> None:
    """Break the bank on purpose."""
    if fault == "acknowledge before write":
        append = StreamWriter.append

        def late(self: StreamWriter, messages: Any) -> None:
            if self.path.parent.name != "segments":
                return append(self, messages)
            later = StreamWriter(self.path, os.dup(self._descriptor), "", self.offset)
            later._binding, later.records = self._binding, self.records
            self.offset += sum(map(len, messages))
            self.records += len(messages)
            threading.Timer(0.1, append, (later, messages)).start()

        StreamWriter.append = late  # type: ignore[method-assign]
    elif fault == "publish twice":
        add = ArchiveStore.add

        def twice(self: ArchiveStore, made: Any, *rest: Any) -> None:
            add(self, made, *rest)
            directory = self.paths.version(self.manifest.version)
            for name in [file.name for file in self.manifest.files]:
                shutil.copy(directory / name, directory / f"{name.removesuffix('.parquet')}-again.parquet")

        ArchiveStore.add = twice  # type: ignore[method-assign]
        ArchiveStore.settle = lambda self: None  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(sys.argv[4] if len(sys.argv) > 4 else "")
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
