"""Stand-ins for what a pipeline works with: a bank in memory, what it restored, generators."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings

from arrowbank.errors import DuplicateGroupError
from arrowbank.pipeline import Batch
from arrowbank.types import Rollout, RolloutGroup

__all__ = [
    "Gated", "Generator", "HangingGenerator", "MemoryBank", "PlannedDraw", "Prompted", "Restored", "asyncly",
    "counts", "make_group", "make_groups", "name", "names", "never", "quiet", "run", "unhurried", "until",
]  # fmt: skip

unhurried = settings(deadline=None)  # a busy machine is no falsifying example


class MemoryBank:
    """Keeps a copy of each group as it was at append, and the iteration it was collected at."""

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.banked: list[RolloutGroup] = []
        self.collected: list[int | None] = []
        self.evicted: dict[str, str] = {}
        """uid → reason."""
        self.source_indices: list[int | None] = []
        self.failures: list[BaseException] = []
        """One is raised by each of the next appends."""
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._failed: set[str] = set()
        self.minted = 0

    def begin_iteration(self, iteration: int) -> None:
        self.iteration = iteration

    async def append_async(
        self, group: RolloutGroup, *, evicted: str | None = None, source_index: int | None = None
    ) -> str:
        if group.uid is not None and group.uid not in self._failed:
            raise DuplicateGroupError(group.uid)
        if group.uid is None:
            self.minted += 1
            group.uid = f"u{self.minted}"
        await self.may_write.wait()
        if self.failures:
            self._failed.add(group.uid)
            raise self.failures.pop(0)
        self._failed.discard(group.uid)
        self.banked.append(group.model_copy(deep=True))
        self.collected.append(self.iteration)
        self.source_indices.append(source_index)
        if evicted is not None:
            self.evicted[group.uid] = evicted
        return group.uid

    def evict(self, uids: Iterable[str], reason: str) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.evicted.update(dict.fromkeys(uids, reason))

    def reason(self, name_of_group: str) -> str | None:
        """Why the group of that name is evicted; None when it is not."""
        (uid,) = [group.uid for group in self.banked if name(group) == name_of_group]
        return self.evicted.get(str(uid))

    @property
    def names(self) -> list[str | None]:
        return [name(group) for group in self.banked]


@dataclass
class PlannedDraw:
    iteration: int
    groups: list[RolloutGroup]
    index: int = 0
    span: int = 1
    offset: int = 0
    state: bytes | None = None
    lost: list[str] = field(default_factory=list)


@dataclass
class Restored:
    draws: list[PlannedDraw] = field(default_factory=list)
    pending: dict[str, deque[RolloutGroup]] = field(default_factory=dict)
    collected: dict[str, int] = field(default_factory=dict)

    def take(self, n: int = 1) -> list[RolloutGroup]:
        """In the order of the environments, for want of ages."""
        queues = [queue for queue in self.pending.values() for _ in range(len(queue))]
        return [queue.popleft() for queue in queues[:n]]

    def collected_iteration(self, group: RolloutGroup) -> int | None:
        return self.collected.get(str(group.uid))


class Generator:
    """Makes groups named ``a0, a1 …`` and remembers what it was asked for; ``deviate`` changes how many it yields."""

    def __init__(self, prefix: str, env_id: str | None = None, deviate: Callable[[int], int] = lambda n: n) -> None:
        self.prefix = prefix
        self.env_id = env_id
        self.deviate = deviate
        self.asked: list[int] = []
        self.made = 0
        self.is_closed = False

    async def __call__(self, num_groups: int) -> AsyncIterator[RolloutGroup]:
        self.asked.append(num_groups)
        self.is_closed = False
        try:
            for _ in range(self.deviate(num_groups)):
                await asyncio.sleep(0)
                self.made += 1
                yield make_group(f"{self.prefix}{self.made - 1}", self.env_id)
        finally:
            self.is_closed = True


class HangingGenerator(Generator):
    """Makes one group and then works until it is cancelled."""

    async def __call__(self, num_groups: int) -> AsyncIterator[RolloutGroup]:
        self.asked.append(num_groups)
        try:
            self.made += 1
            yield make_group(f"{self.prefix}{self.made - 1}", self.env_id)
            await asyncio.Event().wait()
        finally:
            self.is_closed = True


class Gated:
    """Makes groups named ``a0 a1 …`` when told to: each call waits for as many permits as it yields groups."""

    def __init__(self, prefix: str = "a", env_id: str = "A") -> None:
        self.prefix, self.env_id = prefix, env_id
        self.asked: list[int] = []
        self.permits: list[asyncio.Semaphore] = []
        """One a call."""
        self.running = 0
        self.made = 0

    async def __call__(self, num_groups: int) -> AsyncIterator[RolloutGroup]:
        call = len(self.asked)
        self.asked.append(num_groups)
        self.permits.append(asyncio.Semaphore(0))
        self.running += 1
        try:
            for number in range(num_groups):
                await self.permits[call].acquire()
                self.made += 1
                yield make_group(f"{self.prefix}{call}.{number}", self.env_id)
        finally:
            self.running -= 1

    def permit(self, call: int, times: int = 1) -> None:
        for _ in range(times):
            self.permits[call].release()


class Prompted(Generator):
    """Takes its prompts when it is called: ``a0 a1`` for the first call, whatever other calls do meanwhile."""

    async def __call__(self, num_groups: int) -> AsyncIterator[RolloutGroup]:
        self.asked.append(num_groups)
        prompts = range(self.made, self.made + num_groups)
        self.made += num_groups
        for prompt in prompts:
            await asyncio.sleep(0)
            yield make_group(f"{self.prefix}{prompt}", self.env_id)


def make_group(problem_id: str, env_id: str | None = None, uid: str | None = None) -> RolloutGroup:
    members = [Rollout(trajectory=["2+2=4"], reward=1.0, env_id=env_id, problem_id=problem_id) for _ in range(2)]
    return RolloutGroup(rollouts=[*members], uid=uid)


def make_groups(prefix: str, count: int, env_id: str | None = None) -> deque[RolloutGroup]:
    return deque(make_group(f"{prefix}{i}", env_id, uid=f"{prefix}{i}") for i in range(count))


def name(group: RolloutGroup) -> str | None:
    return group[0].problem_id


def names(batch: Batch) -> list[str | None]:
    return [name(group) for group in batch.groups]


def counts(**others: int) -> dict[str, int]:
    """An environment's statistics, 0 where nothing is said."""
    return dict.fromkeys(("replayed", "restored", "fresh", "rejected", "evicted", "waiting"), 0) | others


def never(num_groups: int) -> AsyncIterator[RolloutGroup]:
    raise AssertionError(f"asked for {num_groups} groups")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, Batch]) -> Batch:
    return asyncio.run(work)


async def quiet() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def asyncly(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test, and no longer than some seconds."""

    async def within() -> None:
        async with asyncio.timeout(10):
            await test()

    def wrapper() -> None:
        asyncio.run(within())

    wrapper.__name__ = test.__name__
    return wrapper
