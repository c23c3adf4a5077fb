"""Groups in the making: one environment's generator at work in the background.

Invariant: what an order has finished and nobody has taken is in ``Order.finished``, whatever becomes of the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from arrowbank.pipeline.assembly import NO_SLOT, Assembly, Clock, Finished
from arrowbank.types import RolloutGroup

__all__ = ["MOST_SURPLUS", "Order", "stop"]

MOST_SURPLUS = 256
"""Groups. An iterator that has yielded so many more than asked takes no notice of num_groups and may never end."""


class Order:
    """A number of groups asked of one environment at one time. It is at work from the start, as a task of its own.

    Rejected groups are asked for again, when the generator has ended, until there are as many as were ordered.
    """

    def __init__(self, assembly: Assembly, num_groups: int, *, first_slot: int | None, clock: Clock) -> None:
        self.finished: deque[Finished] = deque()
        self.num_groups = num_groups
        self.is_done = False
        self.error: BaseException | None = None
        """Why it is done without having made them all."""
        self._assembly = assembly
        self._first_slot = first_slot
        self._clock = clock
        self._num_kept = 0
        self.work = asyncio.create_task(self._work())
        self.work.add_done_callback(self._note_end)

    @property
    def num_missing(self) -> int:
        """Groups that are still to come."""
        return 0 if self.is_done else max(0, self.num_groups - self._num_kept)

    async def _work(self) -> None:
        while (missing := self.num_groups - self._num_kept) > 0:
            await self._ask(missing)

    async def _ask(self, num_groups: int) -> None:
        """Let the generator make so many, banking each group the moment it is finished.

        Raises: RuntimeError when the generator ends early or does not end; ValueError when a group is not of this
        environment; TypeError for a generator that is no async one; whatever the generator or the bank raises.
        """
        key = self._assembly.task.key
        num_made = 0
        stream = self._assembly.task.open(num_groups)
        try:
            async for group in stream:
                num_made += 1
                await self._keep(group)
                if _is_stopped():  # by a cancellation that the generator has swallowed
                    raise asyncio.CancelledError
                if num_made > num_groups + MOST_SURPLUS:
                    raise RuntimeError(
                        f"the generator of environment {key!r} was asked for {num_groups} groups and has not ended "
                        f"after {num_made}; generate(num_groups) must end. What it made waits for the next batches"
                    )
        except asyncio.CancelledError:
            if _is_stopped():
                raise
            # otherwise the generator was cancelled from within, and has ended early
        finally:
            await _close(stream)
        if num_made < num_groups:
            raise RuntimeError(
                f"the generator of environment {key!r} was asked for {num_groups} groups and ended after {num_made}; "
                "the finished ones wait for the next batch"
            )

    async def _keep(self, group: RolloutGroup) -> None:
        slot = NO_SLOT
        if self._first_slot is not None and self._num_kept < self.num_groups:
            slot = self._first_slot + self._num_kept
        await self._assembly.add(group, slot, self._take_in)

    def _take_in(self, finished: Finished) -> None:
        self._num_kept += 1
        self.finished.append(finished)

    def _note_end(self, work: asyncio.Task[None]) -> None:
        self.is_done = True
        self.error = None if work.cancelled() else work.exception()
        self._clock.tell()


async def stop(orders: Iterable[Order]) -> asyncio.CancelledError | None:
    """Cancel the orders and wait for their end. Being cancelled meanwhile does not cut that short, and is returned."""
    running = [order for order in orders if not order.is_done]
    for order in running:
        order.work.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not all(order.is_done for order in running):
        try:
            await asyncio.wait([order.work for order in running])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def _is_stopped() -> bool:
    """Whether somebody has cancelled this task, rather than the generator itself."""
    work = asyncio.current_task()
    return work is not None and work.cancelling() > 0


async def _close(stream: AsyncIterator[RolloutGroup]) -> None:
    """Close an async generator at once, rather than when it is collected; other iterators have nothing to close."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
