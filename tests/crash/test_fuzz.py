"""A sample of the fuzzing, and faults that it sees."""

from __future__ import annotations

import pyarrow as pa
import pytest
from corruptors import SEED

from arrowbank.durable import seal
from arrowbank.durable.stream import Record
from crash.fuzz import TARGETS, fuzz


@pytest.mark.slow
def test_no_mutant_of_a_file_is_read_as_another_or_ends_its_reader() -> None:
    wrong = [said for _, _, said in fuzz(500 * len(TARGETS), SEED)]
    assert wrong == [[] for _ in TARGETS], f"seed {SEED}"


def test_mutants_show_seals_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "verify", lambda *_: True)
    for target, _, wrong in fuzz(100, SEED, ["segment", "journal"]):
        assert wrong, target


def test_mutants_show_records_that_are_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(self: Record, schema: pa.Schema) -> pa.RecordBatch:
        return pa.ipc.read_record_batch(pa.py_buffer(self.message), schema)

    monkeypatch.setattr(Record, "batch", parse)
    [(_, _, wrong)] = fuzz(200, SEED, ["segment, sealed again"])
    assert any("the reader died" in said for said in wrong)
