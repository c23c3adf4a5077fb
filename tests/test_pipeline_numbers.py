"""Numbers of batches and slots, over real resumes of a bank on disk."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from pipeline_doubles import Generator, counts, make_group, names, run, until

from arrowbank.bank import RolloutBank
from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline
from arrowbank.pipeline.assembly import NO_SLOT
from arrowbank.types import RolloutGroup


class Resumed:
    """One start of a trainer that does nothing but draw, four groups a batch of environments A and B."""

    def __init__(self, path: Path, iteration: int, mode: Literal["replay", "requeue", "discard"] = "replay") -> None:
        self.bank = RolloutBank.open(path, keep_checkpoints=9)
        self.restored = self.bank.restore(iteration, mode=mode)
        self.a, self.b = Generator("a", "A"), Generator("b", "B")
        tasks = [EnvTask("A", 1, self.a), EnvTask("B", 1, self.b)]
        self.pipeline = RolloutPipeline(tasks, self.bank, self.restored)

    def draw(self, *iterations: int, span: int = 1) -> list[Batch]:
        """Make and mark a batch at each of the iterations."""
        return asyncio.run(self._draw(iterations, span))

    async def _draw(self, iterations: tuple[int, ...], span: int) -> list[Batch]:
        batches = []
        for k in iterations:
            batch = await self.pipeline.batch(k, 4)
            self.bank.mark_consumed([group.uid or "" for group in batch.groups], k, span=span)
            batches.append(batch)
        return batches

    def leave_unfinished(self, iteration: int) -> None:
        """Bank three groups of A, one more than its share, and one of B, and hand out none: a batch that fails."""
        a = Generator("s", "A", deviate=lambda n: n + 1)

        async def end_early(num_groups: int) -> AsyncIterator[RolloutGroup]:
            yield make_group("t0", "B")
            await until(lambda: a.is_closed)

        pipeline = RolloutPipeline([EnvTask("A", 1, a), EnvTask("B", 1, end_early)], self.bank, None)
        with pytest.raises(RuntimeError, match="'B' was asked for 2 groups and ended after 1"):
            run(pipeline.batch(iteration, 4))


def places(batch: Batch) -> list[tuple[int | None, int | None]]:
    return [(group.batch_id, group.index_in_batch) for group in batch.groups]


def numbered(iteration: int) -> list[tuple[int, int]]:
    return [(iteration, slot) for slot in range(4)]


@pytest.mark.parametrize("checkpoint", [1, 2, 3])
def test_batch_ids_go_on_from_the_resumed_iteration_through_replay_into_fresh_batches(
    checkpoint: int, tmp_path: Path
) -> None:
    first = Resumed(tmp_path, 0)
    for k in range(4):
        first.draw(k)
        first.bank.checkpoint(min(k + 1, 3))
    first.leave_unfinished(4)
    first.bank.close()

    again = Resumed(tmp_path, checkpoint)
    batches = again.draw(*range(checkpoint, 7))
    assert [places(batch) for batch in batches] == [numbered(k) for k in range(checkpoint, 7)]
    assert [batch.replayed for batch in batches] == [k < 4 for k in range(checkpoint, 7)]
    assert again.pipeline.stats()["A"] == counts(replayed=8 - 2 * checkpoint, restored=3, fresh=3)
    again.bank.close()


def test_a_second_resume_numbers_the_batches_as_the_first_one_did(tmp_path: Path) -> None:
    first = Resumed(tmp_path, 0)
    first.draw(0, 1, 2, 3)
    first.bank.checkpoint(2)
    first.bank.close()
    for _ in range(2):  # killed in the middle of the replay, once
        again = Resumed(tmp_path, 2)
        assert [places(batch) for batch in again.draw(2)] == [numbered(2)]
        again.bank.close()
    again = Resumed(tmp_path, 2)
    assert [(places(batch), batch.replayed) for batch in again.draw(2, 3, 4)] == [
        (numbered(2), True),
        (numbered(3), True),
        (numbered(4), False),
    ]
    again.bank.close()


def test_a_restored_group_gets_the_place_it_is_handed_out_at(tmp_path: Path) -> None:
    first = Resumed(tmp_path, 0)
    first.draw(0)
    first.bank.checkpoint(1)
    first.leave_unfinished(1)
    first.bank.close()

    again = Resumed(tmp_path, 1)
    pending = {env_id: list(queue) for env_id, queue in again.restored.pending.items()}
    as_banked = {group.uid: (group.batch_id, group.index_in_batch) for queue in pending.values() for group in queue}
    assert sorted(as_banked.values()) == [(1, NO_SLOT), (1, 0), (1, 1), (1, 2)]  # A's slots, and B's first
    batches = again.draw(1, 2)
    assert [places(batch) for batch in batches] == [numbered(1), numbered(2)]
    moved = {group.uid: (group.batch_id, group.index_in_batch) for batch in batches for group in batch.groups}
    assert {uid for uid, place in as_banked.items() if moved[uid] != place} == {pending["A"][2].uid}
    assert moved[pending["A"][2].uid] == (2, 0)  # was banked as a surplus, without a slot
    again.bank.close()

    once_more = Resumed(tmp_path, 1)
    assert once_more.restored.draws[1].groups[0].index_in_batch == NO_SLOT
    replayed = once_more.draw(1, 2)
    assert [places(batch) for batch in replayed] == [numbered(1), numbered(2)]
    assert [names(batch) for batch in replayed] == [names(batch) for batch in batches]
    once_more.bank.close()


@pytest.mark.parametrize("mode", ["requeue", "discard"])
def test_without_a_replay_too_the_next_batch_has_the_resumed_iteration(
    mode: Literal["requeue", "discard"], tmp_path: Path
) -> None:
    first = Resumed(tmp_path, 0)
    first.draw(0, 1, 2, 3)
    first.bank.checkpoint(2)
    first.bank.close()

    again = Resumed(tmp_path, 2, mode)
    batches = again.draw(2, 3, 4)
    assert [places(batch) for batch in batches] == [numbered(2), numbered(3), numbered(4)]
    assert again.pipeline.stats()["A"]["restored"] == (4 if mode == "requeue" else 0)
    again.bank.close()


def test_each_of_several_draws_of_an_iteration_has_its_number_and_slots_of_its_own(tmp_path: Path) -> None:
    first = Resumed(tmp_path, 0)
    first.draw(0, 0, 1, 1, 2)
    first.bank.checkpoint(1)
    first.bank.close()

    again = Resumed(tmp_path, 1)
    assert [(draw.iteration, draw.index) for draw in again.restored.draws] == [(1, 0), (1, 1), (2, 0)]
    batches = again.draw(1, 1, 2, 2, 3)  # the second one at 2 is fresh: the kill came between the two
    assert [places(batch) for batch in batches] == [numbered(k) for k in (1, 1, 2, 2, 3)]
    assert [batch.replayed for batch in batches] == [True, True, True, False, False]
    again.bank.close()


@pytest.mark.parametrize("checkpoint", [3, 4, 5])
def test_a_draw_of_several_steps_has_the_number_of_the_iteration_it_goes_on_at(checkpoint: int, tmp_path: Path) -> None:
    first = Resumed(tmp_path, 0)
    first.draw(0, 3, span=3)
    first.bank.begin_iteration(4)
    first.bank.checkpoint(checkpoint)
    first.draw(6, span=3)
    first.bank.close()

    for _ in range(2):  # the second time it has been marked again by the first, and is the same all the same
        again = Resumed(tmp_path, checkpoint)
        (replayed,) = again.draw(checkpoint, span=3 - (checkpoint - 3))
        assert (replayed.replayed, replayed.offset) == (True, checkpoint - 3)
        assert places(replayed) == numbered(checkpoint)
        again.bank.close()
    again = Resumed(tmp_path, checkpoint)
    batches = [*again.draw(checkpoint, span=3 - (checkpoint - 3)), *again.draw(6, 9, span=3)]
    assert [places(batch) for batch in batches] == [numbered(k) for k in (checkpoint, 6, 9)]
    assert [batch.replayed for batch in batches] == [True, True, False]
    again.bank.close()


def test_the_number_given_at_hand_out_outlasts_decoding_and_stays_out_of_the_bank(tmp_path: Path) -> None:
    first = Resumed(tmp_path, 0)
    first.draw(0)
    first.bank.close()

    again = Resumed(tmp_path, 0)
    batch = run(again.pipeline.batch(5, 4))  # a planned draw is replayed at whatever iteration
    for slot, group in enumerate(batch.groups):
        assert group[0].reward == 1.0  # decodes
        for copy in (group, pickle.loads(pickle.dumps(group)), group.model_copy(deep=True)):
            assert (copy.batch_id, copy.index_in_batch) == (5, slot)
    again.bank.close()

    later = Resumed(tmp_path, 0)
    assert [(group.batch_id, group.index_in_batch) for group in later.restored.draws[0].groups] == numbered(0)
    later.bank.close()
