"""Restored groups that were never trained on, on their way to the environments that hand them out."""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal, TypeAlias

from arrowbank.pipeline.protocols import Bank, Restored
from arrowbank.pipeline.tasks import WeightedMultiTask
from arrowbank.types import EnvId, GroupQueuesPerEnv

__all__ = ["OnUnknownEnv", "sort_pending"]

OnUnknownEnv: TypeAlias = Literal["raise", "evict"]


def sort_pending(
    restored: Restored | None, tasks: WeightedMultiTask, bank: Bank | None, on_unknown_env: OnUnknownEnv
) -> tuple[GroupQueuesPerEnv, Counter[EnvId]]:
    """Return the queue of each sampled environment, and how many groups of others were evicted.

    The queues are the resume's own deques.

    Raises: ValueError, naming environments and counts, when groups are pending that no batch would ever hand out.
    """
    pending = restored.pending if restored is not None else {}
    evicted: Counter[EnvId] = Counter()
    if restored is not None and tasks.is_catch_all:  # the only task takes whatever environment they name
        pending.setdefault("", deque()).extend(restored.take(sum(len(queue) for queue in pending.values())))
    why = {env_id: _why_stranded(env_id, tasks) for env_id, queue in pending.items() if queue}
    stranded = {env_id: reason for env_id, reason in why.items() if reason}
    if stranded and on_unknown_env == "raise":
        listed = ", ".join(f"{len(pending[env_id])} of {env_id!r} ({why})" for env_id, why in stranded.items())
        raise ValueError(
            f"restored groups are pending of environments that are not sampled: {listed}. Give each a task with a "
            'weight, or say on_unknown_env="evict" to never train on them'
        )
    for env_id, reason in stranded.items():
        if bank is not None:
            uids = [group.uid or "" for group in pending[env_id]]
            bank.evict(uids, f"environment {env_id!r} is not sampled: {reason}")
        evicted[env_id] = len(pending[env_id])
        pending[env_id].clear()
    return {env_id: pending.get(env_id, deque()) for env_id in tasks.env_ids}, evicted


def _why_stranded(env_id: EnvId, tasks: WeightedMultiTask) -> str | None:
    if env_id in tasks.weighted_env_ids:
        return None
    return "weight 0" if env_id in tasks.env_ids else "unknown"
