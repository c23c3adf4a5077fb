"""A lost manifest is made again: at whatever moment of a run it is lost, the bank comes back as with it.

``python tests/test_rebuild.py --every-moment`` tries all moments; pytest takes some.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import token_group
from corruptors import flip, mistype
from machine import directory_in_memory
from runs import archive_three, archived_file, kill, tree

from arrowbank import BankNotFoundError, RolloutBank, repair, scan, verify
from arrowbank.archive.parquet import row_group_end
from arrowbank.durable import files
from arrowbank.durable.journal import JOURNAL_SCHEMA
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import Manifest, read_manifest
from arrowbank.durable.stream import map_file
from arrowbank.durable.stream import scan as scan_stream
from arrowbank.verification.flipped import flipped_back

EVERY = 3
"""One of so many moments is tried by pytest."""

WATCHED = ("publish", "replace", "remove", "repoint", "publish_directory", "remove_directory")
"""What changes the names of a bank."""


def moments(path: Path, into: Path) -> list[Path]:
    """Copies of a bank as a kill may leave it: after each change of its names, in a run with all that there is."""
    found: list[Path] = []

    def watch(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*given: Any, **named: Any) -> Any:
            result = change(*given, **named)
            found.append(into / f"{len(found):04d}")
            shutil.copytree(path, found[-1], symlinks=True)
            return result

        return changed

    with pytest.MonkeyPatch.context() as watching:
        for name in WATCHED:
            watching.setattr(files, name, watch(getattr(files, name)))
        a_run(path)
    return found


def a_run(path: Path) -> None:
    """Archives, merges, carries, evicts, goes back below the archive, and goes on on another line."""
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        train(bank, range(6))
    with kill(path, keep_checkpoints=1) as bank:
        bank.restore(4)
        train(bank, range(4, 7))
        bank.restore(2)
        train(bank, range(2, 5))


def train(bank: RolloutBank, iterations: range) -> None:
    for at in iterations:
        bank.begin_iteration(at)
        uids = [bank.append(token_group(100 * bank.session + 10 * at + number, members=2)) for number in range(4)]
        bank.evict(uids[3:], "stale")
        bank.mark_consumed(uids[:2], at, span=1 + at % 2, state=b"%d" % at)  # the third one waits
        bank.checkpoint(at + 1, wait=True)


@dataclass(frozen=True)
class Outcome:
    """What a bank hands back."""

    draws: list[Any]
    pending: list[str]
    rows: list[Any]


def outcome(root: Path, iteration: int) -> Outcome:
    with kill(root) as bank:
        restored = bank.restore(iteration)
        draws = [
            (draw.iteration, draw.index, [str(group.uid) for group in draw.groups], draw.span, draw.offset, draw.state)
            for draw in restored.draws
        ]
        pending = sorted(str(group.uid) for group in restored.take(10**6))
    columns = ["group_uid", "member_index", "consumed_iteration", "outcome", "evict_reason"]
    rows = scan(root).to_arrow().select(columns).to_pylist()
    return Outcome(draws, pending, sorted(rows, key=repr))


def copies(found: list[Path], shared: Path) -> Iterator[tuple[Path, Path, Manifest]]:
    """Yield each moment twice: as it was, and without the manifest."""
    for moment in found:
        if not (moment / "MANIFEST.json").exists():
            continue
        whole, lost = shared / "whole", shared / "lost"
        for copy in (whole, lost):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(moment, copy, symlinks=True)
        (lost / "MANIFEST.json").unlink()
        yield whole, lost, read_manifest(BankPaths(moment))


def lose(found: list[Path], shared: Path) -> tuple[int, int]:
    """Lose the manifest at these moments; return how often it was made again, and how often nothing was in it yet."""
    rebuilt, empty = 0, 0
    for whole, lost, manifest in copies(found, shared):
        try:
            report = repair(lost, takeover="force")
        except BankNotFoundError:  # nothing was in it yet
            empty += 1
            continue
        assert report.is_healthy, report
        rebuilt += 1
        assert verify(lost).is_healthy
        assert read_manifest(BankPaths(lost)).bank_id == manifest.bank_id
        newest = max(checkpoints(whole), default=0)
        for iteration in {0, newest // 2, newest}:
            mine, theirs = shared / "mine", shared / "theirs"
            for source, copy in ((lost, mine), (whole, theirs)):
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(source, copy, symlinks=True)
            assert outcome(mine, iteration) == outcome(theirs, iteration), iteration
    return rebuilt, empty


def test_at_every_moment_of_a_run_the_bank_comes_back_as_with_its_manifest(path: Path, shared: Path) -> None:
    found = moments(path, shared / "moments")
    rebuilt, empty = lose(found[::EVERY], shared)
    assert rebuilt > 20 and empty < 3


def checkpoints(root: Path) -> list[int]:
    """The checkpoints of the newest line."""
    with kill(root) as bank:
        lines = bank._ledger.state.history.lines
        return lines[max(lines)].checkpoints.newest(1) if lines else []


def test_a_flipped_bit_of_a_manifest_is_flipped_back(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        train(bank, range(3))
    manifest, text = read_manifest(BankPaths(path)), (path / "MANIFEST.json").read_bytes()
    wrong = [bit for bit in range(0, 8 * len(text), 13) if flipped_back(flip(text, bit)) != manifest]
    assert wrong == []
    (path / "MANIFEST.json").write_bytes(flip(text, 8 * text.index(b"format_version")))
    assert repair(path).is_healthy
    assert read_manifest(BankPaths(path)).files == manifest.files


def test_a_manifest_that_the_files_leave_in_doubt_is_not_made_again(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        train(bank, range(3))
    paths = BankPaths(path)
    manifest = read_manifest(paths)
    paths.manifest.unlink()
    archived = paths.version(manifest.version) / manifest.files[0].name
    data = archived.read_bytes()

    def why_not() -> str:
        before = tree(path)
        (found,) = (found for found in repair(path).left if found.path == "MANIFEST.json")
        assert tree(path) == before
        return found.advice

    for damaged in (flip(data, 8 * (len(data) // 3)), mistype(data)):
        archived.write_bytes(damaged)
        assert "is damaged" in why_not()
    archived.write_bytes(data)
    shutil.copy(archived, archived.with_name("c000099-s0001.parquet"))
    assert "in several files" in why_not()
    archived.with_name("c000099-s0001.parquet").unlink()
    parts = {part: part.read_bytes() for part in paths.journal.iterdir()}
    for part in parts:
        part.unlink()
    assert "journal" in why_not()
    for part, content in parts.items():
        part.write_bytes(content)
    shutil.copytree(paths.version(manifest.version), paths.version(99))
    paths.archive.unlink()
    assert "versions" in why_not()
    shutil.rmtree(paths.version(99))
    assert repair(path).is_healthy


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("kept", ["LOCK", "sessions"])
def test_a_manifest_of_a_bank_that_archived_nothing_is_made_again_from_its_claims(
    path: Path, tmp_path: Path, closed: bool, kept: str
) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uid = bank.append(token_group(1))
        shutil.copytree(path, tmp_path / "killed", symlinks=True)
    path = path if closed else tmp_path / "killed"
    bank_id = read_manifest(BankPaths(path)).bank_id
    (path / "MANIFEST.json").unlink()
    for file in (path / "LOCK", *(path / "sessions").iterdir()):
        if kept not in str(file):
            file.write_bytes(b"")
    assert repair(path, takeover="force").is_healthy
    assert verify(path).is_healthy
    assert read_manifest(BankPaths(path)).bank_id == bank_id
    with RolloutBank.open(path) as bank:
        (group,) = bank.restore(0).take()
        assert group.uid == uid


def test_a_manifest_of_a_bank_whose_journal_was_only_begun_is_made_again(path: Path, tmp_path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        bank.append(token_group(1))
        shutil.copytree(path, tmp_path / "killed", symlinks=True)
    killed = BankPaths(tmp_path / "killed")
    (part,) = killed.journal_names()
    place = killed.journal / str(part)
    manifest = read_manifest(killed)
    first = scan_stream(map_file(place), str(part), manifest.bank_id, JOURNAL_SCHEMA).records[0]
    place.write_bytes(place.read_bytes()[: first.offset] + bytes(8))
    shutil.rmtree(killed.segments)
    killed.segments.mkdir()
    killed.manifest.unlink()
    assert repair(killed.root, takeover="force").is_healthy
    assert read_manifest(killed).bank_id == manifest.bank_id


def test_a_manifest_of_a_bank_without_claims_or_archive_is_found_in_what_is_left_of_it(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uid = bank.append(token_group(1))
    text = (path / "MANIFEST.json").read_bytes()
    (path / "MANIFEST.json").write_bytes(text[: text.index(b"schema_hash")])
    say_nothing(path)
    assert repair(path, takeover="force").is_healthy
    with RolloutBank.open(path) as bank:
        (group,) = bank.restore(0).take()
        assert group.uid == uid
    (path / "MANIFEST.json").unlink()
    shutil.rmtree(path / "quarantine")  # a copy of what was left is there
    say_nothing(path)
    (left,) = (found for found in repair(path, dry_run=True).left if found.path == "MANIFEST.json")
    assert "id is lost" in left.advice


def say_nothing(path: Path) -> None:
    """Leave claims that fence, and do not say for which bank."""
    for file in (path / "LOCK", *(path / "sessions").iterdir()):
        file.write_bytes(b"{}")


def test_a_lost_manifest_in_the_place_of_which_something_else_stands(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        train(bank, range(3))
    (path / "MANIFEST.json").unlink()
    (path / "MANIFEST.json").symlink_to("/dev/zero")
    assert repair(path).is_healthy
    notes = [json.loads(note.read_text()) for note in (path / "quarantine").glob("moved-*.json")]
    assert [note["file"] for note in notes] == ["MANIFEST.json"]


def test_a_row_group_whose_footer_does_not_tell_of_its_iterations_is_an_error(path: Path) -> None:
    archive_three(path)
    changed = mistype(archived_file(path).read_bytes(), b"consumed_iteration")
    with pytest.raises(ValueError, match="does not tell of consumed_iteration"):
        row_group_end(pq.read_metadata(pa.BufferReader(changed)).row_group(0))


def _every_moment() -> None:
    with directory_in_memory() as directory:
        found = moments(directory / "bank", directory / "moments")
        rebuilt, empty = lose(found, directory)
    print(f"{len(found)} moments: made again at {rebuilt}, nothing in it yet at {empty}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--every-moment"]:
            _every_moment()
        case _:
            sys.exit("usage: test_rebuild.py --every-moment")
