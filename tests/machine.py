"""What some tests need of the machine: root, mounts, strace; and a place in memory.

Where that is not to be had they are skipped, and say why. With ARROWBANK_TESTS_REQUIRE=all, as on a machine that is
there to run all of them, they fail instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

__all__ = [
    "directory_in_memory",
    "in_memory",
    "missing",
    "require_compiler",
    "require_fuse",
    "require_mounts",
    "require_root",
    "require_strace",
]

REQUIRE = "ARROWBANK_TESTS_REQUIRE"


def in_memory() -> Path | None:
    """A directory without a disk behind it, where there is one: thousands of syncs cost nothing there."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else None


@contextmanager
def directory_in_memory() -> Iterator[Path]:
    """A new directory there, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="arrowbank-", dir=in_memory()) as directory:
        yield Path(directory)


def missing(what: str) -> NoReturn:
    """Skip a test for want of something, or fail where everything is to be there."""
    if os.environ.get(REQUIRE) == "all":
        pytest.fail(f"{what} ({REQUIRE}=all)")
    pytest.skip(what)


def require_root(why: str) -> None:
    if os.geteuid() != 0:
        missing(f"only root {why}")


def require_mounts(*file_systems: str) -> None:
    """Small disks are mounted, to be filled and broken: a tmpfs, and ext4, or others, in a file."""
    for file_system in file_systems or ("ext4",):
        trouble = _trouble_with_mounts(file_system)
        if trouble:
            missing(trouble)


def require_strace() -> None:
    """strace makes system calls fail."""
    trouble = _trouble_with_strace()
    if trouble:
        missing(trouble)


def require_compiler() -> None:
    """A small library in C is put between the bank and libc."""
    if shutil.which("cc") is None:
        missing("no cc here: install a C compiler")


@cache
def _trouble_with_mounts(file_system: str) -> str:
    if os.geteuid() != 0:
        return "only root can mount the small disks that are filled here"
    make = f"mkfs.{file_system}"
    for program in ("mount", "umount", make):
        if shutil.which(program) is None:
            return f"no {program} here: install it"
    with tempfile.TemporaryDirectory(prefix="arrowbank-") as directory:
        place, image = Path(directory, "disk"), Path(directory, "image")
        place.mkdir()
        image.write_bytes(b"")
        os.truncate(image, 320 << 20)  # the least that xfs wants; blocks that nobody writes take no room
        for command in ([make, "-q", image], ["mount", "-o", "loop", image, place], ["umount", place]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"disks cannot be mounted here: {done.stderr.strip()}"
    return ""


def require_fuse() -> None:
    """A disk that keeps a log is served through FUSE."""
    trouble = _trouble_with_fuse()
    if trouble:
        missing(trouble)


@cache
def _trouble_with_fuse() -> str:
    if not os.access("/dev/fuse", os.W_OK):
        return "no access to /dev/fuse here"
    if shutil.which("fusermount3") is None:
        return "no fusermount3 here: install fuse3"
    done = subprocess.run([sys.executable, "-c", "import mfusepy"], capture_output=True, text=True, check=False)
    return f"no mfusepy here: {done.stderr.strip()}" if done.returncode else ""


@cache
def _trouble_with_strace() -> str:
    if shutil.which("strace") is None:
        return "no strace here: install it"
    done = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return f"strace may not trace here: {done.stderr.strip()}" if done.returncode else ""
