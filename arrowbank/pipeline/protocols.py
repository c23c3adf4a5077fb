"""What the pipeline needs of a bank and of what it restored. ``RolloutBank`` and its ``Restored`` fit."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterable, Sequence
from typing import Protocol

from arrowbank.types import GroupQueuesPerEnv, RolloutGroup

__all__ = ["Bank", "PlannedDraw", "Restored"]


class Bank(Protocol):
    """Makes groups durable."""

    def begin_iteration(self, iteration: int) -> None:
        """Take what is appended from now on as collected at ``iteration``."""

    def append_async(
        self, group: RolloutGroup, *, evicted: str | None = ..., source_index: int | None = ...
    ) -> Awaitable[str]:
        """Make the group durable, set its uid and return that. Where it raises, the group is not in the bank."""
        ...

    def evict(self, uids: Iterable[str], reason: str) -> None:
        """Record that groups will never be trained on, and why."""


class PlannedDraw(Protocol):
    """One training batch that a resume rolled back, or a piece of one."""

    @property
    def iteration(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def span(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def groups(self) -> Sequence[RolloutGroup]: ...
    @property
    def state(self) -> bytes | None: ...
    @property
    def lost(self) -> Collection[str]:
        """uids that belong to the draw and could not be restored."""


class Restored(Protocol):
    """What a resume gives back."""

    @property
    def draws(self) -> Sequence[PlannedDraw]: ...
    @property
    def pending(self) -> GroupQueuesPerEnv:
        """Groups to train on before any fresh one, oldest first; those without env_id under ""."""

    def take(self, n: int = ...) -> list[RolloutGroup]:
        """Take up to ``n`` pending groups of all environments, oldest first."""
        ...

    def collected_iteration(self, group: RolloutGroup) -> int | None:
        """Return the iteration at which a pending group was finished; None for one that the resume does not know."""
