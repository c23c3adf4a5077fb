"""A disk that keeps a log: one file, served through FUSE, to be the backing of a loop device.

Run as ``block_log.py IMAGE MOUNT LOG``: MOUNT gets the file ``disk``, which holds what IMAGE held in the beginning.
Each write of it, and each flush, goes to LOG in the order in which they came; IMAGE is not touched. Lies in a process
of its own, since the kernel waits for it.
"""

from __future__ import annotations

import errno
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DISK", "Flush", "Write", "read_log"]

DISK = "disk"
HEADER = struct.Struct("<qq")
"""Offset and length of a write, whose data follows; offset −1 is a flush."""


@dataclass(frozen=True)
class Write:
    end: int
    """Where the log stood behind it."""
    offset: int
    data: bytes


@dataclass(frozen=True)
class Flush:
    end: int


def read_log(path: Path) -> Iterator[Write | Flush]:
    """Yield what is in a log. Its last entry may be cut short: then it is left out."""
    log, place = path.read_bytes(), 0
    while place + HEADER.size <= len(log):
        offset, length = HEADER.unpack_from(log, place)
        place += HEADER.size
        if offset < 0:
            yield Flush(place)
        elif place + length <= len(log):
            yield Write(place + length, offset, log[place : place + length])
        place += length


class Served:
    """What FUSE asks for."""

    use_ns = True  # of times, which nobody sets

    def __init__(self, image: Path, log: Path) -> None:
        self._data = bytearray(image.read_bytes())
        self._log = log.open("wb", buffering=0)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
        if path == f"/{DISK}":
            return {"st_mode": stat.S_IFREG | 0o600, "st_nlink": 1, "st_size": len(self._data)}
        raise OSError(errno.ENOENT, path)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self._data[offset : offset + size])

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._log.write(HEADER.pack(offset, len(data)) + data)
        self._data[offset : offset + len(data)] = data
        return len(data)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._log.write(HEADER.pack(-1, 0))
        return 0


def main() -> None:
    import mfusepy  # not at the top: who only reads logs needs no libfuse

    image, mount, log = map(Path, sys.argv[1:])

    class Operations(Served, mfusepy.Operations):  # type: ignore[misc]  # mfusepy is not typed for subclasses
        pass

    mfusepy.FUSE(Operations(image, log), str(mount), foreground=True, nothreads=True)


if __name__ == "__main__":
    main()
