"""Fresh groups: their slots, their environments, and generators that yield more or less than asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from pipeline_doubles import (
    Generator,
    HangingGenerator,
    MemoryBank,
    PlannedDraw,
    Restored,
    counts,
    make_group,
    make_groups,
    names,
    never,
    run,
)

from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline
from arrowbank.pipeline.assembly import NO_SLOT
from arrowbank.pipeline.generation import MOST_SURPLUS
from arrowbank.types import RolloutGroup


def test_a_fresh_group_is_banked_with_its_place_before_the_next_one_is_finished() -> None:
    bank = MemoryBank()
    seen: list[int] = []

    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        for i in range(num_groups):
            seen.append(len(bank.banked))
            yield make_group(f"a{i}", "A")

    restored = Restored([], {"A": make_groups("r", 1, "A")})
    tasks = [EnvTask("Z", 1, Generator("z", "Z")), EnvTask("A", 2, generate)]
    batch = run(RolloutPipeline(tasks, bank, restored).batch(7, 6))
    assert seen[0] <= 1 and [later - seen[0] >= i for i, later in enumerate(seen)] == [True] * 3
    in_bank = {group.uid: (group.batch_id, group.index_in_batch) for group in bank.banked}
    assert in_bank == {group.uid: (7, i) for i, group in enumerate(batch.groups) if i != 2}
    assert bank.collected == [7] * 5


def test_environments_generate_at_the_same_time() -> None:
    async def make_batch() -> Batch:
        async with asyncio.timeout(5):
            both_began = asyncio.Barrier(2)

            async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
                await both_began.wait()
                for i in range(num_groups):
                    yield make_group(str(i))

            pipeline = RolloutPipeline([EnvTask("A", 1, generate), EnvTask("B", 1, generate)], None, None)
            return await pipeline.batch(0, 2)

    assert [group.env_id for group in run(make_batch()).groups] == ["A", "B"]


def test_slots_follow_the_tasks_and_then_the_order_of_completion() -> None:
    tasks = [EnvTask("B", 1, Generator("b", "B")), EnvTask("A", 1, Generator("a", "A"))]
    assert names(run(RolloutPipeline(tasks, None, None).batch(0, 4))) == ["b0", "b1", "a0", "a1"]


def test_members_without_env_id_are_given_the_tasks_before_they_are_banked() -> None:
    bank = MemoryBank()
    run(RolloutPipeline([EnvTask("A", 1, Generator("a"))], bank, None).batch(0, 2))
    assert [member.env_id for group in bank.banked for member in group] == ["A"] * 4


def test_a_fresh_group_of_another_environment_is_refused_by_both_names() -> None:
    bank = MemoryBank()
    pipeline = RolloutPipeline([EnvTask("A", 1, Generator("b", "B"))], bank, None)
    with pytest.raises(ValueError, match=r"'A' made a group whose members name \['B'\]"):
        run(pipeline.batch(0, 2))
    assert bank.banked == []


def test_a_single_task_without_env_id_takes_groups_of_any_environment() -> None:
    pending = {"A": make_groups("a", 2, "A"), "B": make_groups("b", 1, "B")}
    pipeline = RolloutPipeline([EnvTask(None, 1, Generator("c", "C"))], MemoryBank(), Restored([], pending))
    assert names(run(pipeline.batch(0, 4))) == ["a0", "a1", "b0", "c0"]
    assert not any(pending.values())


def test_one_foreign_member_is_enough_to_refuse_a_group() -> None:
    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        group = make_group("a0", "A")
        group[1].env_id = "B"
        yield group

    with pytest.raises(ValueError, match=r"\['B'\]"):
        run(RolloutPipeline([EnvTask("A", 1, generate)], None, None).batch(0, 1))


def test_a_group_without_rollouts_is_refused_where_it_would_have_to_name_its_environment() -> None:
    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        yield RolloutGroup(rollouts=[])

    with pytest.raises(ValueError, match="'A' made a group without rollouts"):
        run(RolloutPipeline([EnvTask("A", 1, generate)], None, None).batch(0, 1))
    assert len(run(RolloutPipeline([EnvTask(None, 1, generate)], None, None).batch(0, 1)).groups) == 1


def test_everything_works_without_a_bank() -> None:
    a = Generator("a")
    pipeline = RolloutPipeline([EnvTask(None, 1, a)], None, None)
    assert [names(run(pipeline.batch(k, 2))) for k in range(2)] == [["a0", "a1"], ["a2", "a3"]]
    assert pipeline.stats() == {"": counts(fresh=4)}


def test_an_iterator_that_is_no_generator_will_do() -> None:
    class Stream:
        def __init__(self, num_groups: int) -> None:
            self.left = num_groups

        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> RolloutGroup:
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return make_group(str(self.left))

    assert names(run(RolloutPipeline([EnvTask(None, 1, Stream)], None, None).batch(0, 3))) == ["2", "1", "0"]


def test_stats_name_replayed_environments_that_have_no_task_any_more() -> None:
    draw = PlannedDraw(0, [make_group("p0", "gone"), make_group("p1", "A")])
    pipeline = RolloutPipeline([EnvTask("A", 1, never)], None, Restored([draw]))
    run(pipeline.batch(0, 2))
    assert {env_id: counts["replayed"] for env_id, counts in pipeline.stats().items()} == {"A": 1, "gone": 1}


# generators that yield more or less than asked


def test_surplus_fresh_groups_are_banked_and_wait_for_later_batches() -> None:
    bank, a = MemoryBank(), Generator("a", deviate=lambda n: n + 3)
    pipeline = RolloutPipeline([EnvTask(None, 1, a)], bank, None)
    assert names(run(pipeline.batch(0, 2))) == ["a0", "a1"]
    assert bank.names == ["a0", "a1", "a2", "a3", "a4"]
    assert [group.index_in_batch for group in bank.banked] == [0, 1, NO_SLOT, NO_SLOT, NO_SLOT]
    assert pipeline.stats()[""]["waiting"] == 3
    second = run(pipeline.batch(1, 2))
    assert names(second) == ["a2", "a3"]
    assert [(group.batch_id, group.index_in_batch) for group in second.groups] == [(1, 0), (1, 1)]
    assert (a.asked, pipeline.stats()[""]["fresh"]) == ([2], 4)


def test_a_generator_that_does_not_end_is_stopped_and_its_groups_wait() -> None:
    a = Generator("a", deviate=lambda n: 10**9)
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], None, None)
    with pytest.raises(RuntimeError, match=rf"'A' was asked for 2 groups and has not ended after {MOST_SURPLUS + 3}"):
        run(pipeline.batch(0, 2))
    assert a.is_closed
    assert names(run(pipeline.batch(0, 2))) == ["a0", "a1"]


def test_a_generator_that_ends_early_is_named_and_its_groups_wait_in_front() -> None:
    bank, a = MemoryBank(), Generator("a", "A", deviate=lambda n: n - 1)
    restored = Restored([], {"A": make_groups("r", 1, "A")})
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, restored)
    with pytest.raises(RuntimeError, match=r"'A' was asked for 3 groups and ended after 2"):
        run(pipeline.batch(0, 4))
    assert bank.names == ["a0", "a1"]
    assert pipeline.stats()["A"] == counts(waiting=3)
    a.deviate = lambda n: n
    assert names(run(pipeline.batch(0, 4))) == ["r0", "a0", "a1", "a2"]
    assert a.asked == [3, 1]
    assert pipeline.stats()["A"] == counts(restored=1, fresh=3)


def test_a_generator_that_ends_early_does_not_wait_for_the_others() -> None:
    tasks = [EnvTask("A", 1, HangingGenerator("a")), EnvTask("B", 1, Generator("b", deviate=lambda n: 0))]
    with pytest.raises(RuntimeError, match="'B' was asked for 2 groups and ended after 0"):
        run(RolloutPipeline(tasks, None, None).batch(0, 4))


def test_a_failed_batch_changes_no_order() -> None:
    a, b = Generator("a", deviate=lambda n: n + 4), Generator("b")
    restored = Restored([], {"A": make_groups("r", 2)})
    pipeline = RolloutPipeline([EnvTask("A", 3, a), EnvTask("B", 1, b)], None, restored)
    assert names(run(pipeline.batch(0, 4))) == ["r0", "r1", "a0", "b0"]
    restored.pending["A"].extend(make_groups("s", 4))
    a.deviate = b.deviate = lambda n: n - 1
    for num_groups in (4, 8, 16):  # out of restored ones, of some and of all that wait
        with pytest.raises(RuntimeError, match="ended after"):
            run(pipeline.batch(1, num_groups))
    a.deviate = b.deviate = lambda n: n
    assert names(run(pipeline.batch(1, 4))) == ["s0", "s1", "s2", "b1"]
    assert names(run(pipeline.batch(2, 8)))[:6] == ["s3", "a1", "a2", "a3", "a4", "a5"]


# source indices


@pytest.mark.parametrize(
    ("given", "banked"), [(7, 7), (np.int64(7), 7), (0, 0), (None, None), ("7", None), (True, None)]
)
def test_a_groups_source_index_is_given_to_the_bank(given: object, banked: int | None) -> None:
    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        yield RolloutGroup(rollouts=[*make_group("a0")], source_index=given)

    bank = MemoryBank()
    run(RolloutPipeline([EnvTask("A", 1, generate)], bank, None).batch(0, 1))
    assert bank.source_indices == [banked]
