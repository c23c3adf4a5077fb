"""Damaged files at open: what is good is copied, what is not lies in quarantine; the next open finds nothing to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import polars
import pyarrow as pa
import pytest
from builders import token_group
from runs import kill, train
from test_commit_failures import CALLS, failing_once

from arrowbank import CorruptRecordError, RolloutBank
from arrowbank.archive import archivist
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest
from arrowbank.durable.message import build_message
from arrowbank.durable.stream import StreamWriter
from arrowbank.schema import SEGMENT_SCHEMA

Damaging = Callable[[Path], None]


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 300)


def flip_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def flip_schema(path: Path) -> None:
    flip(path, 100)


def cover_with_junk(path: Path) -> None:
    path.write_bytes(b"junk" * 5000)


DAMAGES: dict[str, tuple[Damaging, int]] = {
    "torn": (cut, 1),
    "a bit in the middle": (flip_middle, 1),
    "its schema": (flip_schema, 0),
    "all": (cover_with_junk, 4),
}
"""Each with the groups that it costs."""


def killed(path: Path, *, groups: int = 4) -> list[str]:
    """A bank whose holder was killed: two of its groups are drawn."""
    bank = RolloutBank.open(path)
    bank.restore(0)
    uids = [bank.append(token_group(number)) for number in range(groups)]
    bank.mark_consumed(uids[:2], 0)
    return uids


def files_of(path: Path) -> dict[str, bytes]:
    """Everything that holds data, but what was said in the journal."""
    names = ("segments", "quarantine", ".archive", "MANIFEST.json")
    found = [file for name in names for file in [path / name, *(path / name).rglob("*")] if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


@pytest.mark.parametrize("name", DAMAGES)
def test_after_an_open_there_are_whole_streams_only_and_the_next_open_changes_nothing(path: Path, name: str) -> None:
    damage, lost = DAMAGES[name]
    uids = killed(path)
    (segment,) = (path / "segments").iterdir()
    damage(segment)
    damaged = segment.read_bytes()
    with kill(path) as bank:
        restored = bank.restore(0)
        given = [group.uid for draw in restored.draws for group in draw.groups]
        given += [group.uid for group in restored.pending.get("math", ())]
        assert (given, len(given)) == ([uid for uid in uids if uid in given], len(uids) - lost)
        assert {uid for draw in restored.draws for uid in draw.lost} == set(uids[:2]) - set(given)
        assert restored.report.quarantined == 1
    streams = list((path / "segments").iterdir())
    assert segment not in streams
    for stream in streams:
        assert polars.read_ipc_stream(stream).equals(polars.from_arrow(pa.ipc.open_stream(stream).read_all()))
    (note,) = (path / "quarantine").glob("*.json")
    said = json.loads(note.read_text())
    assert said["file"] == segment.name
    assert note.with_suffix(".bytes").read_bytes() == damaged[said["offset"] : said["offset"] + said["length"]]
    healed = files_of(path)
    with RolloutBank.open(path) as bank:
        again = bank.restore(0)
        repeated = [group.uid for draw in again.draws for group in draw.groups]
        assert repeated + [group.uid for group in again.pending.get("math", ())] == given
        assert (again.report.damage, again.report.quarantined) == ((), 1)
    assert files_of(path) == healed


def test_a_torn_journal_is_summed_up_in_a_whole_one(path: Path) -> None:
    uids = killed(path)
    (journal,) = (path / "journal").iterdir()
    with journal.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"\xff" * 50)
    with kill(path) as bank:
        assert [draw.groups[0].uid for draw in bank.restore(0).draws] == uids[:1]
    assert journal not in (path / "journal").iterdir()
    for stream in (path / "journal").iterdir():
        pa.ipc.open_stream(stream).read_all()
    assert len(list((path / "quarantine").glob("*.json"))) == 1


def test_a_draw_that_a_damaged_journal_may_hide_is_given_up_once(path: Path) -> None:
    killed(path)
    (journal,) = (path / "journal").iterdir()
    with kill(path) as bank:
        bank.restore(0)  # says how many entries the damaged one has
    flip(journal, journal.stat().st_size - 60)
    damaged = files_of(path)
    with RolloutBank.open(path) as bank:
        with pytest.raises(CorruptRecordError, match="may be hidden"):
            bank.restore(0)
        assert files_of(path) == damaged
        restored = bank.restore(0, accept_damage=True)
        assert len(restored.report.corrupt) == 1
    with RolloutBank.open(path) as bank:
        assert bank.restore(0).report.damage == ()
    assert len(list((path / "quarantine").glob("*.json"))) == 1


def test_what_a_damaged_journal_may_hide_is_not_forgotten_by_a_session_that_did_not_accept_it(path: Path) -> None:
    killed(path)
    (journal,) = (path / "journal").iterdir()
    with journal.open("r+b") as file:  # closed, and junk behind the end
        file.seek(-8, os.SEEK_END)
        file.write(bytes.fromhex("ffffffff00000000") + b"junk" * 8 + bytes.fromhex("ffffffff00000000"))
    for number in range(2):
        with kill(path) as bank:
            with pytest.raises(CorruptRecordError, match="may be hidden"):
                bank.restore(0)
            bank.append(token_group(10 + number))


def test_nothing_is_compacted_while_a_journal_may_hide_a_draw(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uids = bank.append_many([token_group(number) for number in range(3)])
        bank.mark_consumed(uids[:1], 0)
        bank.evict(uids[1:], "no use")
        bank.begin_iteration(1)
    (journal,) = (path / "journal").iterdir()
    flip(journal, 600)
    with RolloutBank.open(path) as bank:
        bank.close(final=True)
    with RolloutBank.open(path) as bank, pytest.raises(CorruptRecordError, match="may be hidden"):
        bank.restore(0)


def test_a_sealed_record_that_is_no_group_costs_that_record(path: Path) -> None:
    """As another program might write it: the seal matches, the rows do not."""
    uids = killed(path)
    paths = BankPaths(path)
    manifest = read_manifest(paths)
    empty = SEGMENT_SCHEMA.empty_table().combine_chunks().to_batches() or [
        pa.RecordBatch.from_pylist([], SEGMENT_SCHEMA)
    ]
    name = "00000000-other-s0001-0000.arrows"
    (path / "tmp/s0001").mkdir(exist_ok=True)
    stream = StreamWriter.create(paths.segments / name, path / "tmp/s0001", manifest.bank_id, SEGMENT_SCHEMA)
    stream.append([build_message(empty[0], {"uid": 5, "iteration": 0})])
    stream.append(
        [build_message(empty[0], {"uid": "x", "iteration": -1, "env": None, "problem": None, "split": "a", "size": 0})]
    )
    stream.close()
    with kill(path) as bank:
        report = bank.restore(0).report
        assert (report.lost_records, report.pending_groups, report.planned_groups) == (2, len(uids) - 2, 2)
        assert all("no group's" in line for line in report.corrupt)
    assert len(list((path / "quarantine").glob("*.json"))) == 2


def test_a_closed_segment_that_is_gone_is_told_with_what_it_held(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, range(3), checkpoints=False)
    gone = sorted((path / "segments").iterdir())[1]
    gone.unlink()
    for _ in range(2):
        with RolloutBank.open(path) as bank:
            restored = bank.restore(0)
            assert restored.report.corrupt == (
                f"{gone.name} at byte 0: corrupt, 0 bytes: records that were here are missing",
            )
            assert (restored.report.lost_records, [len(draw.lost) for draw in restored.draws]) == (2, [0, 2, 0])


def test_a_part_of_the_journal_that_is_gone_may_hide_draws(path: Path) -> None:
    killed(path)
    with kill(path) as bank:
        bank.restore(0)
    (path / "journal/s0001-0000.arrows").unlink()
    with RolloutBank.open(path) as bank:
        with pytest.raises(CorruptRecordError, match=r"s0001-0000.arrows.*missing.*may be hidden"):
            bank.restore(0)
        bank.restore(0, accept_damage=True)
    with RolloutBank.open(path) as bank:
        bank.restore(0)


def test_groups_whose_copies_cannot_be_read_are_not_left_out_in_silence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids = killed(path)
    (segment,) = (path / "segments").iterdir()
    flip_middle(segment)

    def fails(*_: object) -> None:
        raise OSError(5, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(archivist, "read_groups", fails)
        with pytest.raises(OSError, match="planted"):
            kill(path)
    with kill(path) as bank:
        restored = bank.restore(0)
        given = [group.uid for draw in restored.draws for group in draw.groups]
        assert len(given + [group.uid for group in restored.pending["math"]]) == len(uids) - 1


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_any_call_that_fails_in_healing_costs_nothing(tmp_path: Path, call: str) -> None:
    uids = killed(tmp_path / "damaged")
    (segment,) = (tmp_path / "damaged/segments").iterdir()
    flip_middle(segment)
    for at in range(80):
        path = tmp_path / f"{call}-{at}"
        shutil.copytree(tmp_path / "damaged", path, symlinks=True)
        with failing_once(call, at) as calls:
            try:
                RolloutBank.open(path, takeover="force").close()
            except OSError as error:
                assert "planted" in str(error)
        with kill(path) as bank:
            restored = bank.restore(0)
            given = [group.uid for draw in restored.draws for group in draw.groups]
            given += [group.uid for group in restored.pending["math"]]
            assert given == [uid for uid in uids if uid in given] and len(given) == len(uids) - 1
            assert len(list((path / "quarantine").glob(f"{segment.name}-*.json"))) == 1
        for stream in (path / "segments").iterdir():
            pa.ipc.open_stream(stream).read_all()
        if calls[0] < at // 2 + 1:
            break
    else:
        raise AssertionError("the work makes more calls than were made to fail")
