"""The bank's promises, through its public methods and real files."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from builders import groups, token_group

from arrowbank import (
    BankClosedError,
    BankLockedError,
    BankNotFoundError,
    CorruptManifestError,
    CorruptRecordError,
    DuplicateGroupError,
    FencedError,
    FormatVersionError,
    InvalidDrawError,
    ReplayUnavailableError,
    RolloutBank,
    UnknownGroupError,
    UnrepresentableError,
    scan,
)
from arrowbank.archive import compactor
from arrowbank.archive.store import ArchiveStore
from arrowbank.durable.manifest import write_manifest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bank"


def tree(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


def train(bank: RolloutBank, start: int, end: int, *, every: int = 1) -> list[str]:
    """Two groups an iteration; return the uids in order."""
    uids = []
    for k in range(start, end):
        bank.begin_iteration(k)
        batch = bank.append_many([token_group(2 * k), token_group(2 * k + 1)])
        bank.mark_consumed(batch, k, state=b"%d" % k)
        if (k + 1) % every == 0:
            bank.checkpoint(k + 1, wait=True)
        uids += batch
    return uids


# append


def test_every_kind_of_group_comes_back_after_reopening(path: Path) -> None:
    made = list(groups().values())
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        for group in made:
            assert bank.append(group) == group.uid
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        back = {group.uid: group for queue in restored.pending.values() for group in queue}
        assert [back[group.uid] for group in made] == made
        assert restored.report.pending_groups == len(made) and restored.report.damage == ()


def test_pending_groups_come_back_oldest_first_by_environment(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        for k in range(3):
            bank.begin_iteration(k)
            bank.append(token_group(k, env_id="a"))
            bank.append(token_group(10 + k, env_id="b"))
    with RolloutBank.open(path) as bank:
        pending = bank.restore(0).pending
        assert [group[0].reward for group in pending["a"]] == [0.0, 100.0, 200.0]
        assert [group[0].reward for group in pending["b"]] == [1000.0, 1100.0, 1200.0]


def test_appends_in_flight_share_syncs_and_are_all_there(path: Path) -> None:
    made = [token_group(seed) for seed in range(64)]
    with RolloutBank.open(path) as bank:
        bank.restore(0)

        async def append_all() -> list[str]:
            return await asyncio.gather(*(bank.append_async(group) for group in made))

        uids = asyncio.run(append_all())
        assert uids == [group.uid for group in made]
        assert bank.stats().commits < 64
    with RolloutBank.open(path) as bank:
        assert len(bank.restore(0).pending["math"]) == 64


def test_the_event_loop_runs_between_encodings(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def append_all() -> None:
            counter = asyncio.create_task(count())
            await asyncio.gather(*(bank.append_async(token_group(seed)) for seed in range(32)))
            counter.cancel()

        asyncio.run(append_all())
        assert turns >= 32


def test_a_refused_group_is_left_as_it_was_and_so_are_its_neighbours(path: Path) -> None:
    good, bad = token_group(1), token_group(2, note=float("nan"))
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        with pytest.raises(UnrepresentableError, match=r"rollouts\[0\]\.note"):
            bank.append_many([good, bad])
        assert (good.uid, bad.uid) == (None, None)
        bank.append(good)
        assert bank.stats().live_groups == 1


def test_a_group_cannot_be_appended_twice(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        group = token_group()
        bank.append(group)
        with pytest.raises(DuplicateGroupError, match="set uid to None"):
            bank.append(group)
        with pytest.raises(TypeError, match="expected a RolloutGroup, found list"):
            bank.append([group])  # type: ignore[arg-type]


def test_an_append_that_failed_leaves_nothing_and_may_be_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        first = bank.append(token_group(1))
        fdatasync = os.fdatasync
        failures = [OSError(28, "no space left on device")]

        def fail_once(descriptor: int) -> None:
            if failures:
                raise failures.pop()
            fdatasync(descriptor)

        monkeypatch.setattr(os, "fdatasync", fail_once)
        group = token_group(2)
        with pytest.raises(OSError, match="no space left"):
            bank.append(group)
        again = bank.append(group)
        bank.mark_consumed([first, again], 0)
    names = sorted(file.name for file in (path / "segments").iterdir())
    assert names == ["00000000-main-s0001-0000.arrows", "00000000-main-s0001-0001.arrows"]
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        assert [group.uid for group in restored.draws[0].groups] == [first, again]
        assert restored.pending == {} and restored.report.lost_records == 0


def test_a_failed_append_does_not_come_back_when_it_is_not_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        bank.append(token_group(1))
        fdatasync, failing = os.fdatasync, [True]

        def fail(descriptor: int) -> None:
            if failing.pop() if failing else False:
                raise OSError(5, "input/output error")
            fdatasync(descriptor)

        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="input/output"):
            bank.append(token_group(2))
    with RolloutBank.open(path) as bank:
        assert bank.restore(0).report.pending_groups == 1


def test_a_draw_that_failed_was_not_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        a, b = bank.append_many([token_group(1), token_group(2)])
        bank.mark_consumed([a], 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "no space left")))
            with pytest.raises(OSError, match="no space left"):
                bank.mark_consumed([b], 1)
        bank.mark_consumed([b], 2)
    with RolloutBank.open(path) as bank:
        draws = bank.restore(0).draws
        assert [(draw.iteration, [group.uid for group in draw.groups]) for draw in draws] == [(0, [a]), (2, [b])]


def test_other_splits_and_evicted_groups_are_kept_and_never_handed_out(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        held = bank.append(token_group(1), split="eval")
        rejected = bank.append(token_group(2), evicted="zero variance", source_index=17)
        with pytest.raises(InvalidDrawError, match="split 'eval'"):
            bank.mark_consumed([held], 0)
        with pytest.raises(InvalidDrawError, match="evicted"):
            bank.mark_consumed([rejected], 0)
    with RolloutBank.open(path) as bank:
        assert bank.restore(0).pending == {}
    rows = scan(path).to_polars().collect()
    assert rows.filter(pl.col("group_uid") == rejected)["evict_reason"].unique().to_list() == ["zero variance"]
    assert rows.filter(pl.col("group_uid") == rejected)["source_index"].unique().to_list() == [17]
    assert rows.filter(pl.col("group_uid") == held)["outcome"].unique().to_list() == [None]


# resume


def test_rolled_back_draws_are_replayed_in_order_with_their_state(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uids = train(bank, 0, 5, every=2)
        waiting = bank.append(token_group(99))
    with RolloutBank.open(path) as bank:
        restored = bank.restore(4)
        assert [(draw.iteration, draw.state, draw.span, draw.offset) for draw in restored.draws] == [(4, b"4", 1, 0)]
        assert [group.uid for group in restored.draws[0].groups] == uids[8:]
        assert [group.uid for group in restored.pending["math"]] == [waiting]
        assert "replay: 1 draws, 2 groups" in str(restored.report)


@pytest.mark.parametrize(("mode", "pending"), [("requeue", 2), ("discard", 0)])
def test_the_other_modes_replay_nothing(path: Path, mode: Any, pending: int) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 5, every=2)
    for _ in range(2):
        with RolloutBank.open(path) as bank:
            restored = bank.restore(4, mode=mode)
            assert (restored.draws, restored.report.pending_groups) == ([], pending)


def test_a_second_restore_on_a_handle_begins_a_session(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uids = train(bank, 0, 3, every=5)
        restored = bank.restore(0)
        assert bank.session == 2
        assert [group.uid for draw in restored.draws for group in draw.groups] == uids
        bank.begin_iteration(0)
        bank.mark_consumed(uids[:2], 0)
        bank.append(token_group(50))


def test_drawing_before_restore_is_refused_on_a_bank_with_groups(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        uid = bank.append(token_group())
    with RolloutBank.open(path) as bank:
        with pytest.raises(InvalidDrawError, match="call restore"):
            bank.mark_consumed([uid], 0)
        bank.restore(0)
        bank.mark_consumed([uid], 0)


def test_unknown_groups_and_slips_of_the_hand_are_refused(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        group = token_group()
        bank.append(group)
        with pytest.raises(UnknownGroupError, match="nobody"):
            bank.mark_consumed(["nobody"], 0)
        with pytest.raises(TypeError, match=r"use group\.uid"):
            bank.mark_consumed([group], 0)  # type: ignore[list-item]
        with pytest.raises(TypeError, match="a list of uids"):
            bank.mark_consumed("abc", 0)
        with pytest.raises(InvalidDrawError, match="only go up"):
            bank.begin_iteration(3)
            bank.begin_iteration(2)
        with pytest.raises(ValueError, match="mode"):
            bank.restore(0, mode="again")  # type: ignore[arg-type]


def test_reasons_and_splits_are_words(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        with pytest.raises(ValueError, match="evicted=True"):
            bank.append(token_group(), evicted=True)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="split=3"):
            bank.append(token_group(), split=3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="in words, not 3"):
            bank.evict([bank.append(token_group())], 3)  # type: ignore[arg-type]
        assert bank.stats().live_groups == 1


def test_checkpoints_may_come_late_and_never_change_the_iteration(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 4, every=9)
        bank.checkpoint(3)
        bank.checkpoint(2)
        assert bank.iteration == 3
        with pytest.raises(InvalidDrawError, match="checkpoint\\(6\\)"):
            bank.checkpoint(6)


def test_below_the_archive_a_restore_is_refused_and_changes_nothing(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 6)
    with RolloutBank.open(path) as bank:
        with pytest.raises(ReplayUnavailableError, match=r"the earliest checkpoint to restore is 5"):
            bank.restore(3)
        assert bank.restore(5).report.draws == 1


def test_a_damaged_record_costs_that_record_and_is_told(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uids = [bank.append(token_group(seed)) for seed in range(3)]
        bank.mark_consumed(uids, 0)
        bank.begin_iteration(1)
        bank.append(token_group(9))
        bank.mark_consumed([bank.append(token_group(8))], 1)
    segment = path / "segments" / "00000000-main-s0001-0000.arrows"
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 4
    segment.write_bytes(content)
    with RolloutBank.open(path) as bank:
        restored = bank.restore(0)
        assert [group.uid for group in restored.draws[0].groups] == [uids[0], uids[2]]
        assert restored.draws[0].lost == (uids[1],)
        assert restored.report.lost_records == 1
        assert segment.name in restored.report.damage[0] and "corrupt" in restored.report.damage[0]


def test_a_damaged_journal_is_refused_until_accepted(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 3, every=9)
    journal = path / "journal" / "s0001-0000.arrows"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(content)
    with RolloutBank.open(path) as bank:
        with pytest.raises(CorruptRecordError, match="accept_damage=True"):
            bank.restore(0)
        bank.restore(0, accept_damage=True)


# one coordinator


def test_a_second_coordinator_is_refused_by_the_name_of_the_holder(path: Path) -> None:
    with (
        RolloutBank.open(path) as bank,
        pytest.raises(BankLockedError, match=f"session 1: process {os.getpid()} on .*since"),
    ):
        bank.append(token_group())
        RolloutBank.open(path)
    RolloutBank.open(path).close()


def test_a_dead_holder_is_taken_over_unless_told_never(path: Path) -> None:
    code = f"import os; from arrowbank import RolloutBank; RolloutBank.open({str(path)!r}); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(BankLockedError, match="process is gone"):
        RolloutBank.open(path, takeover="never")
    with RolloutBank.open(path) as bank:
        assert bank.session == 2


def test_who_lost_the_bank_can_neither_commit_nor_acknowledge(path: Path) -> None:
    first = RolloutBank.open(path)
    first.restore(0)
    uid = first.append(token_group(1))
    with RolloutBank.open(path, takeover="force") as second:
        second.restore(0)
        second.mark_consumed([uid], 0)
        for call in (
            lambda: first.append(token_group(2)),
            lambda: first.mark_consumed([uid], 0),
            lambda: first.evict([uid], "x"),
        ):
            with pytest.raises((FencedError, FileNotFoundError)):
                call()
        first.close()
        second.append(token_group(3))
    RolloutBank.open(path).close()


def test_a_forked_childs_handle_is_closed_and_the_parents_works_on(path: Path) -> None:
    code = (
        "import os; from arrowbank import RolloutBank, BankClosedError\n"
        f"bank = RolloutBank.open({str(path)!r}); pid = os.fork()\n"
        "if not pid:\n"
        "    try: bank.checkpoint(0)\n"
        "    except BankClosedError: bank.close(); os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "bank.restore(0); bank.close()"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_a_closed_handle_says_so(path: Path) -> None:
    bank = RolloutBank.open(path)
    bank.close()
    bank.close()
    with pytest.raises(BankClosedError, match="open the bank again"):
        bank.append(token_group())


def race(path: str, results: Any) -> None:
    try:
        with RolloutBank.open(path) as bank:
            time.sleep(0.3)
            results.put(bank.session)
    except BankLockedError:
        results.put("locked")


def test_of_two_that_open_at_once_one_is_refused(path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    racers = [spawn.Process(target=race, args=(str(path), results)) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    found = [results.get() for _ in racers]
    assert sorted(map(str, found)) in (["1", "locked"], ["1", "2"])  # the second may come after the first has closed


# the manifest


def test_a_missing_manifest_beside_data_is_an_error_and_nothing_is_touched(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.append(token_group())
    (path / "MANIFEST.json").unlink()
    before = tree(path)
    with pytest.raises(CorruptManifestError, match=r"missing, but there is .*s0001-0000\.arrows"):
        RolloutBank.open(path)
    assert tree(path) == before


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda text: text[: len(text) // 2], CorruptManifestError),
        (lambda text: text.replace('"commit": 1', '"commit": 2'), CorruptManifestError),
        (lambda text: text.replace('"format_version": 1', '"format_version": 2'), FormatVersionError),
    ],
)
def test_a_manifest_that_is_not_right_is_refused(path: Path, change: Any, error: type[Exception]) -> None:
    RolloutBank.open(path).close()
    manifest = path / "MANIFEST.json"
    manifest.write_text(change(manifest.read_text()))
    before = tree(path)
    with pytest.raises(error, match=r"MANIFEST\.json"):
        RolloutBank.open(path)
    assert tree(path) == before


def test_an_empty_place_is_a_new_bank_and_nothing_is_no_bank(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BankNotFoundError):
        scan(path)
    path.mkdir()
    for name in ("tmp", "sessions", "segments"):
        (path / name).mkdir()
    RolloutBank.open(path).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(CorruptManifestError, match=r"thesis\.tex"):
        RolloutBank.open(tmp_path / "other")


# the archive


def test_each_rollout_is_in_the_archive_once_for_every_reader(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        uids = train(bank, 0, 5)
        bank.evict([bank.append(token_group(77))], "stale")
        bank.close(final=True)
    pattern = f"{path}/archive/*.parquet"
    frames = [
        pl.read_parquet(pattern),
        pl.from_pandas(pd.concat(pd.read_parquet(file) for file in sorted((path / "archive").glob("*.parquet")))),
        duckdb.sql(f"SELECT * FROM '{pattern}'").pl(),
    ]
    for frame in frames:
        assert frame.height == frame.select("group_uid", "member_index").unique().height == 4 * 11
    consumed = frames[0].filter(pl.col("outcome") == "consumed")
    order = ["consumed_iteration", "consumed_draw", "consumed_position", "member_index"]
    assert consumed.select(order).equals(consumed.sort(order).select(order))
    assert consumed.filter(pl.col("member_index") == 0)["group_uid"].to_list() == uids
    states = consumed.filter(pl.col("draw_state").is_not_null())
    assert states.select("consumed_position", "draw_state").rows() == [(0, b"%d" % k) for k in range(5)]
    assert not list((path / "segments").iterdir())
    back = {group.uid: group for group in scan(path).groups()}
    assert all(back[uid][0] == token_group(seed)[0] for seed, uid in enumerate(uids))


def test_archive_files_have_page_indexes_checksums_and_split_floats(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        assert pl.read_parquet(f"{path}/archive/*.parquet").height == 0
        bank.restore(0)
        train(bank, 0, 3)
        bank.close(final=True)
    for file in (path / "archive").glob("c*-s0001.parquet"):
        group = pq.ParquetFile(file, page_checksum_verification=True).metadata.row_group(0)
        columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
        assert all(column.has_offset_index for column in columns.values())
        assert "BYTE_STREAM_SPLIT" in columns["logprobs.list.element"].encodings
        assert "BYTE_STREAM_SPLIT" in columns["tokens.list.element"].encodings


def test_a_group_that_waits_keeps_its_segment_and_no_other(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        bank.append(token_group(98))
        train(bank, 0, 6)
        assert min(file.name for file in (path / "segments").iterdir()).startswith("00000000")
        assert bank.stats().archived_groups == 8
    view = scan(path).to_polars().collect()
    assert view.height == view.select("group_uid", "member_index").unique().height == 4 * 13


def test_scan_shows_pending_and_planned_rows_and_writes_nothing(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 5, every=2)
        bank.append(token_group(55))
        before = tree(path)
        rows = scan(path).to_polars().collect()
        assert tree(path) == before
    count = rows.group_by("outcome", "consumed_iteration").len().sort("consumed_iteration", nulls_last=True).rows()
    assert count == [*(("consumed", k, 8) for k in range(4)), (None, 4, 8), (None, None, 4)]
    assert scan(path, live=False).to_arrow().num_rows == 16


def test_a_crash_between_publishing_and_committing_leaves_each_rollout_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*given: Any) -> None:
        raise OSError(5, "power cut")

    bank = RolloutBank.open(path)
    bank.restore(0)
    train(bank, 0, 2)
    monkeypatch.setattr("arrowbank.archive.store.write_manifest", crash)
    train(bank, 2, 3, every=9)
    with pytest.raises(OSError, match="power cut"):
        bank.checkpoint(3, wait=True)
    assert "power cut" in str(bank.stats().compaction_error)
    monkeypatch.setattr("arrowbank.archive.store.write_manifest", write_manifest)
    published = len(list((path / "archive").glob("*.parquet")))
    with pytest.raises(OSError, match="power cut"):
        bank.close()
    rows = scan(path).to_polars().collect()
    assert rows.height == rows.select("group_uid", "member_index").unique().height == 24
    with RolloutBank.open(path) as bank:
        assert len(list((path / "archive").glob("*.parquet"))) == published - 1
        bank.restore(3)
        train(bank, 3, 6)
        bank.close(final=True)
    assert pl.read_parquet(f"{path}/archive/*.parquet").height == 8 * 6


def test_a_failed_compaction_is_tried_again_by_the_next_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 2)
        with monkeypatch.context() as patch:
            patch.setattr(compactor, "execute", lambda task: (_ for _ in ()).throw(OSError(28, "no space left")))
            train(bank, 2, 3, every=9)
            with pytest.raises(OSError, match="no space left"):
                bank.checkpoint(3, wait=True)
            bank.evict([bank.append(token_group(70))], "stale")
        train(bank, 3, 4)
        assert bank.stats().compaction_error is None and bank.stats().archived_groups == 7


def test_inputs_are_unlinked_one_commit_after_the_manifest_that_retired_them(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 3)
        retired = json.loads((path / "MANIFEST.json").read_text())["retired"]
        assert list(retired) == ["00000000-main-s0001-0000.arrows", "00000001-main-s0001-0000.arrows"]
        there = {file.name for file in (path / "segments").iterdir()}
        assert [name in there for name in retired] == [False, True]


def test_going_over_max_bytes_warns_once_and_again_after_compaction(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "arrowbank")
    with RolloutBank.open(path, max_bytes=20_000, keep_checkpoints=1) as bank:
        bank.restore(0)
        train(bank, 0, 12, every=99)
        assert len(caplog.records) == 1 and "more often" in caplog.text
        assert bank.live_bytes > 20_000
        bank.begin_iteration(12)
        bank.checkpoint(12, wait=True)
        assert bank.live_bytes < 20_000
        train(bank, 12, 24, every=99)
        assert len(caplog.records) == 2


def test_live_bytes_are_the_segments_bytes(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 3, every=99)
        on_disk = sum(file.stat().st_size for file in (path / "segments").iterdir())
        assert 0 <= on_disk - bank.live_bytes <= 8 * 3


def test_settling_an_archive_twice_changes_nothing(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        train(bank, 0, 4)
    with RolloutBank.open(path) as bank:
        before = tree(path)
        assert isinstance(bank._store, ArchiveStore)
        bank._store.settle()
        assert tree(path) == before
