"""A bank to try things on, and places for more."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import in_memory

from arrowbank import RolloutBank

pytest.register_assert_rewrite("damaged_banks", "exit_scripts", "takeovers")  # their failed asserts then tell values


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a bank may be made."""
    return tmp_path / "bank"


@pytest.fixture
def bank(path: Path) -> Iterator[RolloutBank]:
    """A new bank, restored at 0."""
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        yield bank


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A directory for all tests of a file, in memory where there is one: thousands of copies are made in it."""
    with tempfile.TemporaryDirectory(prefix="arrowbank-", dir=in_memory()) as directory:
        yield Path(directory)
