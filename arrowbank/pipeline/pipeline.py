"""Batches for the trainer: the plan first, then restored groups within their quotas, then fresh ones.

Invariants: while the plan lasts no generator is called. Every fresh group is banked before it can be handed out, and
the moment it is finished, so that a kill in the middle of a batch loses none. A call of ``batch`` that raises or is
cancelled has handed out nothing: what was finished by then is kept for the next call.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from arrowbank.errors import ReplayUnavailableError
from arrowbank.pipeline.protocols import Bank, PlannedDraw, Restored
from arrowbank.pipeline.supply import Share, Supply
from arrowbank.pipeline.tasks import EnvTask, WeightedMultiTask
from arrowbank.types import EnvId, GroupQueuesPerEnv, RolloutGroup

__all__ = ["Batch", "RolloutPipeline"]


@dataclass(frozen=True)
class Batch:
    """One training batch, in slot order."""

    groups: list[RolloutGroup]
    replayed: bool
    """Whether these are the very groups of a draw that the resume rolled back, in their order."""
    state: bytes | None
    """The trainer's own bytes that the replayed draw was marked with."""
    span: int
    """How many optimizer steps the replayed draw feeds; 1 for a new batch."""
    offset: int
    """How many of them the loaded checkpoint holds already."""


class RolloutPipeline:
    """Makes each training batch of what was restored and of what it has generated.

    Groups are handed out with ``batch_id`` = the iteration and ``index_in_batch`` = their slot: environments in
    the order of the tasks, in each the restored groups before the fresh ones. Fresh groups are banked through
    ``bank``, their members without env_id given the task's; None: nothing is persisted.

    ``restored.pending`` is used up: groups that are handed out leave its deques, so that nobody else takes them a
    second time. ``restored.draws`` is left as it is.

    Raises: ValueError when tasks are contradictory, or when groups are pending of environments without weight.
    """

    def __init__(
        self, tasks: Sequence[EnvTask] | WeightedMultiTask, bank: Bank | None, restored: Restored | None
    ) -> None:
        self._tasks = tasks if isinstance(tasks, WeightedMultiTask) else WeightedMultiTask(tasks)
        self._bank = bank
        self._plan: deque[PlannedDraw] = deque(restored.draws if restored is not None else ())
        pending = restored.pending if restored is not None else {}
        if self._tasks.is_catch_all:
            _gather(pending)
        _check_pending({env_id: len(queue) for env_id, queue in pending.items() if queue}, self._tasks)
        self._supplies = {task.key: Supply(task, pending.get(task.key, deque()), bank) for task in self._tasks.tasks}
        self._handed_out: dict[str, Counter[EnvId]] = {
            origin: Counter() for origin in ("replayed", "restored", "fresh")
        }
        self._is_busy = False

    async def batch(self, iteration: int, num_groups: int) -> Batch:
        """Return the next planned draw, whatever its iteration was; after the plan, a batch shared by weight.

        Durability: all groups returned are in the bank, and so are the finished ones when this raises. The batch
        itself is not recorded: that is ``bank.mark_consumed``.

        Raises: ValueError when ``num_groups`` is not the planned draw's size, or too small to give each weighted
        environment one group; ReplayUnavailableError when groups of the planned draw are lost; RuntimeError when
        a generator ends early, or another call is still running; whatever a generator or the bank raises.
        """
        with self._one_at_a_time():
            if self._plan:
                _check_draw(self._plan[0], num_groups)
                self._begin(iteration)
                return self._replay(self._plan.popleft(), iteration)
            quotas = self._tasks.quotas(num_groups)
            self._begin(iteration)
            groups = await self._collect(quotas, iteration)
            return Batch(_numbered(groups, iteration), replayed=False, state=None, span=1, offset=0)

    def stats(self) -> dict[EnvId, dict[str, int]]:
        """Count groups per environment: handed out so far as replayed, restored and fresh ones, and waiting.

        Whatever was finished here and handed out counts as fresh, at once or after waiting. Waiting are the
        restored and finished groups that no batch has handed out; the plan is not among them.
        """
        env_ids = dict.fromkeys([*self._supplies, *self._handed_out["replayed"]])
        return {
            env_id: {origin: counts[env_id] for origin, counts in self._handed_out.items()}
            | {"waiting": self._supplies[env_id].num_waiting if env_id in self._supplies else 0}
            for env_id in env_ids
        }

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        # A second batch would move the bank to its iteration while the first one's groups are still finishing.
        if self._is_busy:
            raise RuntimeError("another call of batch() is still running; await it first")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _begin(self, iteration: int) -> None:
        if self._bank is not None:
            self._bank.begin_iteration(iteration)

    def _replay(self, draw: PlannedDraw, iteration: int) -> Batch:
        groups = _numbered(list(draw.groups), iteration)
        self._handed_out["replayed"].update(group.env_id for group in groups)
        return Batch(groups, replayed=True, state=draw.state, span=draw.span, offset=draw.offset)

    async def _collect(self, quotas: dict[EnvId, int], iteration: int) -> list[RolloutGroup]:
        for supply in self._supplies.values():
            await supply.bank_again()
        shares = self._open_shares(quotas, iteration)
        try:
            await _fill(shares)
        except BaseException:
            for share in shares:
                share.put_back()
            raise
        return [group for share in shares for group in self._close_share(share)]

    def _open_shares(self, quotas: dict[EnvId, int], iteration: int) -> list[Share]:
        shares: list[Share] = []
        first_slot = 0
        for env_id, quota in quotas.items():
            shares.append(Share(self._supplies[env_id], quota, iteration=iteration, first_slot=first_slot))
            first_slot += quota
        return shares

    def _close_share(self, share: Share) -> list[RolloutGroup]:
        groups = share.hand_out()
        env_id = share.supply.task.key
        self._handed_out["restored"][env_id] += len(share.restored)
        self._handed_out["fresh"][env_id] += len(groups) - len(share.restored)
        return groups


def _numbered(groups: list[RolloutGroup], iteration: int) -> list[RolloutGroup]:
    """Give the groups the places they have in this batch."""
    for slot, group in enumerate(groups):
        group.batch_id = iteration
        group.index_in_batch = slot
    return groups


async def _fill(shares: list[Share]) -> None:
    """Let all generators work at once; when one fails, the others are cancelled and awaited, and its error raised."""
    errors: tuple[BaseException, ...] = ()
    try:
        async with asyncio.TaskGroup() as running:
            for share in shares:
                if share.num_asked:
                    running.create_task(share.fill())
    except BaseExceptionGroup as failed:
        errors = failed.exceptions
    if errors:  # outside the handler, so that the generator's error comes with its own context and no other
        for other in errors[1:]:
            errors[0].add_note(f"and another environment failed meanwhile: {other!r}")
        raise errors[0]
    for share in shares:  # a generator that was cancelled from within has failed no task
        share.check_full()


def _check_draw(draw: PlannedDraw, num_groups: int) -> None:
    where = f"the planned draw {draw.index} of iteration {draw.iteration}"
    way_out = 'restore with mode="requeue" to train on the planned groups in new batches'
    if draw.lost:
        raise ReplayUnavailableError(
            f"{where} cannot be replayed whole: {len(draw.lost)} of its {len(draw.groups) + len(draw.lost)} groups "
            f"are lost ({', '.join(draw.lost)}); {way_out}"
        )
    if len(draw.groups) != num_groups:
        raise ValueError(
            f"{where} has {len(draw.groups)} groups, and the batch was to have {num_groups}: ask for "
            f"{len(draw.groups)}, or {way_out}"
        )


def _gather(pending: GroupQueuesPerEnv) -> None:
    """File all restored groups under "": the only task takes whatever environment they name."""
    everything = pending.setdefault("", deque())
    for env_id, queue in pending.items():
        if env_id:
            everything.extend(queue)
            queue.clear()


def _check_pending(num_pending: dict[EnvId, int], tasks: WeightedMultiTask) -> None:
    """Refuse restored groups that no batch would ever hand out."""
    stranded = [env_id for env_id in num_pending if env_id not in tasks.weighted_env_ids]
    if stranded:
        known = set(tasks.env_ids)
        listed = ", ".join(
            f"{num_pending[env_id]} of {env_id!r} ({'weight 0' if env_id in known else 'unknown'})"
            for env_id in stranded
        )
        raise ValueError(
            f"restored groups are pending of environments that are not sampled: {listed}. Give each a task with a "
            "weight, or take them out of restored.pending and bank.evict(uids, reason)"
        )
