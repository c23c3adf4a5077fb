"""A sample of the kills of whole training runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from kill_loop import a_seed, telling_the_seed
from machine import directory_in_memory

from crash.training_kills import kill_trainings, training_server

pytestmark = pytest.mark.slow


def test_a_training_that_is_killed_again_and_again_learns_what_its_twin_learns() -> None:
    seed = a_seed()
    with (
        telling_the_seed(seed),
        directory_in_memory() as directory,
        contextlib.closing(training_server()) as server,
    ):
        kills, _ = kill_trainings(Path(directory), 25, seed, server)
        assert kills >= 25
