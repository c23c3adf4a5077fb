"""The demo's parts, and the demo itself: a real training run under SIGKILL, by its command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

from arrowbank import scan
from arrowbank.cli.app import app
from arrowbank.cli.demo import FEWEST_ITERATIONS_TO_ROLL_BACK
from arrowbank.cli.output import TextOutput
from arrowbank.demo import checkpoints, kills, progress
from arrowbank.demo.checkpoints import ModelState
from arrowbank.demo.environments import ENVIRONMENTS, MEMBERS, Environment, Sampler
from arrowbank.demo.generator_log import GeneratorLog, Resume, Tally, resume_of, tally
from arrowbank.demo.grpo import group_advantages, mean_reward, token_batch, train_step
from arrowbank.demo.kills import Kill, KillSchedule, plan_kills, with_rollback
from arrowbank.demo.policy import VOCABULARY, Policy, TokenBatch, contexts
from arrowbank.demo.progress import Progress
from arrowbank.demo.settings import BANK, GENERATOR_LOG, GROUPS, TWIN, TrainerSettings, checkpoint_every
from arrowbank.demo.supervisor import DemoResult, DemoSettings, Rollback, TrainerFailedError, prepare, run_demo
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


def saved_iterations(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save_iterations(directory: Path, number: int) -> None:
    for iteration in range(number):
        model = ModelState.initial(0)
        model.iteration = iteration
        checkpoints.save(directory, model)


def test_only_the_newest_four_checkpoints_stay(tmp_path: Path) -> None:
    save_iterations(tmp_path, 6)
    assert saved_iterations(tmp_path) == [f"iteration-00000{iteration}.npz" for iteration in (2, 3, 4, 5)]


def test_a_rollback_leaves_the_oldest_checkpoint_as_the_newest(tmp_path: Path) -> None:
    save_iterations(tmp_path, 6)
    for _ in range(2):  # one that was cut short is finished by the next
        older = checkpoints.roll_back(tmp_path)
        assert older is not None and older.iteration == 2
    assert saved_iterations(tmp_path) == ["iteration-000002.npz"]
    newest = checkpoints.load_newest(tmp_path)
    assert newest is not None and newest.iteration == 2


def test_without_checkpoints_there_is_nothing_to_roll_back_to(tmp_path: Path) -> None:
    assert checkpoints.roll_back(tmp_path) is None


def test_a_checkpoint_names_its_session_which_is_no_part_of_what_was_learned(tmp_path: Path) -> None:
    one, other = trained_model(1), trained_model(1)
    one.session = 7
    checkpoints.save(tmp_path, one)
    loaded = checkpoints.load_newest(tmp_path)
    assert loaded is not None and loaded.session == 7
    assert checkpoints.same_bits(loaded, other)


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
    first.resumed(0, Resume())
    for index in (0, 1, 2):
        first.asked(0, "sort", index)
    first.acknowledged(0, "sort", 0)
    first.acknowledged(0, "guess", 1)
    second = GeneratorLog(tmp_path / "log", attempt=2)
    second.resumed(0, Resume(pending=1, draws=3))
    second.asked(0, "sort", 0)  # the only one of its environment that was acknowledged
    second.asked(0, "sort", 1)
    assert tally(tmp_path / "log") == Tally(restored=1, replayed=3, regenerated=1)


def test_the_log_tells_what_one_start_was_given_back(tmp_path: Path) -> None:
    for attempt in (1, 2):
        GeneratorLog(tmp_path / "log", attempt).resumed(5, Resume(pending=attempt, draws=4, unarchived=24))
    assert resume_of(tmp_path / "log", attempt=2) == Resume(pending=2, draws=4, unarchived=24)
    assert resume_of(tmp_path / "log", attempt=3) == Resume(pending=0, draws=0, unarchived=0)


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


def planned_with_rollback(iterations: int, number: int, seed: int) -> list[Kill]:
    every = checkpoint_every(iterations)
    planned = plan_kills(number, iterations=iterations, checkpoint_every=every, groups=GROUPS, seed=seed, has_bank=True)
    return with_rollback(planned, iterations=iterations, checkpoint_every=every, groups=GROUPS)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("iterations", [FEWEST_ITERATIONS_TO_ROLL_BACK, 9, 12, 20, 60])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_rollback_comes_once_when_there_are_three_checkpoints_to_go_back_over(
    number: int, iterations: int, seed: int
) -> None:
    planned = planned_with_rollback(iterations, number, seed)
    (stop,) = [kill for kill in planned if kill.is_rollback]
    assert len(planned) == number + 1
    assert 3 * checkpoint_every(iterations) < stop.iteration < iterations


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("iterations", [12, 60])
def test_a_kill_lands_in_the_replay_after_the_rollback(iterations: int, seed: int) -> None:
    planned = planned_with_rollback(iterations, 4, seed)
    place = next(at for at, kill in enumerate(planned) if kill.is_rollback)
    every, newest = checkpoint_every(iterations), planned[place].iteration // checkpoint_every(iterations)
    back = max(1, newest - 3) * every  # the oldest of four that are kept
    assert planned[place + 1].iteration == back + 1 < planned[place].iteration
    assert planned[place + 1].moment in (progress.CHECKPOINTED, kills.ANYTIME)


@pytest.mark.parametrize("iterations", range(4, FEWEST_ITERATIONS_TO_ROLL_BACK))
def test_a_run_too_short_for_a_rollback_is_refused(iterations: int) -> None:
    with pytest.raises(ValueError, match=f"a rollback needs {FEWEST_ITERATIONS_TO_ROLL_BACK} iterations"):
        planned_with_rollback(iterations, 1, 0)


def test_the_stop_of_a_rollback_is_not_counted_among_the_kills() -> None:
    stop = Kill(progress.GENERATING, iteration=3, skip=0, delay_s=0.0, is_rollback=True)
    schedule = KillSchedule([stop, Kill(progress.TRAINED, iteration=1, skip=0, delay_s=0.0)])
    assert schedule.is_time(Progress(progress.GENERATING, 3, 0.0)) == 0.0
    assert schedule.is_due and schedule.is_rollback_due
    schedule.rolled_back()
    schedule.begin_attempt()
    assert schedule.is_time(Progress(progress.TRAINED, 2, 0.0)) == 0.0
    assert not schedule.is_rollback_due
    assert (schedule.killed(), schedule.landed) == (progress.TRAINED, [progress.TRAINED])


def test_what_is_no_progress_line_is_ignored() -> None:
    assert progress.parse("trained 3 0.5\n") == Progress("trained", 3, 0.5)
    assert progress.parse("a library's own print\n") is None


# -- parent and child


class Nobody:
    def advanced(self, run: str, line: Progress) -> None:
        pass

    def killed(self, number: int, moment: str, iteration: int) -> None:
        pass

    def rolled_back(self, from_iteration: int, to_iteration: int) -> None:
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


@pytest.mark.parametrize("as_json", [True, False])
def test_a_rollback_in_too_short_a_run_is_wrong_usage(as_json: bool, tmp_path: Path) -> None:
    arguments = ["demo", "--rollback", "--iterations", "7", "--kills", "1", "--dir", str(tmp_path / "run")]
    found = CliRunner().invoke(app, [*arguments, *["--json"] * as_json])
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr == "arrowbank: --rollback needs at least 8 iterations, not 7\n"
    assert not (tmp_path / "run").exists()


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
    assert set(demo) - {"code", "directory"} == set(DemoResult.__annotations__) - {"moments", "rolled_back"}


def assert_the_archive_holds_the_twins_rollouts_each_once(directory: Path) -> None:
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
    ours, twins = (archived(run / BANK).sort(member) for run in (directory, directory / TWIN))
    assert len(ours) == ours.select(pl.struct(member)).n_unique()
    assert_frame_equal(ours.select(member + payload), twins.select(member + payload), check_exact=True)


def archived(bank: Path) -> pl.DataFrame:
    return pl.read_parquet(f"{bank}/archive/*.parquet")


def test_the_killed_runs_archive_holds_the_twins_rollouts_each_once(demo: dict[str, Any]) -> None:
    assert demo["bank"] == str(demo["directory"] / "bank")
    assert len(archived(demo["directory"] / "bank")) == demo["rollouts"]
    assert_the_archive_holds_the_twins_rollouts_each_once(demo["directory"])


def test_the_same_kills_without_a_bank_cost_finished_groups(tmp_path: Path) -> None:
    code, result = run_cli(tmp_path / "run", "--iterations", "12", "--kills", "4", "--no-bank")
    assert code == 0
    assert result["regenerated"] > 20
    assert (result["kills"], result["restored"], result["replayed"], result["bank"]) == (4, 0, 0, None)
    assert result["weights_identical"]


# -- the whole thing, rolled back


class ArchiveWatcher(Nobody):
    """Looks at the bank while the run to be killed is down: at the rollback, and at the kill that follows."""

    def __init__(self, directory: Path) -> None:
        self._bank = directory / BANK
        self.older = 0
        self.at_rollback: pl.DataFrame | None = None
        self.at_next_kill: pl.DataFrame | None = None
        self.scanned: pl.DataFrame | None = None

    def rolled_back(self, from_iteration: int, to_iteration: int) -> None:
        self.older = to_iteration
        self.at_rollback = archived(self._bank)

    def killed(self, number: int, moment: str, iteration: int) -> None:
        if self.at_rollback is not None and self.at_next_kill is None:
            self.at_next_kill = archived(self._bank)
            self.scanned = scan(self._bank).to_polars().select("group_uid", "member_index").collect()


RolledBack = tuple[DemoResult, ArchiveWatcher, Path]


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> RolledBack:
    """The outcome of a short demo that goes back to an older model checkpoint, and what was seen on the way."""
    directory = tmp_path_factory.mktemp("rollback") / "run"
    prepare(directory)
    watcher = ArchiveWatcher(directory)
    settings = DemoSettings(directory, iterations=12, kills=4, has_rollback=True)
    return run_demo(settings, watcher), watcher, directory


def test_a_rollback_replays_and_generates_nothing_twice(rolled_back: RolledBack) -> None:
    result, _, directory = rolled_back
    assert (result.kills, result.regenerated, result.weights_identical) == (4, 0, True)
    assert result.rolled_back is not None
    went_back = result.rolled_back.from_iteration - result.rolled_back.to_iteration
    assert went_back > 2 * checkpoint_every(12)
    # one more where the stop came between a draw and the news of its training
    assert result.rolled_back.replayed in (went_back, went_back + 1)
    assert (result.groups, result.rollouts) == (12 * GROUPS, 12 * GROUPS * MEMBERS)
    assert_the_archive_holds_the_twins_rollouts_each_once(directory)


def test_a_rollback_takes_archived_groups_back(rolled_back: RolledBack) -> None:
    result, watcher, _ = rolled_back
    assert result.rolled_back is not None and result.rolled_back.unarchived > 0
    assert watcher.at_rollback is not None and watcher.at_next_kill is not None and watcher.scanned is not None
    before, after = (
        seen.filter(pl.col("consumed_iteration") >= watcher.older)
        for seen in (watcher.at_rollback, watcher.at_next_kill)
    )
    taken_back = before.join(after, on=["group_uid", "member_index"], how="anti").select("group_uid", "member_index")
    assert len(before) > 0 and len(taken_back) > 0
    assert len(taken_back.join(watcher.scanned, on=["group_uid", "member_index"], how="anti")) == 0
    assert watcher.scanned.is_unique().all()


def test_a_rollback_is_told_in_json_and_in_text(rolled_back: RolledBack, capsys: pytest.CaptureFixture[str]) -> None:
    result = replace(rolled_back[0], rolled_back=Rollback(36, 20, replayed=16, unarchived=240))
    assert result.as_json()["rolled_back"] == {"from": 36, "to": 20, "replayed": 16, "unarchived": 240}
    TextOutput().demo(result)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["rolled back to an older checkpoint", "36 to 20"] in rows
    assert ["draws replayed from there", "16"] in rows
    assert ["groups taken back out of Parquet", "240"] in rows
