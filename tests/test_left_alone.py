"""What may be the last copy of something is not tidied away, by an open or by a repair."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import token_group
from corruptors import mistype, rewrite
from runs import archive_three, archived_file, archived_rows, kill

from arrowbank import ArrowbankError, CorruptManifestError, CorruptRecordError, RolloutBank, repair, scan, verify
from arrowbank.archive import store
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest, write_manifest


@pytest.fixture
def archived(path: Path) -> Path:
    """A bank with two files of the archive."""
    archive_three(path, files=2)
    assert len(read_manifest(BankPaths(path)).files) == 2
    return path


def directory(path: Path) -> Path:
    paths = BankPaths(path)
    return paths.version(read_manifest(paths).version)


def rows(path: Path) -> list[object]:
    return sorted(scan(path).to_arrow().select(["group_uid", "member_index", "outcome"]).to_pylist(), key=repr)


def renamed(name: str) -> Callable[[Path], None]:
    def rename(place: Path) -> None:
        last = max(place.glob("c*.parquet"))
        last.rename(place / name)

    return rename


def swapped(place: Path) -> None:
    first, second = sorted(place.glob("c*.parquet"))[-2:]
    first.rename(place / "x")
    second.rename(first)
    (place / "x").rename(second)


def moved(name: str) -> Callable[[Path], None]:
    def move(place: Path) -> None:
        target = place.parents[1] / name
        target.parent.mkdir(parents=True, exist_ok=True)
        max(place.glob("c*.parquet")).rename(target)

    return move


def as_a_directory(place: Path) -> None:
    """As ``cp -rL`` copies it, without what is hidden."""
    bank = place.parents[1]
    (bank / "archive").unlink()
    shutil.copytree(place, bank / "archive")
    shutil.rmtree(bank / ".archive")


@pytest.mark.parametrize(
    "change",
    [
        renamed("c000001-s0001.parquet"), renamed("c000003-s0009.parquet"), renamed("mine.parquet"), swapped,
        moved("quarantine/a/b.parquet"), moved("kept.parquet"), moved("segments/copy"), as_a_directory,
    ],
    ids=["older", "another session", "another name", "swapped", "quarantine", "root", "segments", "copied"],
)  # fmt: skip
@pytest.mark.parametrize("opened", [False, True])
def test_a_file_of_the_archive_under_another_name_outlives_an_open_and_one_repair_puts_it_back(
    archived: Path, change: Callable[[Path], None], opened: bool
) -> None:
    expected = rows(archived)
    change(directory(archived))
    added = 0
    if opened and (archived / ".archive").exists() and not (archived / "segments" / "copy").exists():
        with RolloutBank.open(archived) as bank:
            bank.append(token_group(99))
            added = 4
    assert repair(archived, dry_run=True).is_healthy
    assert repair(archived).is_healthy
    assert verify(archived).is_healthy
    found = rows(archived)
    assert [row for row in found if row in expected] == expected
    assert len(found) == len(expected) + added
    assert repair(archived).mended == ()


def test_a_copy_that_the_repair_itself_would_take_away_is_not_promised(archived: Path) -> None:
    (archived / "tmp/s0001").mkdir(exist_ok=True)
    max(directory(archived).glob("c*.parquet")).rename(archived / "tmp/s0001/copy")
    assert not repair(archived, dry_run=True).is_healthy


@pytest.mark.parametrize("what", ["nothing", "another bank's", "a later one of another bank", "mistyped"])
def test_a_strange_file_among_those_of_the_archive_is_moved_away_and_blames_no_other(
    archived: Path, tmp_path: Path, what: str
) -> None:
    expected = rows(archived)
    name = "c000099-s0001.parquet" if what == "a later one of another bank" else "c000001-s0001.parquet"
    if what == "nothing":
        (directory(archived) / name).touch()
    else:
        archive_three(tmp_path / "other")
        shutil.copy(max(directory(tmp_path / "other").glob("c*.parquet")), directory(archived) / name)
    if what == "mistyped":
        rewrite(directory(archived) / name, mistype)
    (found,) = verify(archived).damage
    assert found.path.endswith(name) and "of this bank's archive" in found.reason
    RolloutBank.open(archived).close()
    assert (directory(archived) / name).exists()
    (mended,) = (one for one in repair(archived).mended if one.is_damage)
    assert mended.path.endswith(name)
    assert any((archived / "quarantine").glob("moved-*"))
    assert rows(archived) == expected
    assert verify(archived).is_healthy


def test_a_later_file_of_the_bank_itself_tells_that_the_manifest_is_an_old_copy(archived: Path) -> None:
    place = directory(archived)
    shutil.copy(max(place.glob("c*.parquet")), place / "c000099-s0001.parquet")
    with pytest.raises(CorruptManifestError, match="old copy"):
        RolloutBank.open(archived)


def settled(bank: RolloutBank, at: int, uids: Sequence[str]) -> None:
    """Train one iteration, and archive it."""
    bank.mark_consumed(uids, at)
    bank.begin_iteration(at + 1)
    bank.checkpoint(at + 1, wait=True)


def archived_and_carried(path: Path) -> tuple[RolloutBank, str]:
    """A bank with a file of the archive, a carried segment, and, still there, the one that both were made of."""
    bank = RolloutBank.open(path, keep_checkpoints=1)
    bank.restore(0)
    first, second = bank.append_many([token_group(0), token_group(1)])
    settled(bank, 0, [first])
    return bank, second


def cut_short(path: Path, work: Callable[[Path], object]) -> Path:
    """Return what a kill leaves just before the manifest is replaced the first time."""
    left = path.with_name("cut-short")

    def keep(*given: Any) -> None:
        if not left.exists():
            shutil.copytree(path, left, symlinks=True)
        write_manifest(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write_manifest", keep)
        work(path)
    return left


def a_file_made_of_a_carried_segment(path: Path) -> tuple[Path, list[str]]:
    bank, uid = archived_and_carried(path)
    settled(bank, 1, [uid])
    bank.close()
    (directory(path) / read_manifest(BankPaths(path)).files[-1].name).unlink()
    return path, [uid]


def what_an_unfinished_commit_was_made_of(path: Path) -> tuple[Path, list[str]]:
    uids: list[str] = []

    def archive(path: Path) -> None:
        with RolloutBank.open(path, keep_checkpoints=1) as bank:
            bank.restore(0)
            uids.append(bank.append(token_group(0)))
            settled(bank, 0, uids)

    RolloutBank.open(path).close()
    left = cut_short(path, archive)
    next((left / "segments").glob("*-main-*")).unlink()
    return left, uids


def the_carried_segment_that_an_unfinished_commit_was_made_of(path: Path) -> tuple[Path, list[str]]:
    bank, uid = archived_and_carried(path)
    bank.close(final=True)

    def archive(path: Path) -> None:
        with RolloutBank.open(path, keep_checkpoints=1) as bank:
            bank.restore(1)
            settled(bank, 1, [uid])

    left = cut_short(path, archive)
    next((left / "segments").glob("*-carry-*")).unlink()
    return left, [uid]


def the_file_that_an_unfinished_restore_was_made_of(path: Path) -> tuple[Path, list[str]]:
    archive_three(path)
    uids = pq.read_table(archived_file(path))["group_uid"].to_pylist()
    left = cut_short(path, lambda path: kill(path).restore(0))
    archived_file(left).unlink()
    return left, uids


def what_a_restore_has_carried(path: Path) -> tuple[Path, list[str]]:
    archive_three(path)
    uids = pq.read_table(archived_file(path))["group_uid"].to_pylist()
    kill(path).restore(0)
    for name in read_manifest(BankPaths(path)).carried:
        (path / "segments" / name).unlink()
    return path, uids


def the_manifest_is_an_old_copy(path: Path, *, commits: int = 2) -> tuple[Path, list[str]]:
    uids, manifests = [], []
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(commits):
            uids.append(bank.append(token_group(at)))
            manifests.append((path / "MANIFEST.json").read_bytes())
            settled(bank, at, uids[-1:])
        bank.close(final=True)
    (path / "MANIFEST.json").write_bytes(manifests[-1])
    return path, uids


def the_manifest_is_the_first_one(path: Path) -> tuple[Path, list[str]]:
    return the_manifest_is_an_old_copy(path, commits=1)


def a_carried_segment(path: Path, *, empty: bool = False) -> tuple[Path, list[str]]:
    bank, uid = archived_and_carried(path)
    bank.close()
    (name,) = read_manifest(BankPaths(path)).carried
    (path / "segments" / name).unlink()
    if empty:
        (path / "segments" / name).touch()
    return path, [uid]


def what_a_carried_segment_held(path: Path) -> tuple[Path, list[str]]:
    return a_carried_segment(path, empty=True)


def stored(path: Path, uids: Sequence[str]) -> set[str]:
    """Which of some groups are in any file, whatever its name."""
    found: set[str] = set()
    for file in path.rglob("*"):
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
        if data.startswith(b"PAR1"):
            found |= set(pq.read_table(pa.BufferReader(data), columns=["group_uid"])["group_uid"].to_pylist())
        elif b"logprobs" in data:  # a segment, and no journal
            found |= {uid for uid in uids if uid.encode() in data}
    return found


@pytest.mark.parametrize("by", ["open", "repair"])
@pytest.mark.parametrize(
    "missing",
    [
        a_file_made_of_a_carried_segment, what_an_unfinished_commit_was_made_of,
        the_carried_segment_that_an_unfinished_commit_was_made_of, the_file_that_an_unfinished_restore_was_made_of,
        what_a_restore_has_carried, the_manifest_is_an_old_copy, the_manifest_is_the_first_one, a_carried_segment,
        what_a_carried_segment_held,
    ],
)  # fmt: skip
def test_what_may_be_the_last_copy_is_kept(
    path: Path, missing: Callable[[Path], tuple[Path, list[str]]], by: str
) -> None:
    bank, uids = missing(path)
    assert stored(bank, uids) >= set(uids)
    for _ in range(2):
        if by == "open":
            with kill(bank) as opened, contextlib.suppress(ArrowbankError):
                opened.restore(1)
        else:
            repair(bank, accept_damage=True, takeover="force")
    assert stored(bank, uids) >= set(uids)
    assert sorted(set(archived_rows(bank))) == sorted(archived_rows(bank))


def test_a_run_that_goes_on_without_what_is_lost_grows_no_more_than_another(path: Path) -> None:
    bank, _ = a_carried_segment(path)
    with kill(bank, keep_checkpoints=1) as opened:
        opened.restore(1, accept_damage=True)
        for at in range(1, 9):
            opened.begin_iteration(at)
            settled(opened, at, [opened.append(token_group(at + 10))])
        opened.close(final=True)
    manifest = read_manifest(BankPaths(bank))
    assert manifest.retired == {}
    assert list((bank / "segments").iterdir()) == []
    assert len(list((bank / ".archive").iterdir())) == 1


def journals(path: Path) -> list[Path]:
    return sorted((path / "journal").iterdir())


@pytest.mark.parametrize("by", ["open", "repair"])
def test_a_journal_whose_summary_is_lost_is_kept(path: Path, by: str) -> None:
    """The commit that would have taken the older part away was cut short; then somebody removes the newer one."""
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(3):
            bank.begin_iteration(at)
            bank.mark_consumed([bank.append(token_group(at))], at)
        before = [(part, part.read_bytes()) for part in journals(path)]
        bank.checkpoint(2, wait=True)
    (path / "journal" / read_manifest(BankPaths(path)).journal).unlink()
    for part, data in before:
        part.write_bytes(data)
    assert not verify(path).is_healthy
    with kill(path) as bank, pytest.raises(CorruptRecordError, match="may be hidden"):
        bank.restore(2)
    if by == "open":
        with kill(path) as bank:
            bank.restore(2, accept_damage=True)
    else:
        assert repair(path, accept_damage=True).is_healthy
    kept = {one.read_bytes() for one in (path / "quarantine").iterdir() if one.is_file()}
    assert {data for _, data in before} <= kept


def test_a_journal_that_is_missing_is_written_down_by_who_goes_on_without_it(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        bank.mark_consumed([bank.append(token_group(1))], 0)
    (lost,) = journals(path)
    lost.unlink()
    promised = repair(path, dry_run=True, accept_damage=True)
    report = repair(path, accept_damage=True)
    assert report.is_healthy
    assert report.lost_journals == promised.lost_journals == (lost.name,)
    assert report.lost_records == promised.lost_records > 0
    (note,) = (path / "quarantine").glob("lost-*.json")
    assert lost.name in note.read_text()
    assert [found for found in verify(path).notes if found.path == "quarantine" and "lost there" in found.reason]


def refused(path: Path) -> str:
    """Repair the bank in another process; return what that was told."""
    code = "import sys, arrowbank; arrowbank.repair(sys.argv[1])"
    child = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert child.returncode == 1
    return child.stderr.splitlines()[-1]


@pytest.mark.parametrize("instead", [b"", b" " * 70_000], ids=["empty", "too large"])
@pytest.mark.parametrize("kept", ["LOCK", "sessions/0001"])
def test_either_of_lock_and_claim_says_who_has_the_bank(path: Path, kept: str, instead: bytes) -> None:
    (gone,) = {"LOCK", "sessions/0001"} - {kept}
    with RolloutBank.open(path) as bank:
        bank.append(token_group(1))
        was = (path / gone).read_bytes()
        (path / gone).write_bytes(instead)
        holder = f"session 1: process {os.getpid()} on "
        assert holder in refused(path)
        assert holder in repair(path, dry_run=True).holder
        (path / gone).write_bytes(was)
    (path / gone).write_bytes(instead)
    assert repair(path).is_healthy
    with RolloutBank.open(path) as bank:
        assert len(bank.restore(0).pending) == 1


def test_a_claim_that_is_a_copy_of_an_earlier_one_does_not_say_who_has_the_bank(path: Path) -> None:
    RolloutBank.open(path).close()
    with RolloutBank.open(path):
        shutil.copy(path / "sessions/0001", path / "sessions/0002")
        assert f"session 2: process {os.getpid()} on " in refused(path)


def test_a_bank_whose_holder_lives_is_not_taken_though_its_claim_is_gone(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.append(token_group(1))
        aside = path.parent / "aside"
        (path / "sessions/0001").rename(aside)
        assert "lives, though its claim was removed" in refused(path)
        aside.rename(path / "sessions/0001")
        bank.append(token_group(2))


@pytest.mark.parametrize("call", [RolloutBank.open, scan, verify, repair])
def test_no_path_and_a_path_that_is_not_utf8_are_refused(tmp_path: Path, call: Callable[[str], object]) -> None:
    with pytest.raises(FileNotFoundError, match="is empty"):
        call("")
    with pytest.raises(OSError, match="not a path in UTF-8"):
        call(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff"))
    assert list(tmp_path.iterdir()) == []
