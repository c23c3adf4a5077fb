"""Readers on each bit and each length of a segment, a journal, a manifest: it costs what was hit, and it is told.

``python tests/test_corruption.py --every-bit`` does all of them; pytest takes a sample.
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import corruptors
import pyarrow as pa
import pytest
from corruptors import SEED
from crash.bit_rot import (
    EVERY_ONE,
    WHOLE,
    Every,
    Small,
    Whole,
    every_bit,
    hit,
    make_small,
    wrong_in_journal,
    wrong_in_segment,
)  # fmt: skip
from damaged_banks import KINDS, Model, make_whole, read_stream

from arrowbank.durable.segment import load_rollouts, read_segment
from arrowbank.schema import SEGMENT_SCHEMA

SAMPLE = 1500


@pytest.fixture(scope="module")
def case(shared: Path) -> Small:
    return make_small(shared / "small")


@pytest.fixture(scope="module")
def model(shared: Path) -> Model:
    return make_whole(shared / "whole", close=True)


@pytest.mark.parametrize("every", EVERY_ONE, ids=str)
def test_a_flipped_bit_or_a_cut_costs_what_it_hits_and_is_told(case: Small, every: Every) -> None:
    size = every.size(case)
    numbers = range(size) if size <= SAMPLE else random.Random(SEED).sample(range(size), SAMPLE)
    _, wrong = every.run(case, numbers)
    assert wrong == [], f"seed {SEED}"


@pytest.mark.parametrize("whole", WHOLE, ids=str)
def test_a_flipped_bit_or_a_cut_of_a_whole_file_is_harmless_or_told(model: Model, shared: Path, whole: Whole) -> None:
    size = whole.size(model)
    numbers = random.Random(SEED).sample(range(size), min(size, 400 if whole.by_digest else 40))
    _, wrong = whole.run(model, shared / "copy", numbers)
    assert wrong == [], f"seed {SEED}"


def test_groups_of_a_damaged_segment_are_decoded_to_what_was_appended(case: Small) -> None:
    numbers = random.Random(SEED).sample(range(8 * len(case.segment_bytes)), 60)
    try:
        for number in numbers:
            changed = corruptors.flip(case.segment_bytes, number)
            case.segment.write_bytes(changed)
            found, _ = read_segment(case.segment, case.manifest.bank_id)
            for record in found.records:
                assert load_rollouts(record) == case.groups[record.sequence], number
            assert len(found.records) == len(KINDS) - len(hit(case.segment_bytes, changed, case.edges)), number
    finally:
        case.segment.write_bytes(case.segment_bytes)


def test_every_bit_of_the_schema_message_costs_nothing(case: Small) -> None:
    for bit in range(0, 8 * case.edges[0], 11):
        changed = corruptors.flip(case.segment_bytes, bit)
        found = read_stream(changed, case.segment.name, case.manifest.bank_id)
        assert len(found.records) == len(KINDS), bit


def test_a_schema_message_that_plain_readers_cannot_read_is_told(case: Small) -> None:
    for bit in range(0, 8 * case.edges[0], 11):
        changed = corruptors.flip(case.segment_bytes, bit)
        try:
            same = pa.ipc.open_stream(changed).schema.equals(SEGMENT_SCHEMA, check_metadata=True)
        except (pa.ArrowException, OSError):
            same = False
        found = read_stream(changed, case.segment.name, case.manifest.bank_id)
        assert same or [(place.offset, place.lost) for place in found.damage] == [(0, 0)], bit


@pytest.mark.parametrize("file", ["segment", "journal"])
def test_a_record_moved_to_any_other_place_is_not_taken(case: Small, file: str) -> None:
    segment = file == "segment"
    data, edges = (case.segment_bytes, case.edges) if segment else (case.journal_bytes, case.entry_edges)
    wrong = wrong_in_segment if segment else wrong_in_journal
    try:
        for start, stop in pairwise(edges):
            for to in [*edges, *range(edges[0], len(data), 8 * 37)]:
                if to + stop - start > edges[-1]:
                    continue  # with the end mark gone, the last record may be a torn tail
                assert wrong(case, corruptors.move(data, start, stop, to)) is None, (start, to)
    finally:
        case.journal.write_bytes(case.journal_bytes)


def test_damage_of_the_schema_and_the_first_record_is_told_from_where_it_starts(case: Small) -> None:
    start, stop = case.edges[:2]
    assert wrong_in_segment(case, corruptors.move(case.segment_bytes, start, stop, 0)) is None


def test_a_zeroed_range_anywhere_costs_what_it_hits(case: Small) -> None:
    picked = random.Random(SEED)
    for _ in range(300):
        start = picked.randrange(len(case.segment_bytes))
        stop = min(start + picked.choice([1, 8, 512, 4096]), len(case.segment_bytes))
        changed = corruptors.zero(case.segment_bytes, start, stop)
        assert wrong_in_segment(case, changed) is None, (SEED, start, stop)


def _every_bit() -> int:
    """Print a table; return how many were wrong."""
    bad = 0
    print(f"{'case':45} {'count':>8} {'wrong':>6} {'seconds':>8}")
    for what, count, wrong, seconds in every_bit():
        bad += len(wrong)
        print(f"{what:45} {count:8,} {len(wrong):6,} {seconds:8.1f}", *wrong[:3], sep="\n  ", flush=True)
    return bad


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--every-bit"]:
            sys.exit(bool(_every_bit()))
        case _:
            sys.exit("usage: test_corruption.py --every-bit")
