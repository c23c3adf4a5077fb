"""Groups of the demo's environments, sampled here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from arrowbank.demo.environments import ENVIRONMENTS, Environment, Sampler
from arrowbank.demo.policy import Policy
from arrowbank.types import RolloutGroup, TokenRollout

__all__ = ["make_batch", "make_group", "token_rollouts"]


def make_group(env: Environment, source_index: int, policy: Policy | None = None) -> RolloutGroup:
    sampler = Sampler(policy or Policy.initial(0), 7, seed=0, env_id=env.env_id, source_index=source_index, latency_s=0)
    return asyncio.run(env.group(sampler))


def make_batch(policy: Policy) -> list[RolloutGroup]:
    return [make_group(env, index, policy) for env in ENVIRONMENTS for index in range(4)]


def token_rollouts(groups: Sequence[RolloutGroup]) -> list[TokenRollout]:
    return [rollout for group in groups for rollout in group if isinstance(rollout, TokenRollout)]
