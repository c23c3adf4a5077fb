"""``scan`` shows what a bank holds, each rollout once, while it is in use, and writes nothing."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest
from builders import EVERY, build, token_group
from runs import archive_three, tree

from arrowbank import ArrowbankError, BankNotFoundError, RolloutBank, scan
from arrowbank.archive import compaction, compactor, merging, view
from arrowbank.durable import files
from arrowbank.schema import ARCHIVE_SCHEMA


def outcomes(path: Path) -> dict[str, str | None]:
    table = scan(path).to_arrow()
    return dict(zip(table["group_uid"].to_pylist(), table["outcome"].to_pylist(), strict=True))


def settle_one(bank: RolloutBank, at: int, group: Any = None) -> str:
    bank.begin_iteration(at)
    uid = bank.append(token_group(at) if group is None else group)
    bank.mark_consumed([uid], at)
    bank.checkpoint(at + 1)
    return uid


def test_pending_planned_settled_and_evicted_rows_have_their_outcome(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.restore(0)
        settled, planned, pending, evicted = bank.append_many([token_group(number) for number in range(4)])
        held_out = bank.append(token_group(5), split="eval")
        bank.mark_consumed([settled], 0)
        bank.checkpoint(1)
        bank.mark_consumed([planned], 1)
        bank.evict([evicted], "x")
        expected = {settled: "consumed", planned: None, pending: None, evicted: "evicted", held_out: None}
        assert outcomes(path) == expected
        rows = scan(path).to_arrow()
        drawn = dict(zip(rows["group_uid"].to_pylist(), rows["consumed_iteration"].to_pylist(), strict=True))
        assert drawn == {settled: 0, planned: 1, pending: None, evicted: None, held_out: None}
        assert rows["group_uid"].to_pylist()[::4][:2] == [settled, planned]


@pytest.mark.parametrize("name", sorted(EVERY))
def test_groups_come_back_bit_for_bit_live_and_archived(path: Path, name: str) -> None:
    group = build(name)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        uid = settle_one(bank, 0, group)
        (live,) = scan(path).groups()
        assert (live, live.uid) == (group, uid)
        settle_one(bank, 1)
        bank.checkpoint(2, wait=True)
        archived = next(found for found in scan(path, live=False).groups() if found.uid == uid)
        assert archived == group


def test_each_rollout_is_seen_once_before_while_and_after_compaction(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> None:
        table = scan(path).to_polars().collect()
        assert table.select(polars.struct("group_uid", "member_index").n_unique()).item() == table.height
        seen.append(table.height)

    def looking(function: Any) -> Any:
        def looked(*args: Any, **kwargs: Any) -> Any:
            look()
            result = function(*args, **kwargs)
            look()
            return result

        return looked

    seen: list[int] = []
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        monkeypatch.setattr(compactor, "execute", looking(compaction.execute))
        monkeypatch.setattr(files, "publish", looking(files.publish))
        monkeypatch.setattr(files, "remove", looking(files.remove))
        for at in range(4):
            settle_one(bank, at)
            bank.checkpoint(at + 1, wait=True)
        look()
    assert set(seen) <= {0, 4, 8, 12, 16}
    assert seen[-1] == 16
    assert len(seen) > 20


def test_a_reader_beside_a_busy_trainer_never_sees_a_rollout_twice_or_an_error(path: Path) -> None:
    problems: list[Any] = []
    stop = threading.Event()
    looks = 0

    def read() -> None:
        nonlocal looks
        while not stop.is_set():
            try:
                found = scan(path)
                rows = found.to_arrow().select(["group_uid", "member_index"]).to_pylist()
                counted = Counter((row["group_uid"], row["member_index"]) for row in rows)
                if counted and max(counted.values()) > 1:
                    problems.append(counted.most_common(1))
                try:
                    glob = polars.read_parquet(path / "archive/*.parquet", columns=["group_uid", "member_index"])
                except FileNotFoundError:
                    continue  # merged away between the glob and the open
                if glob.is_duplicated().any():
                    problems.append("the glob saw rows twice")
                looks += 1
            except BaseException as error:
                problems.append(error)
                return

    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        thread = threading.Thread(target=read)
        thread.start()
        for at in itertools.count():
            settle_one(bank, at)
            if at % 20 == 19:
                bank.checkpoint(at + 1, wait=True)  # or it runs ahead of compaction, and segments pile up
            if at >= 60 and (looks > 3 or problems):
                break
        stop.set()
        thread.join()
        bank.close(final=True)
    assert problems == []
    assert looks > 3
    assert scan(path).to_arrow().num_rows == 4 * (at + 1)


def test_scanning_writes_nothing(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(3):
            settle_one(bank, at)
        bank.checkpoint(3, wait=True)
        before = tree(path)
        found = scan(path)
        assert (found.to_arrow().num_rows, found.to_polars().collect().height, len(list(found.groups()))) == (12, 12, 3)
        assert tree(path) == before


def test_a_bank_that_may_not_be_written_to_can_be_scanned(path: Path) -> None:
    with RolloutBank.open(path) as bank:
        bank.append(token_group(1))
    copy = path.with_name("copy")
    shutil.copytree(path, copy, symlinks=True)
    for directory, _, names in os.walk(copy, topdown=False):
        for name in names:
            if not os.path.islink(os.path.join(directory, name)):
                os.chmod(os.path.join(directory, name), 0o444)
        os.chmod(directory, 0o555)
    assert scan(copy).to_arrow().num_rows == 4


def test_all_three_forms_say_the_same(path: Path) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        uids = [settle_one(bank, at) for at in range(3)]
        bank.checkpoint(3, wait=True)
        uids.append(bank.append(token_group(9)))
        found = scan(path)
        table = found.to_arrow()
        assert table.schema.equals(ARCHIVE_SCHEMA)
        assert found.to_polars().collect()["group_uid"].to_list() == table["group_uid"].to_pylist()
        assert [group.uid for group in found.groups()] == uids == table["group_uid"].to_pylist()[::4]
        assert found.to_polars().filter(polars.col("outcome").is_null()).collect().height == 4
        assert scan(path, live=False).to_arrow().num_rows == table.num_rows - 8


def test_an_empty_bank_has_the_columns_and_no_rows(path: Path) -> None:
    with RolloutBank.open(path):
        pass
    found = scan(path)
    assert found.to_arrow().schema.equals(ARCHIVE_SCHEMA)
    assert found.to_polars().collect().columns == ARCHIVE_SCHEMA.names
    assert list(found.groups()) == []


def test_no_bank_is_an_error(path: Path) -> None:
    with pytest.raises(BankNotFoundError):
        scan(path)


@pytest.mark.parametrize("changes", [3, 40])
def test_a_view_made_while_the_manifest_changes_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        tries = overtake(bank, changes, monkeypatch)
        assert scan(path).to_arrow().num_rows == 4 * changes
    assert len(tries) == changes + 1


def test_a_view_of_what_never_stands_still_is_an_error_and_one_of_the_archive_alone_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_PATIENCE_S", 0.2)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        tries = overtake(bank, 10**6, monkeypatch)
        with pytest.raises(ArrowbankError, match="changed at each look"):
            scan(path)
        assert len(tries) > 1
        assert scan(path, live=False).to_arrow().num_rows == 4 * (len(tries) - 1)  # before it changed once more


def overtake(bank: RolloutBank, changes: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the bank settle a group and commit while each of so many views is made; the second finds a file gone."""
    make, tries = view._HeldFiles, []

    def overtaken(*given: Any, **options: bool) -> Any:
        tries.append(len(tries))
        made = make(*given, **options)
        if len(tries) <= changes:
            bank.mark_consumed([bank.append(token_group(len(tries)))], len(tries))
            bank.begin_iteration(len(tries) + 1)
            bank.checkpoint(len(tries) + 1, wait=True)
        if len(tries) == 2:
            raise FileNotFoundError("planted")
        return made

    monkeypatch.setattr(view, "_HeldFiles", overtaken)
    return tries


def test_a_segment_that_vanishes_while_the_directory_is_read_is_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RolloutBank.open(path) as bank:
        bank.append(token_group(1))
    iterdir = Path.iterdir

    def with_a_ghost(self: Path) -> Any:
        yield from iterdir(self)
        if self.name == "segments":
            yield self / "00000009-main-s0001-0000.arrows"

    monkeypatch.setattr(Path, "iterdir", with_a_ghost)
    assert scan(path).to_arrow().num_rows == 4


def test_a_view_outlives_merges_and_restores_below_the_horizon(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FAN_IN", 2)
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        for at in range(4):
            bank.begin_iteration(at)
            bank.mark_consumed([bank.append(token_group(at))], at)
            bank.checkpoint(at + 1, wait=True)
        view = scan(path)
        lazy, before = view.to_polars(), sorted(view.to_arrow()["group_uid"].to_pylist())
        for at in range(4, 12):
            bank.begin_iteration(at)
            bank.mark_consumed([bank.append(token_group(at))], at)
            bank.checkpoint(at + 1, wait=True)
        bank.restore(1)
        assert not any(file.exists() for file in view.files)
        assert sorted(view.to_arrow()["group_uid"].to_pylist()) == before
        assert sorted(lazy.collect()["group_uid"].to_list()) == before
        assert len({group.uid for group in view.groups()}) == 4


def test_a_view_closes_its_files_when_it_goes(path: Path) -> None:
    archive_three(path)
    before = len(os.listdir("/proc/self/fd"))
    view = scan(path)
    lazy = view.to_polars()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del view, lazy
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_view_cannot_be_copied_with_its_open_files(path: Path) -> None:
    archive_three(path)
    with pytest.raises(TypeError, match="scan the bank again"):
        pickle.dumps(scan(path))


def test_pandas_and_duckdb_have_the_same_rows(path: Path) -> None:
    archive_three(path)
    view = scan(path)
    table = view.to_arrow()
    frame = view.to_pandas()
    assert list(frame.columns) == ARCHIVE_SCHEMA.names
    assert frame["group_uid"].tolist() == table["group_uid"].to_pylist()
    assert [row.tobytes() for row in frame["tokens"]] == [row.values.to_numpy().tobytes() for row in table["tokens"]]
    some = ["group_uid", "tokens", "reward", "turns", "outcome"]
    assert view.to_duckdb().to_arrow_table().select(some).to_pylist() == table.select(some).to_pylist()
    with duckdb.connect() as connection:
        rows = view.to_duckdb(connection)
        query = "SELECT outcome, count(*) FROM rows GROUP BY ALL ORDER BY ALL"
        assert connection.query(query).fetchall() == [("consumed", 12), (None, 4)]
        assert rows.filter("outcome IS NULL").aggregate("count(*)").fetchall() == [(4,)]


@pytest.mark.parametrize("name", ["polars", "pandas", "duckdb"])
def test_a_missing_library_is_named_with_what_installs_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    archive_three(path)
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError) as raised:
        getattr(scan(path), f"to_{name}")()
    assert raised.value.__notes__ == [
        f"to_{name} needs {name}: pip install 'arrowbank[analysis]'; to_arrow does without"
    ]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("engine", ["in-memory", "streaming"])
def test_a_lazy_query_gives_what_it_gives_on_the_rows_in_memory(path: Path, engine: Any, live: bool) -> None:
    archive_three(path, files=2)
    lazy = scan(path, live=live).to_polars()
    rows = lazy.collect().lazy()
    late = polars.col("consumed_iteration") > 0
    queries: list[Callable[[polars.LazyFrame], polars.LazyFrame]] = [
        lambda frame: frame.head(10).filter(late),
        lambda frame: frame.filter(late).head(3),
        lambda frame: frame.slice(6, 7).filter(late).select("group_uid", "tokens"),
        lambda frame: frame.tail(5).filter(late),
        lambda frame: frame.head(0),
        lambda frame: frame.head(8),
        lambda frame: frame.head(9).select("reward"),
        lambda frame: frame.select(polars.len()),
        lambda frame: frame.filter(late).group_by("outcome").agg(polars.col("reward").max()).sort("outcome"),
        lambda frame: polars.concat([frame.head(5), frame.filter(late)]),
    ]
    for number, query in enumerate(queries):
        assert query(lazy).collect(engine=engine).equals(query(rows).collect()), number


def test_rows_are_counted_before_a_predicate_that_the_source_is_given(path: Path) -> None:
    archive_three(path, files=2)
    view = scan(path, live=False)
    late = polars.col("consumed_iteration") > 0
    for count in range(13):
        found = polars.concat(view._held.read_polars(["group_uid"], late, count, None))
        wanted = view.to_polars().collect().head(count).filter(late).select("group_uid")
        assert found.equals(wanted), count


def test_a_view_made_again_has_what_was_appended_to_a_segment_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, tries = view._HeldFiles, []
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(0)
        settled = bank.append(token_group(0))
        bank.mark_consumed([settled], 0)
        bank.begin_iteration(1)
        first = bank.append(token_group(1))

        def overtaken(*given: Any, **options: bool) -> Any:
            if not tries:
                tries.append(bank.append(token_group(2)))  # to the same segment
                bank.checkpoint(1, wait=True)
            return make(*given, **options)

        monkeypatch.setattr(view, "_HeldFiles", overtaken)
        assert {group.uid for group in scan(path).groups()} == {settled, first, *tries}
