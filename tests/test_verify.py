"""``verify`` finds what is damaged, calls whole banks healthy, and writes nothing, also beside a trainer at work.

``python tests/test_verify.py --every-byte`` flips a bit of every byte of every kind of file; pytest takes a sample.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import corruptors
import pytest
from builders import token_group
from corruptors import SEED
from damaged_banks import Model, make_whole
from damages import NAMED
from disks import remount, tmpfs
from machine import directory_in_memory, require_mounts, require_root
from runs import archive_three, kill, train, tree

from arrowbank import ArrowbankError, BankNotFoundError, FormatVersionError, RolloutBank, VerifyReport, scan, verify
from arrowbank.durable import manifest as manifest_module
from arrowbank.durable.layout import BankPaths
from arrowbank.durable.manifest import read_manifest
from arrowbank.verification import verify as verify_module
from arrowbank.verification.report import damage
from arrowbank.verification.verify import Look, Looker

HARMLESS = {
    "segment: 64 KiB of zeros behind",
    "carried segment: 64 KiB of zeros behind",
    "journal's last part: 64 KiB of zeros behind",
    "journal's first part: 64 KiB of zeros behind",
    "claim: first deleted",
    "unknown files",
}
"""What hurts nothing that was written."""
TAILS = (
    "a bit of the last record",
    "cut in a middle record",
    "cut between two records",
    "cut in the last record",
    "junk behind",
)
LIKE_A_KILL = {f"{file}: {what}" for file in ("segment", "journal's last part") for what in TAILS}
LIKE_A_KILL |= {"segments: one under a second name"}
"""What, in files that nobody has sealed or closed, looks as a kill may leave it."""


def unchanged(root: Path) -> VerifyReport:
    """Verify a bank; nothing below it may change, neither contents nor times nor inodes."""
    before = tree(root)
    report = verify(root)
    assert tree(root) == before
    return report


def test_a_closed_and_a_killed_bank_are_healthy_and_counted(model: Model, root: Path) -> None:
    report = unchanged(root)
    assert (report.verdict, report.damage) == ("healthy", ())
    assert report.counts.groups == len(scan(root).to_arrow()["group_uid"].unique()) == len(model.rows)
    rows = [row for group in model.rows.values() for row in group if row["group_size"]]
    assert report.counts.rollouts == len(rows)
    assert report.counts.records == sum(len(stream.keys) for stream in (model.segments | model.journal).values())
    assert "closed" in report.holder if model.closed else str(os.getpid()) in report.holder


@pytest.mark.parametrize("name", NAMED)
def test_named_damage_is_found_and_nothing_written(model: Model, other: Model, root: Path, name: str) -> None:
    NAMED[name](root, model, other)
    report = unchanged(root)
    may_be_healthy = name in HARMLESS or (not model.closed and name in LIKE_A_KILL)
    assert report.is_healthy == may_be_healthy, report
    assert all(found.reason and found.path for found in report.findings)
    assert all(found.advice for found in report.damage)


def test_a_finding_names_file_offset_group_and_what_to_do(model: Model, root: Path) -> None:
    name = max(model.segments, key=lambda name: len(model.segments[name].keys))
    stream = model.segments[name]
    start, stop = stream.ranges[1]
    corruptors.rewrite(root / "segments" / name, partial(corruptors.flip, bit=8 * (stop - 100)))
    found = verify(root).damage[0]
    assert (found.path, found.offset, found.uids) == (f"segments/{name}", start, (stream.keys[1],))
    assert "seal" in found.reason and "quarantine" in found.advice


def test_damage_that_an_open_has_healed_is_information(model: Model, other: Model, root: Path) -> None:
    NAMED["segment: a bit of a middle record"](root, model, other)
    with RolloutBank.open(root, takeover="force") as bank:
        bank.restore(2)
    report = unchanged(root)
    assert report.is_healthy
    assert any("1 place of handled damage" in found.reason for found in report.notes)


def test_a_group_that_is_archived_and_live_is_found(path: Path) -> None:
    archive_three(path)
    paths = BankPaths(path)
    manifest = read_manifest(paths)
    (retired,) = list(manifest.retired)[:1]
    assert (paths.segments / retired).exists()
    manifest_module.write_manifest(paths, manifest.model_copy(update={"retired": {}}), paths.root)
    assert any("in the archive as well" in found.reason for found in unchanged(path).damage)


def test_an_old_copy_of_the_manifest_is_found(path: Path) -> None:
    archive_three(path)
    old = (path / "MANIFEST.json").read_bytes()
    with RolloutBank.open(path, keep_checkpoints=1) as bank:
        bank.restore(3)
        for at in range(3, 9):
            bank.begin_iteration(at)
            bank.mark_consumed([bank.append(token_group(at))], at)
            bank.checkpoint(at + 1, wait=True)
    assert verify(path).is_healthy
    (path / "MANIFEST.json").write_bytes(old)
    assert not unchanged(path).is_healthy


def test_what_is_no_bank_and_what_is_newer_is_refused(path: Path, tmp_path: Path, bank: RolloutBank) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.txt").write_text("years of work")
    for place in (tmp_path / "nothing", tmp_path / "thesis"):
        with pytest.raises(BankNotFoundError):
            verify(place)
    with pytest.raises(NotADirectoryError):
        verify(tmp_path / "thesis/thesis.txt")
    bank.close()
    newer = read_manifest(BankPaths(path)).model_copy(update={"format_version": 2})
    manifest_module.write_manifest(BankPaths(path), newer, tmp_path)
    with pytest.raises(FormatVersionError):
        verify(path)


# -- nothing is written


def test_it_works_for_who_may_not_write(shared: Path) -> None:
    require_root("can become somebody who may not write")
    model = make_whole(shared / "theirs", close=True)
    parents = [path for path in model.root.parents if shared in (path, *path.parents)]
    for path in [*parents, model.root, *model.root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            (model.root / "x").write_text("")
        report = unchanged(model.root)
    finally:
        os.seteuid(0)
    assert report.is_healthy


def test_it_works_on_a_file_system_that_is_mounted_read_only(tmp_path: Path) -> None:
    require_mounts()
    with tmpfs(tmp_path / "disk") as disk:
        make_whole(disk.root / "bank", close=True)
        remount(disk, "ro")
        try:
            with pytest.raises(OSError, match="Read-only"):
                (disk.root / "x").write_text("")
            assert unchanged(disk.root / "bank").is_healthy
        finally:
            remount(disk, "rw")


# -- beside a trainer


def test_beside_a_trainer_at_work_a_bank_is_healthy_at_every_moment(path: Path) -> None:
    stop, looks, ended = threading.Event(), 0, []

    def work() -> None:
        try:
            for start in itertools.count():
                with kill(path, keep_checkpoints=1) as bank:
                    bank.restore(20 * start if start % 4 else max(20 * start - 30, 0))
                    first = bank.iteration
                    for at in range(first, 20 * (start + 1)):
                        if stop.is_set():
                            return
                        train(bank, range(at, at + 1))
        except BaseException as error:
            ended.append(error)
            raise

    trainer = threading.Thread(target=work)
    trainer.start()
    try:
        until = time.monotonic() + 8
        while (time.monotonic() < until or looks <= 5) and not ended:
            try:
                report = verify(path)
            except BankNotFoundError:
                continue
            assert report.is_healthy, report
            looks += 1
    finally:
        stop.set()
        trainer.join()
    assert not ended


def test_a_bank_that_changed_at_many_looks_is_looked_at_again_and_one_that_never_rests_is_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = Looker.look, itertools.count(1)

    def moving(self: Looker) -> Look:
        found, at = look(self), next(looks)
        if at < rests:
            found.findings = (damage("segments/x", f"changed by look {at}"),)
        return found

    monkeypatch.setattr(verify_module, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(Looker, "look", moving)
    rests: float = 40
    assert verify(root).is_healthy
    assert next(looks) == 41
    rests = math.inf
    monkeypatch.setattr(verify_module, "_PATIENCE_S", 0.2)
    with pytest.raises(ArrowbankError, match="changed at each of"):
        verify(root)


# -- every byte


def places(root: Path) -> Iterator[tuple[Path, int]]:
    """Each byte of each kind of file that something vouches for. An old claim says nothing that anything needs."""
    paths = BankPaths(root)
    manifest = read_manifest(paths)
    files = [paths.manifest, paths.lock, paths.claim(2), *paths.version(manifest.version).iterdir()]
    live = [name for name in paths.segment_names() if str(name) not in manifest.retired]
    files += [paths.segments / str(name) for name in live]
    files += [paths.journal / str(name) for name in paths.journal_names() if str(name) >= manifest.journal]
    for path in sorted(files):
        # The file without rows has no digest: it is compared with a fresh one, if the same version of Arrow wrote it.
        version = re.search(rb"parquet-cpp-arrow version [\d.]+", path.read_bytes())
        free = range(*version.span()) if version and path.name.startswith("c000000-") else range(0)
        yield from ((path, place) for place in range(path.stat().st_size) if place not in free)


def unseen(root: Path, numbers: Iterable[int] | None = None) -> tuple[int, list[str]]:
    """Flip a bit of each byte, or of a sample; return how many, and those of which nothing was said."""
    count, wrong = 0, []
    every = list(places(root))
    for number in range(len(every)) if numbers is None else numbers:
        path, place = every[number % len(every)]
        whole, status = path.read_bytes(), path.stat()
        path.write_bytes(corruptors.flip(whole, 8 * place + place % 8))
        try:
            look = Looker(root).look()
            # A schema message that says the same, and an end mark behind all that is sealed, are notes.
            told = look.damage or any(found.path == str(path.relative_to(root)) for found in look.findings)
        finally:
            path.write_bytes(whole)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        count += 1
        if not told:
            wrong.append(f"{path.relative_to(root)}: byte {place}")
    return count, wrong


def test_a_flipped_bit_of_any_kind_of_file_is_found(shared: Path) -> None:
    root = make_whole(shared / "bytes", close=True).root
    assert verify(root).is_healthy
    size = sum(1 for _ in places(root))
    _, wrong = unseen(root, random.Random(SEED).sample(range(size), 600))
    assert wrong == []


def _every_byte() -> int:
    started = time.monotonic()
    with directory_in_memory() as directory:
        count, wrong = unseen(make_whole(directory / "whole", close=True).root)
    print(f"{count:,} bytes, {len(wrong):,} unseen, {time.monotonic() - started:.0f} seconds", *wrong[:50], sep="\n  ")
    return len(wrong)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--every-byte"]:
            sys.exit(bool(_every_byte()))
        case _:
            sys.exit("usage: test_verify.py --every-byte")
