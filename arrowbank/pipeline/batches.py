"""What the trainer is handed: batches, or their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arrowbank.pipeline.protocols import PlannedDraw
from arrowbank.types import RolloutGroup

__all__ = ["Batch", "numbered", "replayed_batch"]


@dataclass(frozen=True)
class Batch:
    """One training batch, or a piece of one. Its groups are in the order in which they are to be marked."""

    groups: list[RolloutGroup]
    replayed: bool
    """Whether all of these are groups of draws that the resume rolled back, in their order."""
    state: bytes | None
    """The trainer's own bytes that the replayed draw was marked with."""
    span: int
    """How many optimizer steps the replayed draw feeds; 1 for a new batch."""
    offset: int
    """How many of them the loaded checkpoint holds already."""


def numbered(groups: Sequence[RolloutGroup], iteration: int, first_slot: int = 0) -> list[RolloutGroup]:
    """Give the groups the places they have in the batch of ``iteration``."""
    for slot, group in enumerate(groups, first_slot):
        group.batch_id = iteration
        group.index_in_batch = slot
    return list(groups)


def replayed_batch(draws: Sequence[PlannedDraw], iteration: int, first_slot: int = 0) -> Batch:
    """Return what one batch was made of; several draws of it were pieces, of which the last one's state counts."""
    groups = numbered([group for draw in draws for group in draw.groups], iteration, first_slot)
    last = draws[-1]
    return Batch(groups, replayed=True, state=last.state, span=last.span, offset=last.offset)
