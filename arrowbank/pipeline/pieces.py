"""Group-wise consumption: a batch in pieces, each as soon as it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from arrowbank.pipeline.batches import Batch
from arrowbank.pipeline.handout import Handout
from arrowbank.pipeline.protocols import PlannedDraw

__all__ = ["Pieces"]


class Pieces:
    """The pieces of one batch, as an async iterator: planned draws as they were marked, then group after group.

    After an error it may be iterated on: what it has handed out it does not hand out again.
    """

    def __init__(
        self, planned: list[PlannedDraw], handout: Handout, next_piece: Callable[[Pieces], Awaitable[Batch]]
    ) -> None:
        self.planned = deque(planned)
        """To be handed out again."""
        self.handout = handout
        self.num_given = 0
        """Groups."""
        self._next_piece = next_piece

    @property
    def is_at_end(self) -> bool:
        """Whether the batch is complete."""
        return not self.planned and not any(self.handout.owed.values())

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> Batch:
        if self.is_at_end:
            raise StopAsyncIteration
        return await self._next_piece(self)
