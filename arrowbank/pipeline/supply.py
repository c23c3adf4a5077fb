"""One environment's groups on their way into batches: restored, finished and waiting, being generated.

Invariant: a finished group is in exactly one place: a queue of its ``Supply``, a ``Share`` in the making, or a batch
handed out. Whatever stops a batch (an error, a cancellation) moves its shares back to the queues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, MutableSequence
from contextlib import suppress
from typing import Any

from arrowbank.pipeline.protocols import Bank
from arrowbank.pipeline.tasks import EnvTask
from arrowbank.types import RolloutGroup

__all__ = ["MOST_SURPLUS", "NO_SLOT", "Share", "Supply"]

MOST_SURPLUS = 256
"""Groups. An iterator that has yielded so many more than asked takes no notice of num_groups and may never end."""
NO_SLOT = -1
"""``index_in_batch`` of a surplus group as it is banked: it has no slot until a later batch hands it out."""


class Supply:
    """The queues of one environment, and the way into the bank.

    ``restored`` is the resume's own deque, not a copy: what is handed out here cannot be taken there again.
    """

    def __init__(self, task: EnvTask, restored: deque[RolloutGroup], bank: Bank | None) -> None:
        self.task = task
        self.restored = restored
        self.waiting: deque[RolloutGroup] = deque()
        self._unbanked: deque[RolloutGroup] = deque()
        self._bank = bank

    @property
    def num_waiting(self) -> int:
        """Finished groups that no batch has handed out."""
        return len(self.restored) + len(self.waiting) + len(self._unbanked)

    async def bank(self, group: RolloutGroup, kept: MutableSequence[RolloutGroup]) -> None:
        """Make a finished group durable, then add it to ``kept``. Cancelled meanwhile, it does both all the same.

        Raises: what the bank raises. After an OSError the group waits for ``bank_again``; any other refusal would
        only be repeated, so the group is dropped and the error tells of it.
        """
        await _to_the_end(self._append(group, kept))

    async def bank_again(self) -> None:
        """Retry the appends that failed."""
        for _ in range(len(self._unbanked)):
            await self.bank(self._unbanked.popleft(), self.waiting)

    async def _append(self, group: RolloutGroup, kept: MutableSequence[RolloutGroup]) -> None:
        if self._bank is not None:
            try:
                await self._bank.append_async(group)
            except (OSError, asyncio.CancelledError):  # of the bank's own: the caller's stops at the shield
                self._unbanked.append(group)
                raise
        kept.append(group)


class Share:
    """What one environment contributes to one batch, while that batch is being made.

    Slots: ``first_slot`` on: restored groups, then those that waited, then fresh ones in order of completion.
    """

    def __init__(self, supply: Supply, quota: int, *, iteration: int, first_slot: int) -> None:
        self.supply = supply
        self.restored = _take(supply.restored, quota)
        self.waited = _take(supply.waiting, quota - len(self.restored))
        self.fresh: list[RolloutGroup] = []
        self.num_asked = quota - len(self.restored) - len(self.waited)
        self._iteration = iteration
        self._next_slot = first_slot + quota - self.num_asked

    async def fill(self) -> None:
        """Generate what is missing, banking each group the moment it is finished.

        Raises: RuntimeError when the generator ends early or does not end; ValueError when a group is not of this
        environment; whatever the generator or the bank raises.
        """
        stream = aiter(self.supply.task.generate(self.num_asked))
        try:
            async for group in stream:
                await self._keep(group)
                self._check_that_it_ends()
        finally:
            await _close(stream)
        self.check_full()

    def check_full(self) -> None:
        """Raise RuntimeError unless the generator made as many groups as it was asked for."""
        if len(self.fresh) < self.num_asked:
            raise RuntimeError(
                f"the generator of environment {self.supply.task.key!r} was asked for {self.num_asked} groups and "
                f"ended after {len(self.fresh)}; the finished ones wait for the next batch"
            )

    def put_back(self) -> None:
        """Give everything back to the queues, in the order in which it would have been handed out."""
        self.supply.restored.extendleft(reversed(self.restored))
        self.supply.waiting.extendleft(reversed(self.waited + self.fresh))

    def hand_out(self) -> list[RolloutGroup]:
        """Return the groups in slot order; a surplus goes to the queue."""
        self.supply.waiting.extend(self.fresh[self.num_asked :])
        return self.restored + self.waited + self.fresh[: self.num_asked]

    async def _keep(self, group: RolloutGroup) -> None:
        _claim(group, self.supply.task)
        group.batch_id = self._iteration
        group.index_in_batch = NO_SLOT
        if len(self.fresh) < self.num_asked:
            group.index_in_batch = self._next_slot + len(self.fresh)
        await self.supply.bank(group, self.fresh)

    def _check_that_it_ends(self) -> None:
        if len(self.fresh) > self.num_asked + MOST_SURPLUS:
            raise RuntimeError(
                f"the generator of environment {self.supply.task.key!r} was asked for {self.num_asked} groups and "
                f"has not ended after {len(self.fresh)}; generate(num_groups) must end. What it made waits for the "
                "next batches"
            )


def _take(queue: deque[RolloutGroup], most: int) -> list[RolloutGroup]:
    return [queue.popleft() for _ in range(min(most, len(queue)))]


def _claim(group: RolloutGroup, task: EnvTask) -> None:
    """Let every member name the task's environment, which is how a restore finds where the group belongs.

    A group of some other environment is refused before it is banked: once there, no restore could place it.
    """
    if task.env_id is None:
        return
    foreign = sorted({rollout.env_id for rollout in group if rollout.env_id and rollout.env_id != task.env_id})
    if foreign:
        raise ValueError(
            f"the generator of environment {task.key!r} made a group whose members name {foreign}; the group was "
            "dropped, not banked. The task's env_id and the members' must agree, or the members leave theirs None"
        )
    if task.env_id and not len(group):
        raise ValueError(
            f"the generator of environment {task.env_id!r} made a group without rollouts, which cannot name its "
            "environment; the group was dropped, not banked. Yield a placeholder rollout instead"
        )
    for rollout in group:
        if task.env_id and not rollout.env_id:
            rollout.env_id = task.env_id


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await the work; a cancellation meanwhile is passed on, but only once the work is done."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.result()  # its own error comes first: it tells of a group that is not durable
        raise


async def _close(stream: AsyncIterator[RolloutGroup]) -> None:
    """Close an async generator at once, rather than when it is collected; other iterators have nothing to close."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
