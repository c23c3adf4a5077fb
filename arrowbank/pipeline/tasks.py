"""What there is to sample from: environments, their weights and their generators."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from arrowbank.pipeline.weights import check_weight, integer_quotas
from arrowbank.types import EnvId, RolloutGroup

__all__ = ["EnvTask", "Generate", "WeightedMultiTask"]

Generate: TypeAlias = Callable[[int], AsyncIterator[RolloutGroup]]


@dataclass(frozen=True)
class EnvTask:
    """One environment.

    Raises: ValueError for a weight that is negative, NaN or infinite; TypeError for a ``generate`` that cannot return
    an async iterator.
    """

    env_id: EnvId | None
    """None is for the only task of a run: it takes groups of whatever environment they name."""
    weight: float
    """Share of each batch, relative to the other tasks' weights. 0: known, but never sampled."""
    generate: Generate
    """``generate(num_groups)`` iterates over that many groups in order of completion, and then ends.

    It is called again for groups that were rejected or too old, and while earlier calls are still at work when batches
    are generated ahead. A group's extra field ``source_index``, an int, is given to the bank: which prompt of its
    source the group came from.
    """

    def __post_init__(self) -> None:
        check_weight(self.env_id, self.weight)
        _check_generate(self.env_id, self.generate)

    @property
    def key(self) -> EnvId:
        """What this environment's groups are filed under: its env_id, or ""."""
        return self.env_id or ""

    def open(self, num_groups: int) -> AsyncIterator[RolloutGroup]:
        """Ask the generator.

        Raises: TypeError when what it returns is no async iterator; whatever the generator raises.
        """
        stream: Any = self.generate(num_groups)
        if not hasattr(stream, "__aiter__"):
            if inspect.iscoroutine(stream):
                stream.close()  # or Python warns that nobody awaited it
            raise TypeError(
                f"the generator of environment {self.key!r} returned a {type(stream).__name__}: generate(num_groups) "
                "must return an async iterator of groups. Write it as `async def` with `yield`"
            )
        return aiter(stream)


class WeightedMultiTask:
    """Several environments that share each batch by weight, in the order given.

    Raises: ValueError when none has a weight above 0, two have the same env_id, or one of several has none.
    """

    def __init__(self, tasks: Iterable[EnvTask]) -> None:
        self.tasks = tuple(tasks)
        env_ids = Counter(task.key for task in self.tasks)
        repeated = [env_id for env_id, times in env_ids.items() if times > 1]
        if len(self.tasks) > 1 and "" in env_ids:
            raise ValueError(f"one of {len(self.tasks)} tasks has no env_id; only a single task may go without")
        if repeated:
            raise ValueError(f"several tasks have the same env_id: {repeated}")
        if not any(task.weight > 0 for task in self.tasks):
            raise ValueError(f"none of the tasks {list(env_ids)} has a weight above 0")

    @property
    def env_ids(self) -> list[EnvId]:
        """Every known environment, those of weight 0 included."""
        return [task.key for task in self.tasks]

    @property
    def is_catch_all(self) -> bool:
        """Whether there is one task only, without an env_id."""
        return self.env_ids == [""]

    @property
    def weighted_env_ids(self) -> list[EnvId]:
        """The environments that are sampled."""
        return [task.key for task in self.tasks if task.weight > 0]

    def quotas(self, num_groups: int) -> dict[EnvId, int]:
        """Return how many groups of a batch each environment gets; 0 for those of weight 0.

        Raises: ValueError when the batch is too small to give each weighted environment one group.
        """
        return integer_quotas({task.key: task.weight for task in self.tasks}, num_groups)


def _check_generate(env_id: EnvId | None, generate: Any) -> None:
    """Refuse at once what would fail only when the first batch is made, hours into a replay."""
    way_out = "generate(num_groups) must return an async iterator of groups: write it as `async def` with `yield`"
    where = f"generate of environment {env_id!r}"
    if not callable(generate):
        raise TypeError(f"{where} is a {type(generate).__name__}, which cannot be called; {way_out}")
    is_plain = inspect.isroutine(generate) or isinstance(generate, functools.partial | type)
    code = generate if is_plain else type(generate).__call__
    if inspect.isgeneratorfunction(code):
        raise TypeError(f"{where} is a generator, but no async one; {way_out}")
    if inspect.iscoroutinefunction(code):
        raise TypeError(f"{where} is a coroutine function, without a `yield`; {way_out}")
