"""What is too old to be trained on: evicted with its reason at hand-out, and made again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_doubles import (
    Generator,
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
)

from arrowbank import RolloutGroup
from arrowbank.pipeline import EnvTask, RolloutPipeline
from arrowbank.pipeline.assembly import MOST_REJECTED


def aged(prefix: str, version: int | None, env_id: str = "A", uid: str | None = None) -> RolloutGroup:
    group = make_group(prefix, env_id, uid)
    if version is not None:
        group[1].policy_versions = [(0, 0, version + 1), (0, 5, version)]  # type: ignore[list-item]
    return group


def test_groups_that_are_too_old_are_evicted_with_the_reason_and_made_again() -> None:
    bank, a = MemoryBank(), Generator("a", "A")
    queue = make_groups("r", 0)
    queue.extend(aged(f"r{version}", version, uid=f"r{version}") for version in (3, 9, 4, 7, 8))
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, Restored([], {"A": queue}), max_lag=2)
    assert names(run(pipeline.batch(10, 4))) == ["r9", "r8", "a0", "a1"]
    assert bank.evicted == {
        "r3": "lag 7 is over max_lag 2", "r4": "lag 6 is over max_lag 2", "r7": "lag 3 is over max_lag 2",
    }  # fmt: skip
    assert a.asked == [2]
    assert pipeline.stats()["A"] == counts(restored=2, fresh=2, evicted=3)


def test_where_no_policy_version_is_given_the_iteration_of_the_finish_counts() -> None:
    bank = MemoryBank()
    collected = {"r0": 6, "r1": 7, "r2": 8}  # and of r3 nothing is known
    restored = Restored([], {"A": make_groups("r", 4, "A")}, collected)
    pipeline = RolloutPipeline([EnvTask("A", 1, Generator("a"))], bank, restored, max_lag=1)
    assert names(run(pipeline.batch(8, 3))) == ["r1", "r2", "r3"]
    assert bank.evicted == {"r0": "lag 2 is over max_lag 1"}


def test_the_lag_is_checked_at_each_hand_out() -> None:
    bank, a = MemoryBank(), Generator("a", "A", deviate=lambda n: n + 3)
    pipeline = RolloutPipeline([EnvTask("A", 1, a)], bank, None, max_lag=1)
    assert names(run(pipeline.batch(0, 1))) == ["a0"]
    assert names(run(pipeline.batch(1, 1))) == ["a1"]
    assert names(run(pipeline.batch(2, 1))) == ["a4"]
    assert sorted(bank.evicted.values()) == ["lag 2 is over max_lag 1"] * 2
    assert pipeline.stats()["A"] == counts(fresh=3, evicted=2, waiting=3)


def test_a_replay_is_exempt_from_max_lag() -> None:
    bank = MemoryBank()
    plan = [PlannedDraw(0, [aged("p0", 0), aged("p1", 0)])]
    pipeline = RolloutPipeline([EnvTask("A", 1, never)], bank, Restored(plan), max_lag=0)
    assert names(run(pipeline.batch(99, 2))) == ["p0", "p1"]
    assert bank.evicted == {}


def test_a_generator_whose_groups_are_always_too_old_is_an_error() -> None:
    async def generate(num_groups: int) -> AsyncIterator[RolloutGroup]:
        for _ in range(num_groups):
            yield aged("a", 3)  # a version, but of something else than iterations

    bank = MemoryBank()
    pipeline = RolloutPipeline([EnvTask("A", 1, generate)], bank, None, max_lag=5)
    with pytest.raises(RuntimeError, match=rf"{MOST_REJECTED} groups in a row.*iteration 500.*policy_versions"):
        run(pipeline.batch(500, 32))
    assert len(bank.evicted) == MOST_REJECTED


def test_an_eviction_that_fails_changes_no_order() -> None:
    bank = MemoryBank()
    restored = Restored([], {"A": make_groups("r", 4, "A")}, {"r0": 9, "r1": 1, "r2": 0, "r3": 9})
    pipeline = RolloutPipeline([EnvTask("A", 1, never)], bank, restored, max_lag=1)
    bank.failures = [OSError(28, "No space left on device")]
    with pytest.raises(OSError, match="No space"):
        run(pipeline.batch(9, 2))
    assert [name(group) for group in restored.pending["A"]] == ["r0", "r1", "r2", "r3"]
    assert names(run(pipeline.batch(9, 2))) == ["r0", "r3"]
    assert pipeline.stats()["A"] == counts(restored=2, evicted=2)


def test_of_evictions_for_several_reasons_those_that_fail_are_made_again() -> None:
    class FullBank(MemoryBank):
        def evict(self, uids: Iterable[str], reason: str) -> None:
            if self.evicted and not self.is_roomy:
                raise OSError(28, "No space left on device")
            super().evict(uids, reason)

        is_roomy = False

    bank = FullBank()
    restored = Restored([], {"A": make_groups("r", 4, "A")}, {"r0": 0, "r1": 1, "r2": 0, "r3": 1})
    pipeline = RolloutPipeline([EnvTask("A", 1, Generator("a"))], bank, restored, max_lag=1)
    with pytest.raises(OSError, match="No space"):
        run(pipeline.batch(9, 2))
    assert sorted(bank.evicted) == ["r0", "r2"]
    assert [name(group) for group in restored.pending["A"]] == ["r1", "r3"]
    bank.is_roomy = True
    assert names(run(pipeline.batch(9, 2))) == ["a0", "a1"]
    assert sorted(bank.evicted) == ["r0", "r1", "r2", "r3"]


@unhurried
@given(
    st.lists(st.integers(0, 12), max_size=20),
    st.integers(0, 6),
    st.integers(1, 5),
    st.sampled_from(["batch", "group"]),
    st.integers(0, 2),
)
def test_no_batch_ever_has_a_group_that_is_too_old(
    collected: list[int], max_lag: int, size: int, consumption: Any, lag: int
) -> None:
    bank, a = MemoryBank(), Generator("a", "A")
    known = {f"r{i}": at for i, at in enumerate(collected)}
    restored = Restored([], {"A": make_groups("r", len(collected), "A")}, known)

    async def train() -> None:
        async with RolloutPipeline(
            [EnvTask("A", 1, a)], bank, restored, consumption, lag=min(lag, max_lag), max_lag=max_lag
        ) as pipeline:
            for k in range(13, 20):
                batch = await pipeline.batch(k, size)
                ages = known | {
                    str(group.uid): int(at or 0) for group, at in zip(bank.banked, bank.collected, strict=True)
                }
                assert len(batch.groups) == size
                assert all(k - ages[str(group.uid)] <= max_lag for group in batch.groups)

    asyncio.run(train())
    assert all(13 - at > max_lag or 20 - at > max_lag for uid, at in known.items() if uid in bank.evicted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lag": -1}, "0 or more"),
        ({"max_lag": -1}, "0 or more"),
        ({"lag": 2, "max_lag": 1}, "would be evicted"),
        ({"consumption": "rollout"}, 'use "batch" or "group"'),
        ({"on_unknown_env": "drop"}, 'use "raise" or "evict"'),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutPipeline([EnvTask("A", 1, never)], None, None, **options)
