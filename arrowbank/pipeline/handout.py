"""A batch in the making: what each environment owes it, what is too old for it, and what is generated for it.

Restored groups come first, then those that have waited, then fresh ones. Only what is missing is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from arrowbank.pipeline.assembly import MOST_REJECTED, Clock, Finished
from arrowbank.pipeline.generation import Order, stop
from arrowbank.pipeline.protocols import Bank
from arrowbank.pipeline.supply import Supply
from arrowbank.types import EnvId, RolloutGroup

__all__ = ["Handout", "Limits", "stop_all"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be generated ahead, and how old a group may be."""

    lag: int
    """Batches generated ahead of the one that is being made."""
    max_lag: int | None
    """Iterations. Older groups are evicted rather than handed out."""


@dataclass(slots=True)
class Handout:
    """What one batch still gets."""

    supplies: Mapping[EnvId, Supply]
    quotas: Mapping[EnvId, int]
    owed: dict[EnvId, int]
    """Counts down from the quotas, or from less where a replay gave some."""
    iteration: int
    limits: Limits
    bank: Bank | None
    clock: Clock
    num_evicted: Counter[EnvId]
    """Counts up: groups found too old."""
    _num_useless: int = field(default=0, init=False)
    """In a row: groups that were finished for this very batch and were too old all the same."""

    async def whole(self, taken: dict[EnvId, list[Finished]]) -> None:
        """Add to ``taken`` all that is owed, environment by environment, in slot order.

        Waits for the generators that were asked for this batch to end, so that their surplus is banked.

        Raises: whatever stopped a generator that this batch depends on.
        """
        drawn: list[Order] = []
        while True:
            for env_id, supply in self.supplies.items():
                while self.owed[env_id] and (finished := self._first(supply)) is not None:
                    order = self._take(supply, finished)
                    drawn += [order] if order is not None and order not in drawn else []
                    taken[env_id].append(finished)
            self._ask(with_slots=True)
            spent = [order for order in drawn if not order.num_missing]
            self._check([order.error for order in spent])
            if not any(self.owed.values()) and all(order.is_done for order in spent):
                return
            await self._news()

    async def one(self) -> tuple[EnvId, Finished]:
        """Return the next group in order of completion, of the environments that still owe any.

        Restored groups come first, each environment in turn.

        Raises: as ``whole``.
        """
        while True:
            ready = {env_id: self._first(supply) for env_id, supply in self.supplies.items() if self.owed[env_id]}
            self._ask(with_slots=False)
            found = [(env_id, finished) for env_id, finished in ready.items() if finished is not None]
            if found:
                env_id, finished = min(found, key=lambda it: (it[1].sequence, self.quotas[it[0]] - self.owed[it[0]]))
                self._take(self.supplies[env_id], finished)
                return env_id, finished
            self._check(())
            await self._news()

    def _take(self, supply: Supply, finished: Finished) -> Order | None:
        self.owed[supply.key] -= 1
        self._num_useless = 0
        return supply.take(finished)

    def _first(self, supply: Supply) -> Finished | None:
        """Return the group whose turn it is; whatever is too old before it is evicted."""
        stale: list[tuple[str, Finished]] = []
        while (finished := supply.first()) is not None and (reason := self._staleness(finished)):
            supply.take(finished)
            stale.append((reason, finished))
        try:
            for reason in dict.fromkeys(reason for reason, _ in stale):
                self._evict(supply, [item for why, item in stale if why == reason], reason)
                stale = [(why, item) for why, item in stale if why != reason]
        except BaseException:
            supply.put_back(item for _, item in stale)
            raise
        self._check_usefulness(supply)
        return finished

    def _evict(self, supply: Supply, items: list[Finished], reason: str) -> None:
        if self.bank is not None:
            self.bank.evict([item.group.uid or "" for item in items], reason)
        self.num_evicted[supply.key] += len(items)
        self._num_useless += sum(not item.is_restored and item.collected == self.iteration for item in items)

    def _staleness(self, finished: Finished) -> str | None:
        """Say why the group is too old; None when it is not."""
        if self.limits.max_lag is None:
            return None
        version = _oldest_version(finished.group)
        since = finished.collected if version is None else version
        lag = 0 if since is None else self.iteration - since
        return f"lag {lag} is over max_lag {self.limits.max_lag}" if lag > self.limits.max_lag else None

    def _check_usefulness(self, supply: Supply) -> None:
        if self._num_useless >= MOST_REJECTED:
            raise RuntimeError(
                f"{self._num_useless} groups in a row, the last one of environment {supply.key!r}, were finished for "
                f"the batch of iteration {self.iteration} and are over max_lag {self.limits.max_lag} all the same: are "
                "their policy_versions iteration counts? The groups are in the bank, evicted"
            )

    def _ask(self, *, with_slots: bool) -> None:
        """Ask generators for what is missing, and for the batches to come that may be generated ahead."""
        slot = 0
        for env_id, supply in self.supplies.items():
            quota, owed = self.quotas[env_id], self.owed[env_id]
            if quota and supply.error is None:  # an error is told before the generator is asked again
                missing = owed - supply.num_coming
                if missing > 0:
                    supply.order(missing, first_slot=slot + quota - missing if with_slots else None)
                while (ahead := owed + self.limits.lag * quota - supply.num_coming) > 0:
                    supply.order(min(quota, ahead), first_slot=None)
            slot += quota

    def _check(self, errors: Iterable[BaseException | None]) -> None:
        """Raise one of the errors, or the error of an environment that cannot give what it owes."""
        for supply in self.supplies.values():
            if self.owed[supply.key] > supply.num_coming and supply.error is not None:
                raise supply.error
        for error in errors:
            if error is not None:
                raise error

    async def _news(self) -> None:
        await self.clock.news()
        if self.clock.is_closed:
            raise RuntimeError("the pipeline was closed while this batch was being made")


async def stop_all(supplies: Iterable[Supply]) -> list[BaseException]:
    """Stop all generators and keep what they have finished; return what they met that was not told before.

    A cancellation of the caller meanwhile is the last of these.
    """
    supplies = list(supplies)
    cancelled = await stop([order for supply in supplies for order in supply.orders])
    errors = [error for supply in supplies for error in supply.gather()]
    return errors if cancelled is None else [*errors, cancelled]


def _oldest_version(group: RolloutGroup) -> int | None:
    """Return the oldest policy version that sampled any of the group's tokens; None when none is given."""
    versions = (span.version for rollout in group for span in rollout.policy_versions or ())
    return min(versions, default=None)
