"""Small corruptors: of bytes, and of files."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "END", "SEED", "append", "copy_over", "delete", "flip", "flip_in", "junk", "mistype", "move", "replaced", "rewrite",
    "second_stream", "swap", "truncate", "zero",
]  # fmt: skip

SEED = 20260801
END = b"\xff\xff\xff\xff\0\0\0\0"


# -- of bytes


def flip(data: bytes, bit: int) -> bytes:
    """Flip one bit; bit 0 is the lowest of the first byte."""
    byte = bit // 8
    return data[:byte] + bytes([data[byte] ^ (1 << bit % 8)]) + data[byte + 1 :]


def truncate(data: bytes, length: int) -> bytes:
    return data[:length]


def zero(data: bytes, start: int, stop: int) -> bytes:
    """Zero a range, as a lost page or a sector that was never written."""
    return data[:start] + bytes(stop - start) + data[stop:]


def append(data: bytes, tail: bytes) -> bytes:
    return data + tail


def junk(size: int, seed: int = 1) -> bytes:
    """Bytes of no meaning, the same for each seed."""
    return random.Random(seed).randbytes(size)


def second_stream(data: bytes, other: bytes) -> bytes:
    """Put a whole stream behind the end marker."""
    return data + (b"" if data.endswith(END) else END) + other


def move(data: bytes, start: int, stop: int, to: int) -> bytes:
    """Copy a range over another place of the same file."""
    part = data[start:stop]
    return data[:to] + part + data[to + len(part) :]


def mistype(data: bytes, column: bytes = b"run_id") -> bytes:
    """Make a Parquet footer say another physical type of a column's chunks than of the column: Arrow 26 ends the
    process when such a chunk is asked for its statistics.
    """
    place = rb"\x15[\x04\x0c](?=\x19.{2,8}\x19\x18" + re.escape(bytes([len(column)]) + column) + rb")"
    changed, count = re.subn(place, b"\x15\x0e", data, flags=re.DOTALL)
    assert count
    return changed


# -- of files


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Put other bytes under the same name; the file is a new one, so that hard links keep the old."""
    data = change(path.read_bytes())
    path.unlink()
    path.write_bytes(data)


def flip_in(path: Path, place: int, bit: int = 0) -> None:
    """Flip a bit of one byte of a file; a negative place counts from the end."""
    rewrite(path, lambda data: flip(data, 8 * (place % len(data)) + bit))


def swap(one: Path, other: Path) -> None:
    """Swap two files."""
    third = one.with_name(".swap")
    os.rename(one, third)
    os.rename(other, one)
    os.rename(third, other)


def copy_over(source: Path, target: Path) -> None:
    """Put a copy of another file, of this bank or another, under a name."""
    data = source.read_bytes()
    target.unlink(missing_ok=True)
    target.write_bytes(data)


def delete(path: Path) -> None:
    path.unlink()


def replaced(place: str, kind: str) -> Callable[[Path, Path], None]:
    """Put something of another kind, or a link, in the place of a file; the second path is a directory outside."""

    def harm(root: Path, outside: Path) -> None:
        path = root / place
        if kind == "link":
            kept = outside / "moved"
            if path.exists() or path.is_symlink():
                shutil.move(path, kept)
            else:
                kept.write_bytes(b"")
            path.symlink_to(kept)
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        match kind:
            case "FIFO":
                os.mkfifo(path)
            case "socket":
                with socket.socket(socket.AF_UNIX) as made:
                    here = os.open(path.parent, os.O_RDONLY)
                    try:
                        made.bind(f"/proc/self/fd/{here}/{path.name}")
                    finally:
                        os.close(here)
            case "directory":
                path.mkdir()
                (path / "inside").write_text("not ours")
            case "file":
                path.write_bytes(b"not ours")
            case "dangling link":
                path.symlink_to(outside / "nowhere")
            case "loop":
                path.symlink_to(path.name)
            case "link to the root":
                path.symlink_to("/")
            case "device":
                path.symlink_to("/dev/zero")

    return harm
