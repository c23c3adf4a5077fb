"""``repair`` mends what an open heals and what it refuses, loses nothing that was whole, and is idle at once after."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import corruptors
import pytest
from damaged_banks import CHECKPOINT, Found, Model, check_scan, contents, copy, restore
from damages import NAMED, archive_file, pick
from runs import archive_three, tree

from arrowbank import (
    BankLockedError,
    FormatVersionError,
    RepairReport,
    RolloutBank,
    repair,
    scan,
    verify,
)
from arrowbank.durable import manifest as manifest_module
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest

LEFT = {name for name in NAMED if name.startswith("archive: ")} - {"archive: swapped with the empty one"}
"""What only a copy can mend."""


def mend(root: Path, *, accept_damage: bool = False) -> RepairReport:
    """Repair: a dry run before says the same and changes nothing, a second one after it does nothing."""
    before = tree(root)
    dry = repair(root, dry_run=True, accept_damage=accept_damage)
    assert tree(root) == before
    report = repair(root, takeover="force", accept_damage=accept_damage)
    assert (set(report.mended), set(report.left)) == (set(dry.mended), set(dry.left))
    assert report.lost_draws == dry.lost_draws
    before = tree(root)
    assert repair(root, takeover="force", accept_damage=accept_damage).mended == ()
    assert tree(root) == before
    assert report.is_healthy == verify(root).is_healthy
    return report


def whole_again(root: Path) -> Found:
    """Open and restore: nothing is damaged any more."""
    with RolloutBank.open(root, takeover="never") as bank:
        found = restore(bank)
    assert found.refused is None
    assert found.report.damage == ()
    return found


@pytest.mark.parametrize("name", NAMED)
def test_named_damage_is_mended_and_nothing_that_was_intact_is_lost(
    model: Model, other: Model, root: Path, name: str
) -> None:
    NAMED[name](root, model, other)
    hurt, entries = model.hurt_groups(root), model.hurt_entries(root)
    report = mend(root)
    if not report.is_healthy and name not in LEFT:
        assert entries or "deleted" in name or not model.closed or "junk" in name or "second stream" in name
        report = mend(root, accept_damage=True)
    assert report.is_healthy == (name not in LEFT)
    found = whole_again(root)
    wanted = {uid for _, uids, _, _ in model.draws for uid in uids} | set(model.pending)
    assert wanted - hurt <= set(found.handed), "groups that were not hit are missing"
    assert len(set(found.handed)) == len(found.handed)
    assert all(group == model.groups[uid] for uid, group in found.groups.items())
    check_scan(model, root, hurt, entries)
    if name not in LEFT:
        assert {str(group.uid) for group in scan(root).groups()} >= model.rows.keys() - hurt
    if not entries:
        draws = [
            (at, tuple(uid for uid in uids if uid not in hurt), span, state, tuple(uid for uid in uids if uid in hurt))
            for at, uids, span, state in model.draws
        ]
        assert found.draws == draws


def test_no_damaged_byte_is_gone(model: Model, other: Model, root: Path) -> None:
    name = pick(model, "own")
    NAMED["segment: a middle record zeroed"](root, model, other)
    corruptors.rewrite(root / "MANIFEST.json", lambda data: data[:300])
    damaged = {path: (root / path).read_bytes() for path in (f"segments/{name}", "MANIFEST.json")}
    mend(root)
    kept = [path.read_bytes() for path in (root / "quarantine").glob("*.bytes")]
    start, stop = model.segments[name].ranges[len(model.segments[name].ranges) // 2]
    assert damaged["MANIFEST.json"] in kept
    assert damaged[f"segments/{name}"][start:stop] in kept
    assert all(json.loads(path.read_text()) for path in (root / "quarantine").glob("*.json"))


def test_what_could_not_be_saved_is_told_by_iteration_and_written_down(model: Model, other: Model, root: Path) -> None:
    NAMED["segments: one deleted"](root, model, other)
    report = mend(root, accept_damage=True)
    (iteration, uids, *_) = model.draws[1]
    assert report.lost_draws == {iteration: uids}
    assert report.lost_records == (len(model.segments[pick(model, "own")].keys) if model.closed else 0)
    (note,) = (root / "quarantine").glob("lost-*.json")
    assert set(json.loads(note.read_text())["uids"]) == set(uids)
    told = [found for found in verify(root).notes if found.iteration == iteration]
    assert [set(found.uids) for found in told] == [set(uids)]
    assert whole_again(root).draws[1][4] == uids


def test_a_segment_put_back_after_a_repair_counts_again(model: Model, other: Model, root: Path) -> None:
    name = pick(model, "own")
    NAMED["segments: one deleted"](root, model, other)
    mend(root, accept_damage=True)
    (root / "segments" / name).write_bytes(model.segments[name].data)
    assert verify(root).is_healthy
    found = whole_again(root)
    assert sorted(found.pending) == sorted(model.pending)
    assert [draw[:4] for draw in found.draws] == model.draws


def test_a_file_of_the_archive_is_put_back_from_a_copy_in_quarantine(model: Model, other: Model, root: Path) -> None:
    path = archive_file(root, model)
    (root / "quarantine" / "my copy").write_bytes(path.read_bytes())
    NAMED["archive: a bit of a page"](root, model, other)
    assert mend(root).is_healthy
    assert scan(root).to_arrow().num_rows == sum(map(len, model.rows.values()))


def test_the_file_without_rows_is_made_anew(model: Model, root: Path) -> None:
    (empty,) = root.glob(".archive/*/c000000-s0000.parquet")
    for damaged in (b"", empty.read_bytes()[:-1], None):
        empty.unlink()
        if damaged is not None:
            empty.write_bytes(damaged)
        assert not verify(root).is_healthy
        assert mend(root).is_healthy


STRANGE = ["LOCK", "sessions/0002", "quarantine", "tmp", "segments/x.arrows", "journal/notes", "archive",
           ".archive/v000001/x.parquet", "tmp/s0001"]  # fmt: skip


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "socket", "directory"])
def test_strangers_go_out_of_the_way_and_nothing_behind_a_link_is_touched(
    model: Model, shared: Path, tmp_path: Path, kind: str
) -> None:
    for number, place in enumerate(STRANGE):
        if kind == "directory" and place in ("quarantine", "tmp", "tmp/s0001"):
            continue
        root, outside = copy(model, shared / "copy"), tmp_path / f"{number}"
        outside.mkdir()
        corruptors.replaced(place, kind)(root, outside)
        before = contents(outside)
        assert not verify(root).is_healthy, place
        report = repair(root, takeover="force")
        if place in ("quarantine", "tmp") and kind == "link":  # to a directory: it is not moved, nor followed
            assert report.mended == () and not report.is_healthy
        else:
            assert report.is_healthy, (place, report)
            whole_again(root)
        assert contents(outside) == before


def test_a_healthy_bank_is_left_as_it_is(model: Model, root: Path) -> None:
    before = tree(root)
    report = repair(root, takeover="force")
    assert (report.mended, report.left) == ((), ())
    assert tree(root) == before


def test_a_newer_bank_is_left_as_it_is(model: Model, root: Path) -> None:
    newer = model.manifest.model_copy(update={"format_version": 2})
    manifest_module.write_manifest(BankPaths(root), newer, root)
    before = tree(root)
    with pytest.raises(FormatVersionError):
        repair(root, takeover="force", accept_damage=True)
    corruptors.rewrite(root / "MANIFEST.json", lambda data: data.replace(b'"checksum": "', b'"checksum": "x'))
    before = tree(root)
    with pytest.raises(FormatVersionError):
        repair(root, takeover="force", accept_damage=True)
    assert tree(root) == before


HOLDER = """
import sys
from arrowbank import RolloutBank
bank = RolloutBank.open(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
"""


def test_beside_a_living_holder_it_is_refused_and_a_dry_run_is_not(path: Path) -> None:
    archive_three(path)
    (path / "segments/notes.txt").write_text("not ours")
    (path / "segments/notes.txt").rename(path / "notes.txt")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "open\n"
        (path / "notes.txt").rename(path / "segments/notes.txt")
        try:
            names = sorted(contents(path))
            with pytest.raises(BankLockedError, match=f"process {holder.pid}"):
                repair(path, lease_s=20)
            assert len(repair(path, dry_run=True).mended) == 1
            assert sorted(contents(path)) == names
        finally:
            holder.stdin.write("\n")
            holder.stdin.flush()
    assert repair(path).is_healthy


def test_a_newest_claim_that_says_nothing_is_refused_until_forced(model: Model, root: Path) -> None:
    corruptors.rewrite(root / "sessions/0002", lambda data: b"")
    corruptors.delete(root / "LOCK")
    before = contents(root)
    with pytest.raises(BankLockedError, match="sessions/0002"):
        repair(root)
    assert contents(root) == before
    assert repair(root, takeover="force").is_healthy


def test_a_repaired_bank_trains_on(model: Model, other: Model, root: Path) -> None:
    NAMED["manifest: deleted"](root, model, other)
    mend(root)
    with RolloutBank.open(root, keep_checkpoints=1) as bank:
        found = bank.restore(0)
        assert [draw.iteration for draw in found.draws] == [0, 1, 2, 3]
        bank.restore(CHECKPOINT)
        for draw in bank.restore(CHECKPOINT).draws:
            bank.begin_iteration(draw.iteration)
            uids = [str(group.uid) for group in draw.groups]
            bank.mark_consumed(uids, draw.iteration, span=draw.span, state=draw.state)
        bank.begin_iteration(5)
        bank.checkpoint(5)
        bank.close(final=True)
    assert verify(root).is_healthy
    assert read_manifest(BankPaths(root)).bank_id == model.manifest.bank_id
