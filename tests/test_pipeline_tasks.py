"""Quotas by weight, and what tasks may be."""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_doubles import make_group, names, never, run, unhurried

from arrowbank import pipeline as pipeline_package
from arrowbank.pipeline import EnvTask, RolloutPipeline, WeightedMultiTask
from arrowbank.pipeline.weights import integer_quotas
from arrowbank.types import RolloutGroup

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


# generators that are no async ones


def plain(num_groups: int) -> Iterator[RolloutGroup]:
    yield make_group("a0")


async def coroutine(num_groups: int) -> list[RolloutGroup]:
    return [make_group("a0")]


class Plain:
    def __call__(self, num_groups: int) -> Iterator[RolloutGroup]:
        yield make_group("a0")

    def method(self, num_groups: int) -> Iterator[RolloutGroup]:
        yield make_group("a0")


@pytest.mark.parametrize("generate", [plain, coroutine, functools.partial(plain, 3), Plain(), Plain().method])
def test_a_generator_that_is_no_async_one_is_refused_at_once(generate: Any) -> None:
    with pytest.raises(TypeError, match=r"generate of environment 'A' is a .*async def"):
        EnvTask("A", 1, generate)


def test_what_cannot_be_called_is_no_generator() -> None:
    with pytest.raises(TypeError, match="'A' is a list, which cannot be called"):
        EnvTask("A", 1, [make_group("a0")])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "kind"),
    [(lambda n: [make_group("a0")] * n, "list"), (lambda n: None, "NoneType"), (lambda n: coroutine(n), "coroutine")],
)
def test_what_returns_no_async_iterator_is_an_error_of_the_first_batch(result: Any, kind: str) -> None:
    pipeline = RolloutPipeline([EnvTask("A", 1, result)], None, None)
    with pytest.raises(TypeError, match=rf"environment 'A' returned a {kind}: .* async iterator"):
        run(pipeline.batch(0, 2))


def test_async_generators_in_every_form_will_do() -> None:
    class Callable:
        async def __call__(self, num_groups: int, prefix: str = "a") -> AsyncIterator[RolloutGroup]:
            for i in range(num_groups):
                yield make_group(f"{prefix}{i}")

        async def method(self, num_groups: int) -> AsyncIterator[RolloutGroup]:
            async for group in self(num_groups):
                yield group

    made = Callable()
    for generate in (made, made.method, functools.partial(made, prefix="a"), lambda n: made(n)):
        assert names(run(RolloutPipeline([EnvTask(None, 1, generate)], None, None).batch(0, 2))) == ["a0", "a1"]
