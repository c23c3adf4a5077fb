"""When the demo's trainer is killed, and when it is rolled back."""

from __future__ import annotations

import pytest

from arrowbank.cli.demo import FEWEST_ITERATIONS_TO_ROLL_BACK
from arrowbank.demo import kills, progress
from arrowbank.demo.kills import Kill, KillSchedule, plan_kills, with_rollback
from arrowbank.demo.progress import Progress
from arrowbank.demo.settings import GROUPS, checkpoint_every


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
