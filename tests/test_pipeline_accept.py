"""The trainer's filter: judged as a group is finished, banked as evicted in one record, made again, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_doubles import (
    Generator,
    MemoryBank,
    Restored,
    counts,
    make_group,
    make_groups,
    name,
    names,
    run,
    unhurried,
    until,
)

from arrowbank import RolloutBank, RolloutGroup, scan
from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline
from arrowbank.pipeline.assembly import MOST_REJECTED, NO_SLOT


def all_but(*unwanted: int, prefix: str = "a") -> Callable[[RolloutGroup], bool | str]:
    gone = {f"{prefix}{number}" for number in unwanted}
    return lambda group: name(group) not in gone or f"{name(group)} is dull"


def test_a_rejected_group_is_banked_evicted_with_the_reason_and_made_again() -> None:
    bank, a = MemoryBank(), Generator("a", "A")
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None, accept=all_but(1, 2, 4))
    batch = run(pipeline.batch(3, 4))
    assert names(batch) == ["a0", "a3", "a5", "a6"]
    assert a.asked == [4, 2, 1]
    assert {name(group): bank.reason(str(name(group))) for group in bank.banked} == {
        "a0": None, "a1": "a1 is dull", "a2": "a2 is dull", "a3": None, "a4": "a4 is dull", "a5": None, "a6": None,
    }  # fmt: skip
    assert [group.index_in_batch for group in bank.banked] == [0, NO_SLOT, NO_SLOT, 1, NO_SLOT, 2, 3]
    assert pipeline.stats() == {"A": counts(fresh=4, rejected=3)}


@unhurried
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 3), st.integers(0, 2))
def test_every_batch_is_whole_and_the_generator_makes_exactly_what_was_rejected_again(
    verdicts: list[bool], num_batches: int, surplus: int
) -> None:
    bank, a = MemoryBank(), Generator("a", "A", deviate=lambda n: n + surplus)
    judged = iter(verdicts)
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None, accept=lambda group: next(judged, True))

    async def draw() -> list[Batch]:
        return [await pipeline.batch(k, 4) for k in range(num_batches)]

    handed = [group.uid for batch in asyncio.run(draw()) for group in batch.groups]
    accepted = [group.uid for group in bank.banked if group.uid not in bank.evicted]
    assert handed == accepted[: 4 * num_batches] and len(handed) == 4 * num_batches
    assert pipeline.stats()["A"] == counts(
        fresh=len(handed), rejected=len(bank.evicted), waiting=len(accepted) - len(handed)
    )
    if not surplus:
        assert sum(a.asked) == a.made == len(handed) + len(bank.evicted)


def test_a_surplus_makes_up_for_rejected_groups() -> None:
    a = Generator("a", deviate=lambda n: n + 2)
    pipeline = RolloutPipeline([EnvTask(None, 1, a)], MemoryBank(), None, accept=all_but(0, 1))
    assert names(run(pipeline.batch(0, 2))) == ["a2", "a3"]
    assert a.asked == [2]


def test_a_generator_that_never_makes_an_acceptable_group_is_an_error_that_says_why() -> None:
    bank, a = MemoryBank(), Generator("a", "A")
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None, accept=lambda group: "all rewards are 1.0")
    for time in (1, 2):
        with pytest.raises(
            RuntimeError,
            match=rf"'A' has made {MOST_REJECTED} groups in a row.*all rewards are 1.0 \({MOST_REJECTED}\)",
        ):
            run(pipeline.batch(0, 48))
        assert a.made == pipeline.stats()["A"]["rejected"] == len(bank.evicted) == MOST_REJECTED * time
        assert a.is_closed


def test_only_rejections_in_a_row_count() -> None:
    seen = iter(range(10**6))
    a = Generator("a")
    pipeline = RolloutPipeline(
        [EnvTask(None, 1, a)], None, None, accept=lambda group: next(seen) % MOST_REJECTED == MOST_REJECTED - 1
    )
    assert len(run(pipeline.batch(0, 3)).groups) == 3
    assert pipeline.stats()[""]["rejected"] == 3 * (MOST_REJECTED - 1)


def test_restored_groups_are_not_judged_again() -> None:
    restored = Restored([], {"A": make_groups("r", 2, "A")})
    pipeline = RolloutPipeline([EnvTask("A", 1, Generator("a"))], None, restored, accept=all_but(0, 1, prefix="r"))
    assert names(run(pipeline.batch(0, 3))) == ["r0", "r1", "a0"]


@pytest.mark.parametrize(("verdict", "reason"), [(False, "rejected by accept"), (np.False_, "rejected by accept")])
def test_a_plain_false_rejects_too(verdict: Any, reason: str) -> None:
    bank, verdicts = MemoryBank(), iter([verdict, np.True_])
    pipeline = RolloutPipeline([EnvTask(None, 1, Generator("a"))], bank, None, accept=lambda group: next(verdicts))
    assert names(run(pipeline.batch(0, 1))) == ["a1"]
    assert bank.reason("a0") == reason


@pytest.mark.parametrize("verdict", [None, "", 0, 1.0])
def test_a_verdict_that_may_mean_anything_is_refused_and_the_group_judged_again(verdict: Any) -> None:
    bank, a, verdicts = MemoryBank(), Generator("a"), iter([verdict, True, True])
    pipeline = RolloutPipeline([EnvTask(None, 1, a)], bank, None, accept=lambda group: next(verdicts))
    with pytest.raises(TypeError, match="expected True for a group to keep"):
        run(pipeline.batch(0, 2))
    assert (bank.names, pipeline.stats()[""]) == ([], counts(waiting=1))
    assert names(run(pipeline.batch(0, 2))) == ["a0", "a1"]
    assert a.asked == [2, 1]


def test_an_async_filter_is_refused() -> None:
    async def accept(group: RolloutGroup) -> bool:
        return True

    pipeline = RolloutPipeline([EnvTask(None, 1, Generator("a"))], None, None, accept=accept)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"accept returned <coroutine"):
        run(pipeline.batch(0, 2))
    with pytest.raises(TypeError, match="accept is a int"):
        RolloutPipeline([EnvTask(None, 1, Generator("a"))], None, None, accept=3)  # type: ignore[arg-type]


def test_an_error_of_the_filter_surfaces_and_the_group_is_judged_by_the_next_batch() -> None:
    bank, a, judged = MemoryBank(), Generator("a", "A"), iter([True, ZeroDivisionError("std"), True, True])

    def accept(group: RolloutGroup) -> bool:
        verdict = next(judged)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None, accept=accept)
    with pytest.raises(ZeroDivisionError):
        run(pipeline.batch(0, 3))
    assert pipeline.stats()["A"] == counts(waiting=2)
    assert names(run(pipeline.batch(0, 3))) == bank.names == ["a0", "a1", "a2"]


def test_a_rejected_group_whose_append_failed_is_banked_evicted_by_the_next_batch_and_judged_once() -> None:
    bank, judged = MemoryBank(), []

    def accept(group: RolloutGroup) -> bool | str:
        judged.append(name(group))
        return name(group) != "a0" or "dull"

    bank.failures = [OSError(28, "No space left on device")]
    pipeline = RolloutPipeline([EnvTask("A", 1, Generator("a"))], bank, None, accept=accept)
    with pytest.raises(OSError, match="No space"):
        run(pipeline.batch(0, 1))
    assert pipeline.stats()["A"] == counts()
    assert names(run(pipeline.batch(0, 1))) == ["a1"]
    assert (bank.reason("a0"), judged) == ("dull", ["a0", "a1"])
    assert pipeline.stats()["A"] == counts(fresh=1, rejected=1)


def test_a_cancelled_batch_has_banked_its_rejected_groups_as_evicted() -> None:
    bank = MemoryBank()
    pipeline = RolloutPipeline([EnvTask(None, 1, Generator("a"))], bank, None, accept=all_but(0))

    async def cancel() -> None:
        bank.may_write.clear()
        batch = asyncio.create_task(pipeline.batch(0, 4))
        await until(lambda: bank.minted == 1)
        batch.cancel()
        await asyncio.sleep(0)
        bank.may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(cancel())
    assert (bank.names, bank.reason("a0")) == (["a0"], "a0 is dull")


def test_in_a_bank_on_disk_a_rejected_group_is_evicted_by_its_own_record_and_never_pending(path: Path) -> None:
    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        for number in range(num_groups):
            yield make_group(f"a{number}", "A")

    with RolloutBank.open(path) as bank:
        pipeline = RolloutPipeline([EnvTask("A", 1, generate)], bank, bank.restore(0), accept=all_but(1))
        journaled = sum(file.stat().st_size for file in (path / "journal").iterdir())
        batch = run(pipeline.batch(0, 3))
        assert sum(file.stat().st_size for file in (path / "journal").iterdir()) == journaled
        assert names(batch) == ["a0", "a2", "a0"]
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        assert [name(group) for group in restored.pending["A"]] == ["a0", "a2", "a0"]
        bank.close(final=True)
    rows = scan(path).to_arrow().select(["problem_id", "evict_reason"]).to_pylist()
    assert {row["problem_id"]: row["evict_reason"] for row in rows} == {"a0": None, "a1": "a1 is dull", "a2": None}
