"""A sample of the power cuts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_loop import a_seed, telling_the_seed
from machine import directory_in_memory, require_fuse, require_mounts

from crash.block_replay import record, replay
from crash.power_cuts import FILE_SYSTEMS, cut_often

pytestmark = pytest.mark.slow
on_each = pytest.mark.parametrize("file_system", FILE_SYSTEMS)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Where the images of disks lie: what matters is the order of writes, not how long they take."""
    require_mounts(*FILE_SYSTEMS)
    require_fuse()
    with directory_in_memory() as directory:
        yield directory


@on_each
def test_what_is_acknowledged_outlives_power_cuts(in_memory: Path, file_system: str) -> None:
    seed = a_seed()
    with telling_the_seed(seed):
        assert cut_often(in_memory, file_system, 24, seed) > 500


def test_what_is_acknowledged_outlives_disks_that_lose_any_unflushed_blocks(in_memory: Path) -> None:
    seed = a_seed()
    with telling_the_seed(seed):
        recording = record(in_memory, seed)
        assert replay(in_memory, recording, 20, seed) > 100  # on a busy machine fewer come to be recorded
