"""Whole opens of damaged copies of a bank: what was not hit comes back, once, and what was hit is told.

``python tests/test_damaged_banks.py --opens DIRECTORY COUNT`` opens copies that are damaged at random, in a process of
its own, which must live.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import corruptors
import polars
import pyarrow as pa
import pytest
from corruptors import SEED
from damaged_banks import (
    CHECKPOINT,
    Found,
    Model,
    child,
    contents,
    copy,
    judge,
    make_whole,
    restore,
    rows_of,
)
from damages import NAMED, at_random, pick

from arrowbank import ArrowbankError, BankLockedError, CorruptionError, CorruptRecordError, RolloutBank
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest
from arrowbank.durable.recovery import live_segments

OPENS = 75
"""Of each of the two banks."""


def test_without_damage_all_of_it_comes_back(model: Model, root: Path) -> None:
    found = judge(model, root)
    assert isinstance(found, Found)
    assert (found.report.damage, found.report.lost_records) == ((), 0)


@pytest.mark.parametrize("name", NAMED)
def test_named_damage_is_contained_and_told(model: Model, other: Model, root: Path, name: str) -> None:
    NAMED[name](root, model, other)
    found = judge(model, root)
    if name.startswith("manifest"):
        assert isinstance(found, ArrowbankError)


@pytest.mark.parametrize("part", range(5))
def test_any_damage_to_any_file_is_contained_and_told(model: Model, other: Model, shared: Path, part: int) -> None:
    picked = random.Random(SEED + part)
    for number in range(OPENS // 5):
        root = copy(model, shared / "copy")
        done = at_random(picked, root, model, other)
        try:
            judge(model, root)
        except Exception as error:
            error.add_note(f"seed {SEED} + {part}, number {number}: {done}")
            raise


def test_two_damages_at_once_are_contained_and_told(model: Model, other: Model, shared: Path) -> None:
    picked = random.Random(SEED)
    for number in range(OPENS // 3):
        root = copy(model, shared / "copy")
        done = [at_random(picked, root, model, other)]
        with contextlib.suppress(FileNotFoundError, ValueError):  # what the first one deleted or emptied
            done.append(at_random(picked, root, model, other))
        try:
            judge(model, root)
        except Exception as error:
            error.add_note(f"seed {SEED}, number {number}: {done}")
            raise


# -- what a coordinator does about damage when it opens the bank


HEALED = [name for name in NAMED if name.startswith(("segment: ", "carried segment: "))]


@pytest.mark.parametrize("name", HEALED)
def test_after_an_open_every_segment_is_read_by_plain_readers(
    model: Model, other: Model, root: Path, name: str
) -> None:
    NAMED[name](root, model, other)
    with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
        restored = bank.restore(CHECKPOINT)
    paths = BankPaths(root)
    manifest = read_manifest(paths)
    seen = set()
    for segment in live_segments(paths, manifest):
        path = paths.segments / str(segment)
        by_pyarrow = set(pa.ipc.open_stream(path.read_bytes()).read_all()["group_uid"].to_pylist())
        assert set(polars.read_ipc_stream(path)["group_uid"].to_list()) == by_pyarrow
        seen |= by_pyarrow
    handed = {str(group.uid) for draw in restored.draws for group in draw.groups}
    handed |= {str(group.uid) for queue in restored.pending.values() for group in queue}
    assert handed <= seen
    assert restored.report.quarantined == len(list(paths.quarantine.glob("*.json")))


def test_the_report_and_the_note_in_quarantine_name_file_offset_and_group(model: Model, root: Path) -> None:
    name = pick(model, "own")
    stream = model.segments[name]
    at = len(stream.keys) // 2
    start, stop = stream.ranges[at]
    corruptors.rewrite(root / "segments" / name, partial(corruptors.flip, bit=8 * (stop - 100)))
    with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
        report = bank.restore(CHECKPOINT).report
    (told,) = report.corrupt
    assert f"{name} at byte {start}: corrupt" in told
    assert stream.keys[at] in told
    assert (report.lost_records, report.quarantined) == (1, 1)
    (note,) = (json.loads(path.read_text()) for path in (root / "quarantine").glob("*.json"))
    assert (note["file"], note["offset"], note["length"], note["uid"]) == (name, start, stop - start, stream.keys[at])
    (kept,) = (path.read_bytes() for path in (root / "quarantine").glob("*.bytes"))
    assert kept == corruptors.flip(stream.data, 8 * (stop - 100))[start:stop]


def test_what_a_dead_session_left_is_known_after_the_next_open(shared: Path) -> None:
    model = make_whole(shared / "dead", close=False)
    for harm in ("segment: cut between two records", "segments: one deleted", "segment: a bit of the last record"):
        root = copy(model, shared / "copy")
        with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
            bank.restore(CHECKPOINT)
        NAMED[harm](root, model, model)
        hurt = model.hurt_groups(root)
        with RolloutBank.open(root, keep_checkpoints=1) as bank:
            found = restore(bank)
        assert found.refused is None
        assert found.report.lost_records == len(hurt) > 0, harm
        assert any(pick(model, "own") in line for line in found.report.corrupt), harm


@pytest.mark.parametrize("kind", ["closed", "killed"])
def test_a_part_of_the_journal_that_goes_missing_later_is_refused(shared: Path, kind: str) -> None:
    model = make_whole(shared / f"parts-{kind}", close=kind == "closed")
    for number in range(len(model.journal)):
        root = copy(model, shared / "copy")
        with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
            bank.restore(CHECKPOINT)
        corruptors.delete(root / "journal" / sorted(model.journal)[number])
        with RolloutBank.open(root, keep_checkpoints=1) as bank:
            with pytest.raises(CorruptRecordError, match="may be hidden"):
                bank.restore(CHECKPOINT)
            bank.restore(CHECKPOINT, accept_damage=True)


def test_restoring_below_a_damaged_archive_changes_nothing_or_gives_all(
    model: Model, other: Model, shared: Path
) -> None:
    version = f".archive/v{model.manifest.version:06d}/"
    names = [name for name in NAMED if name.startswith("archive: ")]
    for name in [*names, "unknown files"]:
        root = copy(model, shared / "copy")
        NAMED[name](root, model, other)
        with RolloutBank.open(root, takeover="force", keep_checkpoints=1) as bank:
            before = {path: data for path, data in contents(root).items() if path.startswith((version, "MANIFEST"))}
            try:
                restored = bank.restore(0)
            except ArrowbankError:
                assert name in names
                after = contents(root)
                assert all(after[path] == data for path, data in before.items())
                bank.restore(CHECKPOINT)
            else:
                assert [draw.iteration for draw in restored.draws] == [0, 1, 2, 3]
                for draw in restored.draws:
                    assert draw.lost == ()
                    assert all(group == model.groups[str(group.uid)] for group in draw.groups)


@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: data[:40], lambda data: b"{}"], ids=["0", "40", "{}"]
)
def test_a_claim_that_does_not_say_who_holds_the_bank_is_refused_until_forced(
    model: Model, root: Path, change: Callable[[bytes], bytes]
) -> None:
    corruptors.rewrite(root / "sessions/0002", change)
    corruptors.delete(root / "LOCK")
    before = contents(root)
    with pytest.raises(BankLockedError, match="sessions/0002"):
        RolloutBank.open(root)
    assert contents(root) == before
    assert isinstance(judge(model, root, takeover="force"), Found)


STRANGE = ["MANIFEST.json", "LOCK", "sessions/0002", "segments", "journal", "sessions", "quarantine", "tmp", ".archive"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "socket"])
def test_what_is_not_a_plain_file_or_directory_is_refused_at_open(model: Model, shared: Path, kind: str) -> None:
    for number, place in enumerate(STRANGE):
        root, outside = copy(model, shared / "copy"), shared / f"outside-{model.closed}-{kind}-{number}"
        outside.mkdir()
        corruptors.replaced(place, kind)(root, outside)
        before = contents(root)
        with pytest.raises(CorruptionError) as refused:
            RolloutBank.open(root, takeover="force")
        assert place in str(refused.value)
        assert contents(root) == before


def test_a_child_process_lives_through_all_of_it(shared: Path) -> None:
    done = child(__file__, "--opens", str(shared / "child"), str(OPENS))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"{OPENS} opens"


def _opens(directory: Path, count: int) -> None:
    """In a child: no checks but that the process lives."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    faulthandler.dump_traceback_later(240, exit=True)
    model, other = make_whole(directory / "whole", close=False), make_whole(directory / "other", close=True)
    picked = random.Random(SEED - 1)
    for _ in range(count):
        root = copy(model, directory / "copy")
        for _ in range(3):
            with contextlib.suppress(FileNotFoundError, ValueError):
                at_random(picked, root, model, other)
        with contextlib.suppress(ArrowbankError):
            rows_of(root)
        with contextlib.suppress(ArrowbankError), RolloutBank.open(root, takeover="force") as bank:
            for group in restore(bank).groups.values():
                repr(group.rollouts)
    print(f"{count} opens")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--opens", directory, count]:
            _opens(Path(directory), int(count))
        case _:
            sys.exit("usage: test_damaged_banks.py --opens DIRECTORY COUNT")
