"""File names are made and checked in one place, and nothing else gets in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowbank.durable.layout import ArchiveName, BankPaths, JournalName, SegmentName, check_writer
from arrowbank.errors import CorruptionError

NUMBERS = st.integers(0, 10**10 - 1)
WRITERS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)


@given(NUMBERS, st.integers(0, 10**19 - 1), NUMBERS, WRITERS)
def test_segment_names_round_trip(session: int, iteration: int, part: int, writer: str) -> None:
    name = SegmentName(session, iteration, part, writer)
    assert SegmentName.parse(str(name)) == name
    assert Path(str(name)).name == str(name)


@given(NUMBERS, NUMBERS)
def test_journal_names_round_trip(session: int, part: int) -> None:
    assert JournalName.parse(str(JournalName(session, part))) == JournalName(session, part)


@given(st.integers(0, 10**12 - 1), NUMBERS)
def test_archive_names_round_trip(commit: int, session: int) -> None:
    assert ArchiveName.parse(str(ArchiveName(commit, session))) == ArchiveName(commit, session)


def test_names_are_those_of_the_design() -> None:
    assert str(SegmentName(3, 21, 0, "main")) == "00000021-main-s0003-0000.arrows"
    assert str(JournalName(3, 0)) == "s0003-0000.arrows"


HOSTILE = [
    "",
    "..",
    "../00000021-main-s0003-0000.arrows",
    "/00000021-main-s0003-0000.arrows",
    "a/00000021-main-s0003-0000.arrows",
    "00000021-../x-s0003-0000.arrows",
    "00000021-..-s0003-0000.arrows",
    "00000021-main-s0003-0000.arrows/..",
    "00000021-main-s0003-0000.arrows\n",
    "00000021-main-s0003-0000.arrows\0",
    "00000021-main-s0003-0000.parquet",
    "21-main-s0003-0000.arrows",
    "00000021-main-s3-0.arrows",
    "00000021--s0003-0000.arrows",
    "-0000021-main-s0003-0000.arrows",
    "c000001-s0001.parquet/..",
    "../c000001-s0001.parquet",
    "s0003-0000.arrows.tmp",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_none_of_ours(name: str) -> None:
    assert SegmentName.parse(name) is JournalName.parse(name) is ArchiveName.parse(name) is None


@given(st.text())
def test_whatever_parses_stays_in_its_directory(name: str) -> None:
    for kind in (SegmentName, JournalName, ArchiveName):
        if kind.parse(name) is not None:
            assert Path("/bank/segments", name).parent == Path("/bank/segments")
            assert ".." not in Path(name).parts


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "ü", "x" * 65, "-x", "a\n"])
def test_writers_whose_name_cannot_be_in_a_file_name_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="writer name"):
        check_writer(name)
    assert check_writer("rank-3") == "rank-3"


def test_segments_order_by_session_iteration_and_part() -> None:
    names = [SegmentName(1, 9, 0, "main"), SegmentName(1, 9, 1, "main"), SegmentName(2, 0, 0, "main")]
    assert sorted([names[2], names[0], names[1]]) == names


def test_a_bank_lists_what_it_wrote_and_refuses_what_it_did_not(tmp_path: Path) -> None:
    paths = BankPaths(tmp_path)
    assert paths.segment_names() == paths.journal_names() == paths.claimed_sessions() == paths.version_numbers() == []
    paths.segments.mkdir()
    name = SegmentName(1, 2, 0, "main")
    (paths.segments / str(name)).touch()
    (paths.segments / ".nfs000001").touch()
    assert paths.segment_names() == [name]
    (paths.segments / "notes.txt").touch()
    with pytest.raises(CorruptionError, match=r"notes\.txt.*Move it out"):
        paths.segment_names()


def test_links_among_the_segments_are_refused(tmp_path: Path) -> None:
    paths = BankPaths(tmp_path)
    paths.segments.mkdir()
    (paths.segments / str(SegmentName(1, 2, 0, "main"))).symlink_to("/etc/passwd")
    with pytest.raises(CorruptionError, match="not a file"):
        paths.segment_names()


@pytest.mark.parametrize("name", ["MANIFEST.json", "LOCK", "tmp", "segments", "journal", ".archive", "sessions"])
def test_a_link_in_place_of_a_part_of_the_bank_is_refused(tmp_path: Path, name: str) -> None:
    paths = BankPaths(tmp_path / "bank")
    paths.root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (paths.root / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptionError, match="symbolic link"):
        paths.refuse_strangers(link=True)


def test_a_link_in_place_of_a_version_directory_or_a_claim_is_refused(tmp_path: Path) -> None:
    paths = BankPaths(tmp_path / "bank")
    for link in (paths.version(1), paths.claim(1)):
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path)
        with pytest.raises(CorruptionError, match="symbolic link"):
            paths.refuse_strangers(link=True)
        link.unlink()
    paths.archive.symlink_to(".archive/v000001")
    paths.refuse_strangers(link=True)
