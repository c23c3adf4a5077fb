"""The order of system calls that makes files durable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arrowbank.durable import files

CALLS = ("open", "pwritev", "fsync", "rename", "link", "symlink", "unlink", "mkdir", "rmdir")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every call that changes the disk, as "name target", in order."""
    made: list[str] = []

    def recorder(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            target = (
                os.readlink(f"/proc/self/fd/{args[0]}")
                if isinstance(args[0], int)
                else os.fspath(args[-1 if name in ("rename", "link", "symlink") else 0])
            )
            if name != "open":
                made.append(f"{name} {Path(target).name}")
            return real(*args, **kwargs)

        return recorded

    for name in CALLS:
        monkeypatch.setattr(os, name, recorder(name, getattr(os, name)))
    return made


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path / "home" / "FILE", tmp_path / "tmp"


def test_replacing_syncs_the_file_then_renames_then_syncs_the_directory(
    place: tuple[Path, Path], calls: list[str]
) -> None:
    path, tmp = place
    unfinished = f"FILE.{os.getpid()}"
    files.replace(path, b"content", tmp)
    steps = [f"unlink {unfinished}", f"pwritev {unfinished}", f"fsync {unfinished}", "rename FILE", "fsync home"]
    assert calls == steps
    assert path.read_bytes() == b"content"


def test_replacing_writes_through_no_link_that_is_there_already(place: tuple[Path, Path]) -> None:
    path, tmp = place
    precious = path.parent / "precious"
    precious.write_bytes(b"mine")
    (tmp / f"FILE.{os.getpid()}").symlink_to(precious)
    files.replace(path, b"content", tmp)
    assert (precious.read_bytes(), path.read_bytes()) == (b"mine", b"content")


def test_replacing_leaves_the_old_file_when_it_fails(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, tmp = place
    files.replace(path, b"old", tmp)

    def fail(*_: Any) -> None:
        raise OSError(5, "planted")

    for name in ("pwritev", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="planted"):
                files.replace(path, b"new", tmp)
        assert path.read_bytes() == b"old"
    files.replace(path, b"new", tmp)
    assert path.read_bytes() == b"new"


def test_an_exclusive_file_is_whole_and_synced_before_it_has_its_name(
    place: tuple[Path, Path], calls: list[str]
) -> None:
    path, tmp = place
    files.create_exclusive(path, b"mine", tmp)
    names = [call.split()[0] for call in calls]
    assert names == ["pwritev", "fsync", "link", "unlink", "fsync"]
    assert calls[2] == "link FILE"
    assert calls[-1] == "fsync home"
    with pytest.raises(FileExistsError):
        files.create_exclusive(path, b"yours", tmp)
    assert (path.read_bytes(), list(tmp.iterdir())) == (b"mine", [])


def test_a_link_is_repointed_in_one_step(place: tuple[Path, Path], calls: list[str]) -> None:
    path, tmp = place
    files.repoint(path, "one", tmp)
    calls.clear()
    files.repoint(path, "two", tmp)
    assert [call for call in calls if not call.startswith("unlink")] == [
        f"symlink FILE.{os.getpid()}",
        "rename FILE",
        "fsync home",
    ]
    assert os.readlink(path) == "two"


def test_removing_unlinks_then_syncs_the_directory_and_forgives_what_is_gone(
    place: tuple[Path, Path], calls: list[str]
) -> None:
    path, _ = place
    path.touch()
    files.remove([path, path.with_name("GONE")], path.parent)
    assert calls == ["unlink FILE", "unlink GONE", "fsync home"]
    assert not path.exists()


def test_directories_are_synced_into_their_parents(tmp_path: Path, calls: list[str]) -> None:
    files.make_directories([tmp_path / "a" / "b", tmp_path / "a"])
    made = ["mkdir a", f"fsync {tmp_path.name}", "mkdir b", "fsync a"]
    assert calls == [*made, f"fsync {tmp_path.name}"]  # and of one that is there: who made it may not have got to it


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: real(fd, b"".join(parts)[:3], at))
    descriptor = os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)
    parts = [b"", b"a", memoryview(b"bcdefg"), bytearray(b"hi"), b"jklmnopq", b""]
    files.write_at(descriptor, parts, 5)
    os.close(descriptor)
    assert (tmp_path / "f").read_bytes() == bytes(5) + b"abcdefghijklmnopq"


def test_more_parts_than_the_system_takes_at_once_are_all_written(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)
    files.write_at(descriptor, [bytes([number % 256]) * 3 for number in range(3000)], 0)
    os.close(descriptor)
    assert (tmp_path / "f").stat().st_size == 9000


def test_a_system_that_writes_nothing_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        files.write_at(0, [b"x"], 0)


def test_a_directory_is_cleared_with_what_appears_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "s0001"
    directory.mkdir()
    (directory / "one").touch()
    rmdir = os.rmdir
    late = iter([True, False])

    def racing(path: Any) -> None:
        if next(late):
            (directory / "two").touch()
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", racing)
    files.clear_directory(directory)
    assert not directory.exists()
    files.clear_directory(directory)
