"""The demo's parts, and the demo itself: a real training run under SIGKILL, by its command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from polars.testing import assert_frame_equal

from arrowbank.demo import checkpoints, kills, progress
from arrowbank.demo.checkpoints import ModelState
from arrowbank.demo.environments import ENVIRONMENTS, MEMBERS, Environment, Sampler
from arrowbank.demo.generator_log import GeneratorLog, Tally, tally
from arrowbank.demo.grpo import group_advantages, mean_reward, token_batch, train_step
from arrowbank.demo.kills import Kill, KillSchedule, plan_kills
from arrowbank.demo.policy import VOCABULARY, Policy, TokenBatch, contexts
from arrowbank.demo.progress import Progress
from arrowbank.demo.settings import GENERATOR_LOG, TrainerSettings
from arrowbank.demo.supervisor import DemoResult, DemoSettings, TrainerFailedError, prepare, run_demo
from arrowbank.demo.trainer import SourceIndices
from arrowbank.types import RolloutGroup, TokenRollout


def make_group(env: Environment, source_index: int, policy: Policy | None = None) -> RolloutGroup:
    sampler = Sampler(policy or Policy.initial(0), 7, seed=0, env_id=env.env_id, source_index=source_index, latency_s=0)
    return asyncio.run(env.group(sampler))


def make_batch(policy: Policy) -> list[RolloutGroup]:
    return [make_group(env, index, policy) for env in ENVIRONMENTS for index in range(4)]


def token_rollouts(groups: Sequence[RolloutGroup]) -> list[TokenRollout]:
    return [rollout for group in groups for rollout in group if isinstance(rollout, TokenRollout)]


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


# -- model checkpoints


def trained_model(steps: int) -> ModelState:
    model = ModelState.initial(0)
    groups = make_batch(model.policy)
    for _ in range(steps):
        train_step(model.policy, model.adam, groups)
        model.iteration += 1
        model.rewards.append(mean_reward(groups))
    model.cursors = {"sort": 16, "guess": 8}
    return model


def test_a_checkpoint_comes_back_bit_for_bit_and_trains_on_as_if_never_saved(tmp_path: Path) -> None:
    model = trained_model(2)
    checkpoints.save(tmp_path, model)
    loaded = checkpoints.load_newest(tmp_path)
    assert loaded is not None and checkpoints.same_bits(loaded, model)
    for state in (model, loaded):
        train_step(state.policy, state.adam, make_batch(state.policy))
    assert checkpoints.same_bits(loaded, model)


def test_one_flipped_bit_of_a_weight_is_a_difference() -> None:
    one, other = trained_model(1), trained_model(1)
    assert checkpoints.same_bits(one, other)
    other.policy.parameters["bias"].view(np.uint64)[3] ^= 1
    assert not checkpoints.same_bits(one, other)


def test_a_checkpoint_that_a_kill_cut_short_is_not_loaded(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, trained_model(1))
    (tmp_path / "iteration-000002.part").write_bytes(b"PK")
    loaded = checkpoints.load_newest(tmp_path)
    assert loaded is not None and loaded.iteration == 1


def test_only_the_newest_two_checkpoints_stay(tmp_path: Path) -> None:
    for iteration in range(4):
        model = ModelState.initial(0)
        model.iteration = iteration
        checkpoints.save(tmp_path, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-000002.npz", "iteration-000003.npz"]


# -- the prompt cursor


def group_of(env_id: str, source_index: int) -> RolloutGroup:
    return RolloutGroup(rollouts=[TokenRollout(trajectory=[[1]], env_id=env_id)], source_index=source_index)


def test_source_indices_go_on_after_the_consumed_and_skip_the_pending() -> None:
    indices = SourceIndices({"sort": 16}, [group_of("sort", 16), group_of("sort", 18), group_of("guess", 0)])
    assert [indices.take("sort") for _ in range(3)] == [17, 19, 20]
    assert [indices.take("guess") for _ in range(2)] == [1, 2]


def test_replayed_batches_move_the_cursor_as_they_did_the_first_time() -> None:
    indices = SourceIndices({}, [])
    indices.consume([group_of("sort", 0), group_of("sort", 1), group_of("guess", 0)])
    assert indices.consumed == {"sort": 2, "guess": 1}
    assert (indices.take("sort"), indices.take("guess")) == (2, 1)


# -- the generator log


def test_the_log_counts_acknowledged_groups_that_were_asked_for_again(tmp_path: Path) -> None:
    first = GeneratorLog(tmp_path / "log", attempt=1)
    first.resumed(0, pending=0, draws=0)
    for index in (0, 1, 2):
        first.asked(0, "sort", index)
    first.acknowledged(0, "sort", 0)
    first.acknowledged(0, "guess", 1)
    second = GeneratorLog(tmp_path / "log", attempt=2)
    second.resumed(0, pending=1, draws=3)
    second.asked(0, "sort", 0)  # the only one of its environment that was acknowledged
    second.asked(0, "sort", 1)
    assert tally(tmp_path / "log") == Tally(restored=1, replayed=3, regenerated=1)


def test_a_line_that_a_kill_cut_short_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "log"
    GeneratorLog(path, attempt=1).acknowledged(0, "sort", 0)
    with path.open("ab") as file:
        file.write(b'{"event": "acknow')
    GeneratorLog(path, attempt=2).asked(0, "sort", 0)
    assert tally(path).regenerated == 1


# -- when to kill


def plan(seed: int, number: int = 5, *, has_bank: bool = True) -> list[Kill]:
    return plan_kills(number, iterations=80, checkpoint_every=5, groups=24, seed=seed, has_bank=has_bank)


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_of_moment_is_planned_in_ascending_iterations(seed: int) -> None:
    planned = plan(seed)
    assert {kill.moment for kill in planned} == {
        progress.GENERATING,
        progress.APPENDING,
        progress.CHECKPOINTED,
        kills.ANYTIME,
    }
    assert [kill.iteration for kill in planned] == sorted(kill.iteration for kill in planned)
    assert planned == plan(seed)


def test_the_control_is_killed_at_the_same_iterations_and_never_while_appending() -> None:
    control = plan(0, has_bank=False)
    assert [kill.iteration for kill in control] == [kill.iteration for kill in plan(0)]
    assert progress.APPENDING not in {kill.moment for kill in control}


def test_a_kill_comes_after_so_many_of_its_moments() -> None:
    schedule = KillSchedule([Kill(progress.GENERATING, iteration=3, skip=1, delay_s=0.0)])
    lines = [Progress(moment, k, 0.0) for k in (2, 3) for moment in ("generating", "trained", "generating")]
    assert [schedule.is_time(line) for line in lines] == [None, None, None, None, None, 0.0]
    assert schedule.is_due
    assert schedule.killed() == progress.GENERATING
    assert not schedule.is_due


def test_a_kill_that_missed_its_append_is_tried_again_in_place_of_one_at_any_time() -> None:
    appending = Kill(progress.APPENDING, iteration=3, skip=0, delay_s=0.0)
    schedule = KillSchedule([appending, Kill(kills.ANYTIME, iteration=9, skip=0, delay_s=0.1)])
    assert schedule.is_time(Progress(progress.APPENDING, 3, 0.0)) == 0.0
    assert schedule.is_time(Progress(progress.ACKNOWLEDGED, 3, 0.0)) is None
    assert schedule.killed() == progress.GENERATING
    schedule.begin_attempt()
    assert schedule.is_time(Progress(progress.APPENDING, 9, 0.0)) == 0.0
    assert schedule.killed() == progress.APPENDING


def test_what_is_no_progress_line_is_ignored() -> None:
    assert progress.parse("trained 3 0.5\n") == Progress("trained", 3, 0.5)
    assert progress.parse("a library's own print\n") is None


# -- parent and child


class Nobody:
    def advanced(self, run: str, line: Progress) -> None:
        pass

    def killed(self, number: int, moment: str, iteration: int) -> None:
        pass


def test_trainer_settings_survive_the_command_line(tmp_path: Path) -> None:
    for has_bank in (True, False):
        settings = TrainerSettings(tmp_path, 12, 3, 2, has_bank)
        assert TrainerSettings.from_arguments(settings.arguments()) == settings


def test_a_trainer_that_fails_by_itself_is_reported_with_its_own_words(tmp_path: Path) -> None:
    prepare(tmp_path / "run")
    (tmp_path / "run" / GENERATOR_LOG).mkdir()
    with pytest.raises(TrainerFailedError, match=r"ended with exit code 1(.|\n)*IsADirectoryError"):
        run_demo(DemoSettings(tmp_path / "run", iterations=4, kills=0), Nobody())


def test_an_earlier_demos_directory_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / GENERATOR_LOG).touch()
    with pytest.raises(FileExistsError, match="an earlier demo"):
        prepare(tmp_path)


# -- the whole thing


def run_cli(directory: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-c", "from arrowbank.cli import main; main()", "demo", "--json"]
    found = subprocess.run(
        [*command, "--dir", str(directory), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.stdout, found.stderr
    return found.returncode, json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a short demo with a bank."""
    directory = tmp_path_factory.mktemp("demo") / "run"
    code, result = run_cli(directory, "--iterations", "12", "--kills", "4")
    return result | {"code": code, "directory": directory}


def test_a_killed_run_generates_nothing_twice_and_ends_with_the_twins_weights(demo: dict[str, Any]) -> None:
    assert (demo["code"], demo["kills"], demo["regenerated"], demo["weights_identical"]) == (0, 4, 0, True)
    assert demo["restored"] > 0 and demo["replayed"] > 0
    assert (demo["iterations"], demo["groups"], demo["rollouts"]) == (12, 12 * 24, 12 * 24 * MEMBERS)
    assert demo["reward_last"] > demo["reward_first"]
    assert set(demo) - {"code", "directory"} == set(DemoResult.__annotations__) - {"moments"}


def test_the_killed_runs_archive_holds_the_twins_rollouts_each_once(demo: dict[str, Any]) -> None:
    member = ["env_id", "source_index", "member_index"]
    payload = [
        "reward",
        "tokens",
        "generation_mask",
        "logprobs",
        "num_turns",
        "consumed_iteration",
        "consumed_position",
    ]
    ours, twins = (
        pl.read_parquet(f"{directory}/bank/archive/*.parquet").sort(member)
        for directory in (demo["directory"], demo["directory"] / "twin")
    )
    assert demo["bank"] == str(demo["directory"] / "bank")
    assert len(ours) == demo["rollouts"] == ours.select(pl.struct(member)).n_unique()
    assert_frame_equal(ours.select(member + payload), twins.select(member + payload), check_exact=True)


def test_the_same_kills_without_a_bank_cost_finished_groups(tmp_path: Path) -> None:
    code, result = run_cli(tmp_path / "run", "--iterations", "12", "--kills", "4", "--no-bank")
    assert code == 0
    assert result["regenerated"] > 20
    assert (result["kills"], result["restored"], result["replayed"], result["bank"]) == (4, 0, 0, None)
    assert result["weights_identical"]
