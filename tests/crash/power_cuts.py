"""Power cuts on real file systems: trainers work on ext4 and xfs in loop devices, which lose their power at any moment.

A cut is the file system's own shutdown: from then on nothing reaches the device, in one mode with its journal written
out and in the other without. The trainer is stopped an instant before, so that it can acknowledge nothing after the
cut: calls that a shutdown overtakes may succeed without having done their work (seen with fdatasync on ext4, Linux
6.18), which no machine without power lives to tell. Then it is killed; the file system is unmounted, so that nothing
cached is left, and mounted again, which replays its journal; and the bank is held against what was acknowledged
(``kill_loop``, ``kill_model``). The next trainer resumes on what is left, and is cut off as well.

Proves that what is acknowledged is durable, with the order of data, names and journals that two file systems really
have. Cannot prove anything of devices that lie about their caches, nor of states that these two never leave: the crash
states are for those.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from disks import Disk, in_image
from kill_loop import COMPACTION, Followed, KillLoop
from kill_model import Model, Violation

__all__ = ["FILE_SYSTEMS", "PowerCuts", "cut_often"]

FILE_SYSTEMS = {
    "ext4": (64, "mkfs.ext4", "-q", "-m", "0"),
    "xfs": (320, "mkfs.xfs", "-q"),
}
"""Size in MiB (xfs wants 300 at least), and how it is made."""
CUTS_EACH = 40
"""On one file system; then a new one is made."""
TARGETS = ("in flight", "append", "draw", "evict", "checkpoint", "open", "restore", *COMPACTION)


class CutOff(Followed):
    """A trainer whose disk loses its power, and which is killed then."""

    def __init__(self, model: Model, disk: Disk, rng: random.Random) -> None:
        super().__init__(model)
        self._disk = disk
        self._random = rng

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)
        time.sleep(self._random.choice([0.0002, 0.002]))  # what is under way in the kernel goes on until the cut
        self._disk.cut(flush_log=self._random.random() < 0.5)
        super().kill()


class PowerCuts(KillLoop):
    """Cuts off trainers on one file system, one after another."""

    def __init__(self, disk: Disk, seed: int, *, fault: str | None = None) -> None:
        super().__init__(disk.root, seed, fault=fault)
        self._disk = disk

    def follow(self) -> Followed:
        return CutOff(self.model, self._disk, self._random)

    def check_left_over(self) -> None:
        self._disk.mount_again()
        super().check_left_over()


def cut_often(directory: Path, file_system: str, cuts: int, seed: int, *, fault: str | None = None) -> int:
    """Cut the power so often; return how many groups were acknowledged. Raises Violation."""
    rng, acknowledged = random.Random(seed), 0
    for begun in range(0, cuts, CUTS_EACH):
        disk_seed = rng.getrandbits(32)
        with _told(f"{file_system}, from cut {begun} on, seed {disk_seed}"), _made(directory, file_system) as disk:
            with PowerCuts(disk, disk_seed, fault=fault) as loop:
                for cut in range(min(CUTS_EACH, cuts - begun)):
                    loop.cycle(TARGETS[cut // 2 % len(TARGETS)], in_flight=cut % 2 == 1)
            acknowledged += loop.model.acknowledged
    return acknowledged


def _made(directory: Path, file_system: str) -> AbstractContextManager[Disk]:
    size_mib, *make = FILE_SYSTEMS[file_system]
    return in_image(directory / file_system, int(size_mib), *map(str, make))


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except Violation as violation:
        violation.add_note(what)
        raise
