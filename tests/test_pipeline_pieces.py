"""Group-wise consumption: in order of completion, within the quotas, in pieces; a batch that a kill cut short."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_doubles import (
    Generator,
    HangingGenerator,
    MemoryBank,
    PlannedDraw,
    Restored,
    counts,
    make_group,
    make_groups,
    name,
    names,
    never,
    run,
    unhurried,
    until,
)

from arrowbank import RolloutBank, RolloutGroup
from arrowbank.errors import ReplayUnavailableError
from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline
from arrowbank.pipeline.pipeline import Consumption


def group_wise(generate: Any, bank: Any = None, restored: Any = None, **options: Any) -> RolloutPipeline:
    return RolloutPipeline([EnvTask("A", 1, generate)], bank, restored, consumption="group", **options)


async def gathered(pipeline: RolloutPipeline, iteration: int, num_groups: int) -> list[Batch]:
    return [piece async for piece in pipeline.pieces(iteration, num_groups)]


def pieces_of(pipeline: RolloutPipeline, iteration: int, num_groups: int) -> list[list[str | None]]:
    return [names(piece) for piece in asyncio.run(gathered(pipeline, iteration, num_groups))]


class InTurn:
    """Two environments whose groups are finished in a given order."""

    def __init__(self, order: str) -> None:
        self.order = order
        self.at = 0

    def task(self, env_id: str, weight: float) -> EnvTask:
        async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
            for _ in range(num_groups):
                while self.order[self.at : self.at + 1] not in (env_id, ""):
                    await asyncio.sleep(0)
                self.at += 1
                yield make_group(f"{env_id}{self.at - 1}", env_id)
                await asyncio.sleep(0.001)  # its append is over before the next one is finished

        return EnvTask(env_id, weight, generate)


# -- order


def test_groups_come_in_order_of_completion_whatever_their_environment() -> None:
    source = InTurn("BAABBA")
    tasks = [source.task("A", 1), source.task("B", 1)]
    batch = run(RolloutPipeline(tasks, MemoryBank(), None, consumption="group").batch(4, 6))
    assert names(batch) == ["B0", "A1", "A2", "B3", "B4", "A5"]
    assert [(group.batch_id, group.index_in_batch) for group in batch.groups] == [(4, slot) for slot in range(6)]


def test_the_first_piece_does_not_wait_for_the_rest() -> None:
    bank, a = MemoryBank(), HangingGenerator("a", "A")

    async def first() -> None:
        pipeline = group_wise(a, bank)
        async with asyncio.timeout(5), pipeline:
            pieces = pipeline.pieces(0, 4)
            assert names(await anext(pieces)) == ["a0"]
        assert a.is_closed

    asyncio.run(first())


def test_restored_groups_come_first_each_environment_in_turn() -> None:
    restored = Restored([], {"A": make_groups("ra", 3, "A"), "B": make_groups("rb", 2, "B")})
    tasks = [EnvTask("A", 1, never), EnvTask("B", 1, Generator("b"))]
    pipeline = RolloutPipeline(tasks, None, restored, consumption="group")
    assert pieces_of(pipeline, 0, 6) == [["ra0"], ["rb0"], ["ra1"], ["rb1"], ["ra2"], ["b0"]]
    assert pipeline.stats() == {"A": counts(restored=3), "B": counts(restored=2, fresh=1)}


@unhurried
@given(st.permutations(list("AAAAAABBB")), st.booleans())
def test_no_environment_is_over_its_quota_in_any_batch(order: list[str], by_piece: bool) -> None:
    source = InTurn("".join(order))
    tasks = [source.task("A", 2), source.task("B", 1)]

    async def train() -> list[list[RolloutGroup]]:
        batches = []
        async with RolloutPipeline(tasks, MemoryBank(), None, consumption="group", lag=2) as pipeline:
            for k in range(3):
                pieces = await gathered(pipeline, k, 3) if by_piece else [await pipeline.batch(k, 3)]
                batches.append([group for piece in pieces for group in piece.groups])
        return batches

    batches = asyncio.run(train())
    assert all(Counter(group.env_id for group in batch) == {"A": 2, "B": 1} for batch in batches)
    assert all([g.index_in_batch for g in batch] == [0, 1, 2] for batch in batches)
    for env_id in "AB":  # in each environment, first finished first handed out
        numbers = [int(str(name(g))[1:]) for batch in batches for g in batch if g.env_id == env_id]
        assert numbers == sorted(numbers)


def test_pieces_are_for_group_wise_consumption() -> None:
    with pytest.raises(ValueError, match='consumption="group"'):
        RolloutPipeline([EnvTask("A", 1, never)], None, None).pieces(0, 4)


# -- errors in the middle of a batch


def test_after_an_error_the_same_batch_goes_on_where_it_was() -> None:
    bank, a = MemoryBank(), Generator("a", "A", deviate=lambda n: 2 if n == 4 else n)

    async def train() -> list[list[str | None]]:
        pipeline = group_wise(a, bank)
        pieces = pipeline.pieces(0, 4)
        given = []
        with pytest.raises(RuntimeError, match="asked for 4 groups and ended after 2"):
            async for piece in pieces:
                given.append(names(piece))
        return given + [names(piece) async for piece in pieces]

    assert asyncio.run(train()) == [["a0"], ["a1"], ["a2"], ["a3"]]
    assert a.asked == [4, 2]


def test_a_cancelled_wait_for_a_piece_stops_the_generators_and_loses_none() -> None:
    bank, a = MemoryBank(), HangingGenerator("a", "A")

    async def train() -> None:
        pipeline = group_wise(a, bank)
        pieces = pipeline.pieces(0, 3)
        await anext(pieces)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(pieces)
        assert a.is_closed and len(asyncio.all_tasks()) == 1
        assert names(await anext(pieces)) == ["a1"]
        await pipeline.aclose()

    asyncio.run(train())


def test_a_batch_that_was_left_goes_into_the_next_one_and_its_iterator_ends_in_an_error() -> None:
    bank, a = MemoryBank(), Generator("a", "A")

    async def train() -> None:
        pipeline = group_wise(a, bank)
        left = pipeline.pieces(0, 4)
        assert names(await anext(left)) == ["a0"]
        assert [names(piece) for piece in await gathered(pipeline, 1, 4)] == [["a1"], ["a2"], ["a3"], ["a4"]]
        assert a.asked == [4, 1]
        with pytest.raises(RuntimeError, match="the next batch has begun"):
            await anext(left)
        left = pipeline.pieces(2, 4)
        await pipeline.batch(3, 4)
        with pytest.raises(RuntimeError, match="the next batch has begun"):
            await anext(left)

    asyncio.run(train())


def test_a_failed_group_wise_batch_hands_out_nothing() -> None:
    bank, a = MemoryBank(), Generator("a", "A", deviate=lambda n: n - 1)
    plan = [PlannedDraw(0, [*make_groups("p", 2, "A")], state=b"at p")]
    restored = Restored(plan, {"A": make_groups("r", 1, "A")})
    pipeline = group_wise(a, bank, restored)
    with pytest.raises(RuntimeError, match="ended after 1"):
        run(pipeline.batch(0, 5))
    assert pipeline.stats() == {"A": counts(waiting=2)}
    batch = run(pipeline.batch(0, 4))
    assert (names(batch), batch.replayed, batch.state) == (["p0", "p1", "r0", "a0"], False, b"at p")


# -- a planned batch in pieces


def planned(*sizes: int, iteration: int = 5, **fields: Any) -> list[PlannedDraw]:
    """Draws of one iteration, in pieces of these sizes."""
    numbers = iter(range(99))
    return [
        PlannedDraw(
            iteration,
            [make_group(f"p{iteration}.{next(numbers)}", "A") for _ in range(size)],
            index=index,
            state=b"%d" % index,
            **fields,
        )
        for index, size in enumerate(sizes)
    ]


def test_planned_pieces_come_back_as_they_were_marked_with_their_states() -> None:
    pipeline = group_wise(never, MemoryBank(), Restored(planned(1, 2, 1) + planned(4, iteration=6)))
    first, second = (asyncio.run(gathered(pipeline, k, 4)) for k in (5, 6))
    assert [names(piece) for piece in first] == [["p5.0"], ["p5.1", "p5.2"], ["p5.3"]]
    assert [(piece.replayed, piece.state) for piece in first] == [(True, b"0"), (True, b"1"), (True, b"2")]
    assert [group.index_in_batch for piece in first for group in piece.groups] == [0, 1, 2, 3]
    assert [names(piece) for piece in second] == [["p6.0", "p6.1", "p6.2", "p6.3"]]


def test_planned_pieces_come_back_together_as_a_batch() -> None:
    plan = planned(1, 2, 1) + planned(4, iteration=6)
    pipeline = group_wise(never, MemoryBank(), Restored(plan))
    batch = run(pipeline.batch(5, 4))
    assert (names(batch), batch.replayed, batch.state) == (["p5.0", "p5.1", "p5.2", "p5.3"], True, b"2")
    assert run(pipeline.batch(6, 4)).replayed


def test_the_last_planned_batch_is_topped_up_within_the_quotas_when_a_kill_cut_it_short() -> None:
    a, b = Generator("a", "A"), Generator("b", "B")
    plan = planned(4) + planned(1, 1, iteration=6)
    plan[2].groups[0][0].env_id = plan[2].groups[0][1].env_id = "B"
    restored = Restored(plan, {"B": make_groups("rb", 1, "B")})
    pipeline = RolloutPipeline([EnvTask("A", 1, a), EnvTask("B", 1, b)], MemoryBank(), restored, consumption="group")
    assert run(pipeline.batch(5, 4)).replayed
    pieces = asyncio.run(gathered(pipeline, 6, 4))
    assert [names(piece) for piece in pieces] == [["p6.0"], ["p6.1"], ["rb0"], ["a0"]]
    assert [(piece.replayed, piece.state) for piece in pieces] == [
        (True, b"0"), (True, b"1"), (False, None), (False, None),
    ]  # fmt: skip
    assert (a.asked, b.asked) == ([1], [])
    assert pipeline.stats() == {"A": counts(replayed=5, fresh=1), "B": counts(replayed=1, restored=1)}


def test_no_other_planned_batch_is_topped_up_and_none_of_whole_batch_consumption() -> None:
    plan = planned(2) + planned(4, iteration=6)
    with pytest.raises(ValueError, match=r'iteration 5, from draw 0 on, have 2 groups, .* to have 4: .*"requeue"'):
        run(group_wise(never, None, Restored(plan)).batch(5, 4))
    with pytest.raises(ValueError, match=r"iteration 5, from draw 0 on, have 1 \+ 2 \+ 2 groups"):
        group_wise(never, None, Restored(planned(1, 2, 2))).pieces(5, 4)
    with pytest.raises(ValueError, match="has 2 groups, and the batch was to have 4"):
        run(RolloutPipeline([EnvTask("A", 1, never)], None, Restored(planned(2))).batch(5, 4))


def test_a_batch_whose_training_a_checkpoint_holds_in_part_is_not_topped_up() -> None:
    with pytest.raises(ValueError, match="have 2 groups, and the batch was to have 4"):
        group_wise(never, None, Restored(planned(2, span=3, offset=1))).pieces(6, 4)


def test_pieces_with_lost_groups_or_different_spans_are_refused() -> None:
    lost = planned(1, 1)
    lost[1].lost = ["u7"]
    with pytest.raises(ReplayUnavailableError, match=r"draw 1 of iteration 5.*u7"):
        group_wise(never, None, Restored(lost)).pieces(5, 3)
    mixed = planned(1, 1)
    mixed[1].span = 2
    with pytest.raises(ValueError, match=r"different numbers of optimizer steps: \[1, 2\]"):
        group_wise(never, None, Restored(mixed)).pieces(5, 2)


def test_a_top_up_gives_what_the_planned_groups_lack_of_the_quotas() -> None:
    a, b = Generator("a", "A"), Generator("b", "B")
    restored = Restored(planned(1, 1))  # both of A
    pipeline = RolloutPipeline([EnvTask("A", 1, a), EnvTask("B", 1, b)], None, restored, consumption="group")
    assert Counter(group.env_id for group in run(pipeline.batch(5, 6)).groups) == {"A": 3, "B": 3}
    assert (a.asked, b.asked) == ([1], [3])


@pytest.mark.parametrize("weights", [(1, 3), (3, 1), (1, 1)])
def test_a_top_up_fills_the_batch_when_the_weights_have_changed(weights: tuple[int, int]) -> None:
    tasks = [EnvTask("A", weights[0], Generator("a")), EnvTask("B", weights[1], Generator("b"))]
    plan = planned(3)
    pipeline = RolloutPipeline(tasks, None, Restored(plan), consumption="group")
    batch = run(pipeline.batch(5, 4))
    assert names(batch)[:3] == ["p5.0", "p5.1", "p5.2"] and len(batch.groups) == 4


def test_several_whole_batches_of_one_iteration_stay_batches() -> None:
    pipeline = group_wise(never, None, Restored(planned(2, 2)))
    assert [names(run(pipeline.batch(5, 2))) for _ in range(2)] == [["p5.0", "p5.1"], ["p5.2", "p5.3"]]


# -- on disk: killed in the middle of a batch


class Acknowledging:
    """The bank, and which groups it has acknowledged, over all lives."""

    def __init__(self, bank: RolloutBank, uids: list[str]) -> None:
        self.bank, self.uids = bank, uids
        self.begin_iteration, self.evict = bank.begin_iteration, bank.evict

    async def append_async(self, group: RolloutGroup, **options: Any) -> str:
        self.uids.append(await self.bank.append_async(group, **options))
        return self.uids[-1]


@pytest.mark.parametrize("marks_pieces", [True, False])
@pytest.mark.parametrize("killed_after", range(1, 9))
def test_a_batch_killed_in_its_middle_goes_on_with_the_groups_that_it_had(
    marks_pieces: bool, killed_after: int, path: Path
) -> None:
    acknowledged: list[str] = []
    trained: list[tuple[int, str]] = []

    async def train(bank: RolloutBank, pieces_left: int) -> None:
        observed = Acknowledging(bank, acknowledged)
        pipeline = group_wise(Generator("a", "A"), observed, bank.restore(0))
        for k in range(2):
            uids = []
            async for piece in pipeline.pieces(k, 4):
                uids += [str(group.uid) for group in piece.groups]
                trained.extend((k, str(group.uid)) for group in piece.groups)
                if marks_pieces:
                    bank.mark_consumed(uids[-len(piece.groups) :], k, state=b"after %d" % len(uids))
                pieces_left -= 1
                if not pieces_left:
                    return
            if not marks_pieces:
                bank.mark_consumed(uids, k)

    killed = RolloutBank.open(path)
    asyncio.run(train(killed, killed_after))
    before, kept = trained.copy(), set(acknowledged)
    trained.clear()
    with RolloutBank.open(path, takeover="force") as bank:
        killed.close()
        asyncio.run(train(bank, 99))
        assert bank.restore(0).report.pending_groups == 0
    assert trained[: len(before)] == before
    assert [k for k, _ in trained] == [0] * 4 + [1] * 4
    assert kept <= {uid for _, uid in trained} and len({uid for _, uid in trained}) == 8
    assert len(acknowledged) <= 8  # nothing is made twice; one may be durable that was not acknowledged


def test_pieces_marked_again_keep_their_states_through_a_second_kill(path: Path) -> None:
    acknowledged: list[str] = []
    for life in range(3):
        with RolloutBank.open(path, takeover="force") as bank:
            restored = bank.restore(0)
            assert [draw.state for draw in restored.draws] == [b"p%d" % number for number in range(life)]

            async def train(bank: RolloutBank = bank, restored: Any = restored, steps: int = life + 1) -> None:
                pipeline = group_wise(Generator("a", "A"), Acknowledging(bank, acknowledged), restored)
                pieces = pipeline.pieces(0, 4)
                for number in range(steps):
                    piece = await anext(pieces)
                    state = piece.state if piece.replayed else b"p%d" % number
                    bank.mark_consumed([str(group.uid) for group in piece.groups], 0, state=state)
                await pipeline.aclose()

            asyncio.run(train())
    assert len(acknowledged) <= 4


@pytest.mark.parametrize("consumption", ["batch", "group"])
def test_a_topped_up_batch_is_one_draw_after_it(consumption: Consumption, path: Path) -> None:
    a = Generator("a", "A")
    with RolloutBank.open(path) as bank:
        pipeline = group_wise(a, bank, bank.restore(0))
        first = run(pipeline.batch(0, 2))
        for group in first.groups:
            bank.mark_consumed([str(group.uid)], 0)
    with RolloutBank.open(path) as bank:
        batch = run(group_wise(a, bank, bank.restore(0)).batch(0, 4))
        assert names(batch) == ["a0", "a1", "a2", "a3"]
        bank.mark_consumed([str(group.uid) for group in batch.groups], 0)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        assert len(restored.draws) == 1
        pipeline = RolloutPipeline([EnvTask("A", 1, never)], bank, restored, consumption=consumption)
        assert names(run(pipeline.batch(0, 4))) == ["a0", "a1", "a2", "a3"]


def test_waiting_for_a_piece_and_for_a_batch_at_once_is_refused() -> None:
    bank, a = MemoryBank(), HangingGenerator("a", "A")

    async def twice() -> None:
        async with group_wise(a, bank) as pipeline:
            pieces = pipeline.pieces(0, 2)
            await anext(pieces)
            waiting = asyncio.ensure_future(anext(pieces))
            await until(lambda: len(bank.banked) == 1)
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="still running"):
                await pipeline.batch(1, 2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(twice())
