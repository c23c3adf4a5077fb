"""GRPO in a few lines: advantages within each group, then clipped policy-gradient steps on the stored logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from arrowbank.demo.policy import Adam, Policy, TokenBatch, contexts
from arrowbank.types import RolloutGroup, TokenRollout

__all__ = ["group_advantages", "mean_reward", "token_batch", "train_step"]

PASSES = 4
"""Gradient steps on each batch; from the second on the ratio to the sampler's logprobs counts."""


def train_step(policy: Policy, adam: Adam, groups: Sequence[RolloutGroup]) -> None:
    """Train on one batch, in place. The order of the groups is part of the result, down to the last bit."""
    batch = token_batch(groups)
    for _ in range(PASSES):
        _, gradient = policy.loss_and_gradient(batch)
        adam.step(policy.parameters, gradient)


def mean_reward(groups: Sequence[RolloutGroup]) -> float:
    """Return the mean over all rollouts of a batch."""
    return float(np.mean([reward for group in groups for reward in _rewards(group)]))


def group_advantages(group: RolloutGroup) -> NDArray[np.float64]:
    """Return each member's reward, centred and scaled within the group. Shapes: (G,)."""
    rewards_G = _rewards(group)
    advantages_G: NDArray[np.float64] = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-4)
    return advantages_G


def token_batch(groups: Sequence[RolloutGroup]) -> TokenBatch:
    """Collect every sampled token of a batch, each with its member's advantage."""
    parts = [
        _sampled_tokens(rollout, advantage)
        for group in groups
        for rollout, advantage in zip(group, group_advantages(group).tolist(), strict=True)
    ]
    return TokenBatch(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _rewards(group: RolloutGroup) -> NDArray[np.float64]:
    return np.array([rollout.reward for rollout in group], np.float64)


def _sampled_tokens(rollout: object, advantage: float) -> TokenBatch:
    if not isinstance(rollout, TokenRollout) or rollout.generation_mask is None or rollout.logprobs is None:
        raise TypeError("the demo trains on token rollouts with masks and logprobs")
    sequence_T = rollout.trajectory[-1]
    # turns are cumulative and each mask is True in its own turn only, so this runs through the sequence once
    at_N = np.concatenate([np.flatnonzero(mask) for mask in rollout.generation_mask])
    windows_NW, positions_N = contexts(sequence_T, at_N)
    logprobs_N = np.concatenate(rollout.logprobs)
    return TokenBatch(windows_NW, positions_N, sequence_T[at_N], logprobs_N, np.full(len(at_N), advantage))
