"""Groups that a resume found pending drain within their quotas."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from pathlib import Path

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
    never,
    run,
    unhurried,
)

from arrowbank import RolloutBank
from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline, WeightedMultiTask


def test_restored_groups_come_before_fresh_ones_and_only_the_remainder_is_generated() -> None:
    a, b = Generator("a", "A"), Generator("b", "B")
    restored = Restored([], {"A": make_groups("ra", 1, "A"), "B": make_groups("rb", 3, "B")})
    pipeline = RolloutPipeline([EnvTask("A", 1, a), EnvTask("B", 1, b)], MemoryBank(), restored)
    batch = run(pipeline.batch(3, 4))
    assert names(batch) == ["ra0", "a0", "rb0", "rb1"]
    assert (a.asked, b.asked) == ([1], [])
    assert [(group.batch_id, group.index_in_batch) for group in batch.groups] == [(3, i) for i in range(4)]
    assert (batch.replayed, batch.state, batch.span, batch.offset) == (False, None, 1, 0)
    assert [name(group) for group in restored.pending["B"]] == ["rb2"]
    assert pipeline.stats() == {
        "A": counts(restored=1, fresh=1),
        "B": counts(restored=2, waiting=1),
    }


@unhurried
@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 4), st.integers(1, 4), st.integers(2, 16))
def test_restored_groups_drain_in_balanced_batches(
    num_a: int, num_b: int, weight_a: int, weight_b: int, num_groups: int
) -> None:
    a, b = Generator("a", "A"), Generator("b", "B")
    restored = Restored([], {"A": make_groups("ra", num_a, "A"), "B": make_groups("rb", num_b, "B")})
    tasks = WeightedMultiTask([EnvTask("A", weight_a, a), EnvTask("B", weight_b, b)])
    pipeline, quotas = RolloutPipeline(tasks, MemoryBank(), restored), tasks.quotas(num_groups)
    num_batches = max(math.ceil(num_a / quotas["A"]), math.ceil(num_b / quotas["B"]))

    async def drain() -> list[Batch]:
        return [await pipeline.batch(k, num_groups) for k in range(num_batches)]

    batches = asyncio.run(drain())
    assert all(Counter(group.env_id for group in batch.groups) == quotas for batch in batches)
    assert not any(restored.pending.values())
    assert sum(a.asked) == num_batches * quotas["A"] - num_a
    assert sum(b.asked) == num_batches * quotas["B"] - num_b
    assert 0 not in a.asked + b.asked
    drained = [name(group) for batch in batches for group in batch.groups if name(group).startswith("r")]  # type: ignore[union-attr]
    assert Counter(drained) == Counter([f"ra{i}" for i in range(num_a)] + [f"rb{i}" for i in range(num_b)])


def test_a_hundred_of_one_and_two_of_another_drain_to_zero() -> None:
    a, b = Generator("a", "A"), Generator("b", "B")
    restored = Restored([], {"A": make_groups("ra", 100, "A"), "B": make_groups("rb", 2, "B")})
    pipeline = RolloutPipeline([EnvTask("A", 1, a), EnvTask("B", 1, b)], MemoryBank(), restored)
    for k in range(25):
        batch = run(pipeline.batch(k, 8))
        assert Counter(group.env_id for group in batch.groups) == {"A": 4, "B": 4}
    assert not any(restored.pending.values())
    assert (a.asked, b.asked) == ([], [2] + [4] * 24)


def test_restored_groups_of_environments_that_are_not_sampled_are_refused_with_their_counts() -> None:
    restored = Restored(
        [], {"A": make_groups("a", 1), "old": make_groups("o", 3), "off": make_groups("f", 2), "gone": deque()}
    )
    with pytest.raises(ValueError, match=r"3 of 'old' \(unknown\), 2 of 'off' \(weight 0\)\."):
        RolloutPipeline([EnvTask("A", 1, never), EnvTask("off", 0, never)], None, restored)


def test_groups_without_env_id_belong_to_a_single_task_without_one() -> None:
    restored = Restored([], {"": make_groups("r", 2)})
    assert names(run(RolloutPipeline([EnvTask(None, 1, never)], None, restored).batch(0, 2))) == ["r0", "r1"]
    with pytest.raises(ValueError, match=r"2 of '' \(unknown\)"):
        RolloutPipeline([EnvTask("A", 1, never)], None, Restored([], {"": make_groups("r", 2)}))


# environments that are not sampled


def test_on_demand_groups_of_environments_that_are_not_sampled_are_evicted_with_the_reason() -> None:
    bank = MemoryBank()
    restored = Restored([], {"A": make_groups("a", 1), "old": make_groups("o", 3), "off": make_groups("f", 2)})
    tasks = [EnvTask("A", 1, never), EnvTask("off", 0, never)]
    pipeline = RolloutPipeline(tasks, bank, restored, on_unknown_env="evict")
    assert bank.evicted == (
        dict.fromkeys(("o0", "o1", "o2"), "environment 'old' is not sampled: unknown")
        | dict.fromkeys(("f0", "f1"), "environment 'off' is not sampled: weight 0")
    )
    assert {env_id: len(queue) for env_id, queue in restored.pending.items()} == {"A": 1, "old": 0, "off": 0}
    assert pipeline.stats() == {"A": counts(waiting=1), "off": counts(evicted=2), "old": counts(evicted=3)}
    assert names(run(pipeline.batch(0, 1))) == ["a0"]


def test_evicted_groups_of_an_environment_that_is_gone_stay_evicted_when_it_comes_back(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        for env_id in ("A", "old", "old"):
            bank.append(make_group("p", env_id))
    with RolloutBank.open(path) as bank:
        with pytest.raises(ValueError, match=r"2 of 'old' \(unknown\)"):
            RolloutPipeline([EnvTask("A", 1, never)], bank, bank.restore(0))
        RolloutPipeline([EnvTask("A", 1, never)], bank, bank.restore(0), on_unknown_env="evict")
    with RolloutBank.open(path) as bank:
        assert {env_id: len(queue) for env_id, queue in bank.restore(0).pending.items()} == {"A": 1}


def test_a_single_task_without_env_id_drains_all_environments_oldest_first(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        for number, env_id in enumerate(["B", "A", None, "B", "A"]):
            bank.append(make_group(f"p{number}", env_id))
    with RolloutBank.open(path) as bank:
        pipeline = RolloutPipeline([EnvTask(None, 1, Generator("f"))], bank, bank.restore(0))
        assert names(run(pipeline.batch(0, 6))) == ["p0", "p1", "p2", "p3", "p4", "f0"]
        assert pipeline.stats() == {"": counts(restored=5, fresh=1)}


def test_a_hundred_of_one_and_two_of_another_drain_to_zero_from_a_bank_on_disk(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        bank.append_many([make_group(f"a{i}", "A") for i in range(100)] + [make_group(f"b{i}", "B") for i in range(2)])
    a, b = Generator("fa", "A"), Generator("fb", "B")
    with RolloutBank.open(path) as bank:
        pipeline = RolloutPipeline([EnvTask("A", 1, a), EnvTask("B", 1, b)], bank, bank.restore(0))
        for k in range(25):
            batch = run(pipeline.batch(k, 8))
            assert Counter(group.env_id for group in batch.groups) == {"A": 4, "B": 4}
            bank.mark_consumed([str(group.uid) for group in batch.groups], k)
        assert (a.asked, b.asked) == ([], [2] + [4] * 24)
        assert pipeline.stats() == {"A": counts(restored=100), "B": counts(restored=2, fresh=98)}
        bank.checkpoint(25)
    with RolloutBank.open(path) as bank:
        assert not any(bank.restore(25).pending.values())
