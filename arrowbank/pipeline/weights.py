"""Integer quotas from weights: how many groups of a batch each environment gets.

Invariants: quotas add up to the batch, every weighted environment has at least one, an environment of weight 0 has
none, and a heavier environment never has fewer than a lighter one. Pure functions, exact arithmetic: the same
weights give the same quotas on every machine.

Source: the largest remainder method (Hamilton's), with a minimum of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from arrowbank.types import EnvId

__all__ = ["check_weight", "integer_quotas"]


def check_weight(env_id: EnvId | None, weight: float) -> None:
    """Refuse a weight that is no share.

    Raises: ValueError for a weight that is negative, NaN or infinite.
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight of environment {env_id!r} is {weight}: expected a finite number, 0 or more")


def integer_quotas(weights: Mapping[EnvId, float], num_groups: int) -> dict[EnvId, int]:
    """Divide ``num_groups`` by weight, in the order of ``weights``; ties go to the earlier environment.

    Raises: ValueError when a weight is no share, when none is above 0, or when the batch is too small to give
    each weighted environment one group.
    """
    for env_id, weight in weights.items():
        check_weight(env_id, weight)
    weighted = [env_id for env_id, weight in weights.items() if weight > 0]
    if not weighted:
        raise ValueError(f"none of the environments {list(weights)} has a weight above 0")
    if num_groups < len(weighted):
        raise ValueError(
            f"a batch of {num_groups} groups cannot hold one of each of the {len(weighted)} weighted environments "
            f"{weighted}: make the batch larger, or give some of them weight 0"
        )
    exact = _exact_shares({env_id: weights[env_id] for env_id in weighted}, num_groups)
    return dict.fromkeys(weights, 0) | _at_least_one(_largest_remainder(exact, num_groups), exact)


def _exact_shares(weights: Mapping[EnvId, float], num_groups: int) -> dict[EnvId, Fraction]:
    # Fractions, because a float sum of finite weights can overflow and float remainders make false ties.
    parts = {env_id: Fraction(float(weight)) for env_id, weight in weights.items()}
    whole = sum(parts.values())
    return {env_id: num_groups * part / whole for env_id, part in parts.items()}


def _largest_remainder(exact: Mapping[EnvId, Fraction], num_groups: int) -> dict[EnvId, int]:
    quotas = {env_id: math.floor(share) for env_id, share in exact.items()}
    by_remainder = sorted(exact, key=lambda env_id: quotas[env_id] - exact[env_id])
    for env_id in by_remainder[: num_groups - sum(quotas.values())]:
        quotas[env_id] += 1
    return quotas


def _at_least_one(quotas: Mapping[EnvId, int], exact: Mapping[EnvId, Fraction]) -> dict[EnvId, int]:
    """Raise zeros to one, each taken from the environment that is most over-served at that point."""
    raised = {env_id: max(1, quota) for env_id, quota in quotas.items()}
    for _ in range(sum(raised.values()) - sum(quotas.values())):
        donors = (env_id for env_id, quota in raised.items() if quota > 1)
        raised[max(donors, key=lambda env_id: raised[env_id] - exact[env_id])] -= 1
    return raised
