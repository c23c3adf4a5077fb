"""A line's checkpoints as arithmetic runs: the same as a table of them, at a size that does not grow."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arrowbank.durable.checkpoints import Checkpoints

RISING = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), max_size=30)


def made(steps: list[tuple[int, int]]) -> tuple[Checkpoints, dict[int, int]]:
    """Checkpoints at rising distances, and the table they stand for."""
    checkpoints, table, at = Checkpoints(), {}, 0
    for step, session in steps:
        at += step
        checkpoints.add(at, session)
        table[at] = session
    return checkpoints, table


@given(RISING, st.integers(0, 200))
def test_it_answers_as_a_table_would(steps: list[tuple[int, int]], at: int) -> None:
    checkpoints, table = made(steps)
    assert dict(checkpoints.items()) == table
    assert [checkpoints.get(one) for one in range(200)] == [table.get(one) for one in range(200)]
    assert dict(checkpoints.upto(at).items()) == {one: by for one, by in table.items() if one <= at}
    for count in (0, 1, 2, 5, 100):
        assert checkpoints.newest(count) == sorted(table, reverse=True)[:count]


@given(RISING, st.integers(0, 100), RISING)
def test_what_is_beyond_a_line_and_its_common_past_is_what_the_line_has_not(
    steps: list[tuple[int, int]], at: int, later: list[tuple[int, int]]
) -> None:
    parent, table = made(steps)
    child, place = parent.upto(at), at
    for step, session in later:
        place += step
        child.add(place, session)
    assert dict(parent.beyond(child)) == {one: by for one, by in table.items() if one not in child}


@given(RISING, st.integers(0, 100), st.integers(1, 3))
def test_one_that_comes_late_finds_its_place(steps: list[tuple[int, int]], at: int, session: int) -> None:
    checkpoints, table = made(steps)
    checkpoints.add(at, session)
    assert dict(checkpoints.items()) == table | {at: session}


def test_a_hundred_thousand_regular_checkpoints_are_one_run() -> None:
    checkpoints = Checkpoints()
    for at in range(20, 2_000_001, 20):
        checkpoints.add(at, 1)
    assert len(checkpoints.runs) == 1
    child = checkpoints.upto(1_999_990)
    child.add(1_999_995, 2)
    assert list(checkpoints.beyond(child)) == [(2_000_000, 1)]


def test_irregular_checkpoints_are_compared_run_by_run() -> None:
    """A rollback on a run whose checkpoints follow the clock: every run is looked up, none compared with all others."""
    rng = np.random.default_rng(1)
    parent = Checkpoints()
    for at in np.cumsum(rng.integers(1, 9, 100_000)).tolist():
        parent.add(at, 1)
    child = parent.upto(200_000)
    child.add(200_001, 2)
    assert dict(parent.beyond(child)).keys() == dict(parent.items()).keys() - dict(child.items()).keys()
