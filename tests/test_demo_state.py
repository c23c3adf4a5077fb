"""What the demo's trainer keeps beside the bank: model checkpoints, prompt cursors, the log of its generators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from demo_groups import make_batch

from arrowbank.demo import checkpoints
from arrowbank.demo.checkpoints import ModelState
from arrowbank.demo.generator_log import GeneratorLog, Resume, Tally, resume_of, tally
from arrowbank.demo.grpo import mean_reward, train_step
from arrowbank.demo.trainer import SourceIndices
from arrowbank.types import RolloutGroup, TokenRollout

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
