"""A finished group on its way into the bank: its environment, the trainer's judgement, its record.

Invariant: once a generator has yielded a group, neither a cancellation nor a full disk loses it. It is durable, or it
waits to be banked again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from arrowbank.pipeline.protocols import Bank
from arrowbank.pipeline.tasks import EnvTask
from arrowbank.types import RolloutGroup

__all__ = ["MOST_REJECTED", "NO_SLOT", "Accept", "Assembly", "Clock", "Finished"]

MOST_REJECTED = 256
"""Groups. A generator of which so many in a row are useless will hardly make a good one."""
NO_SLOT = -1
"""``index_in_batch`` of a group as it is banked, while nobody knows its slot: a later hand-out gives it one."""
_REJECTED = "rejected by accept"

Accept: TypeAlias = Callable[[RolloutGroup], bool | str]
"""True keeps the group. False, or a text that says why, rejects it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A group that may be handed out."""

    group: RolloutGroup
    collected: int | None
    """The iteration at which it was finished, where that is known."""
    sequence: int
    """Its place in the order of completion, over all environments; restored groups come before."""
    is_restored: bool = False


Keep: TypeAlias = Callable[[Finished], None]


class Clock:
    """What all environments share: the iteration, the order of completion, and news for the batch that waits."""

    def __init__(self) -> None:
        self.iteration = 0
        self.is_closed = False
        self._sequence = itertools.count()
        self._news: asyncio.Event | None = None

    def tick(self) -> int:
        """Return the next place in the order of completion."""
        return next(self._sequence)

    def tell(self) -> None:
        """Say that something has changed."""
        if self._news is not None:
            self._news.set()

    async def news(self) -> None:
        """Wait until something changes from now on."""
        self._news = asyncio.Event()  # a new one each time: an event belongs to one event loop
        await self._news.wait()


class Assembly:
    """The way into the bank for the groups of one environment."""

    def __init__(self, task: EnvTask, bank: Bank | None, accept: Accept | None, clock: Clock) -> None:
        self.task = task
        self.num_rejected = 0
        self._bank = bank
        self._accept = accept
        self._clock = clock
        self._again: deque[tuple[RolloutGroup, str | None, bool]] = deque()
        """Groups that could not be judged or banked, each with why it was rejected and whether it was judged."""
        self._rejected_in_a_row: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Groups to be banked again that nobody has rejected."""
        return sum(reason is None for _, reason, _ in self._again)

    async def add(self, group: RolloutGroup, slot: int, keep: Keep) -> None:
        """Judge a finished group and make it durable, then ``keep`` it, or count it as rejected.

        Cancelled meanwhile, it does all that the same.

        Raises: what ``accept`` or the bank raises. After an OSError, or an error of ``accept``, the group waits for
        ``add_again``; any other refusal of the bank would only be repeated, so the group is dropped and the error
        tells of it. RuntimeError when too many in a row are rejected.
        """
        _claim(group, self.task)
        group.batch_id = self._clock.iteration
        group.index_in_batch = slot
        await _to_the_end(self._judge_and_append(group, None, False, keep))
        self._check_that_some_are_accepted()

    async def add_again(self, keep: Keep) -> None:
        """Retry what failed."""
        for _ in range(len(self._again)):
            await _to_the_end(self._judge_and_append(*self._again.popleft(), keep))

    async def _judge_and_append(self, group: RolloutGroup, reason: str | None, is_judged: bool, keep: Keep) -> None:
        try:
            if not is_judged:
                reason, is_judged = self._judge(group), True
            if reason is not None:
                group.index_in_batch = NO_SLOT
            collected = self._clock.iteration
            if self._bank is not None:
                await self._bank.append_async(group, evicted=reason, source_index=_source_index(group))
        except BaseException as error:
            # A cancellation is of the bank's own: the caller's stops at the shield.
            if not is_judged or isinstance(error, OSError | asyncio.CancelledError):
                self._again.append((group, reason, is_judged))
            raise
        if reason is None:
            self._rejected_in_a_row.clear()
            keep(Finished(group, collected, self._clock.tick()))
        else:
            self.num_rejected += 1
            self._rejected_in_a_row[reason] += 1
        self._clock.tell()

    def _judge(self, group: RolloutGroup) -> str | None:
        """Return why the group is rejected; None when it is accepted."""
        verdict: Any = True if self._accept is None else self._accept(group)
        if isinstance(verdict, bool | np.bool_):
            return None if verdict else _REJECTED
        if isinstance(verdict, str) and verdict:
            return verdict
        if asyncio.iscoroutine(verdict):
            verdict.close()  # or Python warns that nobody awaited it
        raise TypeError(
            f"accept returned {verdict!r:.100}: expected True for a group to keep, False or the reason, as a text "
            "that is not empty, for one to reject"
        )

    def _check_that_some_are_accepted(self) -> None:
        total = self._rejected_in_a_row.total()
        if total < MOST_REJECTED:
            return
        reasons = "; ".join(f"{reason} ({times})" for reason, times in self._rejected_in_a_row.most_common(3))
        self._rejected_in_a_row.clear()
        raise RuntimeError(
            f"the generator of environment {self.task.key!r} has made {total} groups in a row that accept rejects: "
            f"{reasons}. Change the filter, the prompts or the environment's weight; the rejected groups are in the "
            "bank, evicted"
        )


def _source_index(group: RolloutGroup) -> int | None:
    index = getattr(group, "source_index", None)
    is_index = isinstance(index, int | np.integer) and not isinstance(index, bool)
    return int(index) if is_index else None  # type: ignore[arg-type]  # an extra field may be anything


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
