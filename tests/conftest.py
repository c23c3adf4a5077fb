"""A bank to try things on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from arrowbank import RolloutBank


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
