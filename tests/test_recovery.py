"""What a bank's files say after damage, crashes and failed writes; reading changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import token_group
from runs import kill, tree

from arrowbank import CorruptionError, CorruptRecordError, RolloutBank
from arrowbank.archive import healing
from arrowbank.durable.journal import JOURNAL_SCHEMA
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest
from arrowbank.durable.recovery import State, read_state
from arrowbank.durable.stream import map_file, scan
from arrowbank.schema import SEGMENT_SCHEMA


def make(root: Path, groups: int = 6, *, close: bool = True) -> list[str]:
    """A bank whose first two groups were drawn at 0, the next two at 1."""
    bank = RolloutBank.open(root)
    bank.restore(0)
    uids = [bank.append(token_group(number)) for number in range(groups)]
    bank.mark_consumed(uids[:2], 0, state=b"zero")
    bank.mark_consumed(uids[2:4], 1, state=b"one")
    if close:
        bank.close()
    return uids


def state_of(root: Path) -> State:
    paths = BankPaths(root)
    return read_state(paths, read_manifest(paths))


def only(directory: Path) -> Path:
    (path,) = sorted(directory.iterdir())
    return path


def edges_of(root: Path, path: Path) -> list[int]:
    found = scan(map_file(path), path.name, read_manifest(BankPaths(root)).bank_id, SEGMENT_SCHEMA)
    last = found.records[-1]
    return [record.offset for record in found.records] + [last.offset + len(last.message)]


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_live_groups_come_in_the_order_they_were_appended(tmp_path: Path) -> None:
    uids = make(tmp_path)
    assert list(state_of(tmp_path).groups) == uids


def test_reading_twice_finds_the_same_and_writes_nothing(tmp_path: Path) -> None:
    make(tmp_path)
    damage(only(tmp_path / "segments"), 3000)
    before = tree(tmp_path)
    first, second = state_of(tmp_path), state_of(tmp_path)
    assert (first.groups.keys(), first.damage, first.lost) == (second.groups.keys(), second.damage, second.lost)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("hit", range(6))
def test_a_damaged_record_costs_that_record_and_is_told(tmp_path: Path, hit: int) -> None:
    uids = make(tmp_path)
    segment = only(tmp_path / "segments")
    edges = edges_of(tmp_path, segment)
    damage(segment, (edges[hit] + edges[hit + 1]) // 2)
    with RolloutBank.open(tmp_path) as bank:
        restored = bank.restore(0)
        given = [group.uid for draw in restored.draws for group in draw.groups]
        pending = [group.uid for group in restored.pending["math"]]
        assert given + pending == [uid for uid in uids if uid != uids[hit]]
        assert [uid for draw in restored.draws for uid in draw.lost] == ([uids[hit]] if hit < 4 else [])
        (told,) = restored.report.damage
        assert f"{segment.name} at byte {edges[hit]}: corrupt" in told
        assert restored.report.lost_records == 1
        assert "0 torn, 1 corrupt, 1 records lost" in str(restored.report)
        assert len(str(restored.report).splitlines()) == 5


@pytest.mark.parametrize("attempts", [0, 1, 3])
def test_what_an_unfinished_append_left_out_was_never_acknowledged_and_is_not_told_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    """Nor after opens that say how many records count, and get no further."""
    bank = RolloutBank.open(tmp_path)
    bank.restore(0)
    bank.append(token_group(0))
    bank.append_many([token_group(1), token_group(2)])
    segment = only(tmp_path / "segments")
    data = bytearray(segment.read_bytes())
    second = edges_of(tmp_path, segment)[1]
    data[second : second + 8] = bytes(8)  # the sync did not return, and this page was not written
    segment.write_bytes(data)
    for _ in range(attempts):
        with monkeypatch.context() as patch:
            patch.setattr(healing, "copy", fails)
            kill(tmp_path)
    with kill(tmp_path) as bank:
        report = bank.restore(0).report
        assert (report.pending_groups, len(report.torn), report.corrupt, report.lost_records) == (2, 1, (), 0)


def fails(*_: object) -> None:
    raise OSError(5, "planted")


def test_records_that_the_journal_says_were_there_are_lost_though_the_file_ends_cleanly(tmp_path: Path) -> None:
    make(tmp_path)
    segment = only(tmp_path / "segments")
    edges = edges_of(tmp_path, segment)
    os.truncate(segment, edges[3])
    state = state_of(tmp_path)
    (gap,) = state.damage
    assert (len(state.groups), gap.lost, gap.torn, state.lost) == (3, 3, False, {segment.name: 3})


def test_every_truncation_of_a_killed_banks_segment_opens(tmp_path: Path) -> None:
    uids = make(tmp_path / "whole", close=False)  # a killed session did not tell how many records there were
    segment = only(tmp_path / "whole/segments")
    edges = edges_of(tmp_path / "whole", segment)
    manifest = read_manifest(BankPaths(tmp_path / "whole"))
    data = segment.read_bytes()
    for length in range(0, len(data), 97):
        segment.write_bytes(data[:length])
        state = read_state(BankPaths(tmp_path / "whole"), manifest)
        whole = sum(edge <= length for edge in edges[1:])
        assert list(state.groups) == uids[:whole]
        assert state.lost == {}
        assert all(place.torn == (length >= edges[0]) for place in state.damage)


def test_a_torn_journal_is_no_reason_to_refuse(tmp_path: Path) -> None:
    uids = make(tmp_path, close=False)
    journal = only(tmp_path / "journal")
    edges = edges_of(tmp_path, journal)
    os.truncate(journal, edges[2] + 100)  # in the middle of the second draw
    with RolloutBank.open(tmp_path, takeover="force") as bank:
        restored = bank.restore(0)
        assert [draw.iteration for draw in restored.draws] == [0]
        assert [group.uid for group in restored.pending["math"]] == uids[2:]
        assert "torn" in restored.report.damage[0]


def test_a_damaged_journal_record_is_refused_with_its_iterations_until_accepted(tmp_path: Path) -> None:
    uids = make(tmp_path)
    journal = only(tmp_path / "journal")
    edges = edges_of(tmp_path, journal)
    damage(journal, edges[1] + 400)  # of the first draw, the second follows
    with RolloutBank.open(tmp_path) as bank:
        with pytest.raises(CorruptRecordError) as refused:
            bank.restore(0)
        said = str(refused.value)
        assert f"{journal} at byte {edges[1]}" in said
        assert "at iteration 0 or later, up to 1," in said
        assert "accept_damage=True" in said
        restored = bank.restore(0, accept_damage=True)
        assert [draw.iteration for draw in restored.draws] == [1]
        assert [group.uid for group in restored.pending["math"]] == uids[:2] + uids[4:]


def test_a_damaged_schema_message_of_a_journal_or_segment_costs_nothing(tmp_path: Path) -> None:
    uids = make(tmp_path)
    for directory in ("journal", "segments"):
        path = only(tmp_path / directory)
        damage(path, 4)
    with RolloutBank.open(tmp_path) as bank:
        restored = bank.restore(0)
        assert len(restored.report.damage) == 2
        assert restored.report.lost_records == 0
        assert [group.uid for draw in restored.draws for group in draw.groups] == uids[:4]


def test_every_bit_of_a_draw_in_the_middle_of_the_journal_is_guarded(tmp_path: Path) -> None:
    make(tmp_path)
    journal = only(tmp_path / "journal")
    edges = edges_of(tmp_path, journal)
    data = journal.read_bytes()
    for byte in range(edges[1], edges[2], 7):
        journal.write_bytes(data[:byte] + bytes([data[byte] ^ 4]) + data[byte + 1 :])
        state = state_of(tmp_path)
        assert len(state.hidden) == 1
        assert [draw.iteration for draw in state.history.lines[1].draws()] == [1]


def test_abandoned_records_are_not_restored_though_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(times: list[int]) -> Callable[[int], None]:
        fdatasync = os.fdatasync

        def sync(descriptor: int) -> None:
            fdatasync(descriptor)
            if times:
                times.pop()
                raise OSError(5, "planted")

        return sync

    bank = RolloutBank.open(tmp_path)
    bank.restore(0)
    kept = [bank.append(token_group(1))]
    monkeypatch.setattr(os, "fdatasync", failing([1]))
    with pytest.raises(OSError, match="planted"):
        bank.append_many([token_group(2), token_group(3)])
    kept.append(bank.append(token_group(4)))
    del bank  # killed
    state = state_of(tmp_path)
    assert list(state.groups) == kept
    assert state.lost == {}
    assert state.damage == []
    segments = BankPaths(tmp_path).segment_names()
    assert [(name.iteration, name.part) for name in segments] == [(0, 0), (0, 1)]


def test_a_foreign_file_among_the_segments_is_told_and_left(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "segments/part-0.arrow").write_text("x")
    with pytest.raises(CorruptionError, match=r"part-0\.arrow"):
        RolloutBank.open(tmp_path)
    (tmp_path / "segments/part-0.arrow").unlink()
    with RolloutBank.open(tmp_path) as bank:
        assert bank.restore(0).report.damage == ()


def test_a_segment_of_another_bank_gives_nothing(tmp_path: Path) -> None:
    make(tmp_path / "one")
    make(tmp_path / "two", groups=3)
    only(tmp_path / "one/segments").replace(only(tmp_path / "two/segments"))
    state = state_of(tmp_path / "two")
    assert state.groups == {}
    assert [place.torn for place in state.damage] == [False]


def test_an_abandoned_entry_with_absurd_numbers_allocates_nothing(tmp_path: Path) -> None:
    from arrowbank.durable.journal import Abandoned, Entry

    bank = RolloutBank.open(tmp_path)
    uid = bank.append(token_group(1))
    absurd: list[Entry] = [
        Abandoned(name, 5, 2**60) for name in (only(tmp_path / "segments").name, "s0001-0000.arrows")
    ]
    bank._journal.write(absurd)
    state = state_of(tmp_path)
    assert (list(state.groups), state.lost) == ([uid], {})


def test_edges_are_those_of_neighbouring_records(tmp_path: Path) -> None:
    make(tmp_path)
    edges: list[Any] = edges_of(tmp_path, only(tmp_path / "segments"))
    assert all(low < high for low, high in pairwise(edges))


def test_what_is_damaged_in_a_journal_is_in_quarantine_before_its_file_goes(tmp_path: Path) -> None:
    path = tmp_path / "bank"
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        bank.mark_consumed([bank.append(token_group(1))], 0)
        bank.evict([bank.append(token_group(2))], "x")
    journal = only(path / "journal")
    data = bytearray(journal.read_bytes())
    place = data.rindex(b"reason")
    data[place] ^= 1
    journal.write_bytes(data)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        with pytest.raises(CorruptRecordError, match="may be hidden"):
            bank.restore(0)
        report = bank.restore(0, accept_damage=True).report
        assert len(report.corrupt) == 1
        bank.evict([bank.append(token_group(3))], "y")
        bank.begin_iteration(1)
        bank.checkpoint(1, wait=True)
        bank.close(final=True)
    RolloutBank.open(path).close()
    assert not journal.exists()
    (kept,) = (path / "quarantine").glob(f"{journal.name}-*.bytes")
    assert kept.read_bytes() in bytes(data)
    assert b"eason" in kept.read_bytes()


def test_without_the_snapshot_that_the_manifest_names_restore_refuses_until_told(tmp_path: Path) -> None:
    path = tmp_path / "bank"
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(3):
            bank.begin_iteration(at)
            bank.mark_consumed([bank.append(token_group(at))], at)
            bank.begin_iteration(at + 1)
            bank.checkpoint(at + 1, wait=True)
        left = bank.append(token_group(9))
    base = read_manifest(BankPaths(path)).journal
    whole = (path / "journal" / base).read_bytes()
    for damaged in (None, whole[:600] + bytes([whole[600] ^ 1]) + whole[601:]):
        if damaged is None:
            (path / "journal" / base).unlink()
        else:
            (path / "journal" / base).write_bytes(damaged)
        refused = pytest.raises(CorruptRecordError, match="at any iteration may be hidden")
        with RolloutBank.open(path) as bank, refused:
            bank.restore(3)
        (path / "journal" / base).write_bytes(whole)
    (path / "journal" / base).unlink()
    with RolloutBank.open(path) as bank:
        restored = bank.restore(3, accept_damage=True)
        assert [group.uid for queue in restored.pending.values() for group in queue] == [left]
        assert len(restored.report.corrupt) == 1


def test_what_a_killed_session_left_is_synced_before_a_restore_counts_on_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in the page cache only: its owner was killed before his own sync."""
    bank = RolloutBank.open(path)
    bank.restore(0)
    uid = bank.append(token_group(1))
    left = {path / "segments", path / "journal", *(path / "segments").iterdir(), *(path / "journal").iterdir()}
    synced: list[Path] = []
    fsync, fdatasync = os.fsync, os.fdatasync

    def told(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def journaled(descriptor: int) -> None:
        assert left <= set(synced), "the restore is on the disk, and what it counts on perhaps not"
        fdatasync(descriptor)

    with kill(path) as again:
        monkeypatch.setattr(os, "fsync", told)
        monkeypatch.setattr(os, "fdatasync", journaled)
        assert [group.uid for group in again.restore(0).pending["math"]] == [uid]
        monkeypatch.undo()
        assert left <= set(synced)


@pytest.mark.parametrize("kept", ["nothing", "another part"])
def test_the_journal_of_a_session_that_has_appended_is_missed(path: Path, kept: str) -> None:
    """It was there before any segment; draws that it told of must not be made again without a word."""
    uids = make(path, close=False)
    only(path / "journal").unlink()
    if kept == "another part":  # of a session that went no further
        with RolloutBank.open(path, takeover="force"):
            pass
    with RolloutBank.open(path, takeover="force") as bank:
        with pytest.raises(CorruptRecordError, match=r"records that were here are missing.*may be hidden"):
            bank.restore(0)
        restored = bank.restore(0, accept_damage=True)
        assert [group.uid for group in restored.pending["math"]] == uids
        assert len(restored.report.corrupt) == 1


def test_a_session_that_has_only_appended_has_a_journal_and_misses_nothing(path: Path) -> None:
    bank = RolloutBank.open(path)
    uid = bank.append(token_group(1))
    assert only(path / "journal").stat().st_size > 0
    with kill(path) as again:
        restored = again.restore(0)
        assert [group.uid for group in restored.pending["math"]] == [uid]
        assert restored.report.damage == ()


@pytest.mark.parametrize("directory", ["journal", "segments"])
@pytest.mark.parametrize("number", [0, 1])
def test_bytes_taken_out_of_a_file_that_nothing_has_sealed_are_damage(path: Path, directory: str, number: int) -> None:
    """Those behind are whole and stand elsewhere: no kill and no power cut leaves that."""
    make(path, close=False)
    place = only(path / directory)
    manifest = read_manifest(BankPaths(path))
    schema = SEGMENT_SCHEMA if directory == "segments" else JOURNAL_SCHEMA
    record = scan(map_file(place), place.name, manifest.bank_id, schema).records[number]
    data = place.read_bytes()
    fresh = path / "fresh"
    fresh.write_bytes(data[: record.offset] + data[record.offset + len(record.message) :])
    os.replace(fresh, place)
    with RolloutBank.open(path, takeover="force") as bank:
        if directory == "journal":
            with pytest.raises(CorruptRecordError, match="may be hidden"):
                bank.restore(0)
        restored = bank.restore(0, accept_damage=directory == "journal")
        assert [line for line in restored.report.corrupt if "records stand elsewhere" in line]
        assert restored.report.torn == ()


@pytest.mark.parametrize("between", [0, 2])
@pytest.mark.parametrize("cut", ["within", "before a record", "gone"])
def test_a_journal_that_was_closed_has_no_torn_tail(path: Path, cut: str, between: int) -> None:
    """LOCK says how many records it had, and so do the claims after it: of sessions that went no further, too."""
    make(path)
    journal = only(path / "journal")
    if cut == "gone":
        journal.unlink()
    else:
        os.truncate(journal, edges_of(path, journal)[2] + (100 if cut == "within" else 0))
    for _ in range(between):
        RolloutBank.open(path).close()
    with RolloutBank.open(path) as bank:
        with pytest.raises(CorruptRecordError, match="may be hidden"):
            bank.restore(0)
        bank.restore(0, accept_damage=True)
    with RolloutBank.open(path) as bank:
        bank.restore(0)


def test_a_bank_that_was_closed_again_and_again_misses_nothing(path: Path) -> None:
    make(path)
    for number in range(3):
        RolloutBank.open(path).close()
        with RolloutBank.open(path) as bank:
            restored = bank.restore(0)
            assert (len(restored.draws), restored.report.damage) == (2, ())
            for draw in restored.draws:
                bank.mark_consumed([str(group.uid) for group in draw.groups], draw.iteration, state=draw.state)
            bank.append(token_group(100 + number))


@pytest.mark.parametrize("name", ["journal_names", "segment_names", "claimed_sessions"])
@pytest.mark.parametrize("nth", range(4))
@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_missed_that_a_session_writes_while_files_are_mapped(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, when: str
) -> None:
    make(path)
    paths, calls = BankPaths(path), count()
    manifest, listed = read_manifest(paths), getattr(BankPaths, name)

    def meanwhile(self: BankPaths) -> Any:
        names = listed(self) if when == "after" else []
        if next(calls) == nth:
            monkeypatch.setattr(BankPaths, name, listed)
            for iteration in (2, 3):  # two whole sessions, each closed
                with RolloutBank.open(path) as bank:
                    bank.restore(0)
                    bank.mark_consumed([bank.append(token_group(100 + iteration))], iteration)
        return names if when == "after" else listed(self)

    monkeypatch.setattr(BankPaths, name, meanwhile)
    state = read_state(paths, manifest)
    assert (state.damage, state.hidden, state.lost) == ([], [], {})
    assert len(state.groups) in (6, 8) and read_manifest(paths) == manifest
