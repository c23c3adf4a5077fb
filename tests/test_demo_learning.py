"""What the demo trains: its policy, its environments, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest
from demo_groups import make_batch, make_group, token_rollouts
from numpy.typing import NDArray

from arrowbank.demo.checkpoints import ModelState
from arrowbank.demo.environments import ENVIRONMENTS, MEMBERS, Environment
from arrowbank.demo.grpo import group_advantages, mean_reward, token_batch, train_step
from arrowbank.demo.policy import VOCABULARY, Policy, TokenBatch, contexts

# -- the policy


def off_policy_batch(policy: Policy) -> TokenBatch:
    """Sampled by other weights, so that some ratios are clipped and others not."""
    sampler = Policy({name: value * 1.3 for name, value in policy.parameters.items()})
    return token_batch([make_group(env, index, sampler) for env in ENVIRONMENTS for index in range(2)])


@pytest.mark.parametrize("name", list(Policy.initial(0).parameters))
def test_the_gradient_agrees_with_finite_differences(name: str) -> None:
    policy = Policy.initial(3)
    policy.parameters["output"] *= 20  # confident enough for ratios beyond the clipping range
    batch = off_policy_batch(policy)
    _, gradient = policy.loss_and_gradient(batch)
    value = policy.parameters[name]
    step = 1e-6
    steepest = np.argsort(-np.abs(gradient[name]), axis=None)[:12]
    for index in (np.unravel_index(flat, value.shape) for flat in steepest):
        kept = value[index]
        losses = []
        for moved in (kept + step, kept - step):
            value[index] = moved
            losses.append(policy.loss_and_gradient(batch)[0])
        value[index] = kept
        assert gradient[name][index] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-9)


def test_some_ratios_of_the_gradient_check_are_clipped() -> None:
    policy = Policy.initial(3)
    policy.parameters["output"] *= 20
    batch = off_policy_batch(policy)
    logprobs = policy.logprobs(batch.windows_NW, batch.positions_N)[np.arange(len(batch.tokens_N)), batch.tokens_N]
    ratios = np.exp(logprobs - batch.logprobs_N)
    assert (ratios > 1.2).any() and (ratios < 0.8).any()


def test_the_logprobs_given_are_those_of_the_sampled_tokens() -> None:
    policy = Policy.initial(0)
    for rollout in token_rollouts(make_batch(policy)):
        assert rollout.generation_mask is not None and rollout.logprobs is not None
        for tokens, mask, given in zip(rollout.trajectory, rollout.generation_mask, rollout.logprobs, strict=True):
            at = np.flatnonzero(mask)
            again = policy.logprobs(*contexts(tokens, at))[np.arange(len(at)), tokens[at]]
            assert given.dtype == np.float32
            np.testing.assert_allclose(given, again, rtol=1e-6)


def test_tokens_are_sampled_as_often_as_their_probability_says() -> None:
    policy = Policy.initial(1)
    policy.parameters["output"] *= 20
    prompt = [2, 9, 3]
    uniforms: NDArray[np.float64] = np.random.default_rng(0).random(20_000)
    tokens, _ = policy.sample([prompt] * len(uniforms), uniforms)
    expected = np.exp(policy.logprobs(*contexts(np.array(prompt, np.int32), np.array([3])))[0])
    assert np.bincount(tokens, minlength=VOCABULARY) / len(tokens) == pytest.approx(expected, abs=0.015)


# -- the environments


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=lambda env: env.env_id)
def test_a_group_is_the_same_whatever_was_generated_before(env: Environment) -> None:
    alone = make_group(env, 5)
    after_others = [make_group(env, index) for index in (9, 2, 5)][-1]
    for rollout in (*alone, *after_others):
        rollout.started_at = None
    assert alone == after_others


@pytest.mark.parametrize("env", ENVIRONMENTS, ids=lambda env: env.env_id)
def test_turns_are_cumulative_and_masked_where_that_turn_sampled(env: Environment) -> None:
    group = make_group(env, 0)
    assert len(group) == MEMBERS
    for rollout in token_rollouts([group]):
        assert rollout.generation_mask is not None and rollout.prompt_length is not None
        for turn, (tokens, mask) in enumerate(zip(rollout.trajectory, rollout.generation_mask, strict=True)):
            assert np.array_equal(rollout.trajectory[-1][: len(tokens)], tokens)
            prompt = rollout.prompt_length[turn]
            assert not mask[:prompt].any() and mask[prompt:].all() and len(mask) > prompt
            assert turn == 0 or prompt > len(rollout.trajectory[turn - 1])
        assert isinstance(rollout.reward, float) and 0 <= rollout.reward <= 1


def test_one_environment_has_several_turns_and_weights_differ() -> None:
    turns = {env.env_id: max(len(r.trajectory) for r in token_rollouts([make_group(env, 0)])) for env in ENVIRONMENTS}
    assert turns == {"sort": 1, "guess": 3}
    assert len({env.weight for env in ENVIRONMENTS}) == len(ENVIRONMENTS)


# -- learning


def test_advantages_are_centred_and_scaled_within_the_group() -> None:
    advantages = group_advantages(make_group(ENVIRONMENTS[1], 0))
    assert advantages.mean() == pytest.approx(0, abs=1e-12)
    assert advantages.std() == pytest.approx(1, abs=0.01)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    group = make_group(ENVIRONMENTS[0], 0)
    for rollout in group:
        rollout.reward = 0.5
    policy = Policy.initial(0)
    _, gradient = policy.loss_and_gradient(token_batch([group]))
    assert not any(slope.any() for slope in gradient.values())


def test_training_raises_the_reward_of_the_trained_problems() -> None:
    model = ModelState.initial(0)
    before = mean_reward(make_batch(model.policy))
    for _ in range(15):
        train_step(model.policy, model.adam, make_batch(model.policy))
    assert mean_reward(make_batch(model.policy)) > before + 0.1
