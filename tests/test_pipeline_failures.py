"""Errors and cancellations lose no finished group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from pipeline_doubles import (
    Generator,
    HangingGenerator,
    MemoryBank,
    Restored,
    make_group,
    make_groups,
    names,
    never,
    run,
    until,
)

from arrowbank.errors import DuplicateGroupError
from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline
from arrowbank.types import RolloutGroup


def test_when_one_generator_raises_the_others_are_closed_and_finished_groups_wait() -> None:
    bank, a = MemoryBank(), HangingGenerator("a", "A")
    boom = KeyError("sampler")
    boom.__cause__ = OSError("socket")

    async def fail(num_groups: int) -> AsyncIterator[RolloutGroup]:
        yield make_group("b0", "B")
        await until(lambda: len(bank.banked) == 2)
        raise boom

    pipeline = RolloutPipeline([EnvTask("A", 1, a), EnvTask("B", 1, fail)], bank, None)
    with pytest.raises(KeyError) as caught:
        run(pipeline.batch(0, 4))
    assert caught.value is boom and isinstance(boom.__cause__, OSError)
    assert a.is_closed
    assert sorted(bank.names, key=str) == ["a0", "b0"]
    assert [counts["waiting"] for counts in pipeline.stats().values()] == [1, 1]
    assert names(run(pipeline.batch(0, 2))) == ["a0", "b0"]


def test_an_error_of_generate_itself_surfaces() -> None:
    with pytest.raises(AssertionError, match="asked for 2"):
        run(RolloutPipeline([EnvTask(None, 1, never)], None, None).batch(0, 2))


def test_errors_of_several_generators_are_all_told() -> None:
    async def fail(num_groups: int) -> AsyncIterator[RolloutGroup]:
        try:
            await asyncio.sleep(0 if num_groups == 1 else 60)
        finally:
            raise KeyError(num_groups)
        yield

    pipeline = RolloutPipeline([EnvTask("A", 1, fail), EnvTask("B", 2, fail)], None, None)
    with pytest.raises(KeyError) as caught:
        run(pipeline.batch(0, 3))
    assert caught.value.args == (1,)
    assert caught.value.__notes__ == ["and another environment failed meanwhile: KeyError(2)"]


def test_a_generator_that_is_cancelled_from_within_is_an_error() -> None:
    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        yield make_group("a0")
        raise asyncio.CancelledError

    pipeline = RolloutPipeline([EnvTask(None, 1, generate)], None, None)
    with pytest.raises(RuntimeError, match="asked for 2 groups and ended after 1"):
        run(pipeline.batch(0, 2))
    assert pipeline.stats()[""]["waiting"] == 1


def test_a_cancelled_batch_keeps_its_finished_and_restored_groups() -> None:
    bank, a, b = MemoryBank(), HangingGenerator("a", "A"), HangingGenerator("b", "B")
    restored = Restored([], {"A": make_groups("r", 1, "A")})
    pipeline = RolloutPipeline([EnvTask("A", 1, a), EnvTask("B", 1, b)], bank, restored)

    async def cancel() -> Batch:
        batch = asyncio.create_task(pipeline.batch(0, 8))
        await until(lambda: len(bank.banked) == 2)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert a.is_closed and b.is_closed
        assert [len(asyncio.all_tasks()), len(restored.pending["A"])] == [1, 1]
        return await pipeline.batch(0, 2)

    assert names(run(cancel())) == ["r0", "b0"]
    assert pipeline.stats()["A"]["waiting"] == 1


def test_a_cancellation_waits_for_the_append_in_flight() -> None:
    bank, a = MemoryBank(), Generator("a")
    pipeline = RolloutPipeline([EnvTask(None, 1, a)], bank, None)

    async def cancel() -> Batch:
        bank.may_write.clear()
        batch = asyncio.create_task(pipeline.batch(0, 4))
        await until(lambda: bank.minted == 1)
        batch.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not batch.done()
        bank.may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert a.is_closed
        assert bank.names == ["a0"]
        return await pipeline.batch(0, 1)

    assert names(run(cancel())) == ["a0"]


def test_a_failed_append_in_a_cancelled_batch_is_told() -> None:
    bank = MemoryBank()
    pipeline = RolloutPipeline([EnvTask(None, 1, Generator("a"))], bank, None)

    async def cancel() -> Batch:
        bank.may_write.clear()
        bank.failures = [OSError(28, "No space left on device")]
        batch = asyncio.create_task(pipeline.batch(0, 4))
        await until(lambda: bank.minted == 1)
        batch.cancel()
        await asyncio.sleep(0)
        bank.may_write.set()
        with pytest.raises(OSError, match="No space"):
            await batch
        return await pipeline.batch(0, 1)

    assert names(run(cancel())) == bank.names == ["a0"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), asyncio.CancelledError()])
def test_a_group_whose_append_failed_is_banked_by_the_next_batch(failure: BaseException) -> None:
    bank, a = MemoryBank(), Generator("a")
    bank.failures = [failure]
    pipeline = RolloutPipeline([EnvTask(None, 1, a)], bank, None)
    with pytest.raises((OSError, RuntimeError)):
        run(pipeline.batch(0, 2))
    assert (bank.names, pipeline.stats()[""]["waiting"]) == ([], 1)
    bank.failures = [OSError(28, "No space left on device")]
    with pytest.raises(OSError, match="No space"):
        run(pipeline.batch(0, 2))
    assert names(run(pipeline.batch(0, 2))) == bank.names == ["a0", "a1"]
    assert a.asked == [2, 1]


def test_a_group_that_the_bank_refuses_is_told_once_and_not_retried() -> None:
    bank = MemoryBank()
    bank.failures = [DuplicateGroupError("u1")]
    pipeline = RolloutPipeline([EnvTask(None, 1, Generator("a"))], bank, None)
    with pytest.raises(DuplicateGroupError):
        run(pipeline.batch(0, 2))
    assert len(run(pipeline.batch(0, 2)).groups) == 2


def test_a_batch_that_is_too_small_changes_nothing() -> None:
    bank, restored = MemoryBank(), Restored([], {"A": make_groups("r", 1, "A")})
    pipeline = RolloutPipeline([EnvTask("A", 1, never), EnvTask("B", 1, never)], bank, restored)
    with pytest.raises(ValueError, match=r"\['A', 'B'\]"):
        run(pipeline.batch(0, 1))
    assert (bank.iteration, len(restored.pending["A"])) == (None, 1)


def test_two_batches_at_once_are_refused() -> None:
    pipeline = RolloutPipeline([EnvTask(None, 1, Generator("a"))], None, None)

    async def twice() -> Batch:
        first = asyncio.create_task(pipeline.batch(0, 2))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="still running"):
            await pipeline.batch(1, 2)
        return await first

    assert names(run(twice())) == ["a0", "a1"]
