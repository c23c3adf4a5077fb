"""Entries come back as they were written, and one whose write raised does not count."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import polars
import pytest
from builders import token_group
from runs import kill

from arrowbank import BankClosedError, FencedError, RolloutBank
from arrowbank.durable import files
from arrowbank.durable.journal import (
    Abandoned,
    Checkpointed,
    Drawn,
    Entry,
    Evicted,
    Facts,
    Journal,
    Restored,
    Sealed,
    read_journal,
)
from arrowbank.durable.layout import BankPaths, JournalName
from arrowbank.durable.manifest import create_manifest
from arrowbank.durable.recovery import read_state
from arrowbank.durable.segment import SegmentFacts
from arrowbank.durable.stream import StreamWriter
from arrowbank.errors import CorruptRecordError

MANIFEST = create_manifest()


@pytest.fixture
def paths(tmp_path: Path) -> BankPaths:
    paths = BankPaths(tmp_path)
    files.make_directories([*paths.directories, paths.session_tmp(1)])
    return paths


def journal_of(paths: BankPaths, check_fence: Any = lambda: None) -> Journal:
    return Journal(paths, MANIFEST.bank_id, 1, check_fence)


def entries(paths: BankPaths, part: int = 0) -> list[Entry]:
    found, damage = read_journal(paths, JournalName(1, part), MANIFEST.bank_id)
    assert damage == []
    return [entry for _, entry in found]


ALL: list[Entry] = [
    Restored(3, "replay", None),
    Restored(3, "requeue", 2),
    Drawn(3, ("a", "b" * 500, "ü"), 2, b"\0\xff" * 100),
    Drawn(4, ("c",)),
    Evicted(("d", "e"), 'because "of" this\n'),
    Checkpointed(5),
    Abandoned("00000001-main-s0001-0000.arrows", 3, 4),
    Sealed((SegmentFacts("a", 1, 2), SegmentFacts("b", 3, 4))),
    Sealed(()),
]


def test_every_entry_comes_back_in_order(paths: BankPaths) -> None:
    journal = journal_of(paths)
    journal.write(ALL[:4])
    for entry in ALL[4:]:
        journal.write([entry])
    assert entries(paths) == ALL
    journal.close()
    assert entries(paths) == ALL


def test_entries_of_one_write_share_a_sync(paths: BankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(paths)
    journal.write(ALL[:1])
    syncs: list[int] = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    journal.write(ALL)
    assert len(syncs) == 1


def test_a_journal_nothing_was_written_to_is_no_file(paths: BankPaths) -> None:
    journal_of(paths).close()
    assert paths.journal_names() == []


def test_any_arrow_reader_shows_a_journal(paths: BankPaths) -> None:
    journal_of(paths).write(ALL)
    rows = polars.read_ipc_stream(paths.journal / str(JournalName(1, 0)))
    assert rows["kind"].to_list()[2:4] == ["drawn", "drawn"]
    assert rows["state"][2] == b"\0\xff" * 100


@pytest.mark.parametrize("failing", ["pwritev", "fdatasync", "fsync"])
def test_a_write_that_raised_does_not_count_and_the_next_part_says_so(
    paths: BankPaths, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    journal = journal_of(paths)
    if failing != "fsync":  # of the creation
        journal.write([Restored(0, "replay", None)])

    def fail(*_: Any) -> int:
        raise OSError(5, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        for _ in range(2):
            with pytest.raises(OSError, match="planted"):
                journal.write([Drawn(0, ("phantom",))])
    journal.write([Drawn(0, ("real",))])
    journal.close()
    line = read_state(paths, MANIFEST).history.line(1)
    assert [draw.uids for draw in line.draws()] == [("real",)]


def test_abandoned_records_are_told_at_once_or_with_the_next_entry_or_at_close(
    paths: BankPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = journal_of(paths)
    journal.abandon("x", 1, 2)
    assert entries(paths) == [Abandoned("x", 1, 2)]

    def fail(*_: Any) -> None:
        raise OSError(5, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        journal.abandon("y", 3, 4)
    assert "will tell later" in caplog.text
    journal.close()
    assert entries(paths, 1) == [Abandoned(str(JournalName(1, 0)), 1, 1), Abandoned("y", 3, 4)]


def test_what_a_takeover_overtook_is_annulled(paths: BankPaths) -> None:
    looks = iter([None, None, None, FencedError("planted"), FencedError("planted")])

    def check() -> None:
        error = next(looks)
        if error is not None:
            raise error

    journal = journal_of(paths, check)
    journal.write([Drawn(0, ("kept",))])
    for _ in range(2):  # overtaken during the write; known before it
        with pytest.raises(FencedError):
            journal.write([Drawn(1, ("overtaken",))])
    line = read_state(paths, MANIFEST).history.line(1)
    assert [draw.uids for draw in line.draws()] == [("kept",)]


def test_many_threads_write_whole_entries(paths: BankPaths) -> None:
    journal = journal_of(paths)
    threads = [
        threading.Thread(target=lambda n=number: [journal.write([Checkpointed(n)]) for _ in range(10)])  # type: ignore[misc]
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.iteration for entry in entries(paths) if isinstance(entry, Checkpointed)) == sorted(
        [*range(4)] * 10
    )


def test_a_sealed_record_that_is_no_entry_is_told(paths: BankPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unheard(Checkpointed):
        pass

    journal_of(paths).write([Unheard(1)])
    with pytest.raises(CorruptRecordError, match=r"no journal entry.*unknown kind 'unheard'"):
        read_journal(paths, JournalName(1, 0), MANIFEST.bank_id)


def test_no_descriptor_is_left_open(paths: BankPaths) -> None:
    before = len(os.listdir("/proc/self/fd"))
    journal = journal_of(paths)
    journal.write(ALL)
    journal.close()
    journal.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "planted")])
@pytest.mark.parametrize("call", ["pwritev", "fsync", "link", "unlink"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_part_whose_creation_was_cut_short_is_not_missed(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, call: str, is_late: bool
) -> None:
    """Before or after the call had its effect; then a kill before the next part has its first record."""
    bank = RolloutBank.open(path)
    real = getattr(os, call)

    def fails(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(os, call, real)
        if is_late:
            real(*args, **options)
        raise error

    monkeypatch.setattr(os, call, fails)
    with pytest.raises((KeyboardInterrupt, OSError)):
        bank.restore(0)
    with monkeypatch.context() as patch:
        patch.setattr(StreamWriter, "append", killed)
        with pytest.raises((InterruptedError, BankClosedError)):  # an interrupted handle does not go on
            bank.restore(0)
    with kill(path) as again:
        assert again.restore(0).report.damage == ()
        again.append(token_group(1))
    with RolloutBank.open(path) as last:
        assert last.restore(0).report.pending_groups == 1


def test_a_record_that_was_given_up_and_never_came_is_counted_once() -> None:
    facts = Facts({"a": [range(2, 5), range(9, 12)]})
    assert facts.abandoned_before("a", 10) == 4
    assert facts.abandoned_before("a", 10, [range(3, 7)]) == 6
    assert facts.abandoned_before("b", 10, [range(3, 7)]) == 4


def killed(*_: Any) -> None:
    raise InterruptedError("as by a kill")
