"""The one place that creates, publishes, replaces and removes files, so that the order of syncs is right everywhere.

Create: write under tmp/, fsync the file, link it to its name, fsync the directory of that name. Only then may anything
refer to it. Replace: the same, with a rename in the place of the link. Remove: unlink, then fsync the directory. A
directory is made durable by an fsync of its parent.
Source: POSIX fsync(2) and rename(2); what ext4 and xfs lose without these was tried (power cuts on loop devices).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from arrowbank.errors import CorruptionError

__all__ = [
    "begin_directory",
    "clear_directory",
    "create",
    "create_exclusive",
    "discard",
    "empty_directory",
    "fsync_directory",
    "fsync_file",
    "link",
    "make_directories",
    "open_regular",
    "publish",
    "publish_directory",
    "read_small",
    "reading",
    "remove",
    "remove_directory",
    "rename",
    "replace",
    "repoint",
    "sync",
    "sync_data",
    "write_at",
]


def create(path: Path) -> int:
    """Create a file that must not exist, to be written under tmp/; return its descriptor. Raises FileExistsError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def open_regular(path: Path) -> int:
    """Open a file for reading: not a link, nor a FIFO, which would wait for somebody to write.

    Raises CorruptionError, FileNotFoundError, OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a socket or a device
            raise
        raise CorruptionError(path, "not a regular file", hint="Move it out of the bank") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptionError(path, "not a regular file", hint="Move it out of the bank")
    return descriptor


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """As ``open_regular``, closed in the end."""
    descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> int:
    """Make durable what somebody has written to a file, who may not have got to it himself; return its bytes."""
    with reading(path) as descriptor:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size


def sync(descriptor: int) -> None:
    """Make an open file durable, which has no name yet but that under tmp/."""
    os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Make what was written to an open file durable, and its size. Raises OSError, also when the file has no name
    any more: what nobody will find again is not durable.
    """
    os.fdatasync(descriptor)
    if not os.fstat(descriptor).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "the file was removed while it was being written")


def discard(path: Path) -> None:
    """Take away what was never published. Not durable: what a crash leaves under tmp/ is taken away later."""
    path.unlink(missing_ok=True)


def fsync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(paths: Iterable[Path]) -> None:
    """Make directories and whatever parents are missing, durably.

    Also one that is there already: who made it may have been killed before its fsync.
    """
    parents: dict[Path, bool] = {}
    for path in paths:
        missing = []
        ancestor = path
        while not ancestor.is_dir():
            missing.append(ancestor)
            ancestor = ancestor.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            fsync_directory(directory.parent)
        if not missing:
            parents[path.parent] = True
    for parent in parents:
        with contextlib.suppress(PermissionError):  # the directory that a bank lies in may be closed to us
            fsync_directory(parent)


def begin_directory(unfinished: Path) -> None:
    """Make an empty directory under tmp/, to be published."""
    clear_directory(unfinished)  # of an attempt that failed
    unfinished.mkdir()


def publish_directory(unfinished: Path, path: Path) -> None:
    """Give a directory of files that was made under tmp/ its name. Raises OSError where a directory of files is."""
    fsync_directory(unfinished)
    _put(unfinished, path)


def publish(unfinished: Path, path: Path) -> None:
    """Give a fully written and fsync'd file its name, which no file has. Raises FileExistsError rather than replace it.

    Not by renaming, which would replace. A crash in between leaves the file under tmp/ as well, where it is taken away.
    """
    os.link(unfinished, path, follow_symlinks=False)
    os.unlink(unfinished)
    fsync_directory(path.parent)


def rename(path: Path, target: Path) -> None:
    """Move whatever stands at ``path``, a link itself, to a name that nothing has, in the same file system. Durably."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "something has that name", os.fspath(target))
    _put(path, target)
    fsync_directory(path.parent)


def replace(path: Path, data: bytes | memoryview, tmp: Path) -> None:
    """Replace a small file's content in one step; after a crash it is the old or the new, whole."""
    unfinished = tmp / f"{path.name}.{os.getpid()}"
    discard(unfinished)  # of an attempt that failed
    _write_new(unfinished, data)
    _put(unfinished, path)


def create_exclusive(path: Path, data: bytes, tmp: Path) -> None:
    """Create a file that must not exist, with its content from the first moment. Raises FileExistsError."""
    unfinished = tmp / f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}"
    _write_new(unfinished, data)
    try:
        publish(unfinished, path)
    except OSError:
        discard(unfinished)
        raise


def link(source: Path, target: Path) -> None:
    """Give a file a second name. The caller fsyncs the directory."""
    os.link(source, target, follow_symlinks=False)


def repoint(path: Path, target: str, tmp: Path) -> None:
    """Point a symbolic link somewhere else in one step."""
    unfinished = tmp / f"{path.name}.{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    os.symlink(target, unfinished)
    _put(unfinished, path)


def remove(paths: Iterable[Path], directory: Path) -> None:
    """Unlink files of one directory, durably; those already gone are no error."""
    for path in paths:
        path.unlink(missing_ok=True)
    fsync_directory(directory)


def remove_directory(path: Path, tmp: Path) -> None:
    """Remove a directory of files by way of tmp/: who has lost tmp/ meanwhile cannot hit what has the name by now.

    Not durable: what a crash brings back is removed again by the next open.
    """
    gone = tmp / f"{path.name}.gone"
    clear_directory(gone)  # of an attempt that failed
    os.rename(path, gone)
    clear_directory(gone)


def clear_directory(directory: Path) -> None:
    """Remove a directory, even while somebody else still creates files in it; one already gone is no error."""
    while directory.is_dir():
        try:
            empty_directory(directory)
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def empty_directory(directory: Path) -> None:
    """Remove what is in a directory, also beside others who remove from it; links are not followed."""
    for entry in list(directory.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # whoever made it has taken it away meanwhile
            if stat.S_ISDIR(entry.lstat().st_mode):
                clear_directory(entry)
            else:
                entry.unlink()


def read_small(path: Path, limit: int) -> bytes:
    """Read a whole file, of at most ``limit`` bytes. Raises CorruptionError for a larger one, or none at all."""
    with reading(path) as descriptor:
        if os.fstat(descriptor).st_size > limit:
            raise CorruptionError(path, f"larger than {limit:,} bytes, which arrowbank never makes it")
        parts, place = [], 0
        while part := os.pread(descriptor, limit, place):
            parts.append(part)
            place += len(part)
        return b"".join(parts)


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


def _put(unfinished: Path, path: Path) -> None:
    os.rename(unfinished, path)
    fsync_directory(path.parent)


def _write_new(path: Path, data: bytes | memoryview) -> None:
    descriptor = create(path)  # never what is there already: a stranger's bank may have a link under that name
    try:
        write_at(descriptor, [data], 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
