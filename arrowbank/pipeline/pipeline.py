"""Batches for the trainer: the plan first, then restored groups within their quotas, then fresh ones.

Invariants: while the plan lasts no generator is called. Every fresh group is banked before it can be handed out, and
the moment it is finished, so that a kill in the middle of a batch loses none. A call of ``batch`` that raises or is
cancelled has handed out nothing and leaves nothing running: what was finished by then is kept for the next call.

The other modules follow the life of a group: ``tasks`` and ``generation`` make it, ``assembly`` judges and banks it,
``pending`` and ``replay`` bring it back after a resume, ``supply`` lets it wait, ``handout`` chooses it.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Literal, Self, TypeAlias

from arrowbank.pipeline.assembly import Accept, Assembly, Clock, Finished
from arrowbank.pipeline.batches import Batch, numbered, replayed_batch
from arrowbank.pipeline.handout import Handout, Limits, stop_all
from arrowbank.pipeline.pending import OnUnknownEnv, sort_pending
from arrowbank.pipeline.pieces import Pieces
from arrowbank.pipeline.protocols import Bank, PlannedDraw, Restored
from arrowbank.pipeline.replay import Plan
from arrowbank.pipeline.supply import Supply
from arrowbank.pipeline.tasks import EnvTask, WeightedMultiTask
from arrowbank.types import EnvId, RolloutGroup

__all__ = ["Consumption", "RolloutPipeline"]

Consumption: TypeAlias = Literal["batch", "group"]
_ORIGINS = ("replayed", "restored", "fresh")

_log = logging.getLogger("arrowbank")


class RolloutPipeline:
    """Makes each training batch of what was restored and of what it has generated.

    consumption: what a batch is made of once there is more than it needs. "batch": of what was asked for it, so that
    fast groups do not overtake slow ones; the slots are, in the order of the tasks, each environment's restored groups
    before its fresh ones. "group": of whatever is finished first, in order of completion, within the quotas;
    ``pieces`` hands out each group as soon as it is there.

    lag: so many batches are generated ahead, in the background, while the trainer trains; never during a replay, but
    from the first batch after it on. A generator is then called for a batch while its earlier calls are still at work,
    and it makes progress only while the event loop runs: train in a thread (``asyncio.to_thread``). Close the pipeline
    (``async with``, ``aclose``) before the bank.

    max_lag: iterations. A group whose lag is larger when it would be handed out is evicted, with that as the reason,
    and made again. The lag is the batch's iteration minus the oldest policy version in the group's ``policy_versions``,
    or minus the iteration at which it was finished where it names none. A replay is exempt.

    accept: judges each group as it is finished, before it is banked: True keeps it; False, or a text that says why,
    rejects it (``lambda group: is_useful(group) or "all rewards are equal"``). A rejected group is banked as evicted,
    in one record, and made again. Restored groups have been judged when they were made.

    on_unknown_env: what to do with restored groups of environments that have no task, or no weight. "evict" is for
    good.

    Groups are handed out with ``batch_id`` = the iteration and ``index_in_batch`` = their slot. Fresh groups are banked
    through ``bank``, their members without env_id given the task's; None: nothing is persisted. ``restored.pending`` is
    used up: groups that are handed out leave its deques, so that nobody else takes them a second time.
    ``restored.draws`` is left as it is.

    Raises: ValueError when tasks or options are contradictory, or when groups are pending of environments without
    weight; what ``bank.evict`` raises.
    """

    def __init__(
        self,
        tasks: Sequence[EnvTask] | WeightedMultiTask,
        bank: Bank | None,
        restored: Restored | None,
        consumption: Consumption = "batch",
        lag: int = 0,
        max_lag: int | None = None,
        accept: Accept | None = None,
        on_unknown_env: OnUnknownEnv = "raise",
    ) -> None:
        self._limits = _checked_limits(lag, max_lag)
        _check_options(consumption, accept, on_unknown_env)
        self._tasks = tasks if isinstance(tasks, WeightedMultiTask) else WeightedMultiTask(tasks)
        self._bank = bank
        self._consumption = consumption
        self._clock = Clock()
        self._plan = Plan(restored.draws if restored is not None else ())
        pending, self._num_evicted = sort_pending(restored, self._tasks, bank, on_unknown_env)
        self._supplies = {
            task.key: Supply(
                Assembly(task, bank, accept, self._clock),
                pending[task.key],
                restored.collected_iteration if restored is not None else lambda group: None,
                by_completion=consumption == "group",
                clock=self._clock,
            )
            for task in self._tasks.tasks
        }
        self._handed_out: dict[str, Counter[EnvId]] = {origin: Counter() for origin in _ORIGINS}
        self._is_busy = False
        self._pieces: Pieces | None = None

    async def batch(self, iteration: int, num_groups: int) -> Batch:
        """Return the next planned draw, whatever its iteration was; after the plan, a batch shared by weight.

        With consumption="group", pieces of a planned batch that were marked one by one come back together, and the last
        planned batch, if a kill has cut it short, is topped up. Then ``replayed`` is False, and ``state`` that of the
        last piece. Mark it all as one draw.

        Durability: all groups returned are in the bank, and so are the finished ones when this raises. The batch
        itself is not recorded: that is ``bank.mark_consumed``.

        Raises: ValueError when ``num_groups`` is not the planned draw's size, or too small to give each weighted
        environment one group; ReplayUnavailableError when groups of the planned draw are lost; RuntimeError when
        a generator ends early, does not end or makes only groups that are rejected or too old, or another call is still
        running; whatever a generator, ``accept`` or the bank raises. An error of a generator that works ahead is raised
        by the batch that cannot be made without it.
        """
        with self._one_at_a_time():
            planned, handout = self._begin(iteration, num_groups)
            taken: dict[EnvId, list[Finished]] = {env_id: [] for env_id in self._supplies}
            fresh: list[RolloutGroup] = []
            if any(handout.owed.values()):
                async with self._undone_on_error(taken):
                    fresh = await self._collect(handout, taken)
            self._plan.drop(planned)
            for env_id, items in taken.items():
                self._count(env_id, items)
            if not planned:
                return Batch(numbered(fresh, iteration), replayed=False, state=None, span=1, offset=0)
            self._count_replayed(planned)
            replayed = replayed_batch(planned, iteration)
            groups = numbered(replayed.groups + fresh, iteration)
            return Batch(groups, not fresh, replayed.state, replayed.span, replayed.offset)

    def pieces(self, iteration: int, num_groups: int) -> AsyncIterator[Batch]:
        """Begin a batch and hand it out in pieces, while the rest of it is being generated.

        A piece is one group, or a planned draw as it was marked. There are two ways to record them, and a run may
        change between them. Mark each piece as its own draw when it has been used; a kill in the middle of the batch
        then replays the pieces that were marked, in their order, and only the rest is made anew::

            async for piece in pipeline.pieces(k, num_groups=64):
                accumulate_gradient(piece.groups)
                bank.mark_consumed([group.uid for group in piece.groups], k, state=piece.state if piece.replayed else …)

        Or mark the whole batch as one draw, in that order, once the iterator has ended; after a kill in the middle its
        groups are pending again, and are handed out first.

        The next call of ``batch`` or ``pieces`` begins the next batch, complete or not. An error leaves nothing
        running; the same iterator may then be iterated on.

        Raises: ValueError without consumption="group"; else as ``batch``, at once or where it is iterated.
        """
        if self._consumption != "group":
            raise ValueError('pieces(…) hands out group by group: make the pipeline with consumption="group"')
        with self._one_at_a_time():
            self._pieces = Pieces(*self._begin(iteration, num_groups), self._next_piece)
            return self._pieces

    def stats(self) -> dict[EnvId, dict[str, int]]:
        """Count groups per environment since the start of this pipeline.

        replayed, restored, fresh: handed out. Whatever was finished here counts as fresh, at once or after waiting.
        rejected: by ``accept``. evicted: too old, or of an environment that is not sampled. waiting: restored and
        finished groups that no batch has handed out; the plan is not among them.
        """
        env_ids = dict.fromkeys([*self._supplies, *self._handed_out["replayed"], *self._num_evicted])
        return {
            env_id: {origin: counts[env_id] for origin, counts in self._handed_out.items()}
            | {
                "rejected": supply.assembly.num_rejected if supply is not None else 0,
                "evicted": self._num_evicted[env_id],
                "waiting": supply.num_waiting if supply is not None else 0,
            }
            for env_id in env_ids
            for supply in [self._supplies.get(env_id)]
        }

    async def aclose(self) -> None:
        """Stop generating ahead. Groups that are finished are in the bank then; the pipeline makes no further batch.

        Raises: what the bank, or ``accept``, raises for a group that failed before. Errors of generators that no batch
        has needed are logged. Closing twice is no error.
        """
        self._clock.is_closed = True
        self._clock.tell()
        unneeded = await stop_all(self._supplies.values())
        failed: list[BaseException] = []
        for supply in self._supplies.values():
            try:
                await supply.add_again()
            except BaseException as error:
                failed.append(error)
        failed += [met for met in unneeded if isinstance(met, asyncio.CancelledError)]
        for unasked in unneeded:
            if not isinstance(unasked, asyncio.CancelledError):
                _log.warning("a generator that worked ahead, for a batch that nobody asked for, met %r", unasked)
        _raise_first(failed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except Exception as failure:  # whatever closing met must not hide what the trainer itself raised
            if error is None:
                raise
            error.add_note(f"closing the pipeline failed as well: {failure!r}")

    # -- a batch in the making

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        # A second batch would move the bank to its iteration while the first one's groups are still finishing.
        if self._is_busy:
            raise RuntimeError("another call of batch() is still running; await it first")
        if self._clock.is_closed:
            raise RuntimeError("the pipeline was closed; make another one of a new restore")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _begin(self, iteration: int, num_groups: int) -> tuple[list[PlannedDraw], Handout]:
        """Begin the iteration: return what is replayed at it, and what is to be added to that."""
        iteration, num_groups = operator.index(iteration), operator.index(num_groups)
        if num_groups < 1:
            raise ValueError(f"a batch of {num_groups} groups: at least one")
        planned: list[PlannedDraw] = []
        if self._plan:
            by_piece = self._consumption == "group"
            planned = self._plan.next_pieces(num_groups) if by_piece else self._plan.next_draw(num_groups)
        num_owed = num_groups - sum(len(draw.groups) for draw in planned)
        quotas = self._tasks.quotas(num_groups) if num_owed else dict.fromkeys(self._supplies, 0)
        if self._bank is not None:
            self._bank.begin_iteration(iteration)
        self._clock.iteration = iteration
        self._pieces = None
        handout = Handout(
            self._supplies,
            quotas,
            _owed(quotas, planned, num_owed, is_catch_all=self._tasks.is_catch_all),
            iteration,
            self._limits,
            self._bank,
            self._clock,
            self._num_evicted,
        )
        return planned, handout

    async def _collect(self, handout: Handout, taken: dict[EnvId, list[Finished]]) -> list[RolloutGroup]:
        """Add all that is owed to ``taken``; return the groups in slot order."""
        for supply in self._supplies.values():
            await supply.add_again()
        if self._consumption == "batch":
            await handout.whole(taken)
            return [finished.group for items in taken.values() for finished in items]
        groups = []
        while any(handout.owed.values()):
            env_id, finished = await handout.one()
            taken[env_id].append(finished)
            groups.append(finished.group)
        return groups

    async def _next_piece(self, pieces: Pieces) -> Batch:
        with self._one_at_a_time():
            if pieces is not self._pieces:
                raise RuntimeError("the next batch has begun; the rest of this one is in it")
            iteration, slot = pieces.handout.iteration, pieces.num_given
            if pieces.planned:
                draw = [pieces.planned.popleft()]
                self._plan.drop(draw)
                self._count_replayed(draw)
                piece = replayed_batch(draw, iteration, slot)
            else:
                async with self._undone_on_error({}):
                    for supply in self._supplies.values():
                        await supply.add_again()
                    env_id, finished = await pieces.handout.one()
                self._count(env_id, [finished])
                piece = Batch(numbered([finished.group], iteration, slot), False, state=None, span=1, offset=0)
            pieces.num_given += len(piece.groups)
            return piece

    @asynccontextmanager
    async def _undone_on_error(self, taken: Mapping[EnvId, Sequence[Finished]]) -> AsyncIterator[None]:
        """When the block raises or is cancelled, stop all generators, put everything back, and raise what comes first.

        An error of a generator, or of the bank, comes before a cancellation: nobody else would tell of it.
        """
        failures: list[BaseException] = []
        try:
            yield
        except BaseException as failure:
            failures.append(failure)
        if not failures:
            return
        failures += [error for error in await stop_all(self._supplies.values()) if error is not failures[0]]
        for env_id, items in taken.items():
            self._supplies[env_id].put_back(items)
        _raise_first(failures)  # outside the handler, so that it comes with its own context and no other

    # -- counts

    def _count(self, env_id: EnvId, items: Sequence[Finished]) -> None:
        num_restored = sum(finished.is_restored for finished in items)
        self._handed_out["restored"][env_id] += num_restored
        self._handed_out["fresh"][env_id] += len(items) - num_restored

    def _count_replayed(self, draws: Sequence[PlannedDraw]) -> None:
        self._handed_out["replayed"].update(group.env_id for draw in draws for group in draw.groups)


def _raise_first(failures: Sequence[BaseException]) -> None:
    """Raise the first error, with notes of the others; a cancellation only when there is no error."""
    if not failures:
        return
    errors = [error for error in failures if not isinstance(error, asyncio.CancelledError)]
    for other in errors[1:]:
        errors[0].add_note(f"and another environment failed meanwhile: {other!r}")
    raise errors[0] if errors else failures[0]


def _owed(
    quotas: Mapping[EnvId, int], planned: Sequence[PlannedDraw], num_owed: int, *, is_catch_all: bool
) -> dict[EnvId, int]:
    """Return what each environment adds to the planned groups, so that the batch keeps to the quotas if it can."""
    given = Counter("" if is_catch_all else group.env_id for draw in planned for group in draw.groups)
    owed = {env_id: max(0, quota - given[env_id]) for env_id, quota in quotas.items()}
    for _ in range(sum(owed.values()) - num_owed):  # the weights have changed since
        owed[max(owed, key=owed.__getitem__)] -= 1
    return owed


def _checked_limits(lag: int, max_lag: int | None) -> Limits:
    limits = Limits(operator.index(lag), None if max_lag is None else operator.index(max_lag))
    if limits.lag < 0 or (limits.max_lag is not None and limits.max_lag < 0):
        raise ValueError(f"lag {lag}, max_lag {max_lag}: numbers of batches and of iterations, 0 or more")
    if limits.max_lag is not None and limits.lag > limits.max_lag:
        raise ValueError(f"lag {lag} is over max_lag {max_lag}: what is generated ahead would be evicted")
    return limits


def _check_options(consumption: str, accept: object, on_unknown_env: str) -> None:
    if consumption not in ("batch", "group"):
        raise ValueError(f'consumption {consumption!r}: use "batch" or "group"')
    if on_unknown_env not in ("raise", "evict"):
        raise ValueError(f'on_unknown_env {on_unknown_env!r}: use "raise" or "evict"')
    if accept is not None and not callable(accept):
        raise TypeError(f"accept is a {type(accept).__name__}: expected a function of a group, or None")
