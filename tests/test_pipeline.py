"""Quotas, replay, restored groups and fresh ones, against a bank that is kept in memory; numbers of batches over real
resumes, against one on disk."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank import pipeline as pipeline_package
from arrowbank.bank import RolloutBank
from arrowbank.errors import DuplicateGroupError, ReplayUnavailableError
from arrowbank.pipeline import Batch, EnvTask, RolloutPipeline, WeightedMultiTask
from arrowbank.pipeline.supply import MOST_SURPLUS, NO_SLOT
from arrowbank.pipeline.weights import integer_quotas
from arrowbank.types import Rollout, RolloutGroup

unhurried = settings(deadline=None)  # a busy machine is no falsifying example


class MemoryBank:
    """Keeps a copy of each group as it was at append, and the iteration it was collected at."""

    def __init__(self) -> None:
        self.iteration: int | None = None
        self.banked: list[RolloutGroup] = []
        self.collected: list[int | None] = []
        self.failures: list[BaseException] = []
        """One is raised by each of the next appends."""
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._failed: set[str] = set()
        self.minted = 0

    def begin_iteration(self, iteration: int) -> None:
        self.iteration = iteration

    async def append_async(self, group: RolloutGroup, *, split: str = "train", source_index: int | None = None) -> str:
        if group.uid is not None and group.uid not in self._failed:
            raise DuplicateGroupError(group.uid)
        if group.uid is None:
            self.minted += 1
            group.uid = f"u{self.minted}"
        await self.may_write.wait()
        if self.failures:
            self._failed.add(group.uid)
            raise self.failures.pop(0)
        self._failed.discard(group.uid)
        self.banked.append(group.model_copy(deep=True))
        self.collected.append(self.iteration)
        return group.uid

    @property
    def names(self) -> list[str | None]:
        return [name(group) for group in self.banked]


@dataclass
class PlannedDraw:
    iteration: int
    groups: list[RolloutGroup]
    index: int = 0
    span: int = 1
    offset: int = 0
    state: bytes | None = None
    lost: list[str] = field(default_factory=list)


@dataclass
class Restored:
    draws: list[PlannedDraw] = field(default_factory=list)
    pending: dict[str, deque[RolloutGroup]] = field(default_factory=dict)


class Generator:
    """Makes groups named ``a0, a1 …`` and remembers what it was asked for; ``deviate`` changes how many it yields."""

    def __init__(self, prefix: str, env_id: str | None = None, deviate: Callable[[int], int] = lambda n: n) -> None:
        self.prefix = prefix
        self.env_id = env_id
        self.deviate = deviate
        self.asked: list[int] = []
        self.made = 0
        self.is_closed = False

    async def __call__(self, num_groups: int) -> AsyncIterator[RolloutGroup]:
        self.asked.append(num_groups)
        self.is_closed = False
        try:
            for _ in range(self.deviate(num_groups)):
                await asyncio.sleep(0)
                self.made += 1
                yield make_group(f"{self.prefix}{self.made - 1}", self.env_id)
        finally:
            self.is_closed = True


class HangingGenerator(Generator):
    """Makes one group and then works until it is cancelled."""

    async def __call__(self, num_groups: int) -> AsyncIterator[RolloutGroup]:
        self.asked.append(num_groups)
        try:
            self.made += 1
            yield make_group(f"{self.prefix}{self.made - 1}", self.env_id)
            await asyncio.Event().wait()
        finally:
            self.is_closed = True


def make_group(problem_id: str, env_id: str | None = None, uid: str | None = None) -> RolloutGroup:
    members = [Rollout(trajectory=["2+2=4"], reward=1.0, env_id=env_id, problem_id=problem_id) for _ in range(2)]
    return RolloutGroup(rollouts=[*members], uid=uid)


def make_groups(prefix: str, count: int, env_id: str | None = None) -> deque[RolloutGroup]:
    return deque(make_group(f"{prefix}{i}", env_id, uid=f"{prefix}{i}") for i in range(count))


def name(group: RolloutGroup) -> str | None:
    return group[0].problem_id


def names(batch: Batch) -> list[str | None]:
    return [name(group) for group in batch.groups]


def never(num_groups: int) -> AsyncIterator[RolloutGroup]:
    raise AssertionError(f"asked for {num_groups} groups")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, Batch]) -> Batch:
    return asyncio.run(work)


# quotas


WEIGHTS = st.dictionaries(
    st.text(alphabet="abcdefgh", min_size=1, max_size=2),
    st.one_of(st.just(0.0), st.floats(1e-9, 1e9), st.integers(1, 5).map(float), st.just(1.7e308)),
    min_size=1,
    max_size=8,
).filter(lambda weights: any(weights.values()))


@unhurried
@given(WEIGHTS, st.integers(0, 300))
def test_quotas_fill_the_batch_with_at_least_one_of_each_weighted_environment(
    weights: dict[str, float], surplus: int
) -> None:
    num_groups = sum(weight > 0 for weight in weights.values()) + surplus
    quotas = integer_quotas(weights, num_groups)
    assert list(quotas) == list(weights)
    assert sum(quotas.values()) == num_groups
    assert all((quotas[env_id] >= 1) == (weight > 0) for env_id, weight in weights.items())


@unhurried
@given(WEIGHTS, st.integers(0, 300))
def test_a_heavier_environment_never_gets_less_than_a_lighter_one(weights: dict[str, float], surplus: int) -> None:
    quotas = integer_quotas(weights, sum(weight > 0 for weight in weights.values()) + surplus)
    ordered = sorted(weights, key=lambda env_id: (weights[env_id], quotas[env_id]))
    assert [quotas[env_id] for env_id in ordered] == sorted(quotas.values())


@unhurried
@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(1, 1000))
def test_quotas_are_within_one_of_the_exact_shares_where_the_minimum_does_not_bind(
    weights: list[int], num_groups: int
) -> None:
    num_groups = max(num_groups, math.ceil(sum(weights) / min(weights)))
    quotas = integer_quotas({str(i): weight for i, weight in enumerate(weights)}, num_groups)
    for quota, weight in zip(quotas.values(), weights, strict=True):
        assert abs(quota * sum(weights) - num_groups * weight) < sum(weights)


@unhurried
@given(WEIGHTS, st.integers(0, 300))
def test_nobody_gets_more_than_the_exact_share_rounded_up_but_by_the_minimum(
    weights: dict[str, float], surplus: int
) -> None:
    num_groups = sum(weight > 0 for weight in weights.values()) + surplus
    whole = math.fsum(weight / max(weights.values()) for weight in weights.values())
    for env_id, quota in integer_quotas(weights, num_groups).items():
        exact = num_groups * (weights[env_id] / max(weights.values())) / whole
        assert quota <= max(1, math.ceil(exact + 1e-6))


def test_the_minimum_is_taken_from_the_most_over_served() -> None:
    assert integer_quotas({"a": 49.0, "b": 49.9, "c": 1.0, "d": 0.1}, 10) == {"a": 4, "b": 4, "c": 1, "d": 1}
    assert integer_quotas({"a": 56.0, "b": 43.0, "c": 1.0}, 10) == {"a": 5, "b": 4, "c": 1}


def test_ties_go_to_the_earlier_environment() -> None:
    assert integer_quotas({"b": 1.0, "a": 1.0, "c": 1.0}, 4) == {"b": 2, "a": 1, "c": 1}


def test_a_batch_smaller_than_the_weighted_environments_is_refused_by_their_names() -> None:
    with pytest.raises(ValueError, match=r"batch of 1 .* 2 weighted environments \['math', 'code'\]"):
        integer_quotas({"math": 1.0, "chat": 0.0, "code": 2.0}, 1)


def test_quotas_without_any_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="none of the environments"):
        integer_quotas({"math": 0.0}, 4)


# tasks


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="'math'"):
        EnvTask("math", weight, never)
    with pytest.raises(ValueError, match="'math'"):
        integer_quotas({"math": weight}, 4)


def test_contradictory_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="weight above 0"):
        WeightedMultiTask([])
    with pytest.raises(ValueError, match=r"\['a'\] has a weight above 0"):
        WeightedMultiTask([EnvTask("a", 0, never)])
    with pytest.raises(ValueError, match=r"same env_id: \['a'\]"):
        WeightedMultiTask([EnvTask("a", 1, never), EnvTask("a", 2, never)])
    with pytest.raises(ValueError, match="no env_id"):
        WeightedMultiTask([EnvTask("a", 1, never), EnvTask(None, 2, never)])


def test_an_environment_of_weight_0_is_known_but_has_no_quota() -> None:
    tasks = WeightedMultiTask([EnvTask("a", 3, never), EnvTask("b", 0, never), EnvTask("c", 1, never)])
    assert tasks.env_ids == ["a", "b", "c"]
    assert tasks.weighted_env_ids == ["a", "c"]
    assert tasks.quotas(8) == {"a": 6, "b": 0, "c": 2}


def test_the_package_exports_its_public_names_sorted() -> None:
    assert pipeline_package.__all__ == ["Batch", "EnvTask", "RolloutPipeline", "WeightedMultiTask"]


# replay


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


def test_a_draw_with_lost_groups_is_never_handed_out_smaller() -> None:
    draw = PlannedDraw(5, [*make_groups("p", 2)], lost=["u7", "u9"])
    pipeline = RolloutPipeline([EnvTask(None, 1, never)], None, Restored([draw]))
    for num_groups in (2, 4):
        with pytest.raises(ReplayUnavailableError, match=r'2 of its 4 groups.*u7, u9.*mode="requeue"'):
            run(pipeline.batch(5, num_groups))


# restored groups


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
        "A": {"replayed": 0, "restored": 1, "fresh": 1, "waiting": 0},
        "B": {"replayed": 0, "restored": 2, "fresh": 0, "waiting": 1},
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


# fresh groups


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
    assert pipeline.stats() == {"": {"replayed": 0, "restored": 0, "fresh": 4, "waiting": 0}}


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
    assert pipeline.stats()["A"] == {"replayed": 0, "restored": 0, "fresh": 0, "waiting": 3}
    a.deviate = lambda n: n
    assert names(run(pipeline.batch(0, 4))) == ["r0", "a0", "a1", "a2"]
    assert a.asked == [3, 1]
    assert pipeline.stats()["A"] == {"replayed": 0, "restored": 1, "fresh": 3, "waiting": 0}


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


# errors and cancellation


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


# numbers of batches over resumes of a bank on disk


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
    assert again.pipeline.stats()["A"] == {"replayed": 8 - 2 * checkpoint, "restored": 3, "fresh": 3, "waiting": 0}
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
