"""A sample of the fuzzing."""

from __future__ import annotations

import pytest
from corruptors import SEED

from crash.fuzz import TARGETS, fuzz


@pytest.mark.slow
def test_no_mutant_of_a_file_is_read_as_another_or_ends_its_reader() -> None:
    wrong = [said for _, _, said in fuzz(500 * len(TARGETS), SEED)]
    assert wrong == [[] for _ in TARGETS], f"seed {SEED}"
