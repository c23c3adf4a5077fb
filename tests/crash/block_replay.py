"""Power cuts that reorder blocks: a disk with a log (``block_log``) is replayed up to any moment, and some writes fail.

Trainers work on ext4 on a disk that logs every write and every flush, and are killed and resumed a few times; each line
of their reports is noted with the place where the log stood. A state of the disk after a power cut is: all writes
before the last flush before the cut, and of those after it any choice of 4 KiB blocks (or of 512-byte sectors), each
kept or lost on its own. Such a disk is mounted, which replays the file system's journal; the bank on it is held against
what was acknowledged before the cut, and a trainer resumes on it (``kill_loop``, ``kill_model``).

Proves that the bank needs no more of a disk than that a flush is one, whatever it does with writes in between. Cannot
prove anything of disks that lie about flushes. A line is read some time after it was written: the log may have gone on,
and what it acknowledges is then asked for only of later cuts.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from disks import mounted, run_program
from forked import Server
from kill_loop import Followed, KillLoop, start_server
from kill_model import Model, Violation

from crash.block_log import DISK, Flush, Write, read_log

__all__ = ["Recording", "record", "replay"]

SIZE_MIB = 24
TRAINERS = 5
"""In one recording, one after another."""
BLOCK, SECTOR = 4096, 512


class Recording:
    """What a disk was told, and what trainers told meanwhile."""

    def __init__(self, blank: bytes, log: list[Write | Flush], lines: list[tuple[int, str]]) -> None:
        self.blank = blank
        """The disk in the beginning."""
        self.log = log
        self.lines = lines
        """Reports' lines, each with the place in the log before which it was true."""

    def model_at(self, place: int) -> Model:
        """What had been acknowledged when the log stood there."""
        model, trainer = Model(), None
        for end, line in self.lines:
            if end > place:
                break
            if line.startswith("B ") or trainer is None:
                trainer = Followed(model)
            trainer.take(line)
        return model


class Noted(Followed):
    """A trainer whose lines are noted."""

    def __init__(self, model: Model, log: Path, lines: list[tuple[int, str]]) -> None:
        super().__init__(model)
        self._log = log
        self._lines = lines

    def take(self, line: str) -> None:
        self._lines.append((self._log.stat().st_size, line))
        super().take(line)


class Recorded(KillLoop):
    """Trainers on a disk that has a log."""

    def __init__(self, directory: Path, seed: int, log: Path, *, fault: str | None = None) -> None:
        super().__init__(directory, seed, fault=fault)
        self.lines: list[tuple[int, str]] = []
        self._log = log

    def follow(self) -> Followed:
        return Noted(self.model, self._log, self.lines)


def record(directory: Path, seed: int, *, fault: str | None = None) -> Recording:
    """Have trainers work on a disk with a log."""
    image, served, root, log = (directory / name for name in ("blank", "served", "root", "log"))
    with image.open("wb") as file:
        os.truncate(file.fileno(), SIZE_MIB << 20)
    run_program("mkfs.ext4", "-q", "-m", "0", "-b", str(BLOCK), "-J", "size=4", "-E", "nodiscard", image)
    with _logging(image, served, log), mounted(served / DISK, root), Recorded(root, seed, log, fault=fault) as loop:
        for number in range(TRAINERS):
            loop.cycle(("drawn", "checkpoint", "unlink")[number % 3], in_flight=number % 2 == 1)
        lines = loop.lines
    return Recording(image.read_bytes(), list(read_log(log)), lines)


def replay(directory: Path, recording: Recording, states: int, seed: int, *, fault: str | None = None) -> int:
    """Mount so many disks as power cuts may have left them, and resume on each; return how many acknowledged groups
    were looked for. Raises Violation, with the number of the state.
    """
    rng, looked_for = random.Random(seed), 0
    with contextlib.closing(start_server(fault)) as server:
        for state in range(states):
            try:
                looked_for += _try_state(directory, recording, state, rng.getrandbits(32), server)
            except Violation as violation:
                violation.add_note(f"state {state} of seed {seed}")
                raise
    return looked_for


def _try_state(directory: Path, recording: Recording, state: int, seed: int, server: Server) -> int:
    image, root, rng = directory / "image", directory / "resumed", random.Random(seed)
    place = rng.randint(recording.lines[0][0], recording.lines[-1][0])
    image.write_bytes(disk_after(recording, place, rng))
    model = recording.model_at(place)
    looked_for = len(model.serials)
    with mounted(image, root), KillLoop(root, seed, model=model, before=TRAINERS, server=server) as loop:
        loop.check_left_over()
        loop.cycle("append", in_flight=state % 2 == 1)
    return looked_for


def disk_after(recording: Recording, place: int, rng: random.Random) -> bytes:
    """Return a disk as a cut may have left it when its log had come to ``place``."""
    disk = bytearray(recording.blank)
    log = [entry for entry in recording.log if entry.end <= place]
    flushed = max((at for at, entry in enumerate(log) if isinstance(entry, Flush)), default=-1)
    for entry in log[: flushed + 1]:
        if isinstance(entry, Write):
            disk[entry.offset : entry.offset + len(entry.data)] = entry.data
    kept, unit = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0]), rng.choice([BLOCK, BLOCK, SECTOR])
    for entry in log[flushed + 1 :]:
        if isinstance(entry, Write):
            for start in range(0, len(entry.data), unit):
                if rng.random() < kept:
                    part = entry.data[start : start + unit]
                    disk[entry.offset + start : entry.offset + start + len(part)] = part
    return bytes(disk)


@contextlib.contextmanager
def _logging(image: Path, served: Path, log: Path) -> Iterator[None]:
    served.mkdir()
    script = Path(__file__).with_name("block_log.py")
    process = subprocess.Popen([sys.executable, script, image, served, log])
    try:
        deadline = time.monotonic() + 20
        while not (served / DISK).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError("the disk with a log was not served")
            time.sleep(0.02)
        yield
    finally:
        subprocess.run(["fusermount3", "-u", served], check=False, capture_output=True)
        process.wait(20)
