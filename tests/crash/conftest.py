"""What the instruments' tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Without the warnings of banks that are crashed."""
    logger = logging.getLogger("arrowbank")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
