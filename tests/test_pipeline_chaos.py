"""Random histories: generators, filters and the bank fail, batches are cancelled at any await; no group is lost.

``python tests/test_pipeline_chaos.py FIRST COUNT`` runs more of them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from pipeline_doubles import MemoryBank, Restored, make_group, make_groups, name

from arrowbank import RolloutBank, RolloutGroup
from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline


class Broken(Exception):
    """What generators and filters raise here."""


class SlowBank(MemoryBank):
    """Takes some turns of the event loop for each append, and fails now and then, before or after the group is in."""

    def __init__(self, rng: random.Random, failure_rate: float) -> None:
        super().__init__()
        self.rng, self.failure_rate = rng, failure_rate

    async def append_async(
        self, group: RolloutGroup, *, evicted: str | None = None, source_index: int | None = None
    ) -> str:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        if self.rng.random() < self.failure_rate:
            self.failures.append(OSError(28, "No space left on device"))
        return await super().append_async(group, evicted=evicted, source_index=source_index)


class DiskBank(SlowBank):
    """Has a real bank behind it, and the same failures."""

    def __init__(self, rng: random.Random, failure_rate: float, bank: RolloutBank) -> None:
        super().__init__(rng, failure_rate)
        self.bank = bank

    def begin_iteration(self, iteration: int) -> None:
        self.bank.begin_iteration(iteration)

    async def append_async(
        self, group: RolloutGroup, *, evicted: str | None = None, source_index: int | None = None
    ) -> str:
        if self.rng.random() < self.failure_rate:
            raise OSError(28, "No space left on device")
        uid = await self.bank.append_async(group, evicted=evicted, source_index=source_index)
        self.banked.append(group.model_copy(deep=True))
        if evicted is not None:
            self.evicted[uid] = evicted
        return uid

    def evict(self, uids: Iterable[str], reason: str) -> None:
        uids = list(uids)
        self.bank.evict(uids, reason)
        super().evict(uids, reason)


class Chaos:
    """One history: a run of a trainer whose every part may fail."""

    def __init__(self, seed: int, bank: RolloutBank | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.trouble = rng.choice([0.0, 0.05, 0.2])
        self.bank = SlowBank(rng, self.trouble) if bank is None else DiskBank(rng, self.trouble, bank)
        self.made: list[str] = []
        """Groups that a generator has yielded, or was about to when nothing could stop it."""
        self.running = 0
        self.begun = -1
        """The last iteration of which a batch was begun: a task may be cancelled before it starts."""
        self.handed: list[RolloutGroup] = []
        self.env_ids = ["A", "B", "C"][: rng.randint(1, 3)]
        self.consumption = rng.choice(["batch", "group"])
        self.lag = rng.choice([0, 0, 1, 2])
        self.max_lag = rng.choice([None, None, self.lag, self.lag + 1])
        self.reject = rng.choice([0.0, 0.3])
        pending = {env_id: make_groups(f"r{env_id}", rng.randrange(6), env_id) for env_id in self.env_ids}
        collected = {str(group.uid): rng.randrange(3) for queue in pending.values() for group in queue}
        restored: Any = Restored([], pending, collected)
        if bank is not None:
            bank.restore(0)
            for group in itertools.chain(*pending.values()):
                bank.append(group.model_copy(deep=True, update={"uid": None}))
            restored = bank.restore(0)
        self.restored = restored.pending
        self.all_restored = [str(name(group)) for queue in self.restored.values() for group in queue]
        for queue in self.restored.values():
            self.bank.banked.extend(queue)
        tasks = [EnvTask(env_id, rng.randint(1, 3), self.generator(env_id)) for env_id in self.env_ids]
        self.pipeline = RolloutPipeline(
            tasks, self.bank, restored, self.consumption,  # type: ignore[arg-type]
            lag=self.lag, max_lag=self.max_lag, accept=self.accept,
        )  # fmt: skip

    def generator(self, env_id: str):  # type: ignore[no-untyped-def]
        async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
            self.running += 1
            try:
                for _ in range(num_groups + self.rng.choice([0, 0, 0, 2])):
                    for _ in range(self.rng.randrange(4)):
                        await asyncio.sleep(0)
                    if self.rng.random() < self.trouble / 2:
                        raise Broken(env_id)
                    if self.rng.random() < self.trouble / 4:
                        return
                    self.made.append(f"{env_id}{len(self.made)}")
                    yield make_group(self.made[-1], env_id)
            except asyncio.CancelledError:
                if self.rng.random() < 0.7:
                    raise
                self.made.append(f"{env_id}{len(self.made)}")  # swallows the cancellation, and finishes a group
                yield make_group(self.made[-1], env_id)
                yield make_group("never", env_id)
            finally:
                try:
                    if self.rng.random() < 0.5:
                        await asyncio.sleep(0)
                finally:  # a second cancellation may meet the one that closes
                    self.running -= 1

        return generate

    def accept(self, group: RolloutGroup) -> bool | str:
        if self.rng.random() < self.trouble / 4:
            raise Broken("accept")
        return self.rng.random() >= self.reject or "unlucky"

    async def draw(self, iteration: int, size: int) -> None:
        """Make a batch, or pieces of one; note what is handed out."""
        self.begun = iteration
        if self.consumption == "batch" or self.rng.random() < 0.3:
            batches = [await self.pipeline.batch(iteration, size)]
        else:
            batches = []
            try:
                async for piece in self.pipeline.pieces(iteration, size):
                    batches.append(piece)
                    self.hand(piece, iteration)
                    if self.rng.random() < 0.05:
                        break
            finally:
                slots = [group.index_in_batch for batch in batches for group in batch.groups]
                assert slots == list(range(len(slots)))
            return
        (batch,) = batches
        self.hand(batch, iteration)
        quotas = self.pipeline._tasks.quotas(size)
        assert Counter(group.env_id for group in batch.groups) == quotas
        assert [group.index_in_batch for group in batch.groups] == list(range(size))

    def hand(self, batch: Batch, iteration: int) -> None:
        in_bank = {group.uid for group in self.bank.banked}
        assert all(group.uid in in_bank and group.uid not in self.bank.evicted for group in batch.groups)
        assert {group.batch_id for group in batch.groups} == {iteration}
        self.handed += batch.groups

    async def life(self) -> None:
        for iteration in range(3, 9):
            drawing = asyncio.ensure_future(self.draw(iteration, self.rng.randint(3, 7)))
            if self.rng.random() < 0.5:
                for _ in range(self.rng.randint(1, 3)):
                    for _ in range(self.rng.randrange(40)):
                        await asyncio.sleep(0)
                    drawing.cancel()
            outcome = (await asyncio.gather(drawing, return_exceptions=True))[0]
            if isinstance(outcome, BaseException):
                expected = (Broken, OSError, asyncio.CancelledError, RuntimeError)
                if not isinstance(outcome, expected):
                    raise outcome
                if isinstance(outcome, RuntimeError) and "ended after" not in str(outcome):
                    assert "ignored GeneratorExit" in str(outcome), outcome
                if self.begun == iteration:
                    assert (self.running, len(asyncio.all_tasks())) == (0, 1), "something is left running"
            elif not self.lag and self.consumption == "batch":
                assert (self.running, len(asyncio.all_tasks())) == (0, 1), "something is left running"
            for _ in range(self.rng.randrange(8)):
                await asyncio.sleep(0)
        self.trouble = self.bank.failure_rate = 0.0
        self.bank.failures.clear()
        await self.pipeline.aclose()
        assert (self.running, len(asyncio.all_tasks())) == (0, 1)

    def check(self) -> None:
        """Every group that was ever finished is in the bank, once; and in one of handed out, waiting, evicted."""
        banked = Counter(str(name(group)) for group in self.bank.banked)
        assert banked == Counter(self.made + self.all_restored), "lost or banked twice"
        handed = Counter(str(group.uid) for group in self.handed)
        assert not handed or max(handed.values()) == 1, "handed out twice"
        stats = self.pipeline.stats()
        total = Counter[str]()
        for counts in stats.values():
            total.update(counts)
        assert total["restored"] + total["fresh"] == len(self.handed)
        assert total["rejected"] + total["evicted"] == len(self.bank.evicted)
        assert total["waiting"] == len(self.bank.banked) - len(self.handed) - len(self.bank.evicted)


def live(seed: int) -> None:
    chaos = Chaos(seed)
    asyncio.run(chaos.life())
    chaos.check()


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_no_finished_group_is_lost_or_handed_out_twice_whatever_fails(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            live(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("seed", range(700, 712))
def test_what_is_neither_handed_out_nor_evicted_is_pending_in_the_bank_on_disk(seed: int, path: Path) -> None:
    with RolloutBank.open(path) as bank:
        chaos = Chaos(seed, bank)
        asyncio.run(chaos.life())
        chaos.check()
        bank.mark_consumed([str(group.uid) for group in chaos.handed], 9)
    gone = {*chaos.bank.evicted, *(group.uid for group in chaos.handed)}
    with RolloutBank.open(path) as bank:
        restored = bank.restore(10)
        pending = [group.uid for queue in restored.pending.values() for group in queue]
        assert not restored.draws
        assert sorted(map(str, pending)) == sorted(str(g.uid) for g in chaos.bank.banked if g.uid not in gone)


if __name__ == "__main__":
    start, count = (int(number) for number in sys.argv[1:])
    for number in range(start, start + count):
        try:
            live(number)
        except BaseException:
            print(f"seed {number}")
            raise
    print(f"{count} histories from {start} on, 0 wrong")
