"""Generating ahead in the background, and closing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pipeline_doubles import (
    Gated,
    Generator,
    HangingGenerator,
    MemoryBank,
    PlannedDraw,
    Prompted,
    Restored,
    asyncly,
    counts,
    make_group,
    make_groups,
    name,
    names,
    quiet,
    run,
    until,
)

from arrowbank import RolloutBank, RolloutGroup
from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline
from arrowbank.pipeline.assembly import NO_SLOT

# -- ahead


@asyncly
async def test_so_many_batches_are_generated_ahead_and_one_more_for_each_that_is_handed_out() -> None:
    bank, a = MemoryBank(), Prompted("a", "A")
    async with RolloutPipeline([EnvTask("A", 1, a)], bank, None, lag=2) as pipeline:
        for k in range(5):
            batch = await pipeline.batch(k, 4)
            await quiet()  # the trainer trains, and the generator goes on
            assert names(batch) == [f"a{4 * k + i}" for i in range(4)]
            assert (a.asked, len(bank.banked)) == ([4] * (3 + k), 4 * (3 + k))
            assert pipeline.stats()["A"] == counts(fresh=4 * (k + 1), waiting=8)
    # what is made ahead is collected at the iteration at which it is finished; its slot is not known yet
    slots = {name(group): group.index_in_batch for group in bank.banked}
    assert [slots[f"a{i}"] for i in range(8)] == [0, 1, 2, 3] + [NO_SLOT] * 4
    assert bank.collected[:13] == [0] * 12 + [1]


@asyncly
async def test_without_lag_nothing_is_generated_between_batches() -> None:
    bank, a = MemoryBank(), Generator("a", "A")
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None)
    for k in range(3):
        await pipeline.batch(k, 4)
        await quiet()
        assert (a.asked, len(bank.banked)) == ([4] * (k + 1), 4 * (k + 1))
        assert len(asyncio.all_tasks()) == 1


@asyncly
async def test_nothing_is_generated_ahead_while_the_plan_lasts() -> None:
    plan = [PlannedDraw(k, [*make_groups(f"p{k}", 2, "A")]) for k in range(3)]
    a = Generator("a", "A")
    async with RolloutPipeline([EnvTask("A", 1, a)], MemoryBank(), Restored(plan), lag=2) as pipeline:
        for k in range(3):
            assert (await pipeline.batch(k, 2)).replayed
            await quiet()
            assert a.asked == []
        await pipeline.batch(3, 2)
        assert a.asked == [2, 2, 2]


@asyncly
async def test_restored_groups_count_as_generated_ahead() -> None:
    a = Generator("a", "A")
    restored = Restored([], {"A": make_groups("r", 9, "A")})
    async with RolloutPipeline([EnvTask("A", 1, a)], MemoryBank(), restored, lag=1) as pipeline:
        batches = []
        for k in range(3):
            batches.append(names(await pipeline.batch(k, 4)))
            await quiet()
    assert batches == [["r0", "r1", "r2", "r3"], ["r4", "r5", "r6", "r7"], ["r8", "a0", "a1", "a2"]]
    assert a.asked == [3, 4]


@asyncly
async def test_a_batch_is_made_of_what_was_asked_for_it_and_fast_groups_do_not_overtake() -> None:
    a = Gated()
    async with RolloutPipeline([EnvTask("A", 1, a)], MemoryBank(), None, lag=1) as pipeline:
        first = asyncio.create_task(pipeline.batch(0, 2))
        await until(lambda: len(a.asked) == 2)
        a.permit(1, 2)
        a.permit(0)
        await quiet()
        assert a.made == 3 and not first.done()
        a.permit(0)
        assert names(await first) == ["a0.0", "a0.1"]
        assert names(await pipeline.batch(1, 2)) == ["a1.0", "a1.1"]


@asyncly
async def test_group_wise_a_batch_is_made_of_what_is_finished_first() -> None:
    a = Gated()
    async with RolloutPipeline([EnvTask("A", 1, a)], MemoryBank(), None, consumption="group", lag=1) as pipeline:
        first = asyncio.create_task(pipeline.batch(0, 2))
        await until(lambda: len(a.asked) == 2)
        a.permit(1)
        await quiet()
        a.permit(0)
        assert names(await first) == ["a1.0", "a0.0"]


@asyncly
async def test_what_is_finished_first_comes_first_after_an_error_too() -> None:
    bank, a = MemoryBank(), Gated()
    async with RolloutPipeline([EnvTask("A", 1, a)], bank, None, consumption="group", lag=1) as pipeline:
        first = asyncio.create_task(pipeline.batch(0, 3))
        await until(lambda: len(a.asked) == 2)
        for call in (1, 0):
            a.permit(call)
            await quiet()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.create_task(pipeline.batch(0, 3))
        await until(lambda: len(a.asked) == 4)
        a.permit(2)
        assert names(await again) == ["a1.0", "a0.0", "a2.0"]


@asyncly
async def test_what_waits_comes_in_order_of_completion_after_an_error_too() -> None:
    bank, a, b = MemoryBank(), Gated("a"), Gated("b", "B")
    tasks = [EnvTask("A", 1, a), EnvTask("B", 1, b)]
    async with RolloutPipeline(tasks, bank, None, consumption="group", lag=2) as pipeline:
        first = asyncio.create_task(pipeline.batch(0, 2))
        await until(lambda: len(b.asked) == 3)
        for call in (2, 1, 0):  # the batch has room for one of these
            a.permit(call)
            await quiet()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        handed = []
        for k in range(3):
            batch = asyncio.create_task(pipeline.batch(k, 2))
            await until(lambda k=k: len(b.asked) == 6 + k)  # type: ignore[misc]
            b.permit(3 + k)
            handed += [str(name(group)) for group in (await batch).groups if group.env_id == "A"]
        assert handed == ["a2.0", "a1.0", "a0.0"]


@asyncly
async def test_what_is_rejected_ahead_is_made_again_ahead() -> None:
    bank, a = MemoryBank(), Prompted("a", "A")
    dull = {"a2", "a3", "a4"}
    async with RolloutPipeline(
        [EnvTask("A", 1, a)], bank, None, lag=1, accept=lambda group: name(group) not in dull
    ) as pipeline:
        assert names(await pipeline.batch(0, 2)) == ["a0", "a1"]
        await quiet()
        assert (a.asked, pipeline.stats()["A"]) == ([2, 2, 2, 1], counts(fresh=2, rejected=3, waiting=2))


@asyncly
async def test_batches_may_change_their_size_while_others_are_made_ahead() -> None:
    bank, a = MemoryBank(), Prompted("a", "A")
    async with RolloutPipeline([EnvTask("A", 1, a)], bank, None, lag=1) as pipeline:
        made = []
        for k, size in enumerate((4, 1, 6, 2, 5)):
            made += names(await pipeline.batch(k, size))
            await quiet()
        assert made == [f"a{i}" for i in range(18)]


@asyncly
async def test_an_error_of_a_generator_ahead_is_raised_by_the_batch_that_needs_it_and_once() -> None:
    bank, times = MemoryBank(), iter(range(99))

    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        call = next(times)
        for number in range(num_groups):
            if (call, number) == (1, 1):
                raise KeyError("sampler")
            yield make_group(f"a{call}.{number}", "A")

    async with RolloutPipeline([EnvTask("A", 1, generate)], bank, None, lag=1) as pipeline:
        assert names(await pipeline.batch(0, 2)) == ["a0.0", "a0.1"]
        await quiet()
        with pytest.raises(KeyError, match="sampler"):
            await pipeline.batch(1, 2)
        assert names(await pipeline.batch(1, 2)) == ["a1.0", "a2.0"]


def test_a_source_that_ends_with_the_run_does_not_fail_its_last_batch(caplog: pytest.LogCaptureFixture) -> None:
    left = 6

    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        nonlocal left
        num_made = min(num_groups, left)
        left -= num_made
        for _ in range(num_made):
            yield make_group("a", "A")

    async def train() -> list[Batch]:
        async with RolloutPipeline([EnvTask("A", 1, generate)], None, None, lag=1) as pipeline:
            return [await pipeline.batch(k, 2) for k in range(3)]

    with caplog.at_level(logging.WARNING, "arrowbank"):
        assert len(asyncio.run(train())) == 3
    assert "ended after 0" in caplog.text


def test_an_event_loop_that_ends_while_groups_are_made_ahead_loses_none() -> None:
    bank, a = MemoryBank(), HangingGenerator("a", "A")
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None, consumption="group", lag=3)

    async def first() -> Batch:
        batch = await pipeline.batch(0, 1)
        await until(lambda: len(bank.banked) == 4)
        return batch

    handed = [names(asyncio.run(first()))]
    assert a.is_closed
    handed += [names(run(pipeline.batch(k, 1))) for k in (1, 2, 3)]
    assert handed == [["a0"], ["a1"], ["a2"], ["a3"]]


# -- closing


@asyncly
async def test_closing_stops_all_generators_and_loses_no_finished_group() -> None:
    bank, a = MemoryBank(), Gated()
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None, consumption="group", lag=2)
    batch = asyncio.create_task(pipeline.batch(0, 2))
    await until(lambda: len(a.asked) == 3)
    a.permit(0, 2)
    await batch
    bank.may_write.clear()
    a.permit(1, 2)
    a.permit(2)
    await until(lambda: bank.minted == 4)
    closing = asyncio.create_task(pipeline.aclose())
    await quiet()
    assert not closing.done()
    bank.may_write.set()
    await closing
    assert (len(bank.banked), a.running, len(asyncio.all_tasks())) == (4, 0, 1)
    assert pipeline.stats()["A"] == counts(fresh=2, waiting=2)
    await pipeline.aclose()
    with pytest.raises(RuntimeError, match="was closed"):
        await pipeline.batch(1, 2)


@asyncly
async def test_a_cancelled_close_closes_all_the_same() -> None:
    bank, a = MemoryBank(), Gated()
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None, lag=1)
    batch = asyncio.create_task(pipeline.batch(0, 2))
    await until(lambda: len(a.asked) == 2)
    a.permit(0, 2)
    await batch
    bank.may_write.clear()
    a.permit(1)
    await until(lambda: bank.minted == 3)
    closing = asyncio.create_task(pipeline.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    bank.may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (len(bank.banked), a.running) == (3, 0)


@asyncly
async def test_closing_while_a_batch_is_made_ends_that_batch() -> None:
    bank, a = MemoryBank(), HangingGenerator("a", "A")
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None)
    batch = asyncio.create_task(pipeline.batch(0, 2))
    await until(lambda: len(bank.banked) == 1)
    await pipeline.aclose()
    with pytest.raises(RuntimeError, match="closed while this batch was being made"):
        await batch
    assert pipeline.stats()["A"] == counts(waiting=1)


@asyncly
async def test_closing_banks_what_failed_before_or_says_that_it_cannot() -> None:
    bank = MemoryBank()
    bank.failures = [OSError(28, "No space left on device")] * 2
    pipeline = RolloutPipeline([EnvTask("A", 1, Generator("a"))], bank, None)
    with pytest.raises(OSError, match="No space"):
        await pipeline.batch(0, 2)
    with pytest.raises(OSError, match="No space"):
        async with pipeline:
            pass
    await pipeline.aclose()
    assert bank.names == ["a0"]


@asyncly
async def test_what_the_trainer_raises_is_not_hidden_by_closing() -> None:
    bank = MemoryBank()
    bank.failures = [OSError(28, "No space left on device")] * 2
    pipeline = RolloutPipeline([EnvTask("A", 1, Generator("a"))], bank, None)
    with pytest.raises(KeyError) as caught:
        async with pipeline:
            with pytest.raises(OSError, match="No space"):
                await pipeline.batch(0, 2)
            raise KeyError("loss")
    assert "closing the pipeline failed as well" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="was closed"):
        await pipeline.batch(0, 2)
    assert pipeline.stats()["A"] == counts(waiting=1)


def test_groups_made_ahead_of_a_kill_are_pending_after_it(path: Path) -> None:
    a = Prompted("a", "A")

    async def train(pipeline: RolloutPipeline, bank: RolloutBank) -> None:
        async with pipeline:
            batch = await pipeline.batch(0, 2)
            bank.mark_consumed([str(group.uid) for group in batch.groups], 0)
            await until(lambda: bank.stats().live_groups == 6)

    with RolloutBank.open(path) as bank:
        asyncio.run(train(RolloutPipeline([EnvTask("A", 1, a)], bank, bank.restore(0), lag=2), bank))
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        finished = [name(group) for group in restored.pending["A"]]
        assert sorted(finished, key=str) == ["a2", "a3", "a4", "a5"]
        assert {restored.collected_iteration(group) for group in restored.pending["A"]} == {0}
        b = Generator("b", "A")
        pipeline = RolloutPipeline([EnvTask("A", 1, b)], bank, restored, max_lag=1)
        batches = [names(run(pipeline.batch(k, 2))) for k in (0, 1, 2)]
        assert batches == [["a0", "a1"], finished[:2], ["b0", "b1"]]
        assert pipeline.stats()["A"] == counts(replayed=2, restored=2, fresh=2, evicted=2)
    with RolloutBank.open(path) as bank:
        assert [name(group) for group in bank.restore(0).pending["A"]] == [*finished[:2], "b0", "b1"]
