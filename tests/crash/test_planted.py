"""Each planted fault is caught by its instrument."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from corruptors import SEED
from machine import require_fuse, require_mounts, require_strace

from crash.planted import PLANTED, Planted, Tracers
from crash.power_cuts import FILE_SYSTEMS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tracers(quiet: None) -> Iterator[Tracers]:
    require_strace()
    require_mounts(*FILE_SYSTEMS)
    require_fuse()
    with Tracers() as tracers:
        yield tracers


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_fault_is_caught(tracers: Tracers, planted: Planted) -> None:
    caught = planted.search(tracers, SEED)
    print(f"{planted}: {caught}")
    assert caught


def test_there_are_faults_for_each_kind_of_instrument() -> None:
    assert {planted.instrument for planted in PLANTED} == {"states", "cuts", "blocks", "kills", "fuzz", "takeovers"}
    assert len(PLANTED) >= 10
