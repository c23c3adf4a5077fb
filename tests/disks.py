"""Small disks that can be filled, cut off and mounted again."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["Disk", "ext4", "in_image", "mounted", "remount", "run_program", "tmpfs"]


class Disk:
    """A mounted file system that is small enough to be filled."""

    def __init__(self, root: Path, image: Path | None = None) -> None:
        self.root = root
        self.image = image
        self.is_full = False
        self._ballast = root / "ballast"

    def fill(self, spare: int = 0) -> None:
        """Take every block but ``spare`` × 4 KiB, to the last one."""
        self.free()
        self.is_full = True
        descriptor = os.open(self._ballast, os.O_WRONLY | os.O_CREAT)
        kept = os.open(self.root / "spare", os.O_WRONLY | os.O_CREAT)
        try:
            if spare:
                os.posix_fallocate(kept, 0, spare * 4096)
            end = 0
            for size in (1 << 20, 1 << 16, 4096, 1024):
                with contextlib.suppress(OSError):
                    while True:
                        os.posix_fallocate(descriptor, end, size)
                        end += size
        finally:
            os.close(descriptor)
            os.close(kept)
            os.unlink(self.root / "spare")

    def fill_inodes(self, spare: int = 0) -> None:
        """Take every inode but ``spare``; blocks stay free."""
        self.free()
        self.is_full = True
        self._ballast.mkdir()
        made: list[Path] = []
        with contextlib.suppress(OSError):
            while True:
                path = self._ballast / str(len(made))
                os.close(os.open(path, os.O_CREAT))
                made.append(path)
        for path in made[len(made) - spare :]:
            path.unlink()

    def free(self) -> None:
        """Take the ballast away."""
        if self._ballast.is_dir():
            for path in self._ballast.iterdir():
                path.unlink()
            self._ballast.rmdir()
        else:
            self._ballast.unlink(missing_ok=True)
        self.is_full = False

    def cut(self, *, flush_log: bool) -> None:
        """Cut its power: from now on nothing reaches the disk, and every call that would write or sync fails.

        The journal of the file system is written out before, or left as it is.
        Source: ``FS_IOC_SHUTDOWN`` of Linux, with its flags LOGFLUSH and NOLOGFLUSH.
        """
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 1 if flush_log else 2))
        finally:
            os.close(descriptor)

    def mount_again(self) -> None:
        assert self.image is not None
        run_program("umount", self.root)
        run_program("mount", "-o", "loop", self.image, self.root)


@contextlib.contextmanager
def tmpfs(root: Path, *, inodes: int = 400) -> Iterator[Disk]:
    """A tmpfs of 4 MiB."""
    root.mkdir()
    run_program("mount", "-t", "tmpfs", "-o", f"size=4m,nr_inodes={inodes}", "tmpfs", root)
    try:
        yield Disk(root)
    finally:
        _unmount(root)


def ext4(root: Path) -> contextlib.AbstractContextManager[Disk]:
    """An ext4 of 16 MiB in a file beside ``root``."""
    return in_image(root, 16, "mkfs.ext4", "-q", "-m", "0", "-N", "512")


@contextlib.contextmanager
def in_image(root: Path, size_mib: int, *make: str) -> Iterator[Disk]:
    """A file system that the command ``make`` makes in a file beside ``root``."""
    image = root.with_suffix(".image")
    with image.open("wb") as file:
        os.truncate(file.fileno(), size_mib << 20)
    run_program(*make, image)
    try:
        with mounted(image, root):
            yield Disk(root, image)
    finally:
        image.unlink()


@contextlib.contextmanager
def mounted(image: Path, root: Path) -> Iterator[None]:
    """A directory, made for it, on which the file system in a file is mounted."""
    root.mkdir()
    try:
        run_program("mount", "-o", "loop", image, root)
        try:
            yield
        finally:
            _unmount(root)
    finally:
        root.rmdir()


def remount(disk: Disk, how: str) -> None:
    run_program("mount", "-o", f"remount,{how}", disk.root)


def run_program(*command: str | Path) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.fail(f"no program {command[0]}: install it")
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{' '.join(map(str, command))} failed: {error.stderr.strip()}")


def _unmount(root: Path) -> None:
    gc.collect()  # groups that were handed out hold mappings
    if subprocess.run(["umount", root], capture_output=True).returncode:
        run_program("umount", "-l", root)
