"""Appending groups: what a coordinator and the run's other writers have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable

from arrowbank.durable.intake import AppendOptions, Intake
from arrowbank.errors import BankClosedError
from arrowbank.types import RolloutGroup

__all__ = ["Appends"]


class Appends(ABC):
    """Makes finished groups durable. Thread-safe."""

    _intake: Intake
    _iteration: int

    @abstractmethod
    def _require_open(self) -> None:
        """Raise BankClosedError unless this handle is open, and of this process."""

    @abstractmethod
    def _wait_for_successor(self, intake: Intake) -> None:
        """Wait until an intake that was closed has a successor. Raises BankClosedError when there will be none."""

    def append(
        self,
        group: RolloutGroup,
        *,
        split: str = "train",
        evicted: str | None = None,
        source_index: int | None = None,
    ) -> str:
        """Make a finished group durable; return the uid that it is given.

        split: groups of another split than "train" are kept and never handed out. evicted: a reason why this group
        will never be trained on. source_index: which prompt of its source it came from.

        Durability: on return the group survives SIGKILL, and power loss on a disk that honours fsync.
        Raises: UnrepresentableError naming the field; DuplicateGroupError; FencedError; OSError, after which the same
        group may be appended again.
        """
        return self.append_many([group], split=split, evicted=evicted, source_index=source_index)[0]

    def append_many(
        self,
        groups: Iterable[RolloutGroup],
        *,
        split: str = "train",
        evicted: str | None = None,
        source_index: int | None = None,
    ) -> list[str]:
        """Make several groups durable with one sync; return their uids. As ``append``.

        When it raises, none of them is in the bank. A kill in its middle may leave some, each whole, as pending.
        """
        self._require_open()
        given = list(groups)
        options = AppendOptions(split=split, evicted=evicted, source_index=source_index)
        while True:
            intake = self._intake
            try:
                return intake.append(given, self._iteration, options)
            except BankClosedError:  # a restore has begun another session meanwhile
                self._wait_for_successor(intake)

    async def append_async(
        self,
        group: RolloutGroup,
        *,
        split: str = "train",
        evicted: str | None = None,
        source_index: int | None = None,
    ) -> str:
        """As ``append``, without blocking the event loop; appends in flight share a sync.

        The group's arrays must not change until it returns. A cancelled append may be durable all the same.
        """
        self._require_open()
        options = AppendOptions(split=split, evicted=evicted, source_index=source_index)
        while True:
            intake = self._intake
            try:
                return await intake.append_async(group, lambda: self._iteration, options)
            except BankClosedError:
                await asyncio.to_thread(self._wait_for_successor, intake)
