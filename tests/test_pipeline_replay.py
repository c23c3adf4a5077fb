"""The plan comes back whole, in order, before anything is generated."""

from __future__ import annotations

from typing import Literal

import pytest
from pipeline_doubles import MemoryBank, PlannedDraw, Restored, make_groups, names, never, run

from arrowbank.errors import ReplayUnavailableError
from arrowbank.pipeline import EnvTask, RolloutPipeline


def test_generator_is_never_asked_while_the_plan_lasts() -> None:
    plan = [PlannedDraw(5, [*make_groups("p", 3)]), PlannedDraw(6, [*make_groups("q", 3)])]
    pipeline = RolloutPipeline([EnvTask(None, 1, never)], MemoryBank(), Restored(plan))
    assert names(run(pipeline.batch(5, 3))) == ["p0", "p1", "p2"]
    assert names(run(pipeline.batch(6, 3))) == ["q0", "q1", "q2"]
    with pytest.raises(AssertionError, match="asked for 3"):
        run(pipeline.batch(7, 3))


def test_the_plan_is_replayed_whatever_the_iteration_with_its_state_span_and_offset() -> None:
    draw = PlannedDraw(4, [*make_groups("p", 2)], span=3, offset=1, state=b"cursor")
    bank = MemoryBank()
    batch = run(RolloutPipeline([EnvTask(None, 1, never)], bank, Restored([draw])).batch(9, 2))
    assert (batch.replayed, batch.state, batch.span, batch.offset) == (True, b"cursor", 3, 1)
    assert [(group.batch_id, group.index_in_batch) for group in batch.groups] == [(9, 0), (9, 1)]
    assert (bank.iteration, bank.banked) == (9, [])


def test_pending_groups_stay_until_the_plan_is_done() -> None:
    restored = Restored([PlannedDraw(0, [*make_groups("p", 2)])], {"": make_groups("r", 2)})
    pipeline = RolloutPipeline([EnvTask(None, 1, never)], None, restored)
    assert names(run(pipeline.batch(0, 2))) == ["p0", "p1"]
    assert names(run(pipeline.batch(1, 2))) == ["r0", "r1"]
    assert len(restored.draws) == 1


def test_a_planned_draw_of_another_size_is_refused_and_stays_planned() -> None:
    bank = MemoryBank()
    pipeline = RolloutPipeline([EnvTask(None, 1, never)], bank, Restored([PlannedDraw(5, [*make_groups("p", 3)])]))
    with pytest.raises(ValueError, match=r'3 groups, and the batch was to have 4.*mode="requeue"'):
        run(pipeline.batch(5, 4))
    assert bank.iteration is None
    assert len(run(pipeline.batch(5, 3)).groups) == 3


@pytest.mark.parametrize("consumption", ["batch", "group"])
@pytest.mark.parametrize("num_groups", [0, -1])
def test_a_batch_of_no_groups_is_refused(consumption: Literal["batch", "group"], num_groups: int) -> None:
    plan = [PlannedDraw(5, [*make_groups("p", 3)])]
    for restored in (Restored(plan), Restored()):
        pipeline = RolloutPipeline([EnvTask(None, 1, never)], MemoryBank(), restored, consumption)
        with pytest.raises(ValueError, match="at least one"):
            run(pipeline.batch(5, num_groups))


def test_a_draw_with_lost_groups_is_never_handed_out_smaller() -> None:
    draw = PlannedDraw(5, [*make_groups("p", 2)], lost=["u7", "u9"])
    pipeline = RolloutPipeline([EnvTask(None, 1, never)], None, Restored([draw]))
    for num_groups in (2, 4):
        with pytest.raises(ReplayUnavailableError, match=r'2 of its 4 groups.*u7, u9.*mode="requeue"'):
            run(pipeline.batch(5, num_groups))
