"""One environment's groups that wait for a batch: restored, finished, being generated.

Invariant: a finished group is in exactly one place: a queue of its ``Supply``, a batch in the making, or a batch handed
out. Whatever stops a batch (an error, a cancellation) moves what it held back to the queues.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable

from arrowbank.pipeline.assembly import Assembly, Clock, Finished
from arrowbank.pipeline.generation import Order
from arrowbank.types import EnvId, RolloutGroup

__all__ = ["Supply"]

_RESTORED = -1


class Supply:
    """The queues of one environment.

    ``restored`` is the resume's own deque, not a copy: what is handed out here cannot be taken there again.
    ``by_completion``: groups are taken as they are finished, whichever order asked for them; otherwise order by order,
    so that a batch is made of what was asked for it, and fast groups do not overtake slow ones.
    """

    def __init__(
        self,
        assembly: Assembly,
        restored: deque[RolloutGroup],
        collected: Callable[[RolloutGroup], int | None],
        *,
        by_completion: bool,
        clock: Clock,
    ) -> None:
        self.assembly = assembly
        self.restored = restored
        self.orders: deque[Order] = deque()
        self._collected = collected
        self._kept: deque[Finished] = deque()
        """Finished groups of orders that are no more."""
        self._by_completion = by_completion
        self._clock = clock
        self._errors: list[BaseException] = []
        """Of orders that are no more: not told yet."""

    @property
    def key(self) -> EnvId:
        """The environment."""
        return self.assembly.task.key

    @property
    def num_waiting(self) -> int:
        """Finished groups that no batch has handed out."""
        return self._num_ready + self.assembly.num_waiting

    @property
    def num_coming(self) -> int:
        """Groups that batches can be made of without asking for more."""
        return self._num_ready + sum(order.num_missing for order in self.orders)

    @property
    def _num_ready(self) -> int:
        return len(self.restored) + len(self._kept) + sum(len(order.finished) for order in self.orders)

    def order(self, num_groups: int, *, first_slot: int | None) -> None:
        """Ask the generator for groups."""
        self.orders.append(Order(self.assembly, num_groups, first_slot=first_slot, clock=self._clock))

    def first(self) -> Finished | None:
        """Return the group whose turn it is; None when it is not finished yet."""
        self._sweep()
        if self.restored:
            group = self.restored[0]
            return Finished(group, self._collected(group), _RESTORED, is_restored=True)
        queues = [self._kept, *(order.finished for order in self.orders)]
        if not self._by_completion:  # not past an order that is still at work
            queues = [self._kept or (self.orders[0].finished if self.orders else self._kept)]
        return min((queue[0] for queue in queues if queue), key=operator.attrgetter("sequence"), default=None)

    def take(self, finished: Finished) -> Order | None:
        """Take the group that ``first`` has returned; return the order that made it, when that is still here."""
        if finished.is_restored:
            self.restored.popleft()
            return None
        for order in self.orders:
            if order.finished and order.finished[0] is finished:
                order.finished.popleft()
                return order
        self._kept.popleft()
        return None

    def put_back(self, taken: Iterable[Finished]) -> None:
        """Give groups back, in the order in which they were taken."""
        groups = list(taken)
        self.restored.extendleft(item.group for item in reversed(groups) if item.is_restored)
        self._kept.extendleft(item for item in reversed(groups) if not item.is_restored)

    async def add_again(self) -> None:
        """Bank what could not be banked before."""
        await self.assembly.add_again(self._kept.append)

    def gather(self) -> list[BaseException]:
        """Let go of the orders, which are done, and keep what they have finished; return errors not told before."""
        for order in self.orders:
            self._let_go(order)
        self.orders.clear()
        if self._by_completion:
            self._kept = deque(sorted(self._kept, key=operator.attrgetter("sequence")))
        errors, self._errors = self._errors, []
        return errors

    @property
    def error(self) -> BaseException | None:
        """What has stopped an order of this environment, and was not told before: no other is given meanwhile."""
        self._sweep()
        return next(iter(self._errors), None) or next((order.error for order in self.orders if order.error), None)

    def _sweep(self) -> None:
        """Let go of orders from which nothing is to come any more."""
        while self.orders and self.orders[0].is_done and not self.orders[0].finished:
            self._let_go(self.orders.popleft())

    def _let_go(self, order: Order) -> None:
        self._kept.extend(order.finished)
        order.finished.clear()
        if order.error is not None:
            self._errors.append(order.error)
