"""The one place that creates, publishes, replaces and removes files, so that the order of syncs is right everywhere.

Create: write under tmp/, fsync the file, rename it to its name, fsync the directory of that name. Only then may
anything refer to it. Remove: unlink, then fsync the directory. A directory is made durable by an fsync of its parent.
Source: POSIX fsync(2) and rename(2); what ext4 and xfs lose without these was tried (power cuts on loop devices).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = [
    "clear_directory",
    "create_exclusive",
    "fsync_directory",
    "link",
    "make_directories",
    "make_directory",
    "publish",
    "remove",
    "replace",
    "repoint",
    "write_at",
]


def fsync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(paths: Iterable[Path]) -> None:
    """Make directories and whatever parents are missing, durably."""
    for path in paths:
        missing = []
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            fsync_directory(directory.parent)


def make_directory(path: Path) -> None:
    """Make a directory that must not exist, durably. Raises FileExistsError."""
    path.mkdir()
    fsync_directory(path.parent)


def publish(unfinished: Path, path: Path) -> None:
    """Give a fully written and fsync'd file its name, which no file has had before."""
    os.rename(unfinished, path)
    fsync_directory(path.parent)


def replace(path: Path, data: bytes, tmp: Path) -> None:
    """Replace a small file's content in one step; after a crash it is the old or the new, whole."""
    unfinished = tmp / f"{path.name}.{os.getpid()}"
    _write_new(unfinished, data, os.O_CREAT | os.O_TRUNC)
    publish(unfinished, path)


def create_exclusive(path: Path, data: bytes, tmp: Path) -> None:
    """Create a file that must not exist, with its content from the first moment. Raises FileExistsError."""
    unfinished = tmp / f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}"
    _write_new(unfinished, data, os.O_CREAT | os.O_EXCL)
    try:
        os.link(unfinished, path)
    finally:
        os.unlink(unfinished)
    fsync_directory(path.parent)


def link(source: Path, target: Path) -> None:
    """Give a file a second name. The caller fsyncs the directory."""
    os.link(source, target, follow_symlinks=False)


def repoint(path: Path, target: str, tmp: Path) -> None:
    """Point a symbolic link somewhere else in one step."""
    unfinished = tmp / f"{path.name}.{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    os.symlink(target, unfinished)
    publish(unfinished, path)


def remove(paths: Iterable[Path], directory: Path) -> None:
    """Unlink files of one directory, durably; those already gone are no error."""
    for path in paths:
        path.unlink(missing_ok=True)
    fsync_directory(directory)


def clear_directory(directory: Path) -> None:
    """Remove a directory of files, even while somebody else still creates some; one already gone is no error."""
    while directory.is_dir():
        try:
            for entry in list(directory.iterdir()):
                entry.unlink(missing_ok=True)
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def write_at(descriptor: int, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
    """Write all parts one after another from ``offset`` on, however short each write of the system is."""
    views = [memoryview(part) for part in parts if len(part)]
    while views:
        written = os.pwritev(descriptor, views[:_MAX_PARTS], offset)
        if not written:
            raise OSError(errno.EIO, "the system wrote nothing and said nothing")
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


_MAX_PARTS = 512  # below IOV_MAX, which is 1,024 on Linux


def _write_new(path: Path, data: bytes, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | flags, 0o666)
    try:
        write_at(descriptor, [data], 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
