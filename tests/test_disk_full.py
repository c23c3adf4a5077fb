"""A real disk that is full, read-only, broken or gone: nothing acknowledged is lost, and the bank works again after.

Small file systems are mounted and filled with ballast before one call of a run (``small_disks.SCENARIO``). What that
call and those after it raise is all that a trainer learns. Then the ballast goes, and what was acknowledged is held
against what the bank gives back. In-process failures of compaction are in ``test_commit_failures``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disks import Disk, ext4, remount
from disks import tmpfs as mounted_tmpfs
from machine import require_mounts, require_root
from small_disks import SCENARIO, Model, Step, Trainer, call, find_problem, run

from arrowbank import FencedError, RolloutBank, scan
from arrowbank.archive import merging

pytestmark = pytest.mark.slow

WAYS = ("retry", "insist", "drop", "close")
"""What a trainer does about a call that raised: make room and call again; call again twice before that; do without the
group; close the bank, make room, and go on with another handle."""
APPENDS: dict[str, Step] = {
    "append": Step("append", lambda trainer: trainer.append(901)),
    "append_many": Step("append_many", lambda trainer: trainer.append(902, 903, many=True)),
    "append_async": Step("append_async", lambda trainer: trainer.append_async(904, 905)),
}
DRAW = Step("draw", lambda trainer: trainer.draw(2, 300))
CLOSE = Step("close", Trainer.close)
EXT4_IOC_SHUTDOWN, LOG_FLUSHED = 0x8004587D, 1


@pytest.fixture(scope="module")
def small_tmpfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    require_mounts()
    with mounted_tmpfs(tmp_path_factory.mktemp("small") / "tmpfs") as disk:
        yield disk


@pytest.fixture(scope="module")
def small_ext4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    require_mounts()
    with ext4(tmp_path_factory.mktemp("small") / "ext4") as disk:
        yield disk


@pytest.fixture(autouse=True)
def merges_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "FAN_IN", 2)


# -- a disk that is full


def is_full(error: OSError) -> bool:
    return error.errno == errno.ENOSPC


class Story:
    """A run during which the disk is full for a while."""

    def __init__(self, disk: Disk, path: Path, way: str) -> None:
        self.disk, self.way = disk, way
        self.model = Model()
        self.trainer = Trainer(path, self.model.take)
        self.raised: list[str] = []

    def run(self, at: int, fill: Callable[[], None]) -> None:
        for number, step in enumerate(SCENARIO):
            if number == at:
                fill()
            if self._fails(step):
                self._go_on(step)
        self.disk.free()
        find_problem(self.trainer.path, self.model)

    def _fails(self, step: Step) -> bool:
        error = call(self.trainer, step, expected=lambda error: self.disk.is_full and is_full(error))
        if error is not None:
            self.raised.append(step.name)
            if (self.trainer.path / "archive").exists():
                self.model.check_archive(self.trainer.path)
        return error is not None

    def _go_on(self, step: Step) -> None:
        trainer, way = self.trainer, self.way
        if way == "insist":
            for _ in range(2):
                if trainer.archiving_failed is None and not self._fails(step):
                    return
        if way == "close" and step.name != "open()":
            call(trainer, CLOSE, expected=is_full)
            trainer.forget_failed()
            self.disk.free()
            trainer.resume()
        self.disk.free()
        if way == "drop" and step.is_append:
            trainer.drop()
        else:
            assert not self._fails(step)


def moments(first: int, *, every: int) -> list[tuple[int, int]]:
    """Steps of the run, and how many pages or inodes are left free before each: some calls make several files."""
    return [(at, at // every % 5) for at in range(first, len(SCENARIO), every)]


def try_moments(disk: Disk, way: str, chosen: list[tuple[int, int]], fill: Callable[[int], None]) -> list[str]:
    """Run the scenario once for each moment; return the first call that raised, for each in which one did."""
    met = []
    for at, spare in chosen:
        gc.collect()  # mappings and handles of the run before hold blocks of files that are gone
        path = disk.root / f"{way}-{at}-{spare}"
        story = Story(disk, path, way)
        try:
            story.run(at, lambda spare=spare: fill(spare))  # type: ignore[misc]
        except BaseException as error:
            error.add_note(f"{way}, {spare} left before step {at}, {SCENARIO[at].name}; raised: {story.raised}")
            raise
        finally:
            disk.free()
            shutil.rmtree(path, ignore_errors=True)
        met += story.raised[:1]
    return met


@pytest.mark.parametrize("way", WAYS)
def test_a_full_tmpfs_costs_nothing_acknowledged(small_tmpfs: Disk, way: str) -> None:
    chosen = moments(WAYS.index(way), every=len(WAYS))
    assert len(try_moments(small_tmpfs, way, chosen, small_tmpfs.fill)) >= 10


def test_a_full_ext4_costs_nothing_acknowledged(small_ext4: Disk) -> None:
    chosen = moments(1, every=3)
    raised = try_moments(small_ext4, "retry", chosen[::2], small_ext4.fill)
    raised += try_moments(small_ext4, "close", chosen[1::2], small_ext4.fill)
    assert len(raised) >= 12


def test_a_disk_without_inodes_costs_nothing_acknowledged(small_tmpfs: Disk) -> None:
    chosen = moments(0, every=3)
    raised = try_moments(small_tmpfs, "retry", chosen[::2], small_tmpfs.fill_inodes)
    raised += try_moments(small_tmpfs, "close", chosen[1::2], small_tmpfs.fill_inodes)
    assert len(raised) >= 12


def test_every_call_that_writes_raises_on_a_disk_without_a_free_byte(small_tmpfs: Disk) -> None:
    """The calls of a run, each made on a full disk until it needs a block more than there is."""
    bank_path = small_tmpfs.root / "bank"
    model = Model()
    trainer = Trainer(bank_path, model.take)
    raised: set[str] = set()
    for step in SCENARIO:
        small_tmpfs.fill()
        error = call(trainer, step, expected=is_full)
        small_tmpfs.free()
        if error is not None:
            raised.add(step.name.partition("(")[0])
            assert call(trainer, step, expected=lambda _: False) is None
    find_problem(bank_path, model)
    shutil.rmtree(bank_path)
    assert raised >= {"open", "restore", "append", "append_async", "draw", "checkpoint", "close"}


def test_compaction_without_an_inode_fails_no_append_and_is_told(small_tmpfs: Disk) -> None:
    path = small_tmpfs.root / "bank"
    model = Model()
    trainer = Trainer(path, model.take)
    run(trainer, SCENARIO[:14])  # segment and journal are open: records need no inode
    small_tmpfs.fill_inodes()
    trainer.bank.checkpoint(1)
    model.take(["checkpoint", 1])
    for step in APPENDS.values():
        run(trainer, [step])
    with pytest.raises(OSError, match="No space left"):
        trainer.bank.checkpoint(1, wait=True)
    assert "No space left" in str(trainer.bank.stats().compaction_error)
    run(trainer, [Step("append", lambda trainer: trainer.append(906))])
    with pytest.raises(OSError, match="No space left"):
        trainer.close()
    small_tmpfs.free()
    find_problem(path, model)
    shutil.rmtree(path)


# -- a disk that takes no writes


def test_a_disk_that_was_remounted_read_only_costs_nothing(tmp_path: Path) -> None:
    require_mounts()
    model = Model()
    with ext4(tmp_path / "ext4") as disk:
        trainer = Trainer(disk.root / "bank", model.take)
        run(trainer, SCENARIO[:22])
        trainer.close()
        before = dict(model.groups)
        trainer.open()  # no file is open for writing yet: else the kernel refuses the remount
        remount(disk, "ro")
        try:
            for step in (Step("restore", lambda trainer: trainer.restore(1)), APPENDS["append"]):
                assert call(trainer, step, expected=lambda error: error.errno == errno.EROFS) is not None, step.name
            with pytest.raises(OSError, match="Read-only"):
                RolloutBank.open(disk.root / "another")
            assert model.groups == before
            model.check_scan(trainer.path)
        finally:
            remount(disk, "rw")
        trainer.restore(1)
        trainer.replay()
        run(trainer, SCENARIO[22:])
        find_problem(trainer.path, model)


@pytest.mark.parametrize("how", ["aborted", "shut down"])
def test_a_file_system_that_breaks_down_costs_nothing_acknowledged(tmp_path: Path, how: str) -> None:
    """ext4 after an error goes read-only under whoever writes, or answers EIO to everything; only a mount helps."""
    require_mounts()
    model = Model()
    with ext4(tmp_path / "ext4") as disk:
        trainer = Trainer(disk.root / "bank", model.take)
        run(trainer, SCENARIO[:19])
        if how == "aborted":
            remount(disk, "abort")
        else:
            descriptor = os.open(disk.root, os.O_RDONLY)
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", LOG_FLUSHED))
            os.close(descriptor)
        for step in (*SCENARIO[19:21], DRAW, Step("checkpoint", lambda trainer: trainer.checkpoint(2)), CLOSE):
            assert call(trainer, step, expected=lambda error: error.errno in (errno.EROFS, errno.EIO)), step.name
        trainer.forget_failed()
        disk.mount_again()
        trainer.resume()
        run(trainer, SCENARIO[19:])
        find_problem(trainer.path, model)


def test_a_bank_that_may_not_be_written_any_more_costs_nothing() -> None:
    require_root("can give up its rights for a while")
    model = Model()
    with tempfile.TemporaryDirectory(prefix="arrowbank-") as directory:
        os.chmod(directory, 0o755)
        trainer = Trainer(Path(directory, "bank"), model.take)
        run(trainer, SCENARIO[:14])
        trainer.begin(2)
        with as_nobody():
            for step in (APPENDS["append"], SCENARIO[14]):  # a new segment; a checkpoint, archived
                error = call(trainer, step, expected=lambda error: error.errno == errno.EACCES)
                assert error is not None, step.name
        run(trainer, [APPENDS["append"], *SCENARIO[15:]])
        find_problem(trainer.path, model)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# -- directories that vanish


def remove_bank(path: Path) -> None:
    shutil.rmtree(path)


def rename_bank(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def remove_segments(path: Path) -> None:
    shutil.rmtree(path / "segments")


def begun(path: Path) -> tuple[Trainer, Model]:
    """A run in its second iteration: an open segment has groups of it."""
    model = Model()
    trainer = Trainer(path, model.take)
    run(trainer, SCENARIO[:12])
    return trainer, model


def assert_only_appends_may_work(trainer: Trainer) -> None:
    with pytest.raises(OSError):
        trainer.draw(1, 200)
    with pytest.raises(OSError):
        trainer.evict(203)
    with pytest.raises(OSError):
        trainer.checkpoint(1)


@pytest.mark.parametrize("name", APPENDS)
@pytest.mark.parametrize("vanish", [remove_bank, rename_bank, remove_segments])
def test_an_append_into_a_file_that_has_lost_its_name_is_not_acknowledged(
    path: Path, vanish: Callable[[Path], None], name: str
) -> None:
    trainer, model = begun(path)
    before = dict(model.groups)
    vanish(path)
    for _ in range(2):
        with pytest.raises(OSError):
            APPENDS[name].work(trainer)
    assert model.groups == before
    with contextlib.suppress(OSError):
        trainer.close()
    if vanish in (remove_bank, rename_bank):
        assert not path.exists(), "a handle whose bank is gone has made a part of it again"


@pytest.mark.parametrize("vanish", [remove_bank, rename_bank])
def test_a_draw_into_a_bank_that_is_gone_is_not_acknowledged(path: Path, vanish: Callable[[Path], None]) -> None:
    trainer, model = begun(path)
    vanish(path)
    assert_only_appends_may_work(trainer)
    assert (len(model.draws), model.checkpoint) == (1, 0)
    with contextlib.suppress(OSError):
        trainer.close()


def test_without_its_journal_a_bank_acknowledges_what_is_in_named_files_only(path: Path) -> None:
    trainer, model = begun(path)
    shutil.rmtree(path / "journal")
    assert_only_appends_may_work(trainer)
    for step in APPENDS.values():
        call(trainer, step, expected=lambda _: True)
    with contextlib.suppress(OSError):
        trainer.close()
    (path / "journal").mkdir()
    shown = {str(group.uid) for group in scan(path).groups()}
    assert model.groups.keys() <= shown


def test_a_bank_that_was_renamed_and_named_back_is_whole(path: Path) -> None:
    trainer, model = begun(path)
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    for step in APPENDS.values():
        assert call(trainer, step, expected=lambda _: True) is not None
    elsewhere.rename(path)
    for step in APPENDS.values():
        assert call(trainer, step, expected=lambda _: False) is None
    run(trainer, SCENARIO[12:])
    find_problem(path, model)


def test_another_bank_in_the_place_of_one_that_was_renamed_is_not_touched(path: Path) -> None:
    model, another = Model(), Model()
    trainer, newcomer = Trainer(path, model.take), Trainer(path, another.take)
    run(trainer, SCENARIO[:12])
    before = dict(model.groups)
    path.rename(path.with_name("elsewhere"))
    run(newcomer, SCENARIO[:20])  # of the same session number, with segments of the same names
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.suffix == ".arrows"}
    trainer.begin(2)
    for step in (*APPENDS.values(), Step("draw", lambda trainer: trainer.draw(1, 200))):
        with pytest.raises((OSError, FencedError)):
            step.work(trainer)
    with contextlib.suppress(OSError, FencedError):
        trainer.close()
    assert model.groups == before
    assert {file: file.read_bytes() for file in files} == files
    run(newcomer, SCENARIO[20:])
    find_problem(path, another)
